"""L-BFGS, and OWL-QN for an L1 penalty."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from batchopt.optim.algebra import absolute_sum, add, copy, dot, scaled
from batchopt.optim.bounds import Bounds, Box
from batchopt.optim.curvature import Curvature
from batchopt.optim.descent import Descent
from batchopt.optim.line import Closure, Function, Line, Point
from batchopt.optim.minimizer import Callback, Search
from batchopt.optim.vector import Vector

# With bounds, a step to the minimum of the model is cut off at them if that leaves this fraction of the descent: then
# one system is solved, not one for each change of the active set. 0.1 needs up to three per cent more evaluations.
ENOUGH = 0.5


class PenalisedFunction(Function):
    """f plus `l1` times the sum of the parameters' absolute values; the gradient is that of f alone."""

    def __init__(self, vector: Vector, closure: Closure, l1: float) -> None:
        super().__init__(vector, closure)
        self._l1 = l1

    def _evaluate(self, point: Point) -> torch.Tensor | float:
        value = super()._evaluate(point)
        point.f += self._l1 * absolute_sum(point.x)
        return value


def pseudo_gradient(x: torch.Tensor, gradient: torch.Tensor, l1: float, out: torch.Tensor) -> torch.Tensor:
    """Return the gradient of f plus penalty; for a parameter of 0, the one-sided slope that leads down, or 0."""
    torch.add(gradient, x.sign(), alpha=l1, out=out)
    at_zero = (gradient + l1).clamp_max(0.0) + (gradient - l1).clamp_min(0.0)
    return torch.where(x == 0, at_zero, out, out=out)


def project(direction: torch.Tensor, pseudo: torch.Tensor) -> None:
    """Set to 0 each element of `direction` that does not lead down."""
    direction.mul_(direction * pseudo < 0)


class OrthantLine(Line):
    """Points of a line, projected to the orthant of the start or, where that is 0, of the steepest descent."""

    def __init__(
        self, function: Function, start: Point, direction: torch.Tensor, spare: Sequence[Point], pseudo: torch.Tensor
    ) -> None:
        super().__init__(function, start, direction, spare)
        self._pseudo = pseudo
        self._orthant = torch.where(start.x == 0, -pseudo.sign(), start.x.sign())

    def place(self, step: float, x: torch.Tensor) -> None:
        add(self.start.x, self.direction, step, out=x)
        x.mul_(x * self._orthant > 0)

    def slope(self, point: Point) -> float:
        """At the start, return the slope of f plus penalty."""
        return dot(self._pseudo, self.direction) if point is self.start else super().slope(point)


class BoxLine(Line):
    """Points of a line within the bounds."""

    def __init__(
        self, function: Function, start: Point, direction: torch.Tensor, spare: Sequence[Point], box: Box
    ) -> None:
        super().__init__(function, start, direction, spare)
        self._box = box

    @property
    def most(self) -> float:
        return self._box.farthest(self.start.x, self.direction)

    def place(self, step: float, x: torch.Tensor) -> None:
        self._box.place(self.start.x, self.direction * step, x)


