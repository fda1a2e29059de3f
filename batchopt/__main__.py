"""The command line: `python -m batchopt scaling train.py:make`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from batchopt.optimizer import BatchOptimizer


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m batchopt", description=main.__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    scaling = commands.add_parser("scaling", help="how fast evaluations are by 1, 2, 4, ... workers")
    scaling.add_argument(
        "make", metavar="SCRIPT:FUNCTION", help="a function without arguments: a BatchOptimizer that has loaded a batch"
    )
    scaling.add_argument("--seconds", type=float, default=5.0, help="to measure for (default: 5)")
    scaling.add_argument("--bandwidth", type=float, default=1.25e8, help="of the network, in bytes per second")
    scaling.add_argument("--draw", metavar="FILE", help="write a figure there")
    given = parser.parse_args(arguments)
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
        result = opt.scaling(seconds=given.seconds, bandwidth=given.bandwidth)
    print(result)
    if given.draw:
        result.draw(given.draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
