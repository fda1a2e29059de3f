"""The Ray backend: nodes on the machines of a cluster.

Ray tells where there is room, places an actor there, and tells when one is gone; the actor serves as a node until it is
told to end. Ray carries only the first call: nodes meet in their own group (see `backends.nodes`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from batchopt._data.arguments import read_parallelize
from batchopt.backends.base import Setup
from batchopt.backends.nodes.backend import NodesBackend
from batchopt.backends.nodes.node import serve
from batchopt.backends.nodes.placing import Capacity
from batchopt.backends.ray.cluster import Needs, connect, rooms
from batchopt_workers.wire.failures import let_through


class NodeActor:
    """Serves as a node."""

    def serve(self, address: str, port: int, number: int) -> None:
        """See `node.serve`."""
        serve(address, port, number)


class RayNode:
    """A node's actor."""

    def __init__(self, ray: Any, actor: Any, served: Any) -> None:
        self._ray, self._actor, self._served = ray, actor, served

    def gone(self) -> str | None:
        """See `NodeProcess`."""
        ready, _ = self._ray.wait([self._served], timeout=0)
        if not ready:
            return None
        try:
            self._ray.get(self._served)
        except Exception as error:
            let_through(error)
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"{type(error).__name__}: {' '.join(lines)[:2000]}"
        return "has ended"

    def kill(self) -> None:
        """See `NodeProcess`."""
        with suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)


class RayPlacer:
    """Places actors of a Ray cluster, each with what its workers need."""

    def __init__(self, needs: Needs) -> None:
        """Connects to Ray; raises what `connect` raises."""
        self._needs, self._ray = needs, connect()
        self.address: str = self._ray.util.get_node_ip_address()

    def rooms(self, whole: bool = False) -> list[Capacity]:
        """See `Placer`."""
        return rooms(self._ray, self._needs, whole)

    def place(self, machine: str, workers: int, address: str, port: int, number: int) -> RayNode:
        """See `Placer`."""
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(machine, soft=False)
        remote = self._ray.remote(max_restarts=0, max_task_retries=0)(NodeActor)
        actor = remote.options(scheduling_strategy=affinity, **self._needs.options(workers)).remote()
        return RayNode(self._ray, actor, actor.serve.remote(address, port, number))

    def refusal(self, workers: int, free: int, whole: int) -> str:
        """See `Placer`."""
        return (
            f"{workers} workers are asked for, each with {self._needs.each}; the cluster has room for {free} more, and "
            f"for {whole} if it had no other users: use fewer, or less for each, as ray_options={{'num_cpus': 0.5}}"
        )


class RayBackend(NodesBackend):
    """`setup.workers` workers on the nodes of a cluster."""

    @classmethod
    def read_workers(cls, parallelize: Any) -> int | None:
        return None if parallelize == "auto" else read_parallelize(parallelize)

    @classmethod
    def check(cls, setup: Setup) -> None:
        Needs.read(setup.options)
        if setup.flat.vector.device.type != "cpu":
            raise ValueError(
                f"parameters are on {setup.flat.vector.device}: call module.cpu(); workers compute on GPUs where "
                "ray_options={'num_gpus': 1} gives them one"
            )
        if setup.devices is not None:
            raise ValueError("`devices` are of worker processes here; on Ray use ray_options={'num_gpus': 1}")
        super().check(setup)

    def placer(self, setup: Setup) -> RayPlacer:
        self._needs = Needs.read(setup.options)
        return RayPlacer(self._needs)

    def threads(self) -> int:
        return self._setup.threads or self._needs.threads

    def devices(self, workers: int) -> tuple[torch.device, ...] | None:
        gpus = self._needs.gpus
        return tuple(torch.device("cuda", int(i * gpus)) for i in range(workers)) if gpus else None
