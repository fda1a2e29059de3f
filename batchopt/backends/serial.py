"""The backend of `parallelize=1`: the map function, called in this process on the user's own module."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from batchopt._data.arguments import read_parallelize
from batchopt._machine.allocator import keep_memory, release_memory
from batchopt._machine.cores import torch_threads
from batchopt._mapreduce.answers import Answer, Span, partials_of
from batchopt._mapreduce.reduce import Answers, Pattern
from batchopt._program.flat_module import Gradient
from batchopt._program.program import snapshot_of, tensors_of_f
from batchopt.backends.audits import Audits, error_of
from batchopt.backends.base import Backend, Meanwhile, Mode, Prepared, Run, Setup, WorkerInfo
from batchopt.errors import WorkerError
from batchopt_workers.batch.batch import Batch
from batchopt_workers.batch.placing import Placing
from batchopt_workers.evaluate.chunk import LoadedBatch
from batchopt_workers.evaluate.draws import draws_kept, set_torch_states, torch_states
from batchopt_workers.evaluate.evaluator import Evaluator
from batchopt_workers.evaluate.program import Precode, Worker
from batchopt_workers.evaluate.sums import Rows
from batchopt_workers.evaluate.tree import most_held
from batchopt_workers.evaluate.unwritten import Unwritten, constants
from batchopt_workers.evaluate.work import ChunkDone
from batchopt_workers.functions.forms import Column, MemoryOutput, sums_layout
from batchopt_workers.functions.task import Task
from batchopt_workers.wire.failures import let_through, message_of
from batchopt_workers.wire.orders import Cut, Kind, Order
from batchopt_workers.wire.packing import pack


class SerialBackend(Backend):
    """One worker, which is this process."""

    local = compiles = True

    @classmethod
    def read_workers(cls, parallelize: Any) -> int | None:
        workers = read_parallelize(parallelize)
        if workers > 1:
            raise ValueError(f"`backend` 'serial' is this process alone: use parallelize=1, got {workers}")
        return workers

    def __init__(self, setup: Setup) -> None:
        device = setup.flat.vector.device
        self._info, self._setup = WorkerInfo(0, os.getpid(), socket.gethostname(), device), setup
        (rank,) = setup.ranks or (0,)  # its rank among all, if there are other processes like this one
        self._worker = Worker(rank, setup.world or 1, device)
        run_precode(setup.precode, self._worker)
        self._worker.module, self._worker.criterion = setup.program.module, setup.program.criterion
        self._snapshot = snapshot_of(setup.program, hooks=False)
        self._evaluator = Evaluator(setup.program, self._worker, setup.parameters, setup.buffers, self._constants())
        if device.type != "cpu":
            self._evaluator.walk.place = Placing(device)  # of a batch that is on the CPU
        self._version = object()
        self._audits, self._draws_others = Audits(setup, self._evaluator), True
        self._output, self._mode = MemoryOutput(), setup.mode
        self._rows = self._make_rows(1)
        self._over: tuple[Gradient, Rows] | None = None  # the rows over df/dX
        self._last: tuple[object, Pattern] | None = None  # the form of the last evaluation, if it may be repeated
        keep_memory()
        self._release = weakref.finalize(self, release_memory)
        self._release.atexit = False

    @property
    def workers(self) -> list[WorkerInfo]:
        if self._evaluator.graphs is not None:
            self._info.graph = str(self._evaluator.graphs)
        return [self._info]

    # ---- the program, the batch, the task

    def set_mode(self, mode: Mode) -> None:
        before, self._mode = self._mode, mode
        loss = self._evaluator.loss
        loss.prehook, loss.posthook, loss.hooked = mode[:3]
        self._find_draws()
        if not mode.outputs:
            self._evaluator.outputs = None
        if mode.artifacts != before.artifacts:
            program, parameters = self._setup.program, self._setup.parameters
            tensors = pack(program, parameters, expanded=True).tensors if mode.artifacts else ()
            self._evaluator.compile(mode.artifacts, tensors)
            self._last = None

    def _find_draws(self) -> None:
        """Find out whether evaluations run code that may draw from NumPy or `random`: see `Draws.others`."""
        evaluator, (prehook, posthook, hooked, *_) = self._evaluator, self._mode
        is_plain = evaluator.has_batch and evaluator.loaded.is_of_columns
        self._draws_others = not is_plain or (hooked and not prehook is posthook is None)

    @property
    def version(self) -> object:
        self._follow()  # eager evaluations see a change of the module itself at once
        return self._version

    def _constants(self) -> Unwritten:
        variable = {id(tensor) for tensor in (*self._setup.buffers.tensors, *self._setup.parameters)}
        found = [(at.path, at.tensor) for at in tensors_of_f(self._snapshot) if id(at.tensor) not in variable]
        return constants(found)

    def _make_rows(self, count: int) -> Rows:
        return Rows(self._setup.flat.layout, self._setup.buffers.size, count, device=self._worker.device)

    def _rebuild(self) -> None:
        """Take over changes of the module: other tensors to watch, other numbers that report its state."""
        self._evaluator.walk.constants = self._constants()
        self._evaluator.look_again()
        self._audits.clock.restart()
        self._version = object()
        if self._rows.changes != self._setup.buffers.size:
            self._rows, self._over = self._make_rows(len(self._rows)), None
        self._last = None

    def _follow(self) -> bool:
        """Take over the user's changes of the program; return whether there are any."""
        if self._snapshot.holds():
            return False
        self._snapshot = snapshot_of(self._setup.program, hooks=False)
        self._rebuild()
        return True

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        return Prepared(batch.realigned() if self._setup.fixed_bits else batch)

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        evaluator = self._evaluator
        loaded = evaluator.loaded if evaluator.has_batch else None
        if loaded is None or not loaded.follow(prepared.batch):
            evaluator.loaded = loaded = LoadedBatch(prepared.batch)
            self._find_draws()
        evaluator.loaded, evaluator.loss.weights = loaded, weights
        if self._evaluator.walk.place is not None:
            self._evaluator.walk.place.forget()
        if not self._follow() and self._rows.changes != self._setup.buffers.size:
            self._rebuild()  # a buffer that was there before this object may count only from this step on

    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        # What cannot be compared (a sparse buffer, say) is evaluated where it is: the next step looks at it again.
        changed = follow and not self._snapshot.looks_the_same() and self._follow()
        if batch is not None and self._setup.fixed_bits:
            batch = batch.realigned()
        self._evaluator.tasks.begin(task, batch)
        self._output = self._evaluator.tasks.output = MemoryOutput()
        if self._evaluator.walk.place is not None:
            self._evaluator.walk.place.keeps = False
        return changed

    def end_task(self) -> None:
        self._evaluator.tasks.end()
        if self._evaluator.walk.place is not None:
            self._evaluator.walk.place.keeps = True

    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        found, self._output.tensors = self._output.tensors, []  # the caller's alone
        return found

    # ---- evaluating

    def evaluate(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        meanwhile: Meanwhile | None = None,
        into: Gradient | None = None,
    ) -> Answers:
        ((first, last),) = runs
        if first == last:
            return Answers(Pattern([], cut.chunks))
        evaluator, last_one, self._last = self._evaluator, self._last, None  # if anything is raised
        if (first, last) != (order.first, order.last):
            order = order._replace(first=first, last=last)
        rows, is_written, audits, place = None, False, False, evaluator.walk.place
        if order.kind is not Kind.EVALUATE:
            evaluator.tasks.cut = cut
        else:
            if evaluator.cut is not cut:
                evaluator.cut_into(cut)
                if place is not None:
                    place.forget()
            if self._mode.outputs:
                self._output = evaluator.outputs = MemoryOutput()
            if last_one is not None and into is not None and last - first == 1:
                rows = self._over[1] if self._over is not None and self._over[0] is into else self._rows_over(into)
                is_written = rows is not None
            rows = rows or self._rows_for(most_held(first, last, cut.chunks))
            clock = self._audits.clock
            audits = clock.begin(order.evaluation) and clock.is_due and self._audits.begin(order)
        try:
            # memory that is allocated in inference mode cannot be written outside of it, and worker processes are not
            # in it
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    found = self._run_order(order, rows)
            else:
                found = self._run_order(order, rows)
        except Exception as error:
            let_through(error)
            raise error_of(evaluator, order, 0, error) from error
        if audits:
            self._audits.end(order, self._mode.threads)
        return self._answers(cut, order, found, last_one, into if is_written else None)

    def _run_order(self, order: Order, rows: Rows | None) -> list[ChunkDone]:
        """Carry out an order without changing the caller's random states and threads."""
        if self._mode.threads is not None or self._draws_others or order.kind is not Kind.EVALUATE:
            with draws_kept(), torch_threads(self._mode.threads):
                found = [*self._evaluator.evaluate(order, rows)]
        else:
            states = torch_states()
            try:
                found = [*self._evaluator.evaluate(order, rows)]
            finally:
                set_torch_states(states)
        return found if rows is None or rows[0].gradient.is_cpu else _settled(found, rows)

    def _answers(
        self,
        cut: Cut,
        order: Order,
        found: Sequence[ChunkDone],
        before: tuple[object, Pattern] | None,
        written: Gradient | None,
    ) -> Answers:
        """Return the answer to an order, as a repetition of the one `before` if only numbers differ. `written`: df/dX,
        if the only row is there."""
        done, partials = found[-1], found[-1].sums.partials
        form: list[object] = [cut, order.first, order.last, done.drew]
        for _, partial in partials:
            form += (partial.row, partial.used)
        is_silent = True
        for chunk in found:
            is_silent = is_silent and chunk.form is None and (chunk.results is None or chunk.says_nothing)
            form.append(chunk.results and len(chunk.results))
        if before is not None and is_silent and form == before[0]:
            self._last = before
            losses = []
            for _, partial in partials:
                losses.append(partial.losses)
            return Answers(before[1], losses, [(done.began, done.seconds)], written is not None, done.finite)
        if written is not None:
            self._rows[0].gradient.copy_(written.vector)
        pattern = Pattern([answer_of(0, self._evaluator, cut, order, found, self._rows)], cut.chunks)
        if order.kind is Kind.EVALUATE and is_silent:
            self._last = form, pattern
        return Answers(pattern)

    def _rows_over(self, gradient: Gradient) -> Rows | None:
        """Return a row over this memory; None where it has not the precision of sums, or cannot be written here."""
        own = self._rows[0]
        if gradient.vector.dtype != own.gradient.dtype or gradient.vector.is_inference():
            return None
        rows = self._make_rows(0)
        rows.append(own._replace(gradient=gradient.vector, views=gradient.views))
        self._over = gradient, rows
        return rows

    def _rows_for(self, count: int) -> Rows:
        if count > len(self._rows):
            self._rows, self._over = self._make_rows(count), None
        return self._rows

    # ---- others

    def resize(self, workers: int) -> None:
        if workers != 1:
            raise ValueError(f"this process is one worker, not {workers}")

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        self._audits.clock.restart()
        return [function(self._worker, *arguments)]

    def close(self) -> None:
        self._info.alive, self._last = False, None
        self._release()


