"""The process backend: worker processes on this machine, over shared memory.

    parent (this file)                      ║ process     worker (batchopt_workers.loop)
                                            ║ boundary
    CALL load(...), set_cut(...)  ── pipe ──╫──────────►  maps the blocks, cuts the batch
    EVALUATE order, 37 bytes      ── pipe ──╫──────────►  forward/backward at X
    MULTIPLY order, 37 bytes      ── pipe ──╫──────────►  the same, and backward along v
    X           block "parameters" ═════════╬═══════════  the module's parameters are views of it
    v           block "direction" ══════════╬═══════════  what their Hessian is multiplied with
    partials    block "rows", one a worker ═╬═══════════  gradients are summed there
    answers     ◄── pipe ───────────────────╫───────────  REPORT after a chunk, DONE; or FAILED, as text

Each worker has one private socket pair. Descriptors of later blocks travel over the same pair, so nothing ever listens.
A pipe message orders memory: a row is read only after it was reported, and is not written again before the next report.
Who evaluates what is decided in `dispatch`; processes are kept alive by `pool`.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from batchopt._data.arguments import read_parallelize
from batchopt._machine.cores import share_cores, usable_cores
from batchopt._mapreduce.answers import Answer
from batchopt.backends.base import Backend, Meanwhile, Prepared, Setup, WorkerInfo
from batchopt.backends.patience import OTHERS, STARTUP, UNKNOWN
from batchopt.backends.process.forkserver import anticipate, worker_environment
from batchopt.backends.process.gather import ProcessCalls, ProcessGather, ProcessProbe
from batchopt.backends.process.overdue import Overdue, Pace
from batchopt.backends.process.pool import Pool
from batchopt.backends.process.scheduler import Assign, Limit
from batchopt.backends.process.shared_program import SharedProgram
from batchopt.backends.process.spawn import preparation
from batchopt.backends.process.surroundings import check_workers
from batchopt.backends.process.worker import Activity, Asked, Call, Child, call, call_with_block
from batchopt.backends.sendable import check_parameters_are_only_read, sending
from batchopt.errors import WorkerLostError
from batchopt_workers import faults
from batchopt_workers.batch import Batch
from batchopt_workers.memory import SharedBlock
from batchopt_workers.messages import ORDERS, Cut, Kind, Order
from batchopt_workers.module_hooks import module_hooks
from batchopt_workers.numbering import Numbering
from batchopt_workers.packing import pack
from batchopt_workers.rows import Rows, rows_nbytes
from batchopt_workers.session import Session
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.tree import most_held
from batchopt_workers.worker import Hook

# Seconds that a worker stays awake after a short order, where each has a core.
AWAKE = 5e-4
# Once it is known how long something should take, a worker that takes so many times as long counts as hung, but not
# before so many seconds.
FACTOR, FLOOR = 20.0, 30.0

T = TypeVar("T")


def _place(standard_error: str) -> str:
    """Where a process ended, by what Python's faulthandler wrote of its own thread: the last of the user's calls."""
    _, found, stack = standard_error.rpartition("(most recent call first):\n")
    calls = [line.strip() for line in stack.splitlines() if line.startswith("  File ")]
    return f"at {'; called from '.join(calls[:3])}" if found and calls else "nobody knows where"


@dataclass(frozen=True)
class Placed(Prepared):
    """A batch in shared memory."""

    slot: int
    memory: SharedBlock
    load: Call


class ProcessBackend(Backend):
    """`setup.workers` processes. They end with this object, with this process, or at `close`."""

    local = True

    @classmethod
    def read_workers(cls, parallelize: Any) -> int | None:
        workers = read_parallelize(parallelize)
        if workers > 1:
            check_workers(workers)
        return workers

    @classmethod
    def check(cls, setup: Setup) -> None:
        if setup.flat.block is None:
            raise ValueError(
                f"parameters are on {setup.flat.vector.device}; workers run on cpu: call module.cpu(), and name other "
                "devices of the workers with devices=[...]; or use parallelize=1"
            )
        check_parameters_are_only_read(setup.program.module)

    @classmethod
    def anticipate(cls, setup: Setup) -> None:
        assert setup.workers is not None
        anticipate(setup.workers, setup.threads)

    def __init__(self, setup: Setup) -> None:
        assert setup.workers is not None and setup.flat.block is not None
        self._device = setup.flat.vector.device
        self._setup = setup
        self._timeout = setup.timeout
        self._paces: dict[Kind, dict[int, float]] = {kind: {} for kind in ORDERS}  # seconds a sample, by rank
        self._overdue = Overdue(self._paces)
        self._numbering = Numbering((), ())
        self._late: Mapping[int, Pace] = {}  # what the last evaluation has shown of workers that were late
        # memory of two batches, of which the workers read the one at `_slot`; and what they were told to map
        self._slots: list[SharedBlock | None] = [None, None]
        self._slot = 0
        self._attached: dict[str, SharedBlock] = {}
        self._direction: torch.Tensor | None = None
        self._size = setup.workers
        self._program = setup.program
        self._shared = SharedProgram(setup.program, setup.parameters)
        self._attached_program: SharedBlock | None = None
        self._hooked = True
        self._proven = False  # whether a forward of this program has come to its end
        self._pool = Pool(self._start, setup.restarts_of(setup.workers), self._allowance)
        self._tell_start(setup, setup.flat.block)
        self._tell_program()
        try:
            self.resize(setup.workers)
        except BaseException:
            self.close()
            raise

    def _tell_start(self, setup: Setup, parameters: SharedBlock) -> None:
        """What a worker must know before it is given the program."""
        precode: Call | None = None
        if setup.precode is not None:
            with sending("`precode`", setup.precode):
                precode = call(Activity.PRECODE, Session.run, setup.precode)
        self._weights = (1.0,) * len(setup.program.loss_fns)
        environment = worker_environment(max(self._threads()))
        self._pool.tell("process", call(Activity.STARTING, Session.prepare, environment, preparation()))
        if setup.devices is not None:
            self._pool.tell("devices", call(Activity.STARTING, Session.use, self._by_rank(setup.devices)))
        self._torch = self._torch_settings()
        self._pool.tell("torch", call(Activity.STARTING, Session.set_torch, self._torch))
        if precode is not None:
            self._pool.tell("precode", precode)
        self._pool.tell(
            "parameters",
            call_with_block(Activity.INSTALLING, Session.attach, "parameters", parameters),
            call(Activity.INSTALLING, Session.use_parameters, setup.flat.layout),
        )

    def _tell_program(self) -> None:
        """Give the workers the program, and what they forget when they are given one."""
        source, block = self._shared.source, self._shared.block
        packed = source.packed
        examine = self._attached_program is not block
        if examine:
            self._pool.tell("program", call_with_block(Activity.INSTALLING, Session.attach_copy, "program", block))
            self._attached_program = block
        self._pool.tell(
            "module",
            call(Activity.INSTALLING, Session.install, packed.data, packed.placements, source.read_only, examine),
        )
        for topic in ("hooks", "weights", "direction", "batch"):
            self._pool.tell_again(topic)
        for child in self._pool.children.values():
            child.cut = None
            if child.rows is not None and child.rows.changes != self._setup.buffers.size:
                child.rows = None

    def _follow(self) -> None:
        """Have the workers know what the user has changed since."""
        if self._program.module_hooks != self._module_hooks():
            self._program = replace(self._program, module_hooks=self._module_hooks())
        if self._shared.follow(self._program):
            self._tell_program()

    def _torch_settings(self) -> TorchSettings:
        """Those that are in force where an evaluation is asked for."""
        return TorchSettings.current()

    def _module_hooks(self) -> Mapping[str, Any]:
        """Those that are in force where an evaluation is asked for."""
        return module_hooks()

    def _follow_torch(self) -> None:
        settings = self._torch_settings()
        if settings != self._torch:
            self._torch = settings
            self._pool.tell("torch", call(Activity.TORCH, Session.set_torch, settings))

    @property
    def workers(self) -> list[WorkerInfo]:
        return self._pool.roster.infos

    def _by_rank(self, values: Sequence[T]) -> dict[int, T]:
        """Of each worker, by its rank among all."""
        return dict(zip(self._setup.ranks or range(len(values)), values, strict=True))

    def _threads(self) -> list[int]:
        return share_cores(self._size, self._setup.threads)

    def _tell_world(self, workers: int) -> None:
        self._size = workers
        threads = self._threads()
        awake = AWAKE if sum(threads) <= usable_cores() else 0.0
        world = self._setup.world or workers
        self._pool.tell("world", call(Activity.STARTING, Session.set_world, world, self._by_rank(threads), awake))

    def _start(self, rank: int) -> Child:
        number = self._setup.ranks[rank] if self._setup.ranks else rank
        return Child(rank, number, self._setup.world or self._size, max(self._threads()))

    def _allowance(self, child: Child, asked: Asked) -> float:
        if asked.activity is Activity.STARTING:
            return STARTUP
        if asked.activity is Activity.FUNCTION:
            return self._timeout or math.inf
        if asked.order is None or child.cut is None:
            return max(self._timeout or UNKNOWN, STARTUP)
        if self._timeout is not None:
            return self._timeout
        bounds = child.cut.bounds
        largest = max(bounds[i + 1] - bounds[i] for i in range(asked.order.first, asked.order.last))
        paces = self._paces[asked.order.kind]
        pace = paces.get(child.rank, max(paces.values(), default=None))
        return asked.patience * (UNKNOWN if pace is None else max(FLOOR, FACTOR * pace * largest))

    def resize(self, workers: int) -> None:
        host = socket.gethostname()
        kept = {info.rank: info for info in self._pool.roster.infos if not info.lost}
        devices = self._setup.devices or (self._device,) * workers
        infos = [kept.get(rank, WorkerInfo(rank, 0, host, devices[rank], alive=False)) for rank in range(workers)]
        before = self._pool.roster.infos
        try:
            self._tell_world(workers)
            self._pool.resize(infos)
        except BaseException:
            if before:
                self._tell_world(len(before))
            self._pool.resize(before)
            raise

    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        before, self._program = self._program, replace(self._program, prehook=prehook, posthook=posthook)
        try:
            self._follow()
        except BaseException:
            self._program = before
            raise

    def use_hooks(self, hooked: bool) -> None:
        if hooked != self._hooked:
            self._hooked = hooked
            self._pool.tell("hooks", call(Activity.HOOKS, Session.use_hooks, hooked))

    def include_state(self, names: Collection[str]) -> None:
        self._program = replace(self._program, state=self._program.state | set(names))
        self._follow()

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        with sending("the batch", batch):
            packed = pack(batch)
        # a worker reads the present batch only while it evaluates
        is_read = ahead or not all(child.free for child in self._pool.children.values())
        slot = 1 - self._slot if is_read else self._slot
        memory = self._slots[slot]
        # one that is late may still read the batch before the present one
        late = slot != self._slot and any(child.is_behind("batch") for child in self._pool.children.values())
        if memory is None or packed.nbytes > memory.nbytes or late:
            memory = self._slots[slot] = SharedBlock.create(packed.nbytes)
        packed.place(memory)
        load = call(Activity.BATCH, Session.load, f"batch {slot}", packed.data, packed.placements)
        return Placed(batch, slot, memory, load)

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        assert isinstance(prepared, Placed)
        self._enter()
        self._follow()
        if weights != self._weights:
            self._pool.tell("weights", call(Activity.BATCH, Session.set_weights, weights))
            self._weights = weights
        self._numbering = prepared.batch.numbering
        self._slot, name = prepared.slot, f"batch {prepared.slot}"
        if self._attached.get(name) is not prepared.memory:
            self._attached[name] = prepared.memory
            self._pool.tell(name, call_with_block(Activity.BATCH, Session.attach_copy, name, prepared.memory))
        self._pool.tell("batch", prepared.load)

    def evaluate(self, cut: Cut, orders: Sequence[Order | None], meanwhile: Meanwhile | None = None) -> list[Answer]:
        self._enter()
        self._follow_torch()
        round = ProcessGather(cut, self._numbering, orders, self._paces, self._overdue)
        try:
            directed, late = -1, math.inf
            while round.dispatch.missing and not round.failures:
                if directed != self._pool.changes or not round.dispatch.all_begun or time.monotonic() >= late:
                    directed, late = self._pool.changes, math.inf
                    self._direct(round)
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                if late == math.inf and len(round.dispatch.workers) < len(self._pool.children):
                    late = round.dispatch.next_late(round.estimate)
                self._pool.pump(round, late)
                self._turn(round)
                self._proven = self._proven or round.has_reports
                self._explain(round.gone)
                if round.poison is not None:
                    raise round.poison
        finally:
            self._pool.call_off()
            self._turn(None)
        if round.failures:
            self._hear_others(round)
            raise round.failures.first()
        self._proven = True
        self._hear_the_late(round)
        self._late = round.leave(self._pool.children.values())
        for child in self._pool.children.values():
            child.stderr.pass_on()
        return round.answers()

    @property
    def late(self) -> Mapping[int, tuple[int, float]]:
        return self._late

    def _enter(self) -> None:
        """Take in what was said since the last call."""
        for child in self._overdue.workers:  # before the pool does, to whom it is of no interest
            if self._pool.children.get(child.rank) is child:
                child.channel.drain()
                self._pool.hear(child, self._overdue)
        self._pool.enter()

    def _explain(self, gone: Sequence[Child]) -> None:
        """Raise `WorkerLostError` where the first forwards of a program end workers by a fault of memory access, one after
        the other, and none has come to its end: the next ones would end so, too."""
        faults = [child for child in gone if not child.verdict and child.process.exitcode == -signal.SIGSEGV]
        for child in faults[1:]:
            if not self._proven:
                raise WorkerLostError(
                    f"{child.process.name} was ended by SIGSEGV (a fault of memory access) in the first forward of this module, "
                    f"{_place(child.stderr.tail)}. Workers only read the parameters, and code that writes them there ends so: if "
                    "the first forward makes or writes parameters (lazy initialisation, variational strategies), call the module "
                    "once before it is given to batchopt; if each one does, or a hook, use parallelize=1 or write to copies"
                )

    def _turn(self, round: ProcessGather | None) -> None:
        """Something has happened in this evaluation; or in none, or it is over."""

    def set_direction(self, direction: torch.Tensor) -> None:
        if self._direction is None:
            layout = self._setup.flat.layout
            block = SharedBlock.create(layout.size * layout.dtype.itemsize)
            attach = call_with_block(Activity.MEMORY, Session.attach, "direction", block)
            self._pool.tell("direction", attach, call(Activity.MEMORY, Session.set_direction))
            self._direction = block.tensor(layout.dtype, (layout.size,))
        self._direction.copy_(direction)

    def _direct(self, round: ProcessGather) -> None:
        """Give those that have nothing to do something to do."""
        idle = [child.rank for child in self._pool.available]
        if not idle:
            return
        asked = []
        for command in round.dispatch.decide(idle, round.estimate, time.monotonic()):
            child = self._pool.children[command.worker]
            try:
                if isinstance(command, Limit):
                    child.limit(command.last)
                else:
                    self._order(child, round, command)
                    asked.append(child)
            except OSError:  # gone; the pool will find out
                pass
        for child in asked:  # one right after the other: a worker that wakes up may take this process's core
            with suppress(OSError):
                child.flush()
        faults.point("parent.dispatched")

    def _order(self, child: Child, round: ProcessGather, run: Assign) -> None:
        if child.cut is not round.cut:
            child.ask(call(Activity.CUT, Session.set_cut, round.cut))
            child.cut = round.cut
        self._make_room(child, most_held(run.first, run.last, round.cut.chunks, round.held(child)))
        child.order(round.order(child, run), round.dispatch.patience(run.first))

    def _make_room(self, child: Child, needed: int) -> None:
        rows = 0 if child.rows is None else len(child.rows)
        if rows >= needed:
            return
        layout, changes, more = self._setup.flat.layout, self._setup.buffers.size, needed - rows
        block = SharedBlock.create(rows_nbytes(layout, changes, more))
        child.ask(call_with_block(Activity.MEMORY, Session.attach, "rows", block))
        child.ask(call(Activity.MEMORY, Session.add_rows, more))
        if child.rows is None:
            child.rows = Rows(layout, changes, more, block, self._device)
        else:
            child.rows.grow(more, block)

    def _hear_the_late(self, round: ProcessGather) -> None:
        """Take in what workers reported that are still at it.

        They were told to stop. So one that is at a chunk now will begin no other, and has sent its report of the chunk
        before: with that taken in, no row that counts is written any more.
        """
        for child in list(self._pool.children.values()):
            if not child.idle:
                child.channel.drain()
                self._pool.hear(child, round)

    def _hear_others(self, round: ProcessGather) -> None:
        """Wait a little for what other workers say, so that the same failure is raised each time."""
        deadline = time.monotonic() + OTHERS
        while time.monotonic() < deadline and round.dispatch.workers:
            self._pool.pump(round, deadline)

    def probe(self, cut: Cut, order: Order) -> dict[int, float]:
        self._enter()
        self._follow_torch()
        probe = ProcessProbe(order.evaluation, self._numbering)
        try:
            for child in self._pool.available:
                try:
                    child.ask(call(Activity.CUT, Session.set_cut, cut))
                    child.cut = cut
                    self._make_room(child, most_held(order.first, order.last, cut.chunks))
                    child.order(order)
                    child.flush()
                except OSError:
                    continue
                probe.asked(child)
            probe.collect(lambda until: self._pump_probe(probe, until))
        finally:
            self._pool.call_off()
        if probe.failures:
            raise probe.failures.first()
        return probe.seconds

    def _pump_probe(self, probe: ProcessProbe, until: float) -> None:
        self._pool.pump(probe, until)
        self._turn(None)
        self._proven = self._proven or bool(probe.seconds)
        self._explain(probe.gone)

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        with sending("the function or an argument", function, *arguments):
            message = call(Activity.FUNCTION, Session.run, function, *arguments)
        self._enter()
        self._pool.wait()
        calls = ProcessCalls()
        for _, child in sorted(self._pool.children.items()):
            calls.asked(child)
            with suppress(OSError):  # gone; the pool will find out
                child.ask(message)
        return calls.collect(lambda until: self._pool.pump(calls, until))

    def stop(self) -> None:
        self._pool.stop()

    def close(self) -> None:
        self._pool.close()
        self._shared.close()
        # now, not when Python's collector finds that this object and its pool know each other
        self._slots, self._direction = [None, None], None
        self._attached.clear()
