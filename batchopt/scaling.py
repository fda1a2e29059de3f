"""The speed-up of evaluations by 1, 2, 4, ... workers, measured here, and by more workers and machines, computed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from batchopt._function.choice import Configuration, coordination
from batchopt._function.engine import Engine
from batchopt._function.step import EXAMINED
from batchopt._machine.cores import usable_cores
from batchopt._mapreduce.plan import make_plan
from batchopt._mapreduce.speeds import Speeds
from batchopt_workers.data.batch import Batch
from batchopt_workers.process.messages import Cut, Order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Seconds that an exchange between machines takes beside its bytes, for each doubling of their number: as for gradients
# of 10,000 elements in docs/benchmarks.md.
LATENCY = 2.5e-3
# The part of the batch that is timed beside all of it, for what an evaluation takes whatever its samples.
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
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("drawing needs matplotlib: pip install 'batchopt[plot]'") from error
        figure = Figure(figsize=(7, 5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
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


def measure_scaling(function: Engine, evaluate: Callable[[], object], seconds: float, bandwidth: float) -> Scaling:
    """Time evaluations of the loaded batch; documented at `BatchOptimizer.scaling`."""
    step, workers, cores = function.ready(), function.workers, usable_cores()
    if function.settings.backend not in ("process", "serial") or function.settings.devices is not None:
        raise ValueError("scaling() is about the cores of this machine: use backend='process', without `devices`")
    given = function.settings.threads_per_worker
    numbers = sorted({2**k for k in range(1, cores.bit_length()) if 2**k <= cores} | ({cores} if cores > 1 else set()))
    configurations = [Configuration(1, given), *(Configuration(n, given or 1) for n in numbers)]
    if given is None:
        configurations.insert(1, Configuration(1, 1))
    before, speeds = workers.configuration, workers.speeds
    bytes_of_gradient = function.subject.x.numel() * function.subject.x.element_size()
    rows = []
    with function.apart("scaling()", **EXAMINED):
        try:
            for configuration in configurations:
                function.use(*configuration)
                function.begin(workers.prepare(step.batch))
                took = _median(evaluate, seconds / len(configurations))
                pids = [info.pid for info in workers.infos]
                memory = None if configuration.workers == 1 else max(map(_private_bytes, pids))
                threads = configuration.threads or cores
                rows.append(ScalingRow(configuration.workers, threads, took, memory=memory))
            function.use(1, 1)
            function.begin(workers.prepare(step.batch))
            fixed, whole = _model(function, step.batch, step.chunk_size)
        finally:
            function.use(*before)
            workers.set_speeds(speeds)
    return Scaling((*rows, *_computed(rows, fixed, whole, bytes_of_gradient, bandwidth)))


def _median(evaluate: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of an evaluation, after three that warm up."""
    for _ in range(3):
        evaluate()
    found: list[float] = []
    while len(found) < 3 or sum(found) < seconds:
        began = time.perf_counter()
        evaluate()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _model(function: Engine, batch: Batch, chunk_size: int | None) -> tuple[float, float]:
    """Return the seconds that a worker's evaluation takes whatever its samples, and those of all samples, by one
    thread."""
    workers, step = function.workers, function.ready()
    plan = make_plan(batch.size, chunk_size, Speeds.unknown(PART))

    def seconds_of(cut: Cut, last: int) -> float:
        order = Order(workers.number(), step.number, 0, last)
        began = time.perf_counter()
        workers.backend.evaluate(cut, order, [(0, last)])
        return time.perf_counter() - began

    whole_cut = plan.cut if chunk_size is not None else Cut((0, batch.size))
    chunks, part = whole_cut.chunks, max(1, plan.runs[0][1])
    with workers.without_hooks():
        whole = statistics.median([seconds_of(whole_cut, chunks) for _ in range(6)][1:])
        share = statistics.median([seconds_of(plan.cut, part) for _ in range(6)][1:])
    samples = plan.cut.bounds[part] / batch.size
    of_all = max(0.0, (whole - share) / (1 - samples)) if samples < 1 else whole
    return max(0.0, whole - of_all), of_all


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
        exchange = log2(machines) * LATENCY + 2 * gradient / bandwidth
        here = slower * seconds(last.workers, machines)
        found.append(ScalingRow(last.workers, last.threads, here + exchange, False, machines))
    return found


def _private_bytes(pid: int) -> int:
    """Return the memory that a process shares with no other; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return 1024 * sum(int(sizes[name].split()[0]) for name in ("Private_Clean", "Private_Dirty") if name in sizes)
