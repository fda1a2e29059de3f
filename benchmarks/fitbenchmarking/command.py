"""FitBenchmarking's command with batchopt among its software; what it found goes to `results/fitbenchmarking.json`.

FitBenchmarking finds a controller by its file's name in its own package, and knows its options by tables: both are
extended while this runs, and its files stay as they are. In an environment of its own, at the root of the repository:

    pip install fitbenchmarking . && OMP_NUM_THREADS=1 PYTHONPATH=. python -m benchmarks.fitbenchmarking.command
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import fitbenchmarking
import torch
from fitbenchmarking import controllers
from fitbenchmarking.cli.main import main as fit_all
from fitbenchmarking.utils.options import Options

from benchmarks.findings import Finding, publish
from benchmarks.fitbenchmarking.batchopt_controller import BatchoptController

HERE = Path(__file__).parent
PROBLEMS = Path(fitbenchmarking.__file__).parent / "benchmark_problems" / "NIST"
# A fit is as good as the best if its sum of squares is at most this many times the lowest that any found.
GOOD = 1.0001
Row = dict[str, Any]


def register() -> None:
    """Make `batchopt` a software that FitBenchmarking knows, and have it take the time of this process."""
    timeit.Timer = partial(timeit.Timer, timer=time.process_time)  # type: ignore[misc, assignment]
    controllers.__path__.append(str(HERE))
    Options.VALID_FITTING["software"].append("batchopt")
    for table in (Options.VALID_MINIMIZERS, Options.DEFAULT_MINIMZERS):
        table["batchopt"] = BatchoptController.algorithm_check["all"]


def rows(checkpoint: Path) -> Iterator[Row]:
    """The fits in a checkpoint of FitBenchmarking: sums of squares, seconds, evaluations and its flag."""
    for group, content in json.loads(checkpoint.read_text()).items():
        for fit in content["results"]:
            found = {"group": group, "problem": fit["name"], "by": f"{fit['software_tag']}: {fit['minimizer_tag']}"}
            yield {
                **found,
                "squares": fit["accuracy"],
                "seconds": fit["runtime"],
                "evaluations": fit["func_evals"],
                "flag": fit["flag"],
            }


def judge(fits: list[Row]) -> list[Finding]:
    """For each minimizer: the share of good fits, and its evaluations and time."""
    problems = {fit["problem"]: [other for other in fits if other["problem"] == fit["problem"]] for fit in fits}
    lowest = {name: min(fit["squares"] for fit in of) for name, of in problems.items()}
    fastest = {name: min(fit["seconds"] for fit in of) for name, of in problems.items()}
    findings = []
    for by in sorted({fit["by"] for fit in fits}):
        mine = [fit for fit in fits if fit["by"] == by]
        good = [fit for fit in mine if fit["squares"] <= GOOD * lowest[fit["problem"]]]
        slower = [fit["seconds"] / fastest[fit["problem"]] for fit in good]
        findings += [
            Finding(f"{by}: share of {len(mine)} fits as good as the best", len(good) / len(mine)),
            Finding(f"{by}: median evaluations of these", median(fit["evaluations"] or 0 for fit in good)),
            Finding(f"{by}: median time of these", 1e3 * median(fit["seconds"] for fit in good), "ms"),
            Finding(f"{by}: median time / the fastest's", median(slower)),
        ]
    return findings


def main() -> None:
    """Fit, and judge what was found."""
    torch.set_num_threads(1)
    register()
    with tempfile.TemporaryDirectory() as folder:
        sets = [str(path) for path in sorted(PROBLEMS.iterdir())]
        options = ["-o", str(HERE / "options.ini"), "-r", folder, "-f", f"{folder}/log", "--no_pbar"]
        sys.argv = ["fitbenchmarking", *options, "-p", *sets]
        fit_all()
        fits = list(rows(Path(folder) / "checkpoint.json"))
    publish("fitbenchmarking", judge(fits), {"fitbenchmarking": version("fitbenchmarking"), "fits": fits})


if __name__ == "__main__":
    main()
