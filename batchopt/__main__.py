"""The command line: `python -m batchopt` says what it runs on; `python -m batchopt scaling train.py:make`."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import runpy
import sys

import torch

import batchopt
from batchopt._machine.cores import usable_cores
from batchopt._program.compiler import compiler
from batchopt.optimizer import BatchOptimizer
from batchopt_workers.wire.orders import versions

# Beginnings of the names of environment variables that change how evaluations are made.
VARIABLES = ("BATCHOPT_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "MALLOC_", "GLIBC_", "CUDA_", "TORCH")


def report() -> str:
    """Return what a report of a problem should contain: versions, cores, limits and variables."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    lines = {
        "batchopt": batchopt.__version__,
        "versions": versions(),
        "system": platform.platform(),
        "cores": f"{usable_cores()} of {os.cpu_count()}, {torch.get_num_threads()} threads of torch",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "GPUs": ", ".join(devices) or "none",
        "C++ compiler": compiler() or "none",
        "limits": f"{files} open files, {'unlimited' if locked < 0 else locked} bytes of locked memory",
        "variables": " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)) or "none",
    }
    return "\n".join(f"{name:13} {text}" for name, text in lines.items())


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m batchopt", description=main.__doc__)
    commands = parser.add_subparsers(metavar="command")
    scaling = commands.add_parser("scaling", help="how fast evaluations are by 1, 2, 4, ... workers")
    scaling.add_argument(
        "make", metavar="SCRIPT:FUNCTION", help="a function without arguments: a BatchOptimizer that has loaded a batch"
    )
    scaling.add_argument("--seconds", type=float, default=5.0, help="to measure for (default: 5)")
    given = parser.parse_args(arguments)
    if "make" not in given:
        print(report())
        return 0
    script, _, name = given.make.rpartition(":")
    if not script:
        parser.error(f"give SCRIPT:FUNCTION, as train.py:make; got {given.make!r}")
    if not os.path.isfile(script):
        parser.error(f"there is no file '{script}'")
    try:
        found = runpy.run_path(script, run_name="batchopt_script")
    except (SyntaxError, UnicodeDecodeError) as error:
        parser.error(f"'{script}' is not a Python script: {error}")
    if not callable(found.get(name)):
        parser.error(f"'{script}' has no function {name!r}")
    made = found[name]()
    if not isinstance(made, BatchOptimizer):
        parser.error(f"{name}() must return a BatchOptimizer; got {type(made).__name__}")
    with made as opt:
        print(opt.scaling(seconds=given.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
