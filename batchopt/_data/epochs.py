"""Batches: the data of an objective, batch after batch and epoch after epoch, with a position that can be saved."""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from batchopt._data import arguments
from batchopt._data.batches import as_tensors, samples_of
from batchopt._data.prefetch import to_the_end
from batchopt_workers.batch.items import Collate
from batchopt_workers.wire.structures import has_a_row_each, items_of, map_tensors


class EpochBatch(NamedTuple):
    """A batch of an epoch: its `number` there, and whether it is the last one."""

    epoch: int
    number: int
    last: bool
    batch: Any


class Source(Protocol):
    """The batches of each epoch."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    def read(self, epoch: int, start: int) -> Iterator[tuple[Any, bool]]:
        """Yield those of an epoch from number `start` on, and whether each is the last one."""

    def rows(self, epoch: int, index: int) -> Sequence[int] | None:
        """Return the samples of the data in batch `index` of an epoch; None if unknown."""

    def done(self, index: int) -> float:
        """Return the fraction of an epoch before batch number `index`."""

    def identity(self) -> dict[str, int]:
        """Return what must be the same for a position to have the same meaning, by name."""


class Batches:
    """Batches of `data`, in an order that depends on `seed` and the epoch alone.

    Each iteration goes to the end of the current epoch; after a break, the next one resumes there. No generator of
    torch, NumPy or `random` is used or changed.

    Args:
        data: a tensor or a NumPy array, or tuples or mappings of them, whose first dimension is the sample; a map-style
            `torch.utils.data.Dataset`; a list of samples; or a loader: anything else that can be iterated over
            repeatedly, and yields batches, such as a `DataLoader`.
        batch_size: samples per batch. Default: all data is one batch.
        shuffle: draw a new order for each epoch. Default: the order of the data.
        seed: of these orders.
        drop_last: omit a last batch of fewer samples.
        collate_fn: makes a batch of a list of samples, for lists (default: torch's `default_collate`) and datasets.
            Without it a batch of a Dataset is a `torch.utils.data.Subset`, whose samples the workers read.
        source: a `batchopt.extending.Source`, in place of all of these: it makes the batches of each epoch.

    A loader makes its own batches, and the other arguments must be omitted. A position in its epoch is restored by
    reading and skipping, with a warning, and is the same one only if the loader's order is. Raises `TypeError` or
    `ValueError` for anything else.

    **Position.** It counts finished batches. In a plain loop a batch is finished when it is passed to the loop's body:
    so save after the step, not before. `BatchOptimizer.steps` and `prepared` read ahead; there a batch is finished when
    it was stepped on (or loaded, or when the loop continues without it). Batches that were only read ahead, and failed
    steps, do not count.

    >>> batches = batchopt.Batches(torch.arange(10), batch_size=4)
    >>> [len(batch) for batch in batches]
    [4, 4, 2]
    >>> batches
    Batches(length=10, batch_size=4, shuffle=0, seed=0, drop_last=0; at batch 0 of epoch 1)
    """

    def __init__(
        self,
        data: Any = None,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        source: Source | None = None,
    ) -> None:
        given = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        for name, value in given.items():
            arguments.read(name, value)
        arguments.check_callable("collate_fn", collate_fn)
        others = {**given, "collate_fn": collate_fn}
        if source is not None:
            _refuse({"data": data is not None, **others}, f"`source` ({type(source).__name__})", "leave it out")
            self._source = source
        elif (found := _picking(data, collate_fn)) is not None:
            self._source = _Cut(*found, batch_size, seed if shuffle else None, drop_last)
        else:
            instead = "leave it out, or give the loader's data (loader.dataset) in its place"
            _refuse(others, f"a loader ({type(data).__name__})", instead)
            self._source = LoaderSource(data)
        self._epoch = self._index = self._iteration = 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch; raise `TypeError` for a loader without a length."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        for turn in self.turns():
            self.finish(turn)
            yield turn.batch

    def __repr__(self) -> str:
        made = ", ".join(f"{name}={value}" for name, value in self._source.identity().items())
        return f"Batches({made}; at batch {self._index} of epoch {self._epoch})"

    def turns(self) -> Iterator[EpochBatch]:
        """Yield the batches from the current position to the end of the epoch, without marking them as finished."""
        epoch, start = self._epoch, self._index
        for index, (batch, last) in enumerate(self._source.read(epoch, start), start):
            yield EpochBatch(epoch, index, last, batch)

    def finish(self, turn: EpochBatch) -> None:
        """Count this batch. Raise `RuntimeError` if it is not the next one: then something else moved the position."""
        if (turn.epoch, turn.number) != (self._epoch, self._index):
            raise RuntimeError(
                f"batch {turn.number} of epoch {turn.epoch} is not the next one: these Batches are at batch "
                f"{self._index} of epoch {self._epoch}, for another iteration or load_state_dict() has moved them; "
                "begin a new iteration"
            )
        self._iteration += 1
        self._epoch, self._index = (turn.epoch + 1, 0) if turn.last else (turn.epoch, turn.number + 1)

    def rows(self, turn: EpochBatch) -> Sequence[int] | None:
        """Return the samples of the data in this batch; None if unknown."""
        return self._source.rows(turn.epoch, turn.number)

    def whole(self) -> Iterator[Any]:
        """Yield all batches of the current epoch, regardless of the position, which stays."""
        for batch, _ in self._source.read(self._epoch, 0):
            yield batch

    @property
    def source(self) -> Source:
        """Makes the batches of each epoch."""
        return self._source

    # ---- position

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._epoch

    @property
    def iteration(self) -> int:
        """Number of finished batches, in all epochs."""
        return self._iteration

    @property
    def is_new_epoch(self) -> bool:
        """Tell whether the last finished batch was the last one of its epoch."""
        return self._iteration > 0 and self._index == 0

    @property
    def epoch_detail(self) -> float:
        """Number of finished epochs, including the finished part of the current one (by samples; for a loader by
        batches). Raises `TypeError` in an epoch of a loader without a length."""
        return self._detail(self._epoch, self._index)

    @property
    def previous_epoch_detail(self) -> float | None:
        """`epoch_detail` before the last finished batch; None before the first one."""
        if self._iteration == 0:
            return None
        if self._index > 0:
            return self._detail(self._epoch, self._index - 1)
        return self._detail(self._epoch - 1, len(self._source) - 1)

    def _detail(self, epoch: int, index: int) -> float:
        return epoch + (self._source.done(index) if index else 0.0)

    def state_dict(self) -> dict[str, int]:
        """Return the position, and what it depends on of the data and the order: a dict of ints."""
        position = {"epoch": self._epoch, "index": self._index, "iteration": self._iteration}
        return {**position, **self._source.identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the point at which `state_dict` was called. An iteration that has begun cannot continue.

        Raise `ValueError` for a state of data of another length, or of another batch size, seed, shuffle or drop_last,
        and for anything but a state. Then nothing was changed.
        """
        identity = self._source.identity()
        expected = {"epoch", "index", "iteration", *identity}
        if not isinstance(state, Mapping) or set(state) != expected:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"a state of these Batches has the entries {sorted(expected)}; got {found}")
        for name, mine in identity.items():
            if state[name] != mine:
                raise ValueError(f"`{name}` was {state[name]!r} where this state was saved, and is {mine!r} here")
        position = [arguments.read_count_of_state(name, state[name]) for name in ("epoch", "index", "iteration")]
        if "length" in identity and position[1] >= len(self):
            raise ValueError(
                f"`index` of a state must be less than the {len(self)} batches of an epoch, got {position[1]}: it is "
                "none that state_dict() returned"
            )
        self._epoch, self._index, self._iteration = position


