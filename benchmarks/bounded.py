"""In how many evaluations problems with bounds are solved, beside SciPy's L-BFGS-B and `least_squares`.

Two sets, in float64, without tolerances that would end a run early, as in `s2mpj.py`: the problems of S2MPJ with bounds
and up to 150 variables, and sums of squares of MGH, each in two boxes around its start: elements may change by half
their size, at least by a half; or each second element may hardly fall, and each third not rise by more than its size.
Evaluations are relative to those of SciPy's solver, over the problems that both solve.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.bounded
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy import optimize

import batchopt
from benchmarks import problems
from benchmarks.findings import Finding, publish
from benchmarks.s2mpj import JUDGED, LIMIT, Squares, Table, Trace, count, measure, with_least_squares
from benchmarks.s2mpj_problems import Vector, bounded
from benchmarks.solvers import NO_STOP

# The most variables of a sum of squares, whose Jacobian is dense.
MOST = 20


@dataclass(frozen=True)
class Boxed:
    """A sum of squares, given its residuals, in a box around its start."""

    name: str
    function: Callable[[torch.Tensor], torch.Tensor]
    start: Vector
    bounds: tuple[Vector, Vector]

    def residuals(self, x: Vector) -> tuple[Vector, Vector]:
        """The residuals and their Jacobian."""
        at = torch.from_numpy(x)
        rows = torch.func.jacfwd(self.function)(at)
        return self.function(at).numpy(), rows.numpy()


def squares() -> Iterator[Boxed]:
    """The sums of squares among the problems of `problems.py`."""

    def joined(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.reshape(-1) for part in parts])

    small = [problem for problem in problems.PROBLEMS if len(problem.start) <= MOST]
    f = {problem.name: problem.function(_point(problem)).item() for problem in small}
    with patch.object(problems, "_squares", joined):
        for problem in small:
            start = np.array(problem.start)
            try:
                residuals = problem.function(_point(problem))
            except RuntimeError:  # a sum of several such sums
                continue
            if not residuals.dim() or not math.isclose(residuals.square().sum().item(), f[problem.name]):
                continue
            size, index = np.maximum(abs(start), 1.0), np.arange(len(start))
            lower, upper = np.where(index % 2, -np.inf, start - size / 10), np.where(index % 3, np.inf, start + size)
            yield Boxed(f"{problem.name}, near", problem.function, start, (start - size / 2, start + size / 2))
            yield Boxed(f"{problem.name}, half", problem.function, start, (lower, upper))


def _point(problem: problems.Problem) -> torch.Tensor:
    return torch.tensor(problem.start, dtype=torch.float64)


def of_ours(make: Callable[..., torch.optim.Optimizer], of_squares: bool = False) -> Callable[[Trace], None]:
    """Run an optimizer of ours, with the bounds of the problem."""

    def run(trace: Trace) -> None:
        lower, upper = trace.problem.bounds
        x = torch.nn.Parameter(torch.from_numpy(np.clip(trace.problem.start, lower, upper)))
        optimizer: Any = make([x], bounds=[(torch.from_numpy(lower), torch.from_numpy(upper))], **NO_STOP)
        optimizer.step(Squares(trace, x) if of_squares else lambda: trace(x))

    return run


def lbfgsb(trace: Trace) -> None:
    """SciPy's L-BFGS-B."""

    def value_and_gradient(x: Vector) -> tuple[float, Vector]:
        f, gradient = trace.problem(x)
        trace.record(f)
        return f, gradient

    bounds = optimize.Bounds(*trace.problem.bounds)
    start = np.clip(trace.problem.start, bounds.lb, bounds.ub)
    options = {"maxiter": LIMIT, "maxfun": LIMIT, "ftol": 0.0, "gtol": 0.0}
    optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


ANY: dict[str, Callable[[Any], object]] = {
    "LBFGS": of_ours(batchopt.LBFGS),
    "LBFGS, history 10": of_ours(lambda params, **options: batchopt.LBFGS(params, history_size=10, **options)),
    "SciPy L-BFGS-B": lbfgsb,
}
OF_SQUARES: dict[str, Callable[[Any], object]] = {
    "LevenbergMarquardt": of_ours(batchopt.LevenbergMarquardt, True),
    "LevenbergMarquardt, products": of_ours(
        lambda params, **options: batchopt.LevenbergMarquardt(params, dense=0, **options), True
    ),
    "SciPy dogbox": with_least_squares("dogbox"),
    "SciPy trf": with_least_squares("trf"),
}


def ratios(table: Table, name: str, peer: str, tolerance: float) -> list[float]:
    """Evaluations relative to those of the peer, where both solve a problem."""
    pairs = [[count(row["counts"], solver, tolerance) for solver in (name, peer)] for row in table.values()]
    return [mine / theirs for mine, theirs in pairs if mine and theirs]


def judge(group: str, table: Table, peer: str, most: float) -> list[Finding]:
    """The share that each solves, and its evaluations relative to those of the peer, the last one."""
    findings = []
    for tolerance in JUDGED:
        for name in next(iter(table.values()))["counts"]:
            solved = sum(count(row["counts"], name, tolerance) is not None for row in table.values())
            found = ratios(table, name, peer, tolerance)
            about, target = f"{group}, {tolerance:.0e}, {name}", None if name.startswith("SciPy") else most
            findings.append(Finding(f"{about}: share solved of {len(table)}", solved / len(table)))
            findings.append(Finding(f"{about}: evaluations / SciPy's, median", statistics.median(found), most=target))
            mean = math.exp(statistics.fmean(map(math.log, found)))
            findings.append(Finding(f"{about}: evaluations / SciPy's, geometric mean", mean))
    return findings


def main() -> None:
    """Measure and judge."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of overflows on the way
    print("variables, lowest f, evaluations to 1e-6 of the way:", *ANY, sep="\n")
    tables = {"bounded": {problem.name: measure(problem, ANY) for problem in bounded()}}
    print(*OF_SQUARES, sep="\n")
    tables["squares"] = {problem.name: measure(problem, OF_SQUARES) for problem in squares()}  # type: ignore[arg-type]
    findings = judge("bounded", tables["bounded"], "SciPy L-BFGS-B", 1.3)
    publish("bounded", findings + judge("squares", tables["squares"], "SciPy trf", 1.3), tables)


if __name__ == "__main__":
    main()
