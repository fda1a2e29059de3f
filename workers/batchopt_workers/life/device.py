"""A worker on an accelerator: copies of X, constants and data there, and the transfers from and to the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from batchopt_workers.evaluate.evaluator import Evaluator
from batchopt_workers.evaluate.sums import Rows
from batchopt_workers.evaluate.work import ChunkDone
from batchopt_workers.wire.layout import Layout
from batchopt_workers.wire.memory import SharedBlock
from batchopt_workers.wire.orders import TASKS, Order

# The memory of this machine, which parent and workers share.
HOST = torch.device("cpu")


_pinned: weakref.WeakSet[SharedBlock] = weakref.WeakSet()


def pin(block: SharedBlock, device: torch.device) -> None:
    """Let the accelerator copy to and from the block directly until it is unmapped; where that is not allowed, copies
    are only slower."""
    if device.type != "cuda" or block in _pinned:
        return
    _pinned.add(block)
    address = block.memory.ctypes.data
    if _succeeds(device, "cudaHostRegister", address, block.nbytes, 0):
        # later memory at this address could not be registered otherwise
        unpin = weakref.finalize(block.memory, _succeeds, device, "cudaHostUnregister", address)
        unpin.atexit = False


def _succeeds(device: torch.device, name: str, *arguments: int) -> bool:
    """Call this function of the CUDA runtime, and return whether it succeeded. A failure has no consequences."""
    with suppress(RuntimeError, AttributeError):
        if int(getattr(torch.cuda.cudart(), name)(*arguments)) == 0:  # type: ignore[no-untyped-call]
            return True
        torch.ones(1, device=device)  # the runtime reports the failure once more, to the thread's next kernel
    return False


# Copies on a device, with the tensors that they follow, by the identity of the tensors in whose place they are.
Constants = dict[int, tuple[torch.Tensor, torch.Tensor]]


def moved(
    owners: Iterable[object],
    device: torch.device,
    parameters: Sequence[torch.Tensor],
    originals: Mapping[int, torch.Tensor],
) -> Constants:
    """Replace the frozen parameters and buffers of those `owners` that are modules by copies on the device, one per
    tensor, all but these `parameters`. `originals`: the tensors that the copies follow, by the identity of the replaced
    ones."""
    found: Constants = {}
    there = {id(parameter) for parameter in parameters}
    for owner in owners:
        for part in owner.modules() if isinstance(owner, torch.nn.Module) else ():
            for named in (part._parameters, part._buffers):
                for name, tensor in named.items():
                    if tensor is None or id(tensor) in there:
                        continue
                    if id(tensor) not in found:
                        copy: Any = tensor.detach().to(device, copy=True)
                        if isinstance(tensor, torch.nn.Parameter):
                            copy = torch.nn.Parameter(copy, requires_grad=False)
                        found[id(tensor)] = originals.get(id(tensor), tensor), copy
                        there.add(id(copy))
                    named[name] = found[id(tensor)][1]  # type: ignore[assignment]
    return found


class Mirror:
    """The copies that a worker keeps on its `device`: X, as `vector`; the module's constants; gradients.

    X is transferred once per order, each piece of the batch once, and one gradient per reported partial.
    """

    def __init__(self, layout: Layout, x: torch.Tensor, device: torch.device) -> None:
        """`x`: the shared vector, shape `(layout.size,)`."""
        self._layout, self._device, self._shared = layout, device, x
        self.vector = torch.empty(layout.size, dtype=layout.dtype, device=device)
        self._evaluator: Evaluator | None = None  # on these copies
        self._constants: Constants = {}
        self._rows: Rows | None = None
        self._delivered: dict[int, object] = {}  # evaluation and node in each shared row

    def adopt(self, evaluator: Evaluator, constants: Constants) -> None:
        """Use another copy of the program, with its constants."""
        self._evaluator, self._constants = evaluator, constants

    def begin_step(self) -> None:
        """Copy the parent's current constants."""
        with torch.no_grad():
            for shared, copy in self._constants.values():
                copy.copy_(shared)

    def make_rows(self, count: int, changes: int) -> None:
        """Ensure at least `count` rows to sum in, each with `changes` numbers for the changes of buffers."""
        if self._rows is None or self._rows.changes != changes:
            self._rows = Rows(self._layout, changes, count, device=self._device)
        else:
            self._rows.grow(max(0, count - len(self._rows)), None)

    def evaluate(self, order: Order, shared: Rows | None) -> Iterator[ChunkDone]:
        """Evaluate like `Evaluator.evaluate`; the reported sums are in the `shared` rows."""
        evaluator = self._evaluator
        assert evaluator is not None and evaluator.walk.place is not None
        with torch.no_grad():
            self.vector.copy_(self._shared)
        if order.kind in TASKS:
            evaluator.walk.place.keeps = False
            try:
                yield from evaluator.evaluate(order, None)
            finally:
                evaluator.walk.place.keeps = True
            return
        assert self._rows is not None and shared is not None
        for done in evaluator.evaluate(order, self._rows):
            done.sums.settle(None)
            for node, partial in done.sums.partials:
                what, row = (order.evaluation, node), partial.row
                if self._delivered.get(row) != what:
                    shared[row].gradient.copy_(self._rows[row].gradient)
                    shared[row].changes.copy_(self._rows[row].changes)
                    self._delivered[row] = what
            yield done
