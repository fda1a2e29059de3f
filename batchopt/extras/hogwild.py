"""Hogwild: workers step on shared parameters concurrently, without waiting for each other."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from batchopt._data import arguments
from batchopt._data.batches import BatchSpec, read_part
from batchopt._data.epochs import permutation
from batchopt._data.prefetch import as_arguments
from batchopt._engine.engine import Engine
from batchopt._functions.tasks import collect
from batchopt.errors import NonFiniteError
from batchopt.evaluations import Evaluations
from batchopt_workers.batch.batch import Batch, Columns, Part
from batchopt_workers.batch.weighting import Weighting
from batchopt_workers.functions.hogwild import Factory, Hogwild
from batchopt_workers.functions.task import Task
from batchopt_workers.wire.orders import Cut

# Mini-batches that a worker steps on before it reports them: those lost with it, and done again.
TOGETHER = 8


@dataclass(frozen=True)
class HogwildResult:
    """`losses[i]` are the losses of worker `i` on its mini-batches, in order, each before the step."""

    losses: list[list[float]]

    def __repr__(self) -> str:
        return f"HogwildResult(losses of {', '.join(str(len(of)) for of in self.losses)} mini-batches)"


def hogwild(
    opt: Evaluations, data: Any, optimizer: Factory, *, batch_size: int, epochs: int = 1, shuffle: bool = True
) -> HogwildResult:
    """Let each worker of `opt` step on its own mini-batches, on parameters shared by all of them, without waiting.

    data: `(inputs, targets)`, inputs, or a map-style `Dataset`. optimizer: `optimizer(params)`, a factory, called once
    in each worker, so that its state (momentum) is the worker's own. batch_size: samples in a mini-batch, whose loss is
    its mean. epochs: number of passes over the samples; with `shuffle` in an order given by `seed` and the epoch.
    Worker `i` of `n` has every `n`-th mini-batch; others take over what a slow worker has not begun. A worker that dies
    is replaced, and its unfinished mini-batches are processed by others, with a new optimizer.

    With one worker this is plain SGD, bit for bit. With several, writes overwrite each other in any order, and runs are
    not reproducible: it is for models of which a mini-batch touches few parameters, such as embeddings with
    `sparse=True` (Niu, Recht, Ré and Wright: "Hogwild!", 2011). Returns the losses of each worker. Raises `ValueError`
    for running statistics, which cannot be merged; `NonFiniteError` for a mini-batch whose loss or gradient is not
    finite, on which no step is made; and what `collect` raises. Then parameters are as the previous steps left them. No
    worker steps after the call has ended. Not supported on a cluster, nor with `devices`.

    >>> x, model = torch.linspace(-1, 1, 100)[:, None], torch.nn.Linear(1, 1)
    >>> sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    >>> with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), optimizer=None) as opt:
    ...     batchopt.hogwild(opt, (x, 2 * x), sgd, batch_size=10, epochs=3)
    HogwildResult(losses of 30 mini-batches)
    """
    engine = opt._engine
    engine.resync()
    if not engine.settings.backend_class.local or (engine.settings.devices or engine.settings.candidates):
        raise ValueError("hogwild() needs workers that share memory: backend='process' without `devices`")
    arguments.check_callable("optimizer", optimizer)
    engine.freeze_workers()
    part = _read(engine, data)
    _refuse_statistics(engine.subject.module)
    size = arguments.read_count("batch_size", batch_size)
    workers = len(engine.workers.infos)
    batches = _in_shards(part.size, size, arguments.read_count("epochs", epochs), shuffle, engine, workers)
    ends = [0, *itertools.accumulate(map(len, batches))]
    cut = Cut((*ends[:-1:TOGETHER], ends[-1]))
    numbers = torch.arange(len(batches)).repeat_interleave(torch.tensor([len(batch) for batch in batches]))
    orders = Part(Columns((torch.cat(batches), numbers)), None, None, Weighting("mean", ends[-1]))
    task = Task(Hogwild(part, optimizer), aside=True, writes=True)
    try:
        losses, ranks = collect(engine, task, Batch((orders,)), cut)
    finally:
        engine.subject.written()
    firsts = torch.tensor(ends[:-1])
    for batch, loss, rank in zip(batches, losses[firsts].tolist(), ranks[firsts].tolist(), strict=True):
        if math.isnan(loss) and rank >= 0:
            where = (
                f"in hogwild(), in the mini-batch of samples {[*batch[:8].tolist()]}; parameters are where the steps "
                "before have left them"
            )
            steps, what = engine.past.counters, "the loss or its gradient is not finite"
            raise NonFiniteError(what, None, range(0), steps.steps, steps.evaluations, where=where)
    found: list[list[float]] = [[] for _ in range(workers)]
    for loss, rank in zip(losses[firsts].tolist(), ranks[firsts].tolist(), strict=True):
        found[rank].append(loss)
    return HogwildResult(found)


def _read(engine: Engine, data: Any) -> Part:
    inputs, targets, _ = as_arguments(data) if isinstance(data, tuple) else (data, None, None)
    first = next(iter(engine.specs.values()))
    part = read_part(inputs, targets, None, BatchSpec(first.collate, "mean", None, None, first.device))
    if part.one_by_one:
        raise ValueError("lists of samples need a `collate_fn`, which makes mini-batches of them")
    return part


def _in_shards(samples: int, size: int, epochs: int, shuffle: bool, engine: Engine, workers: int) -> list[torch.Tensor]:
    """Return the samples of each mini-batch, ordered by worker; worker `i` of `n` has every `n`-th one."""
    batches: list[torch.Tensor] = []
    for epoch in range(epochs):
        order = permutation(samples, engine.settings.seed, epoch) if shuffle else torch.arange(samples)
        batches += torch.split(order, size)
    return [batch for worker in range(workers) for batch in batches[worker::workers]]


def _refuse_statistics(module: torch.nn.Module) -> None:
    """Raise `ValueError` for running statistics, since each worker would have its own."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.training and part.track_running_stats:
            raise ValueError(
                f"'{name}' ({type(part).__name__}) keeps running statistics, which are not merged here: call "
                "its eval(), or use GroupNorm or LayerNorm"
            )
