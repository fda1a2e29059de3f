"""The process that ranks are forked from, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.launch import end_forks, program


@pytest.fixture(scope="package", autouse=True)
def forks() -> Iterator[None]:
    """It is there before the first test, which else would leave it behind."""
    program("nothing", size=1)
    yield
    end_forks()
