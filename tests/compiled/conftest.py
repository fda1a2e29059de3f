"""All tests of this folder share what was compiled."""

from __future__ import annotations

import pytest

from batchopt._program.compiler import DIRECTORY


@pytest.fixture(autouse=True)
def shared_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one directory, also where several processes run tests."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path_factory.getbasetemp().parent / "compiled"))
