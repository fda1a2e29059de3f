"""The choice between this process and worker processes, by measured times: decisions only."""

from __future__ import annotations

import math
from enum import Enum
from statistics import median
from typing import NamedTuple

# Workers are used if they are expected, and then measured, to take less than this fraction of the time.
GAIN = 0.97
# Seconds of the longest evaluation for which fewer threads in this process may be faster than more.
SHORT = 0.02
# Short evaluations that are made before a share is probed.
MANY = 40
# Fewer threads are given up at once if they take this many times as long as more.
HOPELESS = 1.5
# Seconds of coordination of an evaluation by workers: in any case, for each of them, and for each byte of a gradient.
COORDINATION, EACH, BYTE = 2e-4, 1e-5, 1e-10
# The fraction of the expected time that is hoped of the neighbours of the fastest configuration.
DOUBT = 0.8
# Startup cost of workers in seconds: the first with so many threads, and later ones.
FIRST, LATER = 1.0, 0.15
# Evaluations between checks for drift, at first; and the factor that counts as drift.
OFTEN, FACTOR = 64, 1.6


def coordination(workers: int, gradient: int) -> float:
    """Return the seconds that an evaluation by workers takes beside computing; `gradient`: its bytes."""
    return COORDINATION + workers * (EACH + BYTE * gradient)


class Configuration(NamedTuple):
    """`workers`, 1 of which is this process, with `threads` each; None: as torch is set."""

    workers: int
    threads: int | None

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", threads={self.threads}"
        return f"{'this process' if self.workers == 1 else f'{self.workers} workers'}{threads}"


class Costs(NamedTuple):
    """The seconds that parts of an evaluation take: `fixed`, whatever is done in it; `rest`, its samples on one thread;
    `waits` of `most` threads for each other, which grow with their number at least."""

    fixed: float
    rest: float
    waits: float
    most: int

    def of(self, workers: int, threads: int) -> float:
        """Return the seconds of an evaluation by these workers, less coordination."""
        waits = self.waits * (threads - 1) / (self.most - 1) if threads > 1 else 0.0
        return self.fixed + self.rest / (workers * threads) + waits

    def __str__(self) -> str:
        """What can be said of them; nothing is known of fixed costs where they are zero."""
        samples = f"{_ms(self.rest)} for the samples on one thread"
        return f"{_ms(self.fixed)} in any case and {samples}" if self.fixed else samples


class Phase(Enum):
    """The purpose of the next evaluations."""

    TIME = "time"  # the present configuration is timed
    PROBE = "probe"  # a worker's share is to be timed in this process
    WAIT = "wait"  # workers are expected to pay once more evaluations have been made
    CHOSEN = "chosen"


