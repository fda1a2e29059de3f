from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt_workers.process.failures import Failure

U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)  # what UTF-8 can say
FAILURES = st.builds(Failure, TEXT, TEXT, TEXT, st.builds(range, U64, U64))


@given(FAILURES)
@settings(deadline=None)
def test_a_failure_comes_back_as_it_was(failure: Failure) -> None:
    assert Failure.decode(failure.encode()) == failure


@given(FAILURES, st.binary(min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_every_truncation_and_bytes_past_the_end_are_a_value_error(failure: Failure, more: bytes) -> None:
    frame = failure.encode()
    for wrong in (*(frame[:length] for length in range(len(frame))), frame + more):
        with pytest.raises(ValueError, match="frame"):
            Failure.decode(wrong)


def damaged(failure: Failure, changes: list[tuple[int, int]]) -> bytes:
    frame = bytearray(failure.encode())
    for at, byte in changes:
        frame[at % len(frame)] = byte
    return bytes(frame)


CHANGES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), min_size=1, max_size=4)


@given(st.binary(max_size=80) | st.builds(damaged, FAILURES, CHANGES))
@settings(deadline=None, max_examples=200)
def test_any_bytes_and_damaged_ones_are_a_failure_or_a_value_error(frame: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(Failure.decode(frame), Failure)
