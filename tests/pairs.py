"""Products of many factors, of which each change runs some cases: each pair of values is among them. The others are
for the nightly run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Row = tuple[Hashable, ...]
Marks = Collection[pytest.MarkDecorator]


def covering(rows: Iterable[Row]) -> list[Row]:
    """Some of the rows, in their order, in which each pair of values that any row has is found; chosen one by one, each
    with the most pairs that are lacking."""
    left = list(dict.fromkeys(rows))
    order, found, seen = {row: i for i, row in enumerate(left)}, [], set[object]()
    while left:
        best = max(left, key=lambda row: len(_pairs(row) - seen))
        if not _pairs(best) - seen:
            break
        seen |= _pairs(best)
        found.append(best)
        left.remove(best)
    return sorted(found, key=order.__getitem__)


def _pairs(row: Row) -> set[object]:
    return {*combinations(enumerate(row), 2)} if len(row) > 1 else {*enumerate(row)}


def paired(rows: Iterable[Row], marks: Callable[[Row], Marks] = lambda row: ()) -> list[Any]:
    """All rows as parameters of a test, with these marks; those that no pair needs are nightly."""
    kept: Sequence[Row] = list(rows)
    needed = set(covering(kept))
    return [pytest.param(*row, marks=[*marks(row), *[pytest.mark.nightly] * (row not in needed)]) for row in kept]
