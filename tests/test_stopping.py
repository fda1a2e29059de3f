"""Steps that end before their optimizer would: asked to, by a signal, in time, or interrupted."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchopt import LBFGS, Batches, BatchoptError, BatchOptimizer, NonFiniteError, Observer, extending
from batchopt.extending import Stepped
from batchopt.optim.minimizer import Status
from batchopt.training import fit
from tests.building import handling
from tests.optim.kinds import KINDS, NO_END

pytestmark = pytest.mark.usefixtures("interruptible")

X = torch.linspace(-3, 3, 200, dtype=torch.float64)[:, None]
Y = torch.sin(2 * X)


def build(
    callback: Callable[[Any], Any] | None = None,
    optimizer: Any = None,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    **options: Any,
) -> BatchOptimizer:
    """One whose step would go on for long."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    make = optimizer or (lambda p: LBFGS(p, max_iter=None, tolerance_change=0, callback=callback))
    return BatchOptimizer(module, nn.MSELoss(), optimizer=make, chunk_size=50, **options)


def result(opt: BatchOptimizer) -> Any:
    return opt.result


def at(iteration: int, do: Callable[[], object]) -> Callable[[Any], None]:
    """A callback that does it then."""

    def callback(found: Any) -> None:
        if found.number == iteration:
            do()

    return callback


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture(params=[1, 2])
def parallelize(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param


def whole(iterations: int) -> torch.Tensor:
    """The parameters after a step of so many iterations."""
    with build(optimizer=lambda p: LBFGS(p, max_iter=iterations, tolerance_change=0)) as opt:
        opt.step(X, Y)
        return opt.parameters.clone()


def test_asked_by_its_callback_the_step_ends_there_and_the_next_one_goes_on(parallelize: int) -> None:
    with build(lambda found: opt.stop() if found.number in (3, 5) else None, parallelize=parallelize) as opt:
        opt.step(X, Y)
        assert opt.stopped == "stop()" and result(opt).status is Status.PAUSED and result(opt).iterations == 3
        assert torch.equal(opt.parameters, whole(3))
        opt.step(X, Y)
        assert result(opt).iterations == 5 and opt.stopped == "stop()" and opt.batch_counter == 0
        assert torch.equal(opt.parameters, whole(5))


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("name", KINDS)
def test_a_step_in_pieces_has_the_bits_of_a_whole_one_also_by_way_of_a_file(name: str, tmp_path: Path) -> None:
    def points(cuts: Sequence[int], dtype: torch.dtype) -> list[tuple[float, ...]]:
        found: list[tuple[float, ...]] = []

        def callback(iteration: Any) -> bool:
            found.append((iteration.f, iteration.step, iteration.gradient))
            if len(found) in cuts:
                opt.stop()
            return len(found) == 12

        make = lambda p: KINDS[name](p, max_iter=None, callback=callback, **NO_END)  # noqa: E731
        with build(optimizer=make, dtype=dtype, dropout=0.0 if "lm" in name else 0.2) as opt:
            opt.step(X.to(dtype), Y.to(dtype))
            while opt.paused:
                opt.save(tmp_path / "file")
                opt.load_checkpoint(tmp_path / "file")
                opt.step(X.to(dtype), Y.to(dtype))
        return found

    for dtype in (torch.float32, torch.float64):
        assert points([1, 2, 7], dtype) == points([], dtype)


def test_asked_by_a_thread_and_between_two_steps() -> None:
    begun, asked = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        asked.wait()

    with build(at(2, wait)) as opt:

        def ask() -> None:
            begun.wait()
            opt.stop()
            asked.set()

        thread = threading.Thread(target=ask)
        thread.start()
        opt.step(X, Y)
        thread.join()
        assert opt.stopped == "stop()" and result(opt).iterations == 2
        evaluations = opt.eval_counter
        opt.stop()
        opt.step(X, Y)
        assert opt.stopped == "stop()" and result(opt).iterations == 2 and opt.eval_counter == evaluations + 1
        with build(optimizer=lambda p: LBFGS(p, max_iter=2)) as other:
            other.step(X, Y)
            assert other.stopped is None


@pytest.mark.rows
@pytest.mark.parametrize("name", ["lbfgs", "lm"])
def test_a_limit_shorter_than_an_evaluation_still_leads_to_the_end(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call makes one point, by way of a file as well."""

    def build_one(iterations: int, **options: Any) -> BatchOptimizer:
        return build(optimizer=lambda p: KINDS[name](p, max_iter=iterations, **NO_END), **options)

    with build_one(4) as opt:
        opt.step(X, Y)
        expected = opt.parameters.clone()
    calls = 0
    with build_one(4, verbose=2) as opt, caplog.at_level("INFO", "batchopt"):
        opt.step(X, Y, time_limit=1e-9)
        while opt.paused and (calls := calls + 1) < 20:
            opt.save(tmp_path / "file")
            opt.load_checkpoint(tmp_path / "file")
            assert opt.paused
            opt.step(X, Y, time_limit=1e-9)
        assert calls == 3 and opt.batch_counter == 1 and torch.equal(opt.parameters, expected)
        assert extending.position(opt) == opt.eval_counter - 3
    assert "the time was over before the first point" in caplog.text


def test_a_time_limit_is_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("batchopt._engine.stop_requests.time.monotonic", lambda: now)

    def tick(_: Any) -> bool:
        nonlocal now
        now += 1.0
        return now > 20

    with build(tick) as opt:
        opt.step(X, Y, time_limit=3.5)
        assert opt.stopped == "time_limit of 3.5 s" and result(opt).iterations == 4
        opt.step(X, Y)
        assert opt.stopped is None and result(opt).status is Status.CALLBACK


def test_a_signal_ends_this_step_and_all_later_ones_and_calls_who_listened_before(parallelize: int) -> None:
    heard: list[int] = []
    with handling(lambda: heard.append(1), signal.SIGUSR1):
        before = signal.getsignal(signal.SIGUSR1)
        with build(at(3, send(signal.SIGUSR1)), stop_on=("SIGUSR1", "SIGTERM"), parallelize=parallelize) as opt:
            opt.step(X, Y)
            assert opt.stopped == "SIGUSR1" and result(opt).iterations == 3 and heard == [1]
            assert len([*opt.steps([(X, Y)] * 3)]) == 1 and result(opt).iterations == 3
            assert opt.stopped == "SIGUSR1" and opt.paused
            opt.state_dict()
        assert signal.getsignal(signal.SIGUSR1) is before and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_workers_do_not_hear_what_is_for_this_process(parallelize: int) -> None:
    """A scheduler of jobs sends its signal to all processes of a job."""

    def to_all() -> None:
        for pid in {os.getpid(), *(worker.pid for worker in opt.workers)}:
            os.kill(pid, signal.SIGTERM)

    with build(at(2, to_all), stop_on=["SIGTERM"], parallelize=parallelize) as opt:
        opt.step(X, Y)
        assert opt.stopped == "SIGTERM" and [worker.restarts for worker in opt.workers] == [0] * parallelize
        assert torch.equal(opt.parameters, whole(2))


def test_ctrl_c_twice_ends_at_once_where_it_is_one_of_the_signals() -> None:
    with build(at(2, send(signal.SIGINT)), stop_on=["SIGINT"]) as opt:
        opt.step(X, Y)
        assert opt.stopped == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)()


def test_signals_are_for_the_main_thread() -> None:
    found: list[Exception] = []

    def make() -> None:
        try:
            build(stop_on=["SIGUSR1"])
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])


def test_other_optimizers_make_their_step_and_loops_end() -> None:
    with build(optimizer="adam") as opt:
        for _ in opt.steps([(X, Y)] * 10):
            if opt.batch_counter == 2:
                opt.stop()
        assert opt.batch_counter == 3 and opt.stopped == "stop()"


@pytest.mark.slow
def test_trainings_in_pieces_have_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    def trained(folder: Path, *cuts: int) -> tuple[list[str], torch.Tensor]:
        folder.mkdir()
        calls = 0

        def callback(_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls in cuts:
                send(signal.SIGUSR1)()

        for _ in range(len(cuts) + 1):
            make = lambda p: LBFGS(p, max_iter=4, callback=callback)  # noqa: E731
            with build(optimizer=make, stop_on=["SIGUSR1"]) as opt:
                state = fit(
                    opt,
                    Batches((X, Y), batch_size=50, shuffle=True, seed=1),
                    epochs=3,
                    checkpoint=folder,
                    resume="auto",
                    log=str(folder / "log.jsonl"),
                )
                found = opt.parameters.clone()
        assert state.iteration == 12
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        return [*(str({**line, "elapsed_time": 0}) for line in lines), f"{calls} calls"], found

    # the last one in the first step of an epoch
    whole, pieces = trained(tmp_path / "whole"), trained(tmp_path / "pieces", 1, 6, 7, 18)
    assert whole[0] == pieces[0] and torch.equal(whole[1], pieces[1])


def test_what_is_paused_above_its_lowest_point_goes_on_from_where_it_was() -> None:
    """Without a line search f may rise; the parameters are those of the lowest point meanwhile."""

    def points(*cuts: int) -> list[float]:
        found: list[float] = []

        def callback(iteration: Any) -> bool:
            found.append(iteration.f)
            if len(found) in cuts:
                opt.stop()
            return len(found) == 8

        make = lambda p: LBFGS(p, lr=3.0, line_search_fn=None, max_iter=None, callback=callback, **NO_END)  # noqa: E731
        with build(optimizer=make) as opt:
            opt.step(X, Y)
            while opt.paused:
                state = opt.state_dict()
                assert opt.output <= min(found)
                opt.load_state_dict(state)
                opt.step(X, Y)
        return found

    whole = points()
    rising = next(i for i in range(1, 8) if whole[i] > min(whole[:i]))
    assert points(rising + 1) == points(1, rising + 1, rising + 2) == whole


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("name", ["lbfgs", "cg", "lm"])
@given(events=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["stop", "raise", "limit"])), max_size=4))
@settings(max_examples=4)
def test_whatever_comes_between_the_iterates_are_those_of_a_run_left_alone(
    name: str, events: list[tuple[int, str]]
) -> None:
    """Pauses, failures and limits at any moment, each followed by a way through the state; on one worker and on two.
    `LBFGS` forgets its curvature where a step fails."""
    events = [event for event in events if name != "lbfgs" or event[1] != "raise"]

    def run(events: Sequence[tuple[int, str]], workers: int) -> tuple[dict[int, Any], torch.Tensor]:
        seen: dict[int, Any] = {}
        left, what = 0, ""

        def callback(point: Any) -> bool:
            nonlocal left
            found = point.f, point.change, point.gradient
            assert seen.setdefault(point.number, found) == found  # also where it comes again after a failure
            left -= 1
            if left == 0 and what == "stop":
                opt.stop()
            if left == 0 and what == "raise":
                raise ZeroDivisionError
            return bool(point.number == 7)

        make = lambda p: KINDS[name](p, max_iter=None, callback=callback, **NO_END)  # noqa: E731
        with build(optimizer=make, parallelize=workers) as opt:
            for after, what in events:
                left = after
                if opt.batch_counter == 0:
                    with suppress(ZeroDivisionError):
                        opt.step(X, Y, time_limit=1e-9 if what == "limit" else None)
                    opt.load_state_dict(opt.state_dict())
            what = ""
            while opt.batch_counter == 0:
                opt.step(X, Y)
            return seen, opt.parameters.clone()

    whole, parameters = run([], 1)
    for workers in (1, 2):
        found, end = run(events, workers)
        assert found == whole and torch.equal(end, parameters)


def test_a_step_that_fails_and_what_is_loaded_meanwhile_leave_a_pause_as_it_is() -> None:
    def found(between: bool) -> list[float]:
        make = lambda p: LBFGS(p, max_iter=6, callback=at(3, lambda: opt.stop()))  # noqa: E731
        with build(optimizer=make, dropout=0.2) as opt:
            opt.step(X, Y)
            if between:
                opt.load(X[:10], Y[:10])
                opt.evaluate()
                with pytest.raises(NonFiniteError):
                    opt.step(X, Y * torch.nan)
                assert opt.paused
            return [opt.step(X, Y), opt.step(X, Y), float(opt.batch_counter)]

    assert found(True) == found(False)


def test_another_batch_within_a_step_is_refused() -> None:
    with build(at(2, lambda: opt.load(X[:9], Y[:9]))) as opt:
        before = opt.parameters.clone()
        with pytest.raises(BatchoptError, match="another batch was loaded in the middle of a step"):
            opt.step(X, Y)
        assert torch.equal(opt.parameters, before) and opt.batch_counter == opt.eval_counter == 0


@pytest.mark.parametrize("loop", ["prepared", "fit"])
def test_loops_end_after_a_signal_and_pass_over_no_batch(loop: str) -> None:
    with build(at(2, send(signal.SIGUSR1)), stop_on=["SIGUSR1"]) as opt:
        batches = Batches((X, Y), batch_size=50)
        if loop == "fit":
            assert fit(opt, batches, epochs=3).iteration == 0
        else:
            for batch in extending.prepared(opt, batches):
                opt.step(batch)
        assert opt.paused and batches.iteration == 0 and opt.batch_counter == 0


class Raises(Observer):
    """Raises at the end of each step."""

    def step_ended(self, found: Stepped | None) -> None:
        raise ZeroDivisionError("a logger")


def test_what_an_observer_of_the_end_raises_undoes_nothing() -> None:
    with build(optimizer=lambda p: LBFGS(p, max_iter=3)) as opt:
        with extending.observe(opt, Raises()), pytest.raises(ZeroDivisionError):
            opt.step(X, Y, time_limit=1000.0)
        assert opt.batch_counter == 1 and result(opt).iterations == 3 and opt.output == result(opt).f
        opt.load(X, Y)
        assert opt.evaluate().item() == opt.output


# ---- Ctrl-C


def test_ctrl_c_keeps_the_best_point_and_what_is_known(parallelize: int) -> None:
    with build(at(3, send(signal.SIGINT)), parallelize=parallelize) as opt:
        with pytest.raises(KeyboardInterrupt):
            opt.step(X, Y)
        assert result(opt).status is Status.INTERRUPTED and result(opt).iterations == 3
        assert opt.output == result(opt).f and opt.batch_counter == 1 and opt.eval_counter == result(opt).evaluations
        assert torch.equal(opt.parameters, whole(3))
        opt.load(X, Y)
        assert opt.evaluate().item() == opt.output


@pytest.mark.parametrize("optimizer", ["adam", lambda p: LBFGS(p, max_iter=None, callback=at(3, send(signal.SIGINT)))])
def test_ctrl_c_undoes_where_asked_to_and_where_there_is_no_best_point(optimizer: Any) -> None:
    undo: dict[str, Any] = {} if optimizer == "adam" else {"on_interrupt": "undo"}
    with build(optimizer=optimizer, **undo) as opt:
        if optimizer == "adam":
            opt.posthook = lambda worker, sample: send(signal.SIGINT)()
        before = opt.parameters.clone()
        with pytest.raises(KeyboardInterrupt):
            opt.step(X, Y)
        assert torch.equal(opt.parameters, before) and opt.eval_counter == opt.batch_counter == 0


def test_optimizers_that_are_closed_in_any_order_leave_no_handler() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    first, second, third = (build(stop_on=["SIGUSR2"]) for _ in range(3))
    first.close()
    third.close()
    send(signal.SIGUSR2)()
    second.step(X, Y)
    assert second.stopped == "SIGUSR2"
    second.close()
    assert signal.getsignal(signal.SIGUSR2) == before
