"""A group of worker processes that evaluate chunks of one program.

    evaluate(cut, order, runs)
        nothing has changed since the last one?  ── ring, wait ──► its answers, with other numbers
        otherwise, or if anything else happens:
            reconcile (Pool) ─► assign (WorkerScheduler) ─► order (page, ring) ─► wait ─► take in (ProcessGather) ─┐
                                      ▲                                                                            │
                                      └──── a worker is idle, late, lost, or chunks are missing ◄──────────────────┘

What must hold:

- A worker is given an order only after what it needs for it was sent to it: pipe and page are read in this order.
- An evaluation ends when each chunk has a result, whoever it is from. Workers that are still at one are called off, and
  their rows are not read after that: see `page`.
- A call that ends early, by an exception or an interrupt, leaves nothing to undo: the next one (`_enter`) calls off and
  reconciles whatever it finds.

The process backend is one with memory for batches, and each node of a cluster has such a backend. What the group needs
from its owner is in `Ambient`.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch

from batchopt._machine.cores import end_spinning, share_cores, usable_cores
from batchopt._mapreduce.reduce import Answers, Pattern
from batchopt._program.flat_module import Gradient
from batchopt._program.unpicklable import sending
from batchopt.backends.base import Meanwhile, Mode, Run, Setup, WorkerInfo
from batchopt.backends.process.gather import ProcessGather, explain, run_everywhere
from batchopt.backends.process.paces import Stragglers, allowance
from batchopt.backends.process.pool import Pool
from batchopt.backends.process.repeat import Repeat, Repeats
from batchopt.backends.process.results import Results
from batchopt.backends.process.roster import AT_WORK
from batchopt.backends.process.scheduler import Assign
from batchopt.backends.process.shared_program import Ambient, SentProgram, SharedProgram
from batchopt.backends.process.startup import startup_calls
from batchopt.backends.process.wanted import Activity, Field, SessionCall, Wanted
from batchopt.backends.process.worker import WorkerProcess, call, call_with_block
from batchopt.backends.timeouts import OTHERS
from batchopt_workers.batch.batch import Batch, Numbering
from batchopt_workers.evaluate.program import Program
from batchopt_workers.evaluate.state import ModuleState
from batchopt_workers.evaluate.tree import most_held
from batchopt_workers.functions.forms import Column
from batchopt_workers.functions.task import Task
from batchopt_workers.life import faults
from batchopt_workers.life.session import Session
from batchopt_workers.shortcuts.form import Artifact
from batchopt_workers.wire.failures import Warned
from batchopt_workers.wire.memory import SharedBlock
from batchopt_workers.wire.orders import TASKS, Cut, Kind, Order, Start
from batchopt_workers.wire.packing import Packed
from batchopt_workers.wire.page import Board

# Seconds that a worker stays awake after a short order, where each has a core.
AWAKE = 5e-4
# Pages that a board has at least: another one is needed once there are more workers.
PAGES = 32

T = TypeVar("T")


@dataclass
class Subject:
    """The samples that orders of one kind are about, and their cut. `writes`: it is a task that makes steps, and writes
    parameters; `is_read`: workers read the samples; `is_proven`: they have succeeded in it, with these hooks."""

    numbering: Numbering = field(default_factory=lambda: Numbering((), ()))
    cut: Cut = field(default_factory=lambda: Cut((0,)))
    writes: bool = False
    is_read: bool = False
    is_proven: bool = False


class WorkerGroup:
    """`setup.workers` processes. They end with this object, with this process, or at `close`."""

    def __init__(self, setup: Setup, ambient: Ambient | None = None) -> None:
        assert setup.workers is not None and setup.flat.block is not None
        self._setup, self._ambient = setup, ambient or Ambient()
        self._stragglers = Stragglers({kind: {} for kind in Kind})
        self._start, self._starts = Start(), 0  # and those of the module's state at that start
        self._subjects = {False: Subject(), True: Subject()}  # of the step, and of the task
        self._numbers = count(1)  # of orders
        self._repeats = Repeats()
        shared = SharedProgram(setup.program, setup.parameters)  # may raise: nothing was started yet
        setup.flat.share(self)
        self._board = Board.create(max(PAGES, setup.workers))
        self._pool = Pool(partial(self._make, set()), setup.restarts_of(setup.workers), self._allowance)
        self.results = Results(self._pool)
        settings = self._ambient.torch_settings()
        devices = None if setup.devices is None else self._by_rank(setup.devices)
        told = startup_calls(setup, setup.flat.block, settings, max(self._threads()), devices)
        self._pool.want = Wanted(**{name: Field(tuple(calls), value) for name, (calls, value) in told.items()})
        self._program = SentProgram(self._pool, setup.program, shared, self._forget_program)
        self._program.send()
        try:
            self.resize(setup.workers)
        except BaseException:
            self.close()
            raise

    # ---- what workers must have

    def _forget_program(self) -> None:
        """Drop what concerns the current program: workers are sent another one."""
        self._subjects[False].is_proven = False
        self._tell_of_artifacts(())
        self._begin()
        for worker in self._pool.workers.values():
            rows = worker.memory.rows
            if rows is not None and rows.changes != self._setup.buffers.size:
                worker.memory.rows = None

    @property
    def workers(self) -> list[WorkerInfo]:
        """Public records of the workers, in rank order."""
        return self._pool.roster.infos

    @property
    def is_free(self) -> bool:
        """Tell whether no worker evaluates anything or runs a function."""
        return self._is_settled or not any(worker.state in AT_WORK for worker in self._pool.workers.values())

    def is_reading(self, batch: int) -> bool:
        """Tell whether a late worker may still read the batch of that number."""
        return any(w.evaluates and w.given.start.batch == batch for w in self._pool.workers.values())

    @property
    def _size(self) -> int:
        assert self._setup.workers is not None
        return self._setup.workers

    def _by_rank(self, values: Sequence[T]) -> dict[int, T]:
        """Return the value of each worker, by its rank among all."""
        return dict(zip(self._setup.ranks or range(len(values)), values, strict=True))

    def _threads(self) -> list[int]:
        return share_cores(self._size, self._setup.threads)

    def _send_world(self, workers: int) -> None:
        self._setup = replace(self._setup, workers=workers)
        threads = self._threads()
        awake = AWAKE if sum(threads) <= usable_cores() else 0.0
        world = self._setup.world or workers
        self._pool.tell("world", call(Activity.STARTING, Session.set_world, world, self._by_rank(threads), awake))

    def _make(self, warned: set[Warned], rank: int) -> WorkerProcess:
        number = self._setup.ranks[rank] if self._setup.ranks else rank
        world, threads = self._setup.world or self._size, max(self._threads())
        return WorkerProcess(rank, number, world, threads, self._board, self._pool.events, warned)

    def _allowance(self, worker: WorkerProcess, activity: Activity) -> float:
        subject = self._subjects[worker.given.kind in TASKS]
        return allowance(worker, activity, subject.cut, self._setup.timeout, self._stragglers.paces, subject.is_read)

    def resize(self, workers: int, ranks: tuple[int, ...] | None = None, world: int | None = None) -> None:
        """Have `workers` workers, and wait until they can work; with `ranks`, they are these of `world` workers in
        all."""
        if ranks is not None:
            self._setup = replace(self._setup, ranks=ranks, world=world)
        self._need_pages(workers)
        host = socket.gethostname()
        kept = {info.rank: info for info in self._pool.roster.infos if not info.lost}
        devices = self._setup.devices or (self._setup.flat.vector.device,) * workers
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

    def _need_pages(self, workers: int) -> None:
        """Have a page for each of so many workers."""
        if workers <= self._board.workers:
            return
        self._enter()
        self._pool.finish(self._stragglers)  # they would report on their pages of before
        self._board = Board.create(2 * workers)
        for worker in self._pool.workers.values():
            worker.move(self._board, self._pool.events)

    def set_mode(self, mode: Mode) -> None:
        """See `Backend.set_mode`."""
        if not mode.is_of(self._program.program):
            self._program.change(prehook=mode.prehook, posthook=mode.posthook)
        self._pool.tell_of("hooked", mode.hooked, lambda: [call(Activity.HOOKS, Session.use_hooks, mode.hooked)])
        self._tell_of_artifacts(mode.artifacts)
        if mode.outputs != self.results.keeps_outputs:
            self._repeats.found[Kind.EVALUATE] = None
            self.results.keep_outputs(mode.outputs)

    def _tell_of_artifacts(self, artifacts: tuple[Artifact, ...]) -> None:
        if artifacts or self._pool.value_of("compiled"):
            self._pool.tell_of("compiled", artifacts, lambda: [call(Activity.COMPILED, Session.compile, artifacts)])

    @property
    def version(self) -> object:
        """See `Backend.version`."""
        return self._program.version

    def replace_program(self, program: Program, buffers: ModuleState) -> None:
        """Evaluate another program from the next step on."""
        self._program.program, self._setup = program, replace(self._setup, program=program, buffers=buffers)

    def begin_step(self, batch: Batch, number: int, weights: tuple[float, ...]) -> None:
        """Begin a step on `batch`, which workers know by that number, with the current program. Raises `TypeError` for
        a program that can no longer be sent."""
        if not self._is_settled:
            self._enter()
        self._program.follow(self._ambient.module_hooks())
        self._pool.tell_of("weights", weights, lambda: [call(Activity.BATCH, Session.set_weights, weights)])
        self._subjects[False] = replace(self._subjects[False], numbering=batch.numbering, is_read=batch.is_read)
        self._begin(number)

    def _begin(self, batch: int | None = None) -> None:
        """Have workers begin from the state at the start of the step."""
        self._starts = self._setup.buffers.starts
        self._start = Start(self._start.batch if batch is None else batch, self._start.number + 1)

    @property
    def _is_settled(self) -> bool:
        """Tell whether the last evaluation has left nothing to do, and nothing was sent since."""
        return self._repeats.settled_at == self._pool.stamp

    def attach(self, name: str, key: object, memory: SharedBlock, *calls: SessionCall) -> None:
        """Send workers the memory of a batch, and have them make these calls about it, unless they have that of this
        `key`."""

        def made() -> list[SessionCall]:
            return [call_with_block(Activity.BATCH, Session.attach_copy, name, memory), *calls]

        self._pool.tell_of(name, key, made)

    def detach(self, name: str) -> None:
        """Have workers release the memory of a batch, if there is any."""
        if self._pool.value_of(name) is not None:
            self._pool.tell_of(name, None, lambda: [call(Activity.BATCH, Session.detach, name)])

    # ---- tasks

    def follow(self) -> bool:
        """Take over the current program; return whether it differs from the previous one."""
        self._enter()
        return self._program.follow(self._ambient.module_hooks())

    def send_task(self, task: Task, packed: Packed, calls: Sequence[SessionCall], subject: Batch) -> None:
        """Send a task, packed, on the batch `subject` (see `Results.begin_task`)."""
        self._enter()
        if self._setup.buffers.size:
            self._begin()  # a step may have ended since
        self._subjects[True] = Subject(subject.numbering, self._subjects[True].cut, task.writes, subject.is_read)
        # The user's functions may have a state, and each call begins with its first.
        keeps = not (task.is_users or task.writes or self._setup.buffers.size)
        if not self.results.begin_task(packed, calls, keeps):
            for kind in TASKS:
                self._stragglers.paces[kind].clear()  # those of another function

    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        """See `Backend.collected`."""
        return self.results.read(columns, samples, in_use=not self.is_free)

    def end_task(self) -> None:
        """See `Backend.end_task`."""
        self._subjects[True].writes = False
        if any([worker.drop_totals() for worker in self._pool.workers.values()]):
            self._repeats.found[Kind.TOTAL] = None
        self.results.end_task()

    # ---- evaluating

    def evaluate(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        meanwhile: Meanwhile | None = None,
        into: Gradient | None = None,
    ) -> Answers:
        """See `Backend.evaluate`."""
        stamp, kind, begun, repeats = self._pool.stamp, order.kind, False, self._repeats
        repeat = repeats.take(kind, stamp, cut, runs)
        if self._setup.buffers.starts != self._starts:
            self._begin()
        if repeat is not None:
            if self._ambient.torch_settings() == self._pool.want.torch.value:
                end_spinning()
                begun = True
                if repeat.goes_as_before(next(self._numbers), order, self._start, meanwhile):
                    if kind is Kind.TOTAL:
                        self.results.leave_unwritten()
                    repeats.found[kind], repeats.settled_at = repeat, stamp
                    return repeat.answers()
        if not begun:
            self._prepare(cut, order)
        subject = self._subjects[kind in TASKS]
        copies = not subject.writes  # a step made by two workers would be two steps
        gather = ProcessGather(cut, order, runs, subject.numbering, self._stragglers, copies)
        if begun:
            gather.scheduler.decide(range(self._size), gather.estimate, time.monotonic())  # as they were rung for
            self._pool.look(gather)  # whoever is done has woken this process up before
        try:
            self._gather(gather, subject, None if begun else meanwhile)
        finally:
            # A worker that is still stepping would write the parameters after the call has returned.
            if subject.writes:
                self._pool.finish(gather)
            self._pool.call_off()
        if gather.failures:
            # Otherwise timing would decide which of several failures is raised.
            self._receive_other_failures(gather)
            raise gather.failures.first()
        subject.is_proven = True
        if kind is Kind.TOTAL:
            self.results.leave_unwritten()
        self._pool.look(gather)  # the last reports of those that were called off
        gather.abandon(self._pool.workers.values())
        for worker in self._pool.workers.values():
            worker.stderr.pass_on()
        pattern = Pattern(gather.answers(), cut.chunks, self._stragglers.measured)
        if not self._stragglers and self._pool.is_settled:
            repeats.settled_at = self._pool.stamp
            if self._can_be_repeated(gather, kind, pattern):
                repeats.found[kind] = Repeat(self._pool, self._board, kind, cut, runs, pattern)
        return Answers(pattern)

    def _can_be_repeated(self, gather: ProcessGather, kind: Kind, pattern: Pattern) -> bool:
        """Tell whether an evaluation went exactly as planned, and its results are numbers in memory that stays."""
        if (
            kind is Kind.COLLECT
            or (kind is Kind.EVALUATE and self.results.keeps_outputs)
            or self._subjects[True].writes
        ):
            return False
        return not pattern.stragglers and gather.went_as_planned and all(answer.is_silent for answer in pattern.answers)

    def _prepare(self, cut: Cut, order: Order) -> None:
        """Have workers know all that an order needs."""
        is_task = order.kind in TASKS
        self._enter()
        settings = self._ambient.torch_settings()
        self._pool.tell_of("torch", settings, lambda: [call(Activity.TORCH, Session.set_torch, settings)])
        set_cut = Session.cut_task if is_task else Session.set_cut
        self._pool.tell_of("task_cut" if is_task else "cut", cut, lambda: [call(Activity.CUT, set_cut, cut)])
        self._subjects[is_task].cut = cut
        if not is_task:
            self.results.begin_evaluation()

    def _gather(self, gather: ProcessGather, subject: Subject, meanwhile: Meanwhile | None) -> None:
        """Assign and gather until each chunk has a result, or one cannot have any."""
        pool, scheduler, ledger = self._pool, gather.scheduler, gather.scheduler.ledger
        proven = subject.is_proven
        directed, late = -1, math.inf
        # One turn: assign the chunks that can be assigned, let the caller do its own work once, wait for the first
        # event.
        while ledger.missing and not gather.failures:
            # Directing looks at every worker: do it only if something can have changed, or a chunk has become late.
            if directed != pool.changes or not scheduler.all_begun or time.monotonic() >= late:
                directed = pool.changes
                self._direct(gather)
                # The end of a worker matters only if there is something left for it.
                self._board.wake_by_each(not scheduler.all_begun)
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            late = scheduler.next_late(gather.estimate)
            pool.pump(gather, late)
            proven = proven or gather.has_reports
            # Two crashes before anything has succeeded: the program, a hook or the function writes memory that is
            # read-only. Each chunk would end workers, until none is left, and none be poison.
            if not proven:
                explain(gather.gone, "function" if gather.is_task else "first forward")
            if gather.poison is not None:
                raise gather.poison

    def _enter(self) -> None:
        """Begin a call: leave the cores to the workers, and handle what they have said since the last one."""
        end_spinning()
        if self._stragglers:
            self._pool.look(self._stragglers)
        self._pool.enter()

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
            else:
                worker.page.limit(command.last)
        for worker in asked:  # after all were queued: the first worker to wake up may take this process's core
            worker.channel.flush()
        faults.point("parent.dispatched")

    def _order(self, worker: WorkerProcess, gather: ProcessGather, run: Assign) -> None:
        """Give the worker an order for this run, after memory to sum in."""
        cut, setup = gather.cut, self._setup
        if gather.is_task:
            worker.make_totals()
        else:
            rows = most_held(run.first, run.last, cut.chunks, gather.held(worker))
            terms, device = len(setup.program.loss_fns), setup.flat.vector.device
            worker.make_room(rows, setup.flat.layout, setup.buffers.size, terms, device)
        leniency = gather.scheduler.leniency(run.first)
        worker.order(next(self._numbers), gather.order, run.first, run.last, self._start, leniency)

    def _receive_other_failures(self, gather: ProcessGather) -> None:
        """Wait a little for other workers' replies, so that the same failure is raised each time."""
        deadline = time.monotonic() + OTHERS
        while time.monotonic() < deadline and gather.scheduler.workers:
            self._pool.pump(gather, deadline)

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """See `Backend.run`."""
        with sending("the function or an argument", function, *arguments):
            message = call(Activity.FUNCTION, Session.run, function, *arguments)
        self._repeats.settled_at = -1  # also if this is interrupted
        self._enter()
        return run_everywhere(self._pool, message)

    def stop(self) -> None:
        """Make a call that waits for workers raise `BatchoptError` soon."""
        self._pool.stop()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()
        self._program.close()
        self._setup.flat.release(self)
        vars(self).pop("_board", None)  # its memory; a closed group may live on
        # This object and its pool refer to each other: memory is released now, not when Python's collector runs.
        self._repeats, self._stragglers, self.results = Repeats(), Stragglers({}), Results(self._pool)
