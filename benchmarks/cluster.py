"""What does an evaluation over several machines cost beside the computing?

A Ray cluster of two nodes, all on this machine, with one or two workers each; linear layers of 10,000 and 8.4 million
parameters on eight samples, so that there is little to compute. Ours, at another X each time; the same by hand with Ray
tasks, which keep their module and their samples; DistributedDataParallel over gloo with as many ranks. The overhead is
what an arm takes longer than as many processes that have nothing in common.

    python -m benchmarks.cluster [--rounds 8]
"""

from __future__ import annotations

import argparse
import os

from ray.cluster_utils import Cluster

from benchmarks.arms import ROUNDS, Apart, Arm, Distributed, Moving, take_turns
from benchmarks.findings import Finding, publish
from benchmarks.tasks import Tasks

SIZES = ("10,000", "8.4 million")
SHAPES = ((2, 1), (2, 2))  # nodes, workers on each
BURST = 12


def measure(size: str, nodes: int, each: int, rounds: int) -> dict[str, float]:
    """Seconds of an evaluation of each arm."""
    count = nodes * each
    head = {"num_cpus": 0, "object_store_memory": 2**30, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(nodes):
        cluster.add_node(num_cpus=2 * each, object_store_memory=2**30)
    ray_here = {"RAY_ADDRESS": cluster.address, "PYTHONWARNINGS": "ignore"}
    try:
        arms = {
            "limit": Arm(Apart, size, processes=count),
            "ours": Arm(Moving, size, count, {"backend": "ray"}, environment=ray_here),
            "tasks": Arm(Tasks, size, count, environment=ray_here),
            "ddp": Arm(Distributed, size, processes=count),
        }
        return take_turns(arms, BURST, rounds)
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.getcwd()  # for the nodes
    findings, details = [], {}
    for size in SIZES:
        for nodes, each in SHAPES:
            name = f"{size} parameters, {nodes} x {each} workers"
            times = details[name] = measure(size, nodes, each, given.rounds)
            overhead = {arm: times[arm] - times["limit"] for arm in ("ours", "tasks", "ddp")}
            findings.append(Finding(f"{name}: overhead", 1e3 * overhead["ours"], "ms"))
            for arm, words in (("tasks", "by hand with Ray tasks"), ("ddp", "DistributedDataParallel")):
                aim = (2.5 if size != SIZES[0] else 1 / 1.5) if arm == "tasks" and each == 2 else None
                findings.append(Finding(f"  {words}, times as much", overhead[arm] / overhead["ours"], least=aim))
            print(name, {arm: f"{1e3 * seconds:.2f} ms" for arm, seconds in times.items()}, flush=True)
    publish("cluster", findings, details)


if __name__ == "__main__":
    main()
