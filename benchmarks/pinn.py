"""How far do optimizers come on published problems of physics-informed networks, in the same time?

For each problem of `pinn_problems.py`, each method and each seed, of the initial weights and of all points: the loss
and the relative error as time goes by, without the time to judge. Methods without new points have 10,000 of the
equation all along, or as many as the problem's paper has; those with them (`batchopt.resample`, on every term that is
not of measurements) 3,000, and draw them anew from 20,000 every 500 iterations (Levenberg-Marquardt: every 10), keeping
the curvature. Ours run on a worker for each core that a run has, torch's and DeepXDE's in one process. "DeepXDE" is its
own example of Burgers' equation (its points, its network of the same size; Adam, then L-BFGS), with Adam for a third of
the time and not for 15,000 steps.

Each run has a process of its own. What the results have already is not run again, unless for a longer time; so
the whole, which takes hours, can be done in parts. Nothing else should run.

    python -m benchmarks.pinn [--seconds 60] [--lanes 2] [--problems ...] [--methods ...] [--seeds ...]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import batchopt
from batchopt._machine.cores import usable_cores
from benchmarks import pinn_deepxde
from benchmarks.curves import Curve
from benchmarks.findings import RESULTS, Finding, publish, write
from benchmarks.pinn_problems import PROBLEMS, Problem

POINTS, DRAWN, CANDIDATES, KNOWN = 10_000, 3_000, 20_000, 2_000
OVER = 1.05
# The median error of runs that are longer than the others should be at most this after 15 minutes on two cores, the
# highest ten times as much.
AIMS = {"Burgers, SSBroyden + RAD": 1e-6, "Allen-Cahn, SSBroyden + RAD": 1e-5}


@dataclass(frozen=True)
class Method:
    """One of ours. `iterations`: of a step; `renew`: new points after so many steps, or never."""

    make: Callable[..., torch.optim.Optimizer]
    iterations: int
    renew: int | None = None


def lbfgs(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Ours."""
    return batchopt.LBFGS(params, history_size=100, **options)


