"""What do 64 ranks, or nodes, take to agree on an evaluation, and to come and go?

Ranks are processes of this machine, each with one worker, its own process: a linear layer of 10,000 parameters, at
another X each time, and a loss that sleeps, so that two cores can show them. What 64 take beside the sleep is mostly
waiting for one of two cores. So the processor time of a rank is measured, too, which is what it takes on a core of its
own, and fitted by `fixed + a log2 N + b (N - 1)`.

Then nodes, each of which is its own worker, since workers of 64 nodes would import torch on two cores: the seconds
until the first f is there; those of an evaluation at whose start one of them was killed; and those from the moment at
which there is room for another one until f is there by all of them. Run it where no name server is asked: torch's
store looks up each client, and one late answer stops it for five seconds.

    python -m benchmarks.many_ranks [--ranks 1 2 4 8 16 32 64] [--repeats 20]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import numpy
import torch
import torch.multiprocessing as mp

import batchopt
from batchopt.backends import BACKENDS
from batchopt.backends.base import Prepared, Setup
from batchopt.backends.nodes import session
from batchopt.backends.nodes.backend import NodesBackend
from batchopt.backends.nodes.node import serve
from batchopt.backends.nodes.placing import Capacity
from batchopt.backends.nodes.transfer import unpacked
from batchopt.backends.serial import SerialBackend
from batchopt_workers.evaluate.program import Program
from batchopt_workers.evaluate.state import ModuleState
from benchmarks.arms import free_port
from benchmarks.findings import Finding, publish
from benchmarks.scaling import Sleep

PARAMETERS, SLEEP = 10_000, 0.1
# Seconds: to join, of an evaluation in which one is lost, and until another one has joined.
AIMS = {"join": 10.0, "loss": 2.0, "rejoin": 5.0}

_forks: Any = mp.get_context("forkserver")
_forks.set_forkserver_preload(["benchmarks.many_ranks"])


def optimizer(count: int, **options: Any) -> tuple[Sleep, batchopt.BatchOptimizer]:
    """With a sample for each of `count` workers."""
    torch.manual_seed(0)
    sleep = Sleep()
    opt = batchopt.BatchOptimizer(
        torch.nn.Linear(PARAMETERS - 1, 1), loss_fn=sleep, optimizer=None, check_cut=False, **options
    )
    opt.load(torch.ones(count, PARAMETERS - 1))
    return sleep, opt


def moved(opt: batchopt.BatchOptimizer) -> float:
    """The seconds of an evaluation at another X."""
    with torch.no_grad():
        opt.parameters[0] += 1e-6
    began = time.perf_counter()
    opt.evaluate()
    return time.perf_counter() - began


# ---- ranks


def rank(number: int, count: int, port: int, repeats: int, end: Connection) -> None:
    """The life of a rank: it tells the seconds until the first f, those of each evaluation, and its processor's."""
    torch.set_num_threads(1)
    here = {"RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in here.items()}}
    began = time.perf_counter()
    sleep, opt = optimizer(count, parallelize=1, backend="ranks")
    opt.evaluate()
    start = time.perf_counter() - began
    sleep.seconds = SLEEP
    moved(opt)
    before = time.process_time()
    seconds = [moved(opt) for _ in range(repeats)]
    end.send((start, seconds, (time.process_time() - before) / repeats))
    opt.close()


def measure(count: int, repeats: int) -> dict[str, float]:
    """Seconds of `count` ranks: to start, of an evaluation beside the sleep, and of the processor of each."""
    port, ends, processes = free_port(), [], []
    for number in range(count):
        ours, theirs = _forks.Pipe()
        processes.append(_forks.Process(target=rank, args=(number, count, port, repeats, theirs)))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    starts, seconds, own = zip(*(end.recv() for end in ends), strict=True)
    for process in processes:
        process.join()
    slowest = statistics.median(max(each) for each in zip(*seconds, strict=True))
    return {"start": max(starts), "beside": slowest - SLEEP, "own": statistics.fmean(own)}


def fitted(seconds: dict[int, float]) -> list[float]:
    """Of the processor time that each of N > 1 ranks takes more than one alone, `fixed + a log2 N + b (N - 1)`, the
    three coefficients, none of which is negative."""
    from scipy.optimize import nnls

    rows = numpy.array([(1.0, math.log2(count), count - 1.0) for count in seconds])
    weights = 1 / numpy.array(list(seconds.values()))  # relative errors count
    return list(map(float, nnls(rows * weights[:, None], numpy.ones(len(rows)))[0]))


# ---- nodes


class Itself(SerialBackend):
    """The worker of a node, which is the node."""

    def __init__(self, setup: Setup, holder: object) -> None:
        super().__init__(setup)

    def replace_program(self, program: Program, buffers: ModuleState) -> None:
        """Begin again with another version."""
        super().__init__(replace(self._setup, program=program, buffers=buffers))

    def resize(self, workers: int, ranks: object = None, world: object = None) -> None:
        """Stay."""

    def place(self, packed: Any) -> Prepared:
        """Take the batch as it was sent."""
        return Prepared(unpacked(packed))

    def give_back(self) -> None:
        """There is no other memory."""


def node(where: str, port: int, number: int) -> None:
    """The life of a node."""
    torch.set_num_threads(1)
    vars(session)["ProcessBackend"] = Itself
    serve(where, port, number)


class Forked:
    """A node's process."""

    def __init__(self, *arguments: Any) -> None:
        self.process = _forks.Process(target=node, args=arguments, daemon=True)
        self.process.start()

    def gone(self) -> str | None:
        """See `NodeProcess`."""
        return None if self.process.exitcode is None else f"ended with {self.process.exitcode}"

    def kill(self) -> None:
        """See `NodeProcess`."""
        self.process.kill()
        self.process.join()


class Machines:
    """As many machines of one worker as there is `room` for."""

    address = "127.0.0.1"
    room = 0
    nodes: ClassVar[dict[str, Forked]] = {}

    def rooms(self, whole: bool = False) -> list[Capacity]:
        """See `Placer`."""
        names = map(str, range(self.room))
        return [Capacity(name, 1) for name in names if whole or name not in self.nodes or self.nodes[name].gone()]

    def place(self, machine: str, workers: int, where: str, port: int, number: int) -> Forked:
        """See `Placer`."""
        self.nodes[machine] = Forked(where, port, number)
        return self.nodes[machine]

    def refusal(self, workers: int, free: int, whole: int) -> str:
        """See `Placer`."""
        return f"{workers} do not fit where there is room for {free}"


class Nodes(NodesBackend):
    """Nodes on this machine."""

    def placer(self, setup: Setup) -> Machines:
        """See `NodesBackend`."""
        return Machines()


def measure_nodes(count: int, repeats: int) -> dict[str, float]:
    """The seconds in which `count` nodes join, one is lost, and another one has joined; and those of an evaluation."""
    Machines.room = count
    BACKENDS["forked nodes"] = f"{__name__}:Nodes"
    began = time.perf_counter()
    _, opt = optimizer(count, parallelize=count, backend="forked nodes", max_restarts=count)
    with opt:
        opt.evaluate()
        join = time.perf_counter() - began
        usual = statistics.median(moved(opt) for _ in range(repeats))
        Machines.nodes[str(count // 2)].process.kill()
        Machines.room = 0
        loss = moved(opt)
        assert sum(worker.alive for worker in opt.workers) == count - 1
        Machines.room = count
        began = time.perf_counter()
        while moved(opt) and not all(worker.alive for worker in opt.workers):
            pass
        rejoin = time.perf_counter() - began
    return {"join": join, "evaluation": usual, "loss": loss, "rejoin": rejoin}


def main() -> None:
    """Measure, fit, publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load, _, _ = os.getloadavg()
    took: dict[int, dict[str, float]] = {}
    findings = []
    for count in given.ranks:
        took[count] = seconds = measure(count, given.repeats)
        findings.append(Finding(f"{count} ranks: beside the sleep", 1e3 * seconds["beside"], "ms"))
        findings.append(Finding(f"{count} ranks: processor time of a rank", 1e3 * seconds["own"], "ms"))
        print(findings[-2:], f"load {os.getloadavg()[0]:.0f}", flush=True)
    alone, *more = took.items()
    numbers = fitted({count: seconds["own"] - alone[1]["own"] for count, seconds in more})
    for name, number in zip(("fixed", "a doubling", "another rank"), numbers, strict=True):
        findings.append(Finding(f"processor time: {name}", 1e3 * number, "ms"))
    nodes = measure_nodes(max(given.ranks), given.repeats)
    findings += [Finding(f"nodes: {name}", number, "s", most=AIMS.get(name)) for name, number in nodes.items()]
    publish("many_ranks", findings, {"load before": load, "ranks": took, "nodes": nodes})


if __name__ == "__main__":
    main()
