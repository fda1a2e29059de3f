"""A run in which something goes wrong has the bits of one in which nothing does; what cannot be mended is an error."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import ERRORS, Ended, Fault, Host, Play, play, same_bits
from tests.pairs import paired


def kill(point: str, **where: Any) -> Fault:
    return Fault(point, "SIGKILL", **where)


# The second chunk of the run of the last worker, at its second evaluation: chunks are 6 in all.
DEATHS = {
    "when it starts": kill("worker.start"),
    "when it greets": Fault("worker.greet", "os._exit(0)"),
    "before the module": Fault("worker.greeted", "os._exit(0)"),
    "when the batch comes": kill("worker.load", nth=2),
    "when the order comes": kill("worker.order", nth=2),
    "before the forward": kill("worker.forward", chunk=5, nth=2),
    "before the backward": kill("worker.backward", chunk=5, nth=2),
    "in the gradient": kill("worker.collect", chunk=5, nth=2),
    "in a merge": kill("worker.merge", chunk=5, nth=2),
    "before the report": kill("worker.send", chunk=5, nth=2),
    "in the report": Fault("worker.send", "half a frame", chunk=5, nth=2),
    "after the report": kill("worker.sent", chunk=5, nth=2),
    "after a first report": kill("worker.sent", chunk=3, nth=2),
}
WAYS = ["SIGTERM", "SIGABRT", "segfault", "os._exit(0)", "os._exit(3)", "C exit", "hang", "hold the GIL", "SIGSTOP"]
WAYS += ["close the pipe"]
LIES = ["garbage", "a wrong number", "a row that is not there"]
SLOW = pytest.mark.slow


def expected_extra(fault: Fault) -> dict[int, int]:
    """Which chunks are evaluated once more for the fault."""
    lost = {f"worker.{what}" for what in ("forward", "backward", "collect", "merge", "send")}
    return {fault.chunk: 1} if fault.point in lost and fault.chunk is not None else {}


def check(ended: Ended, whole: Ended, fault: Fault, extra: dict[int, int], repeats: bool = False) -> None:
    """The fault fired once, the bits are those of the oracle, and no chunk was evaluated but what was lost; where it is
    an evaluation that `repeats`, that is all of it at most."""
    assert ended.returncode == 0, ended.stderr
    assert "error" not in ended.outcome, ended.outcome["error"]
    assert ended.fired == [1]
    same_bits(ended.outcome, whole.outcome)
    evaluations = ended.outcome["evaluations"]
    if repeats:
        assert set(ended.chunks) == set(range(6))
        assert all(0 <= count - evaluations <= 2 for count in ended.chunks.values()), ended.chunks
    else:
        assert ended.chunks == {chunk: evaluations + extra.get(chunk, 0) for chunk in range(6)}


ONLY_ORDERED = ("worker.load", "worker.order", "worker.send", "worker.sent")


def deaths() -> list[Any]:
    """Each death once where every evaluation is ordered, and then where those repeat that can: in the second of a run,
    and in the fifth. By its name, with its optimizer, the number of workers, and in which repeat; 0 for none."""
    rows = []
    for when, optimizer, parallelize in itertools.product(DEATHS, ("sgd", "lbfgs"), (1, 2, 3)):
        rows.append((when, optimizer, parallelize, 0))
        if DEATHS[when].nth != 1 and DEATHS[when].point not in ONLY_ORDERED:
            # three steps of SGD have three evaluations
            rows += [(when, optimizer, parallelize, nth) for nth in ((2, 5) if optimizer == "lbfgs" else (2,))]
    quick = [(when, "sgd", 2, 0) for when in ("in the gradient", "in the report")]
    return paired(rows, lambda row: () if row in quick else [SLOW])


@pytest.mark.parametrize("when, optimizer, parallelize, repeat", deaths())
def test_a_death_at_any_moment_costs_the_chunk_at_hand(
    run: Play, oracle: Play, when: str, optimizer: str, parallelize: int, repeat: int
) -> None:
    fault, repeats = replace(DEATHS[when], nth=repeat) if repeat else DEATHS[when], bool(repeat)
    # a death is noticed as such, not as a hang
    options = {"timeout": 1000.0}
    ended = run(fault, parallelize=parallelize, optimizer=optimizer, options=options, repeats=repeats)
    check(ended, oracle(optimizer), fault, expected_extra(fault), repeats)


BETWEEN = {"task": ["task"], "change": ["change"], "change and task": ["change", "task"]}
BETWEEN |= {"task and change": ["task", "change"], "both again": ["task", "change", "task", "change"]}


def deaths_between() -> list[Any]:
    """Deaths in the second of three steps, by what came between the first and the second one."""
    rows = itertools.product(DEATHS, BETWEEN, (1, 2, 3))
    quick = [("before the backward", "task and change", parallelize) for parallelize in (1, 2)]
    return paired([*rows], lambda row: () if row in quick else [SLOW])


@pytest.mark.parametrize("when, between, parallelize", deaths_between())
def test_a_worker_that_starts_after_a_task_or_a_change_is_one_like_the_others(
    run: Play, oracle: Play, when: str, between: str, parallelize: int
) -> None:
    fault = DEATHS[when]
    if fault.point in ("worker.order", "worker.forward", "worker.merge", "worker.send", "worker.sent"):  # of tasks, too
        fault = replace(fault, nth=2 + BETWEEN[between].count("task"))
    ended = run(fault, parallelize=parallelize, between=BETWEEN[between], options={"timeout": 1000.0})
    assert ended.returncode == 0, ended.stderr
    assert "error" not in ended.outcome, ended.outcome["error"]
    assert ended.fired == [1]
    same_bits(ended.outcome, oracle("sgd").outcome)
    assert all(ended.outcome["alive"]) and sum(ended.outcome["restarts"]) <= 1


@SLOW
@pytest.mark.parametrize(
    "way, optimizer, nth, point",
    paired(
        (way, *of_run, point)
        for way in ("SIGKILL", "SIGSTOP", "hang", "raise ValueError('bad')")
        for of_run in (("sgd", 1), ("lbfgs", 1), ("lbfgs", 4))
        for point in ("worker.rung", "worker.forward", "worker.merge", "worker.again")
    ),
)
def test_whatever_happens_in_a_repeat_the_bits_are_the_same(
    run: Play, oracle: Play, point: str, way: str, optimizer: str, nth: int
) -> None:
    if point in ("worker.forward", "worker.merge"):
        nth += 3  # chunks of the first evaluation, which is ordered
    fault = Fault(point, way, who=1, nth=nth)
    ended = run(fault, optimizer=optimizer, again=True, options={"timeout": 1.0}, repeats=True)
    assert ended.fired == [1]
    if way.startswith("raise"):
        assert ended.outcome["error"].startswith("WorkerError: ValueError in worker 1"), ended.outcome["error"]
        assert ended.outcome["restored"]
    else:
        assert "error" not in ended.outcome, ended.outcome["error"]
    same_bits(ended.outcome, oracle(optimizer).outcome)


def ways() -> list[Any]:
    """Each way, where every evaluation is ordered; and in the second and fifth where they repeat."""
    whens = ("ordered", "repeat 2", "repeat 5")
    rows = itertools.product(WAYS, (1, 2, 3), whens)
    # nothing is sent in an evaluation that repeats
    return paired(row for row in rows if row[0] != "close the pipe" or row[2] == "ordered")


@SLOW
@pytest.mark.parametrize("way, parallelize, when", ways())
def test_any_way_to_end_or_to_hang_costs_the_chunk_at_hand(
    run: Play, oracle: Play, way: str, parallelize: int, when: str
) -> None:
    repeats, nth = when != "ordered", 5 if when == "repeat 5" else 2
    fault = Fault("worker.send" if way == "close the pipe" else "worker.backward", way, chunk=5, nth=nth)
    ended = run(fault, parallelize=parallelize, optimizer="lbfgs", options={"timeout": 1.0}, repeats=repeats)
    check(ended, oracle("lbfgs"), fault, {5: 1}, repeats)
    assert sum(ended.outcome["restarts"]) == 1 or parallelize > 1  # else nobody else could have done it


@SLOW
@pytest.mark.parametrize("lie", LIES)
def test_a_worker_that_talks_nonsense_is_replaced(run: Play, oracle: Play, lie: str) -> None:
    fault = Fault("worker.send", lie, chunk=5, nth=2)
    ended = run(fault, options={"timeout": 2.0})  # garbage begins like a long message, whose end is waited for
    check(ended, oracle("sgd"), fault, {5: 1})


@SLOW
def test_what_is_said_twice_counts_once(run: Play, oracle: Play) -> None:
    fault = Fault("worker.send", "twice", chunk=5, nth=2)
    ended = run(fault)
    check(ended, oracle("sgd"), fault, {})
    assert ended.outcome["restarts"] == [0, 0]


@SLOW
@pytest.mark.parametrize("optimizer", ["sgd", "lbfgs"])
@pytest.mark.parametrize("parallelize", [1, 2, 3])
def test_all_workers_die_at_once(run: Play, oracle: Play, parallelize: int, optimizer: str) -> None:
    faults = [kill("worker.backward", who=rank, nth=2) for rank in range(parallelize)]
    ended = run(*faults, parallelize=parallelize, optimizer=optimizer)
    assert "error" not in ended.outcome, ended.outcome["error"]
    assert ended.fired == [1] * parallelize
    same_bits(ended.outcome, oracle(optimizer).outcome)
    assert sum(ended.chunks.values()) == 6 * ended.outcome["evaluations"] + parallelize


@SLOW
@pytest.mark.parametrize("when", ["before the backward", "in the gradient"])
def test_without_chunks_the_shards_keep_their_boundaries(tmp_path: Path, host: Host, when: str) -> None:
    point = DEATHS[when].point
    case: dict[str, Any] = {"optimizer": "lbfgs", "parallelize": 2, "options": {"chunk_size": None}}
    whole = play(tmp_path / "whole", [], host, **case)
    ended = play(tmp_path / "run", [kill(point, chunk=1, nth=2)], host, **case)
    assert ended.fired == [1]
    same_bits(ended.outcome, whole.outcome)


@SLOW
@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_fails_while_speeds_are_measured_is_left_out(run: Play, oracle: Play, way: str) -> None:
    ended = run(
        Fault("worker.forward", way, who=1), optimizer="lbfgs", late=True, options={"speeds": None, "timeout": 20.0}
    )
    assert ended.fired == [1]
    same_bits(ended.outcome, oracle("lbfgs").outcome)


@SLOW
def test_a_stopped_worker_is_not_waited_for(run: Play, oracle: Play) -> None:
    """Its chunk is copied long before it counts as hung; what it says when it goes on is of no interest."""
    ended = run(Fault("worker.backward", "stop and continue", chunk=5, nth=2), optimizer="lbfgs", late=True)
    assert ended.fired == [1]
    same_bits(ended.outcome, oracle("lbfgs").outcome)
    assert ended.outcome["restarts"] == [0, 0]
    assert ended.outcome["seconds"] < 20


@pytest.mark.slow
def test_while_the_parent_is_stopped_no_worker_is_silent(run: Play, oracle: Play) -> None:
    """For twice as long as a worker may make no progress; all of them go on meanwhile."""
    ended = run(Fault("worker.forward", "stop the parent", chunk=5, times=3), options={"timeout": 1.0})
    assert ended.fired == [3]
    same_bits(ended.outcome, oracle("sgd").outcome)
    assert ended.outcome["restarts"] == [0, 0]


@SLOW
def test_a_slow_worker_is_not_killed(run: Play, oracle: Play) -> None:
    ended = run(Fault("worker.backward", "delay", who=1, times=1000), late=True)
    same_bits(ended.outcome, oracle("sgd").outcome)
    assert ended.outcome["restarts"] == [0, 0]


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("lbfgs", marks=SLOW)])
@pytest.mark.parametrize("way, deaths", [("segfault", 3), ("SIGKILL", 6)])
def test_a_chunk_that_ends_workers_again_and_again_is_poison_and_the_step_can_be_made_again(
    run: Play, oracle: Play, optimizer: str, way: str, deaths: int
) -> None:
    """A signal that may come from somebody else counts half."""
    ended = run(Fault("worker.backward", way, chunk=2, times=deaths), optimizer=optimizer, again=True)
    assert ended.outcome["error"].startswith(f"PoisonChunkError: chunk 2 (samples 16..23) ended {deaths} workers")
    assert ("out of memory, perhaps" in ended.outcome["error"]) == (way == "SIGKILL")
    assert ended.fired == [deaths]
    assert ended.outcome["restored"]
    same_bits(ended.outcome, oracle(optimizer).outcome)


def test_a_chunk_that_hangs_is_poison_and_the_error_names_timeout(run: Play) -> None:
    ended = run(Fault("worker.backward", "hang", chunk=2, times=1000), options={"timeout": 0.5})
    assert ended.outcome["error"].startswith("PoisonChunkError: chunk 2 (samples 16..23) ended 3 workers")
    assert "timeout=" in ended.outcome["error"]
    assert ended.fired == [3]


@SLOW
@pytest.mark.parametrize("parallelize", [1, 2, 3])
def test_when_no_worker_is_left_that_is_an_error(run: Play, parallelize: int) -> None:
    faults = [kill("worker.backward", who=rank, nth=5) for rank in range(parallelize)]
    ended = run(*faults, parallelize=parallelize, options={"max_restarts": 0})
    assert ended.outcome["error"].startswith("AllWorkersLostError: no worker is left, and none may be started")
    assert ended.outcome["restored"]


@SLOW
def test_a_survivor_goes_on_alone(run: Play, oracle: Play) -> None:
    fault = kill("worker.backward", chunk=5, nth=2)
    ended = run(fault, options={"max_restarts": 0})
    check(ended, oracle("sgd"), fault, {5: 1})
    assert ended.outcome["restarts"] == [0, 0]


@SLOW
@pytest.mark.parametrize("way", ["SIGKILL", "os._exit(0)", "C exit"])
def test_workers_that_never_start_are_an_error(run: Play, way: str) -> None:
    said = "import sys; print('no such device', file=sys.stderr); import os; os._exit(0)"
    ended = run(Fault("worker.start", said if way == "os._exit(0)" else way, times=1000))
    assert ended.outcome["error"].startswith("WorkerStartError: batchopt-worker-")
    assert "while starting" in ended.outcome["error"]
    assert way != "os._exit(0)" or "no such device" in ended.outcome["error"]
    assert 3 <= ended.fired[0] <= 6


@SLOW
@pytest.mark.parametrize("way", ["SIGKILL", "C exit"])
def test_a_process_to_fork_workers_from_that_never_starts_is_an_error(run: Play, way: str) -> None:
    ended = run(Fault("forkserver.start", way, times=1000), alone=True)
    expected = (
        "WorkerStartError: batchopt-worker-0 could not be made: the process that workers are forked from ended with"
    )
    assert ended.outcome["error"].startswith(expected)
    assert ended.fired[0] <= 6


@SLOW
def test_a_process_to_fork_workers_from_that_ends_once_is_replaced(run: Play, oracle: Play) -> None:
    ended = run(Fault("forkserver.start", "SIGKILL"), alone=True)
    assert ended.fired == [1]
    same_bits(ended.outcome, oracle("sgd").outcome)
    assert ended.outcome["restarts"] == [0, 0]


@SLOW
@pytest.mark.parametrize("way", ["segfault", "os._exit(0)", "raise OSError('no file')", "sys.exit(3)"])
def test_a_module_that_cannot_arrive_is_tried_once(run: Play, way: str) -> None:
    ended = run(Fault("worker.install", way, times=1000))
    raised = "(" in way and not way.startswith("os._exit")
    expected = "WorkerError: " if raised else "WorkerStartError: "
    assert ended.outcome["error"].startswith(expected)
    assert "receiving the module" in ended.outcome["error"]
    assert ended.fired[0] <= 2


@SLOW
@pytest.mark.parametrize("optimizer", ["sgd", "lbfgs"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_arrives_and_the_step_can_be_made_again(
    run: Play, oracle: Play, error: str, optimizer: str
) -> None:
    """Parameters, counters and the optimizer's state are as before the step: then it has the bits of the first try."""
    ended = run(Fault("worker.backward", error, chunk=5, nth=3), optimizer=optimizer, again=True)
    assert ended.fired == [1]
    assert ended.outcome["error"].startswith(ERRORS[error])
    assert len(ended.outcome["error"]) < 200_000
    assert ended.outcome["restored"]
    assert ended.outcome["restarts"] == [0, 0]
    same_bits(ended.outcome, oracle(optimizer).outcome)


