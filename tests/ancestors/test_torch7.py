"""What people did with `nn.BatchOptimization` and `parallel` of Torch7; docs/ancestors.md has the rows."""

from __future__ import annotations

import os

from torch import nn

from batchopt import BatchOptimizer


def test_workers_are_known_by_rank_and_process_and_take_functions_with_what_they_capture() -> None:
    captured = {"scale": 10}
    with BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), parallelize=2) as opt:
        pids = [worker.pid for worker in opt.workers]
        assert [(worker.rank, worker.alive, worker.restarts) for worker in opt.workers] == [(0, True, 0), (1, True, 0)]
        assert opt.run_on_workers(lambda worker: (os.getpid(), captured["scale"] * worker.rank)) == [
            (pids[0], 0),
            (pids[1], 10),
        ]
