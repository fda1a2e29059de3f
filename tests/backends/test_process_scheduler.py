"""Who evaluates which chunk: each rule by example, and all together against workers that do whatever they like."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchopt.backends.process.scheduler import (
    GRACE,
    LATE,
    POISONOUS,
    WORTHWHILE,
    Assign,
    ChunkEstimate,
    ChunkRun,
    Death,
    Limit,
    WorkerScheduler,
)


def unknown(worker: int, chunk: int) -> float | None:
    """Nobody knows how long anything takes."""
    return None


def pace(*seconds: float | None) -> ChunkEstimate:
    """Worker `i` needs `seconds[i]` for any chunk."""
    return lambda worker, chunk: seconds[worker]


SECOND = pace(1.0, 1.0, 1.0)


def begun(*runs: tuple[int, int] | None, now: float = 0.0, copies: bool = True) -> WorkerScheduler:
    """Every worker has begun the run planned for it."""
    chunks = max(run[1] for run in runs if run is not None)
    scheduler = WorkerScheduler([None if run is None else ChunkRun(*run) for run in runs], chunks, copies=copies)
    scheduler.decide([worker for worker, run in enumerate(runs) if run is not None], unknown, now)
    return scheduler


# ---- stealing


@pytest.mark.parametrize(
    "last, owner, thief, now, middle",
    [
        (9, 1.0, 1.0, 0.0, 5),  # half of what was not begun
        (1, 100.0, 0.01, 1.0, None),  # the chunk at hand is not stolen
        (2, None, None, 0.0, 1),  # nobody knows how long it takes
        # a slow thief takes only what it does sooner
        (6, 1.0, 10.0, 0.0, None),
        (11, 1.0, 10.0, 0.9, 10),
        (11, 1.0, 10.0, 1.0, None),  # the owner will have done ten in ten seconds
        (24, 1.0, 10.0, 0.0, 22),
        (9, 1.0, 0.1, 0.0, 5),  # half at most: its next turn comes soon enough
        # what is behind a late chunk is taken, by whomever
        (2, 1.0, 10.0, LATE, 1),
        (2, 1e-5, 1e-5, GRACE - 1e-6, None),
        # else it has to be worth a message, alone or together
        (4, WORTHWHILE / 3.5, WORTHWHILE / 3.5, 0.0, None),
        (5, WORTHWHILE / 3.5, WORTHWHILE / 3.5, 0.0, 3),
    ],
)
def test_how_much_is_stolen(
    last: int, owner: float | None, thief: float | None, now: float, middle: int | None
) -> None:
    """The owner has begun the first chunk, and is told first."""
    expected = [] if middle is None else [Limit(0, middle), Assign(1, middle, last)]
    assert begun((0, last), None).decide([1], pace(owner, thief), now) == expected


# ---- late chunks


@pytest.mark.parametrize("each", [0.001, GRACE / LATE, 1.0])
def test_a_chunk_is_copied_once_it_is_late_and_no_sooner(each: float) -> None:
    due = 5.0 + max(GRACE, LATE * each)
    scheduler = begun((0, 1), None, None, now=5.0)
    estimate = pace(each, each, each)
    assert scheduler.next_late(estimate) == due
    assert scheduler.decide([1], estimate, due - 1e-6) == []
    assert scheduler.decide([1, 2], estimate, due) == [Assign(1, 0, 1)]


def test_without_copies_what_is_behind_a_late_chunk_is_taken_but_not_that_chunk() -> None:
    scheduler = begun((0, 2), None, copies=False)
    estimate = pace(1e-5, 1e-5)
    assert scheduler.next_late(estimate) == GRACE
    assert scheduler.decide([1], estimate, GRACE) == [Limit(0, 1), Assign(1, 1, 2)]
    scheduler.reported(1, 2, GRACE)
    scheduler.ended(1)
    assert scheduler.next_late(estimate) == math.inf
    assert scheduler.decide([1], estimate, 1000.0) == []
    scheduler.lost(0)
    assert scheduler.decide([1], estimate, 1000.0) == [Assign(1, 0, 1)]


# ---- poison


def test_a_chunk_is_given_up_only_after_a_trial_alone_that_had_time() -> None:
    """Three hang in it at once, since it was late; it is given by itself, and nobody has a copy, with twice the time,
    and with four times as much: the three may all have had too little."""
    scheduler = begun((0, 1), None, None)
    for worker in (1, 2):
        assert scheduler.decide([worker], SECOND, 10.0 * worker) == [Assign(worker, 0, 1)]
    assert [scheduler.lost(worker, Death.HANG) for worker in range(3)] == [None] * 3
    assert scheduler.decide([0, 1, 2], SECOND, 40.0) == [Assign(0, 0, 1)]
    assert scheduler.decide([1, 2], SECOND, 1e6) == [] and scheduler.next_late(SECOND) == math.inf
    assert scheduler.leniency(0) == 2.0 and scheduler.lost(0, Death.HANG) is None
    assert scheduler.decide([0, 1, 2], SECOND, 80.0) == [Assign(0, 0, 1)]
    assert scheduler.leniency(0) == 4.0 and scheduler.lost(0, Death.HANG) == 0


# ---- what is known of a worker


# ---- all together


class Hand:
    """A worker process: as in `loop`, it looks at limits after each chunk, and its page has how far it is."""

    def __init__(self) -> None:
        self.busy = self.stopped = False
        self.at = self.last = self.limit = 0

    def start(self, run: ChunkRun) -> None:
        """It reads an order."""
        assert not self.busy
        self.busy, self.at, self.last, self.limit = True, *run, run.last

    def work(self) -> None:
        """It finishes the chunk at hand, and begins the next unless it was told not to."""
        if self.busy and not self.stopped:
            self.at += 1
            self.last = min(self.last, max(self.limit, self.at))
            self.busy = self.at < self.last


class Turn(NamedTuple):
    """How many chunks each worker finishes, whom of them the parent does not hear, and how long it takes."""

    chunks: tuple[int, ...]
    unheard: set[int]
    seconds: float


RANKS = 3
WHO = st.integers(0, RANKS - 1)
PACES = st.tuples(*[st.sampled_from([0.01, 1.0, 1e-4, 0.0015, None])] * RANKS)
TURNS = st.builds(
    Turn,
    chunks=st.tuples(*[st.sampled_from([0, 1, 2, 9])] * RANKS),
    unheard=st.sets(WHO, max_size=RANKS - 1),
    seconds=st.sampled_from([0.001, 0.06, 4.0]),
)
CUTS = st.tuples(*[st.integers(0, 32)] * (RANKS - 1))


class Evaluations(RuleBasedStateMachine):
    """A parent that does as `WorkerGroup` does, and workers that do what they like."""

    @initialize(chunks=st.integers(1, 32), paces=PACES, cuts=CUTS)
    def begin(self, chunks: int, paces: tuple[float | None, ...], cuts: tuple[int, ...]) -> None:
        bounds = [0, *sorted(min(cut, chunks) for cut in cuts), chunks]
        runs = [ChunkRun(first, last) if first < last else None for first, last in pairwise(bounds)]
        self.scheduler, self.paces, self.now = WorkerScheduler(runs, chunks), paces, 0.0
        self.hands = {rank: Hand() for rank in range(RANKS)}
        self.missing = set(range(chunks))
        self.sent: dict[int, ChunkRun] = {}  # what is left of each worker's order, as far as the parent knows
        self.deaths: Counter[int] = Counter()
        self.alone: set[int] = set()  # the workers that make the last trial of a chunk

    def estimate(self, worker: int, chunk: int) -> float | None:
        return self.paces[worker]

    # ---- the parent

    def direct(self, ranks: Iterable[int]) -> None:
        """Give work to those of them that have none, until nothing is left to give."""
        idle = [rank for rank in ranks if rank in self.hands and rank not in self.sent]
        while idle and (commands := self.scheduler.decide(idle, self.estimate, self.now)):
            for command in commands:
                if isinstance(command, Limit):
                    first, last = self.sent[command.worker]
                    assert first < command.last < last
                    self.sent[command.worker] = ChunkRun(first, command.last)
                    hand = self.hands[command.worker]
                    hand.limit = min(hand.limit, command.last)
                else:
                    self.assign(*command)
            idle = [rank for rank in idle if rank not in self.sent]
        if idle:
            self.nothing_is_left_to_give(idle)

    def assign(self, worker: int, first: int, last: int) -> None:
        assert worker not in self.sent and first < last, "a second task, or none"
        assert set(range(first, last)) <= self.missing, "what is done is given again"
        self.alone.discard(worker)
        if self.deaths[first] >= POISONOUS - 1:
            assert last == first + 1 and all(run.first != first for run in self.sent.values()), "it is tried alone"
            self.alone.add(worker)
        self.sent[worker] = ChunkRun(first, last)
        self.hands[worker].start(self.sent[worker])

    def nothing_is_left_to_give(self, idle: Sequence[int]) -> None:
        suspects = {chunk for chunk, deaths in self.deaths.items() if deaths >= POISONOUS - 1}
        at_work = {chunk for run in self.sent.values() for chunk in range(*run)}
        # one that is tried alone waits for a worker that may have begun it before it heard of its limit
        at_work |= suspects & {run.first for run in self.sent.values()}
        assert self.missing <= at_work, "a worker idles, and there is work that nobody is at"
        for rank, (first, last) in self.sent.items():
            behind, seconds = self.missing & set(range(first + 1, last)), self.paces[rank]
            work = len(behind) * (WORTHWHILE if seconds is None else seconds)
            too_slow = [(ours := self.paces[other]) is not None and ours >= work for other in idle]
            assert work < WORTHWHILE or all(too_slow), "work that could be stolen"
        if self.missing - suspects and None not in self.paces:
            assert self.scheduler.next_late(self.estimate) < math.inf, "nobody will wake the worker that idles"

    def hear(self, rank: int) -> None:
        """What its page says."""
        if rank in self.sent:
            hand, (first, last) = self.hands[rank], self.sent[rank]
            self.scheduler.reported(rank, hand.at, self.now)
            self.missing -= set(range(first, hand.at))
            self.sent[rank] = ChunkRun(hand.at, last)
            if not hand.busy:
                self.end(rank)

    def end(self, rank: int) -> None:
        self.scheduler.ended(rank)
        del self.sent[rank]

    def lose(self, rank: int) -> None:
        self.hear(rank)
        del self.hands[rank]
        run, expected = self.sent.pop(rank, None), None
        if run is not None and run.first < run.last:
            self.deaths[run.first] += 1
            if self.deaths[run.first] >= POISONOUS and rank in self.alone and run.first in self.missing:
                expected = run.first
        assert self.scheduler.lost(rank) == expected

    # ---- what happens

    @rule(turns=st.lists(TURNS, min_size=1, max_size=4))
    def some_work_and_some_are_heard(self, turns: list[Turn]) -> None:
        """Those who work unheard get ahead of what the parent knows, past limits too."""
        for turn in turns:
            for rank, hand in self.hands.items():
                for _ in range(turn.chunks[rank]):
                    hand.work()
            self.now += turn.seconds
            heard = sorted(self.hands.keys() - turn.unheard)
            for rank in heard:
                self.hear(rank)
            self.direct(heard)

    @rule()
    def nobody_says_anything_until_a_chunk_is_late(self) -> None:
        self.direct(range(RANKS))
        due = self.scheduler.next_late(self.estimate)
        self.now = max(self.now, due) if due < math.inf else self.now
        self.direct(range(RANKS))

    @rule(ranks=st.sets(WHO))
    def these_are_stopped_and_the_others_continue(self, ranks: set[int]) -> None:
        for rank, hand in self.hands.items():
            hand.stopped = rank in ranks

    @rule(rank=WHO)
    def a_worker_dies(self, rank: int) -> None:
        if rank in self.hands:
            self.lose(rank)

    @rule(rank=WHO)
    def a_worker_and_its_successors_die(self, rank: int) -> None:
        """Of the same chunk, if there is no other."""
        for _ in range(POISONOUS):
            if rank in self.hands:
                self.lose(rank)
            self.hands[rank] = Hand()
            self.direct([rank])

    @rule(paces=PACES)
    def the_dead_join_again_and_paces_change(self, paces: tuple[float | None, ...]) -> None:
        self.paces = paces
        for rank in range(RANKS):
            self.hands.setdefault(rank, Hand())

    @rule(rank=WHO)
    def an_order_ends_early(self, rank: int) -> None:
        """With an error, say; the chunk at hand is not finished."""
        self.hear(rank)
        if rank in self.sent:
            self.hands[rank].busy = False
            self.end(rank)

    def teardown(self) -> None:
        """From now on workers behave: then the evaluation completes, and counts each chunk once."""
        if not hasattr(self, "hands"):
            return
        for rank in range(RANKS):
            self.hands.setdefault(rank, Hand()).stopped = False
        for _ in range((RANKS + 1) * (len(self.missing) + 1)):
            self.direct(range(RANKS))
            self.now += 0.001
            for rank, hand in self.hands.items():
                hand.work()
                self.hear(rank)
        assert not self.missing and not self.scheduler.missing

    # ---- what holds at any time

    @invariant()
    def it_knows_what_is_missing_and_who_is_at_what(self) -> None:
        assert self.scheduler.missing == len(self.missing)
        assert set(self.scheduler.workers) == self.sent.keys() <= self.hands.keys()
        for rank, run in self.sent.items():
            found = self.scheduler.current(rank)
            assert (None if found is None else found[0]) == (run.first if run.first < run.last else None)

    @invariant()
    def once_all_have_begun_only_what_is_late_is_given_out(self) -> None:
        spare = copy.deepcopy(self.scheduler)
        begun = spare.all_begun
        assert not (spare.decide(range(RANKS), unknown, 0.0) and begun)

    @invariant()
    def nothing_is_lost(self) -> None:
        """If all tasks ended now, every missing chunk would be given out."""
        spare = copy.deepcopy(self.scheduler)
        for worker in spare.workers:
            spare.ended(worker)
        while spare.missing:
            (command,) = spare.decide([0], unknown, self.now)
            assert isinstance(command, Assign)
            spare.reported(0, command.last, self.now)
            spare.ended(0)


TestEvaluations = Evaluations.TestCase
TestEvaluations.settings = settings(deadline=None, max_examples=100, stateful_step_count=50, report_multiple_bugs=False)
