"""The backend of nodes that this process places and controls.

    parent (this file)                      ║ network     a node (node.Node)
                                            ║
    NodeCommand: updates, orders          ──╫──►  its share, by worker processes of that machine
    X                                     ──╫──►  once per node, along a tree
    losses, times, partials   ◄─────────────╫───  a sum in the order of the tree of chunks (team.Team)

A node is sent the samples of its share, once. If one is lost, the remaining nodes form another group, and the
evaluation is made again: with the same bits, and counted once. This file decides what is sent to which node; `members`
decides who belongs to the group.
"""

from __future__ import annotations

import math
import pickle
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from batchopt._mapreduce.plan import runs, split_batch
from batchopt._mapreduce.reduce import Answers, Pattern
from batchopt._program.flat_module import Gradient
from batchopt._program.unpicklable import check_module, sending
from batchopt.backends.base import CompressingBackend, Meanwhile, Mode, Prepared, Run, Setup, WorkerInfo
from batchopt.backends.nodes.contribution import GradientResiduals, Round
from batchopt.backends.nodes.desired import DesiredState, StepStart, TaskStart
from batchopt.backends.nodes.fixed_order import WHOLE
from batchopt.backends.nodes.members import Member, Members
from batchopt.backends.nodes.node import NodeCommand, NodeSession, NodeSetup, Update
from batchopt.backends.nodes.placing import Placer, aligned
from batchopt.backends.nodes.team import Team
from batchopt.backends.nodes.transfer import KnownBatch, PackedBytes, ProgramVersions, SentRows, copied, update_for
from batchopt.errors import NodeLostError
from batchopt_workers.data.batch import Batch
from batchopt_workers.data.memory import octets
from batchopt_workers.data.packing import dumps, pack
from batchopt_workers.map.program import Program
from batchopt_workers.process.messages import TASKS, Cut, Order
from batchopt_workers.process.torch_settings import TorchSettings, module_hooks
from batchopt_workers.tasks.forms import Column
from batchopt_workers.tasks.task import Task


