"""What the user changes between steps is seen, one change after the other: `test_model.py` has any sequences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from batchopt import BatchOptimizer
from tests.changes import CHANGES, World
from tests.test_model import One


@pytest.fixture
def ones() -> Iterator[list[One]]:
    """The same program on several numbers of workers, for a criterion and for a loss function."""
    found = [One(workers, False, with_loss_fn, "sgd") for workers in (1, 3) for with_loss_fn in (False, True)]
    yield found
    for one in found:
        one.world.undo_ambient()
        one.opt.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*idle:UserWarning")
def test_each_change_is_seen(ones: list[One]) -> None:
    for name in CHANGES:
        for one in ones:
            if name != "sparse buffer in place" or one.world.module.mix.is_sparse:
                CHANGES[name](one.world, 1.75)
            if name in ("hook of all modules", "default dtype"):
                break  # of all modules, or of torch
        for one in ones:
            one.load("all")
            if one.is_plain():
                found = one.opt.evaluate().item()
                expected = one.f()
                assert found == pytest.approx(expected.item(), rel=1e-9), name
                torch.testing.assert_close(one.opt.grad_parameters, one.gradient(expected), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_hook_that_a_parameter_is_given_later_is_refused(parallelize: int) -> None:
    world = World()
    with BatchOptimizer(world.module, world.criterion, optimizer=None, parallelize=parallelize) as opt:
        opt.load(world.inputs, world.targets)
        handle = world.module.first.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        calls = {"load": lambda: opt.load(world.inputs, world.targets), "evaluate": opt.evaluate, "loss": opt.loss}
        for call in calls.values():
            with pytest.raises(ValueError, match=r"parameter 'first\.weight' has a hook"):
                call()
        opt.parameters.mul_(1.0)  # what evaluates nothing is possible
        opt.state_dict()
        handle.remove()
        for call in calls.values():
            call()
        opt.loss().backward()  # type: ignore[no-untyped-call]


def test_a_program_that_has_not_changed_is_not_sent_again() -> None:
    one = One(2, False, False, "sgd")
    with one.opt as opt:
        one.load("all")
        first = opt.run_on_workers(lambda worker: id(worker.module))
        one.world.module(one.x)
        one.world.module.shift.data.add_(1)
        one.world.module.beta = float("1.0")  # another object, as large
        one.load("all")
        assert opt.run_on_workers(lambda worker: id(worker.module)) == first
        one.world.module.beta = 2.0
        one.load("all")
        assert opt.run_on_workers(lambda worker: id(worker.module)) != first
