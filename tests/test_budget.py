"""The shape of the library: which room may import which, and that docstrings and files stay readable."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARY = [*sorted((ROOT / "batchopt").rglob("*.py")), *sorted((ROOT / "workers").rglob("*.py"))]
LINES_OF_A_FILE = 600
# The floors, from the ground: nothing imports from a floor above its own.
FLOORS = (
    ("batchopt_workers",),
    ("batchopt.errors",),
    ("batchopt._machine",),
    ("batchopt._data", "batchopt._program", "batchopt._mapreduce"),
    ("batchopt.backends", "batchopt.optim"),
    ("batchopt._engine",),
    ("batchopt._functions",),
    ("batchopt",),
)
# A docstring that begins so is half a sentence.
BEGINNINGS = {"What", "Whether", "Where", "How", "Those", "As", "Of", "Who", "Which", "When", "That"}


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text())


def lines_of_examples(path: Path) -> int:
    """Its lines in docstrings from `>>>` on: they are documentation, and no code to read past."""
    definitions = ast.FunctionDef, ast.ClassDef, ast.Module
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree(path)) if isinstance(node, definitions)]
    return sum(text[text.index(">>> ") :].count("\n") + 2 for text in docstrings if ">>> " in text)


def test_files_can_be_read_in_one_go() -> None:
    lengths = {path: path.read_text().count("\n") - lines_of_examples(path) for path in LIBRARY}
    assert [str(path) for path, length in lengths.items() if length > LINES_OF_A_FILE] == []


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


MODULES = {module_of(path): path for path in LIBRARY}


def imports(module: str) -> set[str]:
    """The modules of the library that it imports when it is imported."""
    found = set()
    for node in tree(MODULES[module]).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= names or {node.module} & MODULES.keys()
    return found


def floor(module: str) -> int:
    """The number of its floor, by the longest name that fits."""
    rooms = [(room, number) for number, floor in enumerate(FLOORS) for room in floor]
    return max((len(room), number) for room, number in rooms if f"{module}.".startswith(f"{room}."))[1]


def test_nothing_imports_from_a_floor_above() -> None:
    assert [(one, two) for one in MODULES for two in imports(one) if floor(two) > floor(one)] == []


def uses_of_what_is_private(path: Path) -> list[str]:
    """The private modules that a file imports from the library, and the private attributes that it takes of others."""
    found, classes = [], [node.name for node in tree(path).body if isinstance(node, ast.ClassDef)]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0].startswith("batchopt"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            if names[0] != "batchopt" or "backends" in names or any(name.startswith("_") for name in names):
                found.append(f"line {node.lineno}: {node.module}")
        if isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", *classes)):
                found.append(f"line {node.lineno}: .{node.attr}")
    return found


# Of torch, and of records.
EXCUSED = {"_DropoutNd", "_replace"}


def test_extras_use_the_public_interface_alone() -> None:
    """But for Hogwild, which is a task of the engine in which workers write parameters: there is no door for that."""
    extras = [path for path in LIBRARY if path.parent.name in ("extras", "training") and path.stem != "hogwild"]
    assert len(extras) > 15
    found = [f"{path.name}, {use}" for path in extras for use in uses_of_what_is_private(path)]
    assert [use for use in found if use.split(".")[-1] not in EXCUSED] == []


def test_there_is_no_circle() -> None:
    done: set[str] = set()
    while ready := {module for module in MODULES if module not in done and imports(module) - {module} <= done}:
        done |= ready
    assert MODULES.keys() - done == set()
