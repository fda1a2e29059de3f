"""How long does one evaluation of f and df/dX take, against what people use today?

For each workload, in one run and in turn, each in a process of its own: plain torch on one thread, plain torch on all
cores, DistributedDataParallel over gloo with one rank a core, and `parallelize=N`. And the limit: N processes that have
nothing in common, each with its part of the batch. `efficiency` is (one thread / N) / ours; the others are peer / ours:
all are better when larger. `limit` is the efficiency of the limit: what the machine's memory, caches and neighbours
leave of it.

    python -m benchmarks.evaluation [--workloads mlp cnn ...] [--parallelize 2] [--rounds 8] [--compile]

`--compile` has workers evaluate a compiled function, for which a quarter of a minute is spent beforehand.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from batchopt.backends.process.forkserver import worker_environment
from benchmarks.arms import ROUNDS, Apart, Arm, Distributed, Ours, Plain, take_turns
from benchmarks.findings import Finding, publish
from benchmarks.workloads import WORKLOADS


def measure(workload: str, parallelize: int, rounds: int, compiled: bool) -> dict[str, float]:
    """The median seconds of each way."""
    arms = {
        "one thread": Arm(Plain, workload, 1),
        "all cores": Arm(Plain, workload, torch.get_num_threads()),
        "ddp": Arm(Distributed, workload, processes=parallelize),
        "limit": Arm(Apart, workload, processes=parallelize, environment=worker_environment(1)),
        "ours": Arm(Ours, workload, parallelize, {"compile": compiled}),
    }
    return take_turns(arms, rounds=rounds)


def judge(results: dict[str, dict[str, float]], parallelize: int) -> list[Finding]:
    """The ratios, and what they should be on two cores."""
    efficiency = [times["one thread"] / parallelize / times["ours"] for times in results.values()]
    cores = [times["all cores"] / times["ours"] for times in results.values()]
    limit = [times["one thread"] / parallelize / times["limit"] for times in results.values()]
    ddp = [times["ddp"] / times["ours"] for times in results.values()]
    mean = statistics.geometric_mean
    return [
        Finding(f"efficiency of parallelize={parallelize}, geometric mean", mean(efficiency), least=0.97),
        Finding(f"efficiency of parallelize={parallelize}, lowest", min(efficiency), least=0.86),
        Finding("the same of processes that have nothing in common, geometric mean", mean(limit)),
        Finding("times as fast as torch on all cores, geometric mean", mean(cores), least=1.2),
        Finding("times as fast as torch on all cores, lowest", min(cores), least=0.9),
        Finding("times as fast as DistributedDataParallel, geometric mean", mean(ddp), least=1.25),
        Finding("times as fast as DistributedDataParallel, lowest", min(ddp), least=1.0),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--parallelize", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    results = {}
    for name in given.workloads:
        results[name] = times = measure(name, given.parallelize, given.rounds, given.compile)
        print(f"{name:8}" + "".join(f"  {way} {seconds * 1e3:.2f} ms" for way, seconds in times.items()), flush=True)
    details = {"parallelize": given.parallelize, "compile": given.compile, "seconds": results}
    kind = "_compiled" * given.compile + f"_{given.parallelize}" * (given.parallelize != 2)
    publish(f"evaluation{kind}", judge(results, given.parallelize), details)


if __name__ == "__main__":
    main()
