"""How long does a whole job take, from the start of its program to a stated loss?

Each job three times each way, in turn, each run in a process of its own, on all cores: ours, and what people use today.
A run takes `start` seconds until it can make its first step (imports, data, workers), and `work` seconds from there to
the goal; looking at how far it has come is not counted. A job whose libraries are not installed is left out with a
word: `pip install pypose deepxde`.

    python -m benchmarks.jobs [--jobs ...] [--rounds 3] [--limit 300]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import batchopt
from benchmarks import job_tasks, job_ways
from benchmarks.findings import Finding, publish
from benchmarks.job_tasks import Task
from benchmarks.job_ways import ENDLESS, Come, Goal, Way

OURS = "ours"


@dataclass(frozen=True)
class Job:
    """What is done until f is at most `goal`, and the ways to do it, ours first. `needs`: what has to be installed."""

    make: Callable[[], Task]
    goal: float
    ways: Mapping[str, Way]
    needs: tuple[str, ...] = ()


JOBS = {
    "100,000 x 50, logistic regression": Job(
        job_tasks.regression,
        1.1831817469390153,  # 1e-8 above the minimum, by scikit-learn's method of Newton
        {
            OURS: job_ways.ours(batchopt.LBFGS, max_eval=10**9, **ENDLESS),
            "torch L-BFGS": job_ways.torch_lbfgs,
            "scikit-learn": job_ways.scikit_learn(1e-5),
            "scikit-learn on a thread": job_ways.scikit_learn(1e-5, 1),
        },
    ),
    "Burgers' equation": Job(
        job_tasks.burgers,
        1e-4,
        {
            OURS: job_ways.ours(batchopt.SSBroyden, max_eval=10**9, **ENDLESS),
            "torch L-BFGS": job_ways.torch_lbfgs,
            "DeepXDE": job_ways.deepxde,
        },
        ("deepxde",),
    ),
    "20 scans": Job(
        job_tasks.scans,
        9.91e-5,
        {OURS: job_ways.ours(batchopt.LevenbergMarquardt, torch.nn.MSELoss()), "PyPose's LM": job_ways.pypose},
        ("pypose",),
    ),
}


def run(name: str, way: str, f: float, began: float, limit: float) -> dict[str, Any]:
    """One run, in this process; `began`: when it was started, on `time.time`."""
    goal, judged = Goal(f, limit), 0.0
    steps = JOBS[name].ways[way](JOBS[name].make(), goal)
    next(steps)
    ready = time.time()
    goal.begin()
    come = Come()
    for judge in steps:
        now = time.time()
        come = judge()
        judged += time.time() - now
        if goal.is_over(come.f):
            break
    done = time.time() - judged
    steps.close()
    return {"start": ready - began, "work": done - ready, "f": come.f, "evaluations": come.evaluations}


def run_apart(name: str, way: str, goal: float, limit: float) -> dict[str, Any]:
    """The same in a process of its own."""
    order = json.dumps([name, way, goal, time.time(), limit])
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.jobs", "--one", order]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, rounds: int, limit: float) -> tuple[list[Finding], dict[str, Any]]:
    """Each way in turn."""
    job = JOBS[name]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in job.ways}
    for _ in range(rounds):
        for way in job.ways:
            runs[way].append(run_apart(name, way, job.goal, limit))
            print(f"{name}, {way}: {runs[way][-1]}", flush=True)
    medians = {
        way: {part: statistics.median(found[part] for found in some) for part in ("start", "work")}
        for way, some in runs.items()
    }
    ours = medians.pop(OURS)
    findings = [Finding(f"{name}: ours, {part}", ours[part], "s") for part in ("work", "start")]
    for way, its in medians.items():
        if any(found["f"] > job.goal for found in runs[way]):
            way += ", not to the goal"
        findings.append(Finding(f"  {way}, times as much work", its["work"] / ours["work"], least=1.0))
    return findings, {"goal": job.goal, "runs": runs, "medians": {OURS: ours, **medians}}


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of work of a run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(*json.loads(given.one))))
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    findings: list[Finding] = []
    details: dict[str, Any] = {}
    for name in given.jobs:
        missing = [module for module in JOBS[name].needs if importlib.util.find_spec(module) is None]
        if missing:
            print(f"{name}: left out, since {', '.join(missing)} is not installed")
            continue
        found, details[name] = measure(name, given.rounds, given.limit)
        findings += found
    publish("jobs", findings, details)


if __name__ == "__main__":
    main()