@SLOW
@pytest.mark.parametrize("optimizer", ["sgd", "lbfgs"])
@pytest.mark.parametrize("point", ["parent.dispatched", "parent.heard", "parent.rung", "parent.reduce"])
def test_an_interrupt_in_the_parent_undoes_the_step(run: Play, oracle: Play, point: str, optimizer: str) -> None:
    nth = 2 if optimizer == "sgd" or point == "parent.rung" else 7
    repeats = point == "parent.rung"
    ended = run(Fault(point, "SIGINT", who="parent", nth=nth), optimizer=optimizer, again=True, repeats=repeats)
    assert ended.fired == [1]
    assert ended.outcome["error"].startswith("KeyboardInterrupt")
    assert ended.outcome["restored"]
    same_bits(ended.outcome, oracle(optimizer).outcome)
    assert ended.outcome["restarts"] == [0, 0]


@SLOW
@pytest.mark.parametrize(
    "point",
    ["parent.dispatched", "parent.heard", "parent.rung", "parent.reduce", "checkpoint.writing", "checkpoint.replace"],
)
def test_a_killed_parent_leaves_nothing(run: Play, tmp_path: Path, point: str) -> None:
    repeats, nth = point == "parent.rung", 12 if point == "parent.heard" else 2  # both workers have said something
    ended = run(Fault(point, "SIGKILL", who="parent", nth=nth), save=True, alone=True, repeats=repeats)
    assert ended.returncode == -9  # and `play` has looked for processes
    assert len(ended.pids) == 2
