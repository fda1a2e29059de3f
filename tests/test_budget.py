"""What the library may weigh: each number is an upper bound, to be lowered when something has become lighter."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = [*sorted((ROOT / "batchopt").rglob("*.py")), *sorted((ROOT / "workers").rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

LINES, FILES, LINES_OF_TESTS = 30_766, 174, 33_298
LINES_OF_A_FILE, FILES_OF_A_FOLDER = 450, 20
CHAIN = 24
DEFINITIONS = {"evaluate": 18, "resize": 12, "begin_task": 10}
# A docstring that begins so is half a sentence.
BEGINNINGS = {"What", "Whether", "Where", "How", "Those", "As", "Of", "Who", "Which", "When", "That"}


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text())


def length(path: Path) -> int:
    """Its lines."""
    return len(path.read_text().splitlines())


def lines_of_examples(path: Path) -> int:
    """Its lines in docstrings from `>>>` on: they are documentation, and no code to read past."""
    definitions = ast.FunctionDef, ast.ClassDef, ast.Module
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree(path)) if isinstance(node, definitions)]
    return sum(text[text.index(">>> ") :].count("\n") + 2 for text in docstrings if ">>> " in text)


def test_lines() -> None:
    assert sum(map(length, LIBRARY)) <= LINES
    assert len(LIBRARY) <= FILES
    assert sum(map(length, TESTS)) <= LINES_OF_TESTS


def test_files_and_folders_are_small() -> None:
    assert [str(path) for path in LIBRARY if length(path) - lines_of_examples(path) > LINES_OF_A_FILE] == []
    folders = Counter(path.parent for path in LIBRARY if path.name != "__init__.py")
    assert {str(folder): number for folder, number in folders.items() if number > FILES_OF_A_FOLDER} == {}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_one_name_is_not_defined_everywhere(name: str) -> None:
    found = [node for path in LIBRARY for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)]
    assert sum(node.name == name for node in found) <= DEFINITIONS[name]


def test_docstrings_begin_with_what_a_thing_is_or_does() -> None:
    found = []
    for path in LIBRARY:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                words = (ast.get_docstring(node) or "").split(maxsplit=1)
                if words and words[0].strip(".,:") in BEGINNINGS:
                    found.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'the module')}: {words[0]} ...")
    assert found == []


def module_of(path: Path) -> str:
    """The name by which it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts[parts[0] == "workers" :] if part != "__init__")


def imports(path: Path, modules: set[str]) -> set[str]:
    """The modules that it imports, of these, when it is imported."""
    found = set()
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= names or {node.module} & modules
    return found


def test_the_longest_chain_of_imports() -> None:
    modules = {module_of(path) for path in LIBRARY}
    imported = {module_of(path): imports(path, modules) for path in LIBRARY}

    @cache
    def depth(module: str) -> int:
        return 1 + max((depth(other) for other in imported[module] - {module}), default=0)

    assert max(map(depth, modules)) <= CHAIN  # a cycle would be a RecursionError
