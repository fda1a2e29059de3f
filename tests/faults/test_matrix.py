"""A run in which something goes wrong has the bits of one in which nothing does, of steps and of functions of the batch
alike; what cannot be mended is an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import ERRORS, Ended, Fault, Host, Play, equal, play, same_bits

SLOW = pytest.mark.slow
LAST = 5  # the chunk; chunks are 6 in all
FIRST = {1: 0, 2: 3, 3: 4}  # the chunk with which the last of so many workers begins
# Three steps by an optimizer; or an evaluation, three tasks and an evaluation, in one of which something happens: how
# often a worker has come to a point with its last chunk before each of them.
STEPS, TASKS = ("sgd", "lbfgs"), {"collect": 1, "total": 2, "predict": 3}
WORKS = (*STEPS, *TASKS)


def case(work: str, **options: Any) -> dict[str, Any]:
    return {**({"tasks": at(work)} if work in TASKS else {"optimizer": work}), **options}


def at(work: str) -> int:
    """The usual one: a step's second evaluation, or the task."""
    return TASKS[work] + 1 if work in TASKS else 2


def chosen(rows: Iterable[Any], branch: Callable[[Any], object], quick: Collection[Any] = ()) -> list[Any]:
    """All rows: one of each branch for each change, which vary in all else, the others for each night."""
    branches: dict[object, list[Any]] = {}
    kept = [*rows]
    for row in kept:
        branches.setdefault(branch(row), []).append(row)
    one_each = [of_branch[7 * i % len(of_branch)] for i, of_branch in enumerate(branches.values())]
    tiers = {row: [SLOW] if row in one_each else [pytest.mark.nightly] for row in kept}
    return [pytest.param(*row, marks=[] if row in quick else tiers[row]) for row in kept]


def kill(point: str, **where: Any) -> Fault:
    return Fault(point, "SIGKILL", **where)


def compare(ended: Ended, oracle: Play, work: str) -> None:
    """Nothing else was found than without the fault."""
    assert ended.returncode == 0, ended.stderr
    whole = oracle(**case(work)).outcome
    if work in TASKS:
        assert equal(ended.outcome["results"], whole["results"]) and ended.outcome["unchanged"]
    else:
        same_bits(ended.outcome, whole)


def check(ended: Ended, oracle: Play, work: str, again: int | None = None, fired: int = 1) -> None:
    """The fault fired once, nobody has noticed, and no chunk was evaluated but what was lost, once more."""
    assert "error" not in ended.outcome, ended.outcome["error"]
    compare(ended, oracle, work)
    assert ended.fired == [fired]
    times = 5 if work in TASKS else ended.outcome["evaluations"]
    assert ended.chunks == {chunk: times + (chunk == again) for chunk in range(6)}


# The second chunk of the run of the last worker, at its second evaluation.
DEATHS = {
    "when it starts": kill("worker.start"),
    "when it greets": Fault("worker.greet", "os._exit(0)"),
    "before the module": Fault("worker.greeted", "os._exit(0)"),
    "when the batch comes": kill("worker.load"),
    "when the order comes": kill("worker.order", nth=2),
    "before the forward": kill("worker.forward", chunk=LAST, nth=2),
    "before the backward": kill("worker.backward", chunk=LAST, nth=2),
    "in the gradient": kill("worker.collect", chunk=LAST, nth=2),
    "in a merge": kill("worker.merge", chunk=LAST, nth=2),
    "before the report": kill("worker.report", chunk=LAST, nth=2),
    "in the report": kill("worker.reporting", chunk=LAST, nth=2),
    "after the report": kill("worker.reported", chunk=LAST, nth=2),
    "after a first report": kill("worker.reported", chunk=3, nth=2),
    "when it is done": kill("worker.done", chunk=LAST, nth=2),
}


def deaths_in(task: str, parallelize: int) -> dict[str, Fault]:
    """By when a worker ends in this task. Each task has a message about its first chunk, an evaluation none."""
    last: dict[str, Any] = {"chunk": LAST, "nth": at(task)}
    first: dict[str, Any] = {"chunk": FIRST[parallelize], "nth": at(task) - 1}
    return {
        "when the task comes": kill("worker.begin_task", nth=at(task) - 1),
        "when it is cut": kill("worker.cut_task"),
        "when the order comes": kill("worker.order", nth=at(task)),
        "before the forward": kill("worker.forward", **last),
        "in a merge": kill("worker.merge", **last),
        "before the form": kill("worker.send", **first),
        "after the form": kill("worker.sent", **first),
        "in the report": kill("worker.reporting", **last),
        "after the report": kill("worker.reported", **last),
        "when it ends": kill("worker.end_task", nth=at(task) - 1),
    }