class LBFGS(Descent):
    """Limited-memory BFGS, with the arguments of `torch.optim.LBFGS`.

    Args:
        params: parameters of one dtype on one device.
        lr: the first step tried by a line search, 1 by default. For the very first one, and for any along the steepest
            descent, it multiplies the step that changes the largest parameter by about half, in any units.
            Without a line search it is the step itself; there the very first one moves the parameters by at most `lr`
            (Euclidean).
        max_iter: maximum number of iterations per call of `step`; None: no limit. Default 20.
        max_eval: maximum number of evaluations per call of `step`, which may end in the middle of a line search.
            Default None: no limit.
        tolerance_grad: ends a step once no element of the gradient is larger (absolute). Default 1e-7; 0 is only met by
            a gradient of 0.
        tolerance_change: ends a step once f changes by less than this, or no parameter by more (absolute). Default
            1e-9; 0 never ends it.
        history_size: number of pairs (a step, and the change of the gradient) kept, 100 by default; each takes the
            memory of two parameter vectors.
        line_search_fn: `"strong_wolfe"`, the default; `"armijo"`: backtracking from `lr` until f has decreased enough;
            None: no search, the step is `lr`.
        l1: adds `l1` times the sum of the parameters' absolute values to f, which the closure does not include;
            parameters become exactly 0. The line search is then the projected one of OWL-QN. Default 0.
        bounds: a lower and an upper bound of parameters, as pairs `(lower, upper)` of numbers, tensors of the
            parameter's shape, or None: a dictionary by parameter, or by name if `params` are
            `module.named_parameters()`; or a list with a pair or None for each parameter. They are rounded to the
            parameter's dtype, and no evaluation is outside of them: a start that is moves to the nearest point within.
            They are no part of `state_dict`. Default None.
        when_data_change: what happens to the curvature if f or its gradient has changed at the parameters where the
            last step ended. `"forget"`, the default, drops it. `"keep"` is for resampled points of the same problem:
            the first step on them decides. If f has between a hundredth and 100 times the known curvature along it,
            the curvature is kept and `result.kept` is True; else it is dropped, and `result.forgotten` has the ratio.
        callback: `callback(iteration)` after each accepted point, with an `Iteration`; ends the step if it returns
            True.

    `result` describes the last call of `step`. A further call continues where the last one ended, with the same
    curvature, unless f is another function there (`when_data_change`). The final parameters of a call are always the
    best ones that it evaluated. An unsuccessful search is repeated once along the steepest descent, with an empty
    history.

    Liu and Nocedal, "On the limited memory BFGS method for large scale optimization", Mathematical Programming 45,
    1989; the direction in compact form, see `Curvature`; the line search of More and Thuente, 1994, with the
    approximate Wolfe conditions of Hager and Zhang, 2005. `l1`: Andrew and Gao, "Scalable training of L1-regularized
    log-linear models", ICML 2007. `bounds`: the step to the minimum of the quadratic model within the bounds, as in
    Schmidt, van den Berg, Friedlander and Murphy, "Optimizing costly functions with simple constraints: a
    limited-memory projected quasi-Newton algorithm", AISTATS 2009, found by the active sets of `Box.step`, or the
    first solution there that, cut off at the bounds, keeps half of its descent; with all bounds infinite each bit is as
    without. `tolerance_grad` and `result.gradient` are then of the projected gradient: 0 for an element at a bound that
    it leads out of. Raises `ValueError` or `TypeError` for options that cannot work, for `l1` together with `bounds`,
    and for parameters that do not form one vector.

    >>> x = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
    >>> optimizer = batchopt.LBFGS([x], max_iter=100)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
    ...     loss.backward()
    ...     return loss
    >>> start = optimizer.step(closure)
    >>> optimizer.result.f < 1e-12, [round(value, 5) for value in x.tolist()]
    (True, [1.0, 1.0])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        max_iter: int | None = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: Literal["strong_wolfe", "armijo"] | None = "strong_wolfe",
        *,
        l1: float = 0.0,
        bounds: Bounds = None,
        when_data_change: Literal["forget", "keep"] = "forget",
        callback: Callback | None = None,
    ) -> None:
        super().__init__(locals())
        self._check_l1()

    def _check_l1(self) -> None:
        if self._bounds is not None and self._group["l1"]:
            raise ValueError(
                f"`l1` {self._group['l1']} and `bounds` are not minimised together: for parameters that are bounded by "
                "0 from below, add l1 * p.sum() to the loss, and leave `l1` out; else leave one of them out"
            )

    def _make_room(self) -> None:
        super()._make_room()
        self._pseudo: torch.Tensor | None = None

    # other classes whose states can be loaded in part
    reads_states_of = ("torch.LBFGS",)
    _kept = (*Descent._kept, "curvature")

    @property
    def _curvature(self) -> Curvature:
        memory, most = self._memory, self._group["history_size"]
        if "curvature" not in memory or memory["curvature"].most != most:
            old = memory.get("curvature")
            memory["curvature"] = self._with_pairs(None if old is None else old.state_dict())
        curvature: Curvature = memory["curvature"]
        return curvature

    def _with_pairs(self, state: Mapping[str, torch.Tensor] | None) -> Curvature:
        vector = self._vector
        curvature = Curvature(vector.size, self._group["history_size"], vector.dtype, vector.device)
        if state is not None:
            curvature.load_state_dict(state)
        return curvature

    def _unpacked(self, key: str, value: Any) -> Any:
        return self._with_pairs(value) if key == "curvature" else super()._unpacked(key, value)

    def _aim(self, here: Point, out: torch.Tensor) -> None:
        steepest = self._steepest(here)
        if self._box is not None:
            self._aim_within(self._box, here, scaled(steepest, -1.0, out))
            return
        self._curvature.times(steepest, out)
        if self._group["l1"]:
            project(out, steepest)

    def _aim_within(self, box: Box, here: Point, out: torch.Tensor) -> None:
        curvature, gradient = self._curvature, here.gradient
        first = 1.0 if len(curvature) else self._steepest_first(here)
        scale = first if 0 < first < math.inf else 1.0
        step = box.step(here.x, gradient, lambda held, moves: curvature.step(gradient, held, moves, scale), ENOUGH)
        assert step is not None  # H has an inverse
        copy(step, out)

    def _learn(self, before: Point, after: Point, change: torch.Tensor) -> None:
        self._curvature.add(change, before.gradient, after.gradient)

    def _pause(self, run: Search) -> None:
        super()._pause(run)
        # The products of the last pair, as the next direction would take them.
        self._curvature.times(self._steepest(run.here), self._direction)

    def _forget(self) -> None:
        self._curvature.clear()

    @property
    def _knows(self) -> bool:
        return len(self._curvature) > 0

    def _first(self, slope: float) -> float | None:
        return 1.0 if self._box is not None or len(self._curvature) else None

    @property
    def _line_search(self) -> str | None:
        kind = super()._line_search
        return "armijo" if kind is not None and self._group["l1"] else kind

    def _steepest(self, here: Point) -> torch.Tensor:
        if not self._group["l1"]:
            return super()._steepest(here)
        if self._pseudo is None:
            self._pseudo = self._vector.empty()
        found = pseudo_gradient(here.x, here.gradient, self._group["l1"], out=self._pseudo)
        self._vector.hold_frozen(found)
        return found

    def _function(self, closure: Closure) -> Function:
        self._check_l1()
        if not self._group["l1"]:
            return super()._function(closure)
        if any(parameter.is_complex() for parameter in self._group["params"]):
            raise ValueError(
                "`l1` would penalise real and imaginary parts of complex parameters, each alone: add p.abs().sum() to "
                "the loss; or, if the parts are meant, hold torch.view_as_real(p), and call torch.view_as_complex in "
                "forward"
            )
        return PenalisedFunction(self._vector, closure, self._group["l1"])

    def _line(self, run: Search) -> Line:
        if self._box is not None:
            return BoxLine(run.function, run.here, self._direction, run.spare, self._box)
        if not self._group["l1"]:
            return super()._line(run)
        return OrthantLine(run.function, run.here, self._direction, run.spare, self._steepest(run.here))
