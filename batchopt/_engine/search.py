"""The search for the fastest way of evaluating, by measured times: decisions only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch

# Another way is used if it takes less than this fraction of the time.
GAIN = 0.97
# Evaluations of a trial: as many as take LONG seconds, as what disturbs a machine may last for some hundredths of one.
FEW, MANY, LONG = 3, 40, 0.25
# A trial is given up once it took as long as a start, if each evaluation took this many times as long as by the best.
HOPELESS = 1.5
# First evaluations that do not count: in this process, by workers, and on devices, which record some as graphs.
HERE, THERE, RECORDING = 1, 4, 8
# Seconds that the start of workers takes, and of those on devices. Without a start a trial may lose LOST evaluations.
START, DEVICE, LOST = 1.0, 3.0, 2.0
# The fraction of the time that is hoped of other threads and chunks. Evaluations after which devices must have paid.
DOUBT, PATIENCE = 0.8, 5000
# Seconds of an evaluation beside computing: by workers in any case, for each, for each byte of a gradient; on a device.
COORDINATION, EACH, BYTE, CROSSING = 2e-4, 1e-5, 1e-10, 4e-4


def coordination(workers: int, gradient: int) -> float:
    """Return the seconds that an evaluation by workers takes beside computing; `gradient`: its bytes."""
    return COORDINATION + workers * (EACH + BYTE * gradient)


class Way(NamedTuple):
    """`workers` with `threads` each (None: as torch is set), on the cores or each on one of `devices`; one on the cores
    is this process. `chunk_size`: where times decide about it; None: a worker's share."""

    workers: int
    threads: int | None
    devices: tuple[torch.device, ...] = ()
    chunk_size: int | None = None

    @property
    def is_here(self) -> bool:
        """Tell whether this process evaluates."""
        return self.workers == 1 and not self.devices

    @property
    def has_shares(self) -> bool:
        """Tell whether the time of a worker's share, in this process, is one that it takes at least."""
        return self.workers > 1 and not self.devices and self.chunk_size is None

    @property
    def price(self) -> float:
        """The seconds that it takes to start."""
        return 0.0 if self.is_here or self.chunk_size is not None else DEVICE if self.devices else START

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """The kind of ways of which all are forbidden by what forbids one."""
        return self.is_here, bool(self.devices), self.chunk_size is not None

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", threads={self.threads}"
        workers = "this process" if self.is_here else "a worker" if self.workers == 1 else f"{self.workers} workers"
        where = f" on {', '.join(map(str, self.devices))}" if self.devices else threads
        return f"{workers}{where}{'' if self.chunk_size is None else f', chunks of {self.chunk_size} samples'}"


