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
from batchopt.backends.ledger import Run
from batchopt.backends.ray.actor import Host, request
from batchopt.backends.ray.editions import Editions, delivery
from batchopt.backends.ray.messages import (
    CalledOff,
    Contract,
    Envelope,
    OutOfStep,
    Question,
    Reply,
    Request,
    Share,
    Yield,
)
from batchopt.backends.ray.transfer import Shipment, from_bytes, to_bytes
from batchopt.errors import WorkerError
from batchopt_workers.evaluate import Program
from batchopt_workers.messages import Cut, Kind
from batchopt_workers.packing import dumps
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.worker import Sample, Worker
from tests.workloads import Workload, mlp


def work(host: Host, place: tuple[int, int], news: list[Request], task: Request) -> Reply:
    """What a node does with a request."""
    return host.work(Envelope(*place, news, task.method), *task.arguments)


class Driver:
    """What a driver does with one machine, in chunks of two samples."""

    def __init__(self, case: Workload, ranks: tuple[int, ...] = (4, 5), prehook: Any = None) -> None:
        self.case, self.host = case, Host()
        self.flat, parameters = flatten(case.module)
        self.program = Program(case.module, case.criterion, (None,), 0, prehook)
        self.editions = Editions(self.program, parameters)
        contract = Contract(
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
            digests=self.editions.latest.digests,
        )
        started = work(self.host, (0, 0), [], request(Host.start, contract, self.editions.first))
        assert started.failed is None, started.failed
        batch = read_batch(case.inputs, case.targets, None, {None: Reading(None, "mean", case.criterion, None, None)})
        self.shipment = Shipment.of(batch)
        self.cut = Cut((*range(0, batch.size, 2), batch.size))
        self.numbers = iter(range(1, 100))
        self.news = [
            request(Host.load, self.shipment.skeleton, (1.0,)),
            request(Host.set_cut, self.cut.bounds),
        ]

    def evaluate(self, *runs: Run | None, fill: range | None = None) -> Any:
        """The reply."""
        news, self.news = self.news, []
        if fill is not None:
            news.append(request(Host.fill, list(self.shipment.fragments(fill))))
        share = Share(int(Kind.EVALUATE), next(self.numbers), 1, runs)
        task = request(Host.evaluate, share, to_bytes(self.flat.vector), None)
        return work(self.host, (0, share.attempt), news, task)

    def expected(self, samples: range) -> torch.Tensor:
        """What these samples add to the gradient."""
        part = slice(samples.start, samples.stop)
        loss = self.case.criterion(self.case.module(self.case.inputs[part]), self.case.targets[part])
        scaled = loss * len(samples) / len(self.case.inputs)
        return torch.cat([g.flatten() for g in torch.autograd.grad(scaled, list(self.case.module.parameters()))])

    def gradient(self, found: Yield) -> torch.Tensor:
        """The sum of all partials."""
        return torch.stack([from_bytes(s.gradient, self.flat.layout.sum_dtype, (-1,)) for s in found.sums]).sum(0)


def _note_rank(worker: Worker) -> None:
    worker.state["at precode"] = worker.rank, worker.world_size


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    """Makes drivers whose machine is closed at the test's end."""
    made: list[Driver] = []

    def make(*args: Any, **options: Any) -> Driver:
        made.append(Driver(*args, **options))
        return made[-1]

    yield make
    for driver in made:
        driver.host.close()


def test_a_share_is_evaluated_and_merged(drive: Callable[..., Driver]) -> None:
    driver = drive(mlp(samples=16))
    reply = driver.evaluate(Run(0, 2), Run(2, 4), fill=range(0, 8))
    assert reply.failed is None and len(reply.value.sums) == 1  # whatever the number of workers
    torch.testing.assert_close(driver.gradient(reply.value), driver.expected(range(0, 8)), rtol=1e-12, atol=1e-14)
    assert {work.worker for work in reply.value.work} == {0, 1}
    assert [condition.alive for condition in reply.workers] == [True, True]


