"""The data of an objective of one or more terms, and how a chunk of it is cut out."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from batchopt_workers.collation import Collation
from batchopt_workers.memory import ALIGNMENT
from batchopt_workers.numbering import Numbering
from batchopt_workers.weighting import Weighting

Collate = Callable[[list[Any]], Any]


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def map_tensors(function: Callable[[Any], Any], data: Any, is_leaf: Callable[[Any], bool] = _is_tensor) -> Any:
    """Apply `function` to every tensor (or other leaf) of a structure of tuples, lists, mappings and dataclasses, which
    keep their types; what is no leaf stays."""
    if is_leaf(data):
        return function(data)
    if isinstance(data, tuple) and hasattr(data, "_make"):
        return data._make(map_tensors(function, item, is_leaf) for item in data)
    if isinstance(data, (tuple, list)):
        return type(data)(map_tensors(function, item, is_leaf) for item in data)
    if isinstance(data, Mapping):
        mapped = {key: map_tensors(function, item, is_leaf) for key, item in data.items()}
        return _filled(copy.copy(data), mapped) if _keeps_its_type(data) else mapped
    if is_record(data):
        return _replaced(data, {name: map_tensors(function, item, is_leaf) for name, item in items_of(data)})
    return data


def is_record(data: Any) -> bool:
    """Whether it is an instance of a dataclass."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def items_of(data: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a tuple, list, mapping or dataclass, each with its index, key or name; none for any other object."""
    if isinstance(data, (tuple, list)):
        yield from enumerate(data)
    elif isinstance(data, Mapping):
        yield from data.items()
    elif is_record(data):
        for entry in dataclasses.fields(data):
            if hasattr(data, entry.name):
                yield entry.name, getattr(data, entry.name)


def _keeps_its_type(data: Mapping[Any, Any]) -> bool:
    return type(data) is not dict and isinstance(data, MutableMapping)


def _filled(data: Any, items: dict[Any, Any]) -> Any:
    for key, item in items.items():
        data[key] = item
    return data


def _replaced(data: Any, items: dict[str, Any]) -> Any:
    """A copy of a dataclass with other values; frozen ones, and those whose `__init__` does more, too."""
    found = copy.copy(data)
    for name, item in items.items():
        object.__setattr__(found, name, item)
    return found


def tensors_in(data: Any) -> Iterator[torch.Tensor]:
    """Every tensor of such a structure, in order."""
    if isinstance(data, torch.Tensor):
        yield data
    else:
        for _, item in items_of(data):
            yield from tensors_in(item)


# What has no tensors in it, as a look at its type tells.
_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


def has_a_row_each(item: Any, samples: int) -> bool:
    """Whether it is a list, tuple or array of other things than tensors, one a sample."""
    if isinstance(item, np.ndarray):
        return item.ndim > 0 and len(item) == samples
    if (not isinstance(item, list) and type(item) is not tuple) or len(item) != samples:
        return False
    return _PLAIN.issuperset(map(type, item)) or next(tensors_in(item), None) is None


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return _leaf(tensor[start:stop], tensor) if tensor.requires_grad else tensor[start:stop]


