"""Functions of a module whose results have no graph, such as simulators, and their gradients by finite differences."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload

import numpy as np
import torch

from batchopt_workers.evaluate.draws import set_torch_states, torch_states
from batchopt_workers.functions.differences import Method, Rule
from batchopt_workers.life.torch_settings import autocast_in_force
from batchopt_workers.watch.places import compact
from batchopt_workers.watch.record import Record
from batchopt_workers.wire.layout import reals
from batchopt_workers.wire.structures import map_tensors, same_values, tensors_in

_MARK = "__differences__"
# By a parameter's identity: the elements by which derivatives are taken; None: by all.
_columns: ContextVar[Mapping[int, range] | None] = ContextVar("columns", default=None)
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

    The further calls are made when the gradient is taken. Each begins with the module, the inputs and the random draws
    as they were before the first call, and what it changes in them is undone; what the function reads elsewhere, in a
    file or in another module, has to stay as it is until then. The first call of a process is made twice: raises
    `ValueError` if the function returns something else then. Second derivatives do not exist: products of the Hessian
    raise `ValueError`. Raises `TypeError` for complex results, for parameters that are complex or not dense, and for
    inputs and attributes that require a gradient.

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


def _evaluated(rule: Rule, function: Callable[..., Any], module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Return what the function returns, with a graph to the module's parameters if gradients are enabled."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not (torch.is_grad_enabled() and trained):
        return function(module, *inputs)
    call = _Call(rule, lambda: function(module, *inputs), _State(module, inputs), trained)
    found = call.make()
    tensors = [*tensors_in(found)]
    if any(tensor.is_complex() for tensor in tensors):
        raise TypeError("finite_differences is for functions that return real numbers: use torch.view_as_real")
    call.check(tensors)
    values = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not values:
        return found
    call.shapes, call.values = [value.shape for value in values], _flat(values)
    made = iter(_Values.apply(call, values, *trained.values()))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: next(made) if tensor.is_floating_point() else tensor, found)


class _State:
    """The state that a function may read and write: what its module and inputs hold now, with the elements of their
    tensors but for parameters that are trained, and the random draws to come."""

    def __init__(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self.module, self.inputs = module, inputs
        self._contents = Record({"module": module, "inputs": inputs}, functions=False)
        self.tensors = self._contents.tensors
        plain = [tensor for _, tensor, *_ in self.tensors if tensor.layout is torch.strided and not tensor.is_meta]
        self._elements = [(compact(t), compact(t).detach().clone()) for t in plain if not t.requires_grad]
        self._draws = torch_states(), np.random.get_state(legacy=False), random.getstate()

    def put_back(self) -> None:
        """Make it the present state again."""
        self._contents.put_back()
        for own, before in self._elements:
            if not same_values(own, before):
                own.copy_(before)
        set_torch_states(self._draws[0])
        np.random.set_state(self._draws[1])
        random.setstate(self._draws[2])


class _Call:
    """A call of a function, which begins at the state `start` and with the parameters as they are now, and, once they
    are wanted, its derivatives. `values`: of those results that have some, as one vector; `shapes`: theirs."""

    def __init__(
        self, rule: Rule, function: Callable[[], Any], start: _State, trained: Mapping[str, torch.Tensor]
    ) -> None:
        names = dict(start.module.named_parameters(remove_duplicate=False))
        if unknown := rule.bounds.keys() - names.keys():
            raise ValueError(f"`bounds` of finite_differences has no parameter's name in {sorted(unknown)}")
        for name, parameter in trained.items():
            rule.check(name, parameter)
        known = {id(parameter) for parameter in trained.values()}
        for path, tensor, *_ in start.tensors:
            if tensor.requires_grad and id(tensor) not in known:
                raise TypeError(
                    f"finite_differences differentiates by the module's parameters, and {path} requires a gradient, "
                    "which would be lost: call .detach() on it, or make it a parameter of the module"
                )
        self.shapes: list[torch.Size] = []
        self.values = torch.empty(0)
        self._rule, self._function, self._start, self._trained = rule, function, start, trained
        self._bounds = {id(names[name]): pair for name, pair in rule.bounds.items()}
        self._at = [parameter.detach().clone() for parameter in trained.values()]
        self._autocast, self._wanted = autocast_in_force(), _columns.get()

    def make(self) -> Any:
        """Return copies of what the function returns, which may be memory that its next call writes."""
        with torch.no_grad(), ExitStack() as modes:
            for device, dtype, _ in self._autocast:  # a cast that torch kept would have no graph elsewhere
                modes.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            return map_tensors(torch.clone, self._function())

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Undo at the end what other calls change in the body."""
        now, before = _State(self._start.module, self._start.inputs), [p.data for p in self._trained.values()]
        try:
            yield
        finally:
            now.put_back()
            for parameter, data in zip(self._trained.values(), before, strict=True):
                parameter.data = data

    def _again(self, at: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that a call from the same start returns with these parameters."""
        self._start.put_back()
        moved = {id(parameter): data for parameter, data in zip(self._trained.values(), at, strict=True)}
        for part in self._start.module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and id(parameter) in moved:
                    data = moved[id(parameter)]
                    if data.is_complex():  # the parameter itself keeps its dtype, on which its graph depends
                        part._parameters[name] = data  # type: ignore[assignment]
                    else:
                        parameter.data = data
        return [*tensors_in(self.make())]

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise `ValueError` if another call returns other tensors; once in each process."""
        if self._rule.checked == os.getpid():
            return
        with self._undone():
            other = self._again([own.clone() for own in self._at])
        if len(other) != len(tensors) or not all(map(same_values, tensors, other)):
            raise ValueError(
                "finite_differences was given a function that returned other values when it was called again with the "
                "same parameters: it has to be deterministic. Its module, its inputs, and draws of torch, of NumPy's "
                "global generator and of `random` are the same in each call; seed other generators in each, and read "
                "nothing else that changes"
            )
        self._rule.checked = os.getpid()

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """The derivatives of all values by each element of the parameters: shape `(n, values)`."""
        with self._undone():
            return torch.stack([row for number in range(len(self._at)) for row in self._by(number)])

    def _by(self, number: int) -> Iterator[torch.Tensor]:
        """Yield the derivative of all values by each element of a parameter."""
        x, parameter = self._at[number], [*self._trained.values()][number]
        bounds = self._bounds.get(id(parameter), (-torch.inf, torch.inf))
        low, high = (torch.as_tensor(bound, dtype=x.dtype, device=x.device).expand_as(x) for bound in bounds)
        lists = [tensor.reshape(-1).tolist() for tensor in (x, low, high)]
        columns = range(x.numel()) if self._wanted is None else self._wanted[id(parameter)]
        for i, (place, element, *limits) in enumerate(zip(np.ndindex(*x.shape), *lists, strict=True)):
            row = torch.zeros_like(self.values)
            for step, factor in self._rule.moves(element, x.dtype, *limits) if i in columns else ():
                row.add_(self._change(number, place, step), alpha=factor)
            yield row

    def _change(self, number: int, place: tuple[int, ...], step: float) -> torch.Tensor:
        """Return the change of all values where an element is larger by `step`; the imaginary parts for `"cs"`."""
        is_complex = self._rule.method == "cs"
        at = [own.to(own.dtype.to_complex()) if is_complex else own.clone() for own in self._at]
        at[number][place] += 1j * step if is_complex else step
        found = [tensor for tensor in self._again(at) if tensor.is_floating_point() or tensor.is_complex()]
        if [tensor.shape for tensor in found] != self.shapes:
            raise ValueError(
                f"the results have shapes {[tuple(t.shape) for t in found]} with another {[*self._trained][number]!r}, "
                f"and {[tuple(shape) for shape in self.shapes]} before: finite_differences needs the same"
            )
        if is_complex and not all(tensor.is_complex() for tensor in found):
            raise TypeError(
                'method="cs" calls the function with complex parameters, and it returned real numbers: a cast, .real, '
                'float() or abs() is on their way; use method="3-point"'
            )
        return _flat([tensor.imag for tensor in found]) if is_complex else _flat(found) - self.values


class _Values(torch.autograd.Function):
    """The values of a call as functions of the parameters."""

    @staticmethod
    def forward(ctx: Any, call: _Call, values: Sequence[torch.Tensor], *trained: torch.Tensor) -> Any:
        ctx.call = call
        ctx.save_for_backward(*trained)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> Any:
        return None, None, *_Gradients.apply(ctx.call, *above, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    """Jᵀ times numbers for all values, as a function of these numbers. As one of the parameters it has no derivative,
    since J has none: NaN."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *given: torch.Tensor) -> Any:
        count = len(call.shapes)
        ctx.rows, ctx.above, ctx.trained = call.rows, given[:count], given[count:]
        return _split(ctx.rows.mv(_flat(ctx.above).to(ctx.rows)), ctx.trained)

    @staticmethod
    def backward(ctx: Any, *along: torch.Tensor) -> Any:
        products = _split(ctx.rows.T.mv(_flat(along).to(ctx.rows)), ctx.above)
        return None, *products, *[torch.full_like(parameter, torch.nan) for parameter in ctx.trained]


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements as one vector, of single precision at least."""
    return torch.cat([t.detach().to(torch.promote_types(t.dtype, torch.float32)).reshape(-1) for t in tensors])


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the numbers in the shapes, the dtypes and on the devices of these tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return tuple([part.view(tensor.shape).to(tensor) for part, tensor in zip(parts, like, strict=True)])
