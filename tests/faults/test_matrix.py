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
    "when the batch comes": kill("worker.load"),
    "when the order comes": kill("worker.order", nth=2),
    "before the forward": kill("worker.forward", chunk=5, nth=2),
    "before the backward": kill("worker.backward", chunk=5, nth=2),
    "in the gradient": kill("worker.collect", chunk=5, nth=2),
    "in a merge": kill("worker.merge", chunk=5, nth=2),
    "before the report": kill("worker.report", chunk=5, nth=2),
    "in the report": kill("worker.reporting", chunk=5, nth=2),
    "after the report": kill("worker.reported", chunk=5, nth=2),
    "after a first report": kill("worker.reported", chunk=3, nth=2),
    "when it is done": kill("worker.done", chunk=5, nth=2),
}
WAYS = ["SIGTERM", "SIGABRT", "segfault", "os._exit(0)", "os._exit(3)", "C exit", "hang", "hold the GIL", "SIGSTOP"]
WAYS += ["close the pipe"]
LIES = ["garbage", "a chunk that is not there", "a partial too many", "a row that is not there"]
LIES += ["a place that is not there"]
SLOW = pytest.mark.slow


def expected_extra(fault: Fault) -> dict[int, int]:
    """Which chunks are evaluated once more for the fault."""
    lost = {f"worker.{what}" for what in ("forward", "backward", "collect", "merge", "report", "reporting")}
    return {fault.chunk: 1} if fault.point in lost and fault.chunk is not None else {}


def check(ended: Ended, whole: Ended, extra: dict[int, int]) -> None:
    """The fault fired once, the bits are those of the oracle, and no chunk was evaluated but what was lost."""
    assert ended.returncode == 0, ended.stderr
    assert "error" not in ended.outcome, ended.outcome["error"]
    assert ended.fired == [1]
    same_bits(ended.outcome, whole.outcome)
    evaluations = ended.outcome["evaluations"]
    assert ended.chunks == {chunk: evaluations + extra.get(chunk, 0) for chunk in range(6)}


def deaths() -> list[Any]:
    """Each death in the first evaluation, in the second and in the fifth, which may repeat the one before; by its name,
    with its optimizer and the number of workers."""
    rows: list[Any] = []
    for when, optimizer, parallelize in itertools.product(DEATHS, ("sgd", "lbfgs"), (1, 2, 3)):
        nths = (1,) if DEATHS[when].nth == 1 else (1, 2, 5) if optimizer == "lbfgs" else (1, 2)  # of three
        rows += [(when, optimizer, parallelize, nth) for nth in nths]
    quick = [(when, "sgd", 2, 2) for when in ("in the gradient", "in the report")]
    return paired(rows, lambda row: () if row in quick else [SLOW])


@pytest.mark.parametrize("when, optimizer, parallelize, nth", deaths())
def test_a_death_at_any_moment_costs_the_chunk_at_hand(
    run: Play, oracle: Play, when: str, optimizer: str, parallelize: int, nth: int
) -> None:
    fault = replace(DEATHS[when], nth=nth)
    # a death is noticed as such, not as a hang
    ended = run(fault, parallelize=parallelize, optimizer=optimizer, options={"timeout": 1000.0})
    check(ended, oracle(optimizer), expected_extra(fault))


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
    if fault.nth == 2 and fault.point not in ("worker.backward", "worker.collect"):  # of tasks, too
        fault = replace(fault, nth=2 + BETWEEN[between].count("task"))
    ended = run(fault, parallelize=parallelize, between=BETWEEN[between], options={"timeout": 1000.0})
    assert ended.returncode == 0, ended.stderr
    assert "error" not in ended.outcome, ended.outcome["error"]
    assert ended.fired == [1]
    same_bits(ended.outcome, oracle("sgd").outcome)
    assert all(ended.outcome["alive"]) and sum(ended.outcome["restarts"]) <= 1


@SLOW
@pytest.mark.parametrize("way, parallelize, nth", paired(itertools.product(WAYS, (1, 2, 3), (1, 2, 5))))
def test_any_way_to_end_or_to_hang_costs_the_chunk_at_hand(
    run: Play, oracle: Play, way: str, parallelize: int, nth: int
) -> None:
    fault = Fault("worker.report" if way == "close the pipe" else "worker.backward", way, chunk=5, nth=nth)
    ended = run(fault, parallelize=parallelize, optimizer="lbfgs", options={"timeout": 1.0})
    # what was reported after the pipe was closed counts
    check(ended, oracle("lbfgs"), {} if way == "close the pipe" else {5: 1})
    assert sum(ended.outcome["restarts"]) == 1 or parallelize > 1  # else nobody else could have done it


@SLOW
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("lie", LIES)
def test_invalid_reports_replace_the_worker(run: Play, oracle: Play, lie: str, nth: int) -> None:
    fault = Fault("worker.report" if lie == "garbage" else "worker.reporting", lie, chunk=5, nth=nth)
    ended = run(fault, options={"timeout": 2.0})  # garbage begins like a long message, whose end is waited for
    assert ended.fired == [1] and "error" not in ended.outcome, ended.outcome["error"]
    same_bits(ended.outcome, oracle("sgd").outcome)


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
    check(ended, oracle("sgd"), {5: 1})
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
    nth = {"parent.dispatched": 1, "parent.heard": 2, "parent.rung": 2, "parent.reduce": 2}[point]
    ended = run(Fault(point, "SIGINT", who="parent", nth=nth), optimizer=optimizer, again=True)
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
    nth = 1 if point == "parent.dispatched" else 2
    ended = run(Fault(point, "SIGKILL", who="parent", nth=nth), save=True, alone=True)
    assert ended.returncode == -9  # and `play` has looked for processes
    assert len(ended.pids) == 2
