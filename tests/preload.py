"""What the tests' workers are forked from, with all that the files of tests import: a worker that is sent a function of
one imports the file, which takes ten times as long as all that it does otherwise."""

from __future__ import annotations

import importlib
import os
from typing import Any

from batchopt_workers.life import forkserver

# torch takes the last two for its first product, and its first optimizer or vmap.
MODULES = """
batchopt.training hypothesis psutil pytest scipy.optimize scipy.stats sympy torch._dynamo
""".split()


def lasting(*arguments: Any) -> None:
    """As `forkserver.main`, but it does not end after a minute in which nobody needed it."""
    forkserver.LINGER = 3600.0
    forkserver.main(*arguments)


def main(*arguments: Any) -> None:
    """As `lasting`; workers are as a user's where `BATCHOPT_TEST_BARE` is set."""
    if "BATCHOPT_TEST_BARE" in os.environ:
        forkserver.main(*arguments)
    for name in MODULES:
        importlib.import_module(name)
    lasting(*arguments)  # a test that must start no process may come long after the last one with workers
