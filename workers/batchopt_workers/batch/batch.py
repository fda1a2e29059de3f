"""The data of an objective of one or more terms, and how chunks are cut out of it.

On a machine that evaluates only some samples, parts have the rows of these alone; samples keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import gcd
from typing import Any, TypeVar, cast

import numpy as np
import torch

from batchopt_workers.batch.collation import Collation
from batchopt_workers.batch.items import Collate, Items
from batchopt_workers.batch.weighting import SAMPLE_WEIGHT, Weighting
from batchopt_workers.wire.memory import ALIGNMENT
from batchopt_workers.wire.packing import can_be_placed, placed_stride
from batchopt_workers.wire.structures import has_a_row_each, holds_rows, is_tensor, map_tensors, tensors_in


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return _leaf(tensor[start:stop], tensor) if tensor.requires_grad else tensor[start:stop]


def _joined(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Return the rows of both, with dimensions in the order in memory that they have."""
    order = sorted(range(one.dim()), key=max(one, two, key=len).stride, reverse=True)
    whole = torch.empty_permuted((len(one) + len(two), *one.shape[1:]), order, dtype=one.dtype, device="cpu")
    with torch.no_grad():
        whole[: len(one)], whole[len(one) :] = one, two
    return whole.requires_grad_(one.requires_grad)


