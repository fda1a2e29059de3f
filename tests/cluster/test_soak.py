"""Whatever is killed or stopped, at any moment, and however often: the bits are those of one process."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer
from tests.cluster.conftest import Start
from tests.cluster.test_ray import host_of

# Longer, if it is asked: BATCHOPT_SOAK_SECONDS=600 ./scripts/test -m "" -n 0 tests/cluster/test_soak.py
SECONDS = float(os.environ.get("BATCHOPT_SOAK_SECONDS", "40"))


class Killer(threading.Thread):
    """Kills or stops a random worker or actor now and then, until told to end; an actor that was stopped goes on
    later."""

    def __init__(self, opt: BatchOptimizer, seed: int) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()
        self.ended = threading.Event()
        self._opt, self._random = opt, random.Random(seed)
        self._stopped: list[tuple[float, psutil.Process]] = []

    def run(self) -> None:
        """Until `ended`."""
        while not self.ended.wait(self._random.uniform(0.2, 1.5)):
            self._let_go(time.monotonic())
            pids = [worker.pid for worker in self._opt.workers if worker.alive]
            if pids:
                with suppress(psutil.Error, LookupError):
                    self._strike(psutil.Process(self._random.choice(pids)))
        self._let_go(float("inf"))

    def _strike(self, worker: psutil.Process) -> None:
        actor = host_of(worker.pid)
        what = self._random.choice(["worker killed", "worker stopped", "actor killed", "actor stopped"])
        victim = worker if what.startswith("worker") else actor
        if what.endswith("killed"):
            victim.kill()
        else:
            victim.suspend()
        if what == "actor stopped":
            self._stopped.append((time.monotonic() + self._random.uniform(0.5, 8.0), actor))
        self.done[what] += 1

    def _let_go(self, now: float) -> None:
        for _, actor in [entry for entry in self._stopped if entry[0] <= now]:
            with suppress(psutil.Error):
                actor.resume()
        self._stopped = [entry for entry in self._stopped if entry[0] > now]


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 120)
def test_many_deaths_change_no_bit(start: Start) -> None:
    start(nodes=3, cores=2)
    torch.manual_seed(1)
    x, y = torch.randn(6000, 8).double(), torch.randn(6000, 1).double()

    def build(**options: object) -> BatchOptimizer:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1)).double()
        return BatchOptimizer(net, nn.MSELoss(), chunk_size=100, **options)  # type: ignore[arg-type]

    with build(backend="ray", parallelize=6, timeout=5.0, max_restarts=10_000) as opt, build() as alone:
        killer = Killer(opt, seed=0)
        killer.start()
        try:
            end, steps = time.monotonic() + SECONDS, 0
            while time.monotonic() < end:
                part = slice(0, 6000) if steps % 4 else slice(steps, steps + 3000)
                assert opt.step(x[part], y[part]) == alone.step(x[part], y[part])
                steps += 1
        finally:
            killer.ended.set()
            killer.join()
        assert opt.fingerprint() == alone.fingerprint()
        assert len(killer.done) == 4 and steps > 1, killer.done
