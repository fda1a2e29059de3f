"""Who evaluates which chunk: each rule by example, and all together against workers that do whatever they like."""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
        (2, 1.0, 1.0, 0.0, 1),  # half of what was not begun
        (3, 1.0, 1.0, 0.0, 2),
        (5, 1.0, 1.0, 0.0, 3),
        (9, 1.0, 1.0, 0.0, 5),
        (1, 100.0, 0.01, 1.0, None),  # the chunk at hand is not stolen
        (2, None, None, 0.0, 1),  # nobody knows how long it takes
        # a slow thief takes only what it does sooner
        (4, 1.0, 1.0, 0.0, 2),
        (2, 1.0, 10.0, 0.0, None),  # the owner has done both before it
        (6, 1.0, 10.0, 0.0, None),
        (12, 1.0, 10.0, 0.0, 11),  # 11 seconds, where it would be 12
        (12, 1.0, 10.0, 0.9, 11),
        (11, 1.0, 10.0, 0.0, 10),
        (11, 1.0, 10.0, 0.9, 10),
        (11, 1.0, 10.0, 1.0, None),  # the owner will have done ten in ten seconds
        (24, 1.0, 10.0, 0.0, 22),
        (9, 1.0, 2.0, 0.0, 6),
        (9, 1.0, 0.1, 0.0, 5),  # half at most: its next turn comes soon enough
        # what is behind a late chunk is taken, by whomever
        (5, 1.0, 1.0, LATE - 1e-6, 3),
        (2, 1.0, 10.0, LATE, 1),
        (2, 1e-5, 1e-5, GRACE - 1e-6, None),
        (2, 1e-5, 1e-5, GRACE, 1),
        # else it has to be worth a message, alone or together
        (2, WORTHWHILE, WORTHWHILE, 0.0, 1),
        (2, 0.9 * WORTHWHILE, 0.9 * WORTHWHILE, 0.0, None),
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


@pytest.mark.parametrize("worker, done", [(1, 1), (2, 5), (0, 1), (0, 9), (3, 9)])
def test_a_report_of_what_was_not_given_is_an_error(worker: int, done: int) -> None:
    scheduler = begun((2, 4), None, (4, 8), (8, 9))
    scheduler.reported(2, 6, 0.0)
    scheduler.ended(3)
    with pytest.raises(ValueError, match=f"worker {worker} reports chunk {done - 1}, which it was not given"):
        scheduler.reported(worker, done, 0.0)
    assert scheduler.missing == 5


# ---- all together


class Said(NamedTuple):
    """A report, as it is in the pipe: of order `number`; `final` is the last of that order."""

    number: int
    evaluation: int
    done: int
    final: bool


