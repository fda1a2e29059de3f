"""A machine's workers among several, asked directly: without a network."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt._data.batches import Reading, read_batch
from batchopt._program.flatten import flatten
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.ray.actor import NodeActor, request
from batchopt.backends.ray.messages import (
    Assignment,
    AssignmentResult,
    CalledOff,
    Envelope,
    NodeReply,
    NodeRequest,
    NodeSetup,
    OutOfStep,
    Question,
)
from batchopt.backends.ray.node_state import NodeState, Target
from batchopt.backends.ray.program_versions import ProgramVersions, update_for
from batchopt.backends.ray.transfer import SendableBatch, from_bytes, to_bytes
from batchopt.errors import WorkerError
from batchopt_workers.evaluate import Program
from batchopt_workers.messages import Cut, Kind
from batchopt_workers.packing import dumps
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.worker import Sample, Worker
from tests.workloads import Workload, mlp


def work(host: NodeActor, place: tuple[int, int], updates: list[NodeRequest], task: NodeRequest) -> NodeReply:
    """What a node does with a request."""
    return host.work(Envelope(*place, updates, task.method), *task.arguments)


class ParentOf:
    """What a parent does with one machine, in chunks of two samples."""

    def __init__(self, case: Workload, ranks: tuple[int, ...] = (4, 5), prehook: Any = None) -> None:
        self.case, self.host = case, NodeActor()
        self.flat, parameters = flatten(case.module)
        self.program = Program(case.module, case.criterion, (None,), 0, prehook)
        self.program_versions = ProgramVersions(self.program, parameters)
        node_setup = NodeSetup(
            layout=self.flat.layout,
            precode=dumps(_note_rank),
            fixed_bits=True,
            timeout=None,
            restarts=4,
            threads=1,
            devices=None,
            ranks=ranks,
            world=9,
            torch=TorchSettings.current(),
            digests=self.program_versions.latest.digests,
        )
        started = work(self.host, (0, 0), [], request(NodeActor.start, node_setup, self.program_versions.first))
        assert started.failure is None, started.failure
        batch = read_batch(case.inputs, case.targets, None, {None: Reading(None, "mean", case.criterion, None, None)})
        self.sendable = SendableBatch.of(batch)
        self.cut = Cut((*range(0, batch.size, 2), batch.size))
        self.numbers = iter(range(1, 100))
        self.updates = [
            request(NodeActor.load, self.sendable.manifest, (1.0,)),
            request(NodeActor.set_cut, self.cut),
        ]

    def evaluate(self, *runs: ChunkRun | None, fill: range | None = None) -> Any:
        """The reply."""
        updates, self.updates = self.updates, []
        if fill is not None:
            updates.append(request(NodeActor.fill, list(self.sendable.slices(fill))))
        assignment = Assignment(int(Kind.EVALUATE), next(self.numbers), 1, runs)
        task = request(NodeActor.evaluate, assignment, to_bytes(self.flat.vector), None)
        return work(self.host, (0, assignment.attempt), updates, task)

    def expected(self, samples: range) -> torch.Tensor:
        """What these samples add to the gradient."""
        part = slice(samples.start, samples.stop)
        loss = self.case.criterion(self.case.module(self.case.inputs[part]), self.case.targets[part])
        scaled = loss * len(samples) / len(self.case.inputs)
        return torch.cat([g.flatten() for g in torch.autograd.grad(scaled, list(self.case.module.parameters()))])

    def gradient(self, found: AssignmentResult) -> torch.Tensor:
        """The sum of all partials."""
        return torch.stack([from_bytes(s.gradient, self.flat.layout.sum_dtype, (-1,)) for s in found.sums]).sum(0)


def _note_rank(worker: Worker) -> None:
    worker.state["at precode"] = worker.rank, worker.world_size


@pytest.fixture
def drive() -> Iterator[Callable[..., ParentOf]]:
    """Makes parents whose machine is closed at the test's end."""
    made: list[ParentOf] = []

    def make(*args: Any, **options: Any) -> ParentOf:
        made.append(ParentOf(*args, **options))
        return made[-1]

    yield make
    for parent in made:
        parent.host.close()


def test_a_share_is_evaluated_and_merged(drive: Callable[..., ParentOf]) -> None:
    parent = drive(mlp(samples=16))
    reply = parent.evaluate(ChunkRun(0, 2), ChunkRun(2, 4), fill=range(0, 8))
    assert reply.failure is None and len(reply.value.sums) == 1  # whatever the number of workers
    torch.testing.assert_close(parent.gradient(reply.value), parent.expected(range(0, 8)), rtol=1e-12, atol=1e-14)
    assert {work.worker for work in reply.value.work} == {0, 1}
    assert [status.alive for status in reply.workers] == [True, True]


