"""A backend that is made outside of the library keeps the contract: see `docs/backends.md`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchopt.backends import BACKENDS
from tests.backends.contract import Contract


class TestThreads(Contract):
    """Two threads of this process."""

    backend = "threads"
    parallelize = 2
    processes = False

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setitem(BACKENDS, "threads", "tests.backends.threads:ThreadBackend")
        yield
