"""What does an evaluation over several machines cost where there is a wire between them?

Each machine is a network namespace of this one, with an address of its own behind a switch; what leaves it and what
comes in passes a token bucket (tbf) of 1 or 10 Gbit/s. Ours by a rank in each, and on two machines by a Ray node in
each, the parent on the first; and DistributedDataParallel over gloo with a rank in each; linear layers of 10,000 and
8.4 million parameters on eight samples, one worker or rank a machine; ours at another X each time. And a step of
L-BFGS (20 iterations without a line search, 20 pairs) by ranks of ours, and by torch.optim.LBFGS over
DistributedDataParallel. All share the cores of this machine; more Ray nodes than two do not start here. Namespaces are
removed at the end. They need root, `ip` and `tc`: where they cannot be made, a line says so.

    python -m benchmarks.network [--rates 1 10] [--machines 2 4] [--rounds 8]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import batchopt
from batchopt.optim import LBFGS
from benchmarks.arms import ROUNDS, Arm, Distributed, Moving, Ranks, ranked, take_turns
from benchmarks.findings import Finding, publish
from benchmarks.workloads import build

SIZES = ("10,000", "8.4 million")
SWITCH, PREFIX, NETWORK = "batchopt-switch", "batchopt-", "10.77.0"
PORT = 6399
CLONE_NEWNET = 0x40000000
STARTING = 180.0
BURST = 8
DESCENT: dict[str, Any] = {
    "lr": 0.05,
    "max_iter": 20,
    "history_size": 20,
    "line_search_fn": None,
    "tolerance_grad": 0.0,
    "tolerance_change": 0.0,
}
GLOO = {"MASTER_ADDR": f"{NETWORK}.1", "GLOO_SOCKET_IFNAME": "eth0"}
# Times DistributedDataParallel at 1 Gbit/s, at most: of an arm, a size and a number of machines.
AIMS = {
    ("ranks", "10,000", 2): 1.0,
    ("ranks", "10,000", 4): 1.1,
    ("ranks", "8.4 million", 2): 1.05,
    ("Ray", "10,000", 2): 1.5,
    ("Ray", "8.4 million", 2): 1.9,
}


class NotAllowed(Exception):
    """Why there can be no such network here."""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def name_of(machine: int) -> str:
    """Of its namespace."""
    return f"{PREFIX}{machine}"


def address(machine: int) -> str:
    """Its address."""
    return f"{NETWORK}.{machine + 1}"


@contextmanager
def network(machines: int, gigabits: float) -> Iterator[None]:
    """So many namespaces behind a switch. Raises `NotAllowed`."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NotAllowed(f"there is no `{tool}`")
    remove(machines)
    try:
        try:
            _make(machines, gigabits)
        except (subprocess.CalledProcessError, OSError) as error:
            raise NotAllowed(str(getattr(error, "stderr", "") or error).strip()) from error
        yield
    finally:
        remove(machines)


def _make(machines: int, gigabits: float) -> None:
    _run("ip", "netns", "add", SWITCH)
    switch = ("ip", "-n", SWITCH)
    _run(*switch, "link", "add", "bridge", "type", "bridge")
    _run(*switch, "link", "set", "bridge", "up")
    for machine in range(machines):
        port, here = f"port{machine}", ("ip", "-n", name_of(machine))
        _run("ip", "netns", "add", name_of(machine))
        _run(*switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name_of(machine))
        _run(*switch, "link", "set", port, "master", "bridge")
        _run(*switch, "link", "set", port, "up")
        _run(*here, "address", "add", f"{address(machine)}/24", "dev", "eth0")
        _run(*here, "link", "set", "eth0", "up")
        _run(*here, "link", "set", "lo", "up")
        limit(machine, gigabits)


def limit(machine: int, gigabits: float) -> None:
    """Let the wire of a machine carry so much in each direction."""
    rate = ("root", "tbf", "rate", f"{gigabits:g}gbit", "burst", "512kb", "latency", "50ms")
    _run("tc", "-n", SWITCH, "qdisc", "replace", "dev", f"port{machine}", *rate)
    _run("tc", "-n", name_of(machine), "qdisc", "replace", "dev", "eth0", *rate)


def remove(machines: int) -> None:
    """Remove them, as far as they are there."""
    for name in (SWITCH, *map(name_of, range(machines))):
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def enter(machine: int) -> None:
    """Let this thread, and what it starts, be on that machine."""
    with Path(f"/run/netns/{name_of(machine)}").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace.name}")


class OurLBFGS:
    """A step by ranks of which each has one worker, its own process."""

    def __init__(self, workload: str, rank: int, ranks: int, port: int) -> None:
        ranked(rank, ranks, port)
        case = build(workload)
        self._opt = batchopt.BatchOptimizer(
            case.module, loss_fn=case.loss, optimizer=partial(LBFGS, **DESCENT), parallelize=1, backend="ranks"
        )
        self._case, self.close = case, self._opt.close

    def __call__(self) -> None:
        self._opt.step(self._case.inputs, self._case.targets)


