"""What does `chunk_size` cost, against none, and against torch with the same chunks?

For each workload, in one run and in turn, each in a process of its own: `parallelize=N` with one thread a worker,
without a chunk size and with each of several numbers of chunks a worker; and torch on all cores, with the whole batch
at once and with as many chunks in all. Prints the time of a chunk's own work in milliseconds, the price (the median
time with chunks over that without, less 1) of each, and how many times as fast as torch with the same chunks.

    python -m benchmarks.chunks [--workloads mlp cnn ...] [--parallelize 2] [--chunks 2 8 32] [--rounds 6]
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.arms import Arm, Ours, Plain, take_turns
from benchmarks.findings import Finding, publish
from benchmarks.workloads import WORKLOADS, build

# What eight chunks a worker should cost at most.
MOST = {"mlp": 0.1, "cnn": 0.1, "logreg": 0.1, "pinn": 0.3, "wide": 0.3}

# Median seconds without chunks, under 0, and with so many a worker.
Times = dict[int, float]


def measure(name: str, parallelize: int, counts: list[int], rounds: int) -> tuple[Times, Times]:
    """How long ours takes, and torch."""
    samples = len(build(name).inputs)
    arms = {}
    for count in (0, *counts):
        chunks = max(1, count * parallelize)
        options = {"threads_per_worker": 1, "chunk_size": -(-samples // chunks) if count else None}
        arms[f"ours {count}"] = Arm(Ours, name, parallelize, options)
        arms[f"torch {count}"] = Arm(Plain, name, torch.get_num_threads(), chunks)
    try:
        times = take_turns(arms, rounds=rounds)
    finally:
        for arm in arms.values():
            arm.close()
    ours, torchs = ({count: times[f"{way} {count}"] for count in (0, *counts)} for way in ("ours", "torch"))
    return ours, torchs


def price(times: Times, count: int) -> float:
    """What so many chunks a worker cost, as a part of the time without."""
    return times[count] / times[0] - 1


def findings_of(name: str, ours: Times, torchs: Times) -> list[Finding]:
    """What each number of chunks costs, what it costs torch, and who is faster."""
    found = []
    for count in ours:
        if count:
            aim = MOST[name] if count == 8 else None
            found += [
                Finding(f"{name}: price of {count} chunks a worker", price(ours, count), most=aim),
                Finding(f"{name}: the same for torch", price(torchs, count)),
                Finding(f"{name}: {count} chunks: torch / ours", torchs[count] / ours[count], least=1.0),
            ]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--parallelize", type=int, default=torch.get_num_threads())
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 8, 32], help="chunks a worker")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    print(f"{'':8}{'chunks/worker':>14}{'ms each':>10}{'price':>9}{'torch':>9}{'torch / ours':>14}")
    seconds, findings = {}, []
    for name in given.workloads:
        ours, torchs = measure(name, given.parallelize, given.chunks, given.rounds)
        seconds[name] = {"ours": ours, "torch": torchs}
        findings += findings_of(name, ours, torchs)
        for count in given.chunks:
            row = f"{name:8}{count:14d}{ours[count] / count * 1e3:10.2f}{price(ours, count):9.1%}"
            print(f"{row}{price(torchs, count):9.1%}{torchs[count] / ours[count]:14.2f}", flush=True)
    publish("chunks", findings, {"parallelize": given.parallelize, "seconds": seconds})


if __name__ == "__main__":
    main()
