"""Functions of a module whose results have no graph, such as simulators, and their gradients by finite differences."""

from __future__ import annotations

import functools
import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload
from weakref import WeakSet

import cloudpickle
import numpy as np
import torch
from torch.func import functional_call

from batchopt_workers.data.structures import map_tensors, tensors_in
from batchopt_workers.map.differences import Method, Range, Rule
from batchopt_workers.process.interrupts import let_through
from batchopt_workers.tasks.bound import Bound

# Bytes of values and derivatives that are kept for the next call at the same point.
KEPT = 32 * 2**20
_MARK = "__differences__"
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
            rounding of its dtype, times its size or 1, whichever is larger.
        bounds: `(low, high)` by the parameter's name, each a number, a tensor or None: where the function is never
            evaluated outside; the other side is taken, and `"3-point"` has both points there.

    These are the rules of SciPy's `approx_derivative` (Nocedal and Wright, "Numerical optimization", 2006, chapter 8;
    Squire and Trapp, "Using complex variables to estimate derivatives of real functions", SIAM Review 40, 1998).

    Calls are made when the gradient is taken, each with the random draws of the first; the last results are kept, so a
    Jacobian after a gradient at the same parameters takes none: what a function reads elsewhere, in a file or in
    variables of other modules, has to stay as it is. The first call of a process is made twice: raises
    `ValueError` if the function returns something else then. Second derivatives do not exist: products of the Hessian
    raise `ValueError`. Raises `TypeError` for complex results and parameters, and for inputs that require a gradient.

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
        return _evaluated(rule, function, module, inputs)

    setattr(with_graph, _MARK, rule)
    return with_graph


def is_by_differences(module: torch.nn.Module, function: Any = None) -> bool:
    """Tell whether the function, or the forward of a part of the module, was decorated."""
    return hasattr(function, _MARK) or any(hasattr(type(part).forward, _MARK) for part in module.modules())