class Choice:
    """Chooses among configurations of `cores` cores for evaluations of one kind of batch.

    It is passed the seconds of each evaluation (`took`) by the present `configuration`, and in `Phase.PROBE` those of a
    worker's share (`probed`), from which it expects those of any number of workers. It tries the number that it expects
    most of, and then others of which it still expects more than it has measured. Workers are started only once the
    evaluations so far, made by them, would have saved the time that starting them takes: so a short program never waits
    for them, and a long one loses at most as much again for each trial."""

    def __init__(self, cores: int, threads: int | None, gradient_bytes: int) -> None:
        """`threads`: of each worker, also of this process, if the user or fixed bits determine it."""
        self._cores, self._alone, self._bytes = cores, Configuration(1, threads), gradient_bytes
        most = cores // (threads or 1)
        counts = [most >> halved for halved in range(most.bit_length()) if most >> halved > 1]
        self._several = [Configuration(count, threads or cores // count) for count in counts]
        fewer = [cores >> halved for halved in range(1, cores.bit_length())] if threads is None else []
        self._others = [*self._several, *(Configuration(1, count) for count in fewer)]
        self.drift, self._threads = Drift(), 0  # of the workers that were started last
        self.begin()

    def begin(self) -> None:
        """Choose again."""
        self.configuration = self.wanted = self._alone
        self.times: dict[Configuration, float] = {}
        self.phase, self.reason = Phase.TIME, "nothing was measured yet"
        self._costs: Costs | None = None
        self._refused = ""  # why workers cannot share the batch
        self._evaluations = 0  # timed so far
        self._seconds: list[float] = []  # of the evaluations of the present trial
        if not self._several:
            self.choose("there is one core")

    # ---- this process

    def took(self, seconds: float) -> None:
        """Note that an evaluation by `configuration` took this long, loading its batch included."""
        self._evaluations += 1
        if self.phase is Phase.CHOSEN and self.drift.has_come(seconds) and self.times:
            self.drift.often *= 2  # so that a load that changes all the time costs little
            self.begin()
        elif self.phase is Phase.TIME:
            self._seconds.append(seconds)
            present = self.configuration
            warm = self._seconds[1 if present.workers == 1 else 4 :]
            fewer = present.workers == 1 and present != self._alone
            if len(warm) >= self._enough(seconds) or (fewer and min(warm, default=0.0) > HOPELESS * self._least):
                # not the least: several threads are fast at times, and slow when they wait for each other
                self.times[present], self._seconds = median(warm), []
                self._timed()

    def _enough(self, seconds: float) -> int:
        """Return how many evaluations of this length to time."""
        if seconds > 0.1:
            return 3
        # Probing takes as long as some evaluations: a short program never does.
        return MANY if self._alone.threads is None and not self.times and seconds < SHORT else 6

    @property
    def _best(self) -> Configuration:
        """The fastest configuration so far."""
        return min(self.times, key=self.times.__getitem__)

    @property
    def _least(self) -> float:
        """The seconds of the fastest configuration so far."""
        return min(self.times.values(), default=math.inf)

    def _timed(self) -> None:
        """Decide what follows a trial."""
        if self._costs is not None or self._refused:
            self._want(self._refused or "measured")
        else:
            self.phase = Phase.PROBE

    # ---- workers

    @property
    def share(self) -> Configuration:
        """The workers, of whose shares one is to be probed: one for each core."""
        return self._several[0]

    @property
    def is_due(self) -> bool:
        """Tell whether a share is to be probed now: workers could have paid for their start, or evaluations are short,
        so that fewer threads may be faster, and many were made."""
        if self.phase is not Phase.PROBE:
            return False
        saved = self._least * (1 - 1 / self.share.workers)
        return self._evaluations * saved >= self._price(self.share) or self._evaluations >= MANY

    def probed(self, whole: float, half: float | None = None) -> None:
        """Note that a worker's share took this long in this process, with a worker's threads, and `half` of one that
        long, if samples and not chunks are shared."""
        each, alone = self.share.threads or 1, self.times[self._alone]
        fixed = 0.0 if half is None else min(max(2 * half - whole, 0.0), whole)
        rest = (whole - fixed) * self.share.workers * each
        waits = 0.0 if self._alone.threads else max(alone - fixed - rest / self._cores, 0.0)
        self._costs = Costs(fixed, rest, waits, self._cores)
        self._want("")

    def refuse(self, reason: str) -> None:
        """Note that workers cannot share the batch, for that reason."""
        self._refused = reason
        self._want(reason)

    def expected(self, other: Configuration) -> float:
        """Return the seconds of an evaluation, as the costs of a share have it."""
        assert self._costs is not None
        seconds = self._costs.of(other.workers, other.threads or self._cores)
        return seconds if other.workers == 1 else seconds + coordination(other.workers, self._bytes)

    def hoped(self, other: Configuration) -> float:
        """Return the seconds that an evaluation may take: as expected, or less by what others took less."""
        if self._refused:
            is_possible = other.workers == 1 and self._least < SHORT and self._is_beside_best(other)
            return DOUBT * self._least if is_possible else math.inf
        less = min([1.0, *(seconds / self.expected(tried) for tried, seconds in self.times.items())])
        return less * self.expected(other) * (DOUBT if self._is_beside_best(other) else 1.0)

    def _is_beside_best(self, other: Configuration) -> bool:
        """Tell whether this has half or twice the workers, or the threads of this process, of the fastest so far."""
        best = self._best
        one, two = other.workers, best.workers
        if one == 1 == two:
            one, two = other.threads or self._cores, best.threads or self._cores
        elif 1 in (one, two):
            return False
        return max(one, two) <= 2 * min(one, two) + 1

    def _want(self, reason: str) -> None:
        """Wait until the most promising others pay, those of this process at once; choose if none promise more than
        what was measured."""
        hopes = {other: self.hoped(other) for other in self._others if other not in self.times}
        promising = [other for other, seconds in hopes.items() if seconds < GAIN * self._least]
        if promising:
            self.wanted = min(promising, key=lambda other: (other.workers > 1, hopes[other]))
            self.configuration, self.phase = self._best, Phase.WAIT
        else:
            least = min(hopes, key=hopes.__getitem__, default=self.share)
            self.choose(reason or f"{least} are expected to take {_ms(self.expected(least))}")

    def _price(self, several: Configuration) -> float:
        """Return the seconds that starting these workers takes."""
        if several.workers == 1:
            return 0.0
        return LATER if several.threads == self._threads else FIRST

    @property
    def pays(self) -> bool:
        """Tell whether the evaluations so far would have paid for starting the workers that are wanted."""
        if self.phase is not Phase.WAIT:
            return False
        return self._evaluations * (self._least - self.hoped(self.wanted)) >= self._price(self.wanted)

    def try_workers(self) -> None:
        """Time the workers that are wanted, which can start now."""
        self.phase, self.configuration = Phase.TIME, self.wanted
        if self.wanted.workers > 1:
            self._threads = self.wanted.threads or 0

    def next(self, present: Configuration, movable: bool, ready: bool) -> Configuration | None:
        """Return the configuration of the next evaluations, None for the present one. `movable`: whether it may change
        now. `ready`: workers, which pay, can start."""
        if ready:
            self.try_workers()
        return self.configuration if movable and self.configuration != present else None

    def choose(self, reason: str, configuration: Configuration | None = None) -> None:
        """Choose the given configuration or else the fastest one measured, for that reason."""
        found = self.times
        if configuration is None and found:
            alone = min((c for c in found if c.workers == 1), key=found.__getitem__)
            configuration = self._best if self._least < GAIN * found[alone] else alone
        self.configuration = configuration or self.configuration
        measured = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in found.items())
        costs = f"; an evaluation takes {self._costs}" if self._costs is not None else ""
        self.phase, self.reason = Phase.CHOSEN, f"{reason} ({measured}{costs})" if measured else reason
        self.drift = Drift(self.drift.often)


class Drift:
    """Compares the times of evaluations with those of the first ones: `often` at a time."""

    def __init__(self, often: int = OFTEN) -> None:
        self.often = often
        self._usual = self._sum = 0.0  # seconds
        self._counted = 0

    def has_come(self, seconds: float) -> bool:
        """Count an evaluation; tell whether times have changed by a factor."""
        self._sum += seconds
        self._counted += 1
        if self._counted < self.often:
            return False
        mean, self._sum, self._counted = self._sum / self._counted, 0.0, 0
        usual = self._usual = self._usual or mean
        return not usual / FACTOR < mean < usual * FACTOR


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
