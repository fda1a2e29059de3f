"""What machines say of one evaluation counts once, and only if it is about that one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from batchopt._mapreduce.reduce import reduce_answers
from batchopt.backends.ledger import Run
from batchopt.backends.ray.gather import NodeGather
from batchopt.backends.ray.messages import CalledOff, Failed, Reply, Sum, Task, Work, Yield
from batchopt.backends.ray.node import Call, Machine
from batchopt.backends.ray.scheduler import Give
from batchopt.errors import RemoteTraceback, WorkerError
from batchopt_workers.messages import ORDERS, Cut, Kind, Order
from batchopt_workers.numbering import Numbering


class NoLink:
    """Leads nowhere: nothing is asked."""

    def call(self, method: Any, *arguments: Any, **keywords: Any) -> Any:
        raise AssertionError(method)

    def call_aside(self, method: Any, *arguments: Any, **keywords: Any) -> Any:
        raise AssertionError(method)

    def end(self) -> None:
        raise AssertionError


MACHINES = [Machine(NoLink(), number, f"machine {number}", (number,)) for number in (0, 1)]
CUT = Cut((0, 3, 6, 9, 12))


def begin() -> NodeGather:
    """Evaluation 7 of four chunks, two for each of two machines; share 10 is the first one's, 11 the second's."""
    orders = [Order(7, 1, 0, 2), Order(7, 1, 2, 4)]
    paces: dict[Kind, dict[int, float]] = {kind: {} for kind in ORDERS}
    harvest = NodeGather(MACHINES, CUT, orders, Numbering((None,), (12,)), paces, torch.float32)
    assert harvest.handout.decide([0, 1], harvest.estimate, 0.0) == [Give(0, (Run(0, 2),)), Give(1, (Run(2, 4),))]
    return harvest


def reply(attempt: int, position: int, value: float = 1.0) -> Reply:
    """Two chunks, merged."""
    gradient = np.full(3, value, np.float32).view(np.uint8)
    gradient.flags.writeable = False  # as it comes from the network
    sums = [Sum(1, position, (value,), gradient, np.zeros(0, np.uint8), b"\1")]
    return Reply(Yield(attempt, sums, [Work(0, 6, 0.1, [(0.0, 0.1, 0, 2)], b"")], 0.1), None, [])


def test_what_both_say_makes_the_whole() -> None:
    harvest = begin()
    harvest.heard(MACHINES[1], Call(Task.EVALUATE, 7, 11), reply(11, 1, 2.0))
    assert harvest.handout.missing == 2
    harvest.heard(MACHINES[0], Call(Task.EVALUATE, 7, 10), reply(10, 0, 1.0))
    assert harvest.handout.missing == 0
    gradient = torch.zeros(3)
    whole = reduce_answers(harvest.answers(), 4, gradient)
    assert whole.losses == (3.0,) and gradient.tolist() == [3.0] * 3
    assert [answer.rank for answer in harvest.answers()] == [0, 1]
    assert harvest.estimate(0, [Run(0, 1)]) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "late",
    [
        (Call(Task.EVALUATE, 6, 9), reply(9, 0)),  # of the evaluation before
        (Call(Task.PROBE, 7, 10), reply(10, 0)),
        (Call(Task.EVALUATE, 7, 10), reply(4, 0)),  # another share than was asked for
    ],
)
def test_what_is_about_something_else_does_not_count(late: tuple[Call, Reply]) -> None:
    harvest = begin()
    harvest.heard(MACHINES[0], *late)
    assert harvest.handout.missing == 4 and harvest.answers() == [] and not harvest.failures


def test_what_is_said_twice_counts_once() -> None:
    harvest = begin()
    for _ in range(2):
        harvest.heard(MACHINES[0], Call(Task.EVALUATE, 7, 10), reply(10, 0))
    harvest.heard(MACHINES[1], Call(Task.EVALUATE, 7, 11), reply(11, 1))
    assert harvest.handout.missing == 0 and len(harvest.answers()) == 2


def test_a_chunk_that_two_machines_evaluated_counts_once() -> None:
    harvest = begin()
    for attempt, position in ((10, 0), (11, 1), (12, 1)):
        harvest.heard(MACHINES[min(attempt - 10, 1)], Call(Task.EVALUATE, 7, attempt), reply(attempt, position))
    gradient = torch.zeros(3)
    assert reduce_answers(harvest.answers(), 4, gradient).losses == (2.0,) and gradient.tolist() == [2.0] * 3


def test_the_failure_of_the_first_samples_is_the_one() -> None:
    harvest = begin()
    for number, start in ((1, 6), (0, 0)):
        raised = WorkerError(0, "ValueError", "no", range(start, start + 3))
        raised.__cause__ = RemoteTraceback("trace")
        failed = Reply(None, Failed.of(raised), [])
        harvest.heard(MACHINES[number], Call(Task.EVALUATE, 7, 10 + number), failed)
    error = harvest.failures.first()
    assert isinstance(error, WorkerError) and error.samples == range(0, 3) and error.rank == 0
    assert "trace" in str(error.__cause__)


def test_what_was_called_off_is_no_failure() -> None:
    harvest = begin()
    harvest.heard(MACHINES[0], Call(Task.EVALUATE, 7, 10), Reply(None, Failed.of(CalledOff("nobody waits")), []))
    assert not harvest.failures and harvest.handout.busy == [1]


def test_a_lost_machines_share_is_given_to_another() -> None:
    harvest = begin()
    harvest.heard(MACHINES[0], Call(Task.EVALUATE, 7, 10), reply(10, 0))
    harvest.lost(MACHINES[1], "it is gone")
    (command,) = harvest.handout.decide([0], harvest.estimate, 1.0)
    assert command == Give(0, (Run(2, 3),))
