"""Ranks keep the contract: each runs all of it, as if torchrun had started it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.launch import launch, torchrun

CONTRACT = ["-m", "pytest", "tests/ranks/contract.py", "-q", "-m", "", "-n", "0", "-p", "no:cacheprovider"]


# Of each part of the contract one; the rest is what ranks have in common with every other backend.
SOME = "do_not_depend or failed_step or goes_on_in_one or is_one_error"


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize(
    "workers, some",
    [
        ("1 1", SOME),
        pytest.param("1 1", "", marks=pytest.mark.nightly),
        pytest.param("2 1", "", marks=pytest.mark.nightly),
    ],
)
def test_the_contract(workers: str, some: str, tmp_path: Path) -> None:
    found = launch(*torchrun(), *CONTRACT, "-k", some, WORKERS_OF_RANKS=workers, FOLDER_OF_RANKS=str(tmp_path))
    assert found.count(" passed") == 2 and "failed" not in found
