"""The course of a run: a row for each accepted point."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from batchopt.extending import Evaluated, NumberFunction, Observer, Stepped, read_count, read_numbers
from batchopt.extras.figure import blank
from batchopt.optim import Iteration

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _plain(name: str, value: Any) -> float | list[float]:
    """Return what the user's function of this name has returned as a number, or as a list of several."""
    needed = f"the function {name!r} must return a real number, or a tensor of one or of shape (k,); got"
    try:
        found = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{needed} {type(value).__name__}") from error
    if found.is_complex() or (found.numel() != 1 and found.dim() != 1):
        raise ValueError(f"{needed} shape {tuple(found.shape)} of {found.dtype}")
    numbers: list[float] = found.double().reshape(-1).tolist()
    return numbers[0] if found.numel() == 1 else numbers


class History(Observer):
    """Rows of plain numbers: one for each accepted point of an optimizer of batchopt, one for each step of another.

    A row has `step`, `iteration`, `evaluations` and `seconds` (all so far, seconds in steps only), `f`, and where it
    has them `terms`; of an accepted point also the largest element of the `gradient`, the `change` of X (Euclidean
    length), the `length` of the step along the direction, and the `trials` of its line search: pairs of a length and
    f there; and numbers of the user's. A step that is undone leaves no rows. `history["f"]` is a column,
    `len(history)` the number of rows.
    """

    def __init__(
        self,
        every: int = 1,
        numbers: Mapping[str, NumberFunction] = {},  # never modified
        module: torch.nn.Module | None = None,
    ) -> None:
        """Keep the rows of each `every`-th iteration, with what each of `numbers` returns for the `module`."""
        self.every, self.numbers, self._module = read_count("history", every), read_numbers("numbers", numbers), module
        self.rows: list[dict[str, Any]] = []
        # of each evaluation of the present step since its last point, with f; nothing of one that raised
        self._terms: list[tuple[float, Mapping[str, float]]] | None = None
        self._seconds, self._began, self._before = 0.0, 0.0, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.rows]

    def __repr__(self) -> str:
        last = f", f {self.rows[-1]['f']:.6g} after {self.rows[-1]['seconds']:.1f} s" if self.rows else ""
        return f"History({len(self.rows)} rows{last})"

    # ---- events

    def step_begins(self) -> None:
        self._began, self._before = time.perf_counter(), len(self.rows)
        self._terms = []

    def step_ended(self, found: Stepped | None) -> None:
        if found is None:
            del self.rows[self._before :]
        elif not found.is_followed and found.batches % self.every == 0:
            terms = next((terms for f, terms in reversed(self._terms or ()) if f == found.loss), {})
            self._add(found.batches, found.batches, found.evaluations, found.loss, terms)
        self._terms = None
        self._seconds += time.perf_counter() - self._began

    def begins(self) -> None:
        if self._terms is not None:
            self._terms.append((math.nan, {}))

    def evaluated(self, found: Evaluated) -> None:
        if self._terms:
            self._terms[-1] = found.loss, found.terms

    def accepted(self, step: int, point: Iteration) -> None:
        if point.number % self.every == 0:
            known = self._terms or []
            place = len(known) - 1 - (point.evaluations - point.at)  # the accepted trial may not be the last
            terms = known[place][1] if 0 <= place < len(known) else {}
            self._add(step, point.number, point.evaluations, point.f, terms)
            trials = [list(trial) for trial in point.trials]
            self.rows[-1] |= {"gradient": point.gradient, "change": point.change, "length": point.step}
            self.rows[-1] |= {"trials": trials} if trials else {}
        self._terms = []

    def _add(self, step: int, iteration: int, evaluations: int, f: float, terms: Mapping[str, float]) -> None:
        row = {"step": step, "iteration": iteration, "evaluations": evaluations, "f": f}
        seconds = self._seconds + time.perf_counter() - self._began
        with torch.no_grad():
            own = {name: _plain(name, function(self._module)) for name, function in self.numbers.items()}
        self.rows.append({**row, "seconds": seconds, **({"terms": dict(terms)} if terms else {}), **own})

    # ---- what becomes of it

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, as checkpoints keep it."""
        return {"rows": [*self.rows], "seconds": self._seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.rows, self._seconds = [dict(row) for row in state["rows"]], float(state["seconds"])

    def draw(self, path: str | os.PathLike[str] | None = None, columns: Sequence[str] = ("f", "gradient")) -> Figure:
        """Return a figure of `columns` over evaluations, on a logarithmic scale; also written to `path`. Raises
        `ImportError` without matplotlib."""
        figure, axis = blank(7, 4)
        for name in columns:
            points = [(row["evaluations"], row[name]) for row in self.rows if name in row]
            if points:
                axis.semilogy(*zip(*points, strict=True), label=name)
        axis.set_xlabel("evaluations")
        if axis.lines:
            axis.legend()
        if path is not None:
            figure.savefig(path)
        return figure
