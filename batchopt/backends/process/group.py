"""A group of worker processes that evaluate chunks of one program.

The process backend is one with memory for batches, and each node of a cluster has such a backend. What the group needs
from its owner is in `Holder`.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch

from batchopt._machine.cores import end_spinning, share_cores, usable_cores
from batchopt._mapreduce.answers import Answer
from batchopt._program.unpicklable import sending
from batchopt.backends.base import Meanwhile, Repeated, Setup, WorkerInfo
from batchopt.backends.patience import OTHERS
from batchopt.backends.process.gather import ProcessGather, explain, run_everywhere
from batchopt.backends.process.paces import Deadlines, Overdue
from batchopt.backends.process.pool import Pool
from batchopt.backends.process.repeat import Ringer, WakingPipe
from batchopt.backends.process.results import Results
from batchopt.backends.process.scheduler import Assign
from batchopt.backends.process.shared_program import Holder, SentProgram, SharedProgram
from batchopt.backends.process.startup import startup_calls
from batchopt.backends.process.worker import (
    Activity,
    PendingMessage,
    SessionCall,
    WorkerProcess,
    call,
    call_with_block,
    call_with_file,
)
from batchopt_workers.data.batch import Batch, Numbering
from batchopt_workers.data.memory import SharedBlock
from batchopt_workers.data.packing import Packed
from batchopt_workers.map.buffers import StepBuffers
from batchopt_workers.map.evaluate import Program
from batchopt_workers.map.tree import most_held
from batchopt_workers.process import faults
from batchopt_workers.process.failures import Warned
from batchopt_workers.process.messages import ORDERS, TASKS, Cut, Kind, Order
from batchopt_workers.process.session import Session
from batchopt_workers.tasks.forms import Column
from batchopt_workers.tasks.task import Task
from batchopt_workers.worker import Hook

# Seconds that a worker stays awake after a short order, where each has a core.
AWAKE = 5e-4

T = TypeVar("T")


class WorkerGroup:
    """`setup.workers` processes. They end with this object, with this process, or at `close`."""

    def __init__(self, setup: Setup, holder: Holder | None = None) -> None:
        assert setup.workers is not None and setup.flat.block is not None
        self._setup, self._holder = setup, holder or Holder()
        self._device = setup.flat.vector.device
        self._size = setup.workers
        self._paces: dict[Kind, dict[int, float]] = {kind: {} for kind in ORDERS}  # seconds a sample, by rank
        self._deadlines = Deadlines(setup.timeout, self._paces)
        self._overdue = Overdue(self._paces)
        self._loads: SessionCall | None = None  # the call by which workers take the loaded batch
        self._batch = 0  # its number
        self._known: dict[int, SessionCall] = {}  # batches that all workers have loaded, by number,
        self._known_to = 0  # as of this number of changes of the pool
        self._is_behind = False  # whether workers that took no part in a repetition may still have the previous batch
        self.late: Mapping[int, tuple[int, float]] = {}  # measurements of workers that were late in the last evaluation
        self._numbering = self._of_task = Numbering((), ())  # of the step's batch, and of the task's
        self._warned: set[Warned] = set()
        self._direction: torch.Tensor | None = None
        self._writing = False  # the current task writes parameters
        self._proven = False  # whether any forward of this program, with its hooks, has succeeded
        shared = SharedProgram(setup.program, setup.parameters)  # may raise: nothing was started yet
        self._pool = Pool(self._start, setup.restarts_of(setup.workers), self._allowance)
        waking = WakingPipe()
        self._pool.wake_up_for(waking.reader)
        self._pool.set_state("waking", call_with_file(Activity.STARTING, Session.wake_through, waking))
        self._ringer = Ringer(self._pool, waking)
        self.results = Results(self._pool)
        settings = self._holder.torch_settings()
        devices = None if setup.devices is None else self._by_rank(setup.devices)
        for name, calls in startup_calls(setup, setup.flat.block, settings, max(self._threads()), devices):
            self._pool.set_state(name, *calls)
        self._pool.kept |= {"torch": settings, "hooks": True, "weights": (1.0,) * len(setup.program.loss_fns)}
        self._program = SentProgram(self._pool, setup.program, shared, self._forget_program)
        self._program.send()
        try:
            self.resize(setup.workers)
        except BaseException:
            self.close()
            raise

    # ---- the desired state of workers

    def _forget_program(self) -> None:
        """Drop state that concerns the current program: workers are sent another one."""
        self._known.clear()
        self._proven = False
        for worker in self._pool.workers.values():
            worker.cut = worker.task_cut = None
            if worker.rows is not None and worker.rows.changes != self._setup.buffers.size:
                worker.rows = None

    def _follow_torch(self) -> None:
        settings = self._holder.torch_settings()
        self._pool.keep("torch", settings, lambda: call(Activity.TORCH, Session.set_torch, settings))

    def tell(self, name: str, *calls: SessionCall) -> None:
        """Set the desired state `name`: every worker, present or future, is sent `calls`."""
        self._pool.set_state(name, *calls)

    @property
    def workers(self) -> list[WorkerInfo]:
        """Public records of the workers, in rank order."""
        return self._pool.roster.infos

    @property
    def is_free(self) -> bool:
        """Tell whether no worker evaluates anything or runs a function."""
        return self._ringer.is_current or all(worker.free for worker in self._pool.workers.values())

    def may_read_earlier_batch(self) -> bool:
        """Tell whether a late worker may still read the batch before the present one."""
        return any(worker.is_behind("batch") for worker in self._pool.workers.values())

    def _by_rank(self, values: Sequence[T]) -> dict[int, T]:
        """Return the value of each worker, by its rank among all."""
        return dict(zip(self._setup.ranks or range(len(values)), values, strict=True))

    def _threads(self) -> list[int]:
        return share_cores(self._size, self._setup.threads)

    def _send_world(self, workers: int) -> None:
        self._size = workers
        threads = self._threads()
        awake = AWAKE if sum(threads) <= usable_cores() else 0.0
        world = self._setup.world or workers
        self._pool.set_state("world", call(Activity.STARTING, Session.set_world, world, self._by_rank(threads), awake))

    def _start(self, rank: int) -> WorkerProcess:
        number = self._setup.ranks[rank] if self._setup.ranks else rank
        world = self._setup.world or self._size
        return WorkerProcess(rank, number, world, max(self._threads()), self._warned)

    def _allowance(self, worker: WorkerProcess, asked: PendingMessage) -> float:
        is_task = asked.order is not None and asked.order.kind in TASKS
        return self._deadlines.allowance(worker.rank, worker.task_cut if is_task else worker.cut, asked)

    def resize(self, workers: int, ranks: tuple[int, ...] | None = None, world: int | None = None) -> None:
        """Have `workers` workers, and wait until they can work; with `ranks`, they are these of `world` workers in
        all."""
        if ranks is not None:
            self._setup = replace(self._setup, ranks=ranks, world=world)
        host = socket.gethostname()
        kept = {info.rank: info for info in self._pool.roster.infos if not info.lost}
        devices = self._setup.devices or (self._device,) * workers
        infos = [kept.get(rank, WorkerInfo(rank, 0, host, devices[rank], alive=False)) for rank in range(workers)]
        before = self._pool.roster.infos
        try:
            self._send_world(workers)
            self._pool.resize(infos)
        except BaseException:
            if before:
                self._send_world(len(before))
            self._pool.resize(before)
            raise

    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        """Use these hooks. Raises `TypeError` for hooks that cannot be sent."""
        self._program.change(prehook=prehook, posthook=posthook)

    def use_hooks(self, hooked: bool) -> None:
        """Set whether hooks run."""
        self._pool.keep("hooks", hooked, lambda: call(Activity.HOOKS, Session.use_hooks, hooked))

    def include_state(self, names: Collection[str]) -> None:
        """Let evaluations change these tensors of the module, too."""
        self._program.change(state=self._program.program.state | set(names))

    def replace_program(self, program: Program, buffers: StepBuffers) -> None:
        """Evaluate another program from the next step on."""
        self._program.program, self._setup = program, replace(self._setup, program=program, buffers=buffers)

    def begin_step(self, batch: Batch, weights: tuple[float, ...]) -> None:
        """Begin a step on `batch` with the current program. Raises `TypeError` for a program that can no longer be
        sent."""
        # As long as the repeatable evaluation is current, no message was sent, so there is nothing to reconcile.
        if not self._ringer.is_current:
            self._enter()
        self._program.follow(self._holder.module_hooks())
        self._pool.keep("weights", weights, lambda: call(Activity.BATCH, Session.set_weights, weights))
        self._numbering = batch.numbering
        self._deadlines.reading = batch.is_read

    def take_batch(self, name: str, memory: SharedBlock, load: SessionCall, number: int = 0) -> None:
        """Have workers load the step's batch from the shared memory of that name: at once, or, if they have loaded one
        of its form from there before, with the next evaluation."""
        self.attach(name, memory)
        if self._known_to != self._pool.changes:
            self._known.clear()
        self._known_to = self._pool.changes
        self._loads, self._batch = load, number
        if self._ringer.is_current and self._known.get(number) is load:
            self._is_behind = True
        else:
            self._send_batch()

    def _send_batch(self) -> None:
        assert self._loads is not None
        self._known.pop(self._batch, None)
        self._pool.set_state("batch", self._loads)
        self._known[self._batch], self._is_behind = self._loads, False

    def attach(self, name: str, memory: SharedBlock) -> None:
        """Send workers this memory under that name."""
        self._pool.keep(name, memory, lambda: call_with_block(Activity.BATCH, Session.attach_copy, name, memory))

    def detach(self, name: str) -> None:
        """Have workers release the memory of that name, if there is any."""
        if self._pool.kept.get(name) is not None:
            self._pool.keep(name, None, lambda: call(Activity.BATCH, Session.detach, name))

    # ---- tasks

    def follow(self) -> bool:
        """Take over the current program; return whether it differs from the previous one."""
        self._enter()
        return self._program.follow(self._holder.module_hooks())

    def send_task(
        self, task: Task, packed: Packed, memory: SharedBlock | None, calls: Sequence[SessionCall], subject: Batch
    ) -> None:
        """Send a task, packed, on the batch `subject` (see `Results.begin_task`)."""
        self._enter()
        self._of_task = subject.numbering
        self._deadlines.reading_for_task, self._writing = subject.is_read, task.writes
        # The user's functions may have a state, and each call begins with its first.
        keeps = not (task.is_users or task.writes or self._setup.buffers.size)
        if self.results.begin_task(packed.data, packed.placements, memory, calls, keeps):
            return
        for worker in self._pool.workers.values():
            worker.task_cut = None
        for kind in TASKS:
            self._paces[kind].clear()  # those of another function

    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        """See `Backend.collected`."""
        return self.results.read(columns, samples, late=not self.is_free)

    def end_task(self) -> None:
        """See `Backend.end_task`."""
        self._writing = False
        for worker in self._pool.workers.values():
            worker.drop_totals()
        self.results.end_task()

    # ---- evaluating

    def evaluate(
        self,
        cut: Cut,
        orders: Sequence[Order | None],
        meanwhile: Meanwhile | None = None,
    ) -> list[Answer]:
        """See `Backend.evaluate`."""
        is_task = any(order is not None and order.kind in TASKS for order in orders)
        self._enter()
        self._follow_torch()
        if not is_task:
            self.results.begin_evaluation()
        copies = not self._writing  # a step made by two workers would be two steps
        numbering = self._of_task if is_task else self._numbering
        gather = ProcessGather(cut, numbering, orders, self._paces, self._overdue, copies)
        scheduler, ledger = gather.scheduler, gather.scheduler.ledger
        proven = self._proven and not is_task  # each function may write what is read-only
        try:
            directed, late = -1, math.inf
            # One turn: assign the chunks that can be assigned, let the caller do its own work once, wait for the first
            # event.
            while ledger.missing and not gather.failures:
                # Directing looks at every worker: do it only if something can have changed, or a chunk has become late.
                if directed != self._pool.changes or not scheduler.all_begun or time.monotonic() >= late:
                    directed, late = self._pool.changes, math.inf
                    self._direct(gather)
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                # Only an idle worker can take a copy of a late chunk: otherwise there is no reason to wake up.
                if late == math.inf and len(scheduler.workers) < len(self._pool.workers):
                    late = scheduler.next_late(gather.estimate)
                self._pool.pump(gather, late)
                proven = proven or gather.has_reports
                # Two crashes before anything has succeeded: the program, a hook or the function writes memory that is
                # read-only. Each chunk would end workers, until none is left, and none be poison.
                if not proven:
                    explain(gather.gone, "function" if is_task else "first forward")
                if gather.poison is not None:
                    raise gather.poison
        finally:
            # A worker that is still stepping would write the parameters after the call has returned.
            if self._writing:
                self._pool.finish(gather)
            self._pool.call_off()
        if gather.failures:
            # Otherwise timing would decide which of several failures is raised.
            self._receive_other_failures(gather)
            raise gather.failures.first()
        self._proven = self._proven or not is_task
        # Stragglers must have stopped writing their rows before these are summed.
        self._receive_from_stragglers(gather)
        self.late = gather.leave(self._pool.workers.values())
        for worker in self._pool.workers.values():
            worker.stderr.pass_on()
        answers = gather.answers()
        if not is_task and self._can_be_repeated(orders, gather) and all(answer.is_silent for answer in answers):
            self._ringer.remember(orders, answers, len(self._numbering.names))
        return answers

    # ---- repeating

    def _can_be_repeated(self, orders: Sequence[Order | None], gather: ProcessGather) -> bool:
        """Tell whether the evaluation went exactly as planned, without outputs and late workers: it can be repeated."""
        return (
            not self.results.keeps_outputs
            and not self._overdue.workers
            and self._pool.is_calm
            and gather.went_as(orders)
        )

    @property
    def repeatable(self) -> object:
        """See `Backend.repeatable`."""
        return self._ringer.last

    def repeat(
        self, which: object, number: int, step: int, seconds: float, meanwhile: Meanwhile | None, into: object = None
    ) -> Repeated | None:
        """See `Backend.repeat`."""
        ringer = self._ringer
        if ringer.last is not which or not ringer.is_current:
            return None
        if self._holder.torch_settings() != self._pool.kept.get("torch"):
            return None
        end_spinning()
        return ringer.ring(number, step, self._batch, seconds, meanwhile)

    def _enter(self) -> None:
        """Begin a call: leave the cores to the workers, and handle replies since the last one."""
        end_spinning()
        self._ringer.forget()
        if self._is_behind:
            self._send_batch()
        for worker in self._overdue.workers:  # the pool would ignore their replies
            if self._pool.workers.get(worker.rank) is worker:
                worker.channel.drain()
                self._pool.receive(worker, self._overdue)
        self._pool.enter()

    def set_direction(self, direction: torch.Tensor) -> None:
        """Let orders for a product multiply the Hessian with `direction`."""
        if self._direction is None:
            layout = self._setup.flat.layout
            block = SharedBlock.create(layout.size * layout.dtype.itemsize)
            attach = call_with_block(Activity.MEMORY, Session.attach, "direction", block)
            self._pool.set_state("direction", attach, call(Activity.MEMORY, Session.set_direction))
            self._direction = block.tensor(layout.dtype, (layout.size,))
        self._direction.copy_(direction)

    def _direct(self, gather: ProcessGather) -> None:
        """Carry out what the scheduler decides for workers that have nothing to do."""
        idle = [worker.rank for worker in self._pool.available]
        if not idle:
            return
        asked = []
        for command in gather.scheduler.decide(idle, gather.estimate, time.monotonic()):
            worker = self._pool.workers[command.worker]
            if isinstance(command, Assign):
                self._order(worker, gather, command)
                asked.append(worker)
                continue
            with suppress(OSError):  # gone; the pool will find out
                worker.limit(command.last)
        for worker in asked:  # after all were queued: the first worker to wake up may take this process's core
            with suppress(OSError):
                worker.flush()
        faults.point("parent.dispatched")

    def _order(self, worker: WorkerProcess, gather: ProcessGather, run: Assign) -> None:
        """Send the worker an order for this run, after what it needs for it: the cut, and memory to sum in."""
        cut, setup = gather.cut, self._setup
        if gather.is_task:
            if worker.task_cut != cut:
                worker.cut_task(cut)
            worker.make_totals()
        else:
            if self._device.type == "cpu" and setup.devices is None:  # elsewhere orders carry more than a number
                self._ringer.hang_bell(worker, self._size)
            if worker.cut is not cut:
                worker.set_cut(cut)
            rows = most_held(run.first, run.last, cut.chunks, gather.held(worker))
            worker.make_room(rows, setup.flat.layout, setup.buffers.size, self._device)
        worker.order(gather.order(worker, run), gather.scheduler.patience(run.first))

    def _receive_from_stragglers(self, gather: ProcessGather) -> None:
        """Read the reports of workers that are still evaluating.

        They were told to stop. So one that evaluates a chunk now begins no other, and has sent its report of the
        previous chunk: once that is read, no row that counts is written any more.
        """
        for worker in list(self._pool.workers.values()):
            if not worker.idle:
                worker.channel.drain()
                self._pool.receive(worker, gather)

    def _receive_other_failures(self, gather: ProcessGather) -> None:
        """Wait a little for other workers' replies, so that the same failure is raised each time."""
        deadline = time.monotonic() + OTHERS
        while time.monotonic() < deadline and gather.scheduler.workers:
            self._pool.pump(gather, deadline)

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """See `Backend.run`."""
        with sending("the function or an argument", function, *arguments):
            message = call(Activity.FUNCTION, Session.run, function, *arguments)
        self._enter()
        return run_everywhere(self._pool, message)

    def stop(self) -> None:
        """Make a call that waits for workers raise `BatchoptError` soon."""
        self._pool.stop()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()
        self._program.close()
        # This object and its pool refer to each other: memory is released now, not when Python's collector runs.
        self._direction = None
        self._ringer.close()
        self._overdue = Overdue(self._paces)