def _evaluated(rule: Rule, function: Callable[..., Any], module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Return what the function returns, with a graph to the module's parameters if gradients are enabled."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not (torch.is_grad_enabled() and trained):
        return function(module, *inputs)
    if unknown := rule.bounds.keys() - {name for name, _ in module.named_parameters()}:
        raise ValueError(f"`bounds` of finite_differences has no parameter's name in {sorted(unknown)}")
    if any(tensor.requires_grad for tensor in tensors_in(inputs)):
        raise TypeError(
            "finite_differences differentiates by the module's parameters, and an input requires a gradient: call "
            ".detach() on it, or make it a parameter of the module"
        )
    simulation = _simulated(rule, function, module, inputs, trained)
    found = _Values.apply(simulation, *trained.values()) if simulation.values else ()  # type: ignore[no-untyped-call]
    return simulation.rebuilt(found)


class _Simulation:
    """Calls of a function at one point: its values there, and their derivatives once they are wanted."""

    def __init__(
        self,
        rule: Rule,
        function: Callable[..., Any],
        module: torch.nn.Module,
        inputs: tuple[Any, ...],
        trained: Mapping[str, torch.Tensor],
        key: bytes | None,
    ) -> None:
        if any(parameter.is_complex() for parameter in trained.values()):
            raise TypeError("finite_differences is for real parameters, and one is complex: make it two real ones")
        self._rule, self._key = rule, key
        self._function: tuple[Bound, tuple[Any, ...]] | None = Bound(module, function), inputs
        self._at = {name: parameter.detach().clone() for name, parameter in trained.items()}
        self._draws = _draws()
        found = map_tensors(torch.clone, self._call(self._at))  # which may be memory that the next call writes
        self._drew = not _alike(self._draws, _draws())
        self._tensors = [*tensors_in(found)]
        if any(tensor.is_complex() for tensor in self._tensors):
            raise TypeError("finite_differences is for functions that return real numbers: use torch.view_as_real")
        self._found, self._columns = found, torch.empty(0)
        # those that have derivatives
        self.values = tuple([tensor for tensor in self._tensors if tensor.is_floating_point()])

    def serves(self) -> bool:
        """Tell whether another call would draw the same."""
        return not self._drew or _alike(self._draws, _draws())

    @property
    def nbytes(self) -> int:
        """Bytes of the values and their derivatives."""
        return sum(value.nbytes for value in self.values) * (1 + sum(p.numel() for p in self._at.values()))

    def _call(self, at: Mapping[str, torch.Tensor]) -> Any:
        assert self._function is not None  # until the columns are known
        bound, inputs = self._function
        with torch.no_grad():
            return functional_call(bound, {f"module.{name}": p for name, p in at.items()}, inputs)

    def again(self) -> None:
        """Raise `ValueError` if another call returns something else."""
        with _drawing(self._draws):
            other = [*tensors_in(self._call(self._at))]
        if len(other) != len(self._tensors) or not all(map(_equal, self._tensors, other)):
            raise ValueError(
                "finite_differences was given a function that returned other values when it was called again with the "
                "same parameters: it has to be deterministic. Draws of torch, of NumPy's global generator and of "
                "`random` are repeated; seed other generators in each call"
            )

    def rebuilt(self, values: Sequence[torch.Tensor]) -> Any:
        """Return what the function returned, with these tensors in place of its values."""
        given = iter(values)
        return map_tensors(lambda tensor: next(given) if tensor.is_floating_point() else tensor, self._found)

    def columns(self) -> torch.Tensor:
        """Return the derivatives of all values, one after the other, by all parameters: shape `(values, n)`."""
        if self._function is not None:
            columns = [column for name in self._at for column in self._by(name)]
            self._columns, self._function = torch.stack(columns, dim=1), None
            if self._key is not None:
                _keep(self._key, self)
        return self._columns

    def _by(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the derivative of all values by each element of a parameter."""
        x, rule = self._at[name], self._rule
        limits = rule.bounds.get(name, Range(-torch.inf, torch.inf))
        low, high = (torch.as_tensor(limit).to(x).expand_as(x).reshape(-1).tolist() for limit in limits)
        base = self._flat(self.values)
        for i, element in enumerate(x.reshape(-1).tolist()):
            move = rule.move(element, x.dtype, low[i], high[i])
            column = move.base * base
            for step, factor in zip(move.steps, move.factors, strict=True):
                column = column + factor * self._moved(name, i, step)
            yield column

    def _moved(self, name: str, element: int, step: float) -> torch.Tensor:
        """Return all values where an element of a parameter is larger by `step`; the imaginary parts for `"cs"`."""
        is_complex = self._rule.method == "cs"
        at = {key: x.to(x.dtype.to_complex()) for key, x in self._at.items()} if is_complex else dict(self._at)
        at[name] = at[name].clone()
        at[name].view(-1)[element] += 1j * step if is_complex else step
        with _drawing(self._draws):
            found = [
                tensor for tensor in tensors_in(self._call(at)) if tensor.is_floating_point() or tensor.is_complex()
            ]
        if [tensor.shape for tensor in found] != [value.shape for value in self.values]:
            raise ValueError(
                f"the results have shapes {[tuple(t.shape) for t in found]} with another {name!r}, and "
                f"{[tuple(v.shape) for v in self.values]} before: finite_differences needs the same"
            )
        if is_complex and not all(tensor.is_complex() for tensor in found):
            raise TypeError(
                'method="cs" calls the function with complex parameters, and it returned real numbers: a cast, .real, '
                'float() or abs() is on their way; use method="3-point"'
            )
        return self._flat([tensor.imag if is_complex else tensor for tensor in found])

    @staticmethod
    def _flat(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([value.reshape(-1) for value in values])

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a number for each value in the values' shapes."""
        parts = torch.split(flat, [value.numel() for value in self.values])
        return [part.view_as(value) for part, value in zip(parts, self.values, strict=True)]

    def split_by_parameter(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a number for each element of X in the parameters' shapes and dtypes."""
        parts = torch.split(flat, [x.numel() for x in self._at.values()])
        return [part.view_as(x).to(x.dtype) for part, x in zip(parts, self._at.values(), strict=True)]

    def joined(self, values: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return these as one vector; None counts as 0."""
        return self._flat([torch.zeros_like(x) if v is None else v for v, x in zip(values, like, strict=True)])


class _Values(torch.autograd.Function):
    """The values of a simulation as functions of the parameters."""

    @staticmethod
    def forward(ctx: Any, simulation: _Simulation, *trained: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.simulation = simulation
        ctx.save_for_backward(*trained)
        return tuple([value.clone() for value in simulation.values])

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> Any:
        return None, *_Gradients.apply(ctx.simulation, *above, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    """Jᵀ times numbers for all values, as a function of these numbers. As one of the parameters it has no derivative,
    since J has none: NaN."""

    @staticmethod
    def forward(ctx: Any, simulation: _Simulation, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.simulation, ctx.trained = simulation, given[len(simulation.values) :]
        columns = simulation.columns()
        flat = simulation.joined(given[: len(simulation.values)], simulation.values)
        return tuple(simulation.split_by_parameter(columns.T.mv(flat.to(columns.dtype))))

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> Any:
        columns = ctx.simulation.columns()
        flat = ctx.simulation.joined(above, ctx.trained)
        along = ctx.simulation.split(columns.mv(flat.to(columns.dtype)))
        return None, *along, *[torch.full_like(parameter, torch.nan) for parameter in ctx.trained]


# ---- what was found last

_found: OrderedDict[bytes | None, _Simulation] = OrderedDict()
_seen: WeakSet[Rule] = WeakSet()  # whose function was called twice in this process


def _simulated(
    rule: Rule,
    function: Callable[..., Any],
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    trained: Mapping[str, torch.Tensor],
) -> _Simulation:
    """Return the function's values at the module's parameters, which may be known: by all that they depend on."""
    key = _key(rule, function, module, inputs, trained)
    if key in _found and _found[key].serves():
        return _found[key]
    found = _Simulation(rule, function, module, inputs, trained, key)
    if rule not in _seen:
        found.again()
        _seen.add(rule)
    return found


def _keep(key: bytes, found: _Simulation) -> None:
    _found[key] = found
    while sum(one.nbytes for one in _found.values()) > KEPT:
        _found.popitem(last=False)


def _key(rule: Rule, function: Any, module: Any, inputs: Any, trained: Mapping[str, torch.Tensor]) -> bytes | None:
    """Return a digest of everything that a call depends on; None if that cannot be made."""
    own = {name: parameter.detach().numpy(force=True).tobytes() for name, parameter in trained.items()}
    rest = {name: value for name, value in module.named_parameters() if name not in own}
    parts = dict(module.named_modules())
    attributes = [{k: v for k, v in vars(m).items() if k not in ("_parameters", "_modules")} for m in parts.values()]
    kinds = {name: type(part) for name, part in parts.items()}
    plain = [map_tensors(lambda t: t.detach().numpy(force=True), part) for part in (rest, attributes, inputs)]
    try:
        dumped = cloudpickle.dumps((vars(rule), function, kinds, own, plain, torch.get_default_dtype()))
    except Exception as error:
        let_through(error)
        return None
    return hashlib.sha256(dumped).digest()


# ---- draws

Draws = tuple[torch.Tensor, Any, Any]


def _draws() -> Draws:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


@contextmanager
def _drawing(draws: Draws) -> Iterator[None]:
    """Draw so in the body, and go on afterwards as before it."""
    before = _draws()
    try:
        _set_draws(draws)
        yield
    finally:
        _set_draws(before)


def _set_draws(draws: Draws) -> None:
    torch.set_rng_state(draws[0])
    np.random.set_state(draws[1])
    random.setstate(draws[2])


def _alike(one: Draws, two: Draws) -> bool:
    numpy = all(np.array_equal(a, b) for a, b in zip(one[1], two[1], strict=True))
    return numpy and torch.equal(one[0], two[0]) and one[2] == two[2]


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and bool(torch.isclose(one, two, rtol=0, atol=0, equal_nan=True).all())
