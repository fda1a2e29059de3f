"""Programs of docs/recipes.md with `opt.loss()` do over workers what plain torch does, in as many evaluations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import OPTIMIZERS, read

pytestmark = pytest.mark.nightly  # each program imports its library

LIBRARIES = [heading for heading, program in read()[1].items() if "opt.loss()" in program]


def ran(argument: str, folder: Path) -> dict[str, Any]:
    """What the programs of `tests/recipes.py` print; they leave nothing in the folder."""
    script = Path(__file__).parent / "recipes.py"
    ended = subprocess.run([sys.executable, script, argument], capture_output=True, text=True, timeout=280, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert not list(folder.iterdir())
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_program_over_workers_is_the_one_of_plain_torch(library: str, tmp_path: Path) -> None:
    found = ran(library, tmp_path)
    assert list(found) == list(OPTIMIZERS)
    for workers, plain in found.values():
        assert workers == pytest.approx(plain, rel=1e-6) and plain["after"] < 0.7 * workers["before"]


def test_a_training_of_lightning_goes_on_from_its_checkpoint_to_the_bit(tmp_path: Path) -> None:
    for found in ran("resumed", tmp_path).values():
        whole, again = found["evaluations"]
        assert found["same"] and whole == again >= 8
