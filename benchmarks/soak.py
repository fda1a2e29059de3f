"""Does a run whose workers are killed all the time have the bits of one that nobody disturbs?

For a minute a random worker is killed every 50 ms (one that works, if there is one; now and then one is stopped
instead, or killed while it starts). Meanwhile a signal handler uses the optimizer whenever it comes, the process that
workers are forked from is stopped, and so is this one, for longer than a worker may make no progress. Afterwards the
same steps are made undisturbed, in one process, and parameters, losses and counters are compared bit for bit. Exits
with 1 for a difference, an error, a step that took too long, or a process or a name in /dev/shm that is left.

    python -m benchmarks.soak [--seconds 60] [--parallelize 3] [--every 0.05] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress

import torch
from torch import nn

from batchopt import BatchoptError, BatchOptimizer, Worker
from batchopt.backends.process import forkserver

SAMPLES, CHUNK = 4096, 256
# Seconds that one step may take: the workers of a step may all be killed several times, and start anew in about two.
PATIENCE = 60.0
HANG = "hang"
# Seconds that a worker may make no progress.
TIMEOUT = 5.0
# What is done how often, of all that is done; for the rest a worker is killed.
WORKER_STOPPED, REENTERED, TEMPLATE_STOPPED, PARENT_STOPPED, KILLED_AT_START = 0.1, 0.1, 0.005, 0.001, 0.002


class Killer(threading.Thread):
    """Kills or stops a random worker at random, from a seed, until told to end."""

    def __init__(self, opt: BatchOptimizer, every: float, seed: int) -> None:
        super().__init__(name="killer")
        self.done: Counter[str] = Counter()
        self.ended = threading.Event()
        self._opt, self._every, self._random = opt, every, random.Random(seed)

    def run(self) -> None:
        """Until `ended`."""
        while not self.ended.wait(self._every):
            ready = [worker for worker in self._opt.workers if worker.alive]
            starting = [worker for worker in self._opt.workers if not worker.alive]
            number = self._random.random()
            if (number := number - PARENT_STOPPED) < 0:
                self._stop_parent()
            elif (number := number - TEMPLATE_STOPPED) < 0 and forkserver._kept:
                self._strike(forkserver._kept[-1]._process.pid, signal.SIGSTOP, "template stopped")
            elif (number := number - REENTERED) < 0:
                os.kill(os.getpid(), signal.SIGUSR1)
            elif ready and (number := number - WORKER_STOPPED) < 0:
                self._strike(self._random.choice(ready).pid, signal.SIGSTOP, "stopped")
            elif ready:
                self._strike(self._random.choice(ready).pid, signal.SIGKILL, "killed")
            elif number - KILLED_AT_START < 0:
                self._strike(self._random.choice(starting).pid, signal.SIGKILL, "killed at start")

    def reenter(self, *_: object) -> None:
        """A handler that uses the optimizer: it is refused while a call is at work, and does no harm between two."""
        try:
            self._opt.run_on_workers(abs_rank)
            self.done["reentered between calls"] += 1
        except BatchoptError:
            self.done["reentered in vain"] += 1

    def _stop_parent(self) -> None:
        """This process, which goes on when a worker could count as hung."""
        script = f"kill -STOP {os.getpid()}; sleep {1.2 * TIMEOUT}; kill -CONT {os.getpid()}"
        subprocess.run(["sh", "-c", script], check=True)
        self.done["parent stopped"] += 1

    def _strike(self, pid: int, number: signal.Signals, what: str) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            self.done[what] += 1


def abs_rank(worker: Worker) -> int:
    """Something to run."""
    return abs(worker.rank)


def build(parallelize: int, **options: object) -> tuple[BatchOptimizer, torch.Tensor, torch.Tensor]:
    """A regression that takes some milliseconds an evaluation."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    opt = BatchOptimizer(
        module,
        nn.MSELoss(),
        optimizer=lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
        parallelize=parallelize,
        chunk_size=CHUNK,
        **options,  # type: ignore[arg-type]
    )
    return opt, torch.randn(SAMPLES, 32), torch.randn(SAMPLES, 4)


def disturbed(given: argparse.Namespace) -> tuple[str, int, Counter[str]]:
    """The fingerprint after as many steps as fit into the time, that number, and what was done to the workers."""
    opt, inputs, targets = build(given.parallelize, max_restarts=10**6, timeout=TIMEOUT)
    killer = Killer(opt, given.every, given.seed)
    steps, end = 0, time.monotonic() + given.seconds
    with opt:
        before = signal.signal(signal.SIGUSR1, killer.reenter)
        killer.start()
        try:
            while time.monotonic() < end:
                started = time.monotonic()
                opt.step(inputs, targets)
                steps += 1
                if time.monotonic() - started > PATIENCE:
                    killer.done[HANG] += 1
        finally:
            killer.ended.set()
            killer.join()
            signal.signal(signal.SIGUSR1, before)
        return opt.fingerprint(), steps, killer.done


def undisturbed(given: argparse.Namespace, steps: int) -> str:
    """The fingerprint after so many steps in one process."""
    opt, inputs, targets = build(1)
    with opt:
        for _ in range(steps):
            opt.step(inputs, targets)
        return opt.fingerprint()


def children() -> set[int]:
    """Processes that this one is the parent of, but for those which are kept to fork workers from."""
    found = set()
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(entry)}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.add(int(entry))
    return found - {server._process.pid for server in forkserver._kept}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--parallelize", type=int, default=3)
    parser.add_argument("--every", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    names = set(os.listdir("/dev/shm"))
    found, steps, done = disturbed(given)
    left = children() | {*os.listdir("/dev/shm")} - names
    expected = undisturbed(given, steps)
    print(f"seed {given.seed}: {steps} steps of L-BFGS on {given.parallelize} workers; workers {dict(done)}")
    print(f"bits: {'same' if found == expected else 'DIFFERENT'}   hangs: {done[HANG]}   left: {len(left)}")
    raise SystemExit(found != expected or done[HANG] > 0 or len(left) > 0)


if __name__ == "__main__":
    main()
