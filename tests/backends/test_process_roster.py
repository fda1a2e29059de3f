"""Which worker processes are started, killed and given up, and what each is still to be sent: without a process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchopt import BatchOptimizer, Sample, Worker
from batchopt.backends.base import WorkerInfo
from batchopt.backends.lacking import lacking
from batchopt.backends.process.events import Events
from batchopt.backends.process.roster import (
    Roster,
)
from batchopt.backends.process.wanted import AFTER, NOTHING, Field, Wanted, having
from batchopt.backends.timeouts import ATTEMPTS
from batchopt.errors import AllWorkersLostError, WorkerLostError, WorkerStartError
from tests.workloads import mlp


def infos(*ranks: int) -> list[WorkerInfo]:
    """Of workers that there are not yet."""
    return [WorkerInfo(rank, 0, "here", torch.device("cpu"), alive=False) for rank in ranks]


def roster(workers: int = 2, restarts: int = 2) -> Roster:
    """One whose workers have all started and joined."""
    made = Roster(restarts)
    made.resize(infos(*range(workers)))
    for rank in made.start([]):
        made.started(rank, 100 + rank)
        made.joined(rank)
    return made


def end(made: Roster, rank: int, joined: bool = False) -> None:
    made.ended(rank, f"worker {rank} ended", joined=joined, in_users_code=False)


def test_who_is_missing_is_started_again_while_restarts_are_left() -> None:
    made = roster(restarts=1)
    end(made, 1, joined=True)
    assert made.is_amiss([0]) and not made.infos[1].alive
    assert list(made.start([0])) == [1]
    made.started(1, 201)
    assert made.infos[1].restarts == 1 and made.infos[1].pid == 201
    made.joined(1)
    end(made, 0, joined=True)
    assert list(made.start([1])) == []
    assert isinstance(made.given_up[0], WorkerLostError) and "worker 0 ended" in str(made.given_up[0])
    assert not made.is_amiss([1]) and made.is_complete([1])
    assert list(made.start([1])) == [] and made.infos[0].lost and not made.infos[1].lost


def test_who_ends_before_it_can_work_is_given_up_after_some_attempts_in_a_row() -> None:
    made = roster(restarts=100)
    for _ in range(3):
        for _ in range(ATTEMPTS - 1):
            end(made, 1)
        made.joined(1)
    for attempt in range(ATTEMPTS):
        assert 1 not in made.given_up
        assert list(made.start([0])) == [1]
        made.started(1, 300 + attempt)
        end(made, 1)
    assert isinstance(made.given_up[1], WorkerStartError)


def test_no_process_to_be_had_counts_as_an_attempt_and_the_first_time_for_good() -> None:
    made = Roster(10)
    made.resize(infos(0))
    assert list(made.start([])) == [0]
    made.not_started(0, "no process")
    with pytest.raises(AllWorkersLostError, match="no process"):
        made.check_workers_are_left([])
    made = roster(1, restarts=10)
    for _ in range(ATTEMPTS):
        assert not made.given_up
        made.not_started(0, "no process")
    assert 0 in made.given_up


def test_more_and_fewer_workers() -> None:
    made = roster(2, restarts=0)
    new, ending = made.resize([*made.infos, *infos(2, 3)])
    assert [info.rank for info in new] == [2, 3] == sorted(ending)
    assert list(made.start([0, 1])) == [2, 3]
    assert made.resize(made.infos[:1]) == ([], {1, 2, 3})
    assert list(made.start([0])) == []
    made = roster(2, restarts=0)
    end(made, 1, joined=True)
    assert list(made.start([0])) == [] and 1 in made.given_up
    made.resize([made.infos[0], *infos(1)])  # a new one of a rank that was given up
    assert list(made.start([0])) == [1] and not made.given_up


# ---- what a worker lacks is sent in one order, and with a module what it drops with the one before


def told(value: object) -> Field:
    return Field((), value)._replace(calls=(object(),))  # type: ignore[arg-type]  # any call


ALL = Wanted(*[told(name) for name in Wanted._fields])


def taken(have: Wanted, want: Wanted) -> Wanted:
    """Once all that it lacks was sent."""
    for name in lacking(have, want, AFTER):
        have = having(have, name, getattr(want, name))
    return have


def test_a_new_worker_is_sent_everything_in_the_order_of_the_fields() -> None:
    assert [*lacking(Wanted(), ALL, AFTER)] == [*Wanted._fields]
    assert taken(Wanted(), ALL) == ALL and not [*lacking(ALL, ALL, AFTER)]


def test_what_has_changed_is_sent_alone_also_if_it_is_equal() -> None:
    again = told("weights")._replace(calls=ALL.weights.calls)
    assert again == ALL.weights
    assert [*lacking(ALL, ALL._replace(weights=again), AFTER)] == ["weights"]


def test_with_a_module_all_that_belongs_to_it_is_sent_again() -> None:
    want = ALL._replace(module=told("another"), outputs=NOTHING)
    found = [*lacking(ALL, want, AFTER)]
    assert found == ["module", *(name for name in Wanted._fields if name in AFTER["module"])]
    assert taken(ALL, want) == want


def test_what_was_dropped_is_lacking_wherever_an_interrupt_came() -> None:
    want = ALL._replace(module=told("another"))
    for sent in range(len(Wanted._fields)):
        have = ALL
        for name in [*lacking(have, want, AFTER)][:sent]:
            have = having(have, name, getattr(want, name))
        assert taken(have, want) == want


# ---- nobody wakes the parent up for the report of a chunk, and it hears whoever has something to say


CHUNKS = 48


def test_nobody_wakes_up_for_the_report_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, wait = 0, Events.wait

    def counted(pool: Events, timeout: float) -> Any:
        nonlocal turns
        turns += 1
        return wait(pool, timeout)

    monkeypatch.setattr(Events, "wait", counted)
    case, found = mlp(samples=2 * CHUNKS), []
    with BatchOptimizer(case.module, case.criterion, optimizer=None, parallelize=2, chunk_size=2) as opt:
        opt.load(case.inputs, case.targets)
        opt.evaluate()
        for _ in range(8):
            turns = 0
            opt.evaluate()
            found.append(turns)
    assert min(found) <= CHUNKS // 4  # two workers end, and may take something from each other before


class Long:
    """A posthook that returns so many bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, worker: Worker, sample: Sample) -> bytes:
        return bytes([sample.indices[0] % 256]) * self.size


@pytest.mark.rows
@pytest.mark.parametrize("size", [2**14, 2**20])
def test_a_full_pipe_is_emptied(size: int) -> None:
    case = mlp(samples=2 * CHUNKS)
    with BatchOptimizer(
        case.module, case.criterion, optimizer=None, parallelize=2, chunk_size=2, posthook=Long(size), timeout=1000.0
    ) as opt:
        opt.load(case.inputs, case.targets)
        for _ in range(2):
            opt.evaluate()
            assert opt.hook_results == [bytes([2 * chunk % 256]) * size for chunk in range(CHUNKS)]
