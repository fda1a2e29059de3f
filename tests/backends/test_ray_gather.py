"""What nodes say of one evaluation counts once, and only if it is about that one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from batchopt._mapreduce.reduce import reduce_answers
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.ray.gather import NodeGather
from batchopt.backends.ray.messages import (
    AssignmentResult,
    CalledOff,
    NodeFailure,
    NodeReply,
    NodeTask,
    PartialMessage,
    WorkerTimes,
)
from batchopt.backends.ray.node import ClusterNode, PendingRequest
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


NODES = [ClusterNode(NoLink(), number, f"node {number}", (number,)) for number in (0, 1)]
CUT = Cut((0, 3, 6, 9, 12))


def begin() -> NodeGather:
    """Evaluation 7 of four chunks, two for each of two nodes; assignment 10 is the first one's, 11 the second's."""
    orders = [Order(7, 1, 0, 2), Order(7, 1, 2, 4)]
    paces: dict[Kind, dict[int, float]] = {kind: {} for kind in ORDERS}
    gather = NodeGather(NODES, CUT, orders, Numbering((None,), (12,)), paces, torch.float32)
    assert gather.scheduler.decide([0, 1], gather.estimate, 0.0) == [
        Give(0, (ChunkRun(0, 2),)),
        Give(1, (ChunkRun(2, 4),)),
    ]
    return gather


def reply(attempt: int, position: int, value: float = 1.0) -> NodeReply:
    """Two chunks, merged."""
    gradient = np.full(3, value, np.float32).view(np.uint8)
    gradient.flags.writeable = False  # as it comes from the network
    sums = [PartialMessage(1, position, (value,), gradient, np.zeros(0, np.uint8), b"\1")]
    return NodeReply(
        AssignmentResult(attempt, sums, [WorkerTimes(0, 6, 0.1, [(0.0, 0.1, 0, 2)], b"", False)], 0.1), None, []
    )


def test_what_both_say_makes_the_whole() -> None:
    gather = begin()
    gather.heard(NODES[1], PendingRequest(NodeTask.EVALUATE, 7, 11), reply(11, 1, 2.0))
    assert gather.scheduler.missing == 2
    gather.heard(NODES[0], PendingRequest(NodeTask.EVALUATE, 7, 10), reply(10, 0, 1.0))
    assert gather.scheduler.missing == 0
    gradient = torch.zeros(3)
    whole = reduce_answers(gather.answers(), 4, gradient)
    assert whole.losses == (3.0,) and gradient.tolist() == [3.0] * 3
    assert [answer.rank for answer in gather.answers()] == [0, 1]
    assert gather.estimate(0, [ChunkRun(0, 1)]) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "late",
    [
        (PendingRequest(NodeTask.EVALUATE, 6, 9), reply(9, 0)),  # of the evaluation before
        (PendingRequest(NodeTask.PROBE, 7, 10), reply(10, 0)),
        (PendingRequest(NodeTask.EVALUATE, 7, 10), reply(4, 0)),  # another assignment than was asked for
    ],
)
def test_what_is_about_something_else_does_not_count(late: tuple[PendingRequest, NodeReply]) -> None:
    gather = begin()
    gather.heard(NODES[0], *late)
    assert gather.scheduler.missing == 4 and gather.answers() == [] and not gather.failures


def test_what_is_said_twice_counts_once() -> None:
    gather = begin()
    for _ in range(2):
        gather.heard(NODES[0], PendingRequest(NodeTask.EVALUATE, 7, 10), reply(10, 0))
    gather.heard(NODES[1], PendingRequest(NodeTask.EVALUATE, 7, 11), reply(11, 1))
    assert gather.scheduler.missing == 0 and len(gather.answers()) == 2


def test_a_chunk_that_two_machines_evaluated_counts_once() -> None:
    gather = begin()
    for attempt, position in ((10, 0), (11, 1), (12, 1)):
        gather.heard(
            NODES[min(attempt - 10, 1)], PendingRequest(NodeTask.EVALUATE, 7, attempt), reply(attempt, position)
        )
    gradient = torch.zeros(3)
    assert reduce_answers(gather.answers(), 4, gradient).losses == (2.0,) and gradient.tolist() == [2.0] * 3


def test_the_failure_of_the_first_samples_is_the_one() -> None:
    gather = begin()
    for number, start in ((1, 6), (0, 0)):
        raised = WorkerError(0, "ValueError", "no", range(start, start + 3))
        raised.__cause__ = RemoteTraceback("trace")
        failure = NodeReply(None, NodeFailure.of(raised), [])
        gather.heard(NODES[number], PendingRequest(NodeTask.EVALUATE, 7, 10 + number), failure)
    error = gather.failures.first()
    assert isinstance(error, WorkerError) and error.samples == range(0, 3) and error.rank == 0
    assert "trace" in str(error.__cause__)


def test_what_was_called_off_is_no_failure() -> None:
    gather = begin()
    gather.heard(
        NODES[0],
        PendingRequest(NodeTask.EVALUATE, 7, 10),
        NodeReply(None, NodeFailure.of(CalledOff("nobody waits")), []),
    )
    assert not gather.failures and gather.scheduler.busy == [1]


def test_a_lost_machines_share_is_given_to_another() -> None:
    gather = begin()
    gather.heard(NODES[0], PendingRequest(NodeTask.EVALUATE, 7, 10), reply(10, 0))
    gather.lost(NODES[1], "it is gone")
    (command,) = gather.scheduler.decide([0], gather.estimate, 1.0)
    assert command == Give(0, (ChunkRun(2, 3),))
