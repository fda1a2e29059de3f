from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt_workers.map.tree import Node
from batchopt_workers.process.failures import Failure
from batchopt_workers.process.messages import ORDERS, Cut, Order, Report, Summary

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
NUMBERS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)  # what UTF-8 can say
ANY_ORDER = st.builds(Order, U64, U64, U32, U32, st.sampled_from(sorted(ORDERS)))
FAILURES = st.builds(Failure, TEXT, TEXT, TEXT, st.builds(range, U64, U64))


def summaries(width: int, terms: int) -> st.SearchStrategy[tuple[Summary, ...]]:
    used = st.binary(min_size=width, max_size=width)
    losses = st.tuples(*[NUMBERS] * terms)
    return st.lists(st.builds(Summary, st.builds(Node, U32, U32), U32, losses, used), max_size=5).map(tuple)


SUMMARIES = st.tuples(st.integers(0, 6), st.integers(1, 3)).flatmap(lambda sizes: summaries(*sizes))
REPORTS = st.builds(Report, U64, U32, NUMBERS, SUMMARIES, NUMBERS, st.booleans())
RECORDS = st.one_of(REPORTS, FAILURES)


@given(ANY_ORDER)
def test_an_order_comes_back_as_it_was(order: Order) -> None:
    assert Order.decode(order.encode(), order.kind) == order


def test_an_order_takes_25_bytes_with_its_kind() -> None:
    assert 1 + len(Order(2**64 - 1, 2**64 - 1, 2**32 - 1, 2**32 - 1).encode()) == 25


@given(RECORDS)
@settings(deadline=None)
def test_a_record_comes_back_as_it_was(record: Report | Failure) -> None:
    assert type(record).decode(record.encode()) == record


@given(st.floats(), st.floats())
def test_numbers_keep_every_bit(seconds: float, loss: float) -> None:
    frame = Report(0, 1, seconds, (Summary(Node(0, 0), 0, (loss, 1.0), b"\1"),)).encode()
    assert Report.decode(frame).encode() == frame


@given(RECORDS, st.binary(min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_every_truncation_and_bytes_past_the_end_are_a_value_error(record: Report | Failure, more: bytes) -> None:
    frame = record.encode()
    for wrong in (*(frame[:length] for length in range(len(frame))), frame + more):
        with pytest.raises(ValueError, match="frame"):
            type(record).decode(wrong)


def damaged(record: Report | Failure, changes: list[tuple[int, int]]) -> tuple[type[Report | Failure], bytes]:
    frame = bytearray(record.encode())
    for at, byte in changes:
        frame[at % len(frame)] = byte
    return type(record), bytes(frame)


CHANGES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), min_size=1, max_size=4)
ANY_BYTES = st.tuples(st.sampled_from([Report, Failure]), st.binary(max_size=80))


@given(ANY_BYTES | st.builds(damaged, RECORDS, CHANGES))
@settings(deadline=None, max_examples=200)
def test_any_bytes_and_damaged_ones_are_a_record_or_a_value_error(drawn: tuple[type[Report | Failure], bytes]) -> None:
    kind, frame = drawn
    with suppress(ValueError):
        assert isinstance(kind.decode(frame), kind)


def test_a_long_text_keeps_its_end() -> None:
    text = "".join(map(str, range(40_000)))
    failure = Failure.decode(Failure("E", text, "", range(3, 5)).encode())
    assert len(failure.message) == 100_000
    assert text.endswith(failure.message)
    assert failure.samples == range(3, 5)


def test_what_utf8_cannot_say_is_replaced() -> None:
    assert Failure.decode(Failure("E", "a\ud800b", "").encode()).message == "a\\ud800b"


def test_a_cut_counts_its_chunks() -> None:
    assert Cut((0, 3, 4, 9)).chunks == 3
    assert Cut((0,)).chunks == 0