class TorchLBFGS(Distributed):
    """A step by torch over DistributedDataParallel."""

    def __init__(self, workload: str, rank: int, ranks: int, port: int) -> None:
        super().__init__(workload, rank, ranks, port)
        self._optimizer = torch.optim.LBFGS(self.module.parameters(), **DESCENT)

    def __call__(self) -> float:
        return float(self._optimizer.step(super().__call__))  # type: ignore[no-untyped-call]


def on_its_machine(make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make` makes, on the machine of its rank; on the first, where there are no ranks."""
    enter(0 if make is Moving else arguments[-3])
    return make(*arguments)


@contextmanager
def ray_nodes(machines: int) -> Iterator[None]:
    """A Ray node with one core on each machine."""
    common = ["--num-cpus=1", "--object-store-memory=1000000000", "--disable-usage-stats", "--block"]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    processes = []
    try:
        for machine in range(machines):
            role = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if machine > 0:
                role = [f"--address={address(0)}:{PORT}"]
            place = ["ip", "netns", "exec", name_of(machine)]
            command = [*place, *ray, *role, f"--node-ip-address={address(machine)}", *common]
            processes.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            )
            if machine == 0:
                _await_ray(1)
        _await_ray(machines)
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _await_ray(nodes: int) -> None:
    """Wait until so many nodes are there. Raises `TimeoutError`."""
    look = f"import ray; ray.init('{address(0)}:{PORT}', logging_level='error'); print(len(ray.nodes()))"
    command = ["ip", "netns", "exec", name_of(0), sys.executable, "-W", "ignore", "-c", look]
    until = time.monotonic() + STARTING
    while time.monotonic() < until:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0 and int(found.stdout.split()[-1]) >= nodes:
            return
    raise TimeoutError(f"Ray did not start in {STARTING:g} s: {found.stderr[-2000:]}")


def measure(size: str, machines: int, rounds: int, with_ray: bool) -> dict[str, float]:
    """Seconds of an evaluation of each arm."""
    arms: dict[str, Arm] = {}
    there = {"RAY_ADDRESS": f"{address(0)}:{PORT}", "PYTHONWARNINGS": "ignore"}
    try:
        arms["ranks"] = Arm(on_its_machine, Ranks, size, processes=machines, environment=GLOO)
        if with_ray:
            arms["Ray"] = Arm(on_its_machine, Moving, size, machines, {"backend": "ray"}, environment=there)
        arms["ddp"] = Arm(on_its_machine, Distributed, size, processes=machines, environment=GLOO)
        return take_turns(arms, BURST, rounds)
    finally:
        for arm in arms.values():
            arm.close()


def measure_descent(rounds: int) -> dict[str, float]:
    """Seconds of a step of L-BFGS of each arm."""
    arms: dict[str, Arm] = {}
    try:
        for name, make in (("ranks", OurLBFGS), ("ddp", TorchLBFGS)):
            arms[name] = Arm(on_its_machine, make, "8.4 million", processes=2, environment=GLOO)
        return take_turns(arms, 2, rounds)
    finally:
        for arm in arms.values():
            arm.close()


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 10.0], help="Gbit/s")
    parser.add_argument("--machines", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    os.environ |= {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    os.environ["RAY_AUTH_MODE"] = "disabled"
    findings: list[Finding] = []
    details: dict[str, dict[str, float]] = {}

    def found(name: str, times: dict[str, float], aims: Mapping[str, float | None]) -> None:
        print(name, {arm: f"{1e3 * seconds:.2f} ms" for arm, seconds in times.items()}, flush=True)
        details[name] = times
        findings.append(Finding(f"{name}: DistributedDataParallel", 1e3 * times["ddp"], "ms"))
        for arm in sorted(times.keys() - {"ddp"}):
            findings.append(Finding(f"{name}: {arm} / that", times[arm] / times["ddp"], most=aims.get(arm)))

    try:
        for gigabits, machines in product(given.rates, given.machines):
            with_ray, where = machines == 2, f"{machines} machines, {gigabits:g} Gbit/s"
            with network(machines, gigabits), ray_nodes(machines) if with_ray else nullcontext():
                for size in SIZES:
                    aims = {arm: AIMS.get((arm, size, machines)) for arm in ("ranks", "Ray")} if gigabits == 1 else {}
                    found(f"{size} parameters, {where}", measure(size, machines, given.rounds, with_ray), aims)
            if machines == 2 and gigabits == 1:
                with network(machines, gigabits):
                    found(f"L-BFGS, 8.4 million parameters, {where}", measure_descent(2), {"ranks": 0.9})
    except NotAllowed as error:
        print(f"left out, since network namespaces cannot be made here: {error}")
        return
    publish("network", findings, details)


if __name__ == "__main__":
    main()
