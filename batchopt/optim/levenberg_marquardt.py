"""Levenberg-Marquardt, for sums of squares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from batchopt.errors import NonFiniteError
from batchopt.optim.algebra import copy, norm
from batchopt.optim.bounds import Bounds
from batchopt.optim.line import Closure, Point
from batchopt.optim.longest import WINDOW, Trial, around, between, longest
from batchopt.optim.minimizer import NOBODY, Callback, Minimizer, Search, Watch, limit
from batchopt.optim.quadratic import DenseModel, Model, ProductModel, Solved
from batchopt.optim.squares import ResidualSquares, Squares, SquaresOver
from batchopt_workers.functions.subspace import Cosines

# Largest damping, at which a step is rounding only, and smallest, which is as good as none.
MOST, LEAST = 1e16, 1e-15
# The damping grows by this factor until the first step is no longer than the parameters.
LONGER = 3.0
# If the acceleration is a larger fraction of the step, the second order does not describe the function there.
BENT = 0.75
# After a step whose decrease was the predicted one to this fraction, the damping falls by this factor.
RIGHT, FALL = 0.1, 0.1


class LevenbergMarquardt(Minimizer):
    """Levenberg-Marquardt: steps that minimise a damped model of a sum of squares.

    f is rᵀWr; a step solves (JᵀWJ + damping D) step = -JᵀWr. Where the model describes f well, the damping falls, and
    convergence is nearly quadratic for small residuals; elsewhere steps become short and turn to the steepest descent.
    An iteration takes the normal equations once (`BatchOptimizer.normal`) and one evaluation per trial; with
    `step="longest"` also the eigenvalues, and four or six evaluations without derivatives, which workers share.

    Args:
        params: parameters of one dtype on one device; float64 is advised.
        damping: of the first step, relative to D; increased if that step would be longer than the parameters, measured
            by D. Before it, with `scaling="diagonal"`, a step without damping is tried if it is no longer, and taken if
            f falls as the model predicts to a tenth: a linear regression from 0 takes one. Default 1e-3.
        scaling: D. `"diagonal"`, the default: the diagonal of JᵀWJ, each element at its largest so far (Moré 1978), so
            that units of parameters do not matter; for regressions. `"identity"`: the same number for all parameters,
            the largest of the first diagonal; for networks. Above `dense` parameters D is one number in any case.
        step: `"first"`, the default: the first trial that is lower, the damping following how well the model predicted
            it; for regressions, and where points are drawn anew. `"longest"`: of several lengths around that of the
            last step the longest at which f falls by at least a tenth of the prediction, as at all shorter ones; for
            long runs of networks in float64 whose residuals can become very small, as those of differential equations
            at fixed points, with `geodesic=True` and `scaling="identity"`.
        geodesic: adds the second-order correction of Transtrum and Sethna to each step, which takes about three more
            evaluations. Default False.
        dense: the largest number of parameters of f (`params` may be some of them), or of residuals, for which a matrix
            of that size is made and factorised. For more parameters the rows of J are used, if there are at most so
            many, of 1 GB in all; for more of both, steps are found by conjugate gradients on products, which need no
            more memory than an evaluation; with `step="longest"` they are within a subspace. Default 5,000.
        subspace: its number of dimensions, with as many residuals or fewer rows are used: vectors of a cosine transform
            of the parameters, drawn anew. It takes a matrix of that size, and 32 MB of rows at a time. Default 2,000.
        when_data_change: `"forget"`, the default, or `"keep"` the damping if f has changed at the parameters where the
            last step ended, or the length; it is forgotten nevertheless if the first step there needs one that differs
            by more than a factor of 100.
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
    Levenberg-Marquardt algorithm for nonlinear least-squares minimization", arXiv 1201.5885, 2012. The longest step is
    the rule of Webb, Jerad and Cartis, "An optimisation framework for the well-conditioned training of physics-informed
    neural networks", arXiv 2607.02194, 2026, here with corrected steps and fewer lengths. With `bounds` a step
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
        step: Literal["first", "longest"] = "first",
        geodesic: bool = False,
        dense: int = 5_000,
        subspace: int = 2_000,
        when_data_change: Literal["forget", "keep"] = "forget",
        callback: Callback | None = None,
    ) -> None:
        super().__init__(locals())

    _kept = (*Minimizer._kept, "damping", "growth", "radius", "scale")

    @property
    def _knows(self) -> bool:
        return "damping" in self._memory or "radius" in self._memory

    def _unpacked(self, key: str, value: Any) -> Any:
        return value.double().to(self._change.device) if key == "scale" else super()._unpacked(key, value)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure, *, watch: Watch = NOBODY
    ) -> torch.Tensor | float:
        """See `Minimizer.step`. `closure()` returns residuals, a tensor with at least one dimension; or it also has the
        methods of `Squares`, like `BatchOptimizer.closure`."""
        given: Any = closure  # returns residuals, where it is no `Squares`
        squares = given if isinstance(given, Squares) else ResidualSquares(given, self._group["params"])
        self._squares = SquaresOver(squares, self._group["params"])
        try:
            return super().step(squares, watch=watch)
        finally:
            del self._squares

    def _forget(self) -> None:
        for key in ("damping", "growth", "radius", "scale"):
            self._memory.pop(key, None)

    def _advance(self, run: Search) -> float | None:
        self._vector.write(run.here.x)  # not necessarily the last point evaluated
        model = self._model(run)
        self._memory["scale"] = model.scale
        if isinstance(model, ProductModel) or self._group["step"] == "first":
            return self._first(run, model)
        return self._longest(run, model)

    def _model(self, run: Search) -> Solved | ProductModel:
        """Return the model by its matrix; above `dense` parameters by rows where these are few, else by products, or
        within a subspace."""
        group, squares, here, before = self._group, self._squares, run.here, self._memory.get("scale")
        if squares.size <= group["dense"]:
            return squares.dense_model(here.f, before, group["scaling"] != "identity")
        most, longest = group["dense"], group["step"] == "longest"
        if longest:  # eigenvalues by rows take no longer than those of a subspace
            most = min(most, group["subspace"])
        if (model := squares.rows_model(most, here.f, before)) is not None:
            return model
        vector = here.gradient.double() / 2
        if not longest:
            return ProductModel(squares, vector, before)
        if self._box is not None:
            raise ValueError("step='longest' has no bounds above `dense`: give `dense`, or step='first'")
        number = self._memory.get("n_iter", 0) + run.iterations
        basis = Cosines(squares.size, min(group["subspace"], squares.size), number)
        return squares.subspace_model(basis, here.f, vector, before)

    def _first(self, run: Search, model: Model) -> float | None:
        """Take the first trial that is lower, each of them damped more than the one before."""
        memory, here, after = self._memory, run.here, run.spare[0]
        known: float = memory.get("damping", self._group["damping"])
        damping, growth = known, memory.get("growth", 2.0)
        if "damping" not in memory:
            known = self._first_damping(model, here)
            is_regression = isinstance(model, DenseModel) and self._group["scaling"] == "diagonal"
            damping = LEAST if is_regression and self._is_short(model, here, LEAST) else known
        while damping <= MOST and run.function.evaluations < limit(self._group["max_eval"]):
            (found,) = self._steps(model, here, [damping])
            if found is not None:
                step = self._move(here, found[0], after.x)
                if torch.equal(after.x, here.x):
                    break
                run.function.at(after)
                self._vector.write(here.x)  # products of the model are taken at the parameters
                if not after.finite:
                    run.function.not_finite += 1
                elif self._is_better(run, here, after, model.scale):
                    gain = self._ratio(run, found[1], after.f)
                    if damping >= known or abs(gain - 1) < RIGHT:
                        memory["damping"] = max(damping * _change_of_damping(gain), LEAST)
                        memory["growth"] = 2.0
                        self._take(run, model, step, found[1], damping / known)
                        return 1.0
            # what a first step without damping promised was wrong
            damping, growth = (known, growth) if damping < known else (damping * growth, growth * 2)
        if damping > MOST or run.function.evaluations < limit(self._group["max_eval"]):
            self._forget()  # the next step begins with the first damping, as this one was unsuccessful
        else:
            memory["damping"], memory["growth"] = damping, growth
        return None

    def _longest(self, run: Search, model: Solved) -> float | None:
        """Take the longest trial at which the model still describes f: of several around the last length, and then of
        some between the longest good one and the next."""
        memory, here, after = self._memory, run.here, run.spare[0]
        known: float = memory.get("radius") or _size(model, here) or 1.0
        lengths = around(known)
        while run.function.evaluations < limit(self._group["max_eval"]):
            trials = self._trials(run, model, lengths)
            best = longest(trials)
            if best is not None and best + 1 < len(trials):
                ends = trials[best], trials[best + 1]
                trials = [ends[0], *self._trials(run, model, between(ends[0].length, ends[1].length))]
                best = longest(trials)
            if best is not None and model.refine(trials[best].damping):
                continue
            if best is not None:
                copy(trials[best].x, after.x)
                run.function.at(after)
                self._vector.write(here.x)
                if after.finite and self._is_better(run, here, after, model.scale):
                    length = memory["radius"] = trials[best].length
                    self._take(run, model, trials[best].step, trials[best].predicted, length / known)
                    return length
            elif not trials or torch.equal(trials[-1].x, here.x):
                break
            lengths = lengths / WINDOW**2
        if run.function.evaluations < limit(self._group["max_eval"]):
            self._forget()
        else:
            memory["radius"] = float(lengths[-1])
        return None

    def _trials(self, run: Search, model: Solved, lengths: torch.Tensor) -> list[Trial]:
        """Evaluate f at the ends of the steps of these lengths, all of them at once."""
        here, found = run.here, []
        dampings = model.dampings(lengths).tolist()
        for length, damping, step in zip(lengths.tolist(), dampings, self._steps(model, here, dampings), strict=True):
            if step is not None:
                x = self._vector.empty()
                found.append(Trial(length, damping, self._move(here, step[0], x), step[1], x))
        losses = self._squares.losses(torch.stack([trial.x for trial in found])).tolist() if found else []
        run.function.evaluations += len(losses)
        run.function.not_finite += sum(map(math.isinf, losses))
        ratios = [self._ratio(run, trial.predicted, f) for trial, f in zip(found, losses, strict=True)]
        return [trial._replace(ratio=ratio) for trial, ratio in zip(found, ratios, strict=True)]

    def _move(self, here: Point, step: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the end of the step, within the bounds, to `out`; return the step from here to there."""
        if self._box is None:
            torch.add(here.x, step.to(here.x), out=out)
            return step
        self._box.place(here.x, step.to(here.x), out)
        return (out - here.x).to(step)

    def _ratio(self, run: Search, predicted: float, f: float) -> float:
        """Return by how much f falls from here to `f`, as a fraction of the predicted decrease; 1 where that is
        rounding."""
        return (run.here.f - f) / predicted if predicted > self._rounding(run) else 1.0

    def _take(self, run: Search, model: Model, step: torch.Tensor, predicted: float, ratio: float) -> None:
        """Go to the trial, the end of this step, at `ratio` times the known damping or length."""
        here, after = run.here, run.spare[0]
        torch.sub(after.x, here.x, out=self._change)
        self._settled = self._is_small(here, model, step, predicted)
        if self._settled:
            longer = self._minimum(model, here, LEAST)
            self._settled = longer is not None and self._is_small(here, model, longer, model.decrease(longer))
        run.here, run.spare, run.change = after, [here, *run.spare[1:]], norm(self._change)
        self._keep_lowest(run, here)
        if self._memory.get("on_trial"):
            self._judge(run, ratio)

    def _first_damping(self, model: Model, here: Point) -> float:
        """Return the damping of the first step, which must not be longer than the parameters: a model dominated by few
        of them holds only nearby."""
        damping: float = self._group["damping"]
        while damping < MOST and not self._is_short(model, here, damping):
            damping *= LONGER
        return damping

    def _is_short(self, model: Model, here: Point, damping: float) -> bool:
        """Tell whether the step at this damping is no longer than the parameters, if these are not 0."""
        bound = _size(model, here)
        step = self._minimum(model, here, damping) if bound else None
        return not bound or (step is not None and _length(model, step) <= bound)

    def _is_small(self, here: Point, model: Model, step: torch.Tensor, predicted: float) -> bool:
        """Tell whether a step promises a decrease, or a move, within the tolerance."""
        part: float = self._group["tolerance_change"]
        if not part:  # the decrease may be less than 0 by rounding
            return False
        return _length(model, step) < part * _size(model, here) or predicted < part**2 * abs(here.f)

    def _changed_little(self, run: Search, f: float) -> bool:
        rounding = torch.finfo(self._vector.dtype).eps ** 2 * run.start
        return self._settled or (self._group["tolerance_change"] > 0 and run.here.f <= rounding)

    def _minimum(self, model: Model, here: Point, damping: float) -> torch.Tensor | None:
        """Return the step to the minimum of the damped model, within the bounds; None if it has none."""
        if self._box is None:
            return model.minimum(damping)

        def after(step: torch.Tensor) -> torch.Tensor:
            return model.vector + model.times(step) + damping * model.scale * step

        def solve(held: torch.Tensor, moves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
            free = (~held).double()
            found = model.solve(-after(moves) * free, damping, free)
            return None if found is None else (moves + found, after(moves + found))

        return self._box.step(here.x, model.vector, solve)

    def _steps(self, model: Model, here: Point, dampings: Sequence[float]) -> list[tuple[torch.Tensor, float] | None]:
        """Return the steps at these dampings, each with the decrease of f that the model predicts, which is meant to be
        that of a step with its correction, too; None where the model has no step that can be trusted."""
        minima = [self._minimum(model, here, damping) for damping in dampings]
        steps = [None if step is None else (step, model.decrease(step)) for step in minima]
        there = [(i, *step) for i, step in enumerate(steps) if step is not None]
        if not there or not self._group["geodesic"]:
            return steps
        try:
            directions = torch.stack([step for _, step, _ in there])
            forces = self._squares.accelerations(directions.to(self._vector.dtype)).double().neg()
        except NonFiniteError:  # the residuals are not finite along a step: its trial decides
            return steps
        for (i, step, predicted), force in zip(there, forces, strict=True):
            steps[i] = self._bent(model, here, step, force, dampings[i]), predicted
        return steps

    def _bent(self, model: Model, here: Point, step: torch.Tensor, force: torch.Tensor, damping: float) -> torch.Tensor:
        """Return the step with its correction of second order, or as it is if that is large."""
        free = None if self._box is None else self._box.leaves(here.x, step).double()
        bend = model.solve(force if free is None else force * free, damping, free)
        if bend is None or _length(model, bend) > BENT * _length(model, step):
            return step
        return step + bend / 2

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
