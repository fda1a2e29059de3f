"""What the user changes between steps is sent, and nothing else; that each change is seen, `test_model.py` and the
contract say."""

from __future__ import annotations

import pytest

from batchopt import BatchOptimizer
from tests.changes import World
from tests.test_model import One


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
