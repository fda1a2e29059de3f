"""docs/ancestors.md has every row, once, with tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_docs import ROOT, tables

PAGE = ROOT / "docs" / "ancestors.md"
COUNTS = {"A": 60, "B": 24, "C": 24, "D": 17, "E": 10, "W": 43}
ROWS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]


@cache
def functions_of(path: Path) -> frozenset[str]:
    """The functions and methods of a file."""
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def rows(left_out: bool) -> Iterator[list[str]]:
    """The rows of the table of what is left out, or of all others."""
    for table in tables(PAGE):
        if (table.heading == "Not carried over") == left_out:
            yield from table.rows


def test_every_row_is_there_once() -> None:
    assert sorted(row[0] for left_out in (False, True) for row in rows(left_out)) == sorted(ROWS)


@pytest.mark.parametrize("letter", COUNTS)
def test_each_row_names_tests_that_exist(letter: str) -> None:
    for name, there, here, shown in rows(left_out=False):
        if name[0] != letter:
            continue
        named = re.findall(r"`([^`]+)::(test_\w+)`", shown)
        assert there and here and named and shown == ", ".join(f"`{path}::{test}`" for path, test in named), name
        for path, test in named:
            assert test in functions_of(ROOT / path), (path, test)


def test_what_is_left_out_has_a_reason() -> None:
    assert all(what and why for _, what, why in rows(left_out=True))
