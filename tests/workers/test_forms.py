"""What a function returns for a chunk is taken apart into columns and put together again, or refused by its path."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchopt_workers.data.structures import tensors_in
from batchopt_workers.tasks.forms import real, rows_form, summed, sums_form, sums_layout

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
DTYPES += [torch.int64, torch.int16, torch.uint8, torch.bool]
SAMPLES = 3


class Pair(NamedTuple):
    left: Any
    right: Any


def tensors(lead: tuple[int, ...]) -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=2).map(lambda shape: (*lead, *shape))
    return st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), shapes, st.sampled_from(DTYPES))


def structures(lead: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Tensors in tuples, lists and dicts, with None here and there."""
    return st.recursive(
        tensors(lead) | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=6,
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one is other


@given(structures((SAMPLES,)))
def test_rows_go_through_columns_and_come_back_in_their_structure(result: Any) -> None:
    if next(tensors_in(result), None) is None:
        result = (result, torch.zeros(SAMPLES))
    form, found = rows_form(result, SAMPLES)
    assert same(form.filled(found), result)
    assert [(c.dtype, (SAMPLES, *c.shape)) for c in form.columns] == [(t.dtype, tuple(t.shape)) for t in found]
    assert len({column.path for column in form.columns}) == len(form.columns)


@given(structures(()))
def test_sums_go_through_a_row_and_come_back_in_their_structure(result: Any) -> None:
    if next(tensors_in(result), None) is None:
        result = (result, torch.zeros(2))
    form, found = sums_form(result)
    layout = sums_layout(form.columns)
    row = torch.full((layout.size,), torch.nan, dtype=layout.dtype)
    for view, tensor in zip(layout.views(row), found, strict=True):
        view.copy_(real(tensor))
    back = [summed(column, view) for column, view in zip(form.columns, layout.views(row), strict=True)]
    for got, given_ in zip(tensors_in(form.filled(back)), tensors_in(result), strict=True):
        wanted = given_ if given_.is_complex() else given_.to(torch.int64)
        if given_.is_floating_point():
            wanted = given_.to(torch.promote_types(given_.dtype, torch.float32))
        assert same(got, wanted)


def test_a_list_of_as_many_things_as_samples_has_one_a_sample_which_holds_nothing_of_the_worker() -> None:
    memory = torch.arange(4.0, requires_grad=True)
    form, _ = rows_form([{"row": memory[:2] * 1, "n": 1}, memory[2:].detach()], 2)
    assert form.objects is not None
    first, second = form.objects
    assert not first["row"].requires_grad and second.untyped_storage().nbytes() == 8
    results: list[list[Any]] = [[1, "two", None], [torch.zeros(2), torch.zeros(1), 3], [[], {}, ()]]
    for result in results:
        form, found = rows_form(result, 3)
        assert not form.columns and not found and form.objects is not None and len(form.objects) == 3


@pytest.mark.parametrize(
    "result, error, words",
    [
        (torch.zeros(2, 3), ValueError, r"`result` of shape \(2, 3\) for 3 samples"),
        (torch.zeros(()), ValueError, r"`result` of shape \(\) for 3 samples"),
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, ValueError, r"`result\['b'\]` of shape \(4,\)"),
        ((torch.zeros(3), ["x"]), TypeError, r"returned str as `result\[1\]\[0\]`"),
        (torch.zeros(3).to_sparse(), TypeError, "`result`, which is no dense tensor"),
        ("abc", TypeError, "returned str as `result`"),
        (None, TypeError, "returned NoneType as `result`"),
        ({}, TypeError, "returned dict as `result`"),
        ([], TypeError, "returned list as `result`"),
        (np.array(["a", "b", "c"]), TypeError, "returned ndarray as `result`"),
    ],
)
def test_what_has_no_row_for_each_sample_is_named(result: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rows_form(result, 3)


def test_arrays_and_numbers_count_as_tensors() -> None:
    every_other = np.arange(6.0)[::2]
    form, found = rows_form({"a": every_other, "b": np.zeros((3, 0), np.int16)}, 3)
    assert torch.equal(found[0], torch.tensor([0.0, 2.0, 4.0]).double()) and form.columns[1].dtype == torch.int16
    form, found = sums_form([1, 2.5, True, 1j, np.float64(3), np.ones(2)])
    assert [column.dtype for column in form.columns][:4] == [torch.int64, torch.float64, torch.bool, torch.complex128]
    with pytest.raises(TypeError, match="returned list without a tensor"):
        sums_form([None])
    with pytest.raises(TypeError, match=r"returned str as `result\['n'\]`"):
        sums_form({"n": "x"})
