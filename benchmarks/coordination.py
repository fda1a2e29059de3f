"""What does it cost to ask two workers, and to put their answers together?

`Linear(1, 1)`, two samples, two workers, against DistributedDataParallel over gloo with two ranks: nearly all of it is
asking, answering and waking up. In turn, 200 evaluations at a time.

    python -m benchmarks.coordination [--rounds 8]
"""

from __future__ import annotations

import argparse

from benchmarks.arms import ROUNDS, Arm, Distributed, Ours, Plain, take_turns
from benchmarks.findings import Finding, publish

BURST = 200


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    arms = {
        "one thread": Arm(Plain, "tiny", 1),
        "ddp": Arm(Distributed, "tiny", processes=2),
        "ours": Arm(Ours, "tiny", 2),
    }
    times = take_turns(arms, BURST, given.rounds)
    findings = [
        Finding("one evaluation of Linear(1, 1), two samples, two workers", times["ours"] * 1e6, "us"),
        Finding("the same by DistributedDataParallel", times["ddp"] * 1e6, "us"),
        Finding("the same by torch in one process", times["one thread"] * 1e6, "us"),
        Finding("ours / DistributedDataParallel", times["ours"] / times["ddp"], most=0.7),
    ]
    publish("coordination", findings, {"seconds": times})


if __name__ == "__main__":
    main()
