"""A training in a process of its own, to be killed: `python -m tests.training.program FOLDER PARALLELIZE SECONDS`.

It goes on from what FOLDER has, waits so long after each batch, and prints its fingerprint at the end.
"""

from __future__ import annotations

import sys
import time

from batchopt.training import Checkpoint, EveryEpoch, fit
from tests.training.common import batches, optimizer


def main() -> None:
    """Train."""
    folder, parallelize, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    with optimizer(parallelize) as opt:
        fit(
            opt,
            batches(),
            epochs=4,
            checkpoint=Checkpoint(f"{folder}/run", every=EveryEpoch(0.4)),
            resume="auto",
            log=f"{folder}/log.jsonl",
            on_batch=lambda moment: time.sleep(seconds),
        )
        print(opt.fingerprint())


if __name__ == "__main__":
    main()
