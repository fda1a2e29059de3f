"""These tests start no process, so that is looked at once a file: a look takes longer than most of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """In place of the check after every test: no child process is left by a whole file."""
    me = psutil.Process()
    before = me.children(recursive=True)
    yield
    assert set(me.children(recursive=True)) <= set(before)
