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
        self._cores, self._threads, self._bytes = cores, threads, gradient_bytes
        self._looks_after, self._starting = OFTEN, FIRST
        self.begin()

    def begin(self) -> None:
        """Choose again."""
        self.configuration = self._alone = Configuration(1, self._threads)
        each = self._threads or 1
        self._others = [Configuration(self._cores // each, each)]
        if self._threads is None and self._cores >= 4:
            self._others.append(Configuration(self._cores // 2, 2))
        self.times: dict[Configuration, float] = {}
        self.phase, self.reason = Phase.TIME, "nothing was measured yet"
        self._expected, self._evaluations = 0.0, 0  # seconds by workers; evaluations timed so far
        self._begin_trial()
        if self._others[0].workers < 2:
            self.choose("there is one core")

    def _begin_trial(self) -> None:
        self._seconds: list[float] = []
        self._cold = 1 if self.configuration.workers == 1 else 4  # evaluations that warm up

    def took(self, seconds: float) -> None:
        """Note that an evaluation by `configuration` took this long, loading its batch included."""
        self._evaluations += 1
        if self.phase is Phase.CHOSEN:
            self._follow(seconds)
        elif self.phase is Phase.TIME and self._cold:
            self._cold -= 1
        elif self.phase is Phase.TIME:
            self._seconds.append(seconds)
            best = self.times.get(self._alone, math.inf)
            hopeless = self.configuration == _ONE and min(self._seconds) > HOPELESS * best
            if hopeless or len(self._seconds) >= self._enough(seconds):
                # not the least: several threads are fast at times, and slow when they wait for each other
                self.times[self.configuration] = median(self._seconds)
                self._timed()

    def _enough(self, seconds: float) -> int:
        """Return how many evaluations of this length to time."""
        if seconds > 0.1:
            return 3
        # Trying one thread takes as long as some evaluations: a short program never does.
        return MANY if self._threads is None and not self.times and seconds < SHORT else 6

    def _timed(self) -> None:
        """Go on after a trial."""
        if self.configuration.workers > 1:
            late = self.times[self.configuration] > 1.15 * self._expected
            rest = [other for other in self._others if other not in self.times]
            if late and rest:
                self.configuration = rest[0]
                self._begin_trial()
            else:
                self.choose("measured")
        elif _ONE not in self.times and self._threads is None and self.times[self._alone] < SHORT:
            self.configuration = _ONE
            self._begin_trial()
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
        self._begin_trial()

    def choose(self, reason: str, configuration: Configuration | None = None) -> None:
        """Choose the given configuration or else the fastest one measured, for that reason."""
        found = self.times
        if configuration is None and found:
            alone, best = self._best_alone, min(found, key=found.__getitem__)
            configuration = best if found[best] < GAIN * found[alone] else alone
        self.configuration = configuration or self.configuration
        measured = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in found.items())
        self.phase, self.reason = Phase.CHOSEN, f"{reason} ({measured})" if measured else reason
        self._usual = self._sum = 0.0  # seconds after the choice
        self._counted = 0

    def _follow(self, seconds: float) -> None:
        """Compare times with those after the choice; choose again if they have changed by a factor."""
        self._sum += seconds
        self._counted += 1
        if self._counted < self._looks_after:
            return
        mean, self._sum, self._counted = self._sum / self._counted, 0.0, 0
        if not self._usual:
            self._usual = mean
        elif not self._usual / FACTOR < mean < self._usual * FACTOR and self.times:
            self._looks_after *= 2  # so that a load that changes all the time costs little
            self.begin()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
