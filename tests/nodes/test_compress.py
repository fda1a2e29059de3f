"""Compressed gradients on nodes: how far they come, and what is left of a node that is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.nodes import local
from tests.nodes.test_nodes import node_of, optimizer
from tests.workloads import mlp

TWO_BIT = {"type": "2bit", "threshold": 0.05}


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.5)


@pytest.mark.rows
@pytest.mark.slow
@pytest.mark.parametrize("compress", [TWO_BIT, "fp16", "bf16"])
def test_steps_come_about_as_far_and_go_on_from_a_state(compress: Any) -> None:
    case = mlp(samples=96)
    data = case.inputs, case.targets
    with optimizer(case, 2, optimizer=momentum, compress=compress) as opt:
        first = opt.step(*data)
        for _ in range(20):
            opt.step(*data)
        state = copy.deepcopy(opt.state_dict())
        found = [opt.step(*data) for _ in range(3)]
        opt.load_state_dict(state)
        again = [opt.step(*data) for _ in range(3)]
        assert torch.allclose(torch.tensor(found), torch.tensor(again), rtol=2e-2)
        assert found[-1] < first


@pytest.mark.nightly
def test_what_a_node_that_is_lost_had_left_is_told() -> None:
    local.end()
    case = mlp(samples=96)
    data = case.inputs, case.targets
    with optimizer(case, 2, optimizer=momentum, compress=TWO_BIT, max_restarts=8) as opt:
        opt.step(*data)
        node_of(opt.workers[0].pid).kill()
        with pytest.warns(RuntimeWarning, match="was lost together with what compression had left of its gradients"):
            for _ in range(3):
                loss = opt.step(*data)
        assert loss < 2.0
    local.end()
