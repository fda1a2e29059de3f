"""The samples of a map-style dataset, which are read by the worker that evaluates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchopt_workers.wire.memory import ALIGNMENT
from batchopt_workers.wire.structures import is_tensor, map_tensors

Collate = Callable[[list[Any]], Any]


class Unreadable(Exception):
    """The item at `index` raised `error`."""

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(index, error)
        self.index, self.error = index, error


@dataclass(frozen=True)
class CollatesAll:
    """The user's `collate`, whose result must contain all samples: a mean divides by their number."""

    collate: Collate

    def __call__(self, samples: list[Any]) -> Any:
        """Collate the samples. Raise `ValueError` for targets (or else inputs) of fewer samples, as far as a tensor's
        shape shows it: a dimension as long as the samples may be theirs, and so may a longer first one."""
        made = self.collate(samples)
        last = made[-1] if isinstance(made, (tuple, list)) and len(made) == 2 else made
        shape: tuple[int, ...] = tuple(last.shape) if is_tensor(last) else ()
        if shape and shape[0] < len(samples) not in shape:
            raise ValueError(
                f"`collate_fn` was given {len(samples)} samples and made a tensor of {shape[0]}, shape {shape}: "
                "a mean counts the samples that it was given; leave samples out before (of a dataset by a Subset), or, "
                "of lists, pass `denominators` with 0 for those that it leaves out"
            )
        return made


class _Picked:
    """The items of a dataset at some indices. Not torch's `Subset`, which may read them in another way."""

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self._data, self._indices = data, indices

    def __getitem__(self, index: int) -> Any:
        return self._data[self._indices[index]]


@dataclass(frozen=True)
class Items:
    """`size` items of a dataset, each `(input, target)` or an input alone. `cache`: collated samples are kept.
    `ignored`: a class that no target may have. `denominators`: determined those of all samples in an earlier pass."""

    data: Any
    size: int
    cache: bool = True
    ignored: int | None = None
    denominators: Callable[[Any, Any, Any], torch.Tensor] | None = None

    def __len__(self) -> int:
        return self.size

    def held(self, start: int, stop: int) -> list[Any]:
        """Return an empty list: items are created when they are read."""
        return []

    def read(self, start: int, stop: int, collate: Collate) -> tuple[Any, Any]:
        """Return inputs and targets (or None) that `collate` makes of samples `start` up to `stop`, laid out like the
        rows of tensors with all samples.

        Raise `Unreadable` for an item that raises, or whose target is `ignored`, and `ValueError` for anything but
        inputs and targets.
        """
        inputs, targets = _inputs_and_targets(collate([self._item(index) for index in range(start, stop)]))
        if self.ignored is not None and is_tensor(targets) and not targets.is_floating_point():
            self._refuse_ignored(self.ignored, targets, start)
        inputs, targets = map_tensors(lambda tensor: _laid_out(tensor, start, stop), (inputs, targets))
        return inputs, targets

    def picked(self, indices: Sequence[int]) -> Items:
        """Return the items at these indices."""
        return replace(self, data=_Picked(self.data, tuple(indices)), size=len(indices))

    def _item(self, index: int) -> Any:
        try:
            return self.data[index]
        except Exception as error:
            raise Unreadable(index, error) from error

    def check_denominators(self, inputs: Any, targets: Any, start: int, running: torch.Tensor) -> None:
        """Raise `Unreadable` for the first sample whose denominator differs from that of the earlier pass; `running`:
        the result of that pass, as in `Weighting`."""
        assert self.denominators is not None
        found = self.denominators(None, inputs, targets).double().cpu()
        before = running[start : start + len(found) + 1].diff()
        other = ~((found - before).abs() <= 1e-12 * running[-1])  # true for NaN
        if bool(other.any()):
            index = int(other.nonzero()[0, 0])
            message = (
                f"its denominator is {found[index].item():g}, and was {before[index].item():g} when it was first read: "
                "the divisor of the mean is computed in a separate pass, so targets must be the same each time they "
                "are read; draw them from a generator seeded with the index, or make tensors of the dataset before"
            )
            raise Unreadable(start + index, ValueError(message))

    def _refuse_ignored(self, ignored: int, targets: torch.Tensor, start: int) -> None:
        rows = (targets.flatten(1) if targets.dim() > 1 else targets.reshape(-1, 1)).eq(ignored).any(1)
        if bool(rows.any()):
            message = (
                f"its target has the criterion's ignore_index, {ignored}: what the mean of the whole batch "
                "divides by is then not known before all targets were read; have them read, with denominators=lambda "
                f"inputs, targets: (targets != {ignored}).reshape(len(targets), -1).sum(1), or use reduction='sum'"
            )
            raise Unreadable(start + int(rows.nonzero()[0, 0]), ValueError(message))


def _inputs_and_targets(made: Any) -> tuple[Any, Any]:
    """Split the result as a data loader's: a tuple or list of one or two, or the inputs alone."""
    if not isinstance(made, (tuple, list)) or hasattr(made, "_fields"):
        return made, None
    if not 1 <= len(made) <= 2:
        raise ValueError(
            f"items of a dataset must be (input, target) or an input, and `collate_fn` must make (inputs, targets) or "
            f"inputs of them; got {len(made)} entries: put inputs that belong together into a tuple of their own"
        )
    inputs, targets = (*made, None)[:2]
    return inputs, targets


def _laid_out(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the tensor, copied if necessary: a leaf that begins in memory where row `start` of a tensor with all rows
    would, modulo 64 bytes. Matrix products of the same numbers have other bits elsewhere."""
    leaf = tensor.detach().requires_grad_(tensor.requires_grad)
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return leaf
    size, strides = tensor.element_size(), torch.empty_like(tensor, device="meta").stride()
    has_rows = tensor.dim() > 0 and tensor.shape[0] == stop - start
    offset = start * strides[0] * size % ALIGNMENT if has_rows else 0
    if strides == tensor.stride() and tensor.data_ptr() % ALIGNMENT == offset:
        return leaf
    memory = torch.empty(tensor.numel() + ALIGNMENT // size, dtype=tensor.dtype, device="cpu")
    first = (offset - memory.data_ptr()) % ALIGNMENT // size
    place = memory.as_strided(tensor.shape, strides, first)
    with torch.no_grad():
        place.copy_(tensor)
    return place.requires_grad_(tensor.requires_grad)
