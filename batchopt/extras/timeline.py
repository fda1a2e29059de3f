"""A recording of the activities of the parent and the workers: for a trace viewer, as a figure, and in numbers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batchopt.extending import Answer, Evaluated, Observer
from batchopt.extras.figure import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARENT = -1  # the lane of this process


class Event(NamedTuple):
    """An activity `name` in `lane` (a worker's rank, or `PARENT`), from `began` (`time.perf_counter`) for `seconds`."""

    lane: int
    name: str
    began: float
    seconds: float
    details: dict[str, Any]


class Timeline(Observer):
    """The events of some evaluations: one lane per worker, one for this process.

    In the parent's lane `map` is an evaluation until the last worker has answered, and `reduce` the summation; `load`
    sends a batch to the workers, `read ahead` the next one; `product` is a Hessian-vector product, `collect` and
    `total` are other functions of a batch; the rest of a `step` is the optimizer's own time. A worker's lane has a
    `chunks` event for each run of chunks that it evaluated, and one named after such a function for each run that it
    applied the function to; between them it waits.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def did(self, name: str, began: float) -> None:
        """Record an event in the parent's lane."""
        self.add(PARENT, name, began, time.perf_counter() - began)

    def add(self, lane: int, name: str, began: float, seconds: float, **details: Any) -> None:
        """Record an event."""
        self.events.append(Event(lane, name, began, seconds, details))

    def evaluated(self, found: Evaluated) -> None:
        """Record the two halves of an evaluation, and the workers' part in it."""
        mapped = found.mapped
        self.add(PARENT, "map", found.began, mapped - found.began, evaluation=found.number, loss=found.loss)
        self.add(PARENT, "reduce", mapped, found.ended - mapped)
        self.worked("chunks", found.answers, found.bounds)

    def worked(self, name: str, answers: Sequence[Answer], bounds: Sequence[int]) -> None:
        """Record the workers' runs of chunks."""
        for answer in answers:
            for span in answer.spans:
                samples = bounds[span.last] - bounds[span.first]
                self.add(answer.rank, name, span.began, span.seconds, chunks=span.last - span.first, samples=samples)

    @property
    def lanes(self) -> list[int]:
        """The lanes with events: the parent's and those of workers."""
        return sorted({event.lane for event in self.events})

    def seconds(self, name: str, lane: int = PARENT) -> float:
        """Return the total time that the lane spent at `name`."""
        return sum(event.seconds for event in self.events if event.lane == lane and event.name == name)

    @property
    def utilisation(self) -> dict[int, float]:
        """The fraction of the time of all evaluations that each worker computed, by rank."""
        whole = self.seconds("map") + self.seconds("reduce")
        return {lane: self.seconds("chunks", lane) / whole for lane in self.lanes if lane != PARENT and whole}

    @property
    def split(self) -> dict[int, float]:
        """The fraction of all samples that each worker evaluated, by rank."""
        samples = {
            lane: sum(e.details["samples"] for e in self.events if e.lane == lane and e.name == "chunks")
            for lane in self.lanes
            if lane != PARENT
        }
        whole = sum(samples.values())
        return {lane: count / whole for lane, count in samples.items()} if whole else {}

    def __str__(self) -> str:
        """Format the parent's time by activity, and each worker's split and utilisation."""
        evaluations = sum(event.name == "map" for event in self.events)
        lines = [f"{evaluations} evaluations"]
        for name in ("map", "reduce", "load", "read ahead", "product", "collect", "total", "step"):
            if any(event.name == name for event in self.events):
                lines.append(f"{name:>12}: {self.seconds(name) * 1e3:10.2f} ms")
        split, utilisation = self.split, self.utilisation
        lines += [f"{f'worker {i}':>12}: {split[i]:6.1%} of the samples, busy {utilisation[i]:6.1%}" for i in split]
        return "\n".join(lines)

    __repr__ = __str__

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON, "Trace Event Format"), for https://ui.perfetto.dev and chrome://tracing."""
        zero = min((event.began for event in self.events), default=0.0)
        entries: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": lane + 1, "name": "thread_name", "args": {"name": _title(lane)}}
            for lane in self.lanes
        ]
        for event in self.events:
            microseconds = {"ts": (event.began - zero) * 1e6, "dur": event.seconds * 1e6}
            entries.append(
                {"ph": "X", "pid": 0, "tid": event.lane + 1, "name": event.name, "args": event.details, **microseconds}
            )
        Path(path).write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))

    def draw(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Return a figure, saved to `path` if given: one lane per worker and one for this process, time to the right.

        Raises `ImportError` where matplotlib is missing: it comes with the extra `plot`.
        """
        zero = min((event.began for event in self.events), default=0.0)
        figure, axes = blank(10, 1.2 + 0.5 * len(self.lanes))
        split, utilisation = self.split, self.utilisation
        for height, lane in enumerate(reversed(self.lanes)):
            for name, colour in _COLOURS.items():
                bars = [
                    ((event.began - zero) * 1e3, event.seconds * 1e3)
                    for event in self.events
                    if event.lane == lane and event.name == name
                ]
                if bars:
                    axes.broken_barh(bars, (height - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3)
        axes.set_yticks(range(len(self.lanes)), [_label(i, split, utilisation) for i in reversed(self.lanes)])
        axes.set_xlabel("ms")
        used = [name for name in _COLOURS if any(event.name == name for event in self.events)]
        patches = [axes.barh(0, 0, color=_COLOURS[name]) for name in used]
        axes.legend(patches, used, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(used), frameon=False)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


# In drawing order: events inside others come later.
_COLOURS = {
    "step": "#e4e4e4",
    "product": "#8fa7c4",
    "map": "#b9cbe0",
    "read ahead": "#c5a3d6",
    "load": "#e8c268",
    "reduce": "#d1605e",
    "chunks": "#4c8b67",
}


def _title(lane: int) -> str:
    return "parent" if lane == PARENT else f"worker {lane}"


def _label(lane: int, split: dict[int, float], utilisation: dict[int, float]) -> str:
    if lane not in split:
        return _title(lane)
    return f"{_title(lane)}\n{split[lane]:.0%} of samples, busy {utilisation[lane]:.0%}"
