"""Prefetching: the next batch is read while the workers compute on the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from traceback import walk_tb
from typing import Any, Generic, TypeVar

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from batchopt_workers.wire.failures import let_through

T = TypeVar("T")

# Code that reads items of a map-style dataset, here or in a loader's worker: the data cannot end in there.
_READING = {_MapDatasetFetcher.fetch.__code__, ExceptionWrapper.reraise.__code__}


def to_the_end(batches: Iterator[T]) -> Iterator[T]:
    """Yield the batches up to their end. Raise `RuntimeError`, as PEP 479 does, if StopIteration comes out of an item
    that a torch loader reads: it would end the data there."""
    while True:
        try:
            batch = next(batches)
        except StopIteration as error:
            if any(frame.f_code in _READING for frame, _ in walk_tb(error.__traceback__)):
                raise RuntimeError("StopIteration was raised by an item of the loader's dataset") from error
            return
        yield batch


class Ahead(Generic[T]):
    """Iterates over `prepare(item)` of each item of `source`; `fetch` does so for the next one in advance.

    Exceptions of `source` or `prepare` are raised when their item is due.
    """

    def __init__(self, source: Iterable[Any], prepare: Callable[[Any], T]) -> None:
        self._source = iter(source)
        self._prepare = prepare
        self._next: T | None = None
        self._over = False
        self._error: Exception | None = None  # that ended it

    def fetch(self) -> None:
        """Prepare the next one, unless that is done."""
        if self._next is None and not self._over:
            try:
                item = next(self._source)
            except StopIteration:
                self._over = True
                return
            except Exception as error:
                let_through(error)
                self._over, self._error = True, error
                return
            try:
                self._next = self._prepare(item)
            except StopIteration as error:  # as PEP 479: otherwise it would end the data here
                self._over, self._error = True, RuntimeError("StopIteration was raised while a batch was read")
                self._error.__cause__ = error
            except Exception as error:
                let_through(error)
                self._over, self._error = True, error

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self.fetch()
        found, self._next = self._next, None
        if found is not None:
            return found
        error, self._error = self._error, None
        try:
            raise StopIteration if error is None else error
        finally:
            del error  # breaks the cycle traceback -> frame -> batch


def as_batch_of_terms(batch: Any) -> tuple[Any, Any, Any]:
    """Return the arguments as `as_arguments`, with terms: a loader yields a dict, with a tuple or list of one to three
    for each term, or its inputs alone."""
    if not isinstance(batch, Mapping):
        return batch, None, None
    return {name: as_arguments(entry) for name, entry in batch.items()}, None, None


def as_arguments(batch: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and options of a loader's batch: a tuple or list of one to three, or the inputs alone. In
    a list, as torch's `default_collate` makes one, lists of tensors are columns, which it has made of tuples.

    Raise `ValueError` for a longer one.
    """
    if not isinstance(batch, (tuple, list)) or hasattr(batch, "_fields"):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise ValueError(
            f"a batch must be (inputs,), (inputs, targets) or (inputs, targets, options); got {len(batch)} items. "
            "Lists of samples are inputs or targets themselves: of pairs, with the DataLoader's collate_fn=lambda "
            "pairs: tuple(map(list, zip(*pairs))); of inputs alone (graphs), with collate_fn=lambda samples: "
            "(samples,)"
        )
    if isinstance(batch, list):
        batch = [tuple(item) if isinstance(item, list) and all(map(torch.is_tensor, item)) else item for item in batch]
    inputs, targets, options = (*batch, None, None)[:3]
    return inputs, targets, options
