"""Doors for code around a `BatchOptimizer`: its extras are written with these names and its public methods alone, as
those of other packages can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from batchopt._data.arguments import check_callable as check_callable
from batchopt._data.arguments import read
from batchopt._data.arguments import read_bool as read_bool
from batchopt._data.arguments import read_count as read_count
from batchopt._data.arguments import read_positive as read_positive
from batchopt._data.batches import as_tensors as as_tensors
from batchopt._data.epochs import LoaderSource as LoaderSource
from batchopt._data.epochs import Source as Source
from batchopt._function.checks import Difference as Difference
from batchopt._function.checks import cut_differences
from batchopt._function.engine import Engine
from batchopt._function.hogwild import HogwildResult as HogwildResult
from batchopt._function.observer import Evaluated as Evaluated
from batchopt._function.observer import Observer as Observer
from batchopt._function.observer import Stepped as Stepped
from batchopt._function.prediction import Scored as Scored
from batchopt._function.prediction import Scoring as Scoring
from batchopt._function.prepared import PreparedBatch as PreparedBatch
from batchopt._function.reporter import ProgressBar as ProgressBar
from batchopt._function.search import coordination as coordination
from batchopt._function.step import EXAMINED
from batchopt._function.twin import doubled as doubled
from batchopt._machine.cores import usable_cores as usable_cores
from batchopt._machine.ownership import Owner, exclusive
from batchopt._mapreduce.answers import Answer as Answer
from batchopt_workers.batch.weighting import SAMPLE_WEIGHT
from batchopt_workers.evaluate.audit import DRIFTS as DRIFTS
from batchopt_workers.functions.bound import Bound as Bound
from batchopt_workers.functions.inspection import normalises_by_chunk as normalises_by_chunk
from batchopt_workers.functions.scores import ScoreSums as ScoreSums
from batchopt_workers.wire.interrupts import let_through as let_through
from batchopt_workers.wire.layout import reals as reals
from batchopt_workers.wire.structures import is_tensor as is_tensor
from batchopt_workers.wire.structures import items_of as items_of
from batchopt_workers.wire.structures import map_tensors as map_tensors
from batchopt_workers.wire.structures import tensors_in as tensors_in

Followed = TypeVar("Followed", bound=Observer)


class Weighing(NamedTuple):
    """The part of a term's `samples` in f, with the term's `weight`: by `reduction` their `"mean"` or `"sum"`; the
    `divisor` of the mean, which is their number or the sum of their weights or denominators (1 for a sum); the
    `weights` of samples (float64, shape `(samples,)`), if given; `one_by_one`: they are a list, each evaluated by
    itself."""

    weight: float
    reduction: str
    samples: int
    divisor: float
    weights: torch.Tensor | None
    one_by_one: bool


class Extensible:
    """The doors of a `BatchOptimizer` for such code: they follow what it does, show it differently, and examine it
    without a trace."""

    _function: Engine
    _owner: Owner

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") or name.startswith("__")]

    def observe(self, observer: Followed) -> AbstractContextManager[Followed]:
        """Let an `Observer` follow evaluations and other work inside a `with` statement.

        >>> class Losses(batchopt.Observer):
        ...     found = []
        ...     def evaluated(self, found):
        ...         self.found.append(found.loss)
        >>> with opt.observe(Losses()) as losses:
        ...     loss = opt.step(x, y)
        >>> losses.found[0] >= loss
        True
        """
        if not isinstance(observer, Observer):
            raise TypeError(f"`observer` must be a batchopt.Observer; got {type(observer).__name__}")
        return self._function.observers.including(observer)

    @property
    def verbose(self) -> int:
        """The amount of reports, as in `BatchOptimizer`; assigning changes it, in the process that reports."""
        return self._function.observers.reporter.verbose

    @verbose.setter
    def verbose(self, verbose: int) -> None:
        verbose, workers = read("verbose", verbose), self._function.workers
        if workers.backend.is_main and not workers.closed:
            self._function.observers.report(verbose)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments as they were read, by name: `backend`, `devices`, `chunk_size`, `seed`, ..."""
        return MappingProxyType(vars(self._function.settings))

    @property
    def position(self) -> int:
        """The number of evaluations so far as if no step had been paused: what draws that follow from it depend on."""
        return self._function.history.counters.position

    @property
    def batch_size(self) -> int:
        """The number of samples of the loaded batch. Raises `BatchoptError` if there is none."""
        return self._function.loaded().batch.size

    @property
    def chunk_size(self) -> int | None:
        """The number of samples in a chunk of the loaded batch; None: each worker has one, by its speed. Raises
        `BatchoptError` if there is none."""
        return self._function.loaded().chunk_size

    @property
    def weighings(self) -> dict[str | None, Weighing]:
        """The way in which each term of the loaded batch, by name, weights its samples; without terms, under None.
        Raises `BatchoptError` if there is none."""
        step, found = self._function.loaded(), {}
        for part, weight in zip(step.batch.parts, step.weights, strict=True):
            own, weights = part.weighting, part.criterion_rows.get(SAMPLE_WEIGHT)
            found[part.name] = Weighing(weight, own.reduction, own.size, own.divisor, weights, part.one_by_one)
        return found

    @property
    def compiled(self) -> str:
        """The way in which evaluations are compiled, in words; empty if they are not."""
        found = self._function.compilation
        return "" if found is None else str(found)

    def scored(self, data: Any, metrics: Any = None, *, transform: Callable[[Any], Any] | None = None) -> Scoring:
        """Return an iterable over the outputs and targets of `data`, batch by batch: `score` in a loop of your own.

        data, metrics and transform are as for `score`. Each item is a `Scored`: `(outputs, targets, samples)`. After
        the loop `values` has the metrics of all of them; without `metrics` it is empty, and no item is kept.

        >>> scoring = opt.scored((x, y), {"mse": torch.nn.functional.mse_loss})
        >>> [batch.samples for batch in scoring], sorted(scoring.values)
        ([200], ['mse'])
        """
        return Scoring(self._function, data, metrics, transform)

    @contextmanager
    def apart(self, name: str = "apart()", *, chunk_size: int | None = None) -> Iterator[None]:
        """Examine f inside a `with` statement: batches loaded there belong to no step, and evaluations leave no trace
        in parameters' buffers, random draws, counters, measured speeds and choices. A batch has to be loaded again.

        name: of the examination, for errors. chunk_size: samples of a chunk in the body. Default: as in
        `BatchOptimizer`. Raises `BatchoptError` in the middle of a step.

        >>> with opt.apart(chunk_size=50):
        ...     opt.load(x, y)
        ...     loss = opt.evaluate()
        >>> opt.load(x, y)
        """
        self._owner.check_between_steps(name.removesuffix("()"))
        size = None if chunk_size is None else read_count("chunk_size", chunk_size)
        with self._function.apart(name, chunk_size=size, **EXAMINED):
            yield

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Evaluate eagerly inside a `with` statement where evaluations are compiled."""
        workers = self._function.workers
        artifacts = workers.mode.artifacts
        try:
            workers.evaluate_by(())
            yield
        finally:
            workers.evaluate_by(artifacts)

    @exclusive
    def cut_differences(self, largest: int) -> list[Difference]:
        """Return the terms of the loaded batch whose loss depends on how it is cut, judged by a few samples of each,
        evaluated by one worker in one forward and in two parts, with the same random draws; `largest` is the number of
        samples of the largest chunk. Each `Difference` says what was found, and whether it is `decided`."""
        return cut_differences(self._function, largest)