def _settled(found: list[ChunkDone], rows: Rows) -> list[ChunkDone]:
    """Wait for a card to have done it, and say when it had."""
    last = found[-1]
    finite = last.sums.settle(rows)
    found[-1] = last._replace(seconds=time.perf_counter() - last.began, finite=finite)
    return found


def answer_of(
    rank: int, evaluator: Evaluator, cut: Cut, order: Order, found: Sequence[ChunkDone], rows: Rows | None
) -> Answer:
    """Return the answer to an order of which all chunks were done, with gradients in these rows."""
    done = found[-1]
    results = {chunk.next - 1: [*chunk.results] for chunk in found if chunk.results is not None}
    forms = {chunk.next - 1: chunk.form for chunk in found if chunk.form is not None}
    if order.kind is Kind.TOTAL:
        rows = evaluator.tasks.totals.rows(sums_layout(next(iter(forms.values())).columns), 1)
    partials = partials_of(done.sums.partials, None if order.kind is Kind.COLLECT else rows)
    span = Span(done.began, done.seconds, order.first, order.last)
    samples = cut.bounds[order.last] - cut.bounds[order.first]
    return Answer(rank, samples, done.seconds, partials, results, [span], done.drew, forms)


def run_precode(precode: Precode | None, worker: Worker) -> None:
    """Run the user's precode. Raises `WorkerError` if it raises."""
    if precode is None:
        return
    try:
        precode(worker)
    except Exception as error:
        let_through(error)
        name, message = type(error).__name__, message_of(error)
        raise WorkerError(worker.rank, name, message, range(0), "running precode") from error