class Hand:
    """A worker process, at the level of its chunks.

    As in `loop`, it looks at limits only after it has sent a report.
    """

    def __init__(self) -> None:
        self.outbox: deque[Said] = deque()
        self.number = 0  # of the order that it is at, or was at last
        self.evaluation = -1
        self.busy = self.stopped = False
        self.limit = 0

    def start(self, number: int, evaluation: int, run: ChunkRun) -> None:
        """It reads an order."""
        assert not self.busy
        self.number, self.evaluation, self.busy = number, evaluation, True
        self.at, self.last = run
        self.limit = self.last

    def work(self) -> None:
        """It finishes the chunk at hand, says so, and begins the next unless it was told not to."""
        self.at += 1
        if self.at < self.last:
            self._say(final=False)
            self.last = min(self.last, self.limit)
        if self.at >= self.last:
            self._say(final=True)
            self.busy = False

    def _say(self, final: bool) -> None:
        self.outbox.append(Said(self.number, self.evaluation, self.at, final))


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
    """A parent that does as `gather`, `pool` and `process` do, and workers that do what they like, over evaluations."""

    @initialize(chunks=st.integers(1, 32), paces=PACES, cuts=CUTS)
    def set_up(self, chunks: int, paces: tuple[float | None, ...], cuts: tuple[int, ...]) -> None:
        self.chunks = chunks
        self.now, self.numbers, self.evaluation = 0.0, 0, 0
        self.hands = {rank: Hand() for rank in range(RANKS)}
        self.paces = paces
        self._plan(cuts)

    def _plan(self, cuts: Sequence[int]) -> None:
        """A new evaluation, whatever workers are still at."""
        self.cuts = cuts
        bounds = [0, *sorted(min(cut, self.chunks) for cut in cuts), self.chunks]
        runs = [ChunkRun(first, last) if first < last else None for first, last in pairwise(bounds)]
        self.scheduler = WorkerScheduler(runs, self.chunks)
        self.evaluation += 1
        self.missing = set(range(self.chunks))
        self.sent: dict[int, ChunkRun] = {}  # what is left of each worker's order, as far as the parent knows
        self.heard: dict[Hand, Said] = {}
        self.deaths: Counter[int] = Counter()
        self.alone: set[int] = set()  # the workers that make the last trial of a chunk
        self.poisoned = False
        self.turns = 0

    # ---- the parent

    def _estimate(self, worker: int, chunk: int) -> float | None:
        return self.paces[worker]

    def _idle(self) -> list[int]:
        return [rank for rank, hand in sorted(self.hands.items()) if not hand.busy and not hand.outbox]

    def _direct(self, ranks: Sequence[int]) -> None:
        """As `WorkerGroup._direct`, which looks again in the next turn: what a slow worker leaves to a fast one may be
        taken from a third."""
        self.turns += 1
        idle = ranks
        while idle and (commands := self.scheduler.decide(idle, self._estimate, self.now)):
            for command in commands:
                if isinstance(command, Limit):
                    self._limit(command)
                else:
                    assert command.worker in idle
                    self._assign(command)
            idle = [rank for rank in ranks if rank not in self.sent]
        if idle := [rank for rank in ranks if rank not in self.sent]:
            self._nothing_is_left_to_give(idle)

    def _nothing_is_left_to_give(self, idle: Sequence[int]) -> None:
        suspects = {chunk for chunk, deaths in self.deaths.items() if deaths >= POISONOUS - 1}
        at_work = {chunk for run in self.sent.values() for chunk in range(*run)}
        # one that is tried alone waits for a worker that may have begun it before it heard of its limit
        at_work |= suspects & {run.first for run in self.sent.values()}
        assert self.missing <= at_work, "a worker idles, and there is work that nobody is at"
        for rank, (first, last) in self.sent.items():
            behind = self.missing & set(range(first + 1, last))
            seconds = self.paces[rank]
            work = len(behind) * (WORTHWHILE if seconds is None else seconds)
            for other in idle:
                ours = self.paces[other]
                too_slow = ours is not None and ours >= work  # for even one of them
                assert work < WORTHWHILE or too_slow, "work that could be stolen"
        if self.missing - suspects and None not in self.paces:
            assert self.scheduler.next_late(self._estimate) < math.inf, "nobody will wake the worker that idles"

    def _limit(self, command: Limit) -> None:
        first, last = self.sent[command.worker]
        assert first < command.last < last
        self.sent[command.worker] = ChunkRun(first, command.last)
        self.hands[command.worker].limit = min(self.hands[command.worker].limit, command.last)

    def _assign(self, command: Assign) -> None:
        worker, first, last = command
        assert worker not in self.sent, "a second task"
        assert first < last
        assert set(range(first, last)) <= self.missing, "what is done is given again"
        self.alone.discard(worker)
        if self.deaths[first] >= POISONOUS - 1:
            assert last == first + 1 and all(run.first != first for run in self.sent.values()), "it is tried alone"
            self.alone.add(worker)
        self.sent[worker] = ChunkRun(first, last)
        self.numbers += 1
        self.hands[worker].start(self.numbers, self.evaluation, ChunkRun(first, last))

    def _hear(self, rank: int, said: Said) -> None:
        """As `ProcessGather.on_reply`."""
        hand = self.hands[rank]
        if said.evaluation != self.evaluation or rank not in self.sent or said.number != hand.number:
            return  # of no interest any more
        self.scheduler.reported(rank, said.done, self.now)
        self.missing -= set(range(said.done)) & set(range(self.sent[rank].first, said.done))
        self.sent[rank] = ChunkRun(said.done, self.sent[rank].last)
        self.heard[hand] = said
        if said.final:
            self._end(rank)

    def _end(self, rank: int) -> None:
        self.scheduler.ended(rank)
        del self.sent[rank]

    def _hear_all(self, rank: int) -> None:
        while self.hands[rank].outbox:
            self._hear(rank, self.hands[rank].outbox.popleft())

    def _lose(self, rank: int) -> None:
        """As `Pool._reap` and `ProcessGather.lost`."""
        self._hear_all(rank)
        del self.hands[rank]
        run = self.sent.pop(rank, None)
        expected = None
        if run is not None and run.first < run.last:
            self.deaths[run.first] += 1
            if self.deaths[run.first] >= POISONOUS and rank in self.alone and run.first in self.missing:
                expected = run.first
        assert self.scheduler.lost(rank) == expected
        self.poisoned = self.poisoned or expected is not None

    def _call_off(self) -> None:
        for hand in self.hands.values():
            hand.limit = 0

    # ---- what happens

    @rule(turns=st.lists(TURNS, min_size=1, max_size=4))
    def some_work_and_some_are_heard(self, turns: list[Turn]) -> None:
        """Those who work unheard get ahead of what the parent knows, past limits too."""
        for turn in turns:
            for rank, hand in self.hands.items():
                for _ in range(turn.chunks[rank]):
                    if hand.busy and not hand.stopped:
                        hand.work()
            self.now += turn.seconds
            for rank in self.hands.keys() - turn.unheard:
                self._hear_all(rank)
            self._direct([rank for rank in self._idle() if rank not in turn.unheard])

    @rule()
    def nobody_says_anything_until_a_chunk_is_late(self) -> None:
        self._direct(self._idle())
        due = self.scheduler.next_late(self._estimate)
        self.now = max(self.now, due) if due < math.inf else self.now
        self._direct(self._idle())

    @rule(ranks=st.sets(WHO))
    def these_are_stopped_and_the_others_continue(self, ranks: set[int]) -> None:
        for rank, hand in self.hands.items():
            hand.stopped = rank in ranks

    @rule(rank=WHO, when=st.sampled_from(["in a chunk", "before it says that it was the last"]))
    def a_worker_dies(self, rank: int, when: str) -> None:
        hand = self.hands.get(rank)
        if hand is None:
            return
        if hand.busy and when == "before it says that it was the last":
            hand.work()
            if not hand.busy:
                hand.outbox.pop()
        self._lose(rank)

    @rule(rank=WHO)
    def a_worker_and_its_successors_die(self, rank: int) -> None:
        """Of the same chunk, if there is no other."""
        for _ in range(POISONOUS):
            if rank in self.hands:
                self._lose(rank)
            self.hands[rank] = Hand()
            self._direct([rank])

    @rule(paces=PACES)
    def the_dead_join_again_and_paces_change(self, paces: tuple[float | None, ...]) -> None:
        self.paces = paces
        for rank in range(RANKS):
            self.hands.setdefault(rank, Hand())

    @precondition(lambda self: self.heard)
    @rule()
    def the_last_reports_come_twice(self) -> None:
        for rank, hand in self.hands.items():
            if hand in self.heard and not hand.outbox:
                self._hear(rank, self.heard[hand])

    @precondition(lambda self: self.sent)
    @rule(rank=WHO)
    def an_order_ends_early(self, rank: int) -> None:
        """With an error, say; the chunk at hand is not finished."""
        hand = self.hands.get(rank)
        if hand is not None and hand.busy:
            self._hear_all(rank)
            hand.busy = False
            if rank in self.sent:
                self._end(rank)

    @precondition(lambda self: self.turns >= 8)
    @rule(shut_down=st.booleans(), cuts=CUTS)
    def the_evaluation_is_abandoned(self, shut_down: bool, cuts: Sequence[int]) -> None:
        """By Ctrl-C or for poison: the next one begins while workers are still at this one, or with new ones."""
        self._call_off()
        if shut_down:
            for rank in list(self.hands):
                self._lose(rank)
            assert not self.scheduler.workers
            self.hands = {rank: Hand() for rank in range(RANKS)}
        self._plan(cuts)

    @precondition(lambda self: self.poisoned)
    @rule()
    def poison_ends_the_evaluation(self) -> None:
        self.the_evaluation_is_abandoned(False, self.cuts)

    @precondition(lambda self: self.turns >= 8)
    @rule(hanging=st.sets(WHO, max_size=RANKS - 1), paces=PACES, meanwhile=st.booleans())
    def from_now_on_workers_behave(self, hanging: set[int], paces: tuple[float | None, ...], meanwhile: bool) -> None:
        """All but those that hang: then the evaluation completes, and counts each chunk once."""
        self.paces = tuple(pace or 0.01 for pace in paces) if hanging else paces
        for rank in range(RANKS):
            if rank not in hanging:
                self.hands.setdefault(rank, Hand())
        rounds = 0
        while self.scheduler.missing:
            self._round(hanging)
            rounds += 1
            assert rounds <= (RANKS + 1) * (self.chunks + 1)
        self._complete(meanwhile)
        self._plan(self.cuts)

    def _round(self, hanging: set[int]) -> None:
        # of a suspect nobody has a copy: one waits until the pool has killed it
        for rank in hanging & self.sent.keys():
            if self.deaths[self.sent[rank].first] >= POISONOUS - 1:
                self._lose(rank)
        self._direct(self._idle())
        self.now += LATE if hanging else 0.001
        for rank, hand in self.hands.items():
            hand.stopped = rank in hanging
            if hand.busy and not hand.stopped:
                hand.work()
            self._hear_all(rank)

    def _complete(self, meanwhile: bool) -> None:
        """As the end of `ProcessBackend.evaluate`; workers may finish the chunk that they are at before the next."""
        assert not self.missing
        self._call_off()
        for rank, hand in self.hands.items():
            self._hear_all(rank)
            if meanwhile and hand.busy:
                hand.work()

    # ---- what holds at any time

    @invariant()
    def the_number_of_missing_chunks_is_right(self) -> None:
        assert self.scheduler.missing == len(self.missing)

    @invariant()
    def it_knows_who_is_at_what(self) -> None:
        assert set(self.scheduler.workers) == self.sent.keys() <= self.hands.keys()
        for rank in range(RANKS):
            run, found = self.sent.get(rank), self.scheduler.current(rank)
            expected = run.first if run is not None and run.first < run.last else None
            assert (None if found is None else found[0]) == expected

    @invariant()
    def once_all_have_begun_only_what_is_late_is_given_out(self) -> None:
        spare = copy.deepcopy(self.scheduler)
        begun = spare.all_begun
        given = spare.decide(range(RANKS), unknown, 0.0)
        assert not (begun and given)

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

    def teardown(self) -> None:
        if hasattr(self, "chunks"):
            self.from_now_on_workers_behave(set(), self.paces, True)


TestEvaluations = Evaluations.TestCase
TestEvaluations.settings = settings(deadline=None, max_examples=100, stateful_step_count=50, report_multiple_bugs=False)
