"""A Ray cluster of several nodes on this machine, for the tests of this folder."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.conftest import collect_garbage, is_fork_server

if TYPE_CHECKING:  # a second, which who runs other tests need not wait for
    from ray.cluster_utils import Cluster

# Ray reads the first when it is imported, and without it whether the user has a token; it sets the second then, and
# workers of another environment would be forked from another process.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_CLIENT_MODE": "0"}
# Seconds that Ray may need to end an actor and to free its cores, where other tests run beside.
PATIENCE = 30.0
# Bytes of memory for objects on a node.
STORE = 160 * 2**20
ROOT = Path(__file__).parent.parent.parent


def of_ours(process: psutil.Process) -> bool:
    """Whether it is an actor of ours, or one of its processes: not one of Ray's own, which come and go."""
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "ray::NodeActor" in line or "multiprocessing" in line


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves an actor or a worker process."""
    me = psutil.Process()
    children = {child.pid for child in me.children(recursive=True)}
    yield
    collect_garbage()
    new = [child for child in me.children(recursive=True) if child.pid not in children]
    left = [child for child in new if of_ours(child) and not is_fork_server(child.pid)]
    _, left = psutil.wait_procs(left, timeout=PATIENCE)
    assert not left, f"processes left: {[process.cmdline() for process in left]}"


Start = Callable[..., "Cluster"]


@pytest.fixture(scope="package")
def start() -> Iterator[Start]:
    """Starts a cluster with `nodes` nodes of `cores` cores beside a head that has none, and connects to it; ends it
    when another one is started."""
    import ray
    from ray.cluster_utils import Cluster

    running: list[Cluster] = []
    handler = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        ray.shutdown()
        while running:
            running.pop().shutdown()  # type: ignore[no-untyped-call]

    def begin(nodes: int = 2, cores: int = 4, **options: Any) -> Cluster:
        stop()
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False},
        )
        running.append(cluster)
        for _ in range(nodes):
            cluster.add_node(num_cpus=cores, object_store_memory=STORE, **options)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        signal.signal(signal.SIGTERM, handler)  # Ray's nodes and init have put theirs there, and tests of others follow
        return cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "workers")]))
        patch.setattr("batchopt.backends.ray.cluster._warned", True)
        yield begin
        stop()


_whole: list[Cluster] = []


@pytest.fixture
def two_nodes(start: Start) -> Cluster:
    """A cluster that tests do not change, of two nodes with four cores, all of them free; begun anew if another test
    has ended it."""
    import ray

    if not (_whole and ray.is_initialized() and ray.get_runtime_context().gcs_address == _whole[0].address):
        _whole[:] = [start()]
    await_free()
    return _whole[0]


def await_free() -> None:
    """Wait until all cores of the cluster are free: Ray frees those of an actor a little after its end."""
    import ray

    cluster: Any = ray
    until = time.monotonic() + PATIENCE
    while cluster.available_resources().get("CPU") != cluster.cluster_resources()["CPU"]:
        assert time.monotonic() < until, "the cores of an actor were not freed"
        time.sleep(0.01)
