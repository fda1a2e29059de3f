"""Whatever the user changes between steps, f is what plain torch computes in this process at that moment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt import BatchOptimizer
from tests.changes import CHANGES, World


class Bench:
    """The same program on several numbers of workers, for a criterion and for a loss function."""

    def __init__(self, backend: str, workers: tuple[int, ...]) -> None:
        self.made: list[tuple[World, BatchOptimizer, bool]] = []
        for parallelize in workers:
            for with_loss_fn in (False, True):
                world = World()
                what = {"loss_fn": world.loss} if with_loss_fn else {"criterion": world.criterion}
                opt = BatchOptimizer(
                    world.module,
                    **what,
                    optimizer=None,
                    parallelize=parallelize,
                    backend=backend,
                )
                self.made.append((world, opt, with_loss_fn))

    def change(self, name: str, number: float) -> None:
        """Change it everywhere; a change of all modules or of torch's settings once."""
        for world, _, _ in self.made:
            CHANGES[name](world, number)
            if name in ("hook of all modules", "default dtype"):
                break

    def check(self) -> None:
        """Each evaluates to what plain torch computes."""
        for world, opt, with_loss_fn in self.made:
            if with_loss_fn and not weighs_all_alike(world):
                continue
            loss, gradient = world.reference(with_loss_fn)
            opt.load(world.inputs, world.targets)
            for _ in range(2):
                assert opt.evaluate().item() == pytest.approx(loss, rel=1e-9)
                torch.testing.assert_close(opt.grad_parameters, gradient, rtol=1e-9, atol=1e-11)

    def close(self) -> None:
        for world, opt, _ in self.made:
            world.undo_ambient()
            opt.close()


def weighs_all_alike(world: World) -> bool:
    """Whether the mean in the loss function is over samples: else it may not be cut."""
    weight = world.criterion.weight
    assert weight is not None
    alike = bool((weight == weight[0]).all()) and world.criterion.ignore_index not in world.targets
    return alike and world.criterion.reduction == "mean"


class Changes:
    """What holds on any backend; a subclass gives `backend` and `workers`."""

    backend: str
    workers: tuple[int, ...]

    @pytest.fixture
    def bench(self) -> Iterator[Bench]:
        found = Bench(self.backend, self.workers)
        for world, _, with_loss_fn in found.made:
            if with_loss_fn:
                world.criterion.get_buffer("weight").fill_(1.0)
        yield found
        found.close()

    @pytest.mark.slow
    def test_each_change_is_seen(self, bench: Bench) -> None:
        bench.check()
        for name in CHANGES:
            bench.change(name, 1.75)
            try:
                bench.check()
            except BaseException as error:
                raise AssertionError(f"after a change of the {name}") from error

    @pytest.mark.slow
    def test_any_changes_are_seen(self, bench: Bench) -> None:
        @settings(max_examples=self.examples, deadline=None)
        @given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.floats(0.5, 2.0)), min_size=1, max_size=4))
        def holds(changes: list[tuple[str, float]]) -> None:
            for name, number in changes:
                bench.change(name, number)
            bench.check()

        holds()

    examples = 25


class TestProcesses(Changes):
    """One, two and three workers."""

    backend = "process"
    workers = (1, 2, 3)


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
        handle.remove()
        for call in calls.values():
            call()
        opt.loss().backward()  # type: ignore[no-untyped-call]


def test_a_program_that_has_not_changed_is_not_sent_again() -> None:
    world = World()
    with BatchOptimizer(world.module, world.criterion, optimizer=None, parallelize=2) as opt:
        del world.module.mix  # which is pickled with its elements, since sparse tensors have no memory of one kind
        world.module.register_buffer("mix", torch.eye(4).double())
        opt.load(world.inputs, world.targets)
        first = opt.run_on_workers(lambda worker: id(worker.module))
        world.module(world.inputs)
        world.module.shift.data.add_(1)
        world.module.beta = float("1.0")  # another object, as large
        opt.load(world.inputs, world.targets)
        assert opt.run_on_workers(lambda worker: id(worker.module)) == first
        world.module.beta = 2.0
        opt.load(world.inputs, world.targets)
        assert opt.run_on_workers(lambda worker: id(worker.module)) != first
