"""Functions of the batch in which something goes wrong find what those find in which nothing does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.faults.harness import ERRORS, Ended, Fault, Play, equal
from tests.pairs import paired

SLOW = pytest.mark.slow
LAST = 5  # the chunk; chunks are 6 in all


@pytest.fixture
def run(run: Play) -> Play:
    """Plays functions of the batch."""
    return partial(run, tasks=True)


@pytest.fixture
def undisturbed(oracle: Play) -> Ended:
    """The run without faults."""
    found = oracle(tasks=True)
    assert len(found.outcome["results"]) == 5
    return found


def check(ended: Ended, oracle: Ended, fault: Fault, again: int | None = None) -> None:
    """The fault fired once, what was found is what the oracle finds, and no chunk was evaluated but `again`."""
    assert ended.returncode == 0, ended.stderr
    assert "error" not in ended.outcome, ended.outcome["error"]
    assert ended.fired == [1]
    assert equal(ended.outcome["results"], oracle.outcome["results"]) and ended.outcome["unchanged"]
    assert ended.chunks == {chunk: 5 + (chunk == again) for chunk in range(6)}


# How often a worker comes to a point with its last chunk before each task.
BEFORE = {"collect": 1, "total": 2, "predict": 3}
FIRST = {1: 0, 2: 3, 3: 4}  # the chunk with which the last of so many workers begins


def deaths(task: str, parallelize: int) -> dict[str, Fault]:
    """By when a worker ends in this task."""
    at = BEFORE[task] + 1
    last: dict[str, Any] = {"chunk": LAST, "nth": at}
    # each task has a message about its first chunk, an evaluation none
    first: dict[str, Any] = {"chunk": FIRST[parallelize], "nth": at - 1}
    return {
        "when the task comes": Fault("worker.begin_task", "SIGKILL", nth=at - 1),
        "when it is cut": Fault("worker.cut_task", "SIGKILL"),
        "when the order comes": Fault("worker.order", "SIGKILL", nth=at),
        "in the function": Fault("worker.forward", "SIGKILL", **last),
        "when it is written": Fault("worker.merge", "SIGKILL", **last),
        "before the form": Fault("worker.send", "SIGKILL", **first),
        "in the form": Fault("worker.send", "half a frame", **first),
        "after the form": Fault("worker.sent", "SIGKILL", **first),
        "in the report": Fault("worker.reporting", "SIGKILL", **last),
        "after the report": Fault("worker.reported", "SIGKILL", **last),
        "when it ends": Fault("worker.end_task", "SIGKILL", nth=at - 1),
    }


def lost(when: str, parallelize: int) -> int | None:
    """The chunk that is done again, if there is one."""
    if when.endswith("the form"):
        return FIRST[parallelize]
    return LAST if when in ("in the function", "when it is written", "in the report") else None


TASKS = pytest.mark.parametrize("task", BEFORE)


@pytest.mark.parametrize(
    "when, parallelize, task",
    paired(
        itertools.product(deaths("collect", 1), (1, 2, 3), BEFORE),
        lambda row: () if row[:2] == ("after the form", 2) else [SLOW],
    ),
)
def test_a_death_at_any_moment_costs_the_chunk_at_hand(
    run: Play, undisturbed: Ended, task: str, when: str, parallelize: int
) -> None:
    fault = deaths(task, parallelize)[when]
    ended = run(fault, parallelize=parallelize, options={"timeout": 1000.0})  # it is noticed as such, not as a hang
    check(ended, undisturbed, fault, lost(when, parallelize))


@SLOW
@TASKS
@pytest.mark.parametrize("way", ["SIGTERM", "segfault", "os._exit(0)", "C exit", "hang", "hold the GIL", "SIGSTOP"])
def test_any_way_to_end_or_to_hang_costs_the_chunk_at_hand(run: Play, undisturbed: Ended, task: str, way: str) -> None:
    fault = Fault("worker.forward", way, chunk=LAST, nth=BEFORE[task] + 1)
    check(run(fault, options={"timeout": 1.0}), undisturbed, fault, LAST)


@SLOW
def test_a_file_for_sums_that_never_arrives(run: Play, undisturbed: Ended) -> None:
    fault = Fault("worker.sum_in", "SIGKILL")
    check(run(fault), undisturbed, fault)


@SLOW
@TASKS
@pytest.mark.parametrize("lie", ["a wrong number", "a chunk that is not there", "a row that is not there"])
def test_invalid_replies_replace_the_worker(run: Play, undisturbed: Ended, task: str, lie: str) -> None:
    wrong = deaths(task, 2)["before the form" if lie == "a wrong number" else "in the report"]
    ended = run(replace(wrong, do=lie), options={"timeout": 2.0})
    assert ended.fired == [1] and "error" not in ended.outcome, ended.outcome["error"]
    assert equal(ended.outcome["results"], undisturbed.outcome["results"])


@SLOW
@TASKS
def test_what_is_said_twice_counts_once(run: Play, undisturbed: Ended, task: str) -> None:
    fault = replace(deaths(task, 2)["before the form"], do="twice")
    check(run(fault), undisturbed, fault)


@SLOW
@TASKS
def test_all_workers_die_at_once(run: Play, undisturbed: Ended, task: str) -> None:
    faults = [Fault("worker.order", "SIGKILL", who=rank, nth=BEFORE[task] + 1) for rank in range(2)]
    ended = run(*faults)
    assert "error" not in ended.outcome, ended.outcome["error"]
    assert ended.fired == [1, 1] and equal(ended.outcome["results"], undisturbed.outcome["results"])


@SLOW
@TASKS
def test_a_stopped_worker_is_not_waited_for(run: Play, undisturbed: Ended, task: str) -> None:
    """What it writes when it goes on is in no result. The task comes first: it stops whoever has the chunk then."""
    ended = run(Fault("worker.forward", "stop and continue", chunk=LAST), late=True, calls=[task])
    assert ended.fired == [1] and ended.outcome["restarts"] == [0, 0]
    (result,) = ended.outcome["results"]
    assert equal(result, undisturbed.outcome["results"][BEFORE[task]])


@pytest.mark.parametrize("task", ["collect", pytest.param("total", marks=SLOW)])
@pytest.mark.parametrize("way, ended_workers", [("segfault", 3), ("SIGKILL", 6)])
def test_a_chunk_that_ends_workers_again_and_again_is_poison(
    run: Play, undisturbed: Ended, task: str, way: str, ended_workers: int
) -> None:
    ended = run(Fault("worker.forward", way, chunk=2, times=ended_workers), calls=[task], again=True)
    assert ended.outcome["error"].startswith(f"PoisonChunkError: chunk 2 (samples 16..23) ended {ended_workers} work")
    assert ended.fired == [ended_workers] and ended.outcome["unchanged"]
    (result,) = ended.outcome["results"]
    assert equal(result, undisturbed.outcome["results"][BEFORE[task]])


@SLOW
@pytest.mark.parametrize(
    "error, point, task", paired(itertools.product(ERRORS, ("worker.forward", "worker.merge"), BEFORE))
)
def test_an_exception_arrives_and_the_task_can_be_done_again(
    run: Play, undisturbed: Ended, task: str, point: str, error: str
) -> None:
    ended = run(Fault(point, error, chunk=LAST, nth=BEFORE[task] + 1), again=True)
    assert ended.fired == [1] and ended.outcome["at"] == task
    assert ended.outcome["error"].startswith(ERRORS[error])
    assert ended.outcome["restored"] and ended.outcome["unchanged"] and ended.outcome["restarts"] == [0, 0]
    assert equal(ended.outcome["results"], undisturbed.outcome["results"])


@SLOW
@pytest.mark.parametrize(
    "point, what, task",
    paired(itertools.product(("parent.dispatched", "parent.heard", "parent.answers"), ("SIGINT", "SIGKILL"), BEFORE)),
)
def test_an_interrupt_in_the_parent_leaves_everything_as_it_was(
    run: Play, undisturbed: Ended, task: str, point: str, what: str
) -> None:
    """Killed, it leaves no process."""
    nth = {"parent.heard": (2, 2), "parent.dispatched": (1, 1), "parent.answers": (1, 1)}[point]
    killed = what == "SIGKILL"  # when both workers have evaluated something, unless one came late
    fault = Fault(point, what, who="parent", nth=nth[killed])
    ended = run(fault, calls=[task, "last"], again=True, alone=killed)
    if killed:
        assert ended.returncode == -9 and len(ended.pids) in (1, 2)
        return
    assert ended.fired == [1] and ended.outcome["at"] == task
    assert ended.outcome["error"].startswith("KeyboardInterrupt")
    assert ended.outcome["restored"] and ended.outcome["unchanged"] and ended.outcome["restarts"] == [0, 0]
    expected = undisturbed.outcome["results"]
    assert equal(ended.outcome["results"], [expected[BEFORE[task]], expected[-1]])
