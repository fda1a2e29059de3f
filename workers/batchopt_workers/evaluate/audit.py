"""The comparison of a worker's copies of program and batch, on which the user's code has run, with fresh ones.

What must hold: a chunk's part of f depends on X, its samples, seed, step and state, not on what ran before in its
worker. Whatever a copy keeps beyond that (an attribute, a write by `.data` or NumPy, an object without a trace) shows
once it matters: the copy finds something else than a fresh one. How it was written need not be known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from batchopt_workers.batch.batch import Batch, Samples
from batchopt_workers.evaluate.evaluator import Evaluator
from batchopt_workers.evaluate.program import Worker
from batchopt_workers.functions.inspection import written
from batchopt_workers.functions.task import Evaluation
from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.orders import Order
from batchopt_workers.wire.structures import map_tensors, same_values

# Samples of each term that are compared.
SAMPLES = 8
# The beginning of the error, before the names of what looks different.
DRIFTS = "this worker would find another f than one that begins here: its copy of "


class Copied(NamedTuple):
    """A copy of the program: that of `worker`, and what it finds for a few samples."""

    worker: Worker
    evaluate: Callable[[], Evaluation]


def few(batch: Batch, samples: range) -> Batch:
    """Return copies of a few of these samples, the last of each term, and none of other terms."""
    parts = [part.picked(()) for part in batch.parts]
    for term, own in batch.numbering.split(samples):
        part = parts[term] = batch.parts[term].picked(own[-SAMPLES:])
        if isinstance(part.inputs, Samples):  # columns are copied when they are picked, and items are read
            parts[term] = replace(part, inputs=Samples(map_tensors(_clone, list(part.inputs.data))))
    return Batch(tuple(parts))


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def last_samples(order: Order, evaluator: Evaluator) -> range:
    """Return the samples of the last chunk of an order."""
    return range(*evaluator.cut.bounds[order.last - 1 : order.last + 1])


def audit(used: Copied, fresh: Copied) -> None:
    """Compare what a copy that user code has run on finds for a few samples with what a `fresh` one does, without
    hooks. Raise `ValueError` where f, df/dX or the changes of buffers differ. What so few samples cannot be evaluated
    by is not compared."""
    try:
        mine = used.evaluate()
    except Exception as error:
        let_through(error)
        return
    try:
        theirs = fresh.evaluate()
    except torch.OutOfMemoryError:
        return
    except Exception as error:
        let_through(error)
        raise _differs(used.worker, fresh.worker, f"it raises {type(error).__name__} there: {error}") from error
    what = _difference(mine, theirs)
    if what is not None:
        raise _differs(used.worker, fresh.worker, what)


def check_parameters(module: torch.nn.Module | None, known: Sequence[torch.Tensor]) -> None:
    """Raise `ValueError` for a parameter that is not among the `known` ones, which are trained."""
    ours = {parameter.data_ptr() for parameter in known}
    for name, parameter in () if module is None else module.named_parameters():
        if parameter.requires_grad and parameter.data_ptr() not in ours:
            raise ValueError(
                f"the parameter '{name}' was made by the first forward, and is not among those of the optimizer: call "
                "the module once before, on a few samples"
            )


def _difference(one: Evaluation, two: Evaluation) -> str | None:
    """Return in what two evaluations differ, if they do: by any bit; with several threads or on a card, by more than
    rounding. A buffer that a forward has made counts for one of them only: then the others are not compared."""
    losses = [torch.tensor(found.losses, dtype=torch.float64, device="cpu") for found in (one, two)]
    pairs = {"f": (losses[0], losses[1]), "df/dX": (one.gradient, two.gradient)}
    if one.changes.shape == two.changes.shape:
        pairs["what becomes of a buffer"] = one.changes, two.changes
    exact = one.gradient.is_cpu and torch.get_num_threads() == 1
    for name, pair in pairs.items():
        if not same_values(*pair) and (exact or not _agree(*pair)):
            values = f": {sum(one.losses):.9g} here, {sum(two.losses):.9g} there" if name == "f" else ""
            return f"{name} of a few samples is another{values}"
    return None


def _agree(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Tell whether two tensors differ by less than rounding can make of sums: a part of the largest element."""
    size = float(two.abs().nan_to_num().max()) if two.numel() else 0.0
    return torch.allclose(one, two, 0.0, torch.finfo(two.dtype).eps ** 0.5 * size, equal_nan=True)


def _differs(mine: Worker, fresh: Worker, how: str) -> ValueError:
    """Return the error for a copy that finds something else than a fresh one, which names what looks different."""
    one, two = written(mine), written(fresh)
    names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
    what = ", ".join(map(repr, names[:3])) or "something that is no attribute of module or criterion"
    return ValueError(
        f"{DRIFTS}{what}, or of the samples, is no longer what was sent ({how}). Forward, loss, hooks and functions "
        "run on copies, in any worker and any order: what f depends on may change only between steps, in this process, "
        "or be a buffer; a forward draws random numbers from torch's own generators, which are seeded"
    )
