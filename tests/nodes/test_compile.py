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
from tests.nodes.test_nodes import node_of
from tests.workloads import mlp

pytestmark = [
    pytest.mark.timeout(240),
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


def steps(backend: str, parallelize: int, count: int = 3, **options: Any) -> tuple[str, str]:
    """The fingerprint of some steps of L-BFGS, with dropout, and what is said in the end."""
    case = mlp(samples=96)
    torch.manual_seed(1)
    module = nn.Sequential(case.module, nn.Dropout(0.2), nn.Linear(4, 4).double())
    given = {"chunk_size": 8, "compile": True, **options}
    with BatchOptimizer(module, case.criterion, parallelize=parallelize, backend=backend, **given) as opt:
        for step in range(count):
            if step == 1 and backend == "local nodes":
                node_of(opt.workers[0].pid).kill()
            opt.step(case.inputs, case.targets)
        return opt.fingerprint(), repr(opt)


@pytest.mark.slow
def test_bits_are_those_of_one_process_also_after_a_node_was_killed() -> None:
    (expected, _), (eager, _) = steps("serial", 1), steps("serial", 1, compile=False)
    assert expected != eager
    for workers in (1, 2, 3):
        found, said = steps("local nodes", workers)
        assert found == expected
        assert "compiled (inductor" in said


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
