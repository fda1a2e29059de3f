"""What do 64 ranks, or nodes, take to agree on an evaluation, and to come and go; and 1,024 on paper?

Ranks are processes of this machine, each with one worker, its own process: a linear layer of 10,000 parameters, at
another X each time, and a loss that sleeps, so that two cores can show them; over the loopback, over a namespace each
whose wire carries 1 Gbit/s (as in `benchmarks.network`), and with one wire of a tenth of that. What 64 take beside the
sleep is mostly waiting for one of two cores. So the processor time of a rank is measured, too, which is what it takes
on a core of its own, and fitted by `fixed + a log2 N + b (N - 1)`. With the bytes that a wire carries this is the model
for up to 1,024 machines. It leaves out the delay of the wires, once in each of log2 N rounds (`tc` has no such queue
here), and machines that are not equally fast.

Then nodes, each of which is its own worker, since workers of 64 nodes would import torch on two cores: the seconds
until the first f is there; those of an evaluation at whose start one of them was killed; and those from the moment at
which there is room for another one until f is there by all of them. All of it happens where no name server is asked,
since torch's store looks up each client, and one late answer stops it for five seconds.

    python -m benchmarks.many_ranks [--ranks 1 2 4 8 16 32 64] [--repeats 20]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
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
from benchmarks.arms import free_port, ranked
from benchmarks.findings import Finding, publish
from benchmarks.network import GLOO, NotAllowed, enter, limit, network
from benchmarks.scaling import Sleep

PARAMETERS, ELEMENT, SLEEP, GIGABIT = 10_000, 4, 0.1, 1e9 / 8
WIRES = ("loopback", "1 Gbit/s", "1 Gbit/s, one slow")
MOST = 32  # namespaces: this kernel knows 1,024 neighbours, of all of them together
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


def rank(number: int, count: int, port: int, on_wires: bool, repeats: int, end: Connection) -> None:
    """The life of a rank: it tells the seconds until the first f, those of each evaluation, and its processor's."""
    if on_wires:
        os.environ |= GLOO
        enter(number)
    ranked(number, count, port)
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


def measure(wire: str, count: int, repeats: int) -> dict[str, float]:
    """Seconds of `count` ranks: to start, of an evaluation beside the sleep, and of the processor of each."""
    on_wires, port = wire != WIRES[0], free_port()
    if on_wires:
        limit(1, 0.1 if wire == WIRES[2] else 1.0)
    ends, processes = [], []
    for number in range(count):
        ours, theirs = _forks.Pipe()
        processes.append(_forks.Process(target=rank, args=(number, count, port, on_wires, repeats, theirs)))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    starts, seconds, own = zip(*(end.recv() for end in ends), strict=True)
    for process in processes:
        process.join()
    slowest = statistics.median(max(each) for each in zip(*seconds, strict=True))
    return {"start": max(starts), "beside": slowest - SLEEP, "own": statistics.fmean(own)}


class Model:
    """The seconds that an evaluation by N > 1 ranks takes more than by one: `fixed + a log2 N + b (N - 1)`, none of
    which is negative."""

    def __init__(self, seconds: dict[int, float]) -> None:
        from scipy.optimize import nnls

        rows = numpy.array([(1.0, math.log2(count), count - 1.0) for count in seconds])
        weights = 1 / numpy.array(list(seconds.values()))  # relative errors count
        self.fixed, self.a, self.b = map(float, nnls(rows * weights[:, None], numpy.ones(len(rows)))[0])

    def __call__(self, count: int) -> float:
        """Those of `count` ranks, with a core and a wire of 1 Gbit/s each."""
        crossing = (count - 1) * PARAMETERS * ELEMENT / GIGABIT
        return self.fixed + self.a * math.log2(count) + self.b * (count - 1) + crossing


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


@contextmanager
def surroundings(machines: int) -> Iterator[Sequence[str]]:
    """Be on the first of so many machines, if they can be made; the wires that there are. The process from which others
    are forked starts there, and ends."""
    server: Any = forkserver
    tracker: Any = resource_tracker
    with ExitStack() as stack:
        wires: Sequence[str] = WIRES
        try:
            stack.enter_context(network(machines, 1.0))
            enter(0)
        except NotAllowed as error:
            print(f"over the loopback alone, since network namespaces cannot be made here: {error}")
            wires = WIRES[:1]
        stack.callback(tracker._resource_tracker._stop)
        stack.callback(server._forkserver._stop)
        yield wires


def findings_of(took: dict[str, dict[int, dict[str, float]]], nodes: dict[str, float], model: Model) -> list[Finding]:
    """What was found, with the aims."""
    found = []
    for wire, of in took.items():
        for count, seconds in of.items():
            name = f"{count} ranks, {wire}"
            found.append(Finding(f"{name}: beside the sleep", 1e3 * seconds["beside"], "ms"))
            found.append(Finding(f"{name}: processor time of a rank", 1e3 * seconds["own"], "ms"))
    for name, number in (("fixed", model.fixed), ("a doubling", model.a), ("another rank", model.b)):
        found.append(Finding(f"processor time: {name}", 1e3 * number, "ms"))
    for count in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        found.append(Finding(f"{count} machines, 1 Gbit/s: modelled", 1e3 * model(count), "ms"))
    return found + [Finding(f"nodes: {name}", number, "s", most=AIMS.get(name)) for name, number in nodes.items()]


def main() -> None:
    """Measure, fit, publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    took: dict[str, dict[int, dict[str, float]]] = {}
    load, _, _ = os.getloadavg()
    with surroundings(min(max(given.ranks), MOST)) as wires:
        for wire in wires:
            took[wire] = {}
            for count in given.ranks if wire == WIRES[0] else [count for count in given.ranks if 1 < count <= MOST]:
                took[wire][count] = measure(wire, count, given.repeats)
                print(wire, count, took[wire][count], f"load {os.getloadavg()[0]:.0f}", flush=True)
        nodes = measure_nodes(max(given.ranks), given.repeats)
    alone, *more = took[WIRES[0]].items()
    model = Model({count: seconds["own"] - alone[1]["own"] for count, seconds in more})
    publish("many_ranks", findings_of(took, nodes, model), {"load before": load, "ranks": took, "nodes": nodes})


if __name__ == "__main__":
    main()
