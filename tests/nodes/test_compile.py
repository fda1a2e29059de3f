"""Compiled evaluations on nodes: each machine compiles, and all have the bits of one process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, CompileError
from tests.nodes import local
from tests.nodes.disturbance import steps
from tests.nodes.test_nodes import node_of

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
    pytest.mark.xdist_group("compiled nodes"),  # which share what they have compiled
]


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of what is compiled, which nodes inherit; so there are new ones."""
    with pytest.MonkeyPatch.context() as patch:
        found = tmp_path_factory.mktemp("compiled")
        patch.setenv("BATCHOPT_CACHE_DIR", str(found))
        local.end()
        yield found
        local.end()


@pytest.mark.nightly
def test_bits_are_those_of_one_process_also_after_a_node_was_killed() -> None:
    def after(opt: BatchOptimizer, step: int) -> None:
        assert "compiled (inductor" in repr(opt)
        if step == 0:
            node_of(opt.workers[0].pid).kill()

    options: dict[str, Any] = {"count": 3, "chunk_size": 8}
    expected = steps("serial", 1, compile=True, **options)
    assert expected != steps("serial", 1, **options)
    assert steps("local nodes", 3, compile=True, after=after, **options) == expected


@pytest.mark.slow
def test_a_changed_program_is_compiled_again_or_said_not_to_be() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(24, 3, dtype=torch.float64), torch.rand(24, 1, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    options: dict[str, Any] = {"optimizer": None, "backend": "local nodes", "parallelize": 2}
    with BatchOptimizer(net, nn.MSELoss(), compile="auto", **options) as opt:
        for activation in (nn.Tanh(), nn.Sigmoid()):
            net[1] = activation
            opt.load(x, y)
            for _ in range(3):
                expected = nn.functional.mse_loss(net(x), y).item()
                assert opt.evaluate().item() == pytest.approx(expected, rel=1e-12)
    net[1] = nn.Tanh()
    net[0].register_forward_hook(lambda module, inputs, output: output)
    with BatchOptimizer(net, nn.MSELoss(), compile=True, **options) as opt:
        opt.load(x, y)
        with pytest.raises(CompileError, match="hooks"):
            opt.evaluate()
