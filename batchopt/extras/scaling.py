"""The speed-up of evaluations by 1, 2, 4, ... workers, measured here."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import batchopt.extending as extending
from batchopt.evaluations import Evaluations
from batchopt.extending import read_positive, usable_cores


@dataclass(frozen=True)
class ScalingRow:
    """An evaluation by `workers` with `threads` each takes `seconds`; `memory`: the bytes that a worker process shares
    with no other; None for this process."""

    workers: int
    threads: int
    seconds: float
    memory: int | None = None

    @property
    def name(self) -> str:
        """The workers in words."""
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
        return None if one is None or row.workers == 1 else one / row.seconds / (row.workers * row.threads)

    @property
    def best(self) -> ScalingRow:
        """The fastest row."""
        return min(self.rows, key=lambda row: row.seconds)

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        best = self.best
        if best.workers == 1:
            return "No number of workers is faster than this process."
        return f"{best.workers} workers are {self.speed_up(best):.1f} times as fast as this process."

    def __str__(self) -> str:
        head = f"{'':32}{'ms':>10}{'per second':>12}{'speed-up':>10}{'efficiency':>12}{'MB each':>9}"
        lines = [head]
        for row in self.rows:
            speed_up, efficiency = self.speed_up(row), self.efficiency(row)
            shown = "" if efficiency is None else f"{efficiency:.0%}"
            memory = "" if row.memory is None else f"{row.memory / 1e6:.0f}"
            numbers = f"{row.seconds * 1e3:10.3g}{1 / row.seconds:12.3g}{speed_up:10.2f}{shown:>12}{memory:>9}"
            lines.append(f"{row.name:32}{numbers}")
        return "\n".join([*lines, self.summary])

    __repr__ = __str__


def measure_scaling(opt: Evaluations, seconds: float) -> Scaling:
    """Time evaluations of the loaded batch; documented at `BatchOptimizer.scaling`."""
    seconds = read_positive("seconds", seconds, "number of seconds")
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
    return Scaling(tuple(rows))


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


def _private_bytes(pid: int) -> int:
    """Return the memory that a process shares with no other; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return 1024 * sum(int(sizes[name].split()[0]) for name in ("Private_Clean", "Private_Dirty") if name in sizes)
