"""Some steps, and something that happens to them while a worker is at a certain chunk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchopt import BatchOptimizer, Sample, Worker
from tests.workloads import mlp


def steps(
    backend: str,
    parallelize: int,
    count: int = 2,
    after: Callable[[BatchOptimizer, int], object] = lambda opt, step: None,
    **options: Any,
) -> str:
    """The fingerprint of some steps of L-BFGS, with dropout; `after` is called after each of them."""
    case = mlp(samples=96)
    torch.manual_seed(1)
    module = nn.Sequential(case.module, nn.Dropout(0.2), nn.Linear(4, 4).double())
    given = {"parallelize": parallelize, "backend": backend, "chunk_size": 4, **options}
    with BatchOptimizer(module, case.criterion, **given) as opt:
        for step in range(count):
            opt.step(case.inputs, case.targets)
            after(opt, step)
        return opt.fingerprint()


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


class Disturbance:
    """A hook, that runs in the workers: the first to come to chunk `chunk` says so and waits for `do` to be over. `do`
    runs in this process, and is given the worker's pid."""

    def __init__(self, folder: Path, chunk: int, do: Callable[[int], None]) -> None:
        self._do, self._thread, self._is_over = do, threading.Thread(target=self._watch), False
        self._pid, self._done = folder / "pid", folder / "done"
        pid, over = self._pid, folder / "over"
        self._over = over

        def hook(worker: Worker, sample: Sample) -> None:
            if sample.indices.start // 4 == chunk:
                with suppress(FileExistsError):
                    pid.symlink_to(str(os.getpid()))
                    _await(over.exists)

        self.hook = hook

    def __enter__(self) -> Disturbance:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def _watch(self) -> None:
        _await(lambda: self._pid.is_symlink() or self._is_over)
        if self._pid.is_symlink():
            self._do(int(os.readlink(self._pid)))
            self._done.touch()
        self._over.touch()
