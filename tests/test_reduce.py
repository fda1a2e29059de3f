"""The reduce: the same bits whoever evaluated which chunks, in whatever order the answers come."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt.backends import Answer, Partial
from batchopt.reduce import merge, reduce_answers
from batchopt_workers.tree import Fold, Node

SIZE = 5


def partial_of(chunk: int) -> Partial:
    """Numbers of very different magnitudes: their sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(chunk)
    values = torch.randn(SIZE + 2, generator=generator) * 10 ** torch.randint(-6, 7, (SIZE + 2,), generator=generator)
    used = bytes([chunk % 3 == 0, chunk == 1, 0])
    return Partial(values[0].item(), values[1 : SIZE + 1].clone(), values[SIZE + 1 :].clone(), used)


def answer_of(rank: int, first: int, last: int, chunks: int) -> Answer:
    """What a worker makes of its run of chunks: it merges all that it can."""
    fold: Fold[Partial] = Fold(chunks, merge)
    for chunk in range(first, last):
        fold.add(Node(0, chunk), partial_of(chunk))
    return Answer(rank, last - first, 0.0, fold.partials)


def bits(partial: Partial) -> tuple[str, list[int], list[int], bytes]:
    gradient, changes = partial.gradient.view(torch.int32), partial.changes.view(torch.int32)
    return partial.loss.hex(), gradient.tolist(), changes.tolist(), partial.used


@given(st.integers(1, 40), st.data())
@settings(deadline=None)
def test_the_bits_do_not_depend_on_who_evaluated_what(chunks: int, data: st.DataObject) -> None:
    alone = reduce_answers([answer_of(0, 0, chunks, chunks)], chunks)
    inner = data.draw(st.sets(st.integers(1, chunks - 1))) if chunks > 1 else set()
    runs = list(pairwise([0, *sorted(inner), chunks]))
    answers = [answer_of(rank, first, last, chunks) for rank, (first, last) in enumerate(runs)]
    assert bits(reduce_answers(data.draw(st.permutations(answers)), chunks)) == bits(alone)


@given(st.integers(1, 40))
@settings(deadline=None)
def test_the_whole_is_the_sum_of_the_chunks(chunks: int) -> None:
    whole = reduce_answers([answer_of(0, 0, chunks, chunks)], chunks)
    parts = [partial_of(chunk) for chunk in range(chunks)]
    magnitude = sum(part.gradient.double().abs() for part in parts)
    error = (whole.gradient.double() - sum(part.gradient.double() for part in parts)).abs()
    assert (error <= 1e-6 * magnitude).all()
    assert whole.loss == pytest.approx(math.fsum(p.loss for p in parts), abs=1e-12 * sum(abs(p.loss) for p in parts))
    assert whole.used == bytes([1, chunks > 1, 0])


def test_neighbours_merge_into_the_memory_of_the_left_one() -> None:
    left = Partial(1.0, torch.tensor([1.0, 2.0]), torch.tensor([3.0]), bytes([1, 0]))
    right = Partial(0.5, torch.tensor([10.0, 20.0]), torch.tensor([30.0]), bytes([0, 0]))
    merged = merge(left, right)
    assert merged.gradient is left.gradient
    assert (merged.loss, merged.gradient.tolist(), merged.changes.tolist()) == (1.5, [11.0, 22.0], [33.0])
    assert merged.used == bytes([1, 0])
    assert right.gradient.tolist() == [10.0, 20.0]


@pytest.mark.parametrize("chunks, missing", [(1, 0), (2, 0), (7, 3), (8, 7)])
def test_a_missing_chunk_is_noticed(chunks: int, missing: int) -> None:
    answers = [answer_of(0, 0, missing, chunks), answer_of(1, missing + 1, chunks, chunks)]
    with pytest.raises(LookupError, match=r"some chunks are missing"):
        reduce_answers(answers, chunks)
