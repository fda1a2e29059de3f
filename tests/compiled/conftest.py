"""All tests of this folder share what was compiled."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def shared_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one directory, also where several processes run tests."""
    monkeypatch.setenv("BATCHOPT_CACHE_DIR", str(tmp_path_factory.getbasetemp().parent / "compiled"))
