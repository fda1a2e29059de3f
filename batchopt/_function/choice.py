"""The choice between this process and worker processes, by measured times: decisions only."""

from __future__ import annotations

import math
from enum import Enum
from statistics import median
from typing import NamedTuple

# Workers are used if they are expected, and then measured, to take less than this fraction of the time.
GAIN = 0.97
# Seconds of the longest evaluation for which one thread in this process may be faster than several.
SHORT = 0.02
# Evaluations before one thread is tried.
MANY = 40
# One thread is given up at once if it takes this many times as long as several.
HOPELESS = 1.5
# Seconds of coordination of an evaluation by workers: in any case, for each of them, and for each byte of a gradient.
COORDINATION, EACH, BYTE = 2e-4, 1e-5, 1e-10
# Startup cost of workers in seconds: the first of a program, and later ones.
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


_ONE = Configuration(1, 1)


class Phase(Enum):
    """The purpose of the next evaluations."""

    TIME = "time"  # the present configuration is timed
    PROBE = "probe"  # a worker's share is to be timed in this process
    WAIT = "wait"  # workers are expected to pay once more evaluations have been made
    CHOSEN = "chosen"


class Choice:
    """Chooses among configurations of `cores` cores for evaluations of one kind of batch.

    It is passed the seconds of each evaluation (`took`) by the present `configuration`, and in `Phase.PROBE` those of a
    worker's share (`probed`). Workers are started only once the evaluations so far, made by workers, would have saved
    the time that starting them takes: so a short program never waits for them, and a long one loses at most as much
    again."""

    def __init__(self, cores: int, threads: int | None, gradient_bytes: int) -> None:
        """`threads`: of each worker, also of this process, if the user or fixed bits determine it."""
        self._alone, self._bytes = Configuration(1, threads), gradient_bytes
        self._others = [Configuration(cores // (threads or 1), threads or 1)]
        if threads is None and cores >= 4:
            self._others.append(Configuration(cores // 2, 2))
        self.drift, self._starting = Drift(), FIRST
        self.begin()

    def begin(self) -> None:
        """Choose again."""
        self.configuration = self._alone
        self.times: dict[Configuration, float] = {}
        self.phase, self.reason = Phase.TIME, "nothing was measured yet"
        self._expected, self._evaluations = 0.0, 0  # seconds by workers; evaluations timed so far
        self._seconds: list[float] = []  # of the evaluations of the present trial
        if self._others[0].workers < 2:
            self.choose("there is one core")

    def took(self, seconds: float) -> None:
        """Note that an evaluation by `configuration` took this long, loading its batch included."""
        self._evaluations += 1
        if self.phase is Phase.CHOSEN and self.drift.has_come(seconds) and self.times:
            self.drift.often *= 2  # so that a load that changes all the time costs little
            self.begin()
        elif self.phase is Phase.TIME:
            self._seconds.append(seconds)
            warm = self._seconds[1 if self.configuration.workers == 1 else 4 :]
            best = self.times.get(self._alone, math.inf)
            hopeless = self.configuration == _ONE and min(warm, default=0.0) > HOPELESS * best
            if hopeless or len(warm) >= self._enough(seconds):
                # not the least: several threads are fast at times, and slow when they wait for each other
                self.times[self.configuration], self._seconds = median(warm), []
                self._timed()

    def _enough(self, seconds: float) -> int:
        """Return how many evaluations of this length to time."""
        if seconds > 0.1:
            return 3
        # Trying one thread takes as long as some evaluations: a short program never does.
        return MANY if self._alone.threads is None and not self.times and seconds < SHORT else 6

    def _timed(self) -> None:
        """Decide what follows a trial."""
        if self.configuration.workers > 1:
            late = self.times[self.configuration] > 1.15 * self._expected
            rest = [other for other in self._others if other not in self.times]
            if late and rest:
                self.configuration = rest[0]
            else:
                self.choose("measured")
        elif _ONE not in self.times and self._alone.threads is None and self.times[self._alone] < SHORT:
            self.configuration = _ONE
        else:
            self.configuration, self.phase = self._best_alone, Phase.PROBE

    @property
    def _best_alone(self) -> Configuration:
        return min((c for c in self.times if c.workers == 1), key=self.times.__getitem__)

    @property
    def share(self) -> Configuration:
        """The workers, of whose shares one is to be probed."""
        return self._others[0]

    def probed(self, seconds: float) -> None:
        """Note that a worker's share took this long in this process, with a worker's threads."""
        share, best = self.share, self.times[self.configuration]
        self._expected = seconds + coordination(share.workers, self._bytes)
        if self._expected > GAIN * best:
            self.choose(f"{share} are expected to take {_ms(self._expected)}")
        else:
            self.phase = Phase.WAIT

    @property
    def is_due(self) -> bool:
        """Tell whether a share is to be probed now: workers that are started could have paid for that."""
        if self.phase is not Phase.PROBE:
            return False
        saved = self.times[self.configuration] * (1 - 1 / self.share.workers)
        return self._evaluations * saved >= self._starting

    @property
    def pays(self) -> bool:
        """Tell whether the evaluations so far would have paid for starting workers."""
        if self.phase is not Phase.WAIT:
            return False
        return self._evaluations * (self.times[self.configuration] - self._expected) >= self._starting

    def try_workers(self) -> None:
        """Time workers, which can start now."""
        self.phase, self.configuration, self._starting = Phase.TIME, self._others[0], LATER

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
            alone, best = self._best_alone, min(found, key=found.__getitem__)
            configuration = best if found[best] < GAIN * found[alone] else alone
        self.configuration = configuration or self.configuration
        measured = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in found.items())
        self.phase, self.reason = Phase.CHOSEN, f"{reason} ({measured})" if measured else reason
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
