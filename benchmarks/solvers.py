"""Which optimizer solves which standard problem, in how many evaluations.

Each of `problems.py`, from its published start, in float64 and float32: ours, L-BFGS-B and CG of SciPy, L-BFGS of torch
(strong Wolfe), all with their own histories, and without tolerances that would stop them early. A problem is solved by
the first evaluation that comes down to the published minimum where the run ends: to 1e-6 of it, plus 1e-8 of the way
there or 1e-8 (float32: 1e-3, and 1e-5). Who needs more than 10,000 evaluations has not solved it.

    python -m benchmarks.solvers
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize

import batchopt
from benchmarks.findings import Finding, publish
from benchmarks.problems import PROBLEMS, Problem

LIMIT = 10_000
TOLERANCES = {torch.float64: (1e-6, 1e-8), torch.float32: (1e-3, 1e-5)}
NO_STOP: dict[str, Any] = {"max_iter": None, "max_eval": LIMIT, "tolerance_grad": 0.0, "tolerance_change": 0.0}


class Enough(Exception):
    """The limit of evaluations, or the lowest minimum, was reached."""


class Trace:
    """A problem in a precision; keeps each value of f."""

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        self.problem, self.dtype = problem, dtype
        self.values: list[float] = []
        self.last = torch.tensor(problem.start, dtype=dtype)  # the last point that was evaluated

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """f at a leaf, with its gradient in `.grad`."""
        lowest = min(self.problem.minima)
        if len(self.values) >= LIMIT or (self.values and self.values[-1] <= lowest + self._near(lowest)):
            raise Enough
        x.grad = None
        f = self.problem.function(x)
        f.backward()  # type: ignore[no-untyped-call]
        self.values.append(f.item())
        return f

    def _near(self, minimum: float) -> float:
        relative, absolute = TOLERANCES[self.dtype]
        return relative * abs(minimum) + absolute * min(1.0, abs(self.values[0] - minimum))

    def solved(self) -> int | None:
        """The evaluation that came down to the published minimum where it ended; None if it ended at none."""
        best = min(value for value in self.values if not math.isnan(value))
        for minimum in self.problem.minima:
            near = self._near(minimum)
            if abs(best - minimum) <= near:
                return next(i + 1 for i, value in enumerate(self.values) if value <= minimum + near)
        return None


def with_torch(make: Callable[..., torch.optim.Optimizer]) -> Callable[[Trace], torch.Tensor]:
    """Run an optimizer of torch's kind; returns where it ended."""

    def run(trace: Trace) -> torch.Tensor:
        x = trace.last.clone().requires_grad_()
        optimizer = make([x])
        stalled, before = 0, x.detach().clone()
        while stalled < 2:
            try:
                optimizer.step(lambda: trace(x))  # type: ignore[arg-type, return-value]
            except Enough:
                break
            stalled = stalled + 1 if torch.equal(x.detach(), before) or isinstance(optimizer, OURS) else 0
            before = x.detach().clone()
        return x.detach()

    return run