class NodesBackend(CompressingBackend):
    """`setup.workers` workers on nodes. They end with this object, with this process, or at `close`."""

    @classmethod
    def check(cls, setup: Setup) -> None:
        check_module(setup.program.module)

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._program, self._desired = setup.program, DesiredState()
        self._rows: list[torch.Tensor] = []
        self._direction: torch.Tensor | None = None
        self._x: torch.Tensor | None = None  # as the nodes have it
        self._resets = 0  # of the module's state, as the nodes have it
        self._attempts = 0  # at evaluations
        self._rounds = 0  # evaluations with compressed gradients
        with sending("`precode`", setup.precode):
            self._precode = dumps(setup.precode)
        self._versions = ProgramVersions(setup.program, setup.parameters)
        placer = self.placer(setup)
        workers = setup.workers or max(sum(room.workers for room in placer.rooms()), 1)
        self._restarts = setup.restarts_of(workers)
        self._members = Members(placer, setup.timeout, self._restarts, 0, setup.fixed_bits)
        self._members.lost = self._lost
        if setup.compression is not None:
            layout = setup.flat.layout
            self._members.residuals = GradientResiduals(setup.compression, layout.size, layout.sum_dtype)
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
        return list(self._members.infos)

    def resize(self, workers: int) -> None:
        members = self._members
        if workers < members.world:
            members.shrink(workers)
        elif workers > members.world:
            before = members.world
            members.grow(workers)
            try:
                members.gather(self._start, insists=True)
            except BaseException:
                members.shrink(before)
                raise
        self._meet("meet")

    def room(self) -> int:
        return self._members.room()

    def _lost(self, member: Member) -> None:
        if self._rounds and self._setup.compression is not None and self._setup.compression.keeps_residual:
            _warn_of_residual(member.name)

    # ---- the nodes' state

    def _start(self, team: Team) -> None:
        """Have new nodes start their workers, all at once."""
        setup = self._setup
        for member in self._members.present:
            if "started" in member.has:
                continue
            workers = len(member.ranks)
            node_setup = NodeSetup(
                setup.flat.layout,
                self._precode,
                setup.fixed_bits,
                setup.timeout,
                math.ceil(self._restarts * workers / self._members.world),
                self.threads(),
                self.devices(workers),
                TorchSettings.current(),
                setup.compression,
            )
            version = self._versions.latest if self._desired.step is None else self._desired.step.version
            arguments = (node_setup, update_for(version, None), member.ranks, self._members.world)
            member.has |= {"starting": Update(NodeSession.start.__name__, arguments), "program": version}
            member.has |= {"world": (workers, self._members.world), "torch": node_setup.torch}
            member.has["mode"] = True, False
        self._send(team, "meet", self._starting)
        team.exchange({})
        for member in self._members.present:
            member.has["started"] = member.has.pop("starting", None) or True

    def _starting(self, member: Member) -> list[Update]:
        update = member.has.get("starting")
        return [] if update is None else [update]

    def _send(self, team: Team, what: str, updates: Callable[[Member], list[Update]], *arguments: Any) -> None:
        """Send all nodes a command."""
        present = self._members.present
        vectors: dict[str, torch.Tensor] = {}
        if what == "evaluate":
            if self._x is None or not torch.equal(octets(self._x), octets(self._setup.flat.vector)):  # -0 is not 0
                self._x = self._setup.flat.vector.clone()
            vectors = {"X": self._x} if any(member.has.get("X") is not self._x for member in present) else {}
        written = {name: octets(v).numpy().tobytes() if v.nbytes <= WHOLE else None for name, v in vectors.items()}
        commands = {}
        for place, member in enumerate(present, 1):
            commands[place] = NodeCommand(what, updates(member), arguments, [*written.items()])
            member.sent += 1
        team.group.give(commands)
        for name, vector in vectors.items():
            if written[name] is None:
                team.group.broadcast(vector)
            for member in present:
                member.has[name] = vector

    def _lacking(self, member: Member, order: Order | None = None, runs: Sequence[Run] = ()) -> list[Update]:
        return self._desired.updates(member, self._members.world, order, runs)

    def _meet(self, what: str, *arguments: Any) -> list[Any]:
        """Send a command to all living nodes, and return their answers."""
        while True:
            team = self._members.gather(self._start)
            try:
                self._send(team, what, self._lacking, *arguments)
                with self._understood(team):
                    return team.exchange({})[1:]
            except NodeLostError:
                self._members.forgo()

    @contextmanager
    def _understood(self, team: Team) -> Iterator[None]:
        """Receive the nodes' answers in the body; a node that could not take over its updates is sent everything
        again."""
        try:
            yield
        finally:
            for place, member in enumerate(self._members.present, 1):
                if place in team.behind:
                    member.forget()

    def set_mode(self, mode: Mode) -> None:
        if not mode.is_of(self._program):
            self._use(replace(self._program, prehook=mode.prehook, posthook=mode.posthook, state=mode.state))
        self._desired.hooked, self._desired.outputs = mode.hooked, mode.outputs

    def _use(self, program: Program) -> None:
        """Use this program from now on. Raises `TypeError` if it cannot be sent."""
        before, self._program = self._program, program
        try:
            self._follow()
        except BaseException:
            self._program = before
            raise
        self._desired.use(self._versions.latest)

    def _follow(self) -> None:
        if self._program.module_hooks != module_hooks():
            self._program = replace(self._program, module_hooks=module_hooks())
        self._versions.follow(self._program)
        self._resets = self._setup.buffers.resets

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        before = None if self._desired.step is None else self._desired.step.batch
        SentRows.of(batch, range(0)).packed()  # can it be sent?
        if ahead:  # the user may overwrite it while the previous batch is still being sent
            return KnownBatch(copied(batch))
        return KnownBatch.after(before, batch)

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        assert isinstance(prepared, KnownBatch)
        self._members.gather(self._start)
        self._follow()
        self._desired.step = StepStart(prepared, self._versions.latest, weights)

    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        with sending("the function", task.function):
            packed = PackedBytes.of(pack(task, self._setup.parameters))
        before, offset = self._versions.latest.data, 0
        if batch is not None:
            SentRows.of(batch, range(0)).packed()
        if follow:
            self._follow()
            self._desired.use(self._versions.latest)
        if batch is None:
            assert self._desired.step is not None
            offset = self._desired.step.batch.batch.numbering.position(task.term or 0, range(1)).start
        self._desired.task = TaskStart(packed, batch, self._versions.latest, offset, task.whole)
        return self._versions.latest.data is not before

    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        found, self._rows = self._rows, []
        return found

    def end_task(self) -> None:
        self._desired.task, self._rows = None, []

    # ---- evaluating

    def evaluate(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        meanwhile: Meanwhile | None = None,
        into: Gradient | None = None,
    ) -> Answers:
        return self._together(cut, order, runs, meanwhile, None)

    def evaluate_compressed(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        taken: int,
        kept: int,
        meanwhile: Meanwhile | None = None,
    ) -> Answers:
        self._rounds += 1
        return self._together(cut, order, runs, meanwhile, Round(order.evaluation, taken, kept))

    def _together(
        self, cut: Cut, order: Order, runs: Sequence[Run], meanwhile: Meanwhile | None, compressed: Round | None
    ) -> Answers:
        if self._setup.buffers.resets != self._resets:
            self._follow()
            self._desired.use(self._versions.latest)
        self._desired.cut_so(cut, order.kind in TASKS)
        while True:
            team = self._members.gather(self._start)
            self._attempts += 1  # sums of a failed attempt do not belong to the next one
            attempt = order._replace(evaluation=self._attempts), self._shared(runs, cut, team, compressed is None)
            try:
                return self._attempt(team, cut, attempt, meanwhile, compressed)
            # The remaining nodes make the evaluation again: f and its bits do not depend on which they are.
            except NodeLostError:
                self._members.forgo()
                meanwhile = None

    def _attempt(
        self,
        team: Team,
        cut: Cut,
        attempt: tuple[Order, Sequence[Run]],
        meanwhile: Meanwhile | None,
        compressed: Round | None,
    ) -> Answers:
        self._send(team, "evaluate", lambda member: self._lacking(member, *attempt), *attempt, compressed)
        with self._understood(team):
            answers = team.evaluate(cut, *attempt, {}, meanwhile, compressed)
        self._rows = team.rows
        return Answers(Pattern(answers, cut.chunks))

    def _shared(self, shares_of: Sequence[Run], cut: Cut, team: Team, is_exact: bool) -> Sequence[Run]:
        """Return the runs, in which the chunks of workers that are not there are distributed over the others. If chunks
        are fixed, shares consist of few complete subtrees."""
        shares = [last - first for first, last in shares_of]
        total, before, start = sum(shares), list(shares), min(first for first, last in shares_of if first < last)
        here = {rank for ranks in team.ranks for rank in ranks}
        if any(share and rank not in here for rank, share in enumerate(shares)):
            weights = [float(share) if rank in here else 0.0 for rank, share in enumerate(shares)]
            weights = weights if any(weights) else [float(rank in here) for rank in range(len(shares))]
            shares = split_batch(total, weights)
        if self._setup.fixed_bits and is_exact and total == cut.chunks:
            shares = aligned(shares, [ranks for ranks in team.ranks if ranks])
        if shares == before:
            return shares_of
        return [(start + first, start + last) for first, last in runs(shares)]

    def residuals(self, evaluation: int) -> dict[int, torch.Tensor]:
        found = self._meet("tell_residuals", evaluation)
        return {i: residual for i, residual in enumerate(found) if residual is not None}

    def restore_residuals(self, evaluation: int, residuals: Mapping[int, torch.Tensor]) -> None:
        self._meet("take_residuals", evaluation, dict(residuals))

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        with sending("the function or an argument", function, *arguments):
            message = dumps((function, arguments))
        return [pickle.loads(value) for of_node in self._meet("run", message) for value in of_node]

    def stop(self) -> None:
        self._members.stop()

    def close(self) -> None:
        self._members.close()


def _warn_of_residual(name: str) -> None:
    warnings.warn(
        f"{name} was lost together with its compression residuals; resume from a checkpoint to recover them",
        RuntimeWarning,
        stacklevel=2,
    )
