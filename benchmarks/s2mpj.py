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
from benchmarks.findings import Finding, publish
from benchmarks.s2mpj_problems import Problem, large, small
from benchmarks.solvers import NO_STOP, SOLVERS, Enough, with_torch

LIMIT = 500
# A run ends after so many evaluations that lower f by less than this fraction of the way.
PATIENCE, LITTLE = 60, 1e-13
TOLERANCES = (1e-6, 1e-12)


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

    def normal(self, limit: int) -> tuple[float, torch.Tensor, torch.Tensor]:
        """f, JᵀWr and JᵀWJ."""
        residuals, jacobian = self._rows()
        return float(residuals @ residuals), jacobian.T @ residuals, jacobian.T @ jacobian

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """JᵀWJ times a vector."""
        _, jacobian = self._rows()
        return jacobian.T @ (jacobian @ v)

    def acceleration(self, v: torch.Tensor) -> torch.Tensor:
        """Not used without `geodesic`."""
        raise NotImplementedError


def levenberg_marquardt(trace: Trace) -> None:
    """Ours, without tolerances."""
    x = torch.nn.Parameter(trace.last.clone())
    with contextlib.suppress(Enough):
        batchopt.LevenbergMarquardt([x], **NO_STOP).step(Squares(trace, x))


def with_least_squares(method: str) -> Callable[[Trace], None]:
    """A method of SciPy's `least_squares`, with the smallest tolerances, scaled by the Jacobian."""

    def run(trace: Trace) -> None:
        def values(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            residuals, _ = trace.problem.residuals(x)
            with np.errstate(over="ignore"):
                trace.record(float(residuals @ residuals))
            return residuals

        def rows(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            return trace.problem.residuals(x)[1]

        options: dict[str, Any] = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15, "x_scale": "jac", "max_nfev": LIMIT}
        optimize.least_squares(values, trace.last.numpy(), rows, method=method, **options)

    return run


LINE_SEARCH: dict[str, Callable[[Any], object]] = {
    **SOLVERS,
    "torch LBFGS, history 10": with_torch(
        lambda params: torch.optim.LBFGS(
            params,
            max_iter=1000,
            max_eval=LIMIT,
            line_search_fn="strong_wolfe",
            tolerance_grad=0,
            tolerance_change=0,
            history_size=10,
        )
    ),
}
LEAST_SQUARES: dict[str, Callable[[Any], object]] = {
    "LevenbergMarquardt": levenberg_marquardt,
    "SciPy lm": with_least_squares("lm"),
    "SciPy trf": with_least_squares("trf"),
}
Row = dict[str, Any]
Table = dict[str, Row]


def measure(problem: Problem, solvers: dict[str, Callable[[Any], object]]) -> Row:
    """For each solver the evaluations to each tolerance, or None; and the lowest value."""
    runs = {}
    for name, solve in solvers.items():
        runs[name] = trace = Trace(problem)
        try:
            solve(trace)
        except (Enough, ArithmeticError, RuntimeError, ValueError, IndexError) as error:
            if not isinstance(error, Enough):
                print(f"{name} raised {type(error).__name__} for {problem.name}: {str(error)[:100]}", flush=True)
    lowest = min(value for trace in runs.values() for value in trace.values if math.isfinite(value))
    row: Row = {"variables": len(problem.start), "lowest": lowest}
    for name, trace in runs.items():
        row[name] = {str(tolerance): solved(trace.values, lowest, tolerance) for tolerance in TOLERANCES}
    shown = "".join(f"{row[name]['1e-06']!s:>8}" for name in solvers)
    print(f"{problem.name:16}{len(problem.start):4}{lowest:12.4g}{shown}", flush=True)
    return row


def solved(values: Sequence[float], lowest: float, tolerance: float) -> int | None:
    """The first evaluation whose value lies within the tolerance of the lowest."""
    bound = lowest + tolerance * (values[0] - lowest)
    return next((number for number, value in enumerate(values, start=1) if value <= bound), None)


def factors(table: Table, name: str, tolerance: float) -> list[float]:
    """Evaluations relative to those of the best solver, for each problem that this one solves."""
    found = []
    for row in table.values():
        counts = {key: cell[str(tolerance)] for key, cell in row.items() if isinstance(cell, dict)}
        if counts[name] is not None:
            found.append(counts[name] / min(count for count in counts.values() if count is not None))
    return found


def judge(group: str, table: Table, solvers: Sequence[str], mosts: dict[str, float]) -> list[Finding]:
    """The share that each solves, and the mean of its evaluations relative to the best."""
    findings = []
    for tolerance in TOLERANCES:
        for name in solvers:
            found = factors(table, name, tolerance)
            mean = math.exp(sum(map(math.log, found)) / len(found))
            most = mosts.get(name) if tolerance == TOLERANCES[0] else None
            about = f"{group}, {tolerance:.0e}, {name}"
            findings.append(Finding(f"{about}: share solved of {len(table)}", len(found) / len(table)))
            findings.append(Finding(f"{about}: evaluations / the best's", mean, most=most))
    return findings


def main() -> None:
    """Measure and judge."""
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
    publish(
        "s2mpj",
        [
            *judge("small", tables["small"], list(LINE_SEARCH), {"LBFGS": 1.22}),
            *judge("large", tables["large"], list(LINE_SEARCH), {}),
            *judge("squares", tables["squares"], list(LEAST_SQUARES), {"LevenbergMarquardt": 1.4}),
        ],
        tables,
    )


if __name__ == "__main__":
    main()
