"""The numbering of the samples of several terms: one index for all, so that a run of chunks is a range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Numbering:
    """All samples of the first term, then those of the next. `names` and `sizes` are those of the terms, in order; the
    only term of a batch without terms has no name."""

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
        """Where `samples` of a term are in the batch."""
        first = sum(self.sizes[:term])
        return range(first + samples.start, first + samples.stop)

    def within(self, samples: range) -> dict[str, range]:
        """The positions of `samples` within the terms, by name; empty for a batch without terms."""
        parts = ((self.names[term], part) for term, part in self.split(samples))
        return {name: part for name, part in parts if name is not None}
