"""The desired state of all nodes, and the calls that update a node to it. No input or output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchopt.backends.base import Run
from batchopt.backends.nodes.members import Member
from batchopt.backends.nodes.node import NodeSession, Update
from batchopt.backends.nodes.transfer import KnownBatch, PackedBytes, ProgramVersion, SentRows, update_for
from batchopt_workers.data.batch import Batch
from batchopt_workers.process.messages import TASKS, Cut, Order
from batchopt_workers.process.torch_settings import TorchSettings


@dataclass(frozen=True)
class StepStart:
    """The batch, program and weights of the terms at the start of the step; nodes that join later are sent these
    too."""

    batch: KnownBatch
    version: ProgramVersion
    weights: tuple[float, ...]


@dataclass(frozen=True)
class TaskStart:
    """The current task, packed; `batch`: its own, if it has one. In the loaded batch its samples begin at `offset`;
    `whole`: whether each node needs all of the loaded batch."""

    packed: PackedBytes
    batch: Batch | None
    version: ProgramVersion
    offset: int
    whole: bool


class DesiredState:
    """The hooks, outputs, step, task and cuts of all nodes. Values are compared by identity, which is fast, with those
    that a node was sent."""

    def __init__(self) -> None:
        self.hooked, self.outputs = True, False
        self.step: StepStart | None = None
        self.task: TaskStart | None = None
        self.cut = self.task_cut = Cut((0,))

    def use(self, version: ProgramVersion) -> None:
        """Continue step and task with this version of the program."""
        if self.step is not None and self.step.version is not version:
            self.step = replace(self.step, version=version)
        if self.task is not None and self.task.version is not version:
            self.task = replace(self.task, version=version)

    def cut_so(self, cut: Cut, is_task: bool) -> None:
        """Set the cut of the batch, or of the task's."""
        if is_task:
            self.task_cut = cut
        elif self.cut != cut:
            self.cut = cut

    def updates(
        self, member: Member, workers: int, order: Order | None = None, runs: Sequence[Run] = ()
    ) -> list[Update]:
        """Return the calls by which a node gets all that it lacks, including the rows for its `runs` of an order, and
        count them as sent; `workers` is the total number."""
        has, found = member.has, []

        def have(name: str, value: Any, method: Callable[..., None], *arguments: Any) -> None:
            if has.get(name) is not value and (name not in ("torch", "world", "mode") or has.get(name) != value):
                found.append(Update(method.__name__, arguments))
            has[name] = value

        world = len(member.ranks), workers
        have("world", world, NodeSession.resize, *world)
        mode = self.hooked, self.outputs
        have("mode", mode, NodeSession.set_mode, *mode)
        have("torch", settings := TorchSettings.current(), NodeSession.set_torch, settings)
        mine = [run for run in runs[member.ranks.start : member.ranks.stop] if run[0] < run[1]]
        of_step, of_task = self._wanted(order, mine)
        found += self._of_step(has, of_step)
        have("cut", self.cut, NodeSession.set_cut, self.cut)
        found += self._of_task(has, of_task)
        if self.task is not None:
            have("cut of the task", self.task_cut, NodeSession.set_task_cut, self.task_cut)
        return found

    def _wanted(self, order: Order | None, runs: Sequence[Run]) -> tuple[range, range]:
        """Return the samples that these runs need of the loaded batch, and of the task's own."""
        task, nothing = self.task, range(0)
        if order is None or not runs:
            return nothing, nothing
        first, last = min(first for first, _ in runs), max(last for _, last in runs)
        if task is None or order.kind not in TASKS:
            return range(self.cut.bounds[first], self.cut.bounds[last]), nothing
        samples = range(self.task_cut.bounds[first], self.task_cut.bounds[last])
        loaded = range(task.offset + samples.start, task.offset + samples.stop) if task.batch is None else nothing
        if task.whole and self.step is not None:
            loaded = range(self.step.batch.batch.size)
        return loaded, samples

    def _of_step(self, has: dict[str, Any], samples: range) -> list[Update]:
        step = self.step
        if step is None:
            return []
        batch = step.batch.batch
        held: SentRows | None = has.get("rows")
        if held is None or held.batch is not batch:
            held = SentRows(batch, ())
        wanted = SentRows.of(batch, samples)
        lacks = held.lacks(wanted)
        if has.get("step") is step and not lacks:
            return []
        found, all_rows = _program(has, step.version), held.extended(wanted)
        if not lacks:
            found.append(Update(NodeSession.reload.__name__, (step.weights,)))
        elif all_rows is None:
            found.append(Update(NodeSession.load.__name__, (wanted.packed(), step.weights)))
        else:
            found.append(Update(NodeSession.extend.__name__, (all_rows.packed_without(held), step.weights)))
        has |= {"step": step, "rows": (all_rows or wanted) if lacks else held}
        if "task" in has:
            has["task"] = None  # a task on the loaded batch begins again
        return found

    def _of_task(self, has: dict[str, Any], samples: range) -> list[Update]:
        task = self.task
        if task is None:
            is_over = has.pop("task", self) is not self
            return [Update(NodeSession.end_task.__name__, ())] if is_over else []
        wanted = None if task.batch is None else SentRows.of(task.batch, samples)
        held: SentRows | None = has.get("rows of the task")
        if has.get("task") is task and (wanted is None or (held is not None and not held.lacks(wanted))):
            return []
        packed = None if wanted is None else wanted.packed()
        has |= {"task": task, "rows of the task": wanted}
        return [*_program(has, task.version), Update(NodeSession.begin_task.__name__, (task.packed, packed))]


def _program(has: dict[str, Any], version: ProgramVersion) -> list[Update]:
    """Return the calls by which a node gets this version of the program."""
    if (held := has.get("program")) is version:
        return []
    has["program"] = version
    return [Update(NodeSession.change.__name__, (update_for(version, held),))]
