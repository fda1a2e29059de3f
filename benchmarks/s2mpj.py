"""In how many evaluations which optimizer solves the problems of S2MPJ, a public set that none of them was tuned on.

Unconstrained problems of 2 to 50 variables, some of 100 and more, and those that are sums of squares, each from its
published start, in float64, without tolerances that would end a run early. A run ends after 500 evaluations, or 60
that hardly lowered f. A solver has solved a problem when f is within a tolerance of the lowest value that any of them
found, as a fraction of the way there (Moré and Wild, "Benchmarking derivative-free optimization algorithms", SIAM
Journal on Optimization 20, 2009). Evaluations are relative to those of the best solver of a problem, in the geometric
mean over what a solver solves.

    python -m benchmarks.s2mpj
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize

import batchopt
from benchmarks.findings import RESULTS, Finding, publish
from benchmarks.profiles import draw, factors
from benchmarks.s2mpj_problems import Problem, large, small
from benchmarks.solvers import NO_STOP, SOLVERS, Enough, torch_lbfgs, with_scipy

LIMIT = 500
# A run ends after so many evaluations that lower f by less than this fraction of the way.
PATIENCE, LITTLE = 60, 1e-13
# Counts are kept for all of these; two are judged.
TOLERANCES = tuple(float(f"1e-{digits}") for digits in range(1, 13))
JUDGED = (1e-6, 1e-12)
# These are not among the best that others are judged by: their targets are older.
LATER = ("SciPy BFGS",)


class Trace:
    """A problem; keeps each value of f."""

    dtype = torch.float64

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.values: list[float] = []
        self._best, self._since = math.inf, 0
        self.last = torch.from_numpy(problem.start)

    def record(self, f: float) -> None:
        """Keep a value, or end the run."""
        if len(self.values) >= LIMIT or self._since >= PATIENCE:
            raise Enough
        self.values.append(f)
        if f < self._best - LITTLE * (self.values[0] - self._best) or self._best == math.inf:
            self._best, self._since = f, 0
        else:
            self._since += 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """f at a leaf, with its gradient in `.grad`."""
        f, gradient = self.problem(x.detach().numpy())
        self.record(f)
        x.grad = torch.from_numpy(gradient)
        return torch.tensor(f, dtype=torch.float64)


class Squares:
    """The normal equations of a problem at a parameter, for `LevenbergMarquardt`."""

    def __init__(self, trace: Trace, x: torch.nn.Parameter) -> None:
        self._trace, self._x = trace, x
        self.parameters = [x]

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        residuals, jacobian = self._trace.problem.residuals(self._x.detach().numpy())
        return torch.from_numpy(residuals), torch.from_numpy(jacobian)

    def __call__(self) -> float:
        """f, with df/dX in `.grad`."""
        residuals, jacobian = self._rows()
        self._x.grad = 2 * jacobian.T @ residuals
        f = float(residuals @ residuals)
        self._trace.record(f)
        return f

    def normal(self, limit: int, basis: Any = None) -> tuple[float, torch.Tensor, torch.Tensor]:
        """f, JᵀWr and JᵀWJ."""
        residuals, jacobian = self._rows()
        jacobian = jacobian if basis is None else basis.of(jacobian)
        return float(residuals @ residuals), jacobian.T @ residuals, jacobian.T @ jacobian

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """JᵀWJ times a vector."""
        _, jacobian = self._rows()
        return jacobian.T @ (jacobian @ v)

    def rows(self, most: int) -> None:
        """Not used up to `dense` parameters."""

    def accelerations(self, directions: torch.Tensor) -> torch.Tensor:
        """Not used without `geodesic`."""
        raise NotImplementedError

    def losses(self, points: torch.Tensor) -> torch.Tensor:
        """Not used without `step="longest"`."""
        raise NotImplementedError


def levenberg_marquardt(trace: Trace) -> None:
    """Ours, without tolerances."""
    x = torch.nn.Parameter(trace.last.clone())
    with contextlib.suppress(Enough):
        batchopt.LevenbergMarquardt([x], **NO_STOP).step(Squares(trace, x))


def with_least_squares(method: str) -> Callable[[Trace], None]:
    """A method of SciPy's `least_squares`, with the smallest tolerances, scaled by the Jacobian; within the
    problem's bounds."""

    def run(trace: Trace) -> None:
        def values(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            residuals, _ = trace.problem.residuals(x)
            with np.errstate(over="ignore"):
                trace.record(float(residuals @ residuals))
            return residuals

        def rows(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            return trace.problem.residuals(x)[1]

        lower, upper = trace.problem.bounds
        start = np.clip(trace.problem.start, lower, upper)
        options: dict[str, Any] = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15, "x_scale": "jac", "max_nfev": LIMIT}
        optimize.least_squares(values, start, rows, bounds=(lower, upper), method=method, **options)

    return run


LINE_SEARCH: dict[str, Callable[[Any], object]] = {
    **SOLVERS,
    "SciPy BFGS": with_scipy("BFGS", maxiter=LIMIT, gtol=0.0),
    "torch LBFGS, history 10": torch_lbfgs(history_size=10),
}
LEAST_SQUARES: dict[str, Callable[[Any], object]] = {
    "LevenbergMarquardt": levenberg_marquardt,
    "SciPy lm": with_least_squares("lm"),
    "SciPy trf": with_least_squares("trf"),
}
Row = dict[str, Any]
Table = dict[str, Row]


def measure(problem: Problem, solvers: dict[str, Callable[[Any], object]]) -> Row:
    """The lowest value; for each solver its evaluations to each tolerance, or None, and in all; what it raised."""
    runs, errors = {}, {}
    for name, solve in solvers.items():
        runs[name] = trace = Trace(problem)
        try:
            solve(trace)
        except Enough:
            pass
        except (ArithmeticError, RuntimeError, ValueError, IndexError) as error:
            errors[name] = f"{type(error).__name__}: {str(error)[:100]}"
    lowest = min(value for trace in runs.values() for value in trace.values if math.isfinite(value))
    counts = {name: [solved(trace.values, lowest, each) for each in TOLERANCES] for name, trace in runs.items()}
    shown = "".join(f"{count(counts, name, JUDGED[0])!s:>8}" for name in solvers)
    print(f"{problem.name:16}{len(problem.start):4}{lowest:12.4g}{shown}", *errors.items(), flush=True)
    evaluations = {name: len(trace.values) for name, trace in runs.items()}
    row = {"variables": len(problem.start), "lowest": lowest, "counts": counts, "evaluations": evaluations}
    return {**row, "errors": errors} if errors else row


def count(counts: dict[str, list[int | None]], name: str, tolerance: float) -> int | None:
    """The evaluations of a solver to a tolerance."""
    return counts[name][TOLERANCES.index(tolerance)]


def solved(values: Sequence[float], lowest: float, tolerance: float) -> int | None:
    """The first evaluation whose value lies within the tolerance of the lowest."""
    bound = lowest + tolerance * (values[0] - lowest)
    return next((number for number, value in enumerate(values, start=1) if value <= bound), None)


def judge(group: str, table: Table, solvers: Sequence[str], mosts: dict[str, float]) -> list[Finding]:
    """The share that each solves, and the mean of its evaluations relative to the best."""
    findings = []
    for tolerance in JUDGED:
        problems = [{name: count(row["counts"], name, tolerance) for name in solvers} for row in table.values()]
        for name in solvers:
            found = factors(problems, name, [peer for peer in solvers if peer not in LATER])
            mean = math.exp(sum(map(math.log, found)) / len(found))
            most = mosts.get(name) if tolerance == JUDGED[0] else None
            about = f"{group}, {tolerance:.0e}, {name}"
            solved_by = sum(counts[name] is not None for counts in problems)
            findings.append(Finding(f"{about}: share solved of {len(table)}", solved_by / len(table)))
            findings.append(Finding(f"{about}: evaluations / the best's", mean, most=most))
    return findings


def main() -> None:
    """Measure, judge and draw."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of overflows on the way
    problems = list(small())
    print("variables, lowest f, evaluations to 1e-6 of the way:", *LINE_SEARCH, sep="\n")
    tables = {
        "small": {problem.name: measure(problem, LINE_SEARCH) for problem in problems},
        "large": {problem.name: measure(problem, LINE_SEARCH) for problem in large()},
    }
    print(*LEAST_SQUARES, sep="\n")
    tables["squares"] = {p.name: measure(p, LEAST_SQUARES) for p in problems if p.squares}
    findings = judge("small", tables["small"], list(LINE_SEARCH), {"LBFGS": 1.22})
    findings += judge("large", tables["large"], list(LINE_SEARCH), {})
    findings += judge("squares", tables["squares"], list(LEAST_SQUARES), {"LevenbergMarquardt": 1.4})
    details = {"limit": LIMIT, "tolerances": TOLERANCES, **tables}
    publish("s2mpj", findings, details)
    draw(details, RESULTS / "s2mpj.png")


if __name__ == "__main__":
    main()
