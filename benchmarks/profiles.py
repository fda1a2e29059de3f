"""Profiles of solvers over a set of problems, drawn from the counts in `results/s2mpj.json`.

Performance profiles (Dolan and Moré, Mathematical Programming 91, 2002): the share of the problems that a solver solves
within a factor of the evaluations of the best one. Data profiles (Moré and Wild, SIAM Journal on Optimization 20,
2009): the share that it solves within a number of evaluations. Accuracy: the share that it solves to each tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Evaluations that solved a problem, by solver; None where it was not solved.
Counts = Mapping[str, int | None]
# For each group of problems: its title, and the tolerance of its first two panels.
GROUPS = {"small": ("unconstrained problems", 1e-6), "squares": ("sums of squares", 1e-12)}


def factors(problems: Iterable[Counts], name: str, peers: Sequence[str] | None = None) -> list[float]:
    """Evaluations relative to those of the best solver, or of the best of `peers`, for each problem that this one and
    one of them solve."""
    found = []
    for counts in problems:
        others = [count for peer, count in counts.items() if count is not None and (peers is None or peer in peers)]
        if (mine := counts[name]) is not None and others:
            found.append(mine / min(others))
    return found


def steps(values: Iterable[float], total: int, start: float, end: float) -> tuple[list[float], list[float]]:
    """The share of `total` values that are at most x, as a step function from `start` to `end`: x and share."""
    within = sorted(value for value in values if value <= end)
    shares = [number / total for number in range(len(within) + 1)]
    return [start, *within, end], [*shares, shares[-1]]


def shown(row: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The solvers that have a line, with its style: dashed for other libraries. Short histories would crowd it."""
    for number, name in enumerate(row):
        if "history" not in name:
            dashes, width = ("--", 1.3) if name.startswith(("SciPy", "torch")) else ("-", 1.8)
            yield name, {"color": f"C{number}", "linestyle": dashes, "linewidth": width}


def performance(axis: Any, problems: Sequence[Counts], most: float = 30.0) -> None:
    """Draw the performance profile of each solver, up to a factor of `most`."""
    for name, style in shown(problems[0]):
        x, shares = steps(factors(problems, name), len(problems), 1.0, most)
        axis.step(x, shares, where="post", label=name, **style)
    axis.set(xscale="log", xlim=(1, most), ylim=(0, 1.02), xlabel="evaluations / those of the best one")
    axis.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])


def data(axis: Any, problems: Sequence[Counts], most: int) -> None:
    """Draw the data profile of each solver, up to `most` evaluations."""
    for name, style in shown(problems[0]):
        x, shares = steps((row[name] or most + 1 for row in problems), len(problems), 1.0, most)
        axis.step(x, shares, where="post", **style)
    axis.set(xscale="log", xlim=(2, most), ylim=(0, 1.02), xlabel="evaluations")
    axis.set_xticks([2, 5, 10, 20, 50, 100, 200, 500], ["2", "5", "10", "20", "50", "100", "200", "500"])


def accuracy(axis: Any, table: Mapping[str, Any], tolerances: Sequence[float]) -> None:
    """Draw the share of problems that each solver solves to each tolerance."""
    rows = [row["counts"] for row in table.values()]
    for name, style in shown(rows[0]):
        shares = [sum(row[name][i] is not None for row in rows) / len(rows) for i in range(len(tolerances))]
        axis.plot(tolerances, shares, **style)
    axis.set(xscale="log", xlim=(tolerances[0], tolerances[-1]), ylim=(0, 1.02), xlabel="tolerance")


def draw(details: Mapping[str, Any], path: Path) -> None:
    """Draw three panels for each group of problems, given what `s2mpj` wrote."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(GROUPS), 3, figsize=(13, 8), sharey=True, layout="constrained")
    tolerances = details["tolerances"]
    for line, (group, (title, tolerance)) in zip(axes, GROUPS.items(), strict=True):
        table, index = details[group], tolerances.index(tolerance)
        problems = [{name: counts[index] for name, counts in row["counts"].items()} for row in table.values()]
        performance(line[0], problems)
        data(line[1], problems, details["limit"])
        accuracy(line[2], table, tolerances)
        line[0].set(ylabel=f"share of {len(table)} {title}", title=f"within a factor of the best, to {tolerance:.0e}")
        line[1].set_title(f"within so many evaluations, to {tolerance:.0e}")
        line[2].set_title(f"in {details['limit']} evaluations, by tolerance")
        line[0].legend(loc="lower right", fontsize=8)
        for axis in line:
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
            axis.minorticks_off()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