def test_samples_that_come_later_fall_into_their_place(drive: Callable[..., ParentOf]) -> None:
    parent = drive(mlp(samples=16))
    parent.evaluate(ChunkRun(0, 1), None, fill=range(0, 2))
    reply = parent.evaluate(ChunkRun(5, 6), ChunkRun(6, 8), fill=range(10, 16))
    torch.testing.assert_close(parent.gradient(reply.value), parent.expected(range(10, 16)), rtol=1e-12, atol=1e-14)
    both = parent.evaluate(ChunkRun(0, 1), ChunkRun(6, 7))
    expected = parent.expected(range(0, 2)) + parent.expected(range(12, 14))
    torch.testing.assert_close(parent.gradient(both.value), expected, rtol=1e-12, atol=1e-14)


def test_another_step_on_the_same_batch_needs_no_samples(drive: Callable[..., ParentOf]) -> None:
    parent = drive(mlp(samples=16))
    parent.evaluate(ChunkRun(0, 1), ChunkRun(1, 2), fill=range(0, 4))
    parent.updates.append(request(NodeActor.load, None, (2.0,)))
    reply = parent.evaluate(ChunkRun(0, 1), ChunkRun(1, 2))
    torch.testing.assert_close(parent.gradient(reply.value), 2.0 * parent.expected(range(0, 4)), rtol=1e-12, atol=1e-14)


def test_a_machine_has_the_memory_of_its_shard_only(drive: Callable[..., ParentOf]) -> None:
    torch.manual_seed(0)
    samples = 200_000
    case = mlp(samples=samples)
    parent = drive(case)
    parent.evaluate(ChunkRun(50_000, 50_010), None, fill=range(100_000, 120_000))
    buffer = parent.host._buffer
    assert buffer is not None
    taken = os.fstat(buffer.block.fd).st_blocks * 512
    shard = 20_000 * (case.inputs[0].nbytes + case.targets[0].nbytes)
    assert shard <= taken <= shard + 16 * 4096 < buffer.block.nbytes / 8


def test_workers_know_their_rank_among_all(drive: Callable[..., ParentOf]) -> None:
    parent = drive(mlp(samples=4))
    reply = work(
        parent.host, (1, 0), [], request(NodeActor.run, dumps((lambda worker: worker.state["at precode"], ())))
    )
    assert reply.value == [dumps((4, 9)), dumps((5, 9))]


def wait_for(path: Path) -> None:
    """Until the file is there."""
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def held_up(folder: Path) -> Callable[[Worker, Sample], None]:
    """A hook that says when a chunk has begun, and then waits to be let go."""

    def hook(worker: Worker, sample: Sample) -> None:
        (folder / f"begun {sample.indices.start // 2}").touch()
        deadline = time.monotonic() + 30
        while not (folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.005)

    return hook


def test_half_of_what_nobody_has_begun_is_given_up_on_request(drive: Callable[..., ParentOf], tmp_path: Path) -> None:
    parent = drive(mlp(samples=32), prehook=held_up(tmp_path))
    replies: list[Any] = []
    thread = threading.Thread(
        target=lambda: replies.append(parent.evaluate(ChunkRun(0, 8), ChunkRun(8, 16), fill=range(0, 32)))
    )
    thread.start()
    wait_for(tmp_path / "begun 0")
    wait_for(tmp_path / "begun 8")
    given = parent.host.ask(Question.RELEASE, 1, 10.0)
    assert given == [ChunkRun(4, 8), ChunkRun(12, 16)]  # of 1..7 and 9..15
    assert parent.host.ask(Question.PING, 1, 10.0) == []
    (tmp_path / "go").touch()
    thread.join(30)
    (reply,) = replies
    assert reply.failure is None
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("begun") and int(path.name[6:]) % 8 >= 4]
    expected = parent.expected(range(0, 8)) + parent.expected(range(16, 24))
    torch.testing.assert_close(parent.gradient(reply.value), expected, rtol=1e-12, atol=1e-14)
    assert parent.host.ask(Question.RELEASE, 1, 10.0) == []  # nothing is evaluated now


def test_an_evaluation_can_be_called_off(drive: Callable[..., ParentOf], tmp_path: Path) -> None:
    parent = drive(mlp(samples=32), prehook=held_up(tmp_path))
    replies: list[Any] = []
    thread = threading.Thread(
        target=lambda: replies.append(parent.evaluate(ChunkRun(0, 8), ChunkRun(8, 16), fill=range(0, 32)))
    )
    thread.start()
    wait_for(tmp_path / "begun 0")
    assert parent.host.ask(Question.CALL_OFF, 1, 10.0) == []
    thread.join(30)
    assert isinstance(replies[0].failure.error, CalledOff)
    (tmp_path / "go").touch()
    assert parent.evaluate(ChunkRun(0, 8), ChunkRun(8, 16)).failure is None


def test_what_goes_wrong_is_said_not_raised(drive: Callable[..., ParentOf]) -> None:
    def refuse(worker: Worker, sample: Sample) -> None:
        raise ZeroDivisionError("no")

    parent = drive(mlp(samples=8), prehook=refuse)
    failure = parent.evaluate(ChunkRun(0, 2), ChunkRun(2, 4), fill=range(0, 8)).failure
    assert isinstance(failure.error, WorkerError) and failure.error.type_name == "ZeroDivisionError"
    assert "ZeroDivisionError in worker 0" in failure.text.message and failure.text.message.endswith(": no")
    assert "in refuse" in failure.text.traceback
    failure = work(NodeActor(), (0, 0), [], request(NodeActor.run, dumps((len, ())))).failure
    assert failure is not None and "were not started" in failure.text.message


