"""What a node has been sent, what it should have, and the requests that make up the difference: without input or
output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchopt.backends.ray.actor import NodeActor, request
from batchopt.backends.ray.messages import NodeRequest
from batchopt.backends.ray.program_versions import ProgramVersion, update_for
from batchopt.backends.ray.transfer import PackedBytes, SendableBatch, lacking
from batchopt_workers.messages import Cut
from batchopt_workers.numbering import Numbering
from batchopt_workers.torch_settings import TorchSettings


@dataclass(frozen=True)
class StepStart:
    """The batch, program and weights of the terms when the step began; nodes that join later are sent these too."""

    batch: SendableBatch
    version: ProgramVersion
    weights: tuple[float, ...]


@dataclass(frozen=True)
class TaskStart:
    """The task that is carried out, packed; `batch`: that of the task, if it has one. `numbering` is of its samples,
    which in the loaded batch begin at `offset`; `reading`: whether nodes read them themselves."""

    packed: PackedBytes
    batch: SendableBatch | None
    version: ProgramVersion
    numbering: Numbering
    reading: bool
    offset: int = 0


class Target(NamedTuple):
    """What every node should have before it is given work."""

    hooked: bool
    torch: TorchSettings
    step: StepStart | None
    cut: Cut
    task: TaskStart | None = None
    task_cut: Cut | None = None
    keeps_outputs: bool = False


@dataclass
class NodeState:
    """What a node has; None: nobody knows, or nothing. Entries are compared with the target by identity, which costs
    nothing."""

    hooked: bool | None = None
    torch: TorchSettings | None = None
    step: StepStart | None = None
    batch: SendableBatch | None = None
    samples: list[range] = field(default_factory=list)  # of the batch
    cut: Cut | None = None
    task: TaskStart | None = None
    task_cut: Cut | None = None
    keeps_outputs: bool | None = None
    task_samples: list[range] = field(default_factory=list)  # of the task's batch
    direction: Any = None
    x: Any = None
    version: ProgramVersion | None = None
    program: bytes = b""  # the program of that version without its tensors, whose digests follow
    tensors: frozenset[bytes] = frozenset()
    earlier_tensors: frozenset[bytes] = frozenset()  # of the version before

    @classmethod
    def started_with(cls, torch: TorchSettings, version: ProgramVersion) -> NodeState:
        """The state of a node that has just been started."""
        digests = frozenset(version.digests)
        return cls(
            hooked=True,
            torch=torch,
            keeps_outputs=False,
            version=version,
            program=version.packed.data,
            tensors=digests,
            earlier_tensors=digests,
        )

    def forgotten(self) -> NodeState:
        """The state of a node that failed while it took in updates: it is sent everything again, but for the tensors
        that it certainly has."""
        return NodeState(tensors=self.tensors & self.earlier_tensors)

    def updates(self, target: Target) -> list[NodeRequest]:
        """What to send."""
        found: list[NodeRequest] = []
        if self.hooked != target.hooked:
            found.append(request(NodeActor.use_hooks, target.hooked))
        if self.keeps_outputs != target.keeps_outputs:
            found.append(request(NodeActor.keep_outputs, target.keeps_outputs))
        if self.torch != target.torch:
            found.append(request(NodeActor.set_torch, target.torch))
        version = self.version
        if (step := target.step) is not None and self.step is not step:
            found += self._version_updates(version, step.version)
            version = step.version
            manifest = None if self.batch is step.batch else step.batch.manifest
            found.append(request(NodeActor.load, manifest, step.weights))
        if self.cut is not target.cut:
            found.append(request(NodeActor.set_cut, target.cut))
        if self.task is not target.task:
            found += self._task_updates(version, target.task)
        if target.task_cut is not None and self.task_cut is not target.task_cut:
            found.append(request(NodeActor.set_task_cut, target.task_cut.bounds))
        return found

    def _version_updates(self, version: ProgramVersion | None, wanted: ProgramVersion) -> list[NodeRequest]:
        if version is wanted:
            return []
        return [request(NodeActor.update, update_for(wanted, self.program, self.tensors))]

    def _task_updates(self, version: ProgramVersion | None, task: TaskStart | None) -> list[NodeRequest]:
        if task is None:
            return [request(NodeActor.end_task)]
        manifest = None if task.batch is None else task.batch.manifest
        begin = request(NodeActor.begin_task, task.packed, manifest, task.numbering, task.reading)
        return [*self._version_updates(version, task.version), begin]

    def updated(self, target: Target) -> None:
        """The updates were sent."""
        if (step := target.step) is not None and self.step is not step:
            self.samples = self.samples if self.batch is step.batch else []
            self.batch = step.batch
            self._has_version(step.version)
        if (task := target.task) is not None and self.task is not task:
            self.task_samples = []
            self._has_version(task.version)
        self.hooked, self.torch, self.step, self.cut = target.hooked, target.torch, target.step, target.cut
        self.task, self.task_cut, self.keeps_outputs = target.task, target.task_cut, target.keeps_outputs

    def _has_version(self, version: ProgramVersion) -> None:
        if self.version is not version:
            self.version, self.program = version, version.packed.data
            self.earlier_tensors, self.tensors = self.tensors, frozenset(version.digests)

    def missing(
        self, target: Target, batch: SendableBatch, wanted: Iterable[range], of_task: bool
    ) -> tuple[list[range], list[range]]:
        """What of `wanted` the node does not have of the batch, which may be that of the task; and all that it has once
        that was sent."""
        if of_task:
            return _lacking(self.task_samples if self.task is target.task else [], wanted)
        return _lacking(self.samples if self.batch is batch else [], wanted)

    def hold(self, held: list[range], of_task: bool) -> None:
        """It has these samples of the batch, or of that of the task."""
        if of_task:
            self.task_samples = held
        else:
            self.samples = held


def _lacking(held: list[range], wanted: Iterable[range]) -> tuple[list[range], list[range]]:
    missing: list[range] = []
    for samples in wanted:
        found = lacking(held, samples)
        missing += found
        held = held + found
    return missing, held
