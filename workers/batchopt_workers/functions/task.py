"""Tasks: functions other than f, applied to each chunk of a batch, and their surroundings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from batchopt_workers.batch.batch import Batch, Piece
from batchopt_workers.evaluate.program import Worker
from batchopt_workers.evaluate.sums import Rows
from batchopt_workers.functions.jacobian import Block, PieceResiduals
from batchopt_workers.wire.layout import Layout
from batchopt_workers.wire.orders import Cut
from batchopt_workers.wire.packing import copy_of
from batchopt_workers.wire.structures import map_tensors

# `function(module, inputs, targets)`, for the samples of a chunk.
ChunkFunction = Callable[[torch.nn.Module, Any, Any], Any]


class Evaluation(NamedTuple):
    """An evaluation of all terms: the `losses` of each, df/dX, `changes` of buffers, and the parameters `used`."""

    losses: tuple[float, ...]
    gradient: torch.Tensor
    changes: torch.Tensor
    used: bytes


class PieceContext(NamedTuple):
    """The worker, its module and the trainable parameters; `loss` of the piece, after the prehook, with the weight
    `weight` in f, and the `residuals` whose mean square it is. `batch()`: the loaded one, as far as this worker has it;
    `evaluate` and `jacobian`: see `Evaluator.evaluate_all` and `jacobian_of_all`."""

    worker: Worker
    module: torch.nn.Module
    parameters: Sequence[torch.Tensor]
    loss: Callable[[], torch.Tensor]
    residuals: Callable[[], PieceResiduals]
    weight: float
    batch: Callable[[], Batch]
    evaluate: Callable[..., Evaluation]
    jacobian: Callable[[Cut], list[Block]]


class PieceFunction(Protocol):
    """A function of one piece of a batch: a chunk, or one sample of a list."""

    def __call__(self, piece: Piece, context: PieceContext) -> Any:
        """Return the result: rows for its samples, or what is summed."""


@dataclass(frozen=True)
class Task:
    """The meaning of an order to collect or to total: apply `function` to samples of the term with the index `term`
    (None: of all terms, as they are numbered), of the loaded batch or (`aside`) of a batch sent with the task. `train`:
    the mode of the module in the meantime; None: its own. `whole`: the function evaluates the complete loaded batch;
    `writes`: it makes steps, and writes parameters."""

    function: PieceFunction
    term: int | None = 0
    aside: bool = False
    train: bool | None = None
    whole: bool = False
    writes: bool = False

    @property
    def is_users(self) -> bool:
        """Tell whether it runs code of the user that is not part of f."""
        function = self.function
        return (isinstance(function, Applied) and function.function is not None) or (
            isinstance(function, Predicted) and function.transform is not None
        )


@dataclass(frozen=True)
class Applied:
    """The user's function, which is passed copies of the samples, without a graph unless `grad`; None: the module
    itself. With `layers`, names of parts of the module, the result is the outputs of those, by name, in addition to
    that of the function if there is one."""

    function: ChunkFunction | None
    grad: bool = False
    layers: tuple[str, ...] = ()

    def __call__(self, piece: Piece, context: PieceContext) -> Any:
        module = context.module
        with torch.set_grad_enabled(self.grad), _outputs_of(module, self.layers) as outputs:
            if self.function is None:
                result = module(piece.inputs)
            else:
                result = self.function(module, *copy_of((piece.inputs, piece.targets)))
        if not self.layers:
            return result
        return outputs if self.function is None else (result, outputs)


@dataclass(frozen=True)
class Predicted:
    """The module's output, or the result of `transform` on it; together with the targets if `targets`."""

    transform: Callable[[Any], Any] | None = None
    targets: bool = False

    def __call__(self, piece: Piece, context: PieceContext) -> Any:
        with torch.no_grad():
            output = context.module(piece.inputs)
            output = output if self.transform is None else self.transform(output)
        if not self.targets:
            return output
        if piece.targets is None:
            raise ValueError("the items have no targets: a dataset has to have (input, target)")
        return output, piece.targets


@contextmanager
def _outputs_of(module: torch.nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Record the outputs of these parts of the module in the body. Raise `ValueError` if one is called twice or, at the
    end, was not called."""
    found: dict[str, Any] = {}
    handles = []

    def note(name: str) -> Any:
        def hook(_part: torch.nn.Module, _inputs: Any, output: Any) -> None:
            if name in found:
                raise ValueError(
                    f"layer {name!r} is called more than once in a forward: which output is meant? Register a hook "
                    "inside of the function, and return what you need"
                )
            found[name] = map_tensors(torch.clone, output)  # later layers may write it

        return hook

    try:
        for name in layers:
            handles.append(module.get_submodule(name).register_forward_hook(note(name)))
        yield found
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in layers if name not in found]
    if missing:
        raise ValueError(f"layer {missing[0]!r} was not called by the function")


class Modes:
    """Switches a module into training mode or evaluation mode, by its own `train`, and back; then each of its parts
    into its own."""

    def __init__(self, module: torch.nn.Module, train: bool) -> None:
        self._module, self._train = module, train
        self._own = [(part, part.training) for part in module.modules()]

    def __enter__(self) -> None:
        if any(own is not self._train for _, own in self._own):
            self._module.train(self._train)

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Switch back; once more is harmless, and necessary if the first time was interrupted."""
        if any(part.training is not own for part, own in self._own):
            self._module.train(not self._train)
            for part, own in self._own:
                part.training = own


class Totals(Protocol):
    """Memory for the sums of totals."""

    def rows(self, layout: Layout, count: int) -> Rows:
        """Return at least `count` rows; existing ones keep their content if their layout was the same."""


class PrivateTotals:
    """Memory of this process."""

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._layout: Layout | None = None

    def rows(self, layout: Layout, count: int) -> Rows:
        """See `Totals`."""
        if self._rows is None or self._layout != layout:
            self._rows, self._layout = Rows(layout, 0, count, None, torch.device("cpu")), layout
        elif len(self._rows) < count:
            self._rows.grow(count - len(self._rows), None)
        return self._rows
