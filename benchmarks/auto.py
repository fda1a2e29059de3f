"""Is `parallelize="auto"` ever slower than what one could have chosen by hand?

For fifteen functions of one to some hundreds of milliseconds, in turn, each in a process of its own: plain torch on
all cores and on one thread, `parallelize=1`, the same with one thread, `parallelize=N`, N/2, N/4 ..., and `"auto"`,
once it has chosen. Where there is a CUDA device, a worker there is one of the ways.

    python -m benchmarks.auto [--workloads "GRU, 256 of 30" pinn ...] [--rounds 6]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from benchmarks.arms import Arm, Ours, Plain, take_turns
from benchmarks.findings import Finding, table, write
from benchmarks.workloads import FUNCTIONS, WORKLOADS

ROUNDS = 6


def measure(name: str, cores: int, rounds: int) -> dict[str, float]:
    """The median seconds of each way."""
    there: dict[str, Any] = {"devices": ["cuda:0"]} if torch.cuda.is_available() else {}
    counts = [cores >> halved for halved in range(cores.bit_length()) if cores >> halved > 1]
    arms = {
        "torch": Arm(Plain, name, cores),
        "torch, 1 thread": Arm(Plain, name, 1),
        "1": Arm(Ours, name, 1),
        "1, 1 thread": Arm(Ours, name, 1, {"threads_per_worker": 1}),
        **{str(count): Arm(Ours, name, count) for count in counts},
        **({"1 on cuda:0": Arm(Ours, name, 1, there)} if there else {}),
    }
    arms["auto"] = Arm(Ours, name, "auto", there)  # chooses while the others sleep
    short = statistics.median(arms["1"].burst(7)) < 0.02
    return take_turns(arms, 30 if short else 5, rounds)


def by_hand(times: dict[str, float]) -> float:
    """The seconds of the fastest of our own ways."""
    return min(seconds for way, seconds in times.items() if way[0].isdigit())


def judge(results: dict[str, dict[str, float]], cores: int) -> list[Finding]:
    """The ratios, and what they should be."""
    best = [times["auto"] / by_hand(times) for times in results.values()]
    peer = [times["auto"] / times["torch"] for times in results.values()]
    mean = statistics.geometric_mean
    return [
        Finding("auto / the best of our own ways, geometric mean", mean(best), most=1.03),
        Finding("auto / the best of our own ways, highest", max(best), most=1.1),
        Finding("auto / torch on all cores, geometric mean", mean(peer)),
        Finding("auto / torch on all cores, highest", max(peer), most=1.03),
    ]


def main() -> None:
    """Measure and print; the results of another number of cores than two are a file of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=[*FUNCTIONS, *WORKLOADS], default=list(FUNCTIONS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    cores, results = torch.get_num_threads(), {}
    for name in given.workloads:
        results[name] = times = measure(name, cores, given.rounds)
        print(f"{name:24}" + "".join(f"  {way} {seconds * 1e3:.3f} ms" for way, seconds in times.items()), flush=True)
        write("auto" if cores == 2 else f"auto_{cores}", judge(results, cores), {"seconds": results})
    print(table(judge(results, cores)))


if __name__ == "__main__":
    main()
