"""The speed-up of evaluations by 1, 2, 4, ... workers, measured here, and by more workers and machines, computed."""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import batchopt.extending as extending
from batchopt.evaluations import Evaluations
from batchopt.extending import coordination, read_positive, usable_cores
from batchopt.extras.figure import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Seconds that an exchange between machines takes beside its bytes, and those for each machine: as of ranks in
# docs/measurements.md.
EXCHANGE, MACHINE = 1.5e-3, 0.2e-3
# Largest gradient in bytes that each machine is sent of each other one; of a longer one they sum a slice each.
WHOLE = 2**17
# The batch is timed in so many parts beside all at once, for what an evaluation takes whatever its samples.
PART = 8
MOST = 64  # workers and machines to which times are computed


@dataclass(frozen=True)
class ScalingRow:
    """An evaluation by `workers` with `threads` each on each of `machines` takes `seconds`, as measured or computed;
    `memory`: bytes of a worker process of its own, where it was measured."""

    workers: int
    threads: int
    seconds: float
    measured: bool = True
    machines: int = 1
    memory: int | None = None

    @property
    def name(self) -> str:
        """The workers in words."""
        if self.machines > 1:
            return f"{self.machines} machines, {self.workers} workers each"
        here = "this process" if self.workers == 1 else f"{self.workers} workers"
        return f"{here}, {self.threads} thread{'s' * (self.threads > 1)}"


