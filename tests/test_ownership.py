"""One process and one thread at a time: anything else is told so, and does no harm."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Sample, Worker, WorkerError
from batchopt._machine.ownership import Owner, exclusive, undisturbed
from batchopt.errors import BatchoptError


class Counter:
    """Something that one thread at a time may use."""

    def __init__(self) -> None:
        self._owner = Owner()
        self.value = 0

    @exclusive
    def add(self, amount: int, *, times: int = 1) -> int:
        """Add `amount`, so many times."""
        for _ in range(times):
            self.value += amount
        return self.value

    @exclusive
    def call(self, function: Callable[[], object]) -> object:
        """What `function` returns, called inside."""
        return function()


@contextmanager
def in_use(counter: Counter, name: str) -> Iterator[None]:
    """A thread of that name is inside."""
    inside, leave = threading.Event(), threading.Event()

    def wait() -> bool:
        inside.set()
        return leave.wait(10)

    thread = threading.Thread(target=counter.call, args=(wait,), name=name)
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


def test_arguments_and_the_result_pass_through() -> None:
    counter = Counter()
    assert counter.add(2, times=3) == 6
    assert counter.add(amount=1) == 7


def test_a_method_keeps_its_name_and_its_docstring() -> None:
    assert Counter.add.__name__ == "add"
    assert Counter.add.__qualname__ == "Counter.add"
    assert Counter.add.__doc__ == "Add `amount`, so many times."


def test_the_thread_that_is_inside_may_enter_again() -> None:
    counter = Counter()
    assert counter.call(lambda: counter.call(lambda: counter.add(3))) == 3
    assert elsewhere(lambda: counter.add(1)) == 4


def test_it_stays_in_use_until_the_outermost_call_returns() -> None:
    counter = Counter()

    def inner_returns_first() -> object:
        counter.add(1)
        with pytest.raises(BatchoptError, match="is running in thread"):
            elsewhere(lambda: counter.add(1))
        return counter.value

    assert counter.call(inner_returns_first) == 1


def test_another_thread_is_told_which_one_uses_it() -> None:
    counter = Counter()
    with in_use(counter, "the-first-one"):
        with pytest.raises(BatchoptError, match="is running in thread 'the-first-one'"):
            counter.add(1)
        with pytest.raises(BatchoptError, match="is running in thread 'the-first-one'"):
            elsewhere(lambda: counter.add(1))
    assert counter.value == 0


def test_threads_may_use_it_one_after_the_other() -> None:
    counter = Counter()
    counter.add(1)
    assert elsewhere(lambda: counter.add(1)) == 2
    with in_use(counter, "second"):
        pass
    assert counter.add(1) == 3
    with in_use(counter, "third"), pytest.raises(BatchoptError, match="thread 'third'"):
        counter.add(1)


def test_a_thread_that_was_turned_away_takes_nothing_with_it() -> None:
    counter = Counter()
    with in_use(counter, "first"):
        for _ in range(3):
            with pytest.raises(BatchoptError):
                counter.add(1)
    assert elsewhere(lambda: counter.add(1)) == 1
    assert counter.add(1) == 2


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_passes_through_and_leaves_it_free(error: type[BaseException]) -> None:
    counter = Counter()

    def fail() -> None:
        raise error("the user's")

    with pytest.raises(error, match="the user's"):
        counter.call(lambda: counter.call(fail))
    assert elsewhere(lambda: counter.add(1)) == 1


def test_two_objects_know_nothing_of_each_other() -> None:
    counter, other = Counter(), Counter()
    with in_use(counter, "busy"):
        assert other.add(1) == 1


def in_a_fork(function: Callable[[], object]) -> str:
    """What `function` returns or raises in a forked child, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = f"returned {function()}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said.replace(str(pid), "CHILD")


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
# Python 3.12 warns of forks in a process that has threads, as torch's have.
forks_with_threads = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@needs_fork
@forks_with_threads
def test_a_forked_child_is_told_whose_it_is() -> None:
    counter = Counter()
    said = in_a_fork(lambda: counter.add(1))
    assert said.startswith("BatchoptError: ")
    assert f"belongs to process {os.getpid()}" in said
    assert "this is process CHILD" in said
    assert counter.add(1) == 1


@needs_fork
@forks_with_threads
def test_a_child_that_is_forked_inside_is_not_inside() -> None:
    counter = Counter()
    said = counter.call(lambda: in_a_fork(lambda: counter.add(1)))
    assert isinstance(said, str)
    assert f"belongs to process {os.getpid()}" in said


@needs_fork
@forks_with_threads
def test_a_child_that_is_forked_while_another_thread_is_inside_does_not_wait() -> None:
    counter = Counter()
    with in_use(counter, "busy"):
        assert f"belongs to process {os.getpid()}" in in_a_fork(lambda: counter.add(1))


@needs_fork
@forks_with_threads
def test_a_child_may_have_one_of_its_own() -> None:
    assert in_a_fork(lambda: Counter().add(5)) == "returned 5"