def _leaf(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return part.detach().requires_grad_(whole.requires_grad)


@dataclass(frozen=True)
class Columns:
    """Tensors whose first dimension is the sample: a tensor, or tuples, lists, mappings and dataclasses of them. Nested
    lists, tuples and arrays without tensors, if they are as long as the batch, also have one entry per sample; anything
    else belongs to every sample."""

    data: Any

    def __len__(self) -> int:
        first = self.data if type(self.data) is torch.Tensor else next(tensors_in(self.data))
        return first.shape[0]

    def slice(self, start: int, stop: int) -> Any:
        """Return samples `start` up to `stop`, in the same structure; views, and leaves of the autograd graph."""
        if type(self.data) is torch.Tensor and not self.data.requires_grad:
            return self.data[start:stop]
        return self._map(lambda column: _rows(column, start, stop) if is_tensor(column) else column[start:stop])

    def held(self, start: int, stop: int) -> list[Any]:
        """Return the objects that samples `start` up to `stop` are read from."""
        return [self.data]

    def cut(self, start: int, stop: int) -> Columns:
        """Return these samples as columns of their own."""
        return Columns(self.slice(start, stop))

    def picked(self, indices: Sequence[int]) -> Columns:
        """Return the samples at these indices as columns of their own."""

        def pick(column: Any) -> Any:
            if is_tensor(column):
                return _leaf(column[list(indices)], column)
            return column[list(indices)] if isinstance(column, np.ndarray) else type(column)(column[i] for i in indices)

        return Columns(self._map(pick))

    def joined(self, more: Columns) -> Columns:
        """Return the same with the rows of others of this structure behind them."""
        others = tensors_in(more.data)
        return Columns(map_tensors(lambda tensor: _joined(tensor, next(others)), self.data))

    def sample(self, index: int) -> Any:
        """Return one sample, without its first dimension."""
        return self._map(lambda column: _leaf(column[index], column) if is_tensor(column) else column[index])

    def _map(self, function: Callable[[Any], Any]) -> Any:
        samples = len(self)
        return map_tensors(function, self.data, lambda item: is_tensor(item) or has_a_row_each(item, samples))


@dataclass(frozen=True)
class Samples:
    """A list with one entry per sample, of any shapes."""

    data: Sequence[Any]

    def __len__(self) -> int:
        return len(self.data)

    def slice(self, start: int, stop: int) -> Any:
        """Return samples `start` up to `stop`, as a list."""
        return [self.sample(index) for index in range(start, stop)]

    def held(self, start: int, stop: int) -> list[Any]:
        """Return the objects that samples `start` up to `stop` are read from."""
        return list(self.data[start:stop])

    def cut(self, start: int, stop: int) -> Samples:
        """Return these samples as a list of their own."""
        return Samples(self.held(start, stop))

    def picked(self, indices: Sequence[int]) -> Samples:
        """Return the samples at these indices as a list of their own."""
        return Samples([self.data[index] for index in indices])

    def joined(self, more: Samples) -> Samples:
        """Return these samples and then the others."""
        return Samples([*self.data, *more.data])

    def sample(self, index: int) -> Any:
        """Return one sample; its tensors are leaves of the autograd graph."""
        return map_tensors(lambda tensor: _leaf(tensor, tensor), self.data[index])


Form = Columns | Samples | Items
F = TypeVar("F", bound=Form)


def realigned(data: F) -> F:
    """Return the data with each tensor laid out as in shared memory, copied only if necessary: dense, and starting at a
    multiple of 64 bytes. Items are laid out when they are read.

    Matrix products of the same numbers have other bits if the numbers start elsewhere, modulo 16 bytes or more.
    """

    def lay_out(tensor: torch.Tensor) -> torch.Tensor:
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        if dense and tensor.data_ptr() % ALIGNMENT == 0:
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return data if isinstance(data, Items) else replace(data, data=map_tensors(lay_out, data.data))


@dataclass
class Piece:
    """The data of one forward: consecutive samples, or one sample of a list.

    `indices` are within the term with the index `term`; the loss has the weight `weight` in the term's. `attributes`
    replace those of the criterion; the weights of samples are among them. `kept`: it may be cached until the next
    evaluation.
    """

    inputs: Any
    targets: Any
    options: Sequence[Any] | None
    indices: range
    weight: float
    attributes: dict[str, Any] = field(default_factory=dict)
    term: int = 0
    kept: bool = True

    @property
    def sample_weight(self) -> torch.Tensor | None:
        """The weights of the samples, if they have any: shape `(samples,)`, or `()` for one sample of a list."""
        return self.attributes.get(SAMPLE_WEIGHT)


@dataclass(frozen=True)
class Part:
    """The data of one term: inputs, with or without targets and options (one object per sample, for the hooks), and the
    meaning of their loss. Items include their targets. `name`: of the term; None if there are no terms."""

    inputs: Form
    targets: Columns | Samples | None
    options: Sequence[Any] | None
    weighting: Weighting
    collate: Collate | None = None
    # attributes of the criterion with a row for each sample, and the weights of the samples
    criterion_rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    name: str | None = None
    first: int = 0  # the sample that the first row is of; rows of those before it, and of the last ones, may lack

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.weighting.size

    @property
    def one_by_one(self) -> bool:
        """Tell whether each sample takes a forward of its own."""
        return not isinstance(self.inputs, Columns) and self.collate is None

    # ---- a part with the rows of some samples

    @cached_property
    def _step(self) -> int:
        """The number of rows after which tensors begin at the same place modulo `ALIGNMENT` bytes, on which the bits of
        matrix products depend; 0 if rows cannot be cut: those of a dataset, or beside which there are lists."""
        if isinstance(self.inputs, Items):
            return 0
        tensors = [*self.criterion_rows.values()]
        for form in (self.inputs, self.targets):
            if isinstance(form, Columns):
                if holds_rows(form.data):
                    return 0
                tensors += tensors_in(form.data)
        if not all(map(can_be_placed, tensors)):
            return 0
        return max([ALIGNMENT // gcd(ALIGNMENT, placed_stride(t)[0] * t.element_size()) for t in tensors], default=1)

    def rows_for(self, samples: range) -> range:
        """Return the samples whose rows a machine needs that evaluates `samples`: more than these where columns would
        begin at other places in memory, and all where they cannot be cut."""
        step = self._step
        if not step:
            return range(self.size)
        if not samples:
            return range(0)
        return range(samples.start // step * step, self.size - (self.size - samples.stop) // step * step)

    def cut(self, samples: range) -> Part:
        """Return the part with the rows of `samples` alone (see `rows_for`)."""
        if len(samples) == self.size or isinstance(self.inputs, Items) or not self._step:
            return self
        start, stop = samples.start, samples.stop
        return replace(
            self,
            inputs=self.inputs.cut(start, stop),
            targets=None if self.targets is None else self.targets.cut(start, stop),
            options=None if self.options is None else self.options[start:stop],
            criterion_rows={name: rows[start:stop] for name, rows in self.criterion_rows.items()},
            first=start,
        )

    def picked(self, samples: Sequence[int]) -> Part:
        """Return these samples, whose rows must be here, as a part of its own."""
        rows = [sample - self.first for sample in samples]
        return replace(
            self,
            inputs=self.inputs.picked(rows),
            targets=None if self.targets is None else self.targets.picked(rows),
            options=None if self.options is None else [self.options[row] for row in rows],
            weighting=self.weighting.picked(samples),
            criterion_rows={name: column[rows] for name, column in self.criterion_rows.items()},
            first=0,
        )

    def joined(self, more: Part) -> Part:
        """Return the part with the rows of `more`, too, which are those of the samples before or behind."""
        is_first = bool(len(cast(Columns, self.inputs))) and self.first < more.first
        one, two = (self, more) if is_first else (more, self)
        return replace(
            self,
            inputs=cast(Columns, one.inputs).joined(cast(Columns, two.inputs)),
            targets=None if one.targets is None else cast(Columns, one.targets).joined(cast(Columns, two.targets)),
            options=None if one.options is None or two.options is None else [*one.options, *two.options],
            criterion_rows={name: _joined(rows, two.criterion_rows[name]) for name, rows in one.criterion_rows.items()},
            first=one.first,
        )

    # ---- forwards

    def pieces(self, start: int, stop: int, collation: Collation | None = None, term: int = 0) -> Iterator[Piece]:
        """Yield the forwards that evaluate samples `start` up to `stop`, in order.

        Columns go through one forward, and so do items, which are read and collated. A list of samples takes one
        forward per sample, or a single one if there is a `collate` function: it is passed the list of `(input, target)`
        pairs, or of inputs if the batch has no targets, and returns the arguments of the module and the criterion. The
        result may come from `collation`, where it is cached for the part with the index `term`.
        """
        first = self.first
        if isinstance(self.inputs, Columns):
            targets = self.targets.slice(start - first, stop - first) if self.targets is not None else None
            yield self._piece(self.inputs.slice(start - first, stop - first), targets, start, stop)
        elif isinstance(self.inputs, Items):
            yield self._read(self.inputs, start, stop, collation or Collation(keeps=False), term)
        elif self.collate is not None:
            found = collation or Collation(keeps=False)
            inputs, targets = found.of((term, start, stop), lambda: self._collated(start, stop))
            yield self._piece(inputs, targets, start, stop)
        else:
            for index in range(start, stop):
                target = self.targets.sample(index - first) if self.targets is not None else None
                piece = self._piece(self.inputs.sample(index - first), target, index, index + 1)
                piece.attributes.update({name: rows[index - first] for name, rows in self.criterion_rows.items()})
                yield piece

    def _read(self, items: Items, start: int, stop: int, collation: Collation, term: int) -> Piece:
        inputs, targets = collation.of((term, start, stop), partial(self._items, items, start, stop), items.cache)
        piece = self._piece(inputs, targets, start, stop)
        piece.kept = items.cache
        if is_tensor(targets):  # only now it is known which attributes have a row for each sample
            for name, rows in self.criterion_rows.items():
                if rows.dim() < targets.dim() and name != SAMPLE_WEIGHT:
                    del piece.attributes[name]
        return piece

    def _items(self, items: Items, start: int, stop: int) -> tuple[Any, Any]:
        assert self.collate is not None
        inputs, targets = items.read(start, stop, self.collate)
        if items.denominators is not None and self.weighting.running is not None:
            items.check_denominators(inputs, targets, start, self.weighting.running)
        return inputs, targets

    def _collated(self, start: int, stop: int) -> tuple[Any, Any]:
        assert self.collate is not None and isinstance(self.inputs, Samples)
        start, stop = start - self.first, stop - self.first
        if self.targets is None:
            return self.collate(self.inputs.slice(start, stop)), None
        pairs = [(self.inputs.sample(index), self.targets.sample(index)) for index in range(start, stop)]
        inputs, targets = self.collate(pairs)
        return inputs, targets

    def _piece(self, inputs: Any, targets: Any, start: int, stop: int) -> Piece:
        here = slice(start - self.first, stop - self.first)
        options = None if self.options is None else self.options[here]
        attributes: dict[str, Any] = {name: rows[here] for name, rows in self.criterion_rows.items()}
        if self.weighting.divided_once:
            attributes["reduction"] = "sum"
        return Piece(inputs, targets, options, range(start, stop), self.weighting.of(start, stop), attributes)


@dataclass(frozen=True)
class Plain:
    """The tensors of a batch of columns: other batches of the same `form` differ in the elements of these only."""

    form: Any
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """The data of all terms, whose samples are numbered one term after the other. `plain`: its tensors, if it has
    nothing else."""

    parts: tuple[Part, ...]
    plain: Plain | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts}  # the form is used only in the process that reads the batches

    @cached_property
    def size(self) -> int:
        """Number of samples."""
        return sum([part.weighting.size for part in self.parts])

    @cached_property
    def numbering(self) -> Numbering:
        """The positions of each term's samples."""
        sizes = [part.weighting.size for part in self.parts]
        return Numbering(tuple([part.name for part in self.parts]), tuple(sizes))

    @cached_property
    def is_read(self) -> bool:
        """Tell whether samples are read by the worker that evaluates them."""
        return bool([part for part in self.parts if isinstance(part.inputs, Items)])

    @cached_property
    def is_kept(self) -> bool:
        """Tell whether samples read there are kept, as long as the cut stays the same."""
        return bool([part for part in self.parts if isinstance(part.inputs, Items) and part.inputs.cache])

    @cached_property
    def is_of_columns(self) -> bool:
        """Tell whether all inputs and targets are columns."""
        forms = [form for part in self.parts for form in (part.inputs, part.targets) if form is not None]
        return all(isinstance(form, Columns) for form in forms)

    @property
    def example(self) -> Any:
        """The inputs of the first term: as columns, or the first one of a list; None if workers read or make them."""
        inputs, collates = self.parts[0].inputs, self.parts[0].collate is not None
        if isinstance(inputs, Columns):
            return inputs.data
        return None if collates or isinstance(inputs, Items) else inputs.data[0]

    @cached_property
    def collates(self) -> bool:
        """Tell whether a function of the user collates samples of this batch."""
        return any(part.collate is not None and isinstance(part.inputs, Samples) for part in self.parts)

    def pieces(self, start: int, stop: int, collation: Collation | None = None) -> Iterator[Piece]:
        """Yield the forwards that evaluate samples `start` up to `stop`, in order; none has samples of two terms."""
        for term, samples in self.numbering.split(range(start, stop)):
            for piece in self.parts[term].pieces(samples.start, samples.stop, collation, term):
                piece.term = term
                yield piece

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield those of the inputs and the targets."""
        for part in self.parts:
            for form in (part.inputs, part.targets):
                if form is not None and not isinstance(form, Items):
                    yield from tensors_in(form.data)

    def realigned(self) -> Batch:
        """Return the batch with inputs and targets laid out as in shared memory."""
        if self.plain is not None and not any([tensor.data_ptr() % ALIGNMENT for tensor in self.plain.tensors]):
            return self
        parts = [
            replace(
                part,
                inputs=realigned(part.inputs),
                targets=None if part.targets is None else realigned(part.targets),
            )
            for part in self.parts
        ]
        return Batch(tuple(parts))


@dataclass(frozen=True)
class Numbering:
    """The numbering of samples: all of the first term, then those of the next. `names` and `sizes` are those of the
    terms, in order; the only term of a batch without terms has no name."""

    names: tuple[str | None, ...]
    sizes: tuple[int, ...]

    def split(self, samples: range) -> Iterator[tuple[int, range]]:
        """Yield `(term index, positions within that term)` for every term that overlaps `samples`."""
        first = 0
        for term, size in enumerate(self.sizes):
            part = range(max(samples.start - first, 0), min(samples.stop - first, size))
            if part:
                yield term, part
            first += size

    def position(self, term: int, samples: range) -> range:
        """Return the positions in the batch of `samples` of a term."""
        first = sum(self.sizes[:term])
        return range(first + samples.start, first + samples.stop)

    def within(self, samples: range) -> dict[str, range]:
        """Return the positions of `samples` within the terms, by name; empty for a batch without terms."""
        parts = ((self.names[term], part) for term, part in self.split(samples))
        return {name: part for name, part in parts if name is not None}