def test_samples_that_come_later_fall_into_their_place(drive: Callable[..., Driver]) -> None:
    driver = drive(mlp(samples=16))
    driver.evaluate(Run(0, 1), None, fill=range(0, 2))
    reply = driver.evaluate(Run(5, 6), Run(6, 8), fill=range(10, 16))
    torch.testing.assert_close(driver.gradient(reply.value), driver.expected(range(10, 16)), rtol=1e-12, atol=1e-14)
    both = driver.evaluate(Run(0, 1), Run(6, 7))
    expected = driver.expected(range(0, 2)) + driver.expected(range(12, 14))
    torch.testing.assert_close(driver.gradient(both.value), expected, rtol=1e-12, atol=1e-14)


def test_another_step_on_the_same_batch_needs_no_samples(drive: Callable[..., Driver]) -> None:
    driver = drive(mlp(samples=16))
    driver.evaluate(Run(0, 1), Run(1, 2), fill=range(0, 4))
    driver.news.append(request(Host.load, None, (2.0,)))
    reply = driver.evaluate(Run(0, 1), Run(1, 2))
    torch.testing.assert_close(driver.gradient(reply.value), 2.0 * driver.expected(range(0, 4)), rtol=1e-12, atol=1e-14)


def test_a_machine_has_the_memory_of_its_shard_only(drive: Callable[..., Driver]) -> None:
    torch.manual_seed(0)
    samples = 200_000
    case = mlp(samples=samples)
    driver = drive(case)
    driver.evaluate(Run(50_000, 50_010), None, fill=range(100_000, 120_000))
    hold = driver.host._hold
    assert hold is not None
    taken = os.fstat(hold.block.fd).st_blocks * 512
    shard = 20_000 * (case.inputs[0].nbytes + case.targets[0].nbytes)
    assert shard <= taken <= shard + 16 * 4096 < hold.block.nbytes / 8


def test_workers_know_their_rank_among_all(drive: Callable[..., Driver]) -> None:
    driver = drive(mlp(samples=4))
    reply = work(driver.host, (1, 0), [], request(Host.run, dumps((lambda worker: worker.state["at precode"], ()))))
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


def test_half_of_what_nobody_has_begun_is_given_up_on_request(drive: Callable[..., Driver], tmp_path: Path) -> None:
    driver = drive(mlp(samples=32), prehook=held_up(tmp_path))
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(driver.evaluate(Run(0, 8), Run(8, 16), fill=range(0, 32))))
    thread.start()
    wait_for(tmp_path / "begun 0")
    wait_for(tmp_path / "begun 8")
    given = driver.host.ask(Question.RELEASE, 1, 10.0)
    assert given == [Run(4, 8), Run(12, 16)]  # of 1..7 and 9..15
    assert driver.host.ask(Question.PING, 1, 10.0) == []
    (tmp_path / "go").touch()
    thread.join(30)
    (reply,) = replies
    assert reply.failed is None
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("begun") and int(path.name[6:]) % 8 >= 4]
    expected = driver.expected(range(0, 8)) + driver.expected(range(16, 24))
    torch.testing.assert_close(driver.gradient(reply.value), expected, rtol=1e-12, atol=1e-14)
    assert driver.host.ask(Question.RELEASE, 1, 10.0) == []  # nothing is evaluated now


def test_an_evaluation_can_be_called_off(drive: Callable[..., Driver], tmp_path: Path) -> None:
    driver = drive(mlp(samples=32), prehook=held_up(tmp_path))
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(driver.evaluate(Run(0, 8), Run(8, 16), fill=range(0, 32))))
    thread.start()
    wait_for(tmp_path / "begun 0")
    assert driver.host.ask(Question.CALL_OFF, 1, 10.0) == []
    thread.join(30)
    assert isinstance(replies[0].failed.error, CalledOff)
    (tmp_path / "go").touch()
    assert driver.evaluate(Run(0, 8), Run(8, 16)).failed is None


