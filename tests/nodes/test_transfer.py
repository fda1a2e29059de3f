"""What crosses the network arrives as it was, and where it was."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt._data.batches import BatchSpec, read_batch
from batchopt.backends.nodes.group import pickled
from batchopt.backends.nodes.transfer import BLOCK, KnownBatch, RowsUpdate, SentRows, digest, unpacked
from batchopt_workers.batch.batch import Batch
from batchopt_workers.wire.structures import tensors_in


def batch_of(inputs: Any, targets: Any = None, options: Any = None) -> Batch:
    return read_batch(inputs, targets, options, {None: BatchSpec(None, "mean", None, None, None)})


def arrived(sent: Any) -> Any:
    """An object as another member of the group receives it."""
    return pickle.loads(pickled(sent)[8:])


def taken(update: RowsUpdate, batch: Batch) -> Batch:
    """The batch of a machine that takes these rows."""
    update = arrived(update)
    found: Batch = update.added_to(batch) if update.is_more else unpacked(update.packed)
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


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_a_digest_is_of_each_byte(size: int) -> None:
    elements = torch.zeros(size, dtype=torch.uint8)
    plain = digest([elements])
    assert digest([elements.clone()]) == plain and digest([torch.zeros(size + 1, dtype=torch.uint8)]) != plain
    for at in {0, size // 2, size - 1} if size else ():
        elements[at] = 1
        assert digest([elements]) != plain
        elements[at] = 0