def with_scipy(method: str, **options: Any) -> Callable[[Trace], torch.Tensor]:
    """Run a method of SciPy; x is float64 there, and f of the trace's precision."""

    def run(trace: Trace) -> torch.Tensor:
        def value_and_gradient(x: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
            leaf = torch.from_numpy(x.copy()).to(trace.dtype).requires_grad_()
            f = trace(leaf).item()
            trace.last = leaf.detach()
            assert leaf.grad is not None
            return f, leaf.grad.double().numpy()

        try:
            start = trace.last.double().numpy()
            result = optimize.minimize(value_and_gradient, start, jac=True, method=method, options=options)
            return torch.from_numpy(result.x).to(trace.dtype)
        except Enough:
            return trace.last

    return run


def torch_lbfgs(**options: Any) -> Callable[[Trace], torch.Tensor]:
    """Run that of torch."""
    limits: dict[str, Any] = {**NO_STOP, "max_iter": 1000, "line_search_fn": "strong_wolfe", **options}
    return with_torch(lambda params: torch.optim.LBFGS(params, **limits))


OURS = (batchopt.LBFGS, batchopt.CG, batchopt.SSBroyden)
SOLVERS: dict[str, Callable[[Trace], torch.Tensor]] = {
    "LBFGS": with_torch(lambda params: batchopt.LBFGS(params, **NO_STOP)),
    "LBFGS, history 10": with_torch(lambda params: batchopt.LBFGS(params, **NO_STOP, history_size=10)),
    "CG": with_torch(lambda params: batchopt.CG(params, **NO_STOP)),
    "SSBroyden": with_torch(lambda params: batchopt.SSBroyden(params, **NO_STOP)),
    "SciPy L-BFGS-B": with_scipy("L-BFGS-B", maxiter=LIMIT, maxfun=LIMIT, ftol=0.0, gtol=0.0),
    "SciPy CG": with_scipy("CG", maxiter=LIMIT, gtol=0.0),
    "torch LBFGS": torch_lbfgs(),
}

Table = dict[str, dict[str, Any]]


def measure(dtype: torch.dtype) -> Table:
    """For each problem and solver the evaluation that solved it, f at the start and at the end."""
    table: Table = {}
    for problem in PROBLEMS:
        row: dict[str, Any] = {}
        for name, solver in SOLVERS.items():
            trace = Trace(problem, dtype)
            try:
                end = float(problem.function(solver(trace)))
            except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:  # a peer's own
                print(f"{name} raised {type(error).__name__} for {problem.name}: {error}")
                end = math.nan
            row[name] = {"solved": trace.solved(), "start": trace.values[0], "end": end}
            row[name]["evaluations"] = len(trace.values)
        table[problem.name] = row
        shown = "".join(f"{cell['solved']!s:>10}" for cell in row.values())
        print(f"{problem.name:30}{len(problem.start):5}{shown}", flush=True)
    return table


def ratio(table: Table, ours: str, theirs: str) -> float:
    """The geometric mean of evaluations to the solution, over the problems that both solve."""
    both = [(row[ours]["solved"], row[theirs]["solved"]) for row in table.values()]
    logs = [math.log(one / other) for one, other in both if one and other]
    return math.exp(sum(logs) / len(logs))


def missed(table: Table, ours: str, theirs: str) -> list[str]:
    """The problems that only the other one solves."""
    return [name for name, row in table.items() if row[theirs]["solved"] and not row[ours]["solved"]]


def judge(table: Table, precision: str) -> list[Finding]:
    """What was asked, answered."""
    rows = table.values()
    findings = [
        Finding(f"{precision}: solved of {len(table)} by {name}", sum(bool(row[name]["solved"]) for row in rows))
        for name in SOLVERS
    ]
    for ours, theirs in (("LBFGS", "SciPy L-BFGS-B"), ("LBFGS", "torch LBFGS"), ("CG", "SciPy CG")):
        only = missed(table, ours, theirs)
        title = f"{precision}: only {theirs} solves, not {ours} {', '.join(only)}".strip()
        findings.append(Finding(title, len(only), most=0))
    for ours, theirs, most in (
        ("LBFGS", "SciPy L-BFGS-B", 1.0),
        ("LBFGS, history 10", "SciPy L-BFGS-B", None),
        ("LBFGS", "torch LBFGS", None),
        ("CG", "SciPy CG", None),
        ("SSBroyden", "SciPy L-BFGS-B", None),
    ):
        findings.append(Finding(f"{precision}: evaluations, {ours} / {theirs}", ratio(table, ours, theirs), most=most))
    ends = [row[name] for row in rows for name in ("LBFGS", "LBFGS, history 10", "CG", "SSBroyden")]
    worse = sum(not end["end"] <= end["start"] for end in ends)
    findings.append(Finding(f"{precision}: ours ends at NaN, or higher than it began", worse, most=0))
    return findings


def main() -> None:
    """Measure and judge."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # SciPy's, of digits that are lost
    tables = {}
    for dtype in (torch.float64, torch.float32):
        precision = str(dtype).removeprefix("torch.")
        print(precision, *SOLVERS, sep=", ")
        tables[precision] = measure(dtype)
    publish("solvers", [f for precision, table in tables.items() for f in judge(table, precision)], tables)


if __name__ == "__main__":
    main()
