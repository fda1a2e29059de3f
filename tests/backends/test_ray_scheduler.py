"""Who evaluates what among nodes: every chunk is evaluated, whatever they do."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt.backends.ledger import LATE, POISONOUS, ChunkRun
from batchopt.backends.ray.scheduler import PATIENCE, Ask, Give, NodeScheduler


def no_estimate(node: int, runs: Sequence[ChunkRun]) -> None:
    """Nobody knows."""


def second_each(node: int, runs: Sequence[ChunkRun]) -> float:
    """A chunk takes a second."""
    return float(sum(run.last - run.first for run in runs))


def two_machines() -> NodeScheduler:
    """Chunks 0..3 and 4..7, of two workers each."""
    return NodeScheduler({0: [ChunkRun(0, 2), ChunkRun(2, 4)], 1: [ChunkRun(4, 6), ChunkRun(6, 8)]}, [], 8)


def test_each_machine_is_first_given_its_share() -> None:
    scheduler = two_machines()
    commands = scheduler.decide([0, 1], no_estimate, 0.0)
    assert commands == [Give(0, (ChunkRun(0, 2), ChunkRun(2, 4))), Give(1, (ChunkRun(4, 6), ChunkRun(6, 8)))]
    assert scheduler.decide([0, 1], no_estimate, 1.0) == [] and scheduler.missing == 8
    scheduler.answered(0, [ChunkRun(0, 4)])
    scheduler.answered(1, [ChunkRun(4, 8)])
    assert scheduler.missing == 0


def test_what_a_lost_machine_had_goes_to_another_in_halves() -> None:
    scheduler = two_machines()
    scheduler.decide([0, 1], no_estimate, 0.0)
    scheduler.answered(0, [ChunkRun(0, 4)])
    assert scheduler.lost(1) is None
    assert scheduler.decide([0, 1], no_estimate, 1.0) == [Give(0, (ChunkRun(4, 5), ChunkRun(5, 6)))]
    scheduler.answered(0, [ChunkRun(4, 6)])
    assert scheduler.decide([0], no_estimate, 1.0) == [Give(0, (ChunkRun(6, 7), None))]
    scheduler.answered(0, [ChunkRun(6, 7)])
    assert scheduler.decide([0], no_estimate, 1.0) == [Give(0, (ChunkRun(7, 8), None))]


def test_the_share_of_a_machine_that_was_lost_before_it_began() -> None:
    scheduler = two_machines()
    scheduler.decide([0], no_estimate, 0.0)
    scheduler.lost(1)
    scheduler.answered(0, [ChunkRun(0, 4)])
    assert scheduler.decide([0], no_estimate, 1.0) == [Give(0, (ChunkRun(4, 6), ChunkRun(6, 8)))]


def test_chunks_of_workers_that_there_are_not_are_cut_for_all_machines() -> None:
    scheduler = NodeScheduler({0: [None], 1: [None, None]}, [ChunkRun(0, 6)], 6)
    assert scheduler.decide([0, 1], no_estimate, 0.0) == [
        Give(0, (ChunkRun(0, 2),)),
        Give(1, (ChunkRun(2, 4), ChunkRun(4, 6))),
    ]


def test_a_machine_that_joins_takes_part() -> None:
    scheduler = NodeScheduler({0: [None]}, [ChunkRun(0, 6)], 6)
    scheduler.joined(7, 1)
    assert {command.node for command in scheduler.decide([0, 7], no_estimate, 0.0)} == {0, 7}


def test_an_idle_machine_is_given_half_of_what_the_busiest_has_not_begun() -> None:
    scheduler = two_machines()
    scheduler.decide([0, 1], second_each, 0.0)
    scheduler.answered(0, [ChunkRun(0, 4)])
    assert scheduler.decide([0], second_each, 1.0) == [Ask(1)]
    assert scheduler.decide([0], second_each, 1.1) == []  # it has not said yet
    scheduler.released(1, [ChunkRun(5, 6), ChunkRun(7, 8)])
    assert scheduler.decide([0], second_each, 1.2) == [Give(0, (ChunkRun(5, 6), None))]
    scheduler.answered(1, [ChunkRun(4, 5), ChunkRun(6, 7)])
    assert scheduler.decide([0, 1], second_each, 2.0) == [Give(1, (ChunkRun(7, 8), None))]
    scheduler.answered(0, [ChunkRun(5, 6)])
    scheduler.answered(1, [ChunkRun(7, 8)])
    assert scheduler.missing == 0


def test_nobody_is_asked_for_what_is_about_to_end_or_again_for_what_it_does_not_have() -> None:
    scheduler = two_machines()
    scheduler.decide([0, 1], second_each, 0.0)
    scheduler.answered(0, [ChunkRun(0, 4)])
    assert scheduler.decide([0], second_each, 3.99) == []
    assert scheduler.decide([0], second_each, 2.0) == [Ask(1)]
    scheduler.released(1, [])
    assert scheduler.decide([0], second_each, 2.0) == []


@pytest.mark.parametrize(("price", "commands"), [(0.7, [Ask(1)]), (0.8, [])])
def test_nobody_is_asked_for_what_takes_longer_to_send_than_to_evaluate(price: float, commands: list[Ask]) -> None:
    scheduler = NodeScheduler({0: [ChunkRun(0, 4)], 1: [ChunkRun(4, 8)]}, [], 8, price)
    scheduler.decide([0, 1], second_each, 0.0)
    scheduler.answered(0, [ChunkRun(0, 4)])
    assert scheduler.decide([0], second_each, 1.0) == commands  # three of four seconds are left, for four chunks


def test_what_a_machine_is_late_with_is_given_to_another_once() -> None:
    scheduler = two_machines()
    scheduler.decide([0, 1], second_each, 0.0)
    scheduler.answered(0, [ChunkRun(0, 4)])
    scheduler.decide([0], second_each, 1.0)
    scheduler.released(1, [])
    due = max(PATIENCE, LATE * 4)
    assert scheduler.next_late(second_each, 1.0) == due
    assert scheduler.decide([0], second_each, due - 0.1) == []
    assert scheduler.decide([0], second_each, due) == [Give(0, (ChunkRun(4, 6), ChunkRun(6, 8)))]
    scheduler.answered(0, [ChunkRun(4, 8)])
    assert scheduler.missing == 0 and scheduler.busy == [1]
    scheduler.answered(1, [ChunkRun(4, 8)])  # late; counts once
    assert scheduler.missing == 0


def test_a_late_machine_is_asked_first_and_copied_if_it_does_not_answer() -> None:
    scheduler = two_machines()
    scheduler.decide([0, 1], second_each, 0.0)
    scheduler.answered(0, [ChunkRun(0, 4)])
    assert scheduler.decide([0], second_each, 20.0) == [Ask(1)]
    assert scheduler.decide([0], second_each, 20.0 + 0.9 * PATIENCE) == []
    assert scheduler.decide([0], second_each, 20.0 + PATIENCE) == [Give(0, (ChunkRun(4, 6), ChunkRun(6, 8)))]


def test_a_machine_of_unknown_speed_may_take_as_long_again() -> None:
    scheduler = two_machines()
    scheduler.decide([0, 1], no_estimate, 0.0)
    scheduler.answered(0, [ChunkRun(0, 4)])
    assert scheduler.decide([0], no_estimate, 0.01) == []
    assert scheduler.decide([0], no_estimate, 0.03) == [Ask(1)]


def test_a_copy_that_is_lost_is_given_again() -> None:
    scheduler = two_machines()
    scheduler.decide([0, 1], second_each, 0.0)
    scheduler.answered(0, [ChunkRun(0, 4)])
    scheduler.decide([0], second_each, 1.0)
    scheduler.released(1, [])
    scheduler.decide([0], second_each, 50.0)
    scheduler.lost(1)
    scheduler.lost(0)
    scheduler.joined(2, 2)
    given = scheduler.decide([2], second_each, 51.0)
    assert len(given) == 1 and isinstance(given[0], Give) and given[0].runs[0] is not None


def test_a_chunk_that_takes_machine_after_machine_with_it_is_named() -> None:
    scheduler, node, lost = NodeScheduler({0: [ChunkRun(0, 8)]}, [], 8), 0, []
    poison = 5
    while True:
        (command,) = scheduler.decide([node], no_estimate, 0.0)
        assert isinstance(command, Give)
        runs = [run for run in command.runs if run is not None]
        if any(run.first <= poison < run.last for run in runs):
            lost.append(runs)
            named = scheduler.lost(node)
            if named is not None:
                break
            node += 1
            scheduler.joined(node, 1)
        else:
            scheduler.answered(node, runs)
    assert named == poison and lost[-1] == [ChunkRun(5, 6)] and len(lost) == 3 == POISONOUS


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 2**32))
def test_every_chunk_is_evaluated_whatever_machines_do(chunks: int, nodes: int, seed: int) -> None:
    """They are of any speed, give up anything, die, hang or join; one lives and works."""
    chance = random.Random(seed)
    workers = {node: chance.randint(1, 3) for node in range(nodes)}
    ends = sorted(chance.choices(range(chunks + 1), k=sum(workers.values()) - 1))
    bounds = iter(zip([0, *ends], [*ends, chunks], strict=True))
    given_to = {m: [ChunkRun(*next(bounds)) for _ in range(k)] for m, k in workers.items()}
    assignments = {m: [run if run.first < run.last else None for run in runs] for m, runs in given_to.items()}
    scheduler = NodeScheduler(assignments, [], chunks)
    pace = {node: 10 ** chance.uniform(-2, 1) for node in workers}
    hangs = {node for node in workers if node and chance.random() < 0.3}
    busy: dict[int, list[ChunkRun]] = {}
    events: list[tuple[float, int]] = []
    done: Counter[int] = Counter()
    now, asked = 0.0, 0

    def estimate(node: int, runs: Sequence[ChunkRun]) -> float:
        return 0.3 * sum(run.last - run.first for run in runs)

    for _ in range(10_000):
        if not scheduler.missing:
            break
        idle = [node for node in workers if node not in busy]
        for command in scheduler.decide(idle, estimate, now):
            if isinstance(command, Give):
                busy[command.node] = [run for run in command.runs if run is not None]
                if command.node not in hangs:
                    took = pace[command.node] * sum(run.last - run.first for run in busy[command.node])
                    heapq.heappush(events, (now + took, command.node))
            else:
                asked += 1
                runs = busy[command.node]
                given = [
                    ChunkRun(run.last - 1, run.last)
                    for run in runs
                    if run.last - run.first > 1 and chance.random() < 0.7
                ]
                busy[command.node] = [
                    ChunkRun(run.first, run.last - 1) if ChunkRun(run.last - 1, run.last) in given else run
                    for run in runs
                ]
                scheduler.released(command.node, given)
        late = scheduler.next_late(estimate, now) if len(busy) < len(workers) else float("inf")
        if not events or late < events[0][0]:
            now = max(now, late)
            continue
        now, node = heapq.heappop(events)
        if node not in busy:
            continue
        if node and chance.random() < 0.1:
            del busy[node], workers[node]
            scheduler.lost(node)
            if chance.random() < 0.5:
                workers[node + 100] = 1
                pace[node + 100] = 1.0
                scheduler.joined(node + 100, 1)
            continue
        runs = busy.pop(node)
        scheduler.answered(node, runs)
        done.update(chunk for run in runs for chunk in range(*run))
    assert not scheduler.missing
    assert set(done) == set(range(chunks))


def test_a_machine_that_was_not_asked_gives_nothing() -> None:
    scheduler = two_machines()
    scheduler.released(0, [ChunkRun(0, 1)])  # late, of an evaluation that is over
    assert len(scheduler.decide([0, 1], no_estimate, 0.0)) == 2


@pytest.mark.parametrize("chunks", [1, 7])
def test_a_single_machine(chunks: int) -> None:
    scheduler = NodeScheduler({3: [ChunkRun(0, chunks)]}, [], chunks)
    assert scheduler.decide([3], no_estimate, 0.0) == [Give(3, (ChunkRun(0, chunks),))]
    assert scheduler.next_late(no_estimate, 0.0) == float("inf")