class _Cut:
    """Batches of `size` samples; `pick(indices)` creates one. `seed` None: in order."""

    def __init__(
        self, samples: int, pick: Callable[[Any], Any], size: int | None, seed: int | None, drop_last: bool
    ) -> None:
        if samples == 0:
            raise ValueError("`data` has 0 samples")
        self._size = samples if size is None else size
        if drop_last and samples < self._size:
            raise ValueError(
                f"`data` has {samples} samples, fewer than `batch_size`, and drop_last=True leaves them out"
            )
        self._samples, self._pick, self._seed, self._drop_last = samples, pick, seed, drop_last
        self._used = samples // self._size * self._size if drop_last else samples

    def __len__(self) -> int:
        return -(-self._used // self._size)

    def read(self, epoch: int, start: int) -> Iterator[tuple[Any, bool]]:
        order = None if self._seed is None else permutation(self._samples, self._seed, epoch)
        for index in range(start, len(self)):
            first = index * self._size
            last = min(first + self._size, self._used)
            yield self._pick(range(first, last) if order is None else order[first:last]), last == self._used

    def rows(self, epoch: int, index: int) -> Sequence[int]:
        rows = range(self._samples) if self._seed is None else permutation(self._samples, self._seed, epoch).tolist()
        return rows[index * self._size : min((index + 1) * self._size, self._used)]

    def done(self, index: int) -> float:
        return index * self._size / self._used

    def identity(self) -> dict[str, int]:
        order = {"shuffle": int(self._seed is not None), "seed": self._seed or 0, "drop_last": int(self._drop_last)}
        return {"length": self._samples, "batch_size": self._size, **order}


class LoaderSource:
    """The batches of the user's loader, one iteration per epoch; it reads one batch ahead, to detect the last."""

    def __init__(self, loader: Any) -> None:
        if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
            reason = "can be iterated over once only" if isinstance(loader, Iterator) else "cannot be iterated over"
            raise TypeError(
                f"`data` must be tensors, arrays, a Dataset, a list of samples or a loader; got "
                f"{type(loader).__name__}, which {reason}"
            )
        self.loader: Iterable[Any] = loader

    def batches(self) -> Iterator[Any]:
        """Begin an iteration. Raises `RuntimeError` where an item of the dataset raises StopIteration."""
        return to_the_end(iter(self.loader))

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"the loader ({type(self.loader).__name__}) has no length")
        return len(self.loader)

    def read(self, epoch: int, start: int) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of an epoch from number `start` on, and whether each is the last one."""
        if start:
            warnings.warn(
                f"going on in epoch {epoch} of a loader ({type(self.loader).__name__}): its first {start} batches are "
                "read and skipped, and are those of before only if its order is the same; "
                "Batches(dataset, batch_size, shuffle=True, seed=...) goes on exactly",
                UserWarning,
                stacklevel=2,
            )
        batches = self.batches()
        nothing = object()
        for _ in range(start):
            next(batches, nothing)
        batch = next(batches, nothing)
        if batch is nothing:
            has = f"has no batch {start}" if start else "is empty"
            raise ValueError(f"the loader ({type(self.loader).__name__}) {has} in epoch {epoch}")
        while batch is not nothing:
            following = next(batches, nothing)
            yield batch, following is nothing
            batch = following

    def rows(self, epoch: int, index: int) -> None:
        """Return None: it is unknown which samples a loader's batch has."""

    def done(self, index: int) -> float:
        """Return the fraction of an epoch before batch number `index`."""
        return index / len(self)

    def identity(self) -> dict[str, int]:
        """Return the length, if there is one."""
        try:
            return {"length": len(self)}
        except TypeError:  # the DataLoader of an IterableDataset raises only when called
            return {}