@dataclass(frozen=True)
class Scaling:
    """The rows: this process with all threads and with one (with `chunk_size` only that), then workers."""

    rows: tuple[ScalingRow, ...]

    def speed_up(self, row: ScalingRow) -> float:
        """Return the speed-up of a row compared with this process at its best."""
        return min(other.seconds for other in self.rows if other.workers == 1) / row.seconds

    def efficiency(self, row: ScalingRow) -> float | None:
        """Return the speed-up by cores compared with one thread of this process, divided by the number of cores; None
        for this process."""
        one = next((other.seconds for other in self.rows if (other.workers, other.threads) == (1, 1)), None)
        cores = row.workers * row.threads * row.machines
        return None if one is None or row.workers == 1 else one / row.seconds / cores

    @property
    def best(self) -> ScalingRow:
        """The fastest row that was measured."""
        return min((row for row in self.rows if row.measured), key=lambda row: row.seconds)

    @property
    def summary(self) -> str:
        """The result in a sentence or two."""
        best = self.best
        found = "No number of workers is faster than this process."
        if best.workers > 1:
            found = f"{best.workers} workers are {self.speed_up(best):.1f} times as fast as this process."
        here = [row for row in self.rows if row.machines == 1 and row.workers > 1]
        fastest = min(here, key=lambda row: row.seconds, default=best)
        if not fastest.measured and fastest.seconds < 0.97 * best.seconds:
            enough = next(row for row in here if row.seconds <= 1.05 * fastest.seconds)
            found += (
                f" On a machine with more cores {enough.workers} would be {self.speed_up(enough):.1f} times as fast"
            )
            found += "." if enough is here[-1] else ", and more than that would gain less than 5 %."
        return found

    def __str__(self) -> str:
        head = f"{'':32}{'ms':>10}{'per second':>12}{'speed-up':>10}{'efficiency':>12}{'MB each':>9}"
        lines = [head]
        for row in self.rows:
            speed_up, efficiency = self.speed_up(row), self.efficiency(row)
            shown = "" if efficiency is None else f"{efficiency:.0%}"
            memory = "" if row.memory is None else f"{row.memory / 1e6:.0f}"
            numbers = f"{row.seconds * 1e3:10.3g}{1 / row.seconds:12.3g}{speed_up:10.2f}{shown:>12}{memory:>9}"
            lines.append(f"{row.name:32}{numbers}{'' if row.measured else '  computed'}")
        return "\n".join([*lines, self.summary])

    __repr__ = __str__

    def draw(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Return a figure, saved to `path` if given: the speed-up by the number of workers, measured and computed.
        Raises `ImportError` where matplotlib is missing: it comes with the extra `plot`."""
        figure, axes = blank(7, 5)
        alone = min((row for row in self.rows if row.workers == 1), key=lambda row: row.seconds)
        several = [row for row in self.rows if row.workers > 1 and row.machines == 1]
        known = [alone, *(row for row in several if row.measured)]
        computed = [known[-1], *(row for row in several if not row.measured)]
        for label, style, rows in (("computed", "o--", computed), ("measured", "o-", known)):
            axes.plot([row.workers for row in rows], [self.speed_up(row) for row in rows], style, label=label)
        most = max((row.workers for row in self.rows), default=1)
        axes.plot([1, most], [1, most], color="#bbbbbb", linewidth=1, label="ideal")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("workers")
        axes.set_ylabel("speed-up compared with this process")
        axes.legend(frameon=False)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def measure_scaling(opt: Evaluations, seconds: float, bandwidth: float) -> Scaling:
    """Time evaluations of the loaded batch; documented at `BatchOptimizer.scaling`."""
    seconds = read_positive("seconds", seconds, "number of seconds")
    bandwidth = read_positive("bandwidth", bandwidth, "number of bytes per second")
    arguments = extending.arguments(opt)
    if arguments["backend"] not in ("process", "serial") or arguments["devices"] is not None:
        raise ValueError("scaling() is about the cores of this machine: use backend='process', without `devices`")
    given, cores = arguments["threads_per_worker"], usable_cores()
    numbers = sorted({2**k for k in range(1, cores.bit_length()) if 2**k <= cores} | ({cores} if cores > 1 else set()))
    configurations = [(1, given), *((number, given or 1) for number in numbers)]
    if given is None:
        configurations.insert(1, (1, 1))
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that f depends on the cut was said where the batch was loaded
        for workers, threads in configurations:
            with extending.twin(opt, loaded=True, parallelize=workers, threads_per_worker=threads) as twin:
                took = _median(twin.evaluate, seconds / len(configurations))
                memory = None if workers == 1 else max(_private_bytes(worker.pid) for worker in twin.workers)
            rows.append(ScalingRow(workers, threads or cores, took, memory=memory))
        fixed, whole = _model(opt)
    bytes_of_gradient = opt.parameters.numel() * opt.parameters.element_size()
    return Scaling((*rows, *_computed(rows, fixed, whole, bytes_of_gradient, bandwidth)))


def _median(evaluate: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of an evaluation, after three that warm up."""
    for _ in range(3):
        evaluate()
    found: list[float] = []
    while len(found) < 5 or sum(found) < seconds:
        began = time.perf_counter()
        evaluate()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _model(opt: Evaluations) -> tuple[float, float]:
    """Return the seconds that a worker's evaluation takes whatever its samples, and those of all samples, by one
    thread: of the batch in one chunk and in several, each of which takes the former. With `chunk_size` chunks are what
    they are."""

    def seconds_of(chunk_size: int) -> float:
        with extending.twin(opt, loaded=True, threads_per_worker=1, chunk_size=chunk_size) as twin:
            return _median(twin.evaluate, 0.0)

    given, samples = extending.chunk_size(opt), extending.batch_size(opt)
    if given is not None:
        return 0.0, seconds_of(given)
    part = math.ceil(samples / PART)
    parts, whole = math.ceil(samples / part), seconds_of(samples)
    fixed = max(0.0, seconds_of(part) - whole) / (parts - 1) if parts > 1 else 0.0
    fixed = min(fixed, whole)
    return fixed, whole - fixed


def _computed(rows: list[ScalingRow], fixed: float, whole: float, gradient: int, bandwidth: float) -> list[ScalingRow]:
    """Return rows for more workers than there are cores, and for more machines like this one."""
    measured = [row for row in rows if row.workers > 1]
    if not measured:
        return []
    last = measured[-1]

    def seconds(workers: int, machines: int = 1) -> float:
        return fixed + whole / (workers * machines) + coordination(workers, gradient)

    slower = max(1.0, last.seconds / seconds(last.workers))  # since cores share a memory, say
    found, workers = [], 2 * last.workers
    while workers <= MOST:
        found.append(ScalingRow(workers, last.threads, slower * seconds(workers), measured=False))
        workers *= 2
    for machines in (2, 4, 8):
        took = slower * seconds(last.workers, machines) + exchange(machines, gradient, bandwidth)
        found.append(ScalingRow(last.workers, last.threads, took, False, machines))
    return found


def exchange(machines: int, gradient: int, bandwidth: float) -> float:
    """Return the seconds that machines take to sum their gradients of so many bytes."""
    crossing = (machines - 1) * gradient * (1.0 if gradient <= WHOLE else 2 / machines)
    return EXCHANGE + machines * MACHINE + crossing / bandwidth


def _private_bytes(pid: int) -> int:
    """Return the memory that a process shares with no other; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return 1024 * sum(int(sizes[name].split()[0]) for name in ("Private_Clean", "Private_Dirty") if name in sizes)
