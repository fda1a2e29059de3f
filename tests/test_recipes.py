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


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_program_over_workers_is_the_one_of_plain_torch(library: str, tmp_path: Path) -> None:
    script = Path(__file__).parent / "recipes.py"
    ended = subprocess.run([sys.executable, script, library], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    for kind in found.values():
        workers, plain, without = kind["workers"], kind["plain"], kind["without"]
        assert workers["evaluations"] == plain["evaluations"] and workers == pytest.approx(plain, rel=1e-6)
        assert plain["after"] == without["after"] < 0.7 * workers["before"]
    assert list(found) == list(OPTIMIZERS)
    assert [kind["workers"]["evaluations"] for kind in found.values()] == evaluations(1 + LIBRARIES.index(library))
    assert [kind["without"]["evaluations"] for kind in found.values()] == evaluations(0)
    check_naive([kind["naive"] for kind in found.values()], wiped=library == "Lightning")
    assert not list(tmp_path.iterdir())


def check_naive(found: list[dict[str, Any]], wiped: bool) -> None:
    """`evaluate` is no loss; where it is made one, its gradients stay only in loops that set them to zero before."""
    bare, with_gradient = NAIVE
    for naive in found:
        assert "does not require grad" in naive[bare]
        assert (naive[with_gradient]["after"] == naive[with_gradient]["before"]) is wiped
