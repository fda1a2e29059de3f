"""Where workers are placed, and which node is asked for a sign or given up: without a cluster."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from batchopt.backends.patience import STARTUP, UNKNOWN
from batchopt.backends.ray.actor import NodeActor, request
from batchopt.backends.ray.cluster import Room
from batchopt.backends.ray.messages import Envelope, NodeTask, Question, WorkerStatus
from batchopt.backends.ray.node import ClusterNode, PendingRequest
from batchopt.backends.ray.roster import ANSWERING, GiveUp, NodePlacement, NodeRoster, Ping, check, place
from batchopt.errors import AllWorkersLostError


class Tape:
    """A link to nobody that keeps what was asked."""

    def __init__(self) -> None:
        self.said: list[tuple[str, tuple[Any, ...]]] = []
        self.ended = False

    def call(self, method: Any, *arguments: Any, **keywords: Any) -> Any:
        self.said.append((method.__name__, arguments))
        return len(self.said)

    call_aside = call

    def end(self) -> None:
        self.ended = True


def some_node(*ranks: int, ready: bool = True) -> ClusterNode:
    """A node with these workers, named after the first."""
    made = ClusterNode(Tape(), ranks[0], f"node {ranks[0]}", ranks)
    made.ready = ready
    return made


def asked(node: ClusterNode, task: NodeTask | Question, silent: float) -> ClusterNode:
    """The node was asked, and has been silent since then."""
    node.requests[object()] = PendingRequest(task, silent=silent)
    return node


def test_ranks_are_placed_in_order_where_there_is_room() -> None:
    assert place([3, 4, 5], [Room("a", 1), Room("b", 2)]) == [NodePlacement("a", (3,)), NodePlacement("b", (4, 5))]


def test_workers_of_a_lost_node_are_placed_where_there_is_room_and_it_is_allowed() -> None:
    roster, first, second = NodeRoster(3), some_node(0, 1), some_node(2, 3)
    roster.grow(4)
    assert not roster.wants_room([first, second])
    roster.lost(second, "is gone")
    assert roster.ending == "node 2 (workers 2 to 3) is gone" and roster.failures == 0
    assert roster.wants_room([first]) and roster.homeless([first]) == [2, 3]
    assert roster.replace([first], [Room("a", 1)]) == [NodePlacement("a", (2,))]
    assert [info.lost for info in roster.infos] == [False, False, False, True]
    third = some_node(2)
    assert roster.replace([first, third], []) == []
    assert roster.replace([first, third], [Room("a", 5)]) == [NodePlacement("a", (3,))]
    assert [info.restarts for info in roster.infos] == [0, 0, 1, 1] and not roster.infos[3].lost
    roster.lost(first, "is gone")
    assert roster.replace([third, some_node(3)], [Room("a", 5)]) == [NodePlacement("a", (0,))]
    assert not roster.wants_room([third, some_node(3)]) and roster.infos[1].lost  # no restart is left


def test_nobody_is_left() -> None:
    roster, only = NodeRoster(1), some_node(0)
    roster.grow(1)
    roster.lost(only, "is gone")
    roster.check_somebody_is_left([], 100.0)  # there may be room soon
    roster.check_somebody_is_left([], 100.0 + STARTUP)
    with pytest.raises(AllWorkersLostError, match="there was no room"):
        roster.check_somebody_is_left([], 101.0 + STARTUP)
    roster.check_somebody_is_left([some_node(0)], 200.0)
    roster.check_somebody_is_left([], 300.0)  # counted from now
    roster.replace([], [Room("a", 1)])
    with pytest.raises(AllWorkersLostError, match=r"max_restarts is spent.*node 0"):
        roster.check_somebody_is_left([], 300.0)


def test_what_a_node_says_of_its_workers_counts_restarts_there_once() -> None:
    roster, node = NodeRoster(0), some_node(0, 1)
    roster.grow(2)
    roster.infos[1].restarts = 5  # on nodes before
    for restarts in (1, 1, 2):
        roster.reported(node, [WorkerStatus(7, "cpu", 0, True, False), WorkerStatus(8, "cpu", restarts, False, True)])
    assert [info.restarts for info in roster.infos] == [0, 7]
    assert [(info.pid, info.alive, info.lost) for info in roster.infos] == [(7, True, False), (8, False, True)]


def test_nodes_that_do_not_start_are_counted_until_one_does() -> None:
    roster = NodeRoster(0)
    roster.grow(2)
    for _ in range(2):
        roster.lost(some_node(0, ready=False), "did not start")
    assert roster.failures == 2
    roster.started()
    assert roster.failures == 0
    roster.not_started(first := ValueError("first"))
    roster.not_started(ValueError("second"))
    assert roster.error is first
    roster.shrink(1)
    roster.grow(2)
    assert roster.error is None and len(roster.infos) == 2


@pytest.mark.parametrize("timeout, patience", [(None, ANSWERING), (2.0, 2.0)])
@pytest.mark.parametrize("task", [NodeTask.EVALUATE, NodeTask.PROBE])
def test_a_node_that_works_is_asked_for_a_sign_and_given_up_without_one(
    task: NodeTask, timeout: float | None, patience: float
) -> None:
    node = asked(some_node(0), task, 10.0)
    assert check([node], timeout, 10.0 + patience) == []
    assert check([node], timeout, 10.1 + patience) == [Ping(node, patience)]
    asked(node, Question.PING, 50.0)
    assert check([node], timeout, 50.0 + patience) == []
    (found,) = check([node], timeout, 50.1 + patience)
    assert isinstance(found, GiveUp) and "gave no sign" in found.why


@pytest.mark.parametrize(
    "task, timeout, limit, why",
    [
        (NodeTask.START, None, UNKNOWN, "did not start"),
        (NodeTask.START, 1.0, STARTUP, "did not start"),
        (NodeTask.START, 700.0, 700.0, "did not start"),
        (NodeTask.HANDSHAKE, None, 2 * ANSWERING, "was not placed"),
    ],
)
def test_a_node_that_does_not_start_in_time_is_given_up(
    task: NodeTask, timeout: float | None, limit: float, why: str
) -> None:
    node = asked(some_node(0, ready=False), task, 10.0)
    assert check([node], timeout, 10.0 + limit) == []
    (found,) = check([node], timeout, 10.1 + limit)
    assert isinstance(found, GiveUp) and why in found.why


def test_a_node_that_an_interrupt_left_half_started_is_given_up() -> None:
    (found,) = check([some_node(0, ready=False), some_node(1)], None, 0.0)
    assert isinstance(found, GiveUp) and found.node.number == 0 and "interrupt" in found.why


def test_requests_of_a_node_are_numbered_and_begin_anew_once_it_forgets() -> None:
    tape = Tape()
    node = ClusterNode(tape, 0, "node", (0,))
    for place_, expected in zip(itertools.count(), [(0, 0), (0, 1), (1, 0)], strict=False):
        if place_ == 2:
            node.forget_state()
        node.work(PendingRequest(NodeTask.RUN), [request(NodeActor.use_hooks, False)], request(NodeActor.run, b"body"))
        name, (envelope, *arguments) = tape.said[-1]
        assert name == "work" and arguments == [b"body"]
        assert envelope == Envelope(*expected, [request(NodeActor.use_hooks, False)], "run")
    node.kill()
    assert tape.ended and not node.requests
