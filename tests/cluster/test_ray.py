"""Nodes that Ray places: bits, machines that come and go, what cannot be. The rest is in `tests/nodes`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch import nn

import batchopt
from batchopt import BatchOptimizer, Worker, WorkerError
from tests.cluster.conftest import Start
from tests.nodes.disturbance import Disturbance, steps
from tests.workloads import Mlp, mlp

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The fingerprint of one process."""
    return steps("serial", 1)


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


@pytest.mark.nightly
def test_the_same_bits_as_one_process_and_as_worker_processes(two_nodes: Cluster, undisturbed: str) -> None:
    assert steps("process", 3) == undisturbed
    assert steps("ray", 2) == undisturbed
    assert steps("ray", 5) == undisturbed


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


@pytest.mark.nightly
def test_a_node_that_is_killed_in_mid_step(start: Start, undisturbed: str, tmp_path: Path) -> None:
    cluster = start(nodes=3, cores=2)
    with Disturbance(tmp_path, 20, lambda pid: cluster.remove_node(node_of(pid, cluster), allow_graceful=False)) as d:
        assert steps("ray", 4, prehook=d.hook) == undisturbed
    assert (tmp_path / "done").exists()


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_an_actor_that_ends_or_stops_in_mid_step(
    two_nodes: Cluster, undisturbed: str, tmp_path: Path, way: str
) -> None:
    found: list[psutil.Process] = []

    def disturb(pid: int) -> None:
        found.append(host_of(pid))
        found[0].kill() if way == "killed" else found[0].suspend()

    with Disturbance(tmp_path, 20, disturb) as disturbance:
        assert steps("ray", 4, prehook=disturbance.hook, timeout=2.0) == undisturbed
    assert (tmp_path / "done").exists()
    if found[0].is_running():
        found[0].kill()


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_module_that_the_nodes_lack_is_named(two_nodes: Cluster, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import only_here  # type: ignore[import-not-found]

        with pytest.raises(WorkerError, match=r"No module named 'only_here'.*runtime_env"):
            BatchOptimizer(only_here.Net(2, 1), nn.MSELoss(), backend="ray", parallelize=2)
        paths = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
        options = {"runtime_env": {"env_vars": {"PYTHONPATH": paths}}}
        with BatchOptimizer(
            only_here.Net(2, 1), nn.MSELoss(), backend="ray", parallelize=2, ray_options=options
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


@pytest.mark.nightly
def test_other_versions_on_a_node_are_an_error(two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchopt.backends.nodes.members.versions", lambda: "Python 3.9.0, torch 1.0.0")
    with pytest.raises(batchopt.WorkerStartError, match=r"torch 2\..*this process has Python 3.9.0, torch 1.0.0"):
        BatchOptimizer(Mlp(), nn.MSELoss(), backend="ray", parallelize=2)


@pytest.mark.nightly
def test_nodes_without_torch_are_an_error_soon(two_nodes: Cluster, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not the one you want')")
    options = {"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}}}
    with pytest.raises(batchopt.WorkerStartError, match=r"workers do not start: (.|\n)*not the one you want"):
        BatchOptimizer(Mlp(), nn.MSELoss(), backend="ray", parallelize=2, ray_options=options)
