"""What collate functions make is kept from the second evaluation on, and is what they would make each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.building import loaded

ITEMS = [(torch.tensor([float(n)]), torch.tensor([0.0])) for n in range(4)]


class Graphs:
    """As a library would have one: tensors in attributes, which users replace."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.same, self.names = x, x, ["a"]


def graphs(x: torch.Tensor) -> Graphs:
    return Graphs(x.requires_grad_())


def set_attribute(made: Graphs) -> None:
    made.x = made.x * 2
    made.names.append("b")


def require_grad(made: Graphs) -> None:
    made.x.grad = torch.ones(4, 1)


def in_place(made: Graphs) -> None:
    with torch.no_grad():
        made.x.mul_(2)


def past_the_counter(made: Graphs) -> None:
    made.x.data.mul_(2)


def keep(made: Any) -> None:
    """Does nothing to it."""


def collated(make: Callable[[torch.Tensor], Any], use: Callable[[Any], object] = keep) -> int:
    """How often what `make` makes of the inputs is made in five evaluations of one step, each of which uses it; without
    what the audits of evaluations 1, 2 and 4 make for themselves."""
    times, seen = [], []

    def collate(items: list[Any]) -> Any:
        times.append(1)
        return make(torch.stack([x for x, _ in items])), torch.stack([y for _, y in items])

    def loss(module: nn.Module, made: Any, targets: torch.Tensor) -> torch.Tensor:
        if isinstance(made, Graphs):
            assert made.x is made.same and made.x.is_leaf and made.x.requires_grad
            assert (made.x.flatten().tolist(), made.x.grad, made.names) == ([0, 1, 2, 3], None, ["a"])
            seen.append(made.x)
        use(made)
        found: torch.Tensor = module(torch.ones(4, 1)).mean()
        return found

    inputs, targets = ([*column] for column in zip(*ITEMS, strict=True))
    with loaded(nn.Linear(1, 1), None, inputs, targets, loss_fn=loss, collate_fn=collate, check_cut=False) as opt:
        for _ in range(5):
            opt.evaluate()
    assert len({id(x) for x in seen}) == len(seen)
    return len(times) - 3 * 2


@pytest.mark.parametrize("use, times", [(set_attribute, 2), (require_grad, 2), (in_place, 5), (past_the_counter, 5)])
def test_a_piece_is_collated_twice_and_then_kept_unless_its_tensors_are_written(
    use: Callable[[Any], object], times: int
) -> None:
    """What is done to the structure is not seen by the next."""
    assert collated(graphs, use) == times


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.ones(3).to_sparse(),
        lambda x: nn.Parameter(torch.ones(3)),
        lambda x: torch.ones(3, requires_grad=True) * 2,
        lambda x: (line for line in "ab"),
    ],
    ids=["sparse", "a parameter", "a result of autograd", "a generator"],
)
def test_what_nobody_can_watch_is_collated_each_time(make: Callable[[torch.Tensor], Any]) -> None:
    assert collated(make) == 5


@pytest.mark.parametrize(
    "make",
    [lambda x: torch.rand(3), lambda x: torch.tensor(np.random.random()), lambda x: torch.tensor(random.random())],
    ids=["torch", "NumPy", "Python"],
)
def test_what_draws_is_kept(make: Callable[[torch.Tensor], Any]) -> None:
    """Draws of a forward do not depend on whether its samples were collated."""
    assert collated(make) == 2