def test_what_goes_wrong_is_said_not_raised(drive: Callable[..., Driver]) -> None:
    def refuse(worker: Worker, sample: Sample) -> None:
        raise ZeroDivisionError("no")

    driver = drive(mlp(samples=8), prehook=refuse)
    failed = driver.evaluate(Run(0, 2), Run(2, 4), fill=range(0, 8)).failed
    assert isinstance(failed.error, WorkerError) and failed.error.type_name == "ZeroDivisionError"
    assert "ZeroDivisionError in worker 0" in failed.text.message and failed.text.message.endswith(": no")
    assert "in refuse" in failed.text.traceback
    failed = work(Host(), (0, 0), [], request(Host.run, dumps((len, ())))).failed
    assert failed is not None and "were not started" in failed.text.message


def test_a_request_that_builds_on_a_lost_one_is_refused_until_all_is_told_anew(drive: Callable[..., Driver]) -> None:
    driver = drive(mlp(samples=4))
    share = Share(int(Kind.EVALUATE), 1, 1, (Run(0, 1), None))
    for index in (2, 3, 2):  # the first one, with the batch, did not come
        reply = work(driver.host, (0, index), [], request(Host.evaluate, share, None, None))
        assert reply.failed is not None and reply.failed.is_a(OutOfStep)
    news = [*driver.news, request(Host.fill, list(driver.shipment.fragments(range(0, 4))))]
    x = to_bytes(driver.flat.vector)
    assert work(driver.host, (1, 0), news, request(Host.evaluate, share, x, None)).failed is None
    assert work(driver.host, (1, 1), [], request(Host.evaluate, share._replace(attempt=2), x, None)).failed is None


def test_a_changed_program_is_sent_with_the_tensors_that_the_machine_lacks(drive: Callable[..., Driver]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double().eval()
    driver = drive(Workload(module, nn.MSELoss(), torch.randn(6, 3).double(), torch.randn(6, 3).double()))
    before = driver.editions.latest
    module.append(nn.Dropout(0.0))
    module.register_buffer("more", torch.ones(2))
    driver.editions.follow(driver.program)
    found = delivery(driver.editions.latest, before.packed.data, before.digests)
    assert found.data is not None and len(found.digests) == len(before.digests) + 1
    assert [elements.view("float32").tolist() for elements in found.elements.values()] == [[1.0, 1.0]]
    driver.news.insert(0, request(Host.update, found))
    reply = driver.evaluate(Run(0, 1), Run(1, 3), fill=range(0, 6))
    torch.testing.assert_close(driver.gradient(reply.value), driver.expected(range(0, 6)), rtol=1e-12, atol=1e-14)
    (parts, *_) = work(driver.host, (0, 2), [], request(Host.run, dumps((_count_parts, ())))).value
    assert pickle.loads(parts) == 4


def _count_parts(worker: Worker) -> int:
    assert worker.module is not None
    return len(list(worker.module.modules()))


def test_constants_follow_the_driver(drive: Callable[..., Driver]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double().eval()
    driver = drive(Workload(module, nn.MSELoss(), torch.randn(6, 3).double(), torch.randn(6, 3).double()))
    norm = module[1]
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
    norm.running_mean.fill_(3.0)
    before = driver.editions.latest
    driver.editions.follow(driver.program)
    found = delivery(driver.editions.latest, before.packed.data, before.digests)
    assert found.data is None and len(found.elements) == 1
    driver.news.insert(0, request(Host.update, found))
    reply = driver.evaluate(Run(0, 1), Run(1, 3), fill=range(0, 6))
    expected = driver.expected(range(0, 6))
    torch.testing.assert_close(driver.gradient(reply.value), expected, rtol=1e-12, atol=1e-14)
