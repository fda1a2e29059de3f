"""Lint, then test what a change touches for about a minute.

The change is the working tree, new files included, against the commit where this branch left `main`; on `main` itself,
against the last commit. For each changed file these tests are run, the first ones first, without the slow ones:

1. the file itself, if it is one of tests; 2. tests that are named after it: `_data/terms.py` has `test_terms.py`,
`process/scheduler.py` has `test_process_scheduler.py`; 3. tests that import it; 4. for the engine and the backends,
what shows the promises: faults, the model, the contract; 5. tests that are named after its folder: `nodes/placing.py`
has `test_nodes.py`.

A module of the library without any of these is tested by `test_exact.py`, a page by `test_docs.py`. Once the minute is
over no further test begins; how many are left is printed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MINUTE = 60.0
# Tests of the promises that any file of these folders can break.
GUARDED = ("batchopt/_engine/", "batchopt/backends/")
PROMISES = ("tests/faults/test_matrix.py", "tests/test_model.py", "tests/backends/test_contract.py")


def git(*arguments: str) -> list[str]:
    """The lines that a git command prints; none if it fails."""
    ended = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT)
    return ended.stdout.splitlines() if ended.returncode == 0 else []


def changed() -> list[str]:
    """The files that differ from the base, and those that git does not have yet."""
    base = git("merge-base", "main", "HEAD") or git("merge-base", "origin/main", "HEAD") or ["HEAD"]
    differing = git("diff", "--name-only", "--no-renames", base[0])
    return sorted({*differing, *git("ls-files", "--others", "--exclude-standard")})


def module_name(file: Path) -> str:
    """The dotted name of a file of Python."""
    parts = file.with_suffix("").parts
    parts = parts[1:] if parts[0] == "workers" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(test: Path) -> set[str]:
    """The dotted names that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / test).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def tests_of(file: str, tests: Sequence[Path]) -> Iterator[tuple[int, Path]]:
    """The tests of a changed file, each with how close it is: the lowest number first."""
    path = Path(file)
    if path.suffix != ".py" or path.parts[0] in ("scripts", "benchmarks"):
        yield 7, Path("tests/test_docs.py")
    if path.suffix != ".py":
        return
    if file.startswith(GUARDED):
        yield from enumerate(map(Path, PROMISES), start=3)
    name, stem, folder = module_name(path), path.stem, path.parent.name.lstrip("_")
    for test in tests:
        if test == path:
            yield 0, test
        elif test.stem in (f"test_{stem}", f"test_{folder}_{stem}"):
            yield 1, test
        elif "." in name and name in imported(test):
            yield 2, test
        elif test.stem == f"test_{folder}":
            yield 6, test


def choose(files: Sequence[str]) -> list[str]:
    """The files of tests for the changed files, the closest first."""
    tests = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    closest: dict[Path, int] = {}
    for file in files:
        found = list(tests_of(file, tests)) or [(8, Path("tests/test_exact.py"))]
        for rank, test in found:
            closest[test] = min(rank, closest.get(test, rank))
    return [str(test) for test in sorted(closest, key=lambda test: (closest[test], test))]


class Deadline:
    """A plugin of pytest: no test begins after `end` (of `time.monotonic`)."""

    def __init__(self, end: float) -> None:
        self.end, self.begun, self.left = end, 0, 0

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin the test."""
        self.begun += 1

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Stop after this test if it is too late for another."""
        self.left = item.session.testscollected - self.begun
        if self.left and time.monotonic() > self.end:
            item.session.shouldstop = f"the minute is over, {self.left} tests are left: ./scripts/test runs all"


def main() -> int:
    """Lint, then test."""
    files = changed()
    if not files:
        print("nothing has changed")
        return 0
    for tool in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        if code := subprocess.run([sys.executable, "-m", *tool], cwd=ROOT).returncode:
            return code
    chosen = choose(files)
    print(f"{len(files)} files have changed; testing {' '.join(chosen)}", flush=True)
    deadline = Deadline(time.monotonic() + MINUTE)
    code = pytest.main(["-q", "-x", *chosen], plugins=[deadline])
    return 0 if code == pytest.ExitCode.INTERRUPTED and deadline.left else int(code)


if __name__ == "__main__":
    sys.exit(main())
