"""Doors for code around a `BatchOptimizer`, functions that take it: they follow what it does, show it differently, and
examine it without a trace. Its extras are written with these names and its public methods alone, as those of other
packages can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from batchopt._data.arguments import NumberFunction as NumberFunction
from batchopt._data.arguments import check_callable as check_callable
from batchopt._data.arguments import read
from batchopt._data.arguments import read_bool as read_bool
from batchopt._data.arguments import read_count as read_count
from batchopt._data.arguments import read_numbers as read_numbers
from batchopt._data.arguments import read_positive as read_positive
from batchopt._data.batches import as_tensors as as_tensors
from batchopt._data.epochs import Batches as Batches
from batchopt._data.epochs import LoaderSource as LoaderSource
from batchopt._data.epochs import Source as Source
from batchopt._engine import prepared as prepared_batches
from batchopt._engine.checks import Difference as Difference
from batchopt._engine.checks import cut_differences as differences
from batchopt._engine.choose import choose_optimizer as choose_optimizer
from batchopt._engine.observer import Evaluated as Evaluated
from batchopt._engine.observer import Observer as Observer
from batchopt._engine.observer import Stepped as Stepped
from batchopt._engine.prepared import PreparedBatch as PreparedBatch
from batchopt._engine.reporter import ProgressBar as ProgressBar
from batchopt._engine.step import EXAMINED
from batchopt._engine.twin import doubled as doubled
from batchopt._engine.twin import twin_of
from batchopt._functions.closure import Closure
from batchopt._functions.prediction import Scored as Scored
from batchopt._functions.prediction import Scoring as Scoring
from batchopt._machine.cores import usable_cores as usable_cores
from batchopt._machine.ownership import exclusive
from batchopt._mapreduce.answers import Answer as Answer
from batchopt.evaluations import Evaluations
from batchopt_workers.batch.weighting import SAMPLE_WEIGHT
from batchopt_workers.evaluate.audit import DRIFTS as DRIFTS
from batchopt_workers.evaluate.objective import is_of_module
from batchopt_workers.functions.bound import Bound as Bound
from batchopt_workers.functions.inspection import normalises_by_chunk as normalises_by_chunk
from batchopt_workers.functions.scores import ScoreSums as ScoreSums
from batchopt_workers.wire.failures import let_through as let_through
from batchopt_workers.wire.layout import reals as reals
from batchopt_workers.wire.structures import is_tensor as is_tensor
from batchopt_workers.wire.structures import items_of as items_of
from batchopt_workers.wire.structures import map_tensors as map_tensors
from batchopt_workers.wire.structures import tensors_in as tensors_in

Followed = TypeVar("Followed", bound=Observer)
T = TypeVar("T")


class Weighing(NamedTuple):
    """The part of a term's `samples` in f, with the term's `weight`: by `reduction` their `"mean"` or `"sum"`; the
    `divisor` of the mean, which is their number or the sum of their weights or denominators (1 for a sum); the
    `weights` of samples (float64, shape `(samples,)`), if given; `one_by_one`: they are a list, each evaluated by
    itself; `is_penalty`: it is a `Penalty`, whose one sample is no data."""

    weight: float
    reduction: str
    samples: int
    divisor: float
    weights: torch.Tensor | None
    one_by_one: bool
    is_penalty: bool


def observe(opt: Evaluations, observer: Followed) -> AbstractContextManager[Followed]:
    """Let an `Observer` follow evaluations and other work inside a `with` statement.

    >>> class Losses(batchopt.Observer):
    ...     found = []
    ...     def evaluated(self, found):
    ...         self.found.append(found.loss)
    >>> with batchopt.extending.observe(opt, Losses()) as losses:
    ...     loss = opt.step(x, y)
    >>> losses.found[0] >= loss
    True
    """
    if not isinstance(observer, Observer):
        raise TypeError(f"`observer` must be a batchopt.Observer; got {type(observer).__name__}")
    return opt._engine.observers.including(observer)


def verbosity(opt: Evaluations) -> int:
    """Return the amount of reports: `verbose` of `BatchOptimizer`."""
    return opt._engine.observers.reporter.verbose


def report(opt: Evaluations, verbose: int) -> None:
    """Report so much from now on, in the process that reports."""
    verbose, workers = read("verbose", verbose), opt._engine.workers
    if workers.backend.is_main and not workers.closed:
        opt._engine.observers.report(verbose)


def arguments(opt: Evaluations) -> Mapping[str, Any]:
    """Return the arguments as they were read, by name: `backend`, `devices`, `chunk_size`, `seed`, ..."""
    return MappingProxyType(vars(opt._engine.settings))


def position(opt: Evaluations) -> int:
    """Return the number of evaluations so far as if no step had been paused: what draws that follow from it depend
    on."""
    return opt._engine.past.counters.position


def product_counter(opt: Evaluations) -> int:
    """Return the number of Hessian-vector products so far."""
    return opt._engine.past.counters.products


def batch_size(opt: Evaluations) -> int:
    """Return the number of samples of the loaded batch. Raises `BatchoptError` if there is none."""
    return opt._engine.loaded().batch.size


def chunk_size(opt: Evaluations) -> int | None:
    """Return the number of samples in a chunk of the loaded batch; None: each worker has one, by its speed. Raises
    `BatchoptError` if there is none."""
    return opt._engine.loaded().chunk_size


def weighings(opt: Evaluations) -> dict[str | None, Weighing]:
    """Return the way in which each term of the loaded batch, by name, weights its samples; without terms, under None.
    Raises `BatchoptError` if there is none."""
    step, terms, found = opt._engine.loaded(), opt._engine.settings.terms or {}, {}
    for part, weight in zip(step.batch.parts, step.weights, strict=True):
        own, weights = part.weighting, part.criterion_rows.get(SAMPLE_WEIGHT)
        is_penalty = part.name in terms and is_of_module(terms[part.name].loss_fn)
        found[part.name] = Weighing(weight, own.reduction, own.size, own.divisor, weights, part.one_by_one, is_penalty)
    return found


def compiled(opt: Evaluations) -> str:
    """Return the way in which evaluations are compiled, in words; empty if they are not."""
    found = opt._engine.policies.compilation
    return "" if found is None else str(found)


def closure(opt: Evaluations) -> Closure:
    """Return `evaluate` as an object: the closure of any optimizer, also with the normal equations for
    `LevenbergMarquardt`.

    >>> opt.load(x, y)
    >>> optimizer = batchopt.LevenbergMarquardt(model.parameters(), max_iter=5)
    >>> float(optimizer.step(batchopt.extending.closure(opt))) > optimizer.result.f
    True
    """
    return Closure(opt._engine, opt.evaluate)


def prepared(
    opt: Evaluations, batches: Iterable[Any], *, convert: Callable[[Any], Any] | None = None
) -> Iterator[PreparedBatch]:
    """Return an iterator over prepared `batches` (as for `steps`), for loops of your own:
    `for batch in prepared(opt, batches): opt.step(batch)`. The next one is read and copied to the workers while they
    compute.

    Each is for `step` or `load` of this optimizer, once, before the next one is requested; otherwise they raise
    `BatchoptError`. `len(batch)` is its number of samples. A batch of `Batches` counts when its step is complete, when
    it is loaded, or when the loop continues without it. `convert` makes a batch, as for `steps`, of what `batches`
    yield.
    """
    return prepared_batches.prepared(opt._engine, batches, convert)


def scored(
    opt: Evaluations, data: Any, metrics: Any = None, *, transform: Callable[[Any], Any] | None = None
) -> Scoring:
    """Return an iterable over the outputs and targets of `data`, batch by batch: `score` in a loop of your own.

    data, metrics and transform are as for `score`. Each item is a `Scored`: `(outputs, targets, samples)`. After the
    loop `values` has the metrics of all of them; without `metrics` it is empty, and no item is kept.

    >>> scoring = batchopt.extending.scored(opt, (x, y), {"mse": torch.nn.functional.mse_loss})
    >>> [batch.samples for batch in scoring], sorted(scoring.values)
    ([200], ['mse'])
    """
    return Scoring(opt._engine, data, metrics, transform)


@contextmanager
def examining(opt: Evaluations, name: str = "examining()", *, chunk_size: int | None = None) -> Iterator[None]:
    """Examine f inside a `with` statement: batches loaded there belong to no step, and evaluations leave no trace in
    parameters' buffers, random draws, counters, measured speeds and choices. A batch has to be loaded again.

    name: of the examination, for errors. chunk_size: samples of a chunk in the body. Default: as in `BatchOptimizer`.
    Raises `BatchoptError` in the middle of a step.

    >>> with batchopt.extending.examining(opt, chunk_size=50):
    ...     opt.load(x, y)
    ...     loss = opt.evaluate()
    >>> opt.load(x, y)
    """
    opt._owner.check_between_steps(name.removesuffix("()"))
    size = None if chunk_size is None else read_count("chunk_size", chunk_size)
    with opt._engine.examining(name, chunk_size=size, **EXAMINED):
        yield


@contextmanager
def uncompiled(opt: Evaluations) -> Iterator[None]:
    """Evaluate eagerly inside a `with` statement where evaluations are compiled."""
    workers = opt._engine.workers
    artifacts = workers.mode.artifacts
    try:
        workers.evaluate_by(())
        yield
    finally:
        workers.evaluate_by(artifacts)


def twin(
    opt: Evaluations, *, double: bool = False, hooks: bool = True, loaded: bool = False, **changes: Any
) -> Evaluations:
    """Return a function of a copy of the module and the criterion, to compare with: evaluated in this process, eagerly,
    unless `changes`, arguments of `BatchOptimizer`, say otherwise. Its first batch has the random draws of the last one
    here. Use it in a `with` statement, or `close` it.

    double: the copy is in float64. hooks: False leaves them out. loaded: load the batch that is loaded here. Raises
    `TypeError` for arguments in which a twin cannot differ, and what `BatchOptimizer` and `load` raise.

    >>> opt.load(x, y)
    >>> with batchopt.extending.twin(opt, loaded=True) as twin:
    ...     torch.equal(twin.evaluate(), opt.evaluate())
    True
    """
    return Evaluations(twin_of(opt._engine, double, hooks, loaded, changes))


@exclusive
def cut_differences(opt: Evaluations, largest: int) -> list[Difference]:
    """Return the terms of the loaded batch whose loss depends on how it is cut, judged by a few samples of each,
    evaluated by one worker in one forward and in two parts, with the same random draws; `largest` is the number of
    samples of the largest chunk. Each `Difference` says what was found, and whether it is `decided`."""
    return differences(opt._engine, largest)


@exclusive
def once(opt: Evaluations, function: Callable[[], T]) -> T:
    """Call `function` and return its result; with `backend="ranks"` rank 0 calls it, and all ranks return its result,
    or raise its exception. It is for what depends on a clock, or writes files."""
    return opt._engine.workers.backend.once(function)
