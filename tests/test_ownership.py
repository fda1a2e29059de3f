"""One process and one thread at a time: anything else is told so, and does no harm."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Sample, Worker, WorkerError
from batchopt._machine.ownership import Owner, exclusive, undisturbed
from batchopt.errors import BatchoptError
from tests.building import Child, handling, loaded


class Machine:
    """Something that one thread at a time may use, and that cannot be used while it works."""

    def __init__(self) -> None:
        self._owner = Owner()
        self.value = 0

    @exclusive
    def add(self, amount: int, *, times: int = 1) -> int:
        """Add `amount`, so many times."""
        self.value += amount * times
        return self.value

    @exclusive
    def call(self, function: Callable[[], object]) -> object:
        """What `function` returns, called inside."""
        return function()

    @exclusive
    @undisturbed
    def work(self, function: Callable[[], object]) -> object:
        """What `function` returns, called in the middle of it."""
        return function()

    @undisturbed
    def inner(self) -> int:
        """For those that are at work themselves."""
        return self.value


@contextmanager
def in_use(machine: Machine, name: str) -> Iterator[None]:
    """A thread of that name is inside."""
    inside, leave = threading.Event(), threading.Event()

    def wait() -> bool:
        inside.set()
        return leave.wait(10)

    thread = threading.Thread(target=machine.call, args=(wait,), name=name)
    thread.start()
    try:
        assert inside.wait(10)
        yield
    finally:
        leave.set()
        thread.join()


def elsewhere(function: Callable[[], object]) -> object:
    """What `function` returns, called in a thread that ends."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(10)


def test_a_method_is_called_as_it_was_and_keeps_its_name_and_its_docstring() -> None:
    machine = Machine()
    assert machine.add(2, times=3) == 6 and machine.add(amount=1) == 7
    assert (Machine.add.__name__, Machine.add.__qualname__) == ("add", "Machine.add")
    assert Machine.add.__doc__ == "Add `amount`, so many times."


def test_the_thread_that_is_inside_may_enter_again_and_others_until_the_outermost_call_returns_may_not() -> None:
    machine = Machine()

    def inner_returns_first() -> object:
        machine.call(lambda: machine.add(1))
        with pytest.raises(BatchoptError, match="is running in thread"):
            elsewhere(lambda: machine.add(1))
        return machine.value

    assert machine.call(inner_returns_first) == 1
    assert elsewhere(lambda: machine.add(1)) == 2


def test_other_threads_are_told_which_one_uses_it_and_take_nothing_with_them() -> None:
    machine, other = Machine(), Machine()
    for name in ("the-first-one", "the-second-one"):
        with in_use(machine, name):
            with pytest.raises(BatchoptError, match=f"is running in thread '{name}'"):
                machine.add(1)
            with pytest.raises(BatchoptError, match=f"is running in thread '{name}'"):
                elsewhere(lambda: machine.add(1))
            assert other.add(0) == 0  # two objects know nothing of each other
        before = machine.value
        assert elsewhere(lambda: machine.add(1)) == before + 1 and machine.add(1) == before + 2


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_passes_through_and_leaves_it_free(error: type[BaseException]) -> None:
    machine = Machine()

    def fail() -> None:
        raise error("the user's")

    with pytest.raises(error, match="the user's"):
        machine.call(lambda: machine.call(fail))
    assert elsewhere(lambda: machine.add(1)) == 1


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
# Python 3.12 warns of forks in a process that has threads, as torch's have.
forks_with_threads = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@needs_fork
@forks_with_threads
def test_a_forked_child_is_told_whose_it_is_wherever_it_was_forked_and_may_have_one_of_its_own() -> None:
    machine = Machine()

    def add() -> str:
        return Child(lambda: machine.add(1)).said()

    said = [add(), machine.call(add)]
    with in_use(machine, "busy"):
        said.append(add())  # which does not wait
    for one in said:
        assert isinstance(one, str) and one.startswith("BatchoptError: ")
        assert f"belongs to process {os.getpid()}" in one and "this is process CHILD" in one
    assert machine.add(1) == 1
    assert Child(lambda: Machine().add(5)).said() == "5"


# ---- while a call is at work


def test_what_is_at_work_is_not_disturbed_by_its_own_thread() -> None:
    machine = Machine()
    for call in (lambda: machine.add(1), lambda: machine.work(lambda: None)):
        with pytest.raises(BatchoptError, match=r"is in the middle of work\(\)"):
            machine.work(call)
    assert machine.work(machine.inner) == 0
    assert machine.call(lambda: machine.work(lambda: None)) is None
    assert elsewhere(lambda: machine.add(1)) == 1


