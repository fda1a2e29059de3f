"""What crosses the network arrives as it was, and where it was."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt._data.batches import Reading, Readings, read_batch
from batchopt.backends.nodes.transfer import (
    BLOCK,
    BatchBuffer,
    PackedBytes,
    SendableBatch,
    copied,
    digest,
    from_bytes,
    lacking,
    to_bytes,
)
from batchopt_workers.data import memory
from batchopt_workers.data.batch import Batch
from batchopt_workers.data.packing import pack, unpack
from tests.workloads import Pairs


def batch_of(inputs: Any, targets: Any = None, options: Any = None) -> Batch:
    return read_batch(inputs, targets, options, {None: Reading(None, "mean", None, None, None)})


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (4, 3)])
def test_tensors_of_any_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    assert torch.equal(from_bytes(to_bytes(tensor), dtype, shape), tensor)
    turned = tensor.reshape(tensor.shape[::-1]).permute(list(reversed(range(tensor.dim()))))
    assert torch.equal(from_bytes(to_bytes(turned), dtype, shape), turned)


def test_packed_objects() -> None:
    shared = torch.arange(5)
    before = {"a": shared, "b": [shared, torch.rand(2, 3).t()], "c": "text"}
    packed_bytes = PackedBytes.of(pack(before))
    after = unpack(packed_bytes.data, packed_bytes.placements, packed_bytes.unload())
    assert after["a"] is after["b"][0] and torch.equal(after["a"], shared) and after["c"] == "text"
    assert torch.equal(after["b"][1], before["b"][1]) and after["b"][1].stride() == before["b"][1].stride()  # type: ignore[index]


def rebuilt(batch: Batch, wanted: list[range]) -> tuple[Batch, BatchBuffer]:
    """The batch on a machine that has the wanted samples."""
    sendable = SendableBatch.of(batch)
    buffer = BatchBuffer(sendable.manifest)
    found: Batch = unpack(sendable.manifest.data, sendable.manifest.placements, buffer.block)
    for samples in wanted:
        for slice_ in sendable.slices(samples):
            buffer.fill(slice_)
            if slice_.lists is not None:
                lists = slice_.lists
                listed = unpack(lists.data, lists.placements, lists.unload())
                found.parts[slice_.term].fill(slice_.start, *listed)
    return found, buffer


def test_columns_lists_and_options_come_in_parts() -> None:
    x, y = torch.randn(10, 3), torch.randn(3, 10).t()
    found, _ = rebuilt(batch_of({"x": x}, (y,), list("abcdefghij")), [range(2, 5), range(7, 8)])
    (part,) = found.parts
    for start, stop in ((2, 5), (7, 8)):
        (piece,) = part.pieces(start, stop)
        assert torch.equal(piece.inputs["x"], x[start:stop]) and torch.equal(piece.targets[0], y[start:stop])
        assert list(piece.options or []) == list("abcdefghij")[start:stop]
        assert piece.targets[0].stride() == y[start:stop].stride()
    samples = [torch.randn(i + 1) for i in range(6)]
    found, _ = rebuilt(batch_of([{"s": s} for s in samples], [torch.tensor(i) for i in range(6)]), [range(3, 6)])
    pieces = list(found.parts[0].pieces(3, 6))
    assert [piece.targets.item() for piece in pieces] == [3, 4, 5]
    assert all(torch.equal(piece.inputs["s"], s) for piece, s in zip(pieces, samples[3:], strict=True))


def test_of_a_dataset_nothing_is_cut_not_even_what_another_term_has_too() -> None:
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    assert not list(SendableBatch.of(batch_of(Pairs(x, y))).slices(range(3, 7)))

    readings: Readings = {name: Reading(None, "mean", None, None, None) for name in ("read", "sent")}
    batch = read_batch({"read": Pairs(x, y), "sent": (x, torch.randn(10, 2))}, None, None, readings)
    found, _ = rebuilt(batch, [range(12, 14)])
    assert torch.equal(found.parts[0].inputs.data[9][0], x[9])
    targets: Any = found.parts[1].targets
    expected: Any = batch.parts[1].targets
    assert torch.equal(targets.data[2:4], expected.data[2:4]) and not targets.data[4:].any()


def test_values_of_samples_beside_tensors_come_with_their_samples() -> None:
    x, names = torch.randn(10, 3), list("abcdefghij")
    batch = batch_of(OrderedDict(names=names, x=x, scales=[1.0, 2.0]))
    found, _ = rebuilt(batch, [range(2, 5)])
    (piece,) = found.parts[0].pieces(2, 5)
    assert type(piece.inputs) is OrderedDict and list(piece.inputs) == ["names", "x", "scales"]
    assert piece.inputs["names"] == ["c", "d", "e"] and piece.inputs["scales"] == [1.0, 2.0]
    assert torch.equal(piece.inputs["x"], x[2:5])


def test_samples_lie_where_they_lie_on_any_other_machine() -> None:
    """Modulo 64 bytes: the bits of matrix products depend on it."""
    x = torch.randn(1000, 3)
    batch = batch_of(x)
    whole, _ = rebuilt(batch, [range(0, 1000)])
    part, _ = rebuilt(batch, [range(500, 600)])
    one, other = (next(found.parts[0].pieces(513, 520)).inputs for found in (whole, part))
    assert torch.equal(one, other) and one.data_ptr() % 64 == other.data_ptr() % 64 != 0


def test_only_the_pages_of_what_was_sent_are_taken() -> None:
    x = torch.randn(100_000, 20)
    _, buffer = rebuilt(batch_of(x), [range(90_000, 91_000)])
    assert 1000 * 80 <= os.fstat(buffer.block.fd).st_blocks * 512 <= 1000 * 80 + 3 * 4096


def test_samples_that_come_again_need_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sendable = SendableBatch.of(batch_of(torch.randn(1000, 20)))
    _, buffer = rebuilt(sendable.batch, [range(0, 500)])
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    (again,), (more,) = sendable.slices(range(0, 500)), sendable.slices(range(600, 700))
    buffer.fill(again)
    with pytest.raises(MemoryError, match="of shared memory are needed"):
        buffer.fill(more)


def test_memory_is_used_again_for_a_batch_of_the_same_layout() -> None:
    first = BatchBuffer(SendableBatch.of(batch_of(torch.randn(10, 3))).manifest)
    assert BatchBuffer(SendableBatch.of(batch_of(torch.randn(10, 3))).manifest, first).block is first.block
    assert BatchBuffer(SendableBatch.of(batch_of(torch.randn(11, 3))).manifest, first).block is not first.block


def test_a_batch_is_known_again_by_what_is_in_it() -> None:
    x, y, options = torch.randn(20, 3), torch.randn(20, 1), list(range(20))
    samples = [torch.zeros(i) for i in range(4)]

    def seen(before: SendableBatch | None, *batch: Any) -> SendableBatch:
        return SendableBatch.after(before, batch_of(*batch))

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
    copy, listed = copied(batch), copied(lists)
    x.zero_()
    samples[0]["a"].zero_()
    (piece,) = copy.parts[0].pieces(1, 3)
    assert torch.equal(piece.inputs, expected[0][1:3]) and list(piece.options or []) == ["b", "c"]
    (piece,) = listed.parts[0].pieces(0, 1)
    assert torch.equal(piece.inputs["a"], expected[1])


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_a_digest_is_of_each_byte(size: int) -> None:
    array = np.zeros(size, np.uint8)
    plain = digest([array])
    assert digest([array.copy()]) == plain and digest([np.zeros(size + 1, np.uint8)]) != plain
    for at in {0, size // 2, size - 1} if size else ():
        array[at] = 1
        assert digest([array]) != plain
        array[at] = 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=6), st.integers(0, 30), st.integers(1, 20))
@settings(deadline=None)
def test_what_is_lacking_is_what_is_wanted_and_not_held(held: list[tuple[int, int]], start: int, length: int) -> None:
    ranges = [range(first, first + size) for first, size in held]
    wanted = range(start, start + length)
    missing = [sample for part in lacking(ranges, wanted) for sample in part]
    have = {sample for part in ranges for sample in part}
    assert missing == [sample for sample in wanted if sample not in have]
