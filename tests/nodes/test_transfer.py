"""What crosses the network arrives as it was, and where it was."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchopt import Weighted
from batchopt._data.batches import BatchSpec, BatchSpecs, read_batch
from batchopt.backends.nodes.group import pickled
from batchopt.backends.nodes.transfer import BLOCK, KnownBatch, RowsUpdate, SentRows, digest, unpacked
from batchopt_workers.data.batch import Batch
from batchopt_workers.data.packing import pack
from batchopt_workers.data.structures import tensors_in
from tests.workloads import Pairs


def batch_of(inputs: Any, targets: Any = None, options: Any = None) -> Batch:
    return read_batch(inputs, targets, options, {None: BatchSpec(None, "mean", None, None, None)})


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (4, 3)])
def test_tensors_of_any_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    assert torch.equal(arrived(tensor), tensor)
    turned = tensor.reshape(tensor.shape[::-1]).permute(list(reversed(range(tensor.dim()))))
    assert torch.equal(arrived(turned), turned)


def arrived(sent: Any) -> Any:
    """An object as another member of the group receives it."""
    return pickle.loads(pickled(sent)[8:])


def test_packed_objects() -> None:
    shared = torch.arange(5)
    before = {"a": shared, "b": [shared, torch.rand(2, 3).t()], "c": "text"}
    after = unpacked(arrived(pack(before)))
    assert after["a"] is after["b"][0] and torch.equal(after["a"], shared) and after["c"] == "text"
    assert torch.equal(after["b"][1], before["b"][1]) and after["b"][1].stride() == before["b"][1].stride()  # type: ignore[index]


def taken(update: RowsUpdate, batch: Batch) -> Batch:
    """The batch of a machine that takes these rows."""
    update = arrived(update)
    found: Batch = update.added_to(batch) if update.is_more else unpacked(update.packed)
    return found


def sent(batch: Batch, *wanted: range) -> Batch:
    """The batch on a machine that was sent the rows for these samples, one range after the other."""
    held, found = None, batch
    for samples in wanted:
        rows = SentRows.of(batch, samples, held)
        assert rows is not held
        update = rows.since(held)
        assert update.is_more == (held is not None)
        found, held = taken(update, found), rows
    return found


def same(one: Any, two: Any) -> bool:
    """Whether two pieces have the same, at the same places modulo 64 bytes."""
    pairs = list(zip(tensors_in([one.inputs, one.targets]), tensors_in([two.inputs, two.targets]), strict=True))
    return all(torch.equal(a, b) and a.data_ptr() % 64 == b.data_ptr() % 64 for a, b in pairs) and (
        one.options == two.options and one.indices == two.indices and one.weight == two.weight
    )


@given(
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.bool]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 299), st.integers(1, 100)), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=60)
def test_samples_lie_where_they_lie_on_any_other_machine(
    size: int, dtype: torch.dtype, is_turned: bool, ranges: list[tuple[int, int]]
) -> None:
    """Modulo 64 bytes: the bits of matrix products depend on it."""
    x = torch.rand(size, 3)
    tensors = {"x": x.to(dtype), "y": torch.rand(3, size).t() if is_turned else torch.rand(size, 3), "z": x[:, 1:]}
    batch = batch_of(tensors, torch.rand(size, requires_grad=True), list(range(size)))
    whole = taken(SentRows.of(batch, range(size)).since(None), batch)
    wanted = [range(first % size, min(first % size + length, size)) for first, length in ranges]
    held, found = None, batch
    for samples in wanted:
        rows = SentRows.of(batch, samples, held)
        if rows is not held:
            found, held = taken(rows.since(held), found), rows
        assert held.has(SentRows.of(batch, samples)) and len(found.parts[0].inputs) <= size
        for one, other in zip(found.pieces(*bounds(samples)), whole.pieces(*bounds(samples)), strict=True):
            assert same(one, other) and one.targets.requires_grad and one.targets.is_leaf


def bounds(samples: range) -> tuple[int, int]:
    return samples.start, samples.stop


def test_lists_come_with_their_samples_alone() -> None:
    samples = [torch.randn(i + 1) for i in range(9)]
    batch = batch_of([{"s": s} for s in samples], [torch.tensor(i) for i in range(9)], list("abcdefghi"))
    found = sent(batch, range(3, 6), range(5, 8), range(2, 4))
    assert len(found.parts[0].inputs) == 6
    for one, other in zip(found.pieces(2, 8), batch.pieces(2, 8), strict=True):
        assert torch.equal(one.inputs["s"], other.inputs["s"]) and one.targets == other.targets
        assert one.options == other.options


def test_weights_come_with_their_samples() -> None:
    spec = BatchSpec(None, "mean", nn.MSELoss(), None, None)
    x, y, weights = torch.randn(500, 2), torch.randn(500, 2), torch.rand(500)
    batch = read_batch(Weighted(x, weights), y, None, {None: spec})
    found = sent(batch, range(200, 300), range(300, 350))
    for one, other in zip(found.pieces(210, 340), batch.pieces(210, 340), strict=True):
        assert same(one, other) and one.sample_weight is not None
        assert torch.equal(one.sample_weight, weights[210:340])


def test_of_a_dataset_nothing_is_cut_not_even_what_another_term_has_too() -> None:
    x, y = torch.randn(1000, 3), torch.randn(1000, 1)
    specs: BatchSpecs = {name: BatchSpec(None, "mean", None, None, None) for name in ("read", "sent")}
    batch = read_batch({"read": Pairs(x, y), "sent": (x, torch.randn(1000, 2))}, None, None, specs)
    found = sent(batch, range(1200, 1201), range(1210, 1400))
    read, cut = found.parts
    assert torch.equal(read.inputs.data[9][0], x[9]) and len(cut.inputs) < 300
    assert torch.equal(next(cut.pieces(210, 400)).inputs, x[210:400])
    assert SentRows.of(batch, range(1200, 1201)).has(SentRows.of(batch, range(5)))  # it is there as a whole


def test_values_of_samples_beside_tensors_come_with_their_samples() -> None:
    x, names = torch.randn(100, 3), list("abcdefghij" * 10)
    found = sent(batch_of(OrderedDict(names=names, x=x, scales=[1.0, 2.0])), range(2, 5))
    (piece,) = found.parts[0].pieces(2, 5)
    assert type(piece.inputs) is OrderedDict and list(piece.inputs) == ["names", "x", "scales"]
    assert piece.inputs["names"] == ["c", "d", "e"] and piece.inputs["scales"] == [1.0, 2.0]
    assert torch.equal(piece.inputs["x"], x[2:5])


def test_a_share_far_from_the_one_before_takes_its_place() -> None:
    batch = batch_of(torch.randn(1000, 3))
    held = SentRows.of(batch, range(100))
    far, near = SentRows.of(batch, range(800, 900), held), SentRows.of(batch, range(90, 300), held)
    assert far.terms[0].start > 700 and not far.since(held).is_more
    assert near.terms[0].start == 0 and near.terms[0].stop >= 300 and near.since(held).is_more
    assert SentRows.of(batch, range(50), held) is held


def test_a_batch_is_known_again_by_what_is_in_it() -> None:
    x, y, options = torch.randn(20, 3), torch.randn(20, 1), list(range(20))
    samples = [torch.zeros(i) for i in range(4)]

    def seen(before: KnownBatch | None, *batch: Any) -> KnownBatch:
        return KnownBatch.after(before, batch_of(*batch))

    for batch in ((x, y), ({"x": x}, None, options), (samples, [torch.ones(1)] * 4)):
        first = seen(None, *batch)
        assert first.digest is None
        second = seen(first, *batch)
        assert second is not first and second.digest
        assert seen(second, *batch) is second
    second = seen(seen(None, x, y), x, y)
    others: list[tuple[Any, ...]] = [(x.clone(), y), (x[:10], y[:10]), (x.view(torch.int32), y), (x, y, options), (x,)]
    assert all(seen(second, *other) is not second for other in others)
    x.numpy()[13, 1] += 1.0  # which no version counter tells
    third = seen(second, x, y)
    assert third is not second and third.digest not in (None, second.digest)
    listed = seen(seen(None, samples), samples)
    samples[3].numpy()[:] = 1.0
    assert seen(listed, samples) is not listed


def test_a_copy_has_memory_of_its_own() -> None:
    x, samples = torch.randn(6, 3), [{"a": torch.randn(2)}]
    batch, lists = batch_of(x, None, list("abcdef")), batch_of(samples)
    expected = x.clone(), samples[0]["a"].clone()
    copy, listed = unpacked(pack(batch)), unpacked(pack(lists))
    x.zero_()
    samples[0]["a"].zero_()
    (piece,) = copy.parts[0].pieces(1, 3)
    assert torch.equal(piece.inputs, expected[0][1:3]) and list(piece.options or []) == ["b", "c"]
    (piece,) = listed.parts[0].pieces(0, 1)
    assert torch.equal(piece.inputs["a"], expected[1])


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_a_digest_is_of_each_byte(size: int) -> None:
    elements = torch.zeros(size, dtype=torch.uint8)
    plain = digest([elements])
    assert digest([elements.clone()]) == plain and digest([torch.zeros(size + 1, dtype=torch.uint8)]) != plain
    for at in {0, size // 2, size - 1} if size else ():
        elements[at] = 1
        assert digest([elements]) != plain
        elements[at] = 0
