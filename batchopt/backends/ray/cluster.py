"""A Ray cluster: connecting to one, the machines that have room for workers, and the options of actors there."""

from __future__ import annotations

import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from batchopt.backends.nodes.placing import Capacity
from batchopt_workers.wire.failures import let_through

# Seconds that a cluster may take to answer.
REACHING = 5.0
# Default resources of a worker.
CORES, GPUS = 1.0, 0.0
# Options that this library has to choose itself.
_OURS = frozenset(
    "scheduling_strategy placement_group concurrency_groups max_concurrency max_restarts max_task_retries num_returns "
    "name namespace lifetime get_if_exists".split()
)


@dataclass(frozen=True)
class Needs:
    """The resources of one worker, and `others`: options of the actor that holds a machine's workers."""

    cores: float = CORES
    gpus: float = GPUS
    resources: Mapping[str, float] = field(default_factory=dict)
    memory: float = 0.0
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, options: Any) -> Needs:
        """Read `ray_options`. Raises `TypeError` or `ValueError` for anything that cannot be used."""
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise TypeError(f"`ray_options` must be a dict of options of a Ray actor, got {type(options).__name__}")
        if taken := sorted(_OURS & options.keys()):
            raise ValueError(f"`ray_options` may not have {taken}: workers are placed and replaced by batchopt")
        left = dict(options)
        cores, gpus = left.pop("num_cpus", CORES), left.pop("num_gpus", GPUS)
        resources, memory = left.pop("resources", None) or {}, left.pop("memory", None) or 0.0
        for name, amount in {"num_cpus": cores, "num_gpus": gpus, "memory": memory, **resources}.items():
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not amount >= 0:
                raise ValueError(f"`ray_options` {name!r} is what one worker takes, a number >= 0; got {amount!r}")
        return cls(float(cores), float(gpus), dict(resources), float(memory), left)

    @property
    def each(self) -> dict[str, float]:
        """The resources of a worker under Ray's names."""
        state = {"CPU": self.cores, "GPU": self.gpus, "memory": self.memory, **self.resources}
        return {name: amount for name, amount in state.items() if amount > 0}

    @property
    def threads(self) -> int:
        """The number of threads of a worker: that of its cores."""
        return max(1, int(self.cores))

    def options(self, workers: int) -> dict[str, Any]:
        """Return the options of an actor that holds `workers` workers."""
        found: dict[str, Any] = {"num_cpus": self.cores * workers, **self.others}
        if self.gpus:
            found["num_gpus"] = self.gpus * workers
        if self.resources:
            found["resources"] = {name: amount * workers for name, amount in self.resources.items()}
        if self.memory:
            found["memory"] = self.memory * workers
        return found


def fitting(available: Mapping[str, float], each: Mapping[str, float]) -> int:
    """Return how many workers that take `each` fit into the available resources."""
    return int(min((available.get(name, 0.0) / amount + 1e-9 for name, amount in each.items()), default=0.0))


def load_ray() -> ModuleType:
    """Return the module. Raises an `ImportError` that tells how to install it."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError(f"backend 'ray' needs Ray: pip install 'batchopt[ray]' ({error})") from error


def connect() -> ModuleType:
    """Return Ray, connected: as by the user; else to the cluster that `RAY_ADDRESS` names or that this machine belongs
    to; else to a new one on this machine, which ends with this process.

    Raises `ImportError`, and `ConnectionError` if there is no answer.
    """
    ray = load_ray()
    if not ray.is_initialized():
        address = _address()
        try:
            with _as_before():
                ray.init(address, include_dashboard=False, configure_logging=False)
        except Exception as error:
            let_through(error)
            where = os.environ.get("RAY_ADDRESS") or "of this machine"
            raise ConnectionError(f"the Ray cluster {where} cannot be used: {error}") from error
    _warn_without_token()
    return ray


def _address() -> str | None:
    """Return the address to connect to; None: Ray finds it. Ray itself would try for minutes where no process listens.

    Raises `ConnectionError` if no process listens at `RAY_ADDRESS`. An address left on this machine by an earlier
    cluster is ignored.
    """
    given = os.environ.get("RAY_ADDRESS", "")
    if given:
        try:
            _knock(given)
        except OSError as error:
            raise ConnectionError(
                f"no Ray cluster answers at {given} (RAY_ADDRESS): {error}; start one with `ray start --head`, or "
                f"unset RAY_ADDRESS"
            ) from error
        return None
    try:
        _knock(import_module("ray._private.utils").read_ray_address() or "")  # there is no public way
    except OSError:
        return "local"
    return None


def _knock(address: str) -> None:
    """Raise `OSError` if no process listens there; not for addresses with a special meaning in Ray."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), REACHING).close()


@contextmanager
def _as_before() -> Iterator[None]:
    """Undo Ray's changes to this process when it connects: a handler of SIGTERM, and Python's debugger."""
    handler, hook, variable = signal.getsignal(signal.SIGTERM), sys.breakpointhook, os.environ.get("PYTHONBREAKPOINT")
    try:
        yield
    finally:
        if handler is not None and signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)
        sys.breakpointhook = hook
        if variable is None:
            os.environ.pop("PYTHONBREAKPOINT", None)
        else:
            os.environ["PYTHONBREAKPOINT"] = variable


_warned = False


def _warn_without_token() -> None:
    global _warned
    if not _warned and os.environ.get("RAY_AUTH_MODE") != "token":
        _warned = True
        warnings.warn(
            "this Ray cluster asks for no token: anyone who reaches its ports can run code on it. Start it, and this "
            "program, with RAY_AUTH_MODE=token",
            stacklevel=2,
        )


def rooms(ray: ModuleType, needs: Needs, whole: bool = False) -> list[Capacity]:
    """List the machines with the number of workers that fit there; with `whole`, as if there were no other users."""
    found = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    if not whole:
        free = import_module("ray._private.state").available_resources_per_node()  # there is no public way
        found = {node: free[node] for node in found if node in free}
    each = needs.each or {"CPU": CORES}
    fit = [Capacity(node, fitting(resources, each)) for node, resources in sorted(found.items())]
    return [room for room in fit if room.workers > 0]
