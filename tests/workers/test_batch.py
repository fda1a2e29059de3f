from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt_workers.data.batch import Columns, Part, Samples, realigned
from batchopt_workers.data.memory import ALIGNMENT
from batchopt_workers.data.structures import map_tensors
from batchopt_workers.map.weighting import Weighting


class Pair(NamedTuple):
    first: Any
    second: Any


DATA = torch.arange(12.0).view(6, 2)
MEAN = Weighting("mean", 6)


def test_a_slice_of_columns_views_their_memory_and_has_their_structure() -> None:
    data = DATA.clone()
    columns = Columns({"x": data, "more": Pair(data[:, 0], [data.long()])})
    found, one = columns.slice(1, 3), columns.sample(3)
    assert found["x"].tolist() == [[2, 3], [4, 5]]
    assert found["more"].first.tolist() == [2, 4] and found["more"].second[0].tolist() == [[2, 3], [4, 5]]
    assert one["x"].tolist() == [6, 7] and one["more"].first.tolist() == 6
    found["x"].zero_()
    assert data.tolist() == [[0, 1], [0, 0], [0, 0], [6, 7], [8, 9], [10, 11]]


NAMES = ["a", "b", "c", "d", "e", "f"]


@pytest.mark.parametrize(
    "values, part, one",
    [
        (NAMES, ["c", "d"], "c"),
        (tuple(NAMES), ("c", "d"), "c"),
        ([{"id": i} for i in range(6)], [{"id": 2}, {"id": 3}], {"id": 2}),
        ([[i] for i in range(6)], [[2], [3]], [2]),
        (NAMES[:5], NAMES[:5], NAMES[:5]),
        ([NAMES, NAMES], [["c", "d"]] * 2, ["c"] * 2),
        ("abcdef", "abcdef", "abcdef"),
        ([], [], []),
    ],
    ids=["list", "tuple", "of dicts", "of lists", "of another length", "nested", "text", "empty"],
)
def test_lists_as_long_as_the_batch_are_cut_with_it(values: Any, part: Any, one: Any) -> None:
    for data in ({"values": values, "x": DATA}, {"x": DATA, "values": values}):
        columns = Columns(data)
        assert len(columns) == 6
        found = columns.slice(2, 4)
        assert found["values"] == part and found["x"].tolist() == [[4, 5], [6, 7]]
        assert columns.sample(2)["values"] == one
    assert Columns((DATA, values)).slice(2, 4)[1] == part


class Graph(dict[str, Any]):
    """A dict with an attribute, and a way of its own to be made."""

    def __init__(self, kind: str, **items: Any) -> None:
        super().__init__(items)
        self.kind = kind


def test_kinds_of_dicts_stay_what_they_are() -> None:
    of_lists: defaultdict[str, Any] = defaultdict(list, x=DATA)
    ordered = OrderedDict([("y", DATA), ("x", DATA)])
    graph = Graph("molecule", x=DATA, names=NAMES)
    for data in (of_lists, ordered, graph):
        for found in (Columns(data).slice(1, 3), Samples([data]).sample(0), map_tensors(torch.clone, data)):
            assert type(found) is type(data) and list(found) == list(data) and found is not data
        assert Columns(data).slice(1, 3)["x"].tolist() == [[2, 3], [4, 5]]
        assert torch.equal(data["x"], DATA)
    assert Columns(of_lists).slice(1, 3)["new"] == [] and "new" not in of_lists
    assert Columns(graph).slice(1, 3).kind == "molecule" and Columns(graph).slice(1, 3)["names"] == ["b", "c"]


def collated(items: list[Any]) -> Any:
    """Is given the inputs alone where there are no targets."""
    if isinstance(items[0], tuple):
        return tuple(torch.stack(column) for column in zip(*items, strict=True))
    return torch.stack(items)


@given(st.sampled_from(["columns", "list", "collated"]), st.booleans(), st.integers(0, 5), st.integers(1, 6))
@settings(deadline=None)
def test_pieces_are_each_sample_once_and_in_order_of_columns_in_one_forward_and_of_a_list_one_each(
    kind: str, alone: bool, start: int, count: int
) -> None:
    stop = min(start + count, 6)
    inputs = Columns(DATA) if kind == "columns" else Samples(list(DATA))
    targets = None if alone else Columns(DATA[:, 0])
    options = None if alone else range(6)
    batch = Part(inputs, targets, options, MEAN, collated if kind == "collated" else None)
    assert batch.size == 6
    assert kind == "collated" or not any(piece.indices for piece in batch.pieces(start, start))
    pieces = list(batch.pieces(start, stop))
    assert len(pieces) == (stop - start if kind == "list" else 1)
    assert [index for piece in pieces for index in piece.indices] == list(range(start, stop))
    rows = [piece.inputs.view(-1, 2) for piece in pieces]
    assert torch.equal(torch.cat(rows), DATA[start:stop])
    if alone:
        assert {(piece.targets, piece.options, *piece.attributes) for piece in pieces} == {(None, None)}
    else:
        found = torch.cat([piece.targets.view(-1) for piece in pieces])
        assert torch.equal(found, DATA[start:stop, 0])
        assert [option for piece in pieces for option in piece.options or ()] == list(range(start, stop))


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    found = realigned(Columns(tensor)).data
    assert isinstance(found, torch.Tensor)
    return found


def is_laid_out(tensor: torch.Tensor) -> bool:
    """Whether the memory is without gaps or repetitions, and starts at a cache line."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
@settings(deadline=None)
def test_whatever_the_cut_of_a_tensor_it_is_equal_and_laid_out(shape: list[int], data: st.DataObject) -> None:
    whole = torch.rand(shape).permute(data.draw(st.permutations(range(len(shape)))))
    cuts = [slice(data.draw(st.integers(0, n - 1)), None, data.draw(st.integers(1, 2))) for n in whole.shape]
    part = whole[tuple(cuts)]
    found = laid_out(part)
    assert torch.equal(found, part)
    assert is_laid_out(found)