def lost(fault: Fault, work: str, parallelize: int) -> int | None:
    """The chunk that is done again, if there is one."""
    if fault.point in ("worker.send", "worker.sent"):
        return FIRST[parallelize]
    points = {f"worker.{what}" for what in ("forward", "backward", "collect", "merge", "report", "reporting")}
    return fault.chunk if fault.point in points else None


def deaths() -> list[Any]:
    """Each death in the first evaluation, in the second and in the fifth, which may repeat the one before, and in each
    task; by its name, with the work, the number of workers, and which time."""
    rows: list[Any] = []
    for when, work, parallelize in itertools.product(DEATHS, STEPS, (1, 2, 3)):
        nths = (1,) if DEATHS[when].nth == 1 else (1, 2, 5) if work == "lbfgs" else (1, 2)  # of three
        rows += [(when, work, parallelize, nth) for nth in nths]
    rows += [(when, task, n, 0) for when, task, n in itertools.product(deaths_in("total", 1), TASKS, (1, 2, 3))]
    quick = ("in the gradient", "sgd", 2, 2), ("after the form", "collect", 2, 0)
    return chosen(rows, lambda row: (row[0], row[1] in TASKS, row[3] == 1), quick)


@pytest.mark.parametrize("when, work, parallelize, nth", deaths())
def test_a_death_at_any_moment_costs_the_chunk_at_hand(
    run: Play, oracle: Play, when: str, work: str, parallelize: int, nth: int
) -> None:
    fault = replace(DEATHS[when], nth=nth) if nth else deaths_in(work, parallelize)[when]
    # a death is noticed as such, not as a hang
    ended = run(fault, **case(work, parallelize=parallelize, options={"timeout": 1000.0}))
    check(ended, oracle, work, lost(fault, work, parallelize))


WAYS = ["SIGTERM", "SIGABRT", "segfault", "os._exit(0)", "os._exit(3)", "C exit", "hang", "hold the GIL", "SIGSTOP"]
WAYS += ["close the pipe"]


def ways() -> list[Any]:
    rows = [(way, "lbfgs", parallelize, nth) for way in WAYS for parallelize in (1, 2, 3) for nth in (1, 2, 5)]
    return chosen([*rows, *((way, task, 2, at(task)) for way in WAYS[:-1] for task in TASKS)], lambda row: row[0])


@pytest.mark.parametrize("way, work, parallelize, nth", ways())
def test_any_way_to_end_or_to_hang_costs_the_chunk_at_hand(
    run: Play, oracle: Play, way: str, work: str, parallelize: int, nth: int
) -> None:
    point = "report" if way == "close the pipe" else "forward" if work in TASKS else "backward"
    ended = run(
        Fault(f"worker.{point}", way, chunk=LAST, nth=nth),
        **case(work, parallelize=parallelize, options={"timeout": 1.0}),
    )
    # what was reported after the pipe was closed counts
    check(ended, oracle, work, None if way == "close the pipe" else LAST)
    assert sum(ended.outcome["restarts"]) == 1 or parallelize > 1  # else nobody else could have done it


LIES = {
    "garbage": ("report", STEPS[:1]),  # begins like a long message, whose end is waited for
    "a partial too many": ("reporting", STEPS[:1]),
    "a place that is not there": ("reporting", STEPS[:1]),
    "a chunk that is not there": ("reporting", ("sgd", *TASKS)),
    "a row that is not there": ("reporting", ("sgd", *TASKS)),
    "a wrong number": ("send", TASKS),
}


@pytest.mark.parametrize(
    "lie, work", chosen([(lie, work) for lie, (_, works) in LIES.items() for work in works], lambda row: row[0])
)
def test_invalid_reports_replace_the_worker(run: Play, oracle: Play, lie: str, work: str) -> None:
    point = LIES[lie][0]
    first = {"chunk": FIRST[2], "nth": at(work) - 1}
    fault = Fault(f"worker.{point}", lie, **(first if point == "send" else {"chunk": LAST, "nth": at(work)}))
    ended = run(fault, **case(work, options={"timeout": 2.0}))
    assert ended.fired == [1] and "error" not in ended.outcome, ended.outcome["error"]
    compare(ended, oracle, work)


@SLOW
@pytest.mark.rows
@pytest.mark.parametrize("task", TASKS)
def test_what_is_said_twice_counts_once(run: Play, oracle: Play, task: str) -> None:
    check(run(Fault("worker.send", "twice", chunk=FIRST[2], nth=at(task) - 1), **case(task)), oracle, task)