def ssbroyden(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Ours, with the curvature kept when the points are new."""
    return batchopt.SSBroyden(params, when_data_change="keep", **options)


def levenberg_marquardt(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Ours, with the damping kept when the points are new."""
    return batchopt.LevenbergMarquardt(params, scaling="identity", geodesic=True, when_data_change="keep", **options)


def longest(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Levenberg-Marquardt by the longest step, with its length kept when the points are new."""
    return levenberg_marquardt(params, step="longest", **options)


OURS = {
    "LBFGS": Method(lbfgs, 50),
    "SSBroyden": Method(ssbroyden, 50),
    "SSBroyden + RAD": Method(ssbroyden, 50, 10),
    "LM": Method(levenberg_marquardt, 5),
    "LM + RAD": Method(levenberg_marquardt, 5, 2),
    "LM longest": Method(longest, 5),
    "LM longest + RAD": Method(longest, 5, 2),
}
METHODS = ("torch LBFGS", *OURS, "DeepXDE")
SEEDS = {name: range(10 if name == "Burgers" else 3) for name in PROBLEMS}


def points_of(problem: Problem, points: int, seed: int) -> dict[str, Any]:
    """The points of all terms: the same for the same seed."""
    parts = enumerate(problem.parts.items())
    return {name: part.draw(part.points or points, 10 * seed + i) for i, (name, part) in parts}


def renewed(opt: batchopt.BatchOptimizer, problem: Problem, before: dict[str, Any], seed: int) -> dict[str, Any]:
    """New points where the residuals are large."""
    after = dict(before)
    for i, (name, part) in enumerate(problem.parts.items()):
        if not part.fixed:
            candidates = part.draw(KNOWN if part.points else CANDIDATES, 10 * seed + i)
            after[name] = batchopt.resample(opt, name, candidates, samples=part.points or DRAWN, seed=10 * seed + i)
    return after


def run_ours(problem: Problem, name: str, seed: int, seconds: float) -> Curve:
    """On a worker for each core."""
    method, module = OURS[name], problem.network(seed)
    terms = {part: batchopt.Term(residual=it.residual, weight=it.weight) for part, it in problem.parts.items()}
    points = points_of(problem, POINTS if method.renew is None else DRAWN, seed)

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return method.make(params, max_iter=method.iterations, max_eval=None, tolerance_grad=0.0, tolerance_change=0.0)

    size = POINTS // 4 if method.renew is None else DRAWN // 2
    rows = sum(len(entry[0] if isinstance(entry, tuple) else entry) for entry in points.values())
    chunks = max(2, 2 * round(rows / size / 2))
    with batchopt.BatchOptimizer(
        module, terms=terms, optimizer=optimizer, parallelize=usable_cores(), chunk_size=math.ceil(rows / chunks)
    ) as opt:
        opt.load(points)
        opt.evaluate()
        curve, steps = Curve(lambda: problem.error(module), seconds), 0
        while not curve.over:
            before = opt.eval_counter
            opt.step(points)
            steps += 1
            curve.look(opt.eval_counter, opt.result.f)
            if method.renew is not None and steps % method.renew == 0:
                points = renewed(opt, problem, points, 1000 * (seed + 1) + steps)
            elif opt.eval_counter <= before + 1:  # nothing moves any more
                break
    return curve


def run_torch(problem: Problem, seed: int, seconds: float) -> Curve:
    """`torch.optim.LBFGS` in one process, with all its threads."""
    module = problem.network(seed)
    points = points_of(problem, POINTS, seed)
    optimizer = torch.optim.LBFGS(
        module.parameters(),
        max_iter=50,
        max_eval=10**9,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        history_size=100,
        line_search_fn="strong_wolfe",
    )
    count, loss = 0, math.inf

    def closure() -> torch.Tensor:
        nonlocal count, loss
        count += 1
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for name, part in problem.parts.items():
            entry = points[name]
            at = entry if isinstance(entry, tuple) else (entry, None)
            total = total + part.weight * part.residual(module, *at).square().mean()
        total.backward()  # type: ignore[no-untyped-call]
        loss = total.item()
        return total

    curve = Curve(lambda: problem.error(module), seconds)
    while not curve.over:
        before = count
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        curve.look(count, loss)
        if count <= before + 1 or not math.isfinite(loss):  # it has stopped
            break
    return curve


def run(problem: str, method: str, seed: int, seconds: float) -> dict[str, Any]:
    """One run."""
    if method == "torch LBFGS":
        curve = run_torch(PROBLEMS[problem], seed, seconds)
    elif method == "DeepXDE":
        curve = pinn_deepxde.run(seed, seconds)
    else:
        curve = run_ours(PROBLEMS[problem], method, seed, seconds)
    there = {"problem": problem, "method": method, "seed": seed, "seconds": seconds, "cores": usable_cores()}
    return {**there, "curve": curve.rows}


# ---- all runs


def runs_there(name: str) -> list[dict[str, Any]]:
    """Those that were done."""
    path = RESULTS / f"{name}.json"
    done: list[dict[str, Any]] = json.loads(path.read_text())["details"]["runs"] if path.exists() else []
    return done


def wanted(problems: Iterable[str], methods: Iterable[str], seeds: list[int] | None) -> list[tuple[str, str, int]]:
    """By seed, so that what is done when time is over can be compared; without new points where all are fixed."""
    return [
        (problem, method, seed)
        for seed in range(10)
        for problem in problems
        for method in methods
        if seed in SEEDS[problem] and (seeds is None or seed in seeds) and (method != "DeepXDE" or problem == "Burgers")
        if not (method in OURS and OURS[method].renew and all(part.fixed for part in PROBLEMS[problem].parts.values()))
    ]


def at_end(run: dict[str, Any], seconds: float) -> tuple[float, int, float, float]:
    """The last row of a run up to some time, and what its last step took beyond."""
    rows = run["curve"]
    found: tuple[float, int, float, float] = next((row for row in reversed(rows) if row[0] <= OVER * seconds), rows[0])
    return found


def summary(title: str, rows: list[tuple[float, int, float, float]], aim: float | None) -> list[Finding]:
    """What the runs of a method came to, of which these are the rows."""
    errors = [row[3] for row in rows]
    return [
        Finding(f"{title}: median error", statistics.median(errors), most=aim),
        Finding(f"{title}: lowest error", min(errors)),
        Finding(f"{title}: highest error", max(errors), most=None if aim is None else 10 * aim),
        Finding(f"{title}: median loss", statistics.median(row[2] for row in rows)),
        Finding(f"{title}: median evaluations", statistics.median(row[1] for row in rows)),
    ]


def judge(runs: list[dict[str, Any]]) -> list[Finding]:
    """Of each problem and method, over its seeds: after the time that all had, and after what this method had."""
    findings = []
    for problem in PROBLEMS:
        of_problem = [run for run in runs if run["problem"] == problem]
        shared = min((run["seconds"] for run in of_problem), default=0.0)
        medians: dict[str, float] = {}
        for method in METHODS:
            of_method = [run for run in of_problem if run["method"] == method]
            for seconds in sorted({shared, min((run["seconds"] for run in of_method), default=shared)}):
                if rows := [at_end(run, seconds) for run in of_method]:
                    title = f"{problem}, {method}, {seconds:g} s, {len(rows)} seed{'s' * (len(rows) > 1)}"
                    findings += summary(title, rows, AIMS.get(f"{problem}, {method}") if seconds > shared else None)
                    medians.setdefault(method, findings[-5].value)
        ours = [(medians[name], name) for name in OURS if name in medians]
        if ours and "torch LBFGS" in medians:
            lowest, name = min(ours)
            title = f"{problem}, {shared:g} s: median error, torch LBFGS / {name}"
            findings.append(Finding(title, medians["torch LBFGS"] / lowest, least=10.0))
    return findings


def draw_curves(runs: list[dict[str, Any]], path: Path) -> None:
    """The error of each run over time."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    there = [name for name in PROBLEMS if any(run["problem"] == name for run in runs)]
    figure, axes = pyplot.subplots(1, len(there), figsize=(4 * len(there), 4), layout="constrained", squeeze=False)
    for axis, problem in zip(axes[0], there, strict=True):
        for color, method in enumerate(METHODS):
            for number, run in enumerate(r for r in runs if (r["problem"], r["method"]) == (problem, method)):
                seconds, _, _, errors = zip(*run["curve"], strict=True)
                axis.loglog(seconds, errors, f"C{color}", label=None if number else method, alpha=0.6, linewidth=1)
        axis.set(title=problem, xlabel="seconds")
    axes[0][0].set_ylabel("relative error")
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=100)


# In the figure of the first page: what each is called there.
FRONT = {
    "torch LBFGS": "torch.optim.LBFGS",
    "SSBroyden + RAD": "batchopt.SSBroyden, points resampled",
    "LM + RAD": "batchopt.LevenbergMarquardt, points resampled",
}


def draw_front(runs: list[dict[str, Any]], path: Path) -> None:
    """The error of Burgers' equation over a minute: the median of all seeds, and the middle half of them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    times = np.linspace(2.0, 60.0, 117)
    for method, color in zip(FRONT, ("#7f7f7f", "#1f77b4", "#d62728"), strict=True):
        rows = [run["curve"] for run in runs if (run["problem"], run["method"]) == ("Burgers", method)]
        curves = [np.interp(times, [row[0] for row in one], np.log([row[3] for row in one])) for one in rows]
        low, middle, high = np.exp(np.quantile(curves, (0.25, 0.5, 0.75), axis=0))
        axis.fill_between(times, low, high, color=color, alpha=0.15, linewidth=0)
        axis.semilogy(times, middle, color=color, linewidth=2, label=FRONT[method])
    axis.set(xlabel="seconds on one core", ylabel="relative error", xlim=(0, 60))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=120)


def run_apart(key: tuple[str, str, int], seconds: float, cores: set[int]) -> dict[str, Any]:
    """One run, in a process of its own, on these cores."""
    order = json.dumps([*key, seconds])
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.pinn", "--one", order, "--cores", *map(str, cores)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_all(keys: list[tuple[str, str, int]], seconds: float, lanes: int) -> Iterator[dict[str, Any]]:
    """Each run as it ends, so many at a time, each on its part of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    free = queue.SimpleQueue[set[int]]()
    for lane in range(lanes):
        free.put(set(cores[lane::lanes]))

    def one(key: tuple[str, str, int]) -> dict[str, Any]:
        mine = free.get()
        try:
            return run_apart(key, seconds, mine)
        finally:
            free.put(mine)

    with ThreadPoolExecutor(lanes) as executor:
        for done in as_completed([executor.submit(one, key) for key in keys]):
            yield done.result()


def main() -> None:
    """Run what is missing, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--lanes", type=int, default=1, help="runs at a time, each on its part of the cores")
    parser.add_argument("--problems", nargs="*", default=[*PROBLEMS], choices=[*PROBLEMS])
    parser.add_argument("--methods", nargs="*", default=[*METHODS], choices=METHODS)
    parser.add_argument("--seeds", nargs="*", type=int)
    parser.add_argument("--results", default="pinn", help="name of the file; all in one are of one machine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--cores", nargs="*", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        os.sched_setaffinity(0, given.cores)
        torch.set_num_threads(len(given.cores))
        print(json.dumps(run(*json.loads(given.one))))
        return
    runs = {(r["problem"], r["method"], r["seed"]): r for r in runs_there(given.results)}
    keys = [
        key
        for key in wanted(given.problems, given.methods, given.seeds)
        if key not in runs or runs[key]["seconds"] < given.seconds
    ]
    for found in run_all(keys, given.seconds, given.lanes):
        key = found["problem"], found["method"], found["seed"]
        runs[key] = found
        seconds, evaluations, loss, error = found["curve"][-1]
        print(f"{key}: {seconds:.0f} s, {evaluations} evaluations, loss {loss:.1e}, error {error:.1e}", flush=True)
        write(given.results, judge([*runs.values()]), {"runs": [*runs.values()]})
    publish(given.results, judge([*runs.values()]), {"runs": [*runs.values()]})
    draw_curves([*runs.values()], RESULTS / f"{given.results}.png")
    if all(("Burgers", method, 0) in runs for method in FRONT):
        draw_front([*runs.values()], RESULTS / "front.png")


if __name__ == "__main__":
    main()
