"""The time of an evaluation by each number of workers and threads: measured, or expected from a few measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# Other configurations are used if they are expected, and then measured, to take less than this fraction of the time.
GAIN = 0.97
# The fraction of the expected time that is hoped of the neighbours of the fastest configuration.
DOUBT = 0.8
# Seconds of the longest evaluation that is short: fewer threads may be faster, even if no share of it can be timed.
SHORT = 0.02
# Seconds of coordination of an evaluation by workers: in any case, for each of them, and for each byte of a gradient.
COORDINATION, EACH, BYTE = 2e-4, 1e-5, 1e-10
# Evaluations after which a device must have paid for its start, to be tried at all: others wait for the choice.
PATIENCE = 5000
# Seconds of an evaluation on a device at least: X and the gradient cross, and the device is waited for.
CROSSING = 4e-4


def coordination(workers: int, gradient: int) -> float:
    """Return the seconds that an evaluation by workers takes beside computing; `gradient`: its bytes."""
    return COORDINATION + workers * (EACH + BYTE * gradient)


def ms(seconds: float) -> str:
    """Return the time in words."""
    return f"{1e3 * seconds:.3g} ms"


class Configuration(NamedTuple):
    """`workers` with `threads` each (None: as torch is set), on the cores or each on one of `devices`. One on the cores
    is this process."""

    workers: int
    threads: int | None
    devices: tuple[torch.device, ...] = ()

    @property
    def is_here(self) -> bool:
        """Tell whether this process evaluates."""
        return self.workers == 1 and not self.devices

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", threads={self.threads}"
        if self.is_here:
            return f"this process{threads}"
        workers = "a worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{workers} on {', '.join(map(str, self.devices))}" if self.devices else f"{workers}{threads}"


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
        samples = f"{ms(self.rest)} for the samples on one thread"
        return f"{ms(self.fixed)} in any case and {samples}" if self.fixed else samples


class Outlook:
    """The seconds of the configurations that were timed, and what they make one expect of the others.

    A share of the batch on one thread, and half of it, tell what an evaluation takes in any case and for its samples;
    that all threads take longer than a part of this is because they wait for each other. What is expected errs on the
    side of hope, since a trial corrects it, where nothing corrects what was never tried. Of a device nothing is known
    before it was tried: all is hoped of it that the way there allows."""

    def __init__(
        self, cores: int, threads: int | None, gradient_bytes: int, devices: Sequence[torch.device] = ()
    ) -> None:
        """`threads`: of each worker, also of this process, if the user or fixed bits determine it. `devices`: where
        workers may be, beside the cores."""
        self.cores, self.alone, self._bytes = cores, Configuration(1, threads), gradient_bytes
        most = cores // (threads or 1)
        counts = [most >> halved for halved in range(most.bit_length()) if most >> halved > 1]
        self.several = [Configuration(count, threads or cores // count) for count in counts]
        fewer = [cores >> halved for halved in range(1, cores.bit_length())] if threads is None else []
        many = {1, len(devices)} if devices else ()
        self.on_devices = [Configuration(count, threads, (*devices[:count],)) for count in sorted(many)]
        self.others = [*self.several, *(Configuration(1, count) for count in fewer), *self.on_devices]
        # what cuts the batch, of which one is looked at before all others
        self.cut = next((other for other in (*self.several, *self.on_devices[::-1]) if other.workers > 1), None)
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.times: dict[Configuration, float] = {}
        self.costs: Costs | None = None
        self.is_cut_known = self.cut is None  # whether it was found out if the batch can be cut
        self.refused = ""  # why workers cannot share the batch

    @property
    def best(self) -> Configuration:
        """The fastest configuration that was timed."""
        return min(self.times, key=self.times.__getitem__)

    @property
    def least(self) -> float:
        """The seconds of the fastest configuration that was timed."""
        return min(self.times.values(), default=math.inf)

    @property
    def preferred(self) -> Configuration:
        """The fastest configuration that was timed, or this process if that is about as fast."""
        alone = min((timed for timed in self.times if timed.is_here), key=self.times.__getitem__)
        return self.best if self.least < GAIN * self.times[alone] else alone

    def probed(self, whole: float, half: float | None) -> None:
        """Note the seconds of a share, one of `several[0]`, and of half of one, where that can be told."""
        workers, threads, _ = self.several[0]
        fixed = 0.0 if half is None else min(max(2 * half - whole, 0.0), whole)
        rest = (whole - fixed) * workers * (threads or 1)
        waits = 0.0 if self.alone.threads else max(self.times[self.alone] - fixed - rest / self.cores, 0.0)
        self.costs = Costs(fixed, rest, waits, self.cores)

    def expected(self, other: Configuration) -> float:
        """Return the seconds of an evaluation on the cores, as the costs of a share have it."""
        assert self.costs is not None
        seconds = self.costs.of(other.workers, other.threads or self.cores)
        return seconds if other.is_here else seconds + coordination(other.workers, self._bytes)

    def hoped(self, other: Configuration) -> float:
        """Return the seconds that an evaluation may take: as expected, or less by what others took less, and by some
        more beside the fastest one."""
        if other.devices:
            return self._hoped_of_devices(other)
        if self.refused:
            is_possible = other.is_here and self.least < SHORT and self._is_beside_best(other)
            return DOUBT * self.least if is_possible else math.inf
        on_cores = {timed: seconds for timed, seconds in self.times.items() if not timed.devices}
        less = min([1.0, *(seconds / self.expected(timed) for timed, seconds in on_cores.items())])
        return less * self.expected(other) * (DOUBT if self._is_beside_best(other) else 1.0)

    def _hoped_of_devices(self, other: Configuration) -> float:
        one = self.times.get(other._replace(workers=1, devices=other.devices[:1]))
        if other.workers > 1 and (self.refused or one is None):  # the first device tells about the others
            return math.inf
        return CROSSING if one is None else max(one / other.workers, CROSSING)

    def _is_beside_best(self, other: Configuration) -> bool:
        """Tell whether this has half or twice the workers, or the threads of this process, of the fastest so far."""
        best = self.best
        if best.devices:
            return False
        one, two = other.workers, best.workers
        if one == 1 == two:
            one, two = other.threads or self.cores, best.threads or self.cores
        elif 1 in (one, two):
            return False
        return max(one, two) <= 2 * min(one, two) + 1

    def promising(self, price: Callable[[Configuration], float]) -> Configuration | None:
        """Return the configuration to try next, of which more is hoped than was measured: the one that pays soonest for
        the seconds of its start, its `price`; None if there is none."""
        hopes = {other: self.hoped(other) for other in self.others if other not in self.times}
        found = [other for other, seconds in hopes.items() if seconds < GAIN * self.least]
        pays = {other: price(other) / (self.least - hopes[other]) for other in found}
        soon = [other for other in found if not other.devices or pays[other] <= PATIENCE]
        return min(soon, key=lambda other: (pays[other], hopes[other]), default=None)

    def __str__(self) -> str:
        shown = {timed: ms(seconds) if seconds < math.inf else "failed" for timed, seconds in self.times.items()}
        measured = ", ".join(f"{timed} {how}" for timed, how in shown.items())
        if self.costs is None:
            return measured
        untried = [other for other in self.several if other not in self.times]
        hoped = min(untried, key=self.hoped, default=None)
        rest = "" if hoped is None else f", {hoped} would take {ms(self.expected(hoped))}"
        return f"{measured}; an evaluation takes {self.costs}{rest}"