def _leaf(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return part.detach().requires_grad_(whole.requires_grad)


@dataclass(frozen=True)
class Columns:
    """Tensors whose first dimension is the sample: a tensor, or tuples, lists, mappings and dataclasses of them. Lists,
    tuples and arrays in there without tensors, if they are as long as the batch, have one entry a sample, too; whatever
    else is there belongs to every sample."""

    data: Any

    def __len__(self) -> int:
        return next(tensors_in(self.data)).shape[0]

    def slice(self, start: int, stop: int) -> Any:
        """Samples `start` up to `stop`, in the same structure; views, and leaves of the autograd graph."""
        return self._map(lambda column: _rows(column, start, stop) if _is_tensor(column) else column[start:stop])

    def held(self, start: int, stop: int) -> list[Any]:
        """What samples `start` up to `stop` are read from, itself."""
        return [self.data]

    def sample(self, index: int) -> Any:
        """One sample, without its first dimension."""
        return self._map(lambda column: _leaf(column[index], column) if _is_tensor(column) else column[index])

    def _map(self, function: Callable[[Any], Any]) -> Any:
        samples = len(self)
        return map_tensors(function, self.data, lambda item: _is_tensor(item) or has_a_row_each(item, samples))


@dataclass(frozen=True)
class Samples:
    """A list with one entry a sample, of any shapes."""

    data: Sequence[Any]

    def __len__(self) -> int:
        return len(self.data)

    def slice(self, start: int, stop: int) -> Any:
        """Samples `start` up to `stop`, as a list."""
        return [self.sample(index) for index in range(start, stop)]

    def held(self, start: int, stop: int) -> list[Any]:
        """What samples `start` up to `stop` are read from, itself."""
        return list(self.data[start:stop])

    def sample(self, index: int) -> Any:
        """One sample; its tensors are leaves of the autograd graph."""
        return map_tensors(lambda tensor: _leaf(tensor, tensor), self.data[index])


def realigned(data: Columns | Samples) -> Columns | Samples:
    """The same with each tensor laid out as in shared memory, copied where it is not: dense, and starting at a
    multiple of 64 bytes.

    Matrix products of the same numbers have other bits when the numbers start elsewhere, modulo 16 bytes or more.
    """

    def lay_out(tensor: torch.Tensor) -> torch.Tensor:
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        if dense and tensor.data_ptr() % ALIGNMENT == 0:
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return type(data)(map_tensors(lay_out, data.data))


@dataclass
class Piece:
    """The data of one forward: consecutive samples, or one sample of a list.

    `indices` are within the term, which has the index `term`; the loss counts `weight` in the term's. `attributes` of
    the criterion take the place of its own.
    """

    inputs: Any
    targets: Any
    options: Sequence[Any] | None
    indices: range
    weight: float
    attributes: dict[str, Any] = field(default_factory=dict)
    term: int = 0


@dataclass(frozen=True)
class Part:
    """The data of one term: inputs, with or without targets and options (one object a sample, for the hooks), and what
    their loss is. `name`: of the term; None where it is all there is."""

    inputs: Columns | Samples
    targets: Columns | Samples | None
    options: Sequence[Any] | None
    weighting: Weighting
    collate: Collate | None = None
    criterion_rows: Mapping[str, torch.Tensor] = field(default_factory=dict)  # attributes with a row for each sample
    name: str | None = None

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.weighting.size

    def fill(self, start: int, inputs: Any, targets: Any, options: Any) -> None:
        """Put samples from `start` on where the lists of this part have holes; None for what is no list here."""
        lists: tuple[Any, ...] = (self.inputs.data, self.targets and self.targets.data, self.options)
        for whole, piece in zip(lists, (inputs, targets, options), strict=True):
            if piece is not None:
                whole[start : start + len(piece)] = piece

    def pieces(self, start: int, stop: int, collation: Collation | None = None, term: int = 0) -> Iterator[Piece]:
        """The forwards that evaluate samples `start` up to `stop`, in order.

        Columns go through one forward. A list of samples takes one forward a sample, or a single one if there is a
        `collate` function: it is given the list of `(input, target)` pairs, or of inputs where the batch has no
        targets, and returns what the module and the criterion get. That may come from `collation`, where it is kept for
        the part with the index `term`.
        """
        if isinstance(self.inputs, Columns):
            targets = self.targets.slice(start, stop) if self.targets is not None else None
            yield self._piece(self.inputs.slice(start, stop), targets, start, stop)
        elif self.collate is not None:
            found = collation or Collation()
            inputs, targets = found.of((term, start, stop), lambda: self._collated(start, stop))
            yield self._piece(inputs, targets, start, stop)
        else:
            for index in range(start, stop):
                target = self.targets.sample(index) if self.targets is not None else None
                piece = self._piece(self.inputs.sample(index), target, index, index + 1)
                piece.attributes.update({name: rows[index] for name, rows in self.criterion_rows.items()})
                yield piece

    def _collated(self, start: int, stop: int) -> tuple[Any, Any]:
        assert self.collate is not None
        if self.targets is None:
            return self.collate(self.inputs.slice(start, stop)), None
        pairs = [(self.inputs.sample(index), self.targets.sample(index)) for index in range(start, stop)]
        inputs, targets = self.collate(pairs)
        return inputs, targets

    def _piece(self, inputs: Any, targets: Any, start: int, stop: int) -> Piece:
        options = None if self.options is None else self.options[start:stop]
        attributes: dict[str, Any] = {name: rows[start:stop] for name, rows in self.criterion_rows.items()}
        if self.weighting.divided_once:
            attributes["reduction"] = "sum"
        return Piece(inputs, targets, options, range(start, stop), self.weighting.of(start, stop), attributes)


@dataclass(frozen=True)
class Batch:
    """The data of all terms, whose samples are numbered one term after the other."""

    parts: tuple[Part, ...]

    @cached_property
    def size(self) -> int:
        """Number of samples."""
        return sum(part.size for part in self.parts)

    @cached_property
    def numbering(self) -> Numbering:
        """Where the samples of each term are."""
        return Numbering(tuple(part.name for part in self.parts), tuple(part.size for part in self.parts))

    def pieces(self, start: int, stop: int, collation: Collation | None = None) -> Iterator[Piece]:
        """The forwards that evaluate samples `start` up to `stop`, in order; none has samples of two terms."""
        for term, samples in self.numbering.split(range(start, stop)):
            for piece in self.parts[term].pieces(samples.start, samples.stop, collation, term):
                piece.term = term
                yield piece

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those of the inputs and the targets."""
        for part in self.parts:
            for form in (part.inputs, part.targets):
                if form is not None:
                    yield from tensors_in(form.data)

    def realigned(self) -> Batch:
        """The same with inputs and targets laid out as in shared memory."""
        return Batch(
            tuple(
                replace(
                    part,
                    inputs=realigned(part.inputs),
                    targets=None if part.targets is None else realigned(part.targets),
                )
                for part in self.parts
            )
        )
