"""The fixed binary tree along which the partials of chunks are merged.

Floating-point sums depend on their order. Here the order depends only on a binary tree over the chunk index: node
`(level, position)` stands for chunks `position * 2**level` up to `(position + 1) * 2**level`, and is its left child
plus its right child. Any process that holds both children may merge them, in whatever order they came, and the root has
the same bits. A node whose sibling lies past the last chunk is its own parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A place in the tree; chunk `i` is the leaf `Node(0, i)`."""

    level: int
    position: int

    @property
    def parent(self) -> Node:
        """The node one level up."""
        return Node(self.level + 1, self.position >> 1)

    @property
    def first_chunk(self) -> int:
        """The first chunk below this node."""
        return self.position << self.level

    def chunks(self, count: int) -> int:
        """Return how many of `count` chunks are below this node."""
        return min((self.position + 1) << self.level, count) - self.first_chunk


# A node from a pair, without a call of Python's: several times an evaluation.
_node: Callable[[tuple[int, int]], Node] = partial(tuple.__new__, Node)


class Fold(Generic[T]):
    """Partials of some of `count` chunks, merged as far as the tree allows.

    `merge(left, right)` returns the merged partial; it may reuse the memory of either (a worker that adds chunks in
    order reuses that of `right`, which was not reported). Chunks added in order leave at most about `2 * log2(count)`
    partials unmerged.
    """

    def __init__(self, count: int, merge: Callable[[T, T], T]) -> None:
        self._count = count
        self._merge = merge
        self._root = Node(max(count - 1, 0).bit_length(), 0)
        self._top = self._root.level
        self.held: dict[Node, T] = {}

    def add(self, node: tuple[int, int], partial: T) -> None:
        """Add the partial of `node`, and merge upwards while the sibling is held."""
        level, position = node
        while level < self._top:
            sibling = position ^ 1
            if sibling << level < self._count:
                key = level, sibling
                if key not in self.held:
                    break
                other = self.held.pop(key)
                partial = self._merge(other, partial) if position & 1 else self._merge(partial, other)
            level, position = level + 1, position >> 1
        self.held[_node((level, position))] = partial

    def __len__(self) -> int:
        return len(self.held)

    @property
    def partials(self) -> list[tuple[Node, T]]:
        """The partials held now, in chunk order: the root alone once every chunk was added."""
        if len(self.held) == 1:
            return [*self.held.items()]
        return sorted(self.held.items(), key=lambda item: item[0].first_chunk)

    @property
    def is_complete(self) -> bool:
        """Tell whether every chunk was added."""
        return self._root in self.held

    @property
    def root(self) -> T:
        """The total; raises `LookupError` while chunks are missing."""
        if self._root not in self.held:
            raise LookupError("the partials of some chunks are missing")
        return self.held[self._root]


@lru_cache(maxsize=1024)
def most_held(first: int, last: int, count: int, held: tuple[Node, ...] = ()) -> int:
    """Return the largest number of partials, including the one being evaluated, while a worker that holds `held`
    evaluates chunks `first` up to `last` of `count` in order: the rows that it needs."""
    fold: Fold[None] = Fold(count, lambda left, right: None)
    for node in held:
        fold.add(node, None)
    most = 0
    for chunk in range(first, last):
        most = max(most, len(fold) + 1)
        fold.add(Node(0, chunk), None)
    return most


def maximal(nodes: Iterable[Node], count: int) -> set[Node]:
    """Return those of `nodes` (of a tree over `count` chunks) that lie below no other. Each chunk is below at most one
    of them: of two nodes one contains the other, or they are disjoint."""
    top = max(count - 1, 0).bit_length()
    kept: set[Node] = set()
    for node in sorted(set(nodes), reverse=True):
        ancestor = node
        while ancestor.level < top and ancestor not in kept:
            ancestor = ancestor.parent
        if ancestor not in kept:
            kept.add(node)
    return kept
