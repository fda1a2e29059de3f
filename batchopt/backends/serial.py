"""The backend of `parallelize=1`: the map function, called in this process on the user's own module."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch

from batchopt._data.arguments import read_parallelize
from batchopt._machine.allocator import keep_memory, release_memory
from batchopt._machine.cores import torch_threads
from batchopt._mapreduce.answers import Answer
from batchopt._program.flat_module import Gradient
from batchopt._program.program import snapshot_of, tensors_of_f
from batchopt.backends.base import Backend, Meanwhile, Prepared, Repeated, Setup, WorkerInfo
from batchopt.backends.local_worker import LocalWorker, run_precode
from batchopt_workers.data.batch import Batch
from batchopt_workers.map.evaluate import Evaluator
from batchopt_workers.map.seeding import draws_kept
from batchopt_workers.map.watch import StateWritten, Watch
from batchopt_workers.process.messages import TASKS, Cut, Kind, Order, Report
from batchopt_workers.tasks.forms import Column, MemoryOutput
from batchopt_workers.tasks.task import Task
from batchopt_workers.tasks.task_runner import ChunkDone
from batchopt_workers.worker import Hook, Worker

P = ParamSpec("P")
T = TypeVar("T")


class SerialBackend(Backend):
    """One worker, which is this process."""

    local = True

    @classmethod
    def read_workers(cls, parallelize: Any) -> int | None:
        workers = read_parallelize(parallelize)
        if workers > 1:
            raise ValueError(f"`backend` 'serial' is this process alone: use parallelize=1, got {workers}")
        return workers

    def __init__(self, setup: Setup) -> None:
        device = setup.flat.vector.device
        self._info = WorkerInfo(0, os.getpid(), socket.gethostname(), device)
        self._setup = setup
        (rank,) = setup.ranks or (0,)  # its rank among all, if there are other processes like this one
        self._worker = Worker(rank, setup.world or 1, device)
        run_precode(setup.precode, self._worker)
        self._worker.module, self._worker.criterion = setup.program.module, setup.program.criterion
        self._snapshot = snapshot_of(setup.program, hooks=False)
        evaluator = Evaluator(setup.program, self._worker, setup.parameters, setup.buffers)
        self._evaluator = evaluator
        self._output, self._keeps_outputs = MemoryOutput(), False
        self.repeatable: tuple[Order, Report | None] | None = None
        self._found: tuple[Order, list[ChunkDone]] | None = None  # the last one, if it could not be repeated
        self._local = LocalWorker(evaluator, setup.flat.layout, setup.buffers.size, self._make_watch())
        self._local.rank = 0
        keep_memory()
        self._release = weakref.finalize(self, release_memory)
        self._release.atexit = False

    @property
    def workers(self) -> list[WorkerInfo]:
        return [self._info]

    def repeat(
        self,
        which: object,
        number: int,
        step: int,
        seconds: float,
        meanwhile: Meanwhile | None,
        into: Gradient | None = None,
    ) -> Repeated | None:
        before = self.repeatable
        if before is None or before is not which:
            return None
        self.repeatable = None  # if anything is raised
        order, report = before
        assert report is not None
        # with another number than the order that follows if this fails: its sums must not continue from here
        order = Order(-1 - number, step, order.first, order.last)
        rows = self._local.rows_over(into) if into is not None and order.last - order.first == 1 else None
        try:
            found = self._in_peace(list, self._local.chunks(order, rows=rows))
        except StateWritten:
            return None
        done = found[-1]
        losses, says_something = done.sums.again(report.summaries), False
        for chunk in found:
            says_something = says_something or bool(chunk.results and chunk.says_something)
        if losses is None or says_something or done.drew != report.drew:  # its chunks answer the order that follows
            done.sums.evaluation = number
            if into is not None and rows is not None:
                self._local.rows[0].gradient.copy_(into.vector)
            self._found = order._replace(evaluation=number), found
            return None
        self.repeatable = before
        return Repeated(losses, ((done.began, done.seconds),), rows is not None)

    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        self.repeatable = None
        self._evaluator.prehook, self._evaluator.posthook = prehook, posthook
        self._evaluator.walk.looked.clear()

    def use_hooks(self, hooked: bool) -> None:
        self.repeatable = None
        self._evaluator.hooked = hooked

    def use_threads(self, threads: int | None) -> None:
        self.repeatable = None
        self._setup = replace(self._setup, threads=threads)

    def include_state(self, names: Collection[str]) -> None:
        self.repeatable = None
        self._local.follow(self._make_watch(), self._setup.buffers.size)
        self._evaluator.walk.looked.clear()

    def _make_watch(self) -> Watch:
        variable = (*self._setup.parameters, *self._setup.buffers.tensors)
        others = [(met.path, met.tensor) for met in tensors_of_f(self._snapshot)]
        return Watch(self._setup.program.module, others, variable)

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        return Prepared(batch.realigned() if self._setup.fixed_bits else batch)

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        evaluator = self._evaluator
        if evaluator.batch is not None and evaluator.loaded.follow(prepared.batch):
            evaluator.begin_again(evaluator.loaded)
        else:
            evaluator.batch, self.repeatable = prepared.batch, None
        evaluator.weights = weights
        if self._follow():
            self.repeatable = None

    def _follow(self) -> bool:
        """Take over the user's changes of the program; return whether there are any."""
        if self._snapshot.holds():
            return False
        self._snapshot = snapshot_of(self._setup.program, hooks=False)
        self._local.follow(self._make_watch(), self._setup.buffers.size)
        return True

    def evaluate(self, cut: Cut, orders: Sequence[Order | None], meanwhile: Meanwhile | None = None) -> list[Answer]:
        (order,) = orders
        self.repeatable = None
        if order is None:
            return []
        if order.kind not in TASKS:
            self._output = MemoryOutput()
            self._local.outputs = self._output if self._keeps_outputs else None
        before, self._found = self._found, None
        found = before[1] if before is not None and before[0] == order else ()
        answer = self._in_peace(self._local.evaluate, cut, order, found=found)
        if order.kind is Kind.EVALUATE and not self._keeps_outputs and answer.is_silent:
            self.repeatable = order, self._local.report
        return [answer]

    def _in_peace(self, evaluate: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function without changing the caller's random states and threads."""
        # memory that is allocated in inference mode cannot be written outside of it, and worker processes are not in it
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._in_peace(evaluate, *args, **kwargs)
        with draws_kept():
            if self._setup.threads is None:
                return evaluate(*args, **kwargs)
            with torch_threads(self._setup.threads):
                return evaluate(*args, **kwargs)

    def set_direction(self, direction: torch.Tensor) -> None:
        self._evaluator.direction = self._setup.flat.layout.views(direction)

    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        self.repeatable = None
        changed = follow and self._follow()
        if batch is not None and self._setup.fixed_bits:
            batch = batch.realigned()
        self._output = MemoryOutput()
        self._local.begin_task(task, batch, self._output)
        return changed

    def keep_outputs(self, keep: bool) -> None:
        self.repeatable = None
        self._keeps_outputs = keep

    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        found, self._output.tensors = self._output.tensors, []  # the caller's alone
        return found

    def end_task(self) -> None:
        self._evaluator.tasks.end()

    def resize(self, workers: int) -> None:
        if workers != 1:
            raise ValueError(f"this process is one worker, not {workers}")

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        return [function(self._worker, *arguments)]

    def close(self) -> None:
        self._info.alive, self.repeatable = False, None
        self._release()
