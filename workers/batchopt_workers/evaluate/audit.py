"""The comparison of a worker's copies of program and batch, on which the user's code has run, with fresh ones.

What must hold: a chunk's part of f depends on X, its samples, seed, step and state, not on what ran before in its
worker. Whatever a copy keeps beyond that (an attribute, a write by `.data` or NumPy, an object without a trace) shows
once it matters: the copy finds something else than a fresh one. How it was written need not be known.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchopt_workers.batch.batch import Batch
from batchopt_workers.evaluate.evaluator import Evaluator
from batchopt_workers.evaluate.worker import Worker
from batchopt_workers.functions.inspection import written
from batchopt_workers.functions.task import Evaluation
from batchopt_workers.wire.interrupts import let_through
from batchopt_workers.wire.orders import Order
from batchopt_workers.wire.structures import same_values

# Samples of each term that are compared.
SAMPLES = 8
# The beginning of the error, before the names of what looks different.
DRIFTS = "this worker would find another f than one that begins here: its copy of "


def few(batch: Batch, samples: range) -> Batch:
    """Return a few of these samples, the last of each term, and none of other terms."""
    parts = [part.picked(()) for part in batch.parts]
    for term, own in batch.numbering.split(samples):
        parts[term] = batch.parts[term].picked(own[-SAMPLES:])
    return Batch(tuple(parts))


def last_samples(order: Order, evaluator: Evaluator) -> range:
    """Return the samples of the last chunk of an order."""
    return range(*evaluator.cut.bounds[order.last - 1 : order.last + 1])


def audit(used: Evaluator, order: Order, worker: Worker, fresh: Callable[[], Evaluation]) -> None:
    """Compare, on samples of the last chunk, an evaluator that has carried out an order with what a `fresh` one finds
    there, whose `worker` has the fresh copies. Raise `ValueError` where f, df/dX or the changes of buffers differ.
    Hooks do not run. Chunks of which so few samples cannot be evaluated are not compared."""
    samples, module = last_samples(order, used), used.worker.module
    known = {parameter.data_ptr() for parameter in used.parameters}
    for name, parameter in () if module is None else module.named_parameters():
        if parameter.requires_grad and parameter.data_ptr() not in known:
            raise ValueError(
                f"the parameter '{name}' was made by the first forward, and is not among those of the optimizer: call "
                "the module once before, on a few samples"
            )
    try:
        mine = used.eagerly(order.step, few(used.loaded.batch, samples))
    except Exception as error:
        let_through(error)
        return
    try:
        same = _are_same(mine, fresh())
    except torch.OutOfMemoryError:
        return
    except Exception as error:
        let_through(error)
        used.walk.current = samples  # for the error
        raise _differs(used.worker, worker) from error
    if not same:
        used.walk.current = samples
        raise _differs(used.worker, worker)


def _are_same(one: Evaluation, two: Evaluation) -> bool:
    """Tell whether two evaluations are one to the bit; with several threads or on a card, to rounding. A buffer that a
    forward has made counts for one of them only: then the others are not compared."""
    losses = [torch.tensor(found.losses, dtype=torch.float64, device="cpu") for found in (one, two)]
    pairs = [(losses[0], losses[1]), (one.gradient, two.gradient)]
    if one.changes.shape == two.changes.shape:
        pairs.append((one.changes, two.changes))
    if all(same_values(*pair) for pair in pairs):
        return True
    if one.gradient.is_cpu and torch.get_num_threads() == 1:
        return False
    return all(map(_agree, *zip(*pairs, strict=True)))


def _agree(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Tell whether two tensors differ by less than rounding can make of sums: a part of the largest element."""
    size = float(two.abs().nan_to_num().max()) if two.numel() else 0.0
    return torch.allclose(one, two, 0.0, torch.finfo(two.dtype).eps ** 0.5 * size, equal_nan=True)


def _differs(mine: Worker, fresh: Worker) -> ValueError:
    """Return the error for a copy that finds something else than a fresh one, which names what looks different."""
    one, two = written(mine), written(fresh)
    names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
    what = ", ".join(map(repr, names[:3])) or "something that is no attribute of module or criterion"
    return ValueError(
        f"{DRIFTS}{what}, or of the samples, is no "
        "longer what was sent. Forward, loss, hooks and functions run on copies, in any worker and any order: what f "
        "depends on may change only between steps, in this process, or be a buffer; a forward draws random numbers "
        "from torch's own generators, which are seeded"
    )
