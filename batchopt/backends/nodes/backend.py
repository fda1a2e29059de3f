"""The backend of nodes that this process places and controls.

    parent (this file)                      ║ network     a node (node.Node)
                                            ║
    Command: fields it lacks, an order    ──╫──►  its share, by worker processes of that machine
    X                                     ──╫──►  once per node, along a tree
    losses, times, partials   ◄─────────────╫───  a sum in the order of the tree of chunks (team.Team)

What must hold:

- A node is sent what it lacks (`wanted`), at the latest with the order that needs it: of samples only those of its
  share, and those once. A new node, a lost one, and an interrupt while sending are therefore one case.
- What a node is believed to have is noted before it is sent. If sending fails, or is interrupted, the generation ends:
  in the next one each node says what it has taken.
- If a node is lost, the remaining ones form another group, and the evaluation is made again: with the same bits, and
  counted once. Nothing outside of `_until_done` knows of it.

`members` decides who belongs to the group, and `team` is what they do together.
"""

from __future__ import annotations

import math
import pickle
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from batchopt._mapreduce.answers import Answer
from batchopt._program.unpicklable import check_module, sending
from batchopt.backends.base import Meanwhile, Mode, Prepared, Run, Setup, WorkerInfo
from batchopt.backends.nodes.members import Members
from batchopt.backends.nodes.node import Command
from batchopt.backends.nodes.placing import Placer
from batchopt.backends.nodes.result import NOTHING, WHOLE
from batchopt.backends.nodes.roster import Member
from batchopt.backends.nodes.team import Evaluation, Team, TeamBackend
from batchopt.backends.nodes.transfer import KnownBatch, ProgramVersions, SentRows, unpacked
from batchopt.backends.nodes.wanted import NodeMode, NodeSetup, NodeWanted, StepStart, TaskStart, to_send
from batchopt.backends.nodes.wire import wire_of
from batchopt.errors import NodeLostError
from batchopt_workers.batch.batch import Batch
from batchopt_workers.evaluate.program import Program
from batchopt_workers.functions.forms import Column
from batchopt_workers.functions.task import Task
from batchopt_workers.life.torch_settings import TorchSettings, module_hooks
from batchopt_workers.wire.memory import octets
from batchopt_workers.wire.orders import TASKS, Cut, Order
from batchopt_workers.wire.packing import dumps, pack

T = TypeVar("T")


class TaskSamples(NamedTuple):
    """The samples that the current task is about: those of its own batch or, if that is None, those of the loaded batch
    from `offset` on, of which each node needs all if it is `whole`."""

    batch: Batch | None
    offset: int
    whole: bool


