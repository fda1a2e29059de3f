"""The answers of workers: partial sums, spans of time, and the forms of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from batchopt_workers.evaluate.sums import PartialSum, Rows
from batchopt_workers.evaluate.tree import Node
from batchopt_workers.functions.forms import Form


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


def partials_of(found: Sequence[tuple[Node, PartialSum]], rows: Rows | None) -> list[tuple[Node, Partial]]:
    """Return the partials that lie in these rows; without rows, if nothing is summed, with empty vectors."""
    if rows is None:
        return [(node, Partial(partial.losses, _NOTHING, _NOTHING, partial.used)) for node, partial in found]
    places = [(node, partial, rows[partial.row]) for node, partial in found]
    return [(node, Partial(partial.losses, row.gradient, row.changes, partial.used)) for node, partial, row in places]


_NOTHING = torch.empty(0, dtype=torch.float64, device="cpu")


def forms_of(answers: Sequence[Answer]) -> dict[int, Form]:
    """Return the form of each chunk's result, in the order of chunks."""
    found = {chunk: form for answer in answers for chunk, form in answer.forms.items()}
    return dict(sorted(found.items()))


def common_form(forms: Mapping[int, Form], bounds: Sequence[int]) -> Form:
    """Return the common form of the results of all chunks; `objects` are those of the whole batch, if at least one
    chunk can only be read as such.

    Raise `ValueError`, which names the chunk, if there is no such form, or more than one.
    """
    first = next(iter(forms))
    if all(form.objects is not None for form in forms.values()) and any(not form.columns for form in forms.values()):
        return Form((), None, [item for form in forms.values() for item in form.objects or ()])
    for chunk, form in forms.items():
        if form.columns != forms[first].columns or not form.columns:
            raise ValueError(
                f"the function returned {_described(form)} for chunk {chunk} (samples {bounds[chunk]}.."
                f"{bounds[chunk + 1] - 1}), and {_described(forms[first])} for chunk {first}: results need one "
                "structure, with the same dtypes and the same shapes but for the samples; else return a list with one "
                "object a sample"
            )
    if bounds[-1] > 1 and all(form.objects is not None for form in forms.values()):
        raise ValueError(
            "the function returned lists of tensors, of which each is as long as the list: one tensor a sample, or one "
            "row a sample in each tensor? For the former use torch.stack, for the latter return a tuple"
        )
    return Form(forms[first].columns, forms[first].skeleton)


def _described(form: Form) -> Any:
    return ", ".join(map(str, form.columns)) or "a list of objects"
