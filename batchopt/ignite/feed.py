"""The data of an engine: batches that are read and placed while the workers compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from batchopt._data.epochs import Batches, Turn
from batchopt._data.prefetch import to_the_end
from batchopt._function.prepared import PreparedBatch
from batchopt.optimizer import BatchOptimizer

# Converts what a loader yields to an argument of `opt.step`.
Prepare = Callable[[Any], Any]


class Feed:
    """An iterable over `opt.prepared(data)`; with `Batches`, over the remaining epoch."""

    def __init__(self, opt: BatchOptimizer, data: Iterable[Any], prepare: Prepare | None) -> None:
        self._opt = opt
        self.batches = data if isinstance(data, Batches) else None
        self.data = data if prepare is None else _converted(data, prepare)
        self._present: Iterator[PreparedBatch] | None = None

    def __iter__(self) -> Iterator[PreparedBatch]:
        self.close()
        self._present = self._opt.prepared(self.data)
        return self._present

    def __len__(self) -> int:
        """Return the number of batches in an epoch; raise `TypeError` if unknown."""
        return len(self.data)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the current iteration, and reading ahead with it."""
        present, self._present = self._present, None
        if present is not None:
            present.close()  # type: ignore[attr-defined]  # it is a generator


def _converted(data: Iterable[Any], prepare: Prepare) -> Iterable[Any]:
    return _ConvertedBatches(data, prepare) if isinstance(data, Batches) else _Converted(data, prepare)


class _Converted:
    """The batches, converted."""

    def __init__(self, data: Iterable[Any], prepare: Prepare) -> None:
        self._data, self._prepare = data, prepare

    def __iter__(self) -> Iterator[Any]:
        return (self._prepare(batch) for batch in to_the_end(iter(self._data)))  # no map(): see PEP 479

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]


class _ConvertedBatches(Batches):
    """The converted batches of other `Batches`, with their position."""

    def __init__(self, batches: Batches, prepare: Prepare) -> None:
        self._batches, self._prepare = batches, prepare

    def __len__(self) -> int:
        return len(self._batches)

    def turns(self) -> Iterator[Turn]:
        """Return the remaining turns of the epoch."""
        return (turn._replace(batch=self._prepare(turn.batch)) for turn in self._batches.turns())

    def finish(self, turn: Turn) -> None:
        """Count this batch in the original `Batches`."""
        self._batches.finish(turn)

    def rows(self, turn: Turn) -> Sequence[int] | None:
        """Return the indices of this batch's samples in the data."""
        return self._batches.rows(turn)

    def whole(self) -> Iterator[Any]:
        """Return all batches of the current epoch."""
        return (self._prepare(batch) for batch in self._batches.whole())