@pytest.mark.parametrize("work, parallelize", chosen(itertools.product(WORKS, (3, 2, 1)), lambda row: row[0] in TASKS))
def test_all_workers_die_at_once(run: Play, oracle: Play, parallelize: int, work: str) -> None:
    point = "worker.order" if work in TASKS else "worker.backward"
    ended = run(*[kill(point, who=r, nth=at(work)) for r in range(parallelize)], **case(work, parallelize=parallelize))
    assert "error" not in ended.outcome, ended.outcome["error"]
    assert ended.fired == [1] * parallelize
    compare(ended, oracle, work)


@SLOW
@pytest.mark.rows
@pytest.mark.parametrize("when", ["before the backward", "in the gradient"])
def test_without_chunks_the_shards_keep_their_boundaries(tmp_path: Path, host: Host, when: str) -> None:
    given: dict[str, Any] = {"optimizer": "lbfgs", "parallelize": 2, "options": {"chunk_size": None}}
    whole = play(tmp_path / "whole", [], host, **given)
    ended = play(tmp_path / "run", [kill(DEATHS[when].point, chunk=1, nth=2)], host, **given)
    assert ended.fired == [1]
    same_bits(ended.outcome, whole.outcome)


# ---- workers that are slow, or stand still


@pytest.mark.parametrize("work", chosen([(work,) for work in WORKS], lambda row: row[0] in TASKS))
def test_a_stopped_worker_is_not_waited_for(run: Play, oracle: Play, work: str) -> None:
    """What it writes when it goes on is in no result. A task comes first: it stops whoever has the chunk then."""
    given = {"chunk": LAST} if work in TASKS else {"who": 1, "nth": 2}
    calls = {"calls": [work]} if work in TASKS else {}
    ended = run(Fault("worker.forward", "stop and continue", **given), **case(work, late=True, **calls))
    assert ended.fired == [1] and ended.outcome["restarts"] == [0, 0]
    if work in TASKS:
        assert equal(ended.outcome["results"], oracle(**case(work)).outcome["results"][TASKS[work] :][:1])
    else:
        compare(ended, oracle, work)


@SLOW
@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_fails_while_speeds_are_measured_is_left_out(run: Play, oracle: Play, way: str) -> None:
    options = {"speeds": None, "timeout": 20.0}
    ended = run(Fault("worker.forward", way, who=1), optimizer="lbfgs", late=True, options=options)
    assert ended.fired == [1]
    compare(ended, oracle, "lbfgs")


@SLOW
@pytest.mark.parametrize("do, times", [("stop the parent", 3), ("delay", 1000)])
def test_nobody_is_killed_for_being_slow_nor_while_the_parent_stands_still(
    run: Play, oracle: Play, do: str, times: int
) -> None:
    """For twice as long as a worker may make no progress; all of them go on meanwhile."""
    stands = do == "stop the parent"
    where: dict[str, Any] = {"chunk": LAST} if stands else {"who": 1}
    options = {"timeout": 1.0} if stands else {}
    point = "worker.forward" if stands else "worker.backward"
    ended = run(Fault(point, do, times=times, **where), late=not stands, options=options)
    assert not stands or ended.fired == [times]
    compare(ended, oracle, "sgd")
    assert ended.outcome["restarts"] == [0, 0]


# ---- what cannot be mended


@pytest.mark.parametrize(
    "work, way, ended_workers",
    chosen(
        [(work, *way) for work in WORKS for way in (("segfault", 3), ("SIGKILL", 6))],
        lambda row: (row[0] in TASKS, row[1]),
        [("sgd", "segfault", 3)],
    ),
)
def test_a_chunk_that_ends_workers_again_and_again_is_poison_and_the_call_can_be_made_again(
    run: Play, oracle: Play, work: str, way: str, ended_workers: int
) -> None:
    """A signal that may come from somebody else counts half."""
    point = "worker.forward" if work in TASKS else "worker.backward"
    ended = run(Fault(point, way, chunk=2, times=ended_workers), **case(work, again=True))
    assert ended.outcome["error"].startswith(f"PoisonChunkError: chunk 2 (samples 16..23) ended {ended_workers} work")
    assert ("out of memory, perhaps" in ended.outcome["error"]) == (way == "SIGKILL")
    assert ended.fired == [ended_workers] and ended.outcome["restored"]
    compare(ended, oracle, work)


def test_a_chunk_that_hangs_is_poison_and_the_error_names_timeout(run: Play) -> None:
    ended = run(Fault("worker.backward", "hang", chunk=2, times=1000), options={"timeout": 0.5})
    assert ended.outcome["error"].startswith("PoisonChunkError: chunk 2 (samples 16..23) ended 3 workers")
    assert "timeout=" in ended.outcome["error"]
    assert ended.fired == [3]


