"""Levenberg-Marquardt, for sums of squares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from batchopt.errors import NonFiniteError
from batchopt.optim.algebra import norm
from batchopt.optim.bounds import Bounds
from batchopt.optim.line import Closure, Point
from batchopt.optim.minimizer import NOBODY, Callback, Minimizer, Search, Watch, limit
from batchopt.optim.quadratic import DenseModel, Model, ProductModel
from batchopt.optim.squares import ResidualSquares, Squares, SquaresOver

# Largest damping, at which a step is rounding only, and smallest, which is as good as none.
MOST, LEAST = 1e16, 1e-15
# The damping grows by this factor until the first step is no longer than the parameters.
LONGER = 3.0
# If the acceleration is a larger fraction of the step, the second order does not describe the function there.
BENT = 0.75
# After a step whose decrease was the predicted one to this fraction, the damping falls by this factor.
RIGHT, FALL = 0.1, 0.1
# f must agree with the sum of squares of the normal equations to this fraction of the dtype's digits.
SAME = 0.5


class LevenbergMarquardt(Minimizer):
    """Levenberg-Marquardt: steps that minimise a damped model of a sum of squares.

    f is rᵀWr; a step solves (JᵀWJ + damping D) step = -JᵀWr. Where the model describes f well, the damping falls, and
    convergence is nearly quadratic for small residuals; elsewhere steps become short and turn to the steepest descent.
    An iteration takes the normal equations once (`BatchOptimizer.normal`) and one evaluation per trial.

    Args:
        params: parameters of one dtype on one device; float64 is advised.
        damping: of the first step, relative to D; increased if that step would be longer than the parameters, measured
            by D. Default 1e-3.
        scaling: D. `"diagonal"`, the default: the diagonal of JᵀWJ, each element at its largest so far (Moré 1978), so
            that units of parameters do not matter; for regressions. `"identity"`: the same number for all parameters,
            the largest of the first diagonal; for networks. Above `dense` parameters D is one number in any case.
        geodesic: adds the second-order correction of Transtrum and Sethna to each step, which takes about three more
            evaluations. Default False.
        dense: the largest number of parameters of f (`params` may be some of them) for which the matrix is made and
            factorised; for more, steps are found by conjugate gradients on its products, which need no more memory than
            an evaluation. Default 5,000.
        when_data_change: `"forget"`, the default, or `"keep"` the damping if f has changed at the parameters where the
            last step ended; it is forgotten nevertheless if the first step there needs one that differs by more than a
            factor of 100.
        max_iter: maximum number of iterations per call of `step`; None: no limit. Default 300.
        tolerance_change: stop after a step that removes less than this fraction of the residuals (f falls by less than
            its square), or is shorter than this fraction of the parameters, measured by D, if that also holds without
            damping; or once the residuals are the rounding of those at the start: f is eps² of f there. Default 1e-9; 0
            never ends a step.
        tolerance_grad: stop where no element of the gradient is larger, in units of f. Default 0.
        max_eval, bounds, callback: see `LBFGS`.

    `result` and the final parameters are as described for `LBFGS`: a point is accepted only if it is lower, and a trial
    that is not finite only shortens the next step. In a custom loop, `step(closure)` takes a closure that returns
    residuals, f being the sum of their squares; or `BatchOptimizer.closure`, which provides the normal equations of a
    criterion `torch.nn.MSELoss()` or of terms `Term(residual=...)`. Raises `TypeError` for a closure that returns a
    scalar, `ValueError` or `TypeError` for options that cannot work, and what `BatchOptimizer.normal` raises.

    Levenberg 1944, Marquardt 1963; the damping as in Nielsen, "Damping parameter in Marquardt's method", IMM report
    1999-05, but a tenth of the last one where the model predicted the decrease to a tenth; Moré, "The
    Levenberg-Marquardt algorithm: implementation and theory", 1978; Transtrum and Sethna, "Improvements to the
    Levenberg-Marquardt algorithm for nonlinear least-squares minimization", arXiv 1201.5885, 2012. With `bounds` a step
    minimises the damped model within them: the constrained method of Kanzow, Yamashita and Fukushima,
    "Levenberg-Marquardt methods with strong local convergence properties for solving nonlinear equations with convex
    constraints", Journal of Computational and Applied Mathematics 172, 2004; the second-order correction is of the
    elements that are not held.

    >>> times = torch.linspace(0, 3, 20, dtype=torch.float64)
    >>> rate = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    >>> optimizer = batchopt.LevenbergMarquardt([rate])
    >>> start = optimizer.step(lambda: torch.exp(-rate * times) - torch.exp(-0.7 * times))
    >>> round(rate.item(), 6)
    0.7
    """

    def __init__(
        self,
        params: Iterable[Any],
        damping: float = 1e-3,
        scaling: Literal["diagonal", "identity"] = "diagonal",
        max_iter: int | None = 300,
        max_eval: int | None = None,
        tolerance_grad: float = 0.0,
        tolerance_change: float = 1e-9,
        *,
        bounds: Bounds = None,
        geodesic: bool = False,
        dense: int = 5_000,
        when_data_change: Literal["forget", "keep"] = "forget",
        callback: Callback | None = None,
    ) -> None:
        super().__init__(locals())

    _knowledge = "damping"
    _kept = (*Minimizer._kept, "damping", "growth", "scale")

    def _unpacked(self, key: str, value: Any) -> Any:
        return value.double().to(self._change.device) if key == "scale" else super()._unpacked(key, value)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure, *, watch: Watch = NOBODY
    ) -> torch.Tensor | float:
        """See `Minimizer.step`. `closure()` returns residuals, a tensor with at least one dimension; or it also has
        `parameters`, `normal`, `gauss_newton` and `acceleration`, like `BatchOptimizer.closure`."""
        given: Any = closure  # returns residuals, where it is no `Squares`
        squares = given if isinstance(given, Squares) else ResidualSquares(given, self._group["params"])
        self._squares = SquaresOver(squares, self._group["params"])
        try:
            return super().step(squares, watch=watch)
        finally:
            del self._squares

    def _forget(self) -> None:
        for key in ("damping", "growth", "scale"):
            self._memory.pop(key, None)

    def _advance(self, run: Search) -> float | None:
        memory, here, after = self._memory, run.here, run.spare[0]
        model = self._model(here)
        known: float = memory.get("damping", self._group["damping"])
        damping, growth = known, memory.get("growth", 2.0)
        if "damping" not in memory:
            damping = self._first_damping(run, model, damping)
        while damping <= MOST and run.function.evaluations < limit(self._group["max_eval"]):
            step = self._step(model, here, damping)
            if step is not None:
                if self._box is None:
                    torch.add(here.x, step.to(here.x), out=after.x)
                else:
                    self._box.place(here.x, step.to(here.x), after.x)
                    step = (after.x - here.x).to(step)
                if torch.equal(after.x, here.x):
                    break
                run.function.at(after)
                self._vector.write(here.x)  # products of the model are taken at the parameters
                if not after.finite:
                    run.function.not_finite += 1
                elif self._is_better(run, here, after, model.scale):
                    predicted = model.decrease(step)
                    gain = (here.f - after.f) / predicted if predicted > self._rounding(run) else 1.0
                    memory["damping"] = max(damping * _change_of_damping(gain), LEAST)
                    memory["growth"] = 2.0
                    torch.sub(after.x, here.x, out=self._change)
                    self._settled = self._is_small(here, model, step) and self._is_small(
                        here, model, self._minimum(model, here, LEAST)
                    )
                    run.here, run.spare, run.change = after, [here, *run.spare[1:]], norm(self._change)
                    self._keep_lowest(run, here)
                    if memory.get("on_trial"):
                        self._judge(run, damping / known)
                    return 1.0
            damping, growth = damping * growth, growth * 2
        if damping > MOST or run.function.evaluations < limit(self._group["max_eval"]):
            self._forget()  # the next step begins with the first damping, as this one was unsuccessful
        else:
            memory["damping"], memory["growth"] = damping, growth
        return None

    def _first_damping(self, run: Search, model: Model, damping: float) -> float:
        """Return the damping of the first step, which must not be longer than the parameters: a model dominated by few
        of them holds only nearby."""
        bound = _size(model, run.here)
        while bound and damping < MOST:
            step = self._minimum(model, run.here, damping)
            if step is not None and _length(model, step) <= bound:
                break
            damping *= LONGER
        return damping

    def _is_small(self, here: Point, model: Model, step: torch.Tensor | None) -> bool:
        """Tell whether a step promises a decrease, or a move, within the tolerance."""
        if step is None:
            return False
        part: float = self._group["tolerance_change"]
        return _length(model, step) < part * _size(model, here) or model.decrease(step) < part**2 * abs(here.f)

    def _changed_little(self, run: Search, f: float) -> bool:
        rounding = torch.finfo(self._vector.dtype).eps ** 2 * run.start
        return self._settled or (self._group["tolerance_change"] > 0 and run.here.f <= rounding)

    def _model(self, here: Point) -> Model:
        """Return the model of f around the current point. Raises `ValueError` if f is not the sum of these squares."""
        self._vector.write(here.x)  # not necessarily the last point evaluated
        memory = self._memory
        before: torch.Tensor | None = memory.get("scale")
        model: Model
        if self._squares.size > self._group["dense"]:
            model = ProductModel(self._squares, here.gradient.double() / 2, before)
        else:
            loss, vector, matrix = self._squares.normal(self._group["dense"])
            if abs(loss - here.f) > torch.finfo(self._vector.dtype).eps ** SAME * abs(here.f):
                raise ValueError(
                    f"the sum of the squares is {loss:.9g} where f is {here.f:.9g}: f has to be the mean squares of "
                    "the terms and nothing else, and the same at each evaluation"
                )
            model = DenseModel(vector, matrix, before, each=self._group["scaling"] != "identity")
        memory["scale"] = model.scale
        return model

    def _minimum(self, model: Model, here: Point, damping: float) -> torch.Tensor | None:
        """Return the step to the minimum of the damped model, within the bounds; None if it has none."""
        if self._box is None:
            return model.solve(model.vector.neg(), damping)

        def after(step: torch.Tensor) -> torch.Tensor:
            return model.vector + model.times(step) + damping * model.scale * step

        def solve(held: torch.Tensor, moves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
            free = (~held).double()
            found = model.solve(-after(moves) * free, damping, free)
            return None if found is None else (moves + found, after(moves + found))

        return self._box.step(here.x, model.vector, solve)

    def _step(self, model: Model, here: Point, damping: float) -> torch.Tensor | None:
        """Return the step at this damping; None if the model has none that can be trusted."""
        step = self._minimum(model, here, damping)
        if step is None or not self._group["geodesic"]:
            return step
        free = None if self._box is None else self._box.leaves(here.x, step).double()
        try:
            force = self._squares.acceleration(step.to(self._vector.dtype)).double().neg()
            bend = model.solve(force if free is None else force * free, damping, free)
        except NonFiniteError:  # the residuals are not finite along the step: its trial decides
            return step
        if bend is None:
            return step
        length, more = _length(model, step), _length(model, bend)
        return step + bend / 2 if more <= BENT * length else step

    def _is_better(self, run: Search, here: Point, after: Point, scale: torch.Tensor) -> bool:
        """Tell whether the trial is lower; if only rounding differs, whether its gradient is smaller."""
        if after.f < here.f - self._rounding(run):
            return True
        steep, steeper = (float((self._steepest(p).double().square() / scale).sum()) for p in (after, here))
        return after.f <= here.f + self._rounding(run) and steep < steeper


def _change_of_damping(gain: float) -> float:
    """Return the factor of the damping after a step that lowered f by `gain` times the predicted decrease: Nielsen's,
    and less where the model was right."""
    return FALL if abs(gain - 1) < RIGHT else max(1 / 3, 1 - (2 * gain - 1) ** 3)


def _size(model: Model, here: Point) -> float:
    """Return the length, measured by D, of the parameters on which f depends."""
    return _length(model, here.x.double() * (model.vector != 0))


def _length(model: Model, step: torch.Tensor) -> float:
    """Return the length of a step, measured by D."""
    return float((model.scale * step.square()).sum().sqrt())
