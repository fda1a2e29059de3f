"""The comparison of two records: of all that a worker or a node must have with what it has. No input or output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def lacking(have: Any, want: Any, after: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the names of the fields that are lacking, in the order in which they are to be sent. Records are named
    tuples of one class, whose defaults are empty fields. With a field, those `after` it are dropped: they are sent
    again."""
    dropped: set[str] = set()
    for name, has, needs in zip(want._fields, have, want, strict=True):
        if has is not needs or (name in dropped and needs is not want._field_defaults[name]):
            dropped.update(after.get(name, ()))
            yield name