@SLOW
@pytest.mark.rows
@pytest.mark.parametrize("parallelize", [2, 1, 3])
def test_when_no_worker_is_left_that_is_an_error(run: Play, parallelize: int) -> None:
    faults = [kill("worker.backward", who=rank, nth=5) for rank in range(parallelize)]
    ended = run(*faults, parallelize=parallelize, options={"max_restarts": 0})
    assert ended.outcome["error"].startswith("AllWorkersLostError: no worker is left, and none may be started")
    assert ended.outcome["restored"]


@SLOW
def test_a_survivor_goes_on_alone(run: Play, oracle: Play) -> None:
    ended = run(kill("worker.backward", chunk=LAST, nth=2), options={"max_restarts": 0})
    check(ended, oracle, "sgd", LAST)
    assert ended.outcome["restarts"] == [0, 0]


SAID = "import sys; print('no such device', file=sys.stderr); import os; os._exit(0)"
ARRIVES = "receiving the module"
# By the point and what is done there each time: how the error begins, what is in it, and how often it is tried at most.
NEVER: dict[tuple[str, str], tuple[str, str, int]] = {
    ("worker.start", "SIGKILL"): ("WorkerStartError: batchopt-w", "while starting", 6),
    ("worker.start", SAID): ("WorkerStartError: batchopt-worker-", "no such device", 6),
    ("worker.install", "os._exit(0)"): ("WorkerStartError: ", ARRIVES, 2),
    ("worker.install", "sys.exit(3)"): ("WorkerError: ", ARRIVES, 2),
}


@SLOW
@pytest.mark.parametrize("point, way", NEVER)
def test_workers_that_never_start_and_modules_that_never_arrive_are_an_error(run: Play, point: str, way: str) -> None:
    begins, words, most = NEVER[point, way]
    ended = run(Fault(point, way, times=1000))
    assert ended.outcome["error"].startswith(begins) and words in ended.outcome["error"]
    assert 1 <= ended.fired[0] <= most


# ---- errors and interrupts


@pytest.mark.parametrize("error, work", chosen(itertools.product(ERRORS, WORKS), lambda row: row[0]))
def test_an_exception_arrives_and_the_call_can_be_made_again(run: Play, oracle: Play, error: str, work: str) -> None:
    """Parameters, counters and the optimizer's state are as before: then it has the bits of the first try."""
    where = (
        Fault("worker.forward", error, chunk=LAST, nth=at(work))
        if work in TASKS
        else Fault("worker.backward", error, chunk=LAST, nth=3)
    )
    ended = run(where, **case(work, again=True))
    assert ended.fired == [1] and ended.outcome.get("at", work) == work
    assert ended.outcome["error"].startswith(ERRORS[error])
    assert len(ended.outcome["error"]) < 200_000
    assert ended.outcome["restored"] and ended.outcome["restarts"] == [0, 0]
    compare(ended, oracle, work)


POINTS = {"parent.dispatched": 1, "parent.heard": 2, "parent.rung": 2, "parent.reduce": 2, "parent.answers": 1}
IN_STEPS = [*itertools.product([point for point in POINTS if point != "parent.answers"], STEPS)]
IN_TASKS = [*itertools.product(("parent.dispatched", "parent.heard", "parent.answers"), TASKS)]


@pytest.mark.parametrize("point, work", chosen(IN_STEPS + IN_TASKS, lambda row: (row[0], row[1] in TASKS)))
def test_an_interrupt_in_the_parent_undoes_the_call(run: Play, oracle: Play, point: str, work: str) -> None:
    calls = {"calls": [work, "last"]} if work in TASKS else {}
    ended = run(Fault(point, "SIGINT", who="parent", nth=POINTS[point]), **case(work, again=True, **calls))
    assert ended.fired == [1] and ended.outcome.get("at", work) == work
    assert ended.outcome["error"].startswith("KeyboardInterrupt")
    assert ended.outcome["restored"] and ended.outcome["restarts"] == [0, 0]
    if work in TASKS:
        whole = oracle(**case(work)).outcome["results"]
        assert equal(ended.outcome["results"], [whole[TASKS[work]], whole[-1]]) and ended.outcome["unchanged"]
    else:
        compare(ended, oracle, work)


@SLOW
@pytest.mark.rows
@pytest.mark.parametrize(
    "point, work",
    [
        *((point, "sgd") for point in [*[*POINTS][:4], "checkpoint.replace", "checkpoint.writing"]),
        *((point, "total") for point in ("parent.answers", "parent.dispatched", "parent.heard")),
    ],
)
def test_a_killed_parent_leaves_nothing(run: Play, point: str, work: str) -> None:
    given = {"calls": [work, "last"]} if work in TASKS else {"save": True}
    ended = run(kill(point, who="parent", nth=POINTS.get(point, 2)), **case(work, **given))
    assert ended.returncode == -9 and ended.fired == [1]  # and `play` has looked for processes
    assert len(ended.pids) == 2 or work in TASKS
