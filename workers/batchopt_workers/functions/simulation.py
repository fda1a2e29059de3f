"""Functions of a module whose results have no graph, such as simulators, and their gradients by finite differences.

A `Rule` says where the functions are called, and the rest how: with which parameters, state and draws.
"""

from __future__ import annotations

import functools
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from numbers import Real
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch.func import functional_call

from batchopt_workers.evaluate.draws import set_torch_states, torch_states
from batchopt_workers.functions.bound import Bound
from batchopt_workers.life.torch_settings import autocast_in_force
from batchopt_workers.watch.record import FoundTensor, Record, Undo, compact
from batchopt_workers.wire.layout import reals
from batchopt_workers.wire.structures import map_tensors, same_values, tensors_in

_MARK = "__differences__"
# By a parameter's identity: the elements by which derivatives are taken; of others, by all.
_columns: ContextVar[Mapping[int, range]] = ContextVar("columns")
F = TypeVar("F", bound=Callable[..., Any])


@overload
def finite_differences(function: F) -> F: ...


@overload
def finite_differences(
    *, method: Method = ..., step: float | None = ..., bounds: Mapping[str, Any] | None = ...
) -> Callable[[F], F]: ...


def finite_differences(
    function: Any = None,
    *,
    method: Method = "2-point",
    step: float | None = None,
    bounds: Mapping[str, Any] | None = None,
) -> Any:
    """Make a function of a module differentiable by the module's parameters, by finite differences: a decorator, with
    or without arguments.

    Args:
        function: `function(module, *inputs)`, which returns real tensors: the `forward` of a module, a `residual`, a
            `loss_fn`. It may use NumPy, solvers or other programs; parameters reach it without a graph.
        method: `"2-point"`, the default: one more call for each parameter, with an error of the order of the step.
            `"3-point"`: two calls, and the square of that. `"cs"`: one call with a complex parameter, exact but for
            rounding, where all that is done with it is analytic: no `abs`, comparison, `.real` or cast to real numbers.
        step: of a parameter, relative to its size. Default: the square root (`"3-point"`: the cube root) of the
            rounding of its dtype, times its size or 1, whichever is larger; a parameter that begins below that is
            warned of.
        bounds: `(low, high)` by the parameter's name, each a number, a tensor or None: where the function is never
            evaluated outside; the other side is taken, and `"3-point"` has both points there.

    These are the rules of SciPy's `approx_derivative` (Nocedal and Wright, "Numerical optimization", 2006, chapter 8;
    Squire and Trapp, "Using complex variables to estimate derivatives of real functions", SIAM Review 40, 1998).

    The further calls are made when the gradient is taken. Each begins with the module, the inputs and the random draws
    as they were before the first call, and what it changes in them is undone; what the function reads elsewhere, in a
    file or in another module, has to stay as it is until then. The first gradient in a process takes one more, with the
    same parameters: raises `ValueError` if the function returns other values there. Second derivatives do not exist:
    products of the Hessian raise `ValueError`. Raises `TypeError` for complex results, for parameters that are complex
    or not dense, and for inputs and attributes that require a gradient.

    >>> @batchopt.finite_differences
    ... def simulate(line, x):
    ...     return torch.from_numpy(line.weight.numpy() * x.numpy())
    >>> line = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> simulate(line, torch.tensor([2.0, 3.0])).sum().backward()
    >>> round(line.weight.grad.item(), 6)
    5.0
    """
    if function is None:
        return functools.partial(finite_differences, method=method, step=step, bounds=bounds)
    if not callable(function) or isinstance(function, torch.nn.Module):
        raise TypeError(
            f"finite_differences decorates a function of a module, such as its `forward`; got {type(function).__name__}"
        )
    rule = Rule(method, step, bounds)

    @functools.wraps(function)
    def with_graph(module: torch.nn.Module, *inputs: Any) -> Any:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not (torch.is_grad_enabled() and trained):
            return function(module, *inputs)
        return _Call(rule, Bound(module, function), inputs, trained).result()

    setattr(with_graph, _MARK, rule)
    return with_graph


