"""The result of an evaluation as a worker returns it, and the partials that the reduce merges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from batchopt_workers.map.sums import Rows
from batchopt_workers.map.tree import Node
from batchopt_workers.process.messages import Report
from batchopt_workers.tasks.forms import Form


class Partial(NamedTuple):
    """A merged run of chunks: the loss sum of each term, the gradient sum (in memory that the parent may overwrite
    until the next evaluation), the changes of buffers, and which parameters had a gradient. For a product or a total,
    its sum replaces the gradient; a collected result has none."""

    losses: tuple[float, ...]
    gradient: torch.Tensor
    changes: torch.Tensor
    used: bytes


class Span(NamedTuple):
    """Chunks `first` up to `last` were evaluated in `seconds`, from `began` (on `time.perf_counter`) on."""

    began: float
    seconds: float
    first: int
    last: int


@dataclass(frozen=True)
class Answer:
    """The contribution of one worker to an evaluation: `samples` evaluated in `seconds`, merged to `partials` (those of
    two answers may contain the same chunk), the results of the posthook, by chunk, and the times when it was busy;
    `drew`: its first forward of the step drew random numbers; `forms`: of the results of a task, by chunk."""

    rank: int
    samples: int
    seconds: float
    partials: list[tuple[Node, Partial]]
    results: dict[int, list[Any]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    drew: bool = False
    forms: dict[int, Form] = field(default_factory=dict)

    @property
    def is_silent(self) -> bool:
        """Tell whether hooks returned nothing."""
        return all(result is None for found in self.results.values() for result in found)


def partials_of(report: Report, rows: Rows | None) -> list[tuple[Node, Partial]]:
    """Return the partials of a report, with these rows; without rows, if nothing is summed, with empty vectors."""
    found = []
    for summary in report.summaries:
        vectors = (_NOTHING, _NOTHING) if rows is None else (rows[summary.row].gradient, rows[summary.row].changes)
        found.append((summary.node, Partial(summary.losses, *vectors, summary.used)))
    return found


_NOTHING = torch.empty(0, dtype=torch.float64, device="cpu")
