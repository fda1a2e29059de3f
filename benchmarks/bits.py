"""Are the bits the same for any number of workers? A table of sha256 after an L-BFGS run, one line a workload.

Thirty iterations of L-BFGS with `chunk_size`, for several values of `parallelize` with random
speeds. The digest is that of parameters, counters and all losses: `BatchOptimizer.fingerprint()`. Exits with 1 if a
line has two digests.

    python -m benchmarks.bits [--workloads mlp cnn ...] [--parallelize 1 2 3 5 8]
"""

from __future__ import annotations

import argparse
import random

from batchopt import LBFGS, BatchOptimizer
from benchmarks.workloads import WORKLOADS, build

CHUNKS = 24


def run(name: str, parallelize: int) -> str:
    """The fingerprint after one step."""
    case = build(name)
    speeds = [random.uniform(0.2, 1.0) for _ in range(parallelize)]
    chunk_size = -(-len(case.inputs) // CHUNKS)
    with BatchOptimizer(
        case.module,
        loss_fn=case.loss,
        optimizer=lambda p: LBFGS(p, max_iter=30),
        parallelize=parallelize,
        speeds=speeds,
        chunk_size=chunk_size,
    ) as opt:
        opt.step(case.inputs, case.targets)
        return opt.fingerprint()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--parallelize", type=int, nargs="+", default=[1, 2, 3, 5, 8])
    given = parser.parse_args()
    different = False
    for name in given.workloads:
        digests = {parallelize: run(name, parallelize) for parallelize in given.parallelize}
        same = len(set(digests.values())) == 1
        different |= not same
        shown = next(iter(digests.values())) if same else str({n: d[:12] for n, d in digests.items()})
        print(f"{name:8} {'same' if same else 'DIFFERENT':10} {shown}", flush=True)
    raise SystemExit(different)


if __name__ == "__main__":
    main()
