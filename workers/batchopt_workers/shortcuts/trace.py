"""Tracing f of a piece and its gradient as one graph, by tensors that have no elements.

All that the program holds is made of such tensors: parameters, statistics, constants and the samples. So whatever the
user's code does with elements in Python (`if`, `item`, NumPy) raises here, where a trace with real tensors would have
recorded one of its outcomes. The number of samples is a symbol, so one graph serves chunks of all sizes.

What tracing cannot see is refused (`Untraceable`): code that writes Python objects, which does something else the next
time; draws of NumPy, of `random` or of a generator of its own; writes to the samples or to constants. Python numbers
are recorded as they are: whoever changes the program has it traced again.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves

from batchopt_workers.shortcuts.form import PARAMETER, PIECE, STATISTIC, TENSOR
from batchopt_workers.wire.packing import Placement

aten = torch.ops.aten


class Untraceable(Exception):
    """The reason why an evaluation cannot be compiled."""


class Traced(NamedTuple):
    """A graph, and what it takes and returns; see `Artifact`. `serves`: tells whether it is right for so many samples,
    and `is_general` whether it is for any number of them."""

    graph: torch.fx.GraphModule
    inputs: tuple[tuple[str, int], ...]
    used: tuple[int, ...]
    written: tuple[int, ...]
    serves: Callable[[int], bool]
    is_general: bool

    @property
    def examples(self) -> tuple[Any, ...]:
        """The inputs without elements."""
        return tuple(node.meta["val"] for node in self.graph.graph.nodes if node.op == "placeholder")

    @property
    def has_integers(self) -> bool:
        """Tell whether there are tensors of integers, which may be indices."""
        values = [node.meta.get("val") for node in self.graph.graph.nodes]
        kinds = [value.dtype for value in values if isinstance(value, torch.Tensor) and value.dim()]
        return not all(kind.is_floating_point or kind == torch.bool for kind in kinds)

    def range_around(self, samples: int, largest: int) -> tuple[int, int]:
        """Return the fewest and the most samples for which it is right, among the numbers around `samples` up to
        `largest`; two at least."""
        if self.is_general:
            return 2, 2**62
        fewest = most = samples
        while most < largest and self.serves(most + 1):
            most += 1
        while fewest > 2 and self.serves(fewest - 1):
            fewest -= 1
        return fewest, most

    def digest(self) -> bytes:
        """Return what identifies the computation: operations, shapes, dtypes, and constants of the code."""
        found = hashlib.sha256(self.graph.code.encode())
        for example in self.examples:
            found.update(repr((tuple(map(str, example.shape)), example.stride(), example.dtype)).encode())
        for node in self.graph.graph.nodes:
            if node.op == "get_attr":
                literal = getattr(self.graph, node.target)
                found.update(repr((tuple(literal.shape), literal.dtype)).encode())
                found.update(literal.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.digest()


class Fakes:
    """Makes tensors without elements, of one symbol for the number of samples."""

    def __init__(self) -> None:
        self.symbols = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.symbols)
        self._made = 0

    def like(self, placement: Placement, by_sample: bool = False) -> torch.Tensor:
        """Return one of that form; `by_sample`: its first dimension is that of the samples."""
        self._made += 1
        sizes = [DimDynamic.STATIC] * len(placement.shape)
        if by_sample:
            sizes[0] = DimDynamic.DUCK
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        empty = placement.empty()
        found = self.mode.from_tensor(empty, symbolic_context=context, source=ConstantSource(f"t{self._made}"))
        return placement.dressed(found)


def trace(
    fakes: Fakes,
    loss: Callable[[], torch.Tensor],
    parameters: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    piece: Sequence[torch.Tensor],
) -> Traced:
    """Trace `loss`, a function of these tensors, and its gradient with respect to the parameters. Raise `Untraceable`,
    and whatever the code raises."""
    own = {id(statistic) for statistic in statistics}
    given = [(PARAMETER, i, tensor) for i, tensor in enumerate(parameters)]
    given += [(STATISTIC, i, tensor) for i, tensor in enumerate(statistics)]
    given += [(TENSOR, i, tensor) for i, tensor in enumerate(tensors) if id(tensor) not in own]
    given += [(PIECE, i, tensor) for i, tensor in enumerate(piece)]
    used: list[int] = []

    def evaluation(*_: torch.Tensor) -> list[torch.Tensor]:
        with torch.enable_grad():
            value = loss()
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        found = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
        used[:] = [i for i, _ in found]
        return [value.detach(), *[gradient.detach() for _, gradient in found]]

    memory = [tensor.untyped_storage()._cdata for *_, tensor in given]
    with fakes.mode:
        trace_it = make_fx(evaluation, decomposition_table=DECOMPOSED)
        graph = trace_it(*[tensor for *_, tensor in given])
    if [tensor.untyped_storage()._cdata for *_, tensor in given] != memory:
        raise Untraceable("it gives a tensor of the program other memory (`.data = ...`), which a graph would not")
    for example in graph.graph.find_nodes(op="get_attr"):
        if type(getattr(graph, example.target)) is not torch.Tensor:
            raise Untraceable("it uses a tensor that is no part of the program")
    _check_operations(graph)
    written = _return_statistics(graph, [(kind, i) for kind, i, _ in given])
    graph.graph.eliminate_dead_code()
    inputs = []
    for node, (kind, i, _) in zip([*graph.graph.find_nodes(op="placeholder")], given, strict=True):
        if node.users:
            inputs.append((kind, i))
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (value.is_complex() or value.layout is not torch.strided):
            raise Untraceable(f"{node.target} makes a tensor that is complex or sparse")
    return Traced(graph, tuple(inputs), tuple(used), written, *_guard(fakes.symbols))


def _batch_norm(input: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *how: float) -> Any:
    """`aten.native_batch_norm`, whose signature does not say that it writes the running statistics."""
    if not training:
        return aten._native_batch_norm_legit_no_training.default(input, weight, bias, mean, variance, *how)
    if mean is None or variance is None:
        return aten._native_batch_norm_legit.no_stats(input, weight, bias, training, *how)
    return aten._native_batch_norm_legit.default(input, weight, bias, mean, variance, training, *how)


# What has an effect that its signature does not show, or cannot be called from compiled code, by other operations.
DECOMPOSED: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten._weight_norm_interface_backward.default: aten._weight_norm_differentiable_backward.default,
}


def _check_operations(graph: torch.fx.GraphModule) -> None:
    """Replace what cannot be compiled. Raise `Untraceable` for draws of a generator."""
    for node in graph.graph.nodes:
        if node.target is aten._efficientzerotensor.default:  # which has no memory
            node.target = aten.zeros.default
        if any(isinstance(value, torch.Generator) for value in (*node.args, *node.kwargs.values())):
            raise Untraceable("it draws from a torch.Generator of its own")


def _shared(node: torch.fx.Node) -> list[tuple[bool, Any]]:
    """Return what an operation shares memory with: arguments that it writes (True), and others that it may return."""
    target: Any = node.target
    if target is operator.getitem:  # one of the views that `chunk` returns, say
        return [(False, node.args[0])]
    arguments = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
    given = dict(zip([argument.name for argument in arguments], node.args, strict=False)) | node.kwargs
    known = [(argument.alias_info, given.get(argument.name)) for argument in arguments]
    return [(alias.is_write, one) for alias, value in known if alias is not None for one in tree_leaves(value)]


def _return_statistics(graph: torch.fx.GraphModule, given: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Have the graph work on copies of the statistics that it writes, and return these; return their indices. Raise
    `Untraceable` for writes to anything else that it is given."""
    placeholders = {node: place for node, place in zip(graph.graph.find_nodes(op="placeholder"), given, strict=True)}
    base: dict[torch.fx.Node, torch.fx.Node] = {node: node for node in placeholders}
    written: dict[torch.fx.Node, int] = {}
    for node, (writes, value) in [(one, found) for one in graph.graph.nodes for found in _shared(one)]:
        if value not in base:
            continue
        if writes:
            kind, i = placeholders[base[value]]
            if kind != STATISTIC:
                what = {PIECE: "the samples", PARAMETER: "a parameter", TENSOR: "a constant"}[kind]
                raise Untraceable(f"it writes {what} ({node.target})")
            written[base[value]] = i
        base[node] = base[value]
    (output,) = graph.graph.find_nodes(op="output")
    results = list(output.args[0])
    last = [*placeholders][-1]
    for node in written:
        with graph.graph.inserting_after(last):
            copy = graph.graph.call_function(aten.clone.default, (node,))
        copy.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(copy)
        copy.args = (node,)  # which that has replaced, too
        results.append(copy)
    output.args = (results,)
    return tuple(written.values())


def _guard(symbols: ShapeEnv) -> tuple[Callable[[int], bool], bool]:
    """Return a function that tells whether the traced code would have done the same with another number of samples; and
    whether it would with any."""
    conditions = [guard.expr for guard in symbols.guards]
    known = {symbol: hint for symbol, hint in symbols.var_to_val.items()}
    fixed = {symbol for symbol in known if symbol in symbols.replacements}
    free = [symbol for symbol in known if symbol not in fixed]

    def serves(samples: int) -> bool:
        if fixed and any(known[symbol] != samples for symbol in fixed):
            return False
        values = {symbol: samples for symbol in free}
        values |= {symbol: known[symbol] for symbol in fixed}
        for symbol in free:
            bounds = symbols.var_to_range[symbol]
            if not bounds.lower <= samples <= bounds.upper:
                return False
        return all(bool(condition.subs(values)) for condition in conditions)

    is_general = not conditions and all(serves(samples) for samples in (2, 3, 2**40))
    return serves, is_general
