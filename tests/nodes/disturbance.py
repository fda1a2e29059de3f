"""Some steps, and something that happens to them while a worker is at a certain chunk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
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


class Disturbance:
    """A hook, that runs in the workers: the first to come to chunk `chunk` says so and waits for `do` to be over. `do`
    runs in this process, and is given the worker's pid."""

    def __init__(self, folder: Path, chunk: int, do: Callable[[int], None]) -> None:
        self._folder, self._do = folder, do
        self._thread = threading.Thread(target=self._watch)

        def hook(worker: Worker, sample: Sample) -> None:
            if sample.indices.start // 4 != chunk:
                return
            try:
                descriptor = os.open(folder / "there", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return
            os.write(descriptor, str(os.getpid()).encode())
            os.close(descriptor)
            deadline = time.monotonic() + 60
            while not (folder / "over").exists() and time.monotonic() < deadline:
                time.sleep(0.01)

        self.hook = hook

    def __enter__(self) -> Disturbance:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / "there").touch()
        self._thread.join()

    def _watch(self) -> None:
        there = self._folder / "there"
        deadline = time.monotonic() + 60
        while not (there.exists() and there.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
            if there.exists() and not there.stat().st_size and not self._thread.is_alive():
                return
        if there.exists() and there.stat().st_size:
            self._do(int(there.read_text()))
            (self._folder / "done").touch()
        (self._folder / "over").touch()
