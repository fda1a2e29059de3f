"""What workers mean that end by a fault of memory access: code that writes the parameters, most of the time."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from batchopt.backends.process.worker import WorkerProcess
from batchopt.errors import WorkerLostError


def explain(gone: Sequence[WorkerProcess]) -> None:
    """Raise `WorkerLostError` if two workers, in the first forwards of a program, ended by a fault of memory access:
    the next ones would end so, too."""
    faults = [worker for worker in gone if not worker.verdict and worker.process.exitcode == -signal.SIGSEGV]
    if len(faults) < 2:
        return
    worker = faults[1]
    raise WorkerLostError(
        f"{worker.process.name} was ended by SIGSEGV (a fault of memory access) in the first forward of this module, "
        f"{_place(worker.stderr.tail)}. Workers only read the parameters, and code that writes them there ends so: if "
        "the first forward makes or writes parameters (lazy initialisation, variational strategies), call the module "
        "once before it is given to batchopt; if each one does, or a hook, use parallelize=1 or write to copies"
    )


def _place(standard_error: str) -> str:
    """Where a process ended, by what Python's faulthandler wrote of its own thread: the last of the user's calls."""
    _, found, stack = standard_error.rpartition("(most recent call first):\n")
    calls = [line.strip() for line in stack.splitlines() if line.startswith("  File ")]
    return f"at {'; called from '.join(calls[:3])}" if found and calls else "nobody knows where"
