"""The choice between this process, worker processes and devices, by measured times: decisions only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from statistics import median

import torch

from batchopt._function.costs import SHORT, Configuration, Outlook

# Evaluations after which a share is probed in any case; short ones are timed so often.
MANY = 40
# Seconds of a trial, of up to so many evaluations: what disturbs a machine may last for some hundredths of a second.
LONG = 0.25
# Fewer threads, and devices, are given up early if they take this many times as long as the best before.
HOPELESS = 1.5
# Startup cost of workers in seconds: the first with so many threads, later ones, and those on devices.
FIRST, LATER, DEVICE = 1.0, 0.15, 3.0
# First evaluations that do not count: in this process, by workers, and on devices, which record some as graphs.
HERE, THERE, RECORDING = 1, 4, 8
# Evaluations between checks for drift, at first; and the factor that counts as drift.
OFTEN, FACTOR = 64, 1.6


class Phase(Enum):
    """The purpose of the next evaluations."""

    TIME = "time"  # the present configuration is timed
    PROBE = "probe"  # a worker's share is to be timed in this process
    WAIT = "wait"  # workers are expected to pay once more evaluations have been made
    CHOSEN = "chosen"


class Choice:
    """Chooses among configurations of `cores` cores for evaluations of one kind of batch.

    It is passed the seconds of each evaluation (`took`) by the present `configuration`, and in `Phase.PROBE` those of a
    worker's share (`probed`). It tries what the `outlook` promises, one configuration after the other. Workers are
    started only once the evaluations so far, made by them, would have saved the time that starting them takes: so a
    short program never waits for them, and a long one loses at most as much again for each trial."""

    def __init__(
        self, cores: int, threads: int | None, gradient_bytes: int, devices: Sequence[torch.device] = ()
    ) -> None:
        """See `Outlook`."""
        self.outlook = Outlook(cores, threads, gradient_bytes, devices)
        self.drift, self._threads = Drift(), 0  # of the workers that were started last
        self.begin()

    def begin(self) -> None:
        """Choose again."""
        self.outlook.forget()
        self.configuration = self.wanted = self.outlook.alone
        self.phase, self.reason = Phase.TIME, "nothing was measured yet"
        self._evaluations = 0  # timed so far
        self._seconds: list[float] = []  # of the evaluations of the present trial
        if not self.outlook.others:
            self.choose("there is nothing else")

    def took(self, seconds: float) -> None:
        """Note that an evaluation by `configuration` took this long, loading its batch included."""
        self._evaluations += 1
        outlook, present = self.outlook, self.configuration
        if self.phase is Phase.CHOSEN and self.drift.has_come(seconds) and outlook.times:
            self.drift.often *= 2  # so that a load that changes all the time costs little
            self.begin()
        elif self.phase is Phase.TIME:
            self._seconds.append(seconds)
            warm = self._seconds[HERE if present.is_here else RECORDING if present.devices else THERE :]
            if len(warm) >= self._enough(seconds) or self._is_hopeless:
                # not the least: several threads are fast at times, and slow when they wait for each other
                outlook.times[present], self._seconds = median(warm or self._seconds[HERE:]), []
                if outlook.is_cut_known:
                    self._want(outlook.refused or "measured")
                else:
                    self.phase = Phase.PROBE

    @property
    def _is_hopeless(self) -> bool:
        """Tell whether the present trial, of fewer threads or of devices, is given up: it took what a start takes, and
        no evaluation but the first came near to what there is."""
        present, outlook = self.configuration, self.outlook
        few = present != outlook.alone and (present.is_here or bool(present.devices))
        slow = few and min(self._seconds[HERE:], default=0.0) > HOPELESS * outlook.least
        return slow and sum(self._seconds) > self._price(present)

    def _enough(self, seconds: float) -> int:
        """Return how many evaluations of this length to time."""
        if seconds > 0.1:
            return 3
        # Probing takes as long as some evaluations: a short program never does.
        is_first = not self.outlook.times and self.outlook.alone.threads is None
        return MANY if is_first and seconds < SHORT else min(MANY, max(6, math.ceil(LONG / seconds)))

    # ---- what a share tells

    @property
    def share(self) -> Configuration:
        """The workers, of whose shares one is to be looked at: one for each core, or else for each device."""
        assert self.outlook.cut is not None
        return self.outlook.cut

    @property
    def is_due(self) -> bool:
        """Tell whether a share is to be probed now: workers could have paid for their start, or so many evaluations
        were made that a share or two more cost little, and tell whether fewer threads may be faster."""
        if self.phase is not Phase.PROBE:
            return False
        saved = self.outlook.least * (1 - 1 / self.share.workers)
        return self._evaluations * saved >= self._price(self.share) or self._evaluations >= MANY

    def probed(self, whole: float, half: float | None = None) -> None:
        """Note that a worker's share took this long in this process, with a worker's threads, and `half` of one that
        long, if samples and not chunks are shared."""
        self.outlook.probed(whole, half)
        self.allow()

    def allow(self) -> None:
        """Note that workers can share the batch."""
        self.outlook.is_cut_known = True
        self._want("expected")

    def refuse(self, reason: str) -> None:
        """Note that workers cannot share the batch, for that reason."""
        self.outlook.refused, self.outlook.is_cut_known = reason, True
        self._want(reason)

    def fail(self, failed: Configuration, reason: str, before: Configuration) -> None:
        """Note that a configuration cannot be used, for that reason: others of its kind cannot, either. `before`: the
        one in use."""
        self._seconds = []
        if not self.outlook.times:  # it was another run's choice
            self.choose(reason, before)
        elif failed.devices:
            untried = [other for other in self.outlook.on_devices if other not in self.outlook.times]
            self.outlook.times |= dict.fromkeys(untried, math.inf)
            self._want(reason)
        else:
            self.refuse(reason)

    # ---- what is tried next

    def _want(self, reason: str) -> None:
        """Wait until the most promising others pay; choose if none promise more than what was measured."""
        promising = self.outlook.promising(self._price)
        if promising is None:
            self.choose(reason)
        else:
            self.wanted, self.configuration, self.phase = promising, self.outlook.best, Phase.WAIT

    def _price(self, wanted: Configuration) -> float:
        """Return the seconds that starting these workers takes."""
        if wanted.is_here:
            return 0.0
        if wanted.devices:
            return DEVICE
        return LATER if wanted.threads == self._threads else FIRST

    @property
    def pays(self) -> bool:
        """Tell whether the evaluations so far would have paid for starting the workers that are wanted."""
        if self.phase is not Phase.WAIT:
            return False
        saved = self.outlook.least - self.outlook.hoped(self.wanted)
        return self._evaluations * saved >= self._price(self.wanted)

    def next(self, present: Configuration, movable: bool, ready: bool) -> Configuration | None:
        """Return the configuration of the next evaluations, None for the present one. `movable`: whether it may change
        now. `ready`: what is wanted pays, and can start."""
        if ready:
            self.phase, self.configuration = Phase.TIME, self.wanted
            on_cores = self.wanted.workers > 1 and not self.wanted.devices
            self._threads = (self.wanted.threads or 0) if on_cores else self._threads
        return self.configuration if movable and self.configuration != present else None

    def choose(self, reason: str, configuration: Configuration | None = None) -> None:
        """Choose the given configuration or else the fastest one measured, for that reason."""
        if configuration is None and self.outlook.times:
            configuration = self.outlook.preferred
        self.configuration = configuration or self.configuration
        self.phase, self.reason = Phase.CHOSEN, f"{reason} ({self.outlook})" if self.outlook.times else reason
        self.settle()

    def settle(self) -> None:
        """Take the times from here on as the usual ones: no load has changed evaluations, but the way they go."""
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
