"""What a node has been sent, what it should have, and the requests that make up the difference: without input or
output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchopt.backends.ray.actor import NodeActor, request
from batchopt.backends.ray.messages import NodeRequest
from batchopt.backends.ray.program_versions import ProgramVersion, update_for
from batchopt.backends.ray.transfer import SendableBatch, lacking
from batchopt_workers.messages import Cut
from batchopt_workers.torch_settings import TorchSettings


@dataclass(frozen=True)
class StepStart:
    """The batch, program and weights of the terms when the step began; nodes that join later are sent these too."""

    batch: SendableBatch
    version: ProgramVersion
    weights: tuple[float, ...]


class Target(NamedTuple):
    """What every node should have before it is given work."""

    hooked: bool
    torch: TorchSettings
    step: StepStart | None
    cut: Cut


@dataclass
class NodeState:
    """What a node has. Entries are compared with the target by identity, which costs nothing."""

    hooked: bool = True
    torch: TorchSettings | None = None
    step: StepStart | None = None
    batch: SendableBatch | None = None
    samples: list[range] = field(default_factory=list)  # of the batch
    cut: Cut | None = None
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
        return cls(torch=torch, version=version, program=version.packed.data, tensors=digests, earlier_tensors=digests)

    def forgotten(self) -> NodeState:
        """The state of a node that failed while it took in updates: it is sent everything again, but for the tensors
        that it certainly has."""
        return NodeState(tensors=self.tensors & self.earlier_tensors)

    def updates(self, target: Target) -> list[NodeRequest]:
        """What to send."""
        found: list[NodeRequest] = []
        if self.hooked != target.hooked:
            found.append(request(NodeActor.use_hooks, target.hooked))
        if self.torch != target.torch:
            found.append(request(NodeActor.set_torch, target.torch))
        if (step := target.step) is not None and self.step is not step:
            if self.version is not step.version:
                found.append(request(NodeActor.update, update_for(step.version, self.program, self.tensors)))
            manifest = None if self.batch is step.batch else step.batch.manifest
            found.append(request(NodeActor.load, manifest, step.weights))
        if self.cut is not target.cut:
            found.append(request(NodeActor.set_cut, target.cut.bounds))
        return found

    def updated(self, target: Target) -> None:
        """The updates were sent."""
        if (step := target.step) is not None and self.step is not step:
            self.samples = self.samples if self.batch is step.batch else []
            self.batch = step.batch
            if self.version is not step.version:
                self.version, self.program = step.version, step.version.packed.data
                self.earlier_tensors, self.tensors = self.tensors, frozenset(step.version.digests)
        self.hooked, self.torch, self.step, self.cut = target.hooked, target.torch, target.step, target.cut

    def missing_samples(self, batch: SendableBatch, wanted: Iterable[range]) -> tuple[list[range], list[range]]:
        """What of `wanted` the node does not have of the batch; and all that it has once that was sent."""
        held, missing = (self.samples if self.batch is batch else []), []
        for samples in wanted:
            found = lacking(held, samples)
            missing += found
            held = held + found
        return missing, held
