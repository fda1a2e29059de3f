"""A backend in some 150 lines: each worker is a thread of this process with a copy of the module.

It shows what a backend has to do, and that the contract can be kept without processes. It is no use otherwise: torch's
random generator is one for all threads, so orders take turns; and a thread that dies or hangs cannot be replaced.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from batchopt._machine.cores import torch_threads
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.reduce import Answers, Pattern
from batchopt._program.flat_module import Gradient
from batchopt._program.program import PickledProgram
from batchopt._program.unpicklable import check_module
from batchopt.backends.base import Backend, Meanwhile, Mode, Prepared, Run, Setup, WorkerInfo
from batchopt.backends.process.gather import Failures
from batchopt.backends.serial import answer_of, carry_out, run_precode
from batchopt_workers.data.batch import Batch
from batchopt_workers.data.memory import SharedBlock
from batchopt_workers.data.packing import assemble
from batchopt_workers.map.chunk import LoadedBatch
from batchopt_workers.map.evaluate import Evaluator
from batchopt_workers.map.module_state import ModuleState
from batchopt_workers.map.program import Program
from batchopt_workers.map.seeding import draws_kept
from batchopt_workers.map.sums import Rows
from batchopt_workers.map.tree import most_held
from batchopt_workers.map.watch import StateWritten
from batchopt_workers.process.messages import Cut, Order
from batchopt_workers.process.torch_settings import TorchSettings
from batchopt_workers.tasks.forms import Column, MemoryOutput
from batchopt_workers.tasks.task import Task
from batchopt_workers.worker import Worker


class Copy:
    """A worker's copy of the program, whose parameters are views of X; constants and state are copied at each step."""

    def __init__(self, source: PickledProgram, setup: Setup, worker: Worker) -> None:
        packed = source.packed
        self._block = SharedBlock.create(packed.nbytes)
        packed.place(self._block)
        tensors = [placement.dressed(placement.view(self._block)) for placement in packed.placements]
        parameters = [torch.nn.Parameter(view) for view in setup.flat.layout.views(setup.flat.vector)]
        program: Program = assemble(packed.data, tensors, parameters)
        worker.module, worker.criterion = program.module, program.criterion
        self._state = ModuleState(program.module, state=program.state)
        constants = [(name, tensors[i]) for i, name in source.read_only.items()]
        self._state.watch(constants, parameters)
        self.evaluator = Evaluator(program, worker, parameters, self._state)
        self.rows = Rows(setup.flat.layout, self._state.size, 1)

    def begin_step(self, source: PickledProgram) -> None:
        """Take over what the user has written to tensors."""
        source.packed.place(self._block)
        self._state.begin_step()


class ThreadBackend(Backend):
    """Workers that are threads."""

    local = True

    @classmethod
    def check(cls, setup: Setup) -> None:
        check_module(setup.program.module)

    def __init__(self, setup: Setup) -> None:
        assert setup.workers is not None
        self._setup = setup
        # hooks run as they are, in this process; only the rest of the program is copied
        self._program = replace(setup.program, prehook=None, posthook=None)
        self._mode, self._resets = setup.mode, 0
        self._source = PickledProgram(self._program, setup.parameters)
        self._infos: list[WorkerInfo] = []
        self._workers: list[Worker] = []
        self._copies: list[Copy] = []
        self._batch: Batch | None = None
        self._weights = (1.0,) * len(setup.program.loss_fns)
        self._task: Task | None = None
        self._aside: Batch | None = None
        self._output = MemoryOutput()
        self._turn = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self.resize(setup.workers)

    @property
    def workers(self) -> list[WorkerInfo]:
        return self._infos

    def set_mode(self, mode: Mode) -> None:
        before, self._mode = self._mode, mode
        if mode.state != before.state:
            self._program = replace(self._program, state=mode.state)
            self._begin_step()  # an evaluation has shown that they change: the one that follows is of the same step

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        return Prepared(batch.realigned() if self._setup.fixed_bits else batch)

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        self._batch, self._weights = prepared.batch, weights
        self._begin_step()

    def _begin_step(self) -> bool:
        self._resets = self._setup.buffers.resets
        changed = self._source.resync(self._program)
        if changed or len(self._copies) != len(self._workers):
            self._copies = [Copy(self._source, self._setup, worker) for worker in self._workers]
        for copy in self._copies:
            copy.begin_step(self._source)
            copy.evaluator.loss.weights = self._weights
            if self._batch is not None:
                copy.evaluator.loaded = LoadedBatch(self._batch)
            if self._task is not None:
                copy.evaluator.tasks.begin(self._task, self._aside)
                copy.evaluator.tasks.output = self._output
        return changed

    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        if batch is not None and self._setup.fixed_bits:
            batch = batch.realigned()
        self._task, self._aside, self._output = task, batch, MemoryOutput()
        return self._begin_step() and follow

    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        return self._output.tensors

    def end_task(self) -> None:
        self._task = self._aside = None
        for copy in self._copies:
            copy.evaluator.tasks.end()

    def evaluate(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        meanwhile: Meanwhile | None = None,
        into: Gradient | None = None,
    ) -> Answers:
        if self._setup.buffers.resets != self._resets:
            self._begin_step()
        threads, settings, failures = self._threads, TorchSettings.current(), Failures()
        assert threads is not None
        if self._task is None:
            self._output = MemoryOutput()
        for copy in self._copies:
            copy.evaluator.cut = copy.evaluator.tasks.cut = cut
            copy.evaluator.outputs = self._output if self._mode.outputs else None
            loss = copy.evaluator.loss
            loss.prehook, loss.posthook, loss.hooked = self._mode[:3]

        def work(rank: int, order: Order) -> Answer:
            copy = self._copies[rank]
            copy.rows.grow(max(0, most_held(order.first, order.last, cut.chunks) - len(copy.rows)), None)
            with self._turn, settings.contexts(), torch_threads(self._setup.threads or 1):
                found = carry_out(copy.evaluator, order, copy.rows, rank)
                return answer_of(rank, copy.evaluator, cut, order, found, copy.rows)

        with draws_kept():
            futures = {
                rank: threads.submit(work, rank, order._replace(first=first, last=last))
                for rank, (first, last) in enumerate(runs)
                if first < last
            }
            if meanwhile is not None:
                meanwhile()
            answers = []
            for rank, future in futures.items():
                error = future.exception()
                if error is None:
                    answers.append(future.result())
                elif isinstance(error, StateWritten):
                    failures.add(error, rank, -1)
                else:
                    failures.add(error, rank, getattr(error, "samples", range(0)).start)
        if failures:
            raise failures.first()
        return Answers(Pattern(answers, cut.chunks))

    def resize(self, workers: int) -> None:
        for rank in range(len(self._workers), workers):
            worker = Worker(rank, workers, torch.device("cpu"))
            run_precode(self._setup.precode, worker)
            self._workers.append(worker)
            self._infos.append(WorkerInfo(rank, os.getpid(), socket.gethostname(), worker.device))
        del self._workers[workers:], self._infos[workers:], self._copies[workers:]
        for worker in self._workers:
            worker.world_size = workers
        self.close()
        for info in self._infos:
            info.alive = True
        self._threads = ThreadPoolExecutor(workers)

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        assert self._threads is not None
        futures = [self._threads.submit(function, worker, *arguments) for worker in self._workers]
        return [future.result() for future in futures]

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        self._threads = None
        for info in self._infos:
            info.alive = False
