"""The reduce: the same bits whoever evaluated which chunks, in whatever order the answers come."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt._mapreduce import reduce
from batchopt._mapreduce.answers import Answer, Partial
from batchopt._mapreduce.reduce import Whole, merge_answers, reduce_answers
from batchopt_workers.evaluate.tree import Fold, Node

SIZE = 5


def merge(left: Partial, right: Partial) -> Partial:
    """As a worker does."""
    gradient, changes = left.gradient + right.gradient, left.changes + right.changes
    return Partial((left.losses[0] + right.losses[0],), gradient, changes, bytes(map(max, left.used, right.used)))


def reduced(answers: list[Answer], chunks: int) -> tuple[Whole, torch.Tensor]:
    """The whole, and its gradient."""
    gradient = torch.full((SIZE,), torch.nan)
    return reduce_answers(answers, chunks, gradient), gradient


def partial_of(chunk: int) -> Partial:
    """Numbers of very different magnitudes: their sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(chunk)
    values = torch.randn(SIZE + 2, generator=generator) * 10 ** torch.randint(-6, 7, (SIZE + 2,), generator=generator)
    used = bytes([chunk % 3 == 0, chunk == 1, 0])
    return Partial((values[0].item(),), values[1 : SIZE + 1].clone(), values[SIZE + 1 :].clone(), used)


def answer_of(rank: int, first: int, last: int, chunks: int) -> Answer:
    """What a worker makes of its run of chunks: it merges all that it can."""
    fold: Fold[Partial] = Fold(chunks, merge)
    for chunk in range(first, last):
        fold.add(Node(0, chunk), partial_of(chunk))
    return Answer(rank, last - first, 0.0, fold.partials)


def bits(found: tuple[Whole, torch.Tensor]) -> tuple[str, list[int], list[int], bytes]:
    whole, gradient = found
    return (
        whole.losses[0].hex(),
        gradient.view(torch.int32).tolist(),
        whole.changes.view(torch.int32).tolist(),
        whole.used,
    )


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
@settings(deadline=None)
def test_the_bits_do_not_depend_on_who_evaluated_what(chunks: int, data: st.DataObject) -> None:
    alone = reduced([answer_of(0, 0, chunks, chunks)], chunks)
    inner = data.draw(st.sets(st.integers(1, chunks - 1))) if chunks > 1 else set()
    runs = list(pairwise([0, *sorted(inner), chunks]))
    answers = [answer_of(rank, first, last, chunks) for rank, (first, last) in enumerate(runs)]
    assert bits(reduced(data.draw(st.permutations(answers)), chunks)) == bits(alone)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8, 13, 37])
def test_long_vectors_are_summed_in_blocks_to_the_same_bits(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[Answer]:
        return [answer_of(rank, rank, rank + 1, chunks) for rank in range(chunks)]

    at_once = bits(reduced(answers(), chunks))
    for name, value in (("BLOCK", 2), ("LARGE", 1), ("SHORT", 0)):
        monkeypatch.setattr(reduce, name, value)
    assert bits(reduced(answers(), chunks)) == at_once


@pytest.mark.parametrize("chunks, missing", [(1, 0), (2, 0), (7, 3), (8, 7)])
def test_a_missing_chunk_is_noticed(chunks: int, missing: int) -> None:
    answers = [answer_of(0, 0, missing, chunks), answer_of(1, missing + 1, chunks, chunks)]
    with pytest.raises(LookupError, match=r"some chunks are missing"):
        reduced(answers, chunks)


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
@settings(deadline=None)
def test_merging_on_the_way_changes_no_bit(chunks: int, data: st.DataObject) -> None:
    """Machines merge what their workers have; the parent merges what the machines have."""
    expected = bits(reduced([answer_of(0, 0, chunks, chunks)], chunks))
    cuts = sorted(data.draw(st.lists(st.integers(0, chunks), max_size=8)))
    runs = list(pairwise([0, *cuts, chunks]))
    machines: dict[int, list[Answer]] = {}
    for rank, (first, last) in enumerate(runs):
        machines.setdefault(data.draw(st.integers(0, 2)), []).append(answer_of(rank, first, last, chunks))
    again = data.draw(st.sampled_from(runs))  # a machine was late, and another did the same
    machines.setdefault(3, []).append(answer_of(99, *again, chunks))
    merged = [Answer(rank, 0, 0.0, merge_answers(answers, chunks)) for rank, answers in machines.items()]
    assert bits(reduced(merged, chunks)) == expected
