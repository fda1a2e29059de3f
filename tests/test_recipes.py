"""Programs of docs/recipes.md with `opt.loss()` do over workers what plain torch does, in as many evaluations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import NAIVE, OPTIMIZERS, read
from tests.test_docs import RECIPES, tables

pytestmark = pytest.mark.nightly  # each program imports its library

(TABLE,) = tables(RECIPES)
LIBRARIES = [heading for heading, program in read()[1].items() if "opt.loss()" in program]


def evaluations(row: int) -> list[int]:
    """What the page says of each optimizer."""
    return [int(cell) for cell in TABLE.rows[row][1:]]


def test_the_table_has_every_program() -> None:
    assert [row[0] for row in TABLE.rows] == ["plain torch, no library", *LIBRARIES]


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
    for kind in found.values():
        workers, plain, without = kind["workers"], kind["plain"], kind["without"]
        assert workers["evaluations"] == plain["evaluations"] and workers == pytest.approx(plain, rel=1e-6)
        assert plain["after"] == without["after"] < 0.7 * workers["before"]
    assert list(found) == list(OPTIMIZERS)
    assert [kind["workers"]["evaluations"] for kind in found.values()] == evaluations(1 + LIBRARIES.index(library))
    assert [kind["without"]["evaluations"] for kind in found.values()] == evaluations(0)
    check_naive([kind["naive"] for kind in found.values()], wiped=library == "Lightning")


def test_a_training_of_lightning_goes_on_from_its_checkpoint_to_the_bit(tmp_path: Path) -> None:
    for found in ran("resumed", tmp_path).values():
        whole, again = found["evaluations"]
        assert found["same"] and whole == again >= 8


def check_naive(found: list[dict[str, Any]], wiped: bool) -> None:
    """`evaluate` is no loss; where it is made one, its gradients stay only in loops that set them to zero before."""
    bare, with_gradient = NAIVE
    for naive in found:
        assert "does not require grad" in naive[bare]
        assert (naive[with_gradient]["after"] == naive[with_gradient]["before"]) is wiped
