"""Compressed gradients on nodes: how far they come, and what is left of a node that is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from batchopt import BatchOptimizer
from tests.nodes import local
from tests.nodes.test_nodes import node_of
from tests.workloads import mlp

pytestmark = pytest.mark.timeout(120)
TWO_BIT = {"type": "2bit", "threshold": 0.05}


def optimizer_of(parallelize: int, compress: Any, **options: Any) -> tuple[BatchOptimizer, Any]:
    """SGD with momentum, and its data."""
    case = mlp(samples=96)
    opt = BatchOptimizer(
        case.module,
        case.criterion,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5),
        parallelize=parallelize,
        compress=compress,
        backend="local nodes",
        chunk_size=4,
        **options,
    )
    return opt, (case.inputs, case.targets)


@pytest.mark.slow
@pytest.mark.parametrize("compress", [TWO_BIT, *(pytest.param(c, marks=pytest.mark.slow) for c in ("fp16", "bf16"))])
def test_steps_come_about_as_far_and_go_on_from_a_state(compress: Any) -> None:
    opt, data = optimizer_of(2, compress)
    with opt:
        first = opt.step(*data)
        for _ in range(20):
            opt.step(*data)
        state = copy.deepcopy(opt.state_dict())
        found = [opt.step(*data) for _ in range(3)]
        opt.load_state_dict(state)
        again = [opt.step(*data) for _ in range(3)]
        assert torch.allclose(torch.tensor(found), torch.tensor(again), rtol=2e-2)
        assert found[-1] < first


@pytest.mark.slow
def test_what_a_node_that_is_lost_had_left_is_told() -> None:
    local.end()
    opt, data = optimizer_of(2, TWO_BIT, max_restarts=8)
    with opt:
        opt.step(*data)
        node_of(opt.workers[0].pid).kill()
        with pytest.warns(RuntimeWarning, match="was lost with what compression had left of its gradients"):
            for _ in range(3):
                loss = opt.step(*data)
        assert loss < 2.0
    local.end()
