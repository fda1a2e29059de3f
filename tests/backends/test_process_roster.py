"""Which worker processes are started and given up: without a process."""

from __future__ import annotations

import pytest
import torch

from batchopt.backends.base import WorkerInfo
from batchopt.backends.process.roster import (
    Roster,
)
from batchopt.backends.timeouts import ATTEMPTS
from batchopt.errors import AllWorkersLostError, WorkerStartError


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