def test_a_request_that_builds_on_a_lost_one_is_refused_until_all_is_told_anew(drive: Callable[..., ParentOf]) -> None:
    parent = drive(mlp(samples=4))
    assignment = Assignment(int(Kind.EVALUATE), 1, 1, (ChunkRun(0, 1), None))
    for index in (2, 3, 2):  # the first one, with the batch, did not come
        reply = work(parent.host, (0, index), [], request(NodeActor.evaluate, assignment, None, None))
        assert reply.failure is not None and reply.failure.is_a(OutOfStep)
    updates = [*parent.updates, request(NodeActor.fill, list(parent.sendable.slices(range(0, 4))))]
    x = to_bytes(parent.flat.vector)
    assert work(parent.host, (1, 0), updates, request(NodeActor.evaluate, assignment, x, None)).failure is None
    assert (
        work(parent.host, (1, 1), [], request(NodeActor.evaluate, assignment._replace(attempt=2), x, None)).failure
        is None
    )


def test_what_was_sent_behind_updates_that_failed_is_refused(drive: Callable[..., ParentOf]) -> None:
    parent = drive(mlp(samples=4))
    assignment = Assignment(int(Kind.EVALUATE), 1, 1, (ChunkRun(0, 1), None))
    evaluate = request(NodeActor.evaluate, assignment, to_bytes(parent.flat.vector), None)
    assert work(parent.host, (0, 1), parent.updates, request(NodeActor.use_hooks, True)).failure is None
    wrong = request(NodeActor.fill, [None])  # type: ignore[list-item]
    failed = work(parent.host, (0, 2), [wrong], evaluate).failure
    assert failed is not None and not failed.is_a(OutOfStep)
    for position in (3, 4, 5):  # of which nobody had heard when they were sent
        reply = work(parent.host, (0, position), [], evaluate)
        assert reply.failure is not None and reply.failure.is_a(OutOfStep)
    updates = [*parent.updates, request(NodeActor.fill, list(parent.sendable.slices(range(0, 4))))]
    assert work(parent.host, (1, 0), updates, evaluate).failure is None


@pytest.mark.parametrize("hooked", [True, False])
def test_a_node_that_failed_is_told_again_whether_hooks_run_and_outputs_are_kept(hooked: bool) -> None:
    settings = TorchSettings.current()
    target = Target(hooked, settings, None, Cut((0, 1)), keeps_outputs=not hooked)
    told = {update.method for update in NodeState(hooked=not hooked).forgotten().updates(target)}
    assert {"use_hooks", "keep_outputs", "set_torch", "set_cut"} <= told


def test_a_changed_program_is_sent_with_the_tensors_that_the_machine_lacks(drive: Callable[..., ParentOf]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double().eval()
    parent = drive(Workload(module, nn.MSELoss(), torch.randn(6, 3).double(), torch.randn(6, 3).double()))
    before = parent.program_versions.latest
    module.append(nn.Dropout(0.0))
    module.register_buffer("more", torch.ones(2))
    parent.program_versions.follow(parent.program)
    found = update_for(parent.program_versions.latest, before.packed.data, before.digests)
    assert found.data is not None and len(found.digests) == len(before.digests) + 1
    assert [elements.view("float32").tolist() for elements in found.elements.values()] == [[1.0, 1.0]]
    parent.updates.insert(0, request(NodeActor.update, found))
    reply = parent.evaluate(ChunkRun(0, 1), ChunkRun(1, 3), fill=range(0, 6))
    torch.testing.assert_close(parent.gradient(reply.value), parent.expected(range(0, 6)), rtol=1e-12, atol=1e-14)
    (parts, *_) = work(parent.host, (0, 2), [], request(NodeActor.run, dumps((_count_parts, ())))).value
    assert pickle.loads(parts) == 4


def _count_parts(worker: Worker) -> int:
    assert worker.module is not None
    return len(list(worker.module.modules()))


def test_constants_follow_the_parent(drive: Callable[..., ParentOf]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double().eval()
    parent = drive(Workload(module, nn.MSELoss(), torch.randn(6, 3).double(), torch.randn(6, 3).double()))
    norm = module[1]
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
    norm.running_mean.fill_(3.0)
    before = parent.program_versions.latest
    parent.program_versions.follow(parent.program)
    found = update_for(parent.program_versions.latest, before.packed.data, before.digests)
    assert found.data is None and len(found.elements) == 1
    parent.updates.insert(0, request(NodeActor.update, found))
    reply = parent.evaluate(ChunkRun(0, 1), ChunkRun(1, 3), fill=range(0, 6))
    expected = parent.expected(range(0, 6))
    torch.testing.assert_close(parent.gradient(reply.value), expected, rtol=1e-12, atol=1e-14)
