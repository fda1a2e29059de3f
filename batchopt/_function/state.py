"""What a `BatchFunction` has, and what of it one may read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any

import torch

from batchopt._data.batches import Readings
from batchopt._data.terms import reweighed
from batchopt._function.counters import History
from batchopt._function.report import Report
from batchopt._function.settings import Settings
from batchopt._function.timeline import Timeline
from batchopt._machine.ownership import Owner
from batchopt._mapreduce.plan import Plan
from batchopt._mapreduce.speeds import Speeds
from batchopt._program.flatten import check_places, flatten, places
from batchopt.backends.base import Backend, Meanwhile, WorkerInfo
from batchopt.errors import BatchoptError
from batchopt.optim.trials import Trials
from batchopt_workers.batch import Batch
from batchopt_workers.buffers import StepBuffers


class State:
    """A module that was flattened, the loaded batch and how it is evaluated, and what was done so far."""

    _backend: Backend

    def __init__(self, module: torch.nn.Module, settings: Settings, history: History | None) -> None:
        self._owner = Owner()
        self._settings = settings
        self._report = Report(settings.verbose)
        self._module = module
        self._flat, self._params = flatten(module)
        self._flat.enter(self)
        self._places = places(module, self._params)
        self._grad = torch.zeros_like(self._flat.vector)
        self._grad_views = self._flat.layout.views(self._grad)
        self._buffers = StepBuffers(module)
        self._readings = self._read_for(settings)
        self._speeds = Speeds(())

        self._closed = False
        self._batch: Batch | None = None
        self._weights = settings.weights  # of the terms in f, for the loaded batch
        self._plan: Plan
        self._chunks: int | None
        self._reduced: tuple[float, ...] = ()  # the loss of each term, in the last evaluation
        self._movable = True  # whether chunks may be cut anew during a step
        self._changes: torch.Tensor | None = None  # of buffers, in the step's last evaluation
        self._timeline: Timeline | None = None
        self._meanwhile: Meanwhile | None = None  # to do once the workers are busy
        self._trials: Trials | None = None  # of the step that is being made
        self._amid = ""  # what is being done, in the middle of which nothing can be saved or loaded
        self._numbers = count(1)  # of evaluations, as the workers see them
        self._history = History() if history is None else history
        self.hook_results: list[Any] = []

    def _read_for(self, settings: Settings) -> Readings:
        return settings.readings(self._flat.vector.device if not settings.alone else None)

    def _check_open(self) -> None:
        """From here on X is what the module has. Raises `BatchoptError` after `close`, and if that cannot be."""
        if self._closed:
            raise BatchoptError("this BatchOptimizer was closed: build a new one")
        self._follow()

    def _follow(self) -> None:
        """Have in X what the module's parameters are now, whatever memory they were given; until `close`."""
        if not self._closed:
            check_places(self._places)
            self._flat.follow(self._module, self._params)

    def _ready(self) -> Batch:
        """The loaded batch, with X as the module has it now."""
        self._check_open()
        return self._loaded()

    def _loaded(self) -> Batch:
        if self._batch is None:
            raise BatchoptError("no batch was loaded: call load(inputs, targets) or step(inputs, targets)")
        return self._batch

    @contextmanager
    def _in_the_middle_of(self, what: str) -> Iterator[None]:
        """What is inside is done as a whole: a hook, callback or signal handler, which may enter there, can save nothing."""
        outer, self._amid = self._amid, self._amid or what
        try:
            yield
        finally:
            self._amid = outer

    def _check_between_steps(self, what: str) -> None:
        if self._amid:
            raise BatchoptError(
                f"{what}() was called in the middle of {self._amid}, by a hook, a callback or a signal handler: half of the "
                "state is of before, and half of after; call it between steps (a signal handler can set a flag, to be "
                "looked at after step())"
            )

    def _end_step(self) -> None:
        """Take over the buffers as the step's last evaluation left them; does nothing the second time."""
        if self._changes is not None:
            self._buffers.take_over(self._changes)
            self._changes = None

    @property
    def parameters(self) -> torch.Tensor:
        """X: a 1-D tensor (shape `(n,)`, the module's dtype) that shares memory with the trainable parameters, both
        ways.

        A parameter that was given other memory (`p.data = ...`) is copied into X and is a view of it again, here and with
        every other call. Raises `BatchoptError` where that cannot be: see `BatchOptimizer`.
        """
        self._follow()
        return self._flat.vector

    @property
    def grad_parameters(self) -> torch.Tensor:
        """df/dX at the last evaluation, in the order of `parameters`; shares memory with the parameters' `.grad`,
        both ways."""
        return self._grad

    @property
    def module(self) -> torch.nn.Module:
        """The user's module."""
        return self._module

    @property
    def criterion(self) -> Callable[..., Any] | None:
        """The user's criterion."""
        return self._settings.criterion

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """Each worker's rank, pid, host, device, speed, samples, busy seconds, restarts, and whether it lives."""
        return self._backend.workers

    @property
    def output(self) -> float:
        """The loss of the parameters that the last step left, if it evaluated there; else that of the last evaluation. 0
        before the first one."""
        return self._history.loss

    @property
    def losses(self) -> dict[str, float]:
        """The mean (or sum) of each term, by name, without its weight, where `output` is of; empty without terms and
        before the first evaluation."""
        return dict(self._history.terms)

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each term in f, by name; empty without terms.

        Assigning a dict with a weight for each term takes effect with the batch loaded next. Raises `TypeError` or
        `ValueError` unless it has exactly the terms' names, and each weight is finite and >= 0.
        """
        terms = self._settings.terms or {}
        return MappingProxyType({name: term.weight for name, term in terms.items()})

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        with self._owner:
            self._settings = replace(self._settings, terms=reweighed(self._settings.terms, weights))

    @property
    def eval_counter(self) -> int:
        """Evaluations so far."""
        return self._history.evaluations

    @property
    def batch_counter(self) -> int:
        """Batches stepped on so far."""
        return self._history.batches

    @property
    def sample_counter(self) -> int:
        """Samples of the batches stepped on so far."""
        return self._history.samples
