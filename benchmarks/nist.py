"""How many certified digits least squares find on NIST's nonlinear regression problems, from both starts.

Ours is `LevenbergMarquardt` over the normal equations of a `BatchOptimizer`: with its defaults; and without tolerances
that would stop it early, without and with geodesic acceleration. SciPy's `least_squares` is given the Jacobian by
torch, with its methods "lm" and "trf": with its defaults; and with the smallest tolerances, scaled by the Jacobian. All
in float64. The score is the log relative error of the worst parameter: 11 is all that was certified.

    python -m benchmarks.nist
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize
from torch import nn

import batchopt
from benchmarks.findings import Finding, publish
from benchmarks.nist_problems import Regression, read_problems

Vector = npt.NDArray[np.float64]
LIMIT = 1000
NO_STOP: dict[str, Any] = {"max_iter": LIMIT, "tolerance_grad": 0.0, "tolerance_change": 0.0}
# A start from which fewer digits were found is not solved.
SOLVED, SIX = 4.0, 6.0
# Fewer digits are the luck of the last rounding.
LEAD = 0.5


class Fit(nn.Module):
    """The model of a problem, whose parameters begin at a start."""

    def __init__(self, problem: Regression, start: torch.Tensor) -> None:
        super().__init__()
        self.problem = problem
        self.b = nn.Parameter(start.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The responses, shape `(samples,)`."""
        return self.problem.predict(self.b, x)


def misfit(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Response less observation."""
    found: torch.Tensor = module(inputs) - targets
    return found


Solver = Callable[[Regression, torch.Tensor], tuple[torch.Tensor, int]]


def ours(**options: Any) -> Solver:
    """The parameters that Levenberg-Marquardt leaves, and its evaluations of f; where it raises, those it had."""

    def run(problem: Regression, start: torch.Tensor) -> tuple[torch.Tensor, int]:
        fit = Fit(problem, start)
        make = partial(batchopt.LevenbergMarquardt, **options)
        with batchopt.BatchOptimizer(fit, terms={"fit": batchopt.Term(residual=misfit)}, optimizer=make) as opt:
            with suppress(batchopt.NonFiniteError):
                opt.step({"fit": (problem.x, problem.y)})
            return fit.b.detach().clone(), opt.eval_counter

    return run


def scipys(method: str, **options: Any) -> Solver:
    """The same for a method of `scipy.optimize.least_squares`; where it raises, the start."""

    def run(problem: Regression, start: torch.Tensor) -> tuple[torch.Tensor, int]:
        def values(b: Vector) -> Vector:
            found: Vector = problem.residuals(torch.from_numpy(b)).numpy()
            return found

        def rows(b: Vector) -> Vector:
            found: Vector = problem.jacobian(torch.from_numpy(b)).numpy()
            return found

        try:
            found = optimize.least_squares(values, start.numpy(), rows, method=method, **options)
        except ValueError:  # residuals that are not finite
            return start, 1
        return torch.from_numpy(found.x), int(found.nfev)

    return run


FEW: dict[str, Any] = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15, "max_nfev": LIMIT, "x_scale": "jac"}
SOLVERS: dict[str, Solver] = {
    "LevenbergMarquardt, defaults": ours(),
    "LevenbergMarquardt": ours(**NO_STOP),
    "LevenbergMarquardt, geodesic": ours(**NO_STOP, geodesic=True),
    "SciPy lm, defaults": scipys("lm"),
    "SciPy trf, defaults": scipys("trf"),
    "SciPy lm": scipys("lm", **FEW),
    "SciPy trf": scipys("trf", **FEW),
}
Table = dict[str, dict[str, dict[str, float]]]


def measure() -> Table:
    """Digits and evaluations of each solver, by problem and start."""
    table: Table = {}
    for problem in read_problems():
        for number, start in enumerate(problem.starts, start=1):
            row: dict[str, dict[str, float]] = {}
            for name, solve in SOLVERS.items():
                b, evaluations = solve(problem, start)
                row[name] = {"digits": problem.digits(b), "evaluations": evaluations}
            table[f"{problem.name} {number}"] = row
            cells = "".join(f"{cell['digits']:9.1f}{cell['evaluations']:6}" for cell in row.values())
            print(f"{problem.name:10}{problem.difficulty:8}{number}{cells}", flush=True)
    return table


def judge(table: Table) -> list[Finding]:
    """What was asked, answered."""
    findings = []
    for name in SOLVERS:
        digits = [row[name]["digits"] for row in table.values()]
        findings.append(Finding(f"starts of {len(table)} that {name} solves", sum(d >= SOLVED for d in digits)))
        findings.append(Finding(f"starts with six digits by {name}", sum(d >= SIX for d in digits)))
        findings.append(Finding(f"median digits of {name}", float(np.median(digits))))
    own = {key: row["LevenbergMarquardt"]["digits"] for key, row in table.items()}
    theirs = {key: max(row["SciPy lm"]["digits"], row["SciPy trf"]["digits"]) for key, row in table.items()}
    unsolved = [key for key in table if theirs[key] >= SOLVED > own[key]]
    fewer = [key for key in table if own[key] < theirs[key] - LEAD]
    more = [key for key in table if own[key] > theirs[key] + LEAD]
    findings.append(Finding(f"starts that only SciPy solves: {', '.join(unsolved)}", len(unsolved), most=0))
    findings.append(Finding("starts from which SciPy has half a digit more", len(fewer), most=0))
    findings.append(Finding("starts from which ours has half a digit more", len(more)))
    return findings


def main() -> None:
    """Measure and judge."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of exponentials that overflow on the way
    print("digits and evaluations:", "; ".join(SOLVERS))
    table = measure()
    publish("nist", judge(table), table)


if __name__ == "__main__":
    main()