def test_what_is_to_be_done_last_is_done_once_the_outermost_is_over() -> None:
    machine, done = Machine(), []
    assert not machine._owner.at_last(lambda: done.append("never"))

    def leave_something() -> bool:
        machine.inner()
        assert machine._owner.at_last(lambda: done.append("last"))
        machine.inner()
        return not done

    assert machine.work(leave_something)
    assert done == ["last"]
    machine.work(lambda: None)
    assert done == ["last"]


X, Y = torch.linspace(-1, 1, 16).view(8, 2), torch.linspace(0, 1, 8).view(8, 1)


def signalling(worker: Worker, sample: Sample) -> None:
    """A hook that signals the parent once."""
    if worker.state.pop("parent", 0):
        signal_parent()


def signals(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A function of the batch that does so from its first chunk."""
    if torch.equal(inputs[0], X[0]):
        signal_parent()
    return inputs


def signal_parent() -> None:
    os.kill(int(os.environ["BATCHOPT_TEST_PARENT"]), signal.SIGUSR1)
    time.sleep(0.5)  # so that the parent waits for this worker when the signal comes


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> Callable[[BatchOptimizer], object]:
    """Has the second worker signal."""
    monkeypatch.setenv("BATCHOPT_TEST_PARENT", str(os.getpid()))
    return lambda opt: opt.run_on_workers(lambda worker: worker.state.update(parent=worker.rank == 1))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "use",
    [
        lambda opt: opt.evaluate(),
        lambda opt: opt.map(),
        lambda opt: opt.step(X, Y),
        lambda opt: opt.load(X, Y),
        lambda opt: opt.run_on_workers(lambda worker: None),
        lambda opt: opt.resize(1),
        lambda opt: setattr(opt, "prehook", None),
    ],
    ids=["evaluate", "map", "step", "load", "run_on_workers", "resize", "prehook"],
)
def test_a_signal_handler_cannot_use_what_waits_for_workers(
    use: Callable[[BatchOptimizer], object], armed: Callable[[BatchOptimizer], object]
) -> None:
    said: list[str] = []
    module = nn.Linear(2, 1)
    expected = nn.MSELoss()(module(X), Y).item()
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=2, prehook=signalling) as opt:

        def handler() -> None:
            try:
                use(opt)
            except BatchoptError as error:
                said.append(str(error))

        armed(opt)
        opt.load(X, Y)
        with handling(handler):
            assert opt.evaluate().item() == pytest.approx(expected)
        assert len(said) == 1 and "is in the middle of evaluate()" in said[0]
        assert opt.evaluate().item() == pytest.approx(expected)
        assert opt.eval_counter == 2


@pytest.mark.parametrize(
    "call",
    [lambda opt: opt.evaluate(), lambda opt: opt.step(X, Y), lambda opt: opt.collect(signals, X, Y)],
    ids=["evaluate", "step", "collect"],
)
def test_a_signal_handler_that_closes_ends_the_call(
    call: Callable[[BatchOptimizer], object], armed: Callable[[BatchOptimizer], object]
) -> None:
    opt = BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), optimizer="sgd", parallelize=2, prehook=signalling)
    armed(opt)
    opt.load(X, Y)
    before, everyone = opt.parameters.clone(), [psutil.Process(worker.pid) for worker in opt.workers]
    with handling(opt.close), pytest.raises(BatchoptError, match="was closed"):
        call(opt)
    _, left = psutil.wait_procs(everyone, timeout=10)
    assert not left
    assert torch.equal(torch.cat([p.detach().flatten() for p in opt.module.parameters()]), before)
    for use in (opt.evaluate, lambda: opt.predict(X)):
        with pytest.raises(BatchoptError, match="was closed"):
            use()


def test_a_module_that_evaluates_itself_is_told() -> None:
    class Selfish(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if opt is not None:
                opt.evaluate()
            return super().forward(x)

    opt: BatchOptimizer | None = None
    with loaded(Selfish(2, 1), nn.MSELoss(), X, Y) as made:
        opt = made
        with pytest.raises(BatchoptError, match=r"is in the middle of evaluate\(\)"):
            made.evaluate()
        opt = None
        made.load(X, Y)
        made.evaluate()


@needs_fork
@forks_with_threads
@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_fork_that_leaves_the_with_block_says_nothing(parallelize: int) -> None:
    made: dict[str, Any] = {"optimizer": "sgd", "parallelize": parallelize, "chunk_size": 4}  # speeds change no bit
    with loaded(nn.Linear(2, 1), nn.MSELoss(), X, Y, **made) as opt:
        before = opt.evaluate().item()
        assert Child(lambda: opt.__exit__(None, None, None)).said() == "None"
        assert opt.evaluate().item() == before


def test_what_users_call_is_named() -> None:
    with BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), optimizer=None) as opt:
        with pytest.raises(WorkerError, match=r"is in the middle of collect\(\), and cannot be used"):
            opt.collect(lambda module, inputs, targets: opt.predict(inputs), X, Y)
