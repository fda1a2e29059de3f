"""What workers on several machines have beside the contract: bits, traffic, shares, failures."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn

import batchopt
from batchopt import BatchOptimizer, Sample, Worker, WorkerError
from batchopt.backends.ray.messages import NodeRequest
from batchopt.backends.ray.node import ClusterNode
from tests.cluster.conftest import Start, await_free
from tests.workloads import Mlp, cnn, mlp

pytestmark = pytest.mark.timeout(180)
Hook = Callable[[Worker, Sample], None]


def steps(backend: str, parallelize: int, count: int = 2, **options: Any) -> str:
    """The fingerprint of some steps of L-BFGS, with dropout."""
    case = mlp(samples=96)
    torch.manual_seed(1)
    module = nn.Sequential(case.module, nn.Dropout(0.2), nn.Linear(4, 4).double())
    with BatchOptimizer(
        module, case.criterion, parallelize=parallelize, backend=backend, chunk_size=4, **options
    ) as opt:
        for _ in range(count):
            opt.step(case.inputs, case.targets)
        return opt.fingerprint()


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The fingerprint of one process."""
    return steps("serial", 1)


class Disturbance:
    """A hook, that runs in the workers: the first to come to chunk `chunk` says so and waits for `do` to be over. `do`
    runs in this process, and is given the worker's pid."""

    def __init__(self, folder: Path, chunk: int, do: Callable[[int], None]) -> None:
        self._folder, self._do = folder, do
        self._thread = threading.Thread(target=self._watch)

        def hook(worker: Worker, sample: Sample) -> None:
            if sample.indices.start // 4 != chunk:
                return
            try:
                descriptor = os.open(folder / "there", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return
            os.write(descriptor, str(os.getpid()).encode())
            os.close(descriptor)
            deadline = time.monotonic() + 60
            while not (folder / "over").exists() and time.monotonic() < deadline:
                time.sleep(0.01)

        self.hook = hook

    def __enter__(self) -> Disturbance:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / "there").touch()
        self._thread.join()

    def _watch(self) -> None:
        there = self._folder / "there"
        deadline = time.monotonic() + 60
        while not (there.exists() and there.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
            if there.exists() and not there.stat().st_size and not self._thread.is_alive():
                return
        if there.exists() and there.stat().st_size:
            self._do(int(there.read_text()))
            (self._folder / "done").touch()
        (self._folder / "over").touch()


def host_of(pid: int) -> psutil.Process:
    """The actor that a worker process belongs to."""
    for parent in psutil.Process(pid).parents():
        if "ray::NodeActor" in " ".join(parent.cmdline()):
            return parent
    raise LookupError


def node_of(pid: int, cluster: Cluster) -> Any:
    """The node of the cluster on which a worker process runs."""
    raylets = {process.pid for process in host_of(pid).parents()}
    for node in cluster.worker_nodes:
        if any(info.process.pid in raylets for info in node.all_processes["raylet"]):
            return node
    raise LookupError


# ---- bits


def test_the_same_bits_as_one_process_and_as_worker_processes(two_nodes: Cluster, undisturbed: str) -> None:
    assert steps("process", 3) == undisturbed
    assert steps("ray", 2) == undisturbed
    assert steps("ray", 5) == undisturbed


@pytest.mark.slow
def test_lists_of_samples_terms_and_products_of_the_hessian(two_nodes: Cluster) -> None:
    def run(backend: str, parallelize: int) -> list[Any]:
        torch.manual_seed(0)
        net = Mlp(2, 8, 1).double()
        points = [torch.rand(2).double() for _ in range(24)]
        values = torch.rand(10, 2).double(), torch.rand(10, 1).double()
        terms = {
            "inside": batchopt.Term(lambda m, x, _: m(x).square().sum()),
            "edge": batchopt.Term(lambda m, x, y: nn.functional.mse_loss(m(x), y), weight=10.0),
        }
        found: list[Any] = []

        def note(worker: Worker, sample: Sample) -> Any:
            return sample.options

        with BatchOptimizer(
            net, terms=terms, optimizer=None, backend=backend, parallelize=parallelize, chunk_size=3, posthook=note
        ) as opt:
            opt.load({"inside": (points, None, list(range(24))), "edge": values})
            found += [opt.evaluate().item(), opt.losses, opt.grad_parameters.clone(), opt.hook_results]
            found.append(opt.hvp(torch.ones_like(opt.parameters)))
            opt.weights = {"inside": 2.0, "edge": 0.5}
            options = list(range(24))
            for _ in range(4):  # from the third time on samples are not sent again
                opt.load({"inside": (points, None, options), "edge": values})
                found += [opt.evaluate().item(), opt.hook_results]
        return found

    for mine, theirs in zip(run("ray", 4), run("serial", 1), strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


# ---- traffic


def size(message: object) -> int:
    """Bytes of it on the network."""
    return len(cloudpickle.dumps(message))


class Traffic:
    """Bytes that go to machines and come back."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent = self.received = self.sums = 0
        work, get = ClusterNode.work, ray.get

        def counted(machine: ClusterNode, call: Any, news: Any, task: NodeRequest) -> None:
            self.sent += size((news, task.method))
            self.sent += sum(size(get(x) if isinstance(x, ray.ObjectRef) else x) for x in task.arguments)
            work(machine, call, news, task)

        def counting(reference: Any, **options: Any) -> Any:
            value = get(reference, **options)
            self.received += size(value)
            if hasattr(value, "value") and hasattr(value.value, "sums"):
                self.sums += len(value.value.sums)
            return value

        patch.setattr(ClusterNode, "work", counted)
        patch.setattr(ray, "get", counting)


@pytest.mark.slow
def test_the_bytes_of_an_evaluation_do_not_grow_with_the_workers_of_a_node(
    two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(parallelize: int, chunk_size: int | None) -> tuple[int, int, int]:
        """Vectors that come back, bytes sent and received in an evaluation."""
        await_free()  # or all workers come on the node that is free first
        torch.manual_seed(0)
        module = nn.Linear(2000, 20)
        x, y = torch.randn(64, 2000), torch.randn(64, 20)
        speeds = [1.0] * parallelize
        with (
            monkeypatch.context() as patch,
            BatchOptimizer(
                module,
                nn.MSELoss(),
                optimizer=None,
                backend="ray",
                parallelize=parallelize,
                chunk_size=chunk_size,
                speeds=speeds,
            ) as opt,
        ):
            opt.load(x, y)
            opt.evaluate()
            traffic = Traffic(patch)
            found = []
            for _ in range(4):  # where a node is late, which a busy machine makes it, the other sends more
                traffic.sent = traffic.received = traffic.sums = 0
                opt.evaluate()
                found.append((traffic.sums, traffic.sent, traffic.received))
            return min(found)

    vector = 40_020 * 4
    for chunk_size in (None, 4):
        for parallelize in (2, 8):
            sums, sent, received = measure(parallelize, chunk_size)
            assert sums == 2, (parallelize, chunk_size)  # one a node
            assert sent < 2 * vector + 10_000 and received < 2 * vector + 10_000, (parallelize, chunk_size)


@pytest.mark.slow
def test_a_node_is_sent_its_shard_once(two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(1000, 100), torch.randn(1000, 1)
    traffic = Traffic(monkeypatch)
    with BatchOptimizer(
        nn.Linear(100, 1), nn.MSELoss(), optimizer=None, backend="ray", parallelize=4, speeds=[1.0, 1.0, 3.0, 3.0]
    ) as opt:
        opt.load(x, y)
        before = traffic.sent
        opt.evaluate()
        assert x.nbytes + y.nbytes < traffic.sent - before < 1.1 * (x.nbytes + y.nbytes)
        before = traffic.sent
        opt.evaluate()
        assert traffic.sent - before < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("lists", [False, True])
def test_a_batch_that_comes_again_is_not_sent_again(
    two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch, lists: bool
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(200, 100), torch.randn(200, 1)
    batch = (list(x), list(y)) if lists else (x, y)
    net = nn.Linear(100, 1)
    with (
        BatchOptimizer(net, nn.MSELoss(), optimizer=None, backend="ray", parallelize=4, chunk_size=8) as opt,
        BatchOptimizer(copy.deepcopy(net), nn.MSELoss(), optimizer=None, chunk_size=8) as alone,
    ):
        opt.load(*batch)  # and measure
        traffic = Traffic(monkeypatch)
        sent = []
        for again in range(5):
            if again == 3:
                x.numpy()[150] = 7.0  # which no version counter tells
            before = traffic.sent
            for each in (opt, alone):
                each.load(*batch)
                each.evaluate()
            sent.append(traffic.sent - before > x.nbytes / 2)
            assert opt.evaluate().item() == alone.evaluate().item()
            assert torch.equal(opt.grad_parameters, alone.grad_parameters)
        assert sent == [True, False, False, True, False]


# ---- workers


@pytest.mark.slow
def test_workers_are_spread_over_the_nodes_and_know_their_place(two_nodes: Cluster) -> None:
    def note(worker: Worker) -> None:
        worker.state["precode"] = worker.rank, worker.world_size

    with BatchOptimizer(Mlp(), nn.MSELoss(), backend="ray", parallelize=6, precode=note) as opt:
        found = opt.run_on_workers(lambda worker: (worker.state["precode"], os.getpid()))
        assert [place for place, _ in found] == [(rank, 6) for rank in range(6)]
        assert [worker.pid for worker in opt.workers] == [pid for _, pid in found]
        hosts = [host_of(pid).pid for _, pid in found]
        assert sorted(hosts.count(host) for host in set(hosts)) == [3, 3]
        assert all(worker.alive and worker.host and worker.restarts == 0 for worker in opt.workers)


@pytest.mark.slow
def test_more_and_fewer_workers(two_nodes: Cluster) -> None:
    case = cnn()

    def mark(worker: Worker) -> None:
        worker.state["old"] = True

    with BatchOptimizer(
        case.module, case.criterion, backend="ray", parallelize=2, chunk_size=8, optimizer="sgd"
    ) as opt:
        opt.run_on_workers(mark)
        opt.step(case.inputs, case.targets)
        opt.resize(4)
        assert opt.run_on_workers(lambda w: (w.rank, "old" in w.state)) == [
            (0, True),
            (1, True),
            (2, False),
            (3, False),
        ]
        opt.step(case.inputs, case.targets)
        opt.resize(3)
        assert opt.run_on_workers(lambda w: w.rank) == [0, 1, 2]
        opt.step(case.inputs, case.targets)
        opt.resize(1)
        opt.step(case.inputs, case.targets)
        assert len({host_of(worker.pid).pid for worker in opt.workers}) == 1  # a worker there, not this process
        mine = opt.fingerprint()
    twin = cnn()
    with BatchOptimizer(twin.module, twin.criterion, chunk_size=8, optimizer="sgd") as alone:
        for _ in range(4):
            alone.step(twin.inputs, twin.targets)
        assert alone.fingerprint() == mine


@pytest.mark.slow
def test_a_node_that_becomes_slow_gets_less_the_next_time(two_nodes: Cluster) -> None:
    case = mlp(samples=64)

    def slow(worker: Worker, sample: Sample) -> None:
        time.sleep(0.01 * len(sample.indices) * (4 if worker.rank == 1 and worker.state.get("slow") else 1))

    with BatchOptimizer(case.module, case.criterion, backend="ray", parallelize=2, prehook=slow, optimizer=None) as opt:
        opt.load(case.inputs, case.targets)
        opt.evaluate()
        opt.run_on_workers(lambda worker: worker.state.update(slow=True))
        for _ in range(6):
            opt.evaluate()
        before = opt.workers[1].samples
        opt.evaluate()
        assert opt.workers[1].samples - before <= 20


@pytest.mark.slow
def test_a_node_that_has_nothing_left_takes_from_one_that_has(two_nodes: Cluster) -> None:
    case = mlp(samples=64)

    def slow(worker: Worker, sample: Sample) -> None:
        time.sleep(0.1 if worker.rank == 1 else 0.0)

    with BatchOptimizer(
        case.module,
        case.criterion,
        optimizer=None,
        backend="ray",
        parallelize=2,
        chunk_size=2,
        speeds=[1.0, 1.0],
        prehook=slow,
        posthook=lambda worker, sample: worker.rank,
    ) as opt:
        opt.load(case.inputs, case.targets)
        loss, gradient = opt.evaluate().item(), opt.grad_parameters.clone()  # measures how long a share takes
        assert opt.evaluate().item() == loss and torch.equal(opt.grad_parameters, gradient)
        assert opt.hook_results.count(0) > 18 and opt.hook_results[:16] == [0] * 16 and 1 in opt.hook_results


# ---- failures


@pytest.mark.slow
def test_a_node_that_is_killed_in_mid_step(start: Start, undisturbed: str, tmp_path: Path) -> None:
    cluster = start(nodes=3, cores=2)
    with Disturbance(tmp_path, 20, lambda pid: cluster.remove_node(node_of(pid, cluster), allow_graceful=False)) as d:
        assert steps("ray", 4, prehook=d.hook) == undisturbed
    assert (tmp_path / "done").exists()


@pytest.mark.slow
def test_samples_that_are_sent_again_are_those_that_were_read(two_nodes: Cluster, tmp_path: Path) -> None:
    """The next batch is read into the same memory, while a machine is lost with its part of this one."""

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        case, buffer = mlp(samples=96), torch.empty_like(mlp(samples=96).inputs)
        for i in range(3):
            yield buffer.copy_(case.inputs * (i + 1)), case.targets

    def run(**options: Any) -> str:
        case = mlp(samples=96)
        with BatchOptimizer(case.module, case.criterion, chunk_size=4, **options) as opt:
            assert len(list(opt.steps(batches()))) == 3
            return opt.fingerprint()

    with Disturbance(tmp_path, 20, lambda pid: host_of(pid).kill()) as disturbance:
        assert run(backend="ray", parallelize=4, prehook=disturbance.hook) == run()
    assert (tmp_path / "done").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["the actor is killed", "the actor is stopped", "a worker is killed"])
def test_a_process_that_ends_or_stops_in_mid_step(
    two_nodes: Cluster, undisturbed: str, tmp_path: Path, way: str
) -> None:
    stopped: list[psutil.Process] = []

    def disturb(pid: int) -> None:
        if way == "a worker is killed":
            os.kill(pid, signal.SIGKILL)
        elif way == "the actor is killed":
            host_of(pid).kill()
        else:
            stopped.append(host_of(pid))
            stopped[0].suspend()

    with Disturbance(tmp_path, 20, disturb) as disturbance:
        assert steps("ray", 4, prehook=disturbance.hook, timeout=2.0) == undisturbed
    assert (tmp_path / "done").exists()
    for process in stopped:
        if process.is_running():
            process.kill()


@pytest.mark.slow
def test_a_lost_actor_is_replaced(two_nodes: Cluster) -> None:
    case = mlp(samples=96)
    with BatchOptimizer(
        case.module, case.criterion, backend="ray", parallelize=4, optimizer="sgd", chunk_size=4
    ) as opt:
        opt.step(case.inputs, case.targets)
        before = [worker.pid for worker in opt.workers]
        host_of(before[0]).kill()
        opt.step(case.inputs, case.targets)
        deadline = time.monotonic() + 60
        while not all(worker.alive for worker in opt.workers) and time.monotonic() < deadline:
            opt.step(case.inputs, case.targets)
        assert [worker.alive for worker in opt.workers] == [True] * 4
        assert opt.run_on_workers(lambda worker: (worker.rank, os.getpid())) == [(w.rank, w.pid) for w in opt.workers]
        assert sum(worker.pid not in before for worker in opt.workers) == 2
        assert sum(worker.restarts for worker in opt.workers) == 2


@pytest.mark.slow
def test_all_nodes_lost_is_an_error(start: Start) -> None:
    cluster = start(nodes=1, cores=2)
    case = mlp()
    with BatchOptimizer(
        case.module, case.criterion, backend="ray", parallelize=2, optimizer="sgd", max_restarts=0
    ) as opt:
        opt.step(case.inputs, case.targets)
        cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
        with pytest.raises(batchopt.AllWorkersLostError, match=r"no worker is left.*(ActorUnavailable|ActorDied)"):
            while True:  # its processes live on for a moment
                before = opt.parameters.clone()
                opt.step(case.inputs, case.targets)
        assert torch.equal(opt.parameters, before)


@pytest.mark.slow
def test_a_node_that_joins_is_used_from_the_next_step_on(start: Start) -> None:
    cluster = start(nodes=1, cores=1)
    case = mlp(samples=96)
    with BatchOptimizer(case.module, case.criterion, backend="ray", parallelize="auto", optimizer="sgd") as opt:
        opt.step(case.inputs, case.targets)
        assert [worker.pid != os.getpid() for worker in opt.workers] == [True]
        cluster.add_node(num_cpus=2)
        opt.step(case.inputs, case.targets)
        opt.step(case.inputs, case.targets)
        assert len(opt.workers) == 3 and all(worker.samples for worker in opt.workers)
        opt.resize(2)  # a number is a number
        opt.step(case.inputs, case.targets)
        assert len(opt.workers) == 2
        kept = [worker.pid for worker in opt.workers]
        opt.resize("auto")
        opt.step(case.inputs, case.targets)
        assert [worker.pid for worker in opt.workers][:2] == kept  # their own cores are no less room


@pytest.mark.slow
def test_a_node_that_joins_and_cannot_work_is_left_alone(start: Start) -> None:
    def precode(worker: Worker) -> None:
        if worker.rank > 0:
            raise OSError("no such device")

    cluster = start(nodes=1, cores=1)
    case = mlp(samples=96)
    with BatchOptimizer(
        case.module, case.criterion, backend="ray", parallelize="auto", optimizer="sgd", precode=precode
    ) as opt:
        opt.step(case.inputs, case.targets)
        cluster.add_node(num_cpus=2)
        with pytest.warns(UserWarning, match="2 more workers would have room, but do not start.* no such device"):
            opt.step(case.inputs, case.targets)
        opt.step(case.inputs, case.targets)
        assert [worker.alive for worker in opt.workers] == [True]


@pytest.mark.slow
def test_a_failure_of_the_users_code_names_the_first_samples(two_nodes: Cluster) -> None:
    def refuse(worker: Worker, sample: Sample) -> None:
        raise ZeroDivisionError(str(sample.indices.start))

    case = mlp(samples=96)
    with BatchOptimizer(
        case.module, case.criterion, backend="ray", parallelize=4, chunk_size=4, prehook=refuse, optimizer="sgd"
    ) as opt:
        for _ in range(3):
            with pytest.raises(WorkerError, match=r"ZeroDivisionError in worker 0, samples 0\.\.3: 0"):
                opt.step(case.inputs, case.targets)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_it_usable(two_nodes: Cluster, tmp_path: Path) -> None:
    case = mlp(samples=96)
    main = threading.main_thread().ident
    assert main is not None
    with (
        Disturbance(tmp_path, 20, lambda pid: signal.pthread_kill(main, signal.SIGINT)) as disturbance,
        BatchOptimizer(
            case.module,
            case.criterion,
            backend="ray",
            parallelize=4,
            chunk_size=4,
            prehook=disturbance.hook,
            optimizer="sgd",
        ) as opt,
    ):
        before = opt.parameters.clone()
        with pytest.raises(KeyboardInterrupt):
            opt.step(case.inputs, case.targets)
        assert torch.equal(opt.parameters, before)
        opt.step(case.inputs, case.targets)
        mine = opt.fingerprint()
    twin = mlp(samples=96)
    with BatchOptimizer(twin.module, twin.criterion, chunk_size=4, optimizer="sgd") as alone:
        alone.step(twin.inputs, twin.targets)
        assert alone.fingerprint() == mine


# ---- what cannot be


@pytest.mark.slow
def test_a_module_that_the_nodes_lack_is_named(two_nodes: Cluster, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import only_here  # type: ignore[import-not-found]

        with pytest.raises(WorkerError, match=r"No module named 'only_here'.*runtime_env"):
            BatchOptimizer(only_here.Net(2, 1), nn.MSELoss(), backend="ray", parallelize=2)
        with BatchOptimizer(
            only_here.Net(2, 1),
            nn.MSELoss(),
            backend="ray",
            parallelize=2,
            ray_options={
                "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}}
            },
        ) as opt:
            opt.step(torch.ones(4, 2), torch.ones(4, 1))


@pytest.mark.slow
def test_more_workers_than_there_is_room_for(two_nodes: Cluster) -> None:
    with pytest.raises(ValueError, match=r"9 workers .* has room for 8 more"):
        BatchOptimizer(Mlp(), nn.MSELoss(), backend="ray", parallelize=9)
    with pytest.raises(ValueError, match=r"2 workers are asked for, each with {'CPU': 1.0, 'GPU': 1.0}"):
        BatchOptimizer(Mlp(), nn.MSELoss(), backend="ray", parallelize=2, ray_options={"num_gpus": 1})
    with BatchOptimizer(Mlp(), nn.MSELoss(), backend="ray", parallelize=9, ray_options={"num_cpus": 0.5}) as opt:
        assert len(opt.workers) == 9


@pytest.mark.slow
def test_other_versions_on_a_node_are_an_error(two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchopt.backends.ray.nodes.versions", lambda: "Python 3.9.0, torch 1.0.0")
    began = time.monotonic()
    with pytest.raises(batchopt.WorkerStartError, match=r"torch 2\..*this process has Python 3.9.0, torch 1.0.0"):
        BatchOptimizer(Mlp(), nn.MSELoss(), backend="ray", parallelize=2)
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_nodes_without_torch_are_an_error_soon(two_nodes: Cluster, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not the one you want')")
    options = {"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}}}
    began = time.monotonic()
    with pytest.raises(batchopt.WorkerStartError, match=r"workers do not start: (.|\n)*not the one you want"):
        BatchOptimizer(Mlp(), nn.MSELoss(), backend="ray", parallelize=2, ray_options=options)
    assert time.monotonic() - began < 30


def test_a_cluster_that_is_not_there_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"no Ray cluster answers at 127.0.0.1:9"):
        BatchOptimizer(Mlp(), nn.MSELoss(), backend="ray", parallelize=2)
    assert time.monotonic() - began < 10