class Search:
    """Tries the rungs of ladders of ways, as long as each is faster than the one before it.

    A way is tried once the evaluations so far, made by it, could have saved what the trial takes: so a short program
    never waits for workers, and a long one loses at most as much again for each trial. Never less is hoped of a way
    than it can do, since a trial corrects hope, where nothing corrects what was never tried. What is hoped of workers
    is the time of a worker's share in this process, which is asked for (`unknown`) before any are started."""

    def __init__(self, start: Way, ladders: Sequence[Sequence[Way]], gradient: int, reason: str = "measured") -> None:
        """`start`: the way in use, one of the rungs if there are any. `gradient`: its bytes."""
        self.present, self.reason = start, reason
        self.times: dict[Way, float] = {}
        self.shares: dict[Way, float] = {}
        self.unknown: list[Way] = []  # workers of which the shares are to be timed next
        self._ladders, self._gradient = [*ladders], gradient
        self._evaluations, self._seconds = 0, list[float]()  # since this began; of the present trial
        self._next: Way | None = None  # which is tried
        self._after = math.inf  # so many evaluations

    @property
    def is_over(self) -> bool:
        """Tell whether nothing is left to be tried."""
        return self._next is None and (self.present in self.times or not self._ladders)

    @property
    def due(self) -> Way | None:
        """The way to try now; None if there is none that could pay yet."""
        return self._next if self.present in self.times and self._evaluations >= self._after else None

    @property
    def best(self) -> Way:
        """The fastest way that was timed, or this process if that is about as fast."""
        times = self.times
        first = min((way for way in times if way.is_here), key=times.__getitem__, default=next(iter(times)))
        found = min(times, key=times.__getitem__)
        return found if times[found] < GAIN * times[first] else first

    # ---- what is tried next

    def _look(self) -> None:
        """Go back to the best way, and find what to try next."""
        self.present = self.best
        found = {way: after for way in self._open() if (after := self._pays_after(way)) < math.inf}
        self.unknown = [way for way in found if self._is_unknown(way)]
        self._next = min(self.unknown or found, key=found.__getitem__, default=None)
        self._after = math.inf if self._next is None else found[self._next]

    def _open(self) -> Iterator[Way]:
        """Yield the first rung of each ladder that was not timed, if those before it were ever faster."""
        for ladder in self._ladders:
            before = math.inf
            for way in ladder:
                seconds = self.times.get(way)
                if seconds is None:
                    yield way
                if seconds is None or seconds >= before:
                    break
                before = seconds

    def _is_unknown(self, way: Way) -> bool:
        return way.has_shares and way not in self.shares

    def _hoped(self, way: Way, least: float) -> float:
        if way.has_shares:
            return self.shares.get(way, least / way.workers) + coordination(way.workers, self._gradient)
        if way.chunk_size is not None or not way.devices:
            return DOUBT * least
        one = self.times.get(way._replace(workers=1, devices=way.devices[:1]), 0.0)
        return max(CROSSING, one / way.workers)

    def _pays_after(self, way: Way) -> float:
        """Return the number of evaluations after which the trial of a way could have paid; infinity if it never can."""
        least = self.times[self.best]
        saved = least - self._hoped(way, least)
        if saved <= (1 - GAIN) * least:
            return math.inf
        after = (way.price or LOST * least) / saved
        if self._is_unknown(way):  # to time shares takes less, and tells whether fewer threads wait less
            return min(after, MANY)
        return math.inf if way.devices and after > PATIENCE else after

    # ---- what was found

    def share_took(self, way: Way, seconds: float) -> None:
        """Note that the share of one of these workers takes this long in this process, with a worker's threads."""
        self.shares[way] = seconds
        self._look()

    def begin(self, way: Way) -> None:
        """Note that evaluations are made this way from now on."""
        self.present, self._seconds = way, []

    def took(self, seconds: float) -> None:
        """Note that an evaluation took this long, loading its batch included."""
        self._evaluations += 1
        way, found, least = self.present, self._seconds, min(self.times.values(), default=math.inf)
        if way in self.times:
            return
        found.append(seconds)
        warm = found[HERE if way.is_here else RECORDING if way.devices else THERE :]
        is_hopeless = min(found[HERE:], default=0.0) > HOPELESS * least and sum(found) > way.price
        if is_hopeless or len(warm) >= min(MANY, max(FEW, math.ceil(LONG / seconds))):
            # not the least: several threads are fast at times, and slow when they wait for each other
            self.times[way] = median(warm or found[HERE:])
            self._look()

    def postpone(self) -> None:
        """Try what is due after as many evaluations again."""
        self._evaluations = 0

    def add(self, ladder: Sequence[Way]) -> None:
        """Try the rungs of this ladder, too, of which the present way is the first."""
        self._ladders.append(ladder)
        if self.times:
            self._look()

    def refuse(self, way: Way, reason: str) -> None:
        """Note that a way cannot be used, nor others of its kind."""
        self.reason, self.times[way] = reason, math.inf
        self._ladders = [[a for a in ladder if a in self.times or a.kind != way.kind] for ladder in self._ladders]
        self._look()

    def __str__(self) -> str:
        shown = ", ".join(f"{w} {f'{1e3 * s:.3g} ms' if s < math.inf else 'failed'}" for w, s in self.times.items())
        return f"{self.present}: {self.reason} ({shown})" if shown else f"{self.present}: {self.reason}"
