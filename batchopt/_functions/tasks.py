"""Functions of a batch other than f: applied to its chunks by workers, their results concatenated or summed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from batchopt._data import arguments
from batchopt._data.batches import BatchSpecs, read_batch, with_samples
from batchopt._engine.checks import locate_nonfinite
from batchopt._engine.engine import Engine
from batchopt._mapreduce.answers import Answer, common_form, forms_of
from batchopt._mapreduce.reduce import reduce_answers
from batchopt_workers.batch.batch import Batch
from batchopt_workers.functions.forms import summed, sums_layout
from batchopt_workers.functions.task import Applied, ChunkFunction, PieceFunction, Task
from batchopt_workers.wire.orders import Cut, Kind

# One function for all terms, or functions by term name.
Functions = ChunkFunction | Mapping[str, ChunkFunction] | None


class Selection(NamedTuple):
    """Samples to apply a function to: those of the term with that number (0 without terms), as a separate `batch`.
    `aside`: whether they are not those of the loaded batch."""

    batch: Batch
    number: int = 0
    aside: bool = True

    @property
    def name(self) -> str | None:
        """The term's name; None without terms."""
        (part,) = self.batch.parts
        return part.name

    def task(self, function: PieceFunction, train: bool | None = None) -> Task:
        """Return the task that applies `function` to these samples."""
        return Task(function, self.number, self.aside, train)


def of_each(selections: Iterable[Selection], do: Callable[[Selection], Any]) -> Any:
    """Return the result for each term's samples, by its name; without terms, the one result."""
    found = {s.name: do(s) for s in selections}
    return found[None] if None in found else found


def select(engine: Engine, inputs: Any, targets: Any, specs: BatchSpecs) -> list[Selection]:
    """Return the samples of each term of the loaded batch, or of the given data, whose terms are those of `specs`.
    Raises what `read_batch` raises."""
    if inputs is not None:
        numbers = [*engine.specs]
        parts = read_batch(inputs, targets, None, specs).parts
        return [Selection(Batch((part,)), numbers.index(part.name)) for part in parts]
    if targets is not None:
        raise ValueError("`targets` were given without `inputs`: pass both, or neither for the loaded batch")
    parts = engine.current_step().batch.parts
    return [Selection(Batch((p,)), number, aside=False) for number, p in enumerate(parts) if p.name in specs]


def read_functions(
    functions: Functions, names: Sequence[str | None], grad: bool, layers: Sequence[str], module: torch.nn.Module
) -> dict[str | None, PieceFunction]:
    """Return the user's function of each term, by name. Raises `TypeError` or `ValueError` for invalid ones."""
    if isinstance(layers, str) or not all(isinstance(name, str) for name in layers):
        raise TypeError(f"`layers` must be a list of names of parts of the module; got {layers!r}")
    known = dict(module.named_modules())
    unknown = next((name for name in layers if name not in known), None)
    if unknown is not None:
        raise ValueError(f"`layers` has {unknown!r}, and the module has no part of that name: it has {_some(known)}")
    given = functions if isinstance(functions, Mapping) else dict.fromkeys(names, functions)
    for name, function in given.items():
        if name not in names:
            raise ValueError(f"`function` has {name!r}, and there is no such term: there are {[*names]}")
        if not callable(function) and not (function is None and layers):
            raise TypeError(
                f"`function` must be callable, function(module, inputs, targets); got {type(function).__name__}"
            )
    return {name: Applied(function, grad, tuple(dict.fromkeys(layers))) for name, function in given.items()}


def _some(known: Mapping[str, object]) -> str:
    names = [name for name in known if name]
    return ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")


def plain(specs: BatchSpecs) -> BatchSpecs:
    """Return the specs without losses and caching: samples are read once."""
    bare: dict[str, Any] = {"reduction": "mean", "criterion": None, "denominators": None, "loss_fn": None}
    return {name: replace(spec, **bare, cache=False) for name, spec in specs.items()}


def collect(engine: Engine, task: Task, batch: Batch, cut: Cut | None = None) -> Any:
    """Return the results in sample order, of a batch that is cut as given or else as for evaluations."""
    return engine.run_task(task, batch, Kind.COLLECT, partial(engine.put_together, samples=batch.size), cut)


def total(
    engine: Engine, task: Task, batch: Batch, what: str = "total", run_task: Callable[..., Any] | None = None
) -> Any:
    """Return the sum of the results, along the tree of chunks; `what` describes it. `run_task`: None is the engine's.
    Raises `NonFiniteError`, unless f may be infinite too."""

    def whole(answers: Sequence[Answer], cut: Cut) -> Any:
        form = common_form(forms_of(answers), cut.bounds)
        layout = sums_layout(form.columns)
        sums = torch.empty(layout.size, dtype=layout.dtype, device="cpu")
        finite = reduce_answers(answers, cut.chunks, sums).finite
        if not finite and engine.rules.on_nonfinite == "raise":
            raise locate_nonfinite(engine, Kind.TOTAL, cut, batch, what)
        views = layout.views(sums)
        return form.filled([summed(column, view) for column, view in zip(form.columns, views, strict=True)])

    return (run_task or engine.run_task)(task, batch, Kind.TOTAL, whole)


def apply(
    engine: Engine,
    gather: Callable[[Engine, Task, Batch], Any],
    functions: Functions,
    data: tuple[Any, Any],
    *,
    grad: bool,
    train: bool | None,
    layers: Sequence[str] = (),
) -> Any:
    """`collect` or `total` the results of the user's functions by term name; without terms, the one result. `data` is
    inputs and targets, or None twice for the loaded batch."""
    engine.resync()
    arguments.read("train", train)
    specs = with_samples(engine.specs)
    found = read_functions(functions, [*specs], arguments.read_bool("grad", grad), layers, engine.subject.module)
    selections = select(engine, *data, plain(specs))
    selected = [s for s in selections if s.name in found]
    return of_each(selected, lambda s: gather(engine, s.task(found[s.name], train), s.batch))
