"""The pages for people: their programs run, their tables name what the code has, their numbers were measured, their
links lead somewhere."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import batchopt
import batchopt.training

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
RECIPES = ROOT / "docs" / "recipes.md"  # tests/test_recipes.py runs its programs
LIBRARIES = ROOT / "docs" / "libraries.md"  # tests/test_libraries.py runs its programs
EXAMPLES = ROOT / "docs" / "examples"
ERRORS = [EXAMPLES / "physics" / f"{name}.py" for name in ("tomography", "vmc", "waveform")]  # they print first, last
BESIDE = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
PAGES = [*BESIDE, *DOCS, *sorted((ROOT / "docs" / "api").glob("*.md"))]
# The first line of a block that cannot be copied alone.
CONTINUES = "# continues the "

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page: Path, language: str = "python") -> list[str]:
    """The blocks of code of a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def programs(page: Path) -> list[list[str]]:
    """The programs of a page: a block that can be copied alone, with those that continue it; without those that need a
    cluster or ignite, which `tests/cluster` and `tests/training` run."""
    found: list[list[str]] = []
    for block in blocks(page):
        if "from ignite" in block:
            continue
        if block.startswith(CONTINUES) or (found and page.stem == "training"):  # where all blocks are one program
            found[-1].append(block)
        else:
            found.append([block])
    return [program for program in found if 'backend="ray"' not in program[0]]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


# Programs


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize(
    "page",
    [page for page in DOCS if programs(page) and page not in (RECIPES, LIBRARIES)],
    ids=lambda page: page.stem,
)
def test_each_block_of_a_page_runs_alone(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for program in programs(page):
        exec(compile("\n".join(program), str(page), "exec"), {"__name__": "program"})


def run(program: Path, folder: Path) -> str:
    """What a program prints, with warnings as errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "template"}  # threads wait on a busy machine
    command = [sys.executable, "-W", "error", str(program)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_readmes_programs_print_what_the_readme_says(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    printed = []
    for number, block in enumerate(blocks(page)):  # each can be copied alone
        program = tmp_path / f"readme{number}.py"
        program.write_text(block)
        printed.append(run(program, tmp_path))
    power, (expected,) = r"\d+e-\d+", blocks(page, "text")
    assert re.sub(power, "", printed[0]) == re.sub(power, "", expected)
    assert all(float(error) < 0.1 for error in re.findall(power, printed[0]))  # after as many seconds on any machine
    for name, value, error in re.findall(r"`(\w+) ([\d.]+) \+- ([\d.]+)`", prose(page)):
        assert re.search(rf"^{name} +{value} +{error} ", printed[1], re.MULTILINE)


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("example", [*sorted(EXAMPLES.glob("*.py")), *ERRORS], ids=lambda path: path.stem)
def test_examples_do_what_they_say(example: Path, tmp_path: Path) -> None:
    before, *_, after = map(float, re.findall(r"\d+\.\d+", run(example, tmp_path)))
    assert after < before / 10


SENTENCE = re.compile(r"Full-batch optimizers for PyTorch .*? of one process\.")
PLACES = "README.md", "docs/index.md", "pyproject.toml", "batchopt/__init__.py", "CITATION.cff"


def test_one_sentence_says_what_it_is() -> None:
    texts = [" ".join((ROOT / place).read_text().split()) for place in PLACES]
    assert len({tuple(SENTENCE.findall(text)) for text in texts}) == 1
    assert SENTENCE.fullmatch(" ".join((batchopt.__doc__ or "").split()))


# Tables


class Table(NamedTuple):
    """Its cells, row by row without the head; the heading that it is under, and the comment right before it."""

    heading: str
    comment: str
    rows: list[list[str]]


def tables(page: Path) -> Iterator[Table]:
    """The tables of a page, in order."""
    heading, comment, rows = "", "", []
    for line in [*prose(page).splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
            continue
        if rows:
            yield Table(heading, comment, rows[2:])
            comment, rows = "", []
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("<!--"):
            comment = line.strip("<!-> ")


@pytest.mark.parametrize(
    "page, heading, function",
    [
        ("arguments", "Arguments", batchopt.BatchOptimizer),
        ("terms", "Objectives with several terms", batchopt.Term),
        ("training", "fit", batchopt.training.fit),
    ],
)
def test_the_tables_have_every_argument(page: str, heading: str, function: Callable[..., Any]) -> None:
    rows = [row for table in tables(ROOT / "docs" / f"{page}.md") if table.heading == heading for row in table.rows]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(named) == sorted(set(inspect.signature(function).parameters) - {"opt"})


def test_the_tables_have_every_member_with_its_arguments() -> None:
    rows = [row for table in tables(ROOT / "docs" / "api" / "optimizer.md") for row in table.rows]
    documented = {name.split("(")[0]: name for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    with batchopt.BatchOptimizer(torch.nn.Linear(1, 1)) as opt:
        assert documented.keys() == {name for name in dir(opt) if not name.startswith("_")}
    for name, member in documented.items():
        if inspect.isfunction(function := getattr(batchopt.BatchOptimizer, name, None)):
            _, *parameters = inspect.signature(function).parameters
            told = [part.split("=")[0].strip("* )") for part in member.partition("(")[2].split(",")]
            assert told == (parameters or [""]), member


@cache
def numbers(path: Path) -> frozenset[float]:
    """All numbers in a JSON file; files have seconds, tables may have milliseconds."""

    def within(content: Any) -> Iterator[float]:
        for part in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
            yield from within(part)
        if isinstance(content, int | float):
            yield float(content)

    return frozenset(scale * number for number in within(json.loads(path.read_text())) for scale in (1.0, 1e3))


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(table, id=f"{page.stem}-{i}-{Path(table.comment).stem}")
        for page in PAGES
        for i, table in enumerate(tables(page))
        if table.comment
    ],
)
def test_the_numbers_of_a_table_are_those_of_its_results(table: Table) -> None:
    measured = numbers(ROOT / table.comment)

    @cache
    def rounded(form: str) -> set[float]:
        return {float(f"{number:{form}}") for number in measured}

    for row in table.rows:
        for cell in (cell.replace(",", "") for cell in row[1:]):
            if re.fullmatch(r"[\d.]*\d(e-?\d+)?", cell) and cell != "1":
                digits, e, _ = cell.partition("e")
                assert float(cell) in rounded(f".{len(digits.partition('.')[2])}{e or 'f'}"), (cell, row)


# Links


@cache
def tracked() -> frozenset[str]:
    """The files that git has, and their folders."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT)
    files = [Path(line) for line in listed.stdout.splitlines()]
    return frozenset({str(file) for file in files} | {str(folder) for file in files for folder in file.parents})


@cache
def anchors(page: Path) -> set[str]:
    """The places in a page that links can name, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_link_and_picture_leads_to_a_file_in_git_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert str(target.relative_to(ROOT)) in tracked(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "CHANGELOG"], ids=lambda page: page.stem)
def test_every_path_and_test_and_script_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    folders = "batchopt|workers|tests|benchmarks|scripts|docs"
    for path, _, test in re.findall(rf"`(?:\./)?((?:{folders})/[\w./-]*)(::(\w+))?`", text):
        assert path.rstrip("/") in tracked(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), test
    for name in re.findall(r"python\s+-m\s+benchmarks\.(\w+)", text):
        assert f"benchmarks/{name}.py" in tracked(), name


@each_page
def test_prose_is_wrapped(page: Path) -> None:
    for line in prose(page).splitlines():
        assert len(line) <= 120 or line.startswith(("|", "![")), line