def _refuse(others: Mapping[str, Any], what: str, instead: str) -> None:
    """Raise `ValueError` if one of these was given beside what makes its own batches."""
    for name, value in others.items():
        if value:
            raise ValueError(f"`{name}` cannot be given for {what}, which makes its own batches: {instead}")


def permutation(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of an epoch (shape `(samples,)`, int64): a function of the arguments alone."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % 2**64, epoch), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randperm(samples, generator=generator, device="cpu", dtype=torch.int64)


def _picking(data: Any, collate: Collate | None) -> tuple[int, Callable[[Any], Any]] | None:
    """Return the number of samples in `data`, and a function for a batch of some of them; None for a loader."""
    if isinstance(data, TensorDataset) and collate is None:
        data = data.tensors
    if isinstance(data, Dataset):
        samples = samples_of(data)
        return samples, _reading(data, collate) if collate is not None else lambda indices: _subset(data, indices)
    if isinstance(data, list):
        return len(data), _reading(data, collate or default_collate)
    columns = [column for _, column in _columns("data", data)]
    if not columns:
        return None
    if collate is not None:
        raise ValueError("`collate_fn` is for lists of samples and datasets; tensors and arrays are cut as they are")
    return len(columns[0]), lambda indices: _rows(data, len(columns[0]), indices)


def _reading(data: Any, collate: Collate) -> Callable[[Any], Any]:
    return lambda indices: collate([data[int(i)] for i in indices])


def _subset(data: Dataset[Any], indices: Sequence[int] | torch.Tensor) -> Dataset[Any]:
    if isinstance(indices, torch.Tensor):
        return Subset(data, indices.tolist())
    return data if len(indices) == samples_of(data) else Subset(data, indices)


def _is_array(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, np.ndarray))


def _columns(path: str, data: Any) -> list[tuple[str, Any]]:
    """Return the tensors and arrays in `data` with their paths. Raise `ValueError` unless they are equally long."""
    found: list[tuple[str, Any]] = [(path, data)] if _is_array(data) else []
    for key, item in () if found else items_of(data):
        found += _columns(f"{path}[{key!r}]", item)
    for name, column in found:
        if not column.ndim:
            raise ValueError(f"`{name}` has no dimension of samples")
        if len(column) != len(found[0][1]):
            raise ValueError(f"`{found[0][0]}` has {len(found[0][1])} samples but `{name}` has {len(column)}")
    return found


def _rows(data: Any, samples: int, indices: range | torch.Tensor) -> Any:
    """Return these samples of columns, in the same structure: views if they are contiguous."""

    def pick(column: Any) -> Any:
        if isinstance(indices, range):
            return column[indices.start : indices.stop]
        if isinstance(column, torch.Tensor):
            return column[indices.to(column.device)]
        if isinstance(column, np.ndarray):
            return column[indices.numpy()]
        return type(column)(column[i] for i in indices.tolist())

    return as_tensors(map_tensors(pick, data, lambda item: _is_array(item) or has_a_row_each(item, samples)))