def is_by_differences(module: torch.nn.Module, function: Any = None) -> bool:
    """Tell whether the function, or the forward of a part of the module, was decorated."""
    return hasattr(function, _MARK) or any(hasattr(type(part).forward, _MARK) for part in module.modules())


@contextmanager
def columns_alone(parameters: Sequence[torch.Tensor], columns: range) -> Iterator[None]:
    """Take differences in the body for these columns of the Jacobian alone, of those by `parameters`; others are 0."""
    wanted, start = {}, 0
    for parameter in parameters:
        wanted[id(parameter)] = range(columns.start - start, columns.stop - start)
        start += reals(parameter.detach()).numel()
    token = _columns.set(wanted)
    try:
        yield
    finally:
        _columns.reset(token)


class _Call:
    """A call of a function, which begins with the state and the parameters of now, and, once they are wanted, its
    derivatives."""

    def __init__(
        self, rule: Rule, function: Bound, inputs: tuple[Any, ...], trained: Mapping[str, torch.Tensor]
    ) -> None:
        self._rule, self._function, self._inputs, self._trained = rule, function, inputs, trained
        names = dict(function.module.named_parameters(remove_duplicate=False))
        if unknown := rule.bounds.keys() - names.keys():
            raise ValueError(f"`bounds` of finite_differences has no parameter's name in {sorted(unknown)}")
        for name, parameter in trained.items():
            rule.check(name, parameter)
        tensors, self._start = self._state()
        for path, tensor, *_ in tensors:
            if tensor.requires_grad and not any(tensor is parameter for parameter in trained.values()):
                raise TypeError(
                    f"finite_differences differentiates by the module's parameters, and {path} requires a gradient, "
                    "which would be lost: call .detach() on it, or make it a parameter of the module"
                )
        self._bounds = {id(names[name]): pair for name, pair in rule.bounds.items()}
        self._at = {name: parameter.detach().clone() for name, parameter in trained.items()}
        self._autocast, self._wanted = autocast_in_force(), _columns.get({})

    def _state(self) -> tuple[list[FoundTensor], list[Undo]]:
        """Return the tensors of the module and the inputs, and what makes the present state the state again: what these
        hold, elements, and the random draws to come."""
        contents = Record({"module": self._function.module, "inputs": self._inputs}, functions=False)
        undo: list[Undo] = [contents.put_back]
        for _, tensor, *_ in contents.tensors:
            if tensor.requires_grad:  # the function is given copies of its elements
                undo.append(partial(setattr, tensor, "data", tensor.data))
            elif tensor.layout is torch.strided and not tensor.is_meta:
                undo.append(partial(_write, compact(tensor), compact(tensor).detach().clone()))
        undo += [partial(set_torch_states, torch_states()), partial(random.setstate, random.getstate())]
        return contents.tensors, [*undo, partial(np.random.set_state, np.random.get_state(legacy=False))]

    def _make(self, parameters: Mapping[str, torch.Tensor]) -> Any:
        """Return copies of what the function returns, which may be memory that its next call writes, with these as
        parameters."""
        with torch.no_grad(), ExitStack() as modes:
            for device, dtype, _ in self._autocast:  # a cast that torch kept would have no graph elsewhere
                modes.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            if not parameters:
                return map_tensors(torch.clone, self._function.forward(*self._inputs))
            at = {f"module.{name}": tensor for name, tensor in parameters.items()}
            return map_tensors(torch.clone, functional_call(self._function, at, self._inputs))

    def result(self) -> Any:
        """Return what the function returns, with a graph to the parameters."""
        found = self._make({})
        if any(tensor.is_complex() for tensor in tensors_in(found)):
            raise TypeError("finite_differences is for functions that return real numbers: use torch.view_as_real")
        values = [tensor for tensor in tensors_in(found) if tensor.is_floating_point()]
        if not values:
            return found
        self._shapes, self._values = [value.shape for value in values], _flat(values)
        made = iter(_Values.apply(self, values, *self._trained.values()))  # type: ignore[no-untyped-call]
        return map_tensors(lambda tensor: next(made) if tensor.is_floating_point() else tensor, found)

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """The derivatives of all values by each element of the parameters: shape `(n, values)`."""
        _, now = self._state()
        try:
            if self._rule.checked != os.getpid() and not same_values(self._moved(), self._values):
                raise ValueError(
                    "finite_differences was given a function that returned other values with the same parameters: it "
                    "has to be deterministic. Its module, inputs and draws of torch, of NumPy's global generator and "
                    "of `random` are those of the first call; seed other generators, and read nothing that changes"
                )
            self._rule.checked = os.getpid()
            return torch.stack([row for name in self._trained for row in self._by(name)])
        finally:
            for undo in now:
                undo()

    def _by(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the derivative of all values by each element of a parameter."""
        x, which = self._at[name], id(self._trained[name])
        limits = zip(self._bounds.get(which, (None, None)), (-torch.inf, torch.inf), strict=True)
        ends = [torch.as_tensor(far if end is None else end, dtype=x.dtype).expand(x.shape) for end, far in limits]
        lists = [tensor.reshape(-1).tolist() for tensor in (x, *ends)]
        columns = self._wanted.get(which, range(x.numel()))
        for i, (place, *element) in enumerate(zip(np.ndindex(*x.shape), *lists, strict=True)):
            row = torch.zeros_like(self._values)
            for step, factor in self._rule.moves(x.dtype, *element) if i in columns else ():
                before = 0.0 if isinstance(step, complex) else self._values
                row.add_(self._moved(name, place, step) - before, alpha=factor)
            yield row

    def _moved(self, name: str = "", place: tuple[int, ...] = (), step: complex = 0.0) -> torch.Tensor:
        """Return all values of a call from the start with an element of a parameter larger by `step`; the imaginary
        parts if that is complex."""
        for undo in self._start:
            undo()
        is_complex = isinstance(step, complex)
        at = {key: own.to(own.dtype.to_complex()) if is_complex else own.clone() for key, own in self._at.items()}
        if name:
            at[name][place] += step
        if not is_complex:  # else the parameter itself keeps its dtype, on which its graph depends
            for key, parameter in self._trained.items():
                parameter.data = at[key]
        found = [t for t in tensors_in(self._make(at if is_complex else {})) if t.is_floating_point() or t.is_complex()]
        if [tensor.shape for tensor in found] != self._shapes:
            raise ValueError(
                f"the results have shapes {[tuple(t.shape) for t in found]} with another {name!r}, and "
                f"{[tuple(shape) for shape in self._shapes]} before: finite_differences needs the same"
            )
        if is_complex and not all(tensor.is_complex() for tensor in found):
            raise TypeError(
                'method="cs" calls the function with complex parameters, and it returned real numbers: a cast, .real, '
                'float() or abs() is on their way; use method="3-point"'
            )
        return _flat([tensor.imag if is_complex else tensor for tensor in found])


class _Values(torch.autograd.Function):
    """The values of a call as functions of the parameters. Their gradient has no derivative by these: it is NaN."""

    @staticmethod
    def forward(ctx: Any, call: _Call, values: Sequence[torch.Tensor], *trained: torch.Tensor) -> Any:
        ctx.call = call
        ctx.save_for_backward(*trained)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> Any:
        rows, trained = ctx.call.rows, ctx.saved_tensors
        products = rows.mv(_flat(above).to(rows)).split([p.numel() for p in trained])
        yes = torch.ones((), dtype=torch.bool, device=rows.device)
        pairs = [(product.view(p.shape).to(p), p) for product, p in zip(products, trained, strict=True)]
        return None, None, *[torch.where(yes, product, p * torch.nan) for product, p in pairs]


def _write(own: torch.Tensor, before: torch.Tensor) -> None:
    if not same_values(own, before):  # it may be shared, or saved for a backward
        own.copy_(before)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements as one vector, of single precision at least."""
    return torch.cat([t.to(torch.promote_types(t.dtype, torch.float32)).reshape(-1) for t in tensors])


Method = Literal["2-point", "3-point", "cs"]
# The power of the dtype's rounding by which each method moves a parameter, as a fraction of it.
_POWERS = {"2-point": 1 / 2, "3-point": 1 / 3, "cs": 1 / 2}


class Rule:
    """The way in which derivatives are taken: arguments as of `finite_differences`. `checked`: the process in which the
    function, called again, returned the same."""

    def __init__(self, method: str, step: float | None, bounds: Mapping[str, Any] | None) -> None:
        if method not in _POWERS:
            raise ValueError(f"`method` must be one of {', '.join(map(repr, _POWERS))}; got {method!r}")
        if step is not None and not (isinstance(step, Real) and 0 < float(step) < 1):
            raise ValueError(f"`step` must be a number between 0 and 1, the fraction of a parameter; got {step!r}")
        self.method, self.step, self.bounds, self.checked = method, step, dict(bounds or {}), 0
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in self.bounds.values()):
            raise TypeError(f"`bounds` of finite_differences must be pairs (low, high) by name; got {bounds!r}")

    def check(self, name: str, x: torch.Tensor) -> None:
        """Raise `TypeError` or `ValueError` for a parameter by which there is no such derivative."""
        if x.is_complex() or x.layout is not torch.strided or x.is_meta:
            raise TypeError(
                f"finite_differences moves real numbers in dense memory, and {name!r} is {x.dtype}, {x.layout}, on "
                f"{x.device}: make it two real ones, .to_dense(), or freeze it by requires_grad_(False)"
            )
        least = torch.finfo(x.dtype).eps
        if self.method != "cs" and self.step is not None and self.step < least:
            raise ValueError(
                f"`step` is {self.step:.2g}, by which {name!r} cannot be moved in {x.dtype}: it must be {least:.2g} at "
                f"least; the default, {least ** _POWERS[self.method]:.1g}, is best for exact functions"
            )
        size, moved = x.detach().abs(), least ** _POWERS[self.method]
        small = size[(size > 0) & (size < moved)]
        if self.checked != os.getpid() and self.step is None and self.method != "cs" and len(small):
            warnings.warn(
                f"{name!r} has an element {float(small.min()):.2g}, which finite_differences moves by {moved:.2g}, as "
                "if its size were 1: pass step=1e-4 or another part of its own size, or use other units",
                stacklevel=2,
            )

    def moves(self, dtype: torch.dtype, x: float, low: float, high: float) -> list[tuple[complex, float]]:
        """Return where to evaluate for the derivative by an element `x` of that dtype within bounds: by how much it is
        moved, and the factor of the change of the values there."""
        info, step = torch.finfo(dtype), (self.step or 0.0) * abs(x)
        if step < info.tiny:
            step = info.eps ** _POWERS[self.method] * max(1.0, abs(x))
        if self.method == "cs":
            return [(1j * step, 1 / step)]
        above, below = max(high - x, 0.0), max(x - low, 0.0)
        if self.method == "3-point" and step <= min(above, below):
            step = _exact(x, step, dtype)
            return [(step, 0.5 / step), (-step, -0.5 / step)]
        room = above if above >= below else -below  # up to the farther bound
        if self.method == "3-point":
            near = _exact(x, math.copysign(min(step, abs(room) / 2), room), dtype)
            if near and abs(2 * near) <= abs(room):  # else there are no two numbers within the bounds
                return [(near, 2 / near), (2 * near, -0.5 / near)]
        fits = step <= (below if x < 0 else above)  # away from 0, as in SciPy
        step = _exact(x, math.copysign(min(step, abs(room)), (x or 1.0) if fits else room), dtype)
        return [(step, 1 / step)] if step else []


def _exact(x: float, step: float, dtype: torch.dtype) -> float:
    """Return about this step, one by which `x` can be moved without rounding."""
    return float(torch.tensor(x + step, dtype=dtype)) - x
