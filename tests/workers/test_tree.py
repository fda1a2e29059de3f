from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt_workers.evaluate.tree import Fold, Node, maximal, most_held


def join(left: str, right: str) -> str:
    return f"({left}+{right})"


def sibling(node: Node) -> Node:
    """The node that shares this one's parent."""
    return Node(node.level, node.position ^ 1)


def reference(node: Node, count: int) -> str:
    """The expression of the tree below `node`, by recursion from the top."""
    if node.level == 0:
        return str(node.position)
    left = Node(node.level - 1, 2 * node.position)
    if sibling(left).first_chunk >= count:
        return reference(left, count)
    return join(reference(left, count), reference(sibling(left), count))


def top(count: int) -> Node:
    level = 0
    while 2**level < count:
        level += 1
    return Node(level, 0)


@st.composite
def evaluated(draw: st.DrawFn, copies: bool) -> tuple[int, list[list[int]]]:
    """Every chunk of a batch by one of up to five workers, or by one at least, in any order."""
    count = draw(st.integers(1, 40))
    workers: list[list[int]] = [[] for _ in range(draw(st.integers(1, 5)))]
    for chunk in draw(st.permutations(range(count))):
        for worker in draw(st.sets(st.integers(0, len(workers) - 1), min_size=1, max_size=None if copies else 1)):
            workers[worker].append(chunk)
    return count, workers


def fold_of(chunks: Iterable[int], count: int) -> Fold[str]:
    """What a worker holds that evaluated these chunks in this order."""
    fold = Fold(count, join)
    for chunk in chunks:
        fold.add(Node(0, chunk), str(chunk))
    return fold


@given(evaluated(copies=False), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_expression_is_the_same_whoever_evaluates_what_in_any_order(
    work: tuple[int, list[list[int]]], order: random.Random
) -> None:
    count, workers = work
    arrivals = [partial for chunks in workers for partial in fold_of(chunks, count).partials]
    order.shuffle(arrivals)
    whole = Fold(count, join)
    for node, partial in arrivals:
        whole.add(node, partial)
    assert whole.root == reference(top(count), count)
    assert whole.partials == [(top(count), whole.root)]


@given(st.integers(1, 300), st.data())
@settings(deadline=None)
def test_chunks_in_order_leave_few_partials(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    assert len(fold_of(range(first, last), count)) <= max(2 * (last - first).bit_length(), 1)


def below(node: Node, count: int) -> set[int]:
    """Its chunks."""
    return set(range(node.first_chunk, min(node.first_chunk + 2**node.level, count)))


@given(st.integers(1, 100), st.data())
@settings(deadline=None)
def test_most_held_is_an_upper_bound_that_is_reached_with_what_the_worker_holds_already(
    count: int, data: st.DataObject
) -> None:
    fold = fold_of(data.draw(st.lists(st.integers(0, count - 1), unique=True)), count)
    held = tuple(data.draw(st.permutations([node for node, _ in fold.partials])))
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first, count))
    rows = [0]
    for chunk in range(first, last):
        rows.append(len(fold) + 1)
        fold.add(Node(0, chunk), str(chunk))
    assert most_held(first, last, count, held) == max(rows)


@given(evaluated(copies=True))
@settings(deadline=None)
def test_maximal_nodes_are_disjoint_and_merge_into_the_whole_with_each_chunk_once(
    work: tuple[int, list[list[int]]],
) -> None:
    count, workers = work
    found = {node: partial for chunks in workers for node, partial in fold_of(chunks, count).partials}
    kept = maximal(found, count)
    assert kept <= set(found)
    assert sorted(chunk for node in kept for chunk in below(node, count)) == list(range(count))
    whole = Fold(count, join)
    for node in kept:
        whole.add(node, found[node])
    assert whole.root == reference(top(count), count)


@pytest.mark.parametrize("missing", range(5))
def test_there_is_no_root_while_a_chunk_is_missing(missing: int) -> None:
    with pytest.raises(LookupError, match="missing"):
        _ = fold_of({0, 1, 2, 3, 4} - {missing}, 5).root
