"""The workers of a `BatchFunction`: started, given hooks, asked, more or fewer of them, ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from batchopt._data import arguments
from batchopt._function.counters import History
from batchopt._function.cut_check import refuse_frequencies
from batchopt._function.settings import Settings
from batchopt._function.state import State
from batchopt._machine.ownership import exclusive, undisturbed
from batchopt._mapreduce.speeds import Speeds
from batchopt._program.program import check_trained
from batchopt.backends import backend_class
from batchopt.backends.base import Backend, Setup
from batchopt.errors import WorkerError, WorkerStartError
from batchopt_workers.evaluate import Program
from batchopt_workers.module_hooks import module_hooks
from batchopt_workers.watch import StateWritten
from batchopt_workers.worker import Hook

Self = TypeVar("Self", bound="Workforce")
T = TypeVar("T")


class Workforce(State):
    """State, and the workers that a `BatchFunction` is evaluated on."""

    def __init__(self, module: torch.nn.Module, settings: Settings, history: History | None = None) -> None:
        super().__init__(module, settings, history)
        self._prehook, self._posthook = settings.prehook, settings.posthook
        check_trained(self._program(settings), self._params)
        self._backend = self._start_backend(settings)
        self._speeds = settings.speeds or Speeds.unknown(len(self.workers))

    def _program(self, settings: Settings) -> Program:
        return Program(
            self._module,
            settings.criterion,
            settings.loss_fns,
            settings.seed,
            settings.prehook,
            settings.posthook,
            module_hooks(),
            self._buffers.state,
        )

    def _start_backend(self, settings: Settings) -> Backend:
        refuse_frequencies(self._module, settings.parallelize)
        setup = Setup(
            workers=settings.parallelize,
            fixed_bits=settings.fixed_bits,
            timeout=settings.timeout,
            restarts=settings.max_restarts,
            threads=settings.threads_per_worker,
            devices=settings.devices,
            precode=settings.precode,
            program=self._program(settings),
            flat=self._flat,
            parameters=self._params,
            buffers=self._buffers,
            options=settings.options,
        )
        settings.backend_class.check(setup)
        settings.backend_class.anticipate(setup)
        return settings.backend_class(setup)

    @property
    def prehook(self) -> Hook | None:
        """The hook before each forward; assigning replaces it in all workers."""
        return self._prehook

    @prehook.setter
    def prehook(self, hook: Hook | None) -> None:
        self._set_hooks(hook, self._posthook)

    @property
    def posthook(self) -> Hook | None:
        """The hook after each backward; assigning replaces it in all workers."""
        return self._posthook

    @posthook.setter
    def posthook(self, hook: Hook | None) -> None:
        self._set_hooks(self._prehook, hook)

    @exclusive
    @undisturbed
    def _set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        self._check_open()
        arguments.check_hooks(prehook=prehook, posthook=posthook)
        self._backend.set_hooks(prehook, posthook)
        self._prehook, self._posthook = prehook, posthook

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        self._backend.use_hooks(False)
        try:
            yield
        finally:
            self._backend.use_hooks(True)

    def _learning(self, evaluate: Callable[[], T]) -> T:
        """What `evaluate` returns; once more, where it shows that a forward writes more of the module than was known."""
        while True:
            try:
                return evaluate()
            except StateWritten as found:
                if self._buffers.state.issuperset(found.names):
                    raise
                self._buffers.include(found.names)
                self._backend.include_state(found.names)

    @exclusive
    @undisturbed
    def run_on_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on each worker; the values in rank order.

        Waits for workers that are being replaced. Raises `WorkerError` if the function raises, and `WorkerLostError` if a
        worker ends in it: what it did there cannot be known, so it is not called again.
        """
        self._check_open()
        return self._backend.run(function, args)

    @exclusive
    @undisturbed
    def resize(self, parallelize: int | str, speeds: Sequence[float] | None = None) -> None:
        """Have `parallelize` workers from now on (as in `BatchOptimizer`); for between steps, a batch has to be loaded
        anew.

        Workers of the lowest ranks are kept, with their `state`; new ones start, and run precode. The optimizer's state
        and the counters are kept. Where speeds were given, `speeds` of the new workers must be.
        """
        self._check_open()
        if self._speeds.fixed and speeds is None:
            raise ValueError("`speeds` were given: resize(parallelize, speeds=...) needs them for the new workers")
        if self._settings.devices is not None:
            raise ValueError("`devices` were given, one for each worker: build a new BatchOptimizer with others")
        asked = backend_class(self._settings.backend).read_workers(parallelize)
        workers = len(self.workers) + self._backend.room() if asked is None else asked
        given = arguments.read_speeds(speeds, workers)
        settings = replace(self._settings, parallelize=asked, prehook=self._prehook, posthook=self._posthook)
        self._end_step()
        self._batch = None
        if settings.alone != self._settings.alone:
            backend = self._start_backend(settings)
            self._backend.close()
            self._backend = backend
        else:
            self._backend.resize(workers)
        self._settings, self._readings = settings, self._read_for(settings)
        self._speeds = given if given is not None else self._speeds.resized(workers)
        self._observe([0] * workers, [0.0] * workers)

    def _grow(self) -> None:
        """Use machines that have joined, if there are to be as many workers as there is room for; those that are there
        are enough if that fails."""
        more = self._backend.room() if self._settings.parallelize is None and not self._speeds.fixed else 0
        if more <= 0:
            return
        workers = len(self.workers) + more
        try:
            self._backend.resize(workers)
        except ValueError:  # somebody else took the room
            return
        except (WorkerStartError, WorkerError) as error:
            self._settings = replace(self._settings, parallelize=len(self.workers))
            self._report.not_grown(more, error)
            return
        self._speeds = self._speeds.resized(workers)
        self._observe([0] * workers, [0.0] * workers)

    def _observe(self, samples: Sequence[int], seconds: Sequence[float]) -> None:
        self._speeds = self._speeds.observed(samples, seconds)
        for worker, speed in zip(self.workers, self._speeds.values, strict=True):
            worker.speed = speed

    def close(self) -> None:
        """End the workers. The module keeps its parameters, in memory of this process alone unless another optimizer
        shares them; any number of times.

        In a signal handler (or a hook, or a finalizer) that comes while another call is at work, it has that one end: with
        `BatchoptError`, as soon as it can, and the workers after it. In a fork it does nothing: there are no workers.
        """
        if not self._owner.is_here or self._closed:
            return
        if self._owner.at_last(self._close):
            self._backend.stop()
        else:
            self._close_now()

    @exclusive
    def _close_now(self) -> None:
        self._close()

    @undisturbed
    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end_step()
            self._report.close()
            self._backend.close()
            self._flat.leave(self)

    def __enter__(self: Self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("this holds processes and cannot be copied or pickled: use state_dict()")
