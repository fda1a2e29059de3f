"""The forms of all chunks have one reading, or the chunk that has another one is named."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

from batchopt._mapreduce.answers import Answer, common_form, forms_of
from batchopt_workers.tasks.forms import Form, rows_form


def common(results: Sequence[tuple[Any, int]]) -> Form:
    forms = {chunk: rows_form(result, samples)[0] for chunk, (result, samples) in enumerate(results)}
    return common_form(forms, [0, *accumulate(samples for _, samples in results)])


def columns(samples: int) -> list[torch.Tensor]:
    return [torch.zeros(samples), torch.ones(samples)]


def ragged(*lengths: int) -> list[torch.Tensor]:
    return [torch.full((length,), float(length)) for length in lengths]


def test_forms_come_in_the_order_of_chunks() -> None:
    forms = [rows_form(torch.zeros(1, i), 1)[0] for i in range(4)]
    answers = [
        Answer(0, 2, 0.0, [], forms={3: forms[3], 1: forms[1]}),
        Answer(1, 2, 0.0, [], forms={0: forms[0], 2: forms[2]}),
    ]
    assert list(forms_of(answers).items()) == list(enumerate(forms))


def test_other_chunks_decide_how_a_list_is_read() -> None:
    as_columns = common([(columns(2), 2), (columns(3), 3)])
    assert as_columns.objects is None and len(as_columns.columns) == 2
    for lengths in ((1, 2), (2, 3)):
        as_objects = common([(ragged(2, 2), 2), (ragged(*lengths), 2)])
        assert as_objects.objects is not None and [len(item) for item in as_objects.objects] == [2, 2, *lengths]


def test_a_list_that_can_be_read_both_ways_in_all_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one tensor a sample, or one row a sample .*return a tuple"):
        common([(columns(2), 2), (columns(2), 2)])
    with pytest.raises(ValueError, match="one tensor a sample, or one row a sample"):
        common([(columns(2), 2)])
    assert len(common([(tuple(columns(2)), 2)]).columns) == 2


def test_one_sample_alone_is_the_same_either_way() -> None:
    assert len(common([([torch.zeros(1, 4)], 1)]).columns) == 1


def test_objects_of_all_chunks_are_one_list() -> None:
    assert common([([1, "a"], 2), ([None], 1), ([{}, []], 2)]).objects == [1, "a", None, {}, []]


@pytest.mark.parametrize(
    "other, words",
    [
        (torch.zeros(2, 4), r"`result` \(4,\) torch.float32 for chunk 1 \(samples 3..4\), and `result` \(3,\)"),
        (torch.zeros(2, 3).double(), r"torch.float64 for chunk 1 \(samples 3..4\), and `result` \(3,\) torch.float32"),
        ((torch.zeros(2, 3),), r"`result\[0\]` .* for chunk 1"),
        ([1, 2], "a list of objects for chunk 1"),
    ],
)
def test_a_chunk_that_differs_is_named(other: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        common([(torch.zeros(3, 3), 3), (other, 2)])
    with pytest.raises(ValueError, match="chunk"):
        common([(other, 2), (torch.zeros(3, 3), 3)])
