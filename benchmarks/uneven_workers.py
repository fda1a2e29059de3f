"""How well are unequal workers used?

Two workers, each bound to a core; on the second core somebody else computes all the time, so that worker gets half of
it. The ideal is one thread's time / 1.5. Ours after ten evaluations, against DistributedDataParallel, which splits
equally (its best is two thirds of the ideal).

    python -m benchmarks.uneven_workers [--workload mlp] [--rounds 8]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any

import torch.multiprocessing as mp

from benchmarks.arms import ROUNDS, Arm, Distributed, Ours, Plain, take_turns
from benchmarks.findings import Finding, publish
from benchmarks.workloads import WORKLOADS, build

CHUNKS = 32


def bind(core: int) -> None:
    """Run on this core alone."""
    os.sched_setaffinity(0, {core})


def spin(core: int, ready: Event, begun: Event) -> None:
    """Keep a core busy."""
    bind(core)
    ready.set()
    begun.wait()
    while True:
        pass


@contextmanager
def busy(core: int) -> Iterator[Callable[[], None]]:
    """Somebody else computes there, once what this yields is called."""
    context = mp.get_context("spawn")
    ready, begun = context.Event(), context.Event()
    process = context.Process(target=spin, args=(core, ready, begun), daemon=True)
    process.start()
    try:
        ready.wait()
        yield begun.set
    finally:
        process.kill()
        process.join()


class Bound(Plain):
    """Torch alone, on the free core."""

    def __init__(self, workload: str) -> None:
        bind(0)
        super().__init__(workload, 1)


class BoundRank(Distributed):
    """A rank on the core of its number."""

    def __init__(self, workload: str, rank: int, ranks: int, port: int) -> None:
        bind(rank)
        super().__init__(workload, rank, ranks, port)


class BoundWorkers(Ours):
    """Workers on the cores of their ranks, after ten evaluations."""

    def __init__(self, workload: str, chunks: int | None = None) -> None:
        options: dict[str, Any] = {"precode": lambda worker: os.sched_setaffinity(0, {worker.rank})}
        if chunks is not None:
            options["chunk_size"] = -(-len(build(workload).inputs) // chunks)
        super().__init__(workload, 2, options)
        for _ in range(10):
            self()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="mlp")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    with busy(1) as begin:
        begin()
        arms = {
            "one thread": Arm(Bound, given.workload),
            "ddp": Arm(BoundRank, given.workload, processes=2),
            "ours": Arm(BoundWorkers, given.workload),
            "ours, chunks": Arm(BoundWorkers, given.workload, CHUNKS),
        }
        try:
            times = take_turns(arms, rounds=given.rounds)
        finally:
            for arm in arms.values():
                arm.close()
    ideal = times["one thread"] / 1.5
    findings = [
        Finding("a worker shares its core: throughput / ideal", ideal / times["ours"], least=0.93),
        Finding(f"the same, with chunk_size: {CHUNKS} chunks", ideal / times["ours, chunks"]),
        Finding("the same, DistributedDataParallel", ideal / times["ddp"]),
    ]
    publish("uneven_workers", findings, {"workload": given.workload, "seconds": times})


if __name__ == "__main__":
    main()
