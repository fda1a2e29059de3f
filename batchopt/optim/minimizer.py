"""The base class of these optimizers: moves from point to point, keeping the best, until a reason to stop."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from batchopt.optim.algebra import add, copy, largest, norm
from batchopt.optim.bounds import Box, read_bounds
from batchopt.optim.curvature import Curvature
from batchopt.optim.line import Closure, Function, Line, Point
from batchopt.optim.options import as_numbers, check_options
from batchopt.optim.vector import Vector
from batchopt_workers.wire.layout import reals


class Status(Enum):
    """The reason why a step of an optimizer ended; the value describes it."""

    GRADIENT = "converged: no element of the gradient is larger than tolerance_grad"
    CHANGE = "converged: f, or every parameter, changed by no more than tolerance_change"
    ITERATIONS = "max_iter iterations were made"
    EVALUATIONS = "max_eval evaluations were made"
    CALLBACK = "the callback said so"
    PAUSED = "it was asked to stop, and the next step goes on"
    INTERRUPTED = "KeyboardInterrupt, which was raised then"
    NO_DECREASE = (
        "no lower point was found, along the steepest descent either: only the rounding of f is left here, which comes "
        "soon in float32, or the gradient is not that of f, which opt.check() tells"
    )
    NOT_FINITE = "f or its gradient is not finite at the start"


@dataclass(frozen=True)
class Result:
    """The outcome of a step: the reason why it ended, `iterations` and `evaluations` of this step, f and the largest
    absolute element of its gradient at the final parameters, and the length (Euclidean) of the last change of the
    parameters.

    `number` says which of these evaluations, from 1 on, was at the final parameters. `not_finite` counts the trials
    where f or its gradient was infinite or NaN, each of which shortened a step. `forgotten` has an entry, with the
    reason, for each time that the known curvature was dropped. `kept`: the function had changed, and the known
    curvature fitted it well enough to be kept (`when_data_change="keep"`).

    `active` has, for each parameter with `bounds`, by name or else by its position, which of its elements are at a
    bound that the descent does not lead away from (bool, the parameter's shape); None without bounds. `gradient` is
    then that of the other elements.
    """

    status: Status
    iterations: int
    evaluations: int
    f: float
    gradient: float
    change: float
    number: int
    not_finite: int = 0
    forgotten: tuple[str, ...] = ()
    kept: bool = False
    active: dict[str | int, torch.Tensor] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        numbers = f"iterations={self.iterations}, evaluations={self.evaluations}, f={self.f:.6g}"
        more = {"not_finite": self.not_finite, "forgotten": self.forgotten, "kept": self.kept}
        given = "".join(f", {name}={value}" for name, value in more.items() if value)
        return f"Result({self.status.name}, {numbers}, gradient={self.gradient:.3g}, change={self.change:.3g}{given})"


@dataclass(frozen=True)
class Iteration:
    """An accepted point, for `callback`: its number (from 1 on, over all steps), evaluations so far (over all steps),
    f, the largest absolute element of its gradient, the step along the direction, the Euclidean length of the change,
    and the trials of the line search: pairs of a step and f there. `at` is the number of the evaluation there."""

    number: int
    evaluations: int
    f: float
    gradient: float
    step: float
    change: float
    trials: tuple[tuple[float, float], ...] = ()
    at: int = 0


Callback = Callable[[Iteration], Any]

# What the locals of a constructor have beside its options.
BESIDE_OPTIONS = {"self", "__class__", "params", "callback", "bounds"}

# Differences of f below this multiple of its rounding are meaningless.
NOISE = 4.0
# Stop after this many iterations that lower neither f nor the gradient: both are rounding only.
STALE = 20
# Functions whose value and gradient agree to these relative differences are considered the same.
SAME_F, SAME_GRADIENT = 1e-3, 1e-2
# Largest ratio, either way, between the curvature along the first step on new data and the one kept. Resampled points
# of one problem mostly stay within it; beyond, the matrix of SSBroyden does more harm than good.
FIT = 100.0


# The progress of a step that a pause keeps, and all that it keeps.
_OF_STEP = ("iterations", "start", "change", "noise", "stale", "least", "forgotten", "kept")
_PAUSED = ("paused", "paused_x", "paused_gradient")


class Watch:
    """Follows a step, and may pause it."""

    looks = False  # whether the parameters have to be at an accepted point when it is told of

    def accepted(self, point: Iteration) -> None:
        """Handle an accepted point."""

    def is_over(self, has_moved: bool) -> bool:
        """Tell whether the step is to be paused here; `has_moved`: after an accepted point of this call."""
        return False


NOBODY = Watch()


@dataclass
class Search:
    """The progress of one call of `step`."""

    function: Function
    here: Point
    spare: list[Point]
    start: float  # f where the step began
    watch: Watch
    iterations: int = 0
    change: float = 0.0  # the length of the last step
    steepest: float = math.nan  # the largest element of the gradient here
    line: Line | None = None  # of the search in progress
    forgotten: tuple[str, ...] = ()
    kept: bool = False  # the curvature was kept when the function had changed
    lowest: Point | None = None  # a copy of the best point, if that is not `here`
    least: tuple[float, float] = (math.inf, math.inf)  # f and gradient, each at its lowest
    stale: int = 0  # iterations since one of them fell
    noise: float = 0.0  # of f, as estimated from unsuccessful searches
    trials: tuple[tuple[float, float], ...] = ()  # of the last line search

    @property
    def best(self) -> float:
        """The lowest f so far."""
        return self.here.f if self.lowest is None else min(self.here.f, self.lowest.f)


class Minimizer(torch.optim.Optimizer):
    """Makes steps that lower f; a subclass chooses them. All parameters form one vector, of one group. `result`
    describes the last call of `step`."""

    _bounds: Box | None = None  # as they were given
    _box: Box | None = None  # those of the present step, in which what is frozen stays

    def __init__(self, given: Mapping[str, Any]) -> None:
        """`given`: the arguments of a subclass, by name: `params`, `callback` and options."""
        defaults = as_numbers({name: value for name, value in given.items() if name not in BESIDE_OPTIONS})
        check_options(defaults)
        super().__init__(given["params"], defaults)
        if len(self.param_groups) != 1:
            raise ValueError(
                f"{type(self).__name__} moves one vector, and has one group of parameters; got "
                f"{len(self.param_groups)}: pass all parameters in one list"
            )
        self.callback: Callback | None = given["callback"]
        self.result: Result | None = None
        self._make_room()
        if given.get("bounds") is not None:
            self._bounds = read_bounds(given["bounds"], self._group["params"], self._names, self._vector)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `ValueError` for a second group."""
        if hasattr(self, "_vector"):
            raise ValueError(
                f"{type(self).__name__} moves one vector, whose parameters are those that it was made with: make "
                "another one, of all parameters"
            )
        super().add_param_group(param_group)

    def _make_room(self) -> None:
        """Allocate vectors to work in and the vector of parameters, for this object alone."""
        self._vector = Vector(self._group["params"])
        self._spare = [self._new_point(), self._new_point()]
        self._change = self._vector.empty()

    def __getstate__(self) -> dict[str, Any]:
        own = {"callback": self.callback, "result": self.result, "_bounds": self._bounds}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or an unpickled object."""
        super().__setstate__(state)
        self._make_room()

    def _new_point(self) -> Point:
        return Point(self._vector.empty(), self._vector.empty())

    @property
    def _group(self) -> dict[str, Any]:
        return self.param_groups[0]

    @property
    def _names(self) -> list[str]:
        """Names of the parameters; empty if they came without."""
        names: list[str] = self._group.get("param_names", [])
        return names

    @property
    def _memory(self) -> dict[str, Any]:
        """State kept between calls of `step`."""
        memory: dict[str, Any] = self.state[self._group["params"][0]]
        return memory

    @abstractmethod
    def _advance(self, run: Search) -> float | None:
        """Move from `run.here` to a better point; return the step's length, as the method defines it, or None."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop what is known of the function, except its gradient here."""

    @property
    def _knows(self) -> bool:
        """Tell whether anything is known of the function that `_forget` would drop."""
        return self._knowledge in self._memory

    def _drop(self, run: Search, why: str) -> bool:
        """Forget, and add the reason to the result if anything was known; return whether it was."""
        self._memory.pop("on_trial", None)
        known = self._knows
        self._forget()
        run.forgotten += (why,) * known
        return known

    def _judge(self, run: Search, ratio: float) -> None:
        """Decide, after the first step on a changed function, whether to keep what was known: along that step the
        function has `ratio` times the known curvature. Nothing is known any more after a step that was undone."""
        if not self._knows:
            self._memory.pop("on_trial")
        elif 1 / FIT <= ratio <= FIT:
            self._memory.pop("on_trial")
            run.kept = True
        else:
            self._drop(
                run, f"the function changed between two steps, and has {ratio:.2g} times the curvature that was known"
            )

    def _stays(self, run: Search) -> bool:
        """Tell whether too many iterations have found nothing better."""
        return run.stale >= STALE

    def _function(self, closure: Closure) -> Function:
        return Function(self._vector, closure)

    def _steepest(self, here: Point) -> torch.Tensor:
        """Return the gradient: the direction of steepest ascent, zero at a minimum."""
        return here.gradient if self._box is None else self._box.projected(here.x, here.gradient)

    def _enter(self) -> None:
        """Move the parameters to the nearest point within their bounds."""
        if self._bounds is not None:
            x = self._vector.empty()
            self._vector.read(x)
            self._box = self._bounds.holding(x, self._vector)
            inside = self._box.clamp(x, self._change)
            if not torch.equal(x, inside):
                self._vector.write(inside)

    def _active(self, here: Point) -> dict[str | int, torch.Tensor] | None:
        """Return, for each parameter that has bounds, which of its elements are at one."""
        if self._bounds is None:
            return None
        found, bounded = self._bounds.active(here.x, here.gradient), self._bounds.finite
        parameters = self._group["params"]
        sizes = [reals(parameter.detach()).numel() for parameter in parameters]
        names: list[Any] = self._names or list(range(len(parameters)))
        parts = zip(names, parameters, torch.split(found, sizes), torch.split(bounded, sizes), strict=True)
        return {name: part.view(p.shape) for name, p, part, some in parts if bool(some.any())}

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure, *, watch: Watch = NOBODY
    ) -> torch.Tensor | float:
        """Improve the current parameters until there is a reason to stop, which is in `result`.

        `closure()` evaluates f at the parameters, writes df/dX to their `.grad`, and returns f. Returns what the
        closure returned first. `watch` is told of each accepted point, and may pause the step there: if f is the same
        then, the next call makes the rest, with the same iterates, and `result` is of both.
        Exceptions of the closure are passed on, with the parameters at the best point so far; but away from the start a
        `NonFiniteError`, like an infinite or NaN f, only shortens the step. After a `KeyboardInterrupt`, too, `result`
        describes the step; one that came between two evaluations, and may have left an update half done, drops the
        curvature.
        """
        if not callable(closure):
            raise TypeError(f"`closure` must be a function that evaluates f and df/dX and returns f; got {closure!r}")
        self.result = None
        function = self._function(closure)
        self._enter()
        begin = self._spare[0]
        first = function.here(begin)
        run = Search(function, begin, [self._spare[1], self._last_point()], begin.f, watch)
        self._begin(run)
        try:
            run.steepest = largest(self._steepest(begin))
            status = Status.NOT_FINITE if not begin.finite else self._why_stop(run) or self._descend(run)
        except KeyboardInterrupt:
            if not function.is_evaluating:
                self._drop(run, f"iteration {run.iterations + 1} was interrupted")
            self._finish(run, Status.INTERRUPTED)
            raise
        except BaseException:
            self._settle(run)
            raise
        if status is Status.PAUSED:
            self._pause(run)
        self._finish(run, status)
        return first

    def _finish(self, run: Search, status: Status) -> None:
        self._settle(run)
        function, gradient = run.function, largest(self._steepest(run.here))
        self.result = Result(
            status,
            run.iterations,
            function.evaluations,
            run.here.f,
            gradient,
            run.change,
            run.here.number,
            function.not_finite,
            run.forgotten,
            run.kept,
            self._active(run.here),
        )

    def _last_point(self) -> Point:
        memory = self._memory
        return Point(memory["x"], memory["gradient"], memory["f"]) if "x" in memory else self._new_point()

    def _recognise(self, run: Search) -> bool:
        """If the function has changed since the last step, forget what was known, or let the first step decide. Return
        whether the step begins where the last one ended."""
        here, last = run.here, run.spare[-1]
        f = last.f
        if math.isnan(f) or not torch.equal(here.x, last.x):
            return False
        apart = norm(add(here.gradient, last.gradient, -1.0, out=self._change))
        scale = max(norm(here.gradient), norm(last.gradient))
        if apart > SAME_GRADIENT * scale or abs(here.f - f) > SAME_F * max(abs(here.f), abs(f)):
            if self._knows and self._group.get("when_data_change") == "keep":
                self._memory["on_trial"] = True
            else:
                self._drop(run, "the function changed between two steps")
            return False
        return True

    def _begin(self, run: Search) -> None:
        """Go on with a step that was paused, or begin another one."""
        memory = self._memory
        paused = memory.pop("paused", None)
        if not self._recognise(run) or paused is None:
            for name in _PAUSED:
                memory.pop(name, None)
            return
        for name in _OF_STEP:
            setattr(run, name, paused[name])
        run.function.evaluations, run.function.not_finite = paused["evaluations"], paused["not_finite"]
        run.here.number = run.function.evaluations  # it was evaluated again, which is not counted
        if "paused_x" in memory:  # it had gone on from the lowest point
            lowest = run.here
            run.lowest = Point(lowest.x.clone(), lowest.gradient.clone(), lowest.f, lowest.number)
            copy(memory.pop("paused_x"), run.here.x)
            copy(memory.pop("paused_gradient"), run.here.gradient)
            run.here.f = paused["f"]
        memory["n_iter"] -= run.iterations
        memory["func_evals"] -= run.function.evaluations

    def _pause(self, run: Search) -> None:
        """Remember what the next step needs to go on as this one would have, bit for bit; a subclass adds its own."""
        memory, function, here = self._memory, run.function, run.here
        memory["paused"] = {name: getattr(run, name) for name in _OF_STEP}
        memory["paused"] |= {"evaluations": function.evaluations, "not_finite": function.not_finite, "f": here.f}
        if run.lowest is not None and run.lowest.f < here.f:  # where the parameters will be
            memory["paused_x"], memory["paused_gradient"] = here.x.clone(), here.gradient.clone()

    def _descend(self, run: Search) -> Status:
        """Move from point to point until there is a reason to stop."""
        first = run.iterations
        while not run.watch.is_over(run.iterations > first):
            before = run.here
            step = self._advance(run)
            if step is not None:
                status = self._accept(run, before.f, step) or self._why_stop(run)
                if status is None and self._stays(run):
                    status = Status.NO_DECREASE
            elif run.function.evaluations >= limit(self._group["max_eval"]):
                status = Status.EVALUATIONS
            elif self._drop(run, f"iteration {run.iterations + 1} found no lower point"):
                status = None
            else:
                status = Status.NO_DECREASE
            if status is not None:
                return status
        return Status.PAUSED

    def _why_stop(self, run: Search) -> Status | None:
        group = self._group
        if run.steepest <= group["tolerance_grad"]:
            return Status.GRADIENT
        if run.iterations >= limit(group["max_iter"]):
            return Status.ITERATIONS
        if run.function.evaluations >= limit(group["max_eval"]):
            return Status.EVALUATIONS
        return None

    def _rounding(self, run: Search) -> float:
        return NOISE * torch.finfo(self._vector.dtype).eps * abs(run.best)

    def _keep_lowest(self, run: Search, before: Point) -> None:
        if run.here.f <= min(before.f, math.inf if run.lowest is None else run.lowest.f):
            run.lowest = None
        elif run.lowest is None:
            run.lowest = Point(before.x.clone(), before.gradient.clone(), before.f, before.number)
        elif before.f < run.lowest.f:
            copy(before.x, run.lowest.x)
            copy(before.gradient, run.lowest.gradient)
            run.lowest.f, run.lowest.number = before.f, before.number

    def _accept(self, run: Search, f: float, step: float) -> Status | None:
        """Finish an iteration that began with `f`."""
        run.iterations += 1
        here, memory = run.here, self._memory
        run.steepest = largest(self._steepest(here))
        run.stale = 0 if here.f < run.least[0] or run.steepest < run.least[1] else run.stale + 1
        run.least = min(here.f, run.least[0]), min(run.steepest, run.least[1])
        before = memory.get("func_evals", 0)
        numbers = memory.get("n_iter", 0) + run.iterations, before + run.function.evaluations
        point = Iteration(*numbers, here.f, run.steepest, step, run.change, run.trials, before + here.number)
        if self.callback is not None or run.watch.looks:
            self._vector.write(here.x)  # not necessarily the last point evaluated
        run.watch.accepted(point)
        if self.callback is not None and self.callback(point):
            return Status.CALLBACK
        return Status.CHANGE if self._changed_little(run, f) else None

    def _changed_little(self, run: Search, f: float) -> bool:
        """Tell whether the last iteration, which began with `f`, leaves no improvement to expect."""
        tolerance = self._group["tolerance_change"]
        return abs(run.here.f - f) < tolerance or self._moved_at_most(tolerance, run.change)

    def _moved_at_most(self, tolerance: float, length: float) -> bool:
        """Tell whether no element of the last step, which has this length, is larger than `tolerance`."""
        may_be = length <= 2 * tolerance * math.sqrt(self._vector.size)  # twice, for rounding
        return may_be and largest(self._change) <= tolerance

    def _settle(self, run: Search) -> None:
        """Set the parameters to the best point, also in the middle of a search."""
        if run.line is not None:
            run.here, run.spare = run.line.take(None)
        if run.lowest is not None and run.lowest.f < run.here.f:
            run.here = run.lowest
        self._vector.write(run.here.x)
        memory = self._memory
        memory["x"], memory["gradient"], memory["f"] = run.here.x, run.here.gradient, run.here.f
        memory["n_iter"] = memory.get("n_iter", 0) + run.iterations
        memory["func_evals"] = memory.get("func_evals", 0) + run.function.evaluations
        self._spare = run.spare

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and numbers, no code, in the form of any torch optimizer."""
        state = super().state_dict()
        state["state"] = {
            index: {key: value.state_dict() if isinstance(value, Curvature) else value for key, value in memory.items()}
            for index, memory in state["state"].items()
        }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises `ValueError` (or `TypeError`), and changes nothing, for another
        number of parameters and for options that cannot work. From a state of `torch.optim.LBFGS` the options and
        counts are taken; the curvature starts empty."""
        memory = state_dict["state"].get(0, {})
        for group in state_dict["param_groups"]:
            check_options({key: value for key, value in group.items() if key in self.defaults})
        size = len(memory.get("x", self._change))
        if size != len(self._change):
            raise ValueError(f"the state is of {size} parameters; here are {len(self._change)}")
        before = dict(self._group)
        super().load_state_dict({**state_dict, "state": {}})
        for key, value in before.items():
            self._group.setdefault(key, value)
        self.state.clear()
        self._memory.update({key: self._unpacked(key, memory[key]) for key in self._kept if key in memory})

    _knowledge = ""  # the key of what is known of the function
    # Keys that are remembered from step to step; subclasses add to them.
    _kept: tuple[str, ...] = ("x", "gradient", "f", "n_iter", "func_evals", "on_trial", *_PAUSED)

    def _unpacked(self, key: str, value: Any) -> Any:
        return value.clone().to(self._change) if isinstance(value, torch.Tensor) else value

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self._group.items() if key in self.defaults)
        return f"{type(self).__name__}({options})"


def limit(number: int | None) -> float:
    """Return the number, or infinity for None."""
    return math.inf if number is None else number
