"""Who evaluates what among machines: every chunk is evaluated, whatever they do."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt.backends.ledger import LATE, POISONOUS, Run
from batchopt.backends.ray.scheduler import PATIENCE, Ask, Give, Handout


def no_estimate(machine: int, runs: Sequence[Run]) -> None:
    """Nobody knows."""


def second_each(machine: int, runs: Sequence[Run]) -> float:
    """A chunk takes a second."""
    return float(sum(run.last - run.first for run in runs))


def two_machines() -> Handout:
    """Chunks 0..3 and 4..7, of two workers each."""
    return Handout({0: [Run(0, 2), Run(2, 4)], 1: [Run(4, 6), Run(6, 8)]}, [], 8)


def test_each_machine_is_first_given_its_share() -> None:
    handout = two_machines()
    commands = handout.decide([0, 1], no_estimate, 0.0)
    assert commands == [Give(0, (Run(0, 2), Run(2, 4))), Give(1, (Run(4, 6), Run(6, 8)))]
    assert handout.decide([0, 1], no_estimate, 1.0) == [] and handout.missing == 8
    handout.answered(0, [Run(0, 4)])
    handout.answered(1, [Run(4, 8)])
    assert handout.missing == 0


def test_what_a_lost_machine_had_goes_to_another_in_halves() -> None:
    handout = two_machines()
    handout.decide([0, 1], no_estimate, 0.0)
    handout.answered(0, [Run(0, 4)])
    assert handout.lost(1) is None
    assert handout.decide([0, 1], no_estimate, 1.0) == [Give(0, (Run(4, 5), Run(5, 6)))]
    handout.answered(0, [Run(4, 6)])
    assert handout.decide([0], no_estimate, 1.0) == [Give(0, (Run(6, 7), None))]
    handout.answered(0, [Run(6, 7)])
    assert handout.decide([0], no_estimate, 1.0) == [Give(0, (Run(7, 8), None))]


def test_the_share_of_a_machine_that_was_lost_before_it_began() -> None:
    handout = two_machines()
    handout.decide([0], no_estimate, 0.0)
    handout.lost(1)
    handout.answered(0, [Run(0, 4)])
    assert handout.decide([0], no_estimate, 1.0) == [Give(0, (Run(4, 6), Run(6, 8)))]


def test_chunks_of_workers_that_there_are_not_are_cut_for_all_machines() -> None:
    handout = Handout({0: [None], 1: [None, None]}, [Run(0, 6)], 6)
    assert handout.decide([0, 1], no_estimate, 0.0) == [Give(0, (Run(0, 2),)), Give(1, (Run(2, 4), Run(4, 6)))]


def test_a_machine_that_joins_takes_part() -> None:
    handout = Handout({0: [None]}, [Run(0, 6)], 6)
    handout.joined(7, 1)
    assert {command.machine for command in handout.decide([0, 7], no_estimate, 0.0)} == {0, 7}


def test_an_idle_machine_is_given_half_of_what_the_busiest_has_not_begun() -> None:
    handout = two_machines()
    handout.decide([0, 1], second_each, 0.0)
    handout.answered(0, [Run(0, 4)])
    assert handout.decide([0], second_each, 1.0) == [Ask(1)]
    assert handout.decide([0], second_each, 1.1) == []  # it has not said yet
    handout.released(1, [Run(5, 6), Run(7, 8)])
    assert handout.decide([0], second_each, 1.2) == [Give(0, (Run(5, 6), None))]
    handout.answered(1, [Run(4, 5), Run(6, 7)])
    assert handout.decide([0, 1], second_each, 2.0) == [Give(1, (Run(7, 8), None))]
    handout.answered(0, [Run(5, 6)])
    handout.answered(1, [Run(7, 8)])
    assert handout.missing == 0


def test_nobody_is_asked_for_what_is_about_to_end_or_again_for_what_it_does_not_have() -> None:
    handout = two_machines()
    handout.decide([0, 1], second_each, 0.0)
    handout.answered(0, [Run(0, 4)])
    assert handout.decide([0], second_each, 3.99) == []
    assert handout.decide([0], second_each, 2.0) == [Ask(1)]
    handout.released(1, [])
    assert handout.decide([0], second_each, 2.0) == []


@pytest.mark.parametrize(("price", "commands"), [(0.7, [Ask(1)]), (0.8, [])])
def test_nobody_is_asked_for_what_takes_longer_to_send_than_to_evaluate(price: float, commands: list[Ask]) -> None:
    handout = Handout({0: [Run(0, 4)], 1: [Run(4, 8)]}, [], 8, price)
    handout.decide([0, 1], second_each, 0.0)
    handout.answered(0, [Run(0, 4)])
    assert handout.decide([0], second_each, 1.0) == commands  # three of four seconds are left, for four chunks


def test_what_a_machine_is_late_with_is_given_to_another_once() -> None:
    handout = two_machines()
    handout.decide([0, 1], second_each, 0.0)
    handout.answered(0, [Run(0, 4)])
    handout.decide([0], second_each, 1.0)
    handout.released(1, [])
    due = max(PATIENCE, LATE * 4)
    assert handout.next_late(second_each, 1.0) == due
    assert handout.decide([0], second_each, due - 0.1) == []
    assert handout.decide([0], second_each, due) == [Give(0, (Run(4, 6), Run(6, 8)))]
    handout.answered(0, [Run(4, 8)])
    assert handout.missing == 0 and handout.busy == [1]
    handout.answered(1, [Run(4, 8)])  # late; counts once
    assert handout.missing == 0


def test_a_late_machine_is_asked_first_and_copied_if_it_does_not_answer() -> None:
    handout = two_machines()
    handout.decide([0, 1], second_each, 0.0)
    handout.answered(0, [Run(0, 4)])
    assert handout.decide([0], second_each, 20.0) == [Ask(1)]
    assert handout.decide([0], second_each, 20.0 + 0.9 * PATIENCE) == []
    assert handout.decide([0], second_each, 20.0 + PATIENCE) == [Give(0, (Run(4, 6), Run(6, 8)))]


def test_a_machine_of_unknown_speed_may_take_as_long_again() -> None:
    handout = two_machines()
    handout.decide([0, 1], no_estimate, 0.0)
    handout.answered(0, [Run(0, 4)])
    assert handout.decide([0], no_estimate, 0.01) == []
    assert handout.decide([0], no_estimate, 0.03) == [Ask(1)]


def test_a_copy_that_is_lost_is_given_again() -> None:
    handout = two_machines()
    handout.decide([0, 1], second_each, 0.0)
    handout.answered(0, [Run(0, 4)])
    handout.decide([0], second_each, 1.0)
    handout.released(1, [])
    handout.decide([0], second_each, 50.0)
    handout.lost(1)
    handout.lost(0)
    handout.joined(2, 2)
    given = handout.decide([2], second_each, 51.0)
    assert len(given) == 1 and isinstance(given[0], Give) and given[0].runs[0] is not None


def test_a_chunk_that_takes_machine_after_machine_with_it_is_named() -> None:
    handout, machine, lost = Handout({0: [Run(0, 8)]}, [], 8), 0, []
    poison = 5
    while True:
        (command,) = handout.decide([machine], no_estimate, 0.0)
        assert isinstance(command, Give)
        runs = [run for run in command.runs if run is not None]
        if any(run.first <= poison < run.last for run in runs):
            lost.append(runs)
            named = handout.lost(machine)
            if named is not None:
                break
            machine += 1
            handout.joined(machine, 1)
        else:
            handout.answered(machine, runs)
    assert named == poison and lost[-1] == [Run(5, 6)] and len(lost) == 3 == POISONOUS


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 2**32))
def test_every_chunk_is_evaluated_whatever_machines_do(chunks: int, machines: int, seed: int) -> None:
    """They are of any speed, give up anything, die, hang or join; one lives and works."""
    chance = random.Random(seed)
    workers = {machine: chance.randint(1, 3) for machine in range(machines)}
    ends = sorted(chance.choices(range(chunks + 1), k=sum(workers.values()) - 1))
    bounds = iter(zip([0, *ends], [*ends, chunks], strict=True))
    given_to = {m: [Run(*next(bounds)) for _ in range(k)] for m, k in workers.items()}
    shares = {m: [run if run.first < run.last else None for run in runs] for m, runs in given_to.items()}
    handout = Handout(shares, [], chunks)
    pace = {machine: 10 ** chance.uniform(-2, 1) for machine in workers}
    hangs = {machine for machine in workers if machine and chance.random() < 0.3}
    busy: dict[int, list[Run]] = {}
    events: list[tuple[float, int]] = []
    done: Counter[int] = Counter()
    now, asked = 0.0, 0

    def estimate(machine: int, runs: Sequence[Run]) -> float:
        return 0.3 * sum(run.last - run.first for run in runs)

    for _ in range(10_000):
        if not handout.missing:
            break
        idle = [machine for machine in workers if machine not in busy]
        for command in handout.decide(idle, estimate, now):
            if isinstance(command, Give):
                busy[command.machine] = [run for run in command.runs if run is not None]
                if command.machine not in hangs:
                    took = pace[command.machine] * sum(run.last - run.first for run in busy[command.machine])
                    heapq.heappush(events, (now + took, command.machine))
            else:
                asked += 1
                runs = busy[command.machine]
                given = [
                    Run(run.last - 1, run.last) for run in runs if run.last - run.first > 1 and chance.random() < 0.7
                ]
                busy[command.machine] = [
                    Run(run.first, run.last - 1) if Run(run.last - 1, run.last) in given else run for run in runs
                ]
                handout.released(command.machine, given)
        late = handout.next_late(estimate, now) if len(busy) < len(workers) else float("inf")
        if not events or late < events[0][0]:
            now = max(now, late)
            continue
        now, machine = heapq.heappop(events)
        if machine not in busy:
            continue
        if machine and chance.random() < 0.1:
            del busy[machine], workers[machine]
            handout.lost(machine)
            if chance.random() < 0.5:
                workers[machine + 100] = 1
                pace[machine + 100] = 1.0
                handout.joined(machine + 100, 1)
            continue
        runs = busy.pop(machine)
        handout.answered(machine, runs)
        done.update(chunk for run in runs for chunk in range(*run))
    assert not handout.missing
    assert set(done) == set(range(chunks))


def test_a_machine_that_was_not_asked_gives_nothing() -> None:
    handout = two_machines()
    handout.released(0, [Run(0, 1)])  # late, of an evaluation that is over
    assert len(handout.decide([0, 1], no_estimate, 0.0)) == 2


@pytest.mark.parametrize("chunks", [1, 7])
def test_a_single_machine(chunks: int) -> None:
    handout = Handout({3: [Run(0, chunks)]}, [], chunks)
    assert handout.decide([3], no_estimate, 0.0) == [Give(3, (Run(0, chunks),))]
    assert handout.next_late(no_estimate, 0.0) == float("inf")
