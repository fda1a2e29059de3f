"""The state that all nodes are to have, and the calls that bring one there: without input or output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from batchopt.backends.nodes.members import Member
from batchopt.backends.nodes.node import NodeSession, Update
from batchopt.backends.nodes.program_versions import ProgramVersion, update_for
from batchopt.backends.nodes.transfer import PackedBytes, SendableBatch, lacking
from batchopt.backends.sendable import sending
from batchopt_workers.data.batch import Numbering
from batchopt_workers.process.messages import TASKS, Cut, Order
from batchopt_workers.process.torch_settings import TorchSettings


@dataclass(frozen=True)
class StepStart:
    """The batch, program and weights of the terms when the step began; nodes that join later are sent these too."""

    batch: SendableBatch
    version: ProgramVersion
    weights: tuple[float, ...]


@dataclass(frozen=True)
class TaskStart:
    """The task that is carried out, packed; `batch`: that of the task, if it has one. `numbering` is of its samples,
    which in the loaded batch begin at `offset`; `whole`: whether each node needs all of the loaded batch."""

    packed: PackedBytes
    batch: SendableBatch | None
    version: ProgramVersion
    numbering: Numbering
    reads: bool
    offset: int
    whole: bool


class SentSamples(NamedTuple):
    """The samples of a batch that a node has."""

    batch: SendableBatch
    samples: list[range]


class DesiredState:
    """The hooks, outputs, step, task and cuts of all nodes. Values are compared by identity with those that a node was
    sent, which costs nothing."""

    def __init__(self) -> None:
        self.hooked, self.keeps_outputs = True, False
        self.step: StepStart | None = None
        self.task: TaskStart | None = None
        self.cut = self.task_cut = Cut((0,))

    def use(self, version: ProgramVersion) -> None:
        """Let step and task go on with this version of the program."""
        if self.step is not None and self.step.version is not version:
            self.step = replace(self.step, version=version)
        if self.task is not None and self.task.version is not version:
            self.task = replace(self.task, version=version)

    def cut_so(self, cut: Cut, is_task: bool) -> None:
        """Cut the batch, or that of the task, so."""
        if is_task:
            self.task_cut = cut
        elif self.cut != cut:
            self.cut = cut

    def updates(self, member: Member, workers: int) -> list[Update]:
        """Calls by which a node gets all that it lacks but for samples; `workers` is the number of all. It counts as
        sent from now on."""
        has, found = member.has, []

        def have(name: str, value: Any, method: Callable[..., None], *arguments: Any) -> None:
            if has.get(name) is not value and (name not in ("torch", "world", "hooks") or has.get(name) != value):
                found.append(Update(method.__name__, arguments))
            has[name] = value

        def program(version: ProgramVersion) -> None:
            if has.get("program") is not version:
                found.append(Update(NodeSession.change.__name__, (update_for(version, has.get("program")),)))
                has["program"] = version

        world = len(member.ranks), workers
        have("world", world, NodeSession.resize, *world)
        have("hooks", self.hooked, NodeSession.use_hooks, self.hooked)
        have("outputs", self.keeps_outputs, NodeSession.keep_outputs, self.keeps_outputs)
        have("torch", settings := TorchSettings.current(), NodeSession.set_torch, settings)
        step, task = self.step, self.task
        if step is not None and has.get("step") is not step:
            program(step.version)
            held: SentSamples | None = has.get("samples")
            is_there = held is not None and held.batch is step.batch
            have("step", step, NodeSession.load, None if is_there else step.batch.manifest, step.weights)
            if not is_there:
                has["samples"] = SentSamples(step.batch, [])
        have("cut", self.cut, NodeSession.set_cut, self.cut)
        if task is not None and has.get("task") is not task:
            program(task.version)
            manifest = None if task.batch is None else task.batch.manifest
            have("task", task, NodeSession.begin_task, task.packed, manifest, task.numbering, task.reads)
            if task.batch is not None:
                has["samples of the task"] = SentSamples(task.batch, [])
        elif task is None and has.get("task") is not None:
            have("task", None, NodeSession.end_task)
            has.pop("samples of the task", None)
        if task is not None:
            have("cut of the task", self.task_cut, NodeSession.set_task_cut, self.task_cut)
        return found

    def fill(self, member: Member, orders: Sequence[Order | None]) -> list[Update]:
        """Calls by which it gets the samples of its orders that it lacks."""
        task, step, found = self.task, self.step, []
        mine = [order for order in orders[member.ranks.start : member.ranks.stop] if order is not None]
        is_task = any(order.kind in TASKS for order in mine)
        cut, offset = (self.task_cut, 0 if task is None else task.offset) if is_task else (self.cut, 0)
        wanted = [range(offset + cut.bounds[order.first], offset + cut.bounds[order.last]) for order in mine]
        if is_task and task is not None and task.batch is not None:
            found += self._slices(member, "samples of the task", task.batch, wanted, NodeSession.fill_task)
        elif step is not None:
            found += self._slices(member, "samples", step.batch, wanted, NodeSession.fill)
        if is_task and task is not None and task.whole and step is not None:
            found += self._slices(member, "samples", step.batch, [range(step.batch.batch.size)], NodeSession.fill)
        return found

    def _slices(
        self, member: Member, name: str, batch: SendableBatch, wanted: Sequence[range], method: Callable[..., None]
    ) -> list[Update]:
        found, held = [], list(member.has[name].samples)
        with sending("the batch", *(part.inputs.data for part in batch.batch.parts)):
            for samples in wanted:
                missing = lacking(held, samples)
                slices = [list(batch.slices(some)) for some in missing]
                found += [Update(method.__name__, (some,)) for some in slices if some]
                held += missing
        member.has[name] = SentSamples(batch, held)
        return found