# ---- while a call is at work


class Machine(Counter):
    """Something that cannot be used while it works."""

    @exclusive
    @undisturbed
    def work(self, function: Callable[[], object]) -> object:
        """What `function` returns, called in the middle of it."""
        return function()

    @undisturbed
    def inner(self) -> int:
        """For those that are at work themselves."""
        return self.value


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


def handling(handler: Callable[[], object]) -> AbstractContextManager[None]:
    """Inside, SIGUSR1 is handled so."""

    @contextmanager
    def inside() -> Iterator[None]:
        before = signal.signal(signal.SIGUSR1, lambda number, frame: handler())
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)

    return inside()


def signalling(worker: Worker, sample: Sample) -> None:
    """A hook that signals the parent from its first chunk, and waits."""
    if worker.state.pop("parent", 0):
        os.kill(int(os.environ["BATCHOPT_TEST_PARENT"]), signal.SIGUSR1)
        time.sleep(0.5)  # so that the parent waits for this worker when the signal comes


@pytest.mark.sampled
@pytest.mark.parametrize(
    "use",
    [
        lambda opt: opt.evaluate(),
        lambda opt: opt.map(),
        lambda opt: opt.step(torch.zeros(8, 2), torch.zeros(8, 1)),
        lambda opt: opt.load(torch.zeros(8, 2), torch.zeros(8, 1)),
        lambda opt: opt.run_on_workers(lambda worker: None),
        lambda opt: opt.resize(1),
        lambda opt: setattr(opt, "prehook", None),
    ],
    ids=["evaluate", "map", "step", "load", "run_on_workers", "resize", "prehook"],
)
def test_a_signal_handler_cannot_use_what_waits_for_workers(
    use: Callable[[BatchOptimizer], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHOPT_TEST_PARENT", str(os.getpid()))
    said: list[str] = []
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    module = nn.Linear(2, 1)
    expected = nn.MSELoss()(module(x), y).item()
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=2, prehook=signalling) as opt:

        def handler() -> None:
            try:
                use(opt)
            except BatchoptError as error:
                said.append(str(error))

        opt.run_on_workers(lambda worker: worker.state.update(parent=worker.rank == 1))
        opt.load(x, y)
        with handling(handler):
            assert opt.evaluate().item() == pytest.approx(expected)
        assert len(said) == 1 and "is in the middle of evaluate()" in said[0]
        assert opt.evaluate().item() == pytest.approx(expected)
        assert opt.eval_counter == 2


@pytest.mark.parametrize("step", [False, True])
def test_a_signal_handler_that_closes_ends_the_call(step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHOPT_TEST_PARENT", str(os.getpid()))
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    opt = BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), optimizer="sgd", parallelize=2, prehook=signalling)
    opt.run_on_workers(lambda worker: worker.state.update(parent=worker.rank == 1))
    opt.load(x, y)
    before, everyone = opt.parameters.clone(), [psutil.Process(worker.pid) for worker in opt.workers]
    with handling(opt.close), pytest.raises(BatchoptError, match="was closed"):
        opt.step(x, y) if step else opt.evaluate()
    _, left = psutil.wait_procs(everyone, timeout=10)
    assert not left
    assert torch.equal(torch.cat([p.detach().flatten() for p in opt.module.parameters()]), before)
    with pytest.raises(BatchoptError, match="was closed"):
        opt.evaluate()


def test_a_module_that_evaluates_itself_is_told() -> None:
    class Selfish(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if opt is not None:
                opt.evaluate()
            return super().forward(x)

    opt: BatchOptimizer | None = None
    module = Selfish(2, 1)
    made = BatchOptimizer(module, nn.MSELoss(), optimizer=None)
    with made:
        made.load(torch.randn(4, 2), torch.randn(4, 1))
        opt = made
        with pytest.raises(BatchoptError, match=r"is in the middle of evaluate\(\)"):
            made.evaluate()
        opt = None
        made.load(torch.randn(4, 2), torch.randn(4, 1))
        made.evaluate()


@needs_fork
@forks_with_threads
@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_fork_that_leaves_the_with_block_says_nothing(parallelize: int) -> None:
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    made: dict[str, Any] = {"optimizer": "sgd", "parallelize": parallelize, "chunk_size": 4}  # speeds change no bit
    with BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), **made) as opt:
        opt.load(x, y)
        before = opt.evaluate().item()
        said = in_a_fork(lambda: opt.__exit__(None, None, None))
        assert said == "returned None"
        assert opt.evaluate().item() == before


def test_what_users_call_is_named() -> None:
    module = nn.Linear(3, 1)
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None) as opt:
        with pytest.raises(WorkerError, match=r"is in the middle of collect\(\), and cannot be used"):
            opt.collect(lambda module, inputs, targets: opt.predict(inputs), torch.ones(4, 3), torch.ones(4, 1))