class NodesBackend(TeamBackend):
    """`setup.workers` workers on nodes. They end with this object, with this process, or at `close`."""

    @classmethod
    def check(cls, setup: Setup) -> None:
        check_module(setup.program.module)

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._batch: KnownBatch | None = None  # the loaded one
        self._subject: TaskSamples | None = None
        self._x: torch.Tensor | None = None  # as it was sent last
        self._starts = 0  # of the module's state, as the nodes have it
        self._sent = 0  # commands
        with sending("`precode`", setup.precode):
            self._precode = dumps(setup.precode)
        self._versions = ProgramVersions(setup.program, setup.parameters)
        self._want = NodeWanted(program=self._versions.latest, mode=NodeMode())
        placer = self.placer(setup)
        workers = setup.workers or max(sum(room.workers for room in placer.rooms()), 1)
        self._restarts = setup.restarts_of(workers)
        self._members = Members(placer, setup.timeout, self._restarts, setup.fixed_bits, wire_of(setup))
        try:
            self.resize(workers)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def placer(self, setup: Setup) -> Placer:
        """Return what starts nodes."""

    def threads(self) -> int:
        """Return the number of threads of each worker."""
        return self._setup.threads or 1

    def devices(self, workers: int) -> tuple[torch.device, ...] | None:
        """Return the devices of a node's workers; None: its CPU."""
        return None

    @property
    def workers(self) -> list[WorkerInfo]:
        return list(self._members.roster.infos)

    def resize(self, workers: int) -> None:
        self._members.resize(workers, self._start)
        self._meet("meet")

    def room(self) -> int:
        return self._members.roster.room()

    # ---- what nodes must have

    def set_mode(self, mode: Mode) -> None:
        before = self._setup.program
        if not mode.is_of(before):
            self._follow(replace(before, prehook=mode.prehook, posthook=mode.posthook))
        wanted = NodeMode(mode.hooked, mode.outputs)
        if self._want.mode != wanted:
            self._want = self._want._replace(mode=wanted)

    def _follow(self, program: Program | None = None) -> None:
        """Take over the user's current program, or this one. Raises `TypeError` if it cannot be sent."""
        program = program or self._setup.program
        if program.module_hooks != module_hooks():
            program = replace(program, module_hooks=module_hooks())
        self._versions.follow(program)
        self._setup = replace(self._setup, program=program)
        self._starts = self._setup.buffers.starts
        self._want = self._want._replace(program=self._versions.latest)

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        SentRows.of(batch, range(0)).since(None)  # can it be sent?
        if ahead:  # the user may overwrite it while the previous batch is still being sent
            return KnownBatch(unpacked(pack(batch)))
        return KnownBatch.after(self._batch, batch)

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        assert isinstance(prepared, KnownBatch)
        self._members.gather(self._start)
        self._follow()
        self._batch, self._want = prepared, self._want._replace(step=StepStart(weights))

    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        with sending("the function", task.function):
            packed = pack(task, self._setup.parameters)
        before, offset = self._versions.latest.data, 0
        if batch is not None:
            SentRows.of(batch, range(0)).since(None)
        if follow:
            self._follow()
        if batch is None:
            assert self._batch is not None
            offset = self._batch.batch.numbering.position(task.term or 0, range(1)).start
        self._subject = TaskSamples(batch, offset, task.whole)
        self._want = self._want._replace(task=TaskStart(packed, batch is not None))
        return self._versions.latest.data is not before

    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        assert self._members.team is not None
        return self._members.team.take_rows()

    def end_task(self) -> None:
        self._subject, self._want = None, self._want._replace(task=None)

    def _wanted(self, member: Member, order: Order | None = None, runs: Sequence[Run] = ()) -> NodeWanted:
        """Return all that a node must have, with the samples for its `runs` of an order. What it has already of that is
        the same object."""
        mine = [run for run in runs[member.ranks.start : member.ranks.stop] if run[0] < run[1]]
        loaded, own = self._samples(order, mine)
        have, batch, task = member.have, self._batch, self._subject
        return self._want._replace(
            setup=have.setup,
            world=member.world(self._members.roster.world),
            rows=None if batch is None else SentRows.of(batch.batch, loaded, have.rows),
            task_rows=None if task is None or task.batch is None else SentRows.of(task.batch, own, have.task_rows),
        )

    def _samples(self, order: Order | None, runs: Sequence[Run]) -> tuple[range, range]:
        """Return the samples that these runs need of the loaded batch, and of the task's own."""
        nothing = range(0)
        if order is None or not runs:
            return nothing, nothing
        task, cut = self._subject, self._want.task_cut if order.kind in TASKS else self._want.cut
        assert cut is not None
        samples = range(cut.bounds[min(first for first, _ in runs)], cut.bounds[max(last for _, last in runs)])
        if task is None or order.kind not in TASKS:
            return samples, nothing
        if task.whole and self._batch is not None:
            return range(self._batch.batch.size), samples
        if task.batch is not None:
            return nothing, samples
        return range(task.offset + samples.start, task.offset + samples.stop), nothing

    def _starting(self, member: Member) -> NodeWanted:
        """Return what a node must have to start its workers, or has already."""
        if member.have.setup is not None:
            return member.have
        setup, want, world = self._setup, self._want, member.world(self._members.roster.world)
        node_setup = NodeSetup(
            setup.flat.layout,
            self._precode,
            setup.fixed_bits,
            setup.timeout,
            math.ceil(self._restarts * len(world.ranks) / world.workers),
            self.threads(),
            self.devices(len(world.ranks)),
            setup.compression,
        )
        return NodeWanted(node_setup, world, want.torch, want.program)

    # ---- commands

    def _send(
        self, team: Team, what: str, *arguments: Any, wanted: Callable[[Member], NodeWanted] | None = None
    ) -> None:
        """Send all nodes a command, with the fields that each of them lacks."""
        settings, present = TorchSettings.current(), self._members.roster.present
        if settings != self._want.torch:
            self._want = self._want._replace(torch=settings)
        x, written = self._x, None
        if what == "evaluate":
            if x is None or not torch.equal(octets(x), octets(self._setup.flat.vector)):  # -0 is not 0
                x = self._x = self._setup.flat.vector.clone()
            if any(member.x is not x for member in present):
                written = x if x.nbytes <= WHOLE else NOTHING
        wants = [(wanted or self._wanted)(member) for member in present]
        self._sent += 1
        commands = {
            place: Command(what, self._sent, [*to_send(member.have, want)], written, arguments)
            for place, (member, want) in enumerate(zip(present, wants, strict=True), 1)
        }
        try:
            for member, want in zip(present, wants, strict=True):
                member.sent, member.have = self._sent, want
                member.x = member.x if written is None else x
            team.group.give(commands)
            if x is not None and written is NOTHING:
                team.group.broadcast(x)
        except BaseException:
            team.group.close()
            raise

    def _ask(
        self, team: Team, what: str, *arguments: Any, wanted: Callable[[Member], NodeWanted] | None = None
    ) -> list[Any]:
        """Send all nodes a command, and return their answers."""
        self._send(team, what, *arguments, wanted=wanted)
        return team.exchange()[1:]

    def _start(self, team: Team) -> None:
        """Have new nodes start their workers, all at once."""
        self._ask(team, "meet", wanted=self._starting)

    def _until_done(self, attempt: Callable[[Team], T]) -> T:
        """Return what an attempt returns, made again by the remaining nodes each time that one is lost: results, and
        their bits, do not depend on which they are."""
        while True:
            team = self._members.gather(self._start)
            try:
                return attempt(team)
            except NodeLostError:
                self._members.end_generation()
            except Exception:  # all of them have answered
                self._members.forget(team.behind)
                raise
            except BaseException:  # an interrupt: the next answers might be those to this attempt
                team.group.close()
                raise

    def _meet(self, what: str, *arguments: Any) -> list[Any]:
        """Send a command to all living nodes, and return their answers."""
        return self._until_done(lambda team: self._ask(team, what, *arguments))

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        with sending("the function or an argument", function, *arguments):
            message = dumps((function, arguments))
        return [pickle.loads(value) for of_node in self._meet("run", message) for value in of_node]

    # ---- evaluating

    def _evaluate(
        self, cut: Cut, order: Order, runs: Sequence[Run], meanwhile: Meanwhile | None, compressed: int | None = None
    ) -> list[Answer]:
        if self._setup.buffers.starts != self._starts:
            self._follow()
        if order.kind in TASKS:
            self._want = self._want._replace(task_cut=cut)
        elif self._want.cut != cut:
            self._want = self._want._replace(cut=cut)

        def attempt(team: Team) -> list[Answer]:
            nonlocal meanwhile
            now = order._replace(evaluation=self._sent + 1)  # sums of a failed attempt do not belong to the next one
            evaluation = Evaluation(now, team.shares(runs, cut, compressed is None), compressed)
            self._send(team, "evaluate", *evaluation, wanted=lambda member: self._wanted(member, now, evaluation.runs))
            busy, meanwhile = meanwhile, None
            return team.evaluate(cut, evaluation, meanwhile=busy)

        return self._until_done(attempt)

    # ---- the end

    def stop(self) -> None:
        self._members.stop()

    def close(self) -> None:
        self._members.close()
