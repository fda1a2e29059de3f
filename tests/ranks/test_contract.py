"""Ranks keep the contract: each runs all of it, as if torchrun had started it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ranks.launch import launched

CONTRACT = ["-m", "pytest", "tests/ranks/contract.py", "-q", "-m", "", "-n", "0", "-p", "no:cacheprovider"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", ["1 1", pytest.param("2 1", marks=pytest.mark.nightly)])
def test_the_contract(workers: str, tmp_path: Path) -> None:
    given = {"WORKERS_OF_RANKS": workers, "FOLDER_OF_RANKS": str(tmp_path)}
    found = launched(CONTRACT, 2, 280.0, {**os.environ, **given})
    assert all("passed" in output and "failed" not in output for output in found)
