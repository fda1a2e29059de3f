"""How the samples of several terms are numbered through, so that a run of chunks is a range of one index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Numbering:
    """First all samples of the first term, then those of the next. `names` and `sizes` of the terms, in order; the one
    term of a batch without terms has no name."""

    names: tuple[str | None, ...]
    sizes: tuple[int, ...]

    def split(self, samples: range) -> Iterator[tuple[int, range]]:
        """Each term, by its index, that has some of `samples`; and which these are within it."""
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
