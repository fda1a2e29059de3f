"""The pages for people: their programs run, their tables name what the code has, their numbers were measured, their
links lead somewhere."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import batchopt
from batchopt import errors
from benchmarks.findings import RESULTS, read
from tests import recipes

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
RECIPES = ROOT / "docs" / "recipes.md"  # tests/test_recipes.py runs its programs
LIBRARIES = ROOT / "docs" / "libraries.md"  # tests/test_libraries.py runs its programs
REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))
BESIDE = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
PAGES = [*BESIDE, *DOCS, *REFERENCE]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page: Path, language: str = "python") -> list[str]:
    """The blocks of code of a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def programs(page: Path) -> list[str]:
    """The blocks of Python, without those that need a cluster or ignite: tests/cluster and tests/training run them."""
    return [block for block in blocks(page) if 'backend="ray"' not in block and "from ignite" not in block]


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
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(programs(page)), str(page), "exec"), {"__name__": "program"})


ALONE = ["Two optimizers over one module", pytest.param("pytorch-pfn-extras", marks=pytest.mark.nightly)]


@pytest.mark.slow
@pytest.mark.parametrize("heading", ALONE)
def test_recipes_that_stand_alone_run(heading: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(recipes.read()[0] + recipes.read()[1][heading])
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_the_readmes_program_prints_what_the_readme_says(tmp_path: Path) -> None:
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks(ROOT / "README.md")))
    ended = subprocess.run(
        [sys.executable, "-W", "error", program],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # several threads on a busy machine wait for each other
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    seconds = r"\d+\.\d\d s"
    (expected,) = blocks(ROOT / "README.md", "text")
    assert re.sub(seconds, "", ended.stdout) == re.sub(seconds, "", expected)


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
            assert all(re.fullmatch("-+", cell) for cell in rows[1]), f"no head: {rows}"
            yield Table(heading, comment, rows[2:])
            comment, rows = "", []
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("<!--"):
            comment = line.strip("<!-> ")


def column(page: Path, heading: str, index: int = 0) -> list[str]:
    """All that stands in backticks in a column of the tables under a heading."""
    cells = [row[index] for table in tables(page) if table.heading == heading for row in table.rows]
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


ARGUMENTS = ROOT / "docs" / "arguments.md"


def test_the_map_names_what_there_is() -> None:
    rows = [row for table in tables(ROOT / "docs" / "design.md") for row in table.rows]
    assert len(rows) == 12
    named = [path for row in rows for path in re.findall(r"`([a-z_/]+/[a-z_./]*)`", " ".join(row))]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_tables_have_every_argument() -> None:
    arguments = list(inspect.signature(batchopt.BatchOptimizer).parameters)
    assert sorted(column(ARGUMENTS, "Arguments")) == sorted(arguments)


def test_the_tables_have_every_member_and_how_it_is_called() -> None:
    page = ROOT / "docs" / "api" / "optimizer.md"
    documented = {member.split("(")[0]: member for member in column(page, "Members")}
    with batchopt.BatchOptimizer(torch.nn.Linear(1, 1)) as opt:
        members = {name for name in dir(opt) if not name.startswith("_")}
    assert documented.keys() == members
    for name, member in documented.items():
        found = getattr(batchopt.BatchOptimizer, name, None)
        assert member == (called(name, found) if inspect.isfunction(found) else name)


def test_the_table_of_doors_has_all_of_them() -> None:
    doors = {door for row in column(ROOT / "docs" / "extending.md", "Extending") for door in re.findall(r"\w+", row)}
    functions = [name for name, one in vars(batchopt.extending).items() if inspect.isfunction(one)]
    ours = {name for name in functions if "opt" in inspect.signature(getattr(batchopt.extending, name)).parameters}
    assert ours <= doors and len(ours) > 15


def called(name: str, function: Callable[..., Any]) -> str:
    """A method and its parameters, as the tables write it."""
    _, *parameters = inspect.signature(function).parameters.values()
    plain = [
        f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name + ("" if p.default is p.empty else f"={p.default!r}")
        for p in parameters
    ]
    return f"{name}({', '.join(plain)})"


def test_the_tables_have_every_option_of_the_optimizers_and_its_default() -> None:
    documented = {
        (kind, row[0].strip("`"), row[3].strip("`"))
        for table in tables(ROOT / "docs" / "optimizers.md")
        if table.heading == "Options"
        for row in table.rows
        for kind in re.findall(r"`(\w+)`", row[1])
    }
    kinds = (batchopt.LBFGS, batchopt.CG, batchopt.SSBroyden, batchopt.LevenbergMarquardt, batchopt.SVRG)
    assert documented == {(kind.__name__, name, default) for kind in kinds for name, default in defaults(kind)}


def test_the_table_of_a_terms_arguments_is_complete() -> None:
    (table,) = [t for t in tables(ROOT / "docs" / "terms.md") if t.rows[0][0] == "`loss_fn`"]
    assert [(row[0].strip("`"), row[2].strip("`")) for row in table.rows] == list(defaults(batchopt.Term))


def defaults(kind: type) -> Iterator[tuple[str, str]]:
    """The arguments of a class, and the default of each as it is written; empty where there is none."""
    for name, parameter in inspect.signature(kind).parameters.items():
        yield name, "" if parameter.default is parameter.empty else repr(parameter.default)


def test_the_table_of_fit_has_every_argument_and_its_default() -> None:
    (table,) = [t for t in tables(ROOT / "docs" / "training.md") if t.heading == "fit"]
    parameters = inspect.signature(batchopt.training.fit).parameters
    assert sorted(column(ROOT / "docs" / "training.md", "fit")) == sorted(set(parameters) - {"opt"})
    for row in table.rows:
        names, values = (re.findall(r"`([^`]+)`", row[i]) for i in (0, 2))
        defaults = [
            parameters[name].default for name in names if parameters[name].default is not inspect.Parameter.empty
        ]
        assert [repr(value).replace("'", '"') for value in defaults] == (
            values * len(defaults) if len(values) == 1 else values
        )


def test_every_error_is_in_the_table() -> None:
    documented = set(column(ROOT / "docs" / "faults.md", "Raised as errors", 1))
    raised = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.BatchoptError) and not name.startswith("_")
    }
    assert raised <= documented


# Numbers


MEASURED = [
    pytest.param(table, id=f"{page.stem}-{i}-{Path(table.comment).stem}")
    for page in PAGES
    for i, table in enumerate(tables(page))
    if table.comment
]
# Files have seconds; tables may have milliseconds.
SCALES = (1.0, 1e3)


@pytest.mark.parametrize("table", MEASURED)
def test_the_numbers_of_a_table_are_those_of_its_results(table: Table) -> None:
    measured = {
        scale * number for number in numbers(json.loads((ROOT / table.comment).read_text())) for scale in SCALES
    }

    @cache
    def rounded(form: str) -> set[float]:
        return {float(f"{number:{form}}") for number in measured}

    for row in table.rows:
        for cell in row[1:]:
            if is_number(cell) and cell != "1":
                assert float(cell.replace(",", "")) in rounded(form_of(cell)), (cell, row)


def numbers(content: Any) -> Iterator[float]:
    """All numbers in the content of a JSON file."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        for part in content:
            yield from numbers(part)
    elif isinstance(content, int | float):
        yield float(content)


def form_of(cell: str) -> str:
    """The format with as many digits as the number in a cell has."""
    digits, e, _ = cell.replace(",", "").partition("e")
    return f".{len(digits.partition('.')[2])}{e or 'f'}"


def shown(number: float, cell: str) -> bool:
    """Whether a cell is this number, rounded to as many digits as the cell has."""
    return float(f"{number:{form_of(cell)}}") == float(cell.replace(",", ""))


@pytest.mark.parametrize("result", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_every_target_that_is_not_met_is_published(result: str) -> None:
    name = f"benchmarks/results/{result}.json"
    pages = [ROOT / "docs" / f"{page}.md" for page in ("benchmarks", "measurements")]
    rows = [row for page in pages for t in tables(page) if t.comment == name for row in t.rows]
    for finding in read(result):
        if finding.verdict == "NOT MET":
            assert any(row[-1] == "not met" and has(row, finding.value) for row in rows), finding


def has(row: Sequence[str], number: float) -> bool:
    """Whether one of the cells is this number, rounded."""
    return any(is_number(cell) and shown(number, cell) for cell in row)


def is_number(cell: str) -> bool:
    """Whether a cell of a table holds a number and nothing else."""
    return re.fullmatch(r"[\d.,]*\d(e-?\d+)?", cell) is not None


# Links


@cache
def tracked() -> frozenset[str]:
    """The files that git has, and their folders."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT)
    files = [Path(line) for line in listed.stdout.splitlines()]
    return frozenset({str(file) for file in files} | {str(folder) for file in files for folder in file.parents})


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


@pytest.mark.parametrize("page", PAGES[:-1], ids=lambda page: page.stem)  # the changelog may tell of what was
def test_every_path_and_test_and_script_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    for path, _, test in re.findall(
        r"`(?:\./)?((?:batchopt|workers|tests|benchmarks|scripts|docs)/[\w./-]*)(::(\w+))?`", text
    ):
        assert path.rstrip("/") in tracked(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), test
    for name in re.findall(r"python\s+-m\s+benchmarks\.(\w+)", text):
        assert f"benchmarks/{name}.py" in tracked(), name


@each_page
def test_prose_is_wrapped(page: Path) -> None:
    for line in prose(page).splitlines():
        assert len(line) <= 120 or line.startswith(("|", "![")), line


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


# Examples


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("example", sorted((ROOT / "docs" / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short_and_do_what_they_say(example: Path, tmp_path: Path) -> None:
    assert len(example.read_text().splitlines()) <= 40
    ended = subprocess.run(
        [sys.executable, "-W", "error", example], capture_output=True, text=True, timeout=280, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    before, after = map(float, re.findall(r"\d+\.\d+", ended.stdout))
    assert after < before / 10


@pytest.mark.nightly
def test_the_training_that_is_killed_and_started_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    def started(name: str) -> subprocess.Popen[str]:
        (tmp_path / name).mkdir(exist_ok=True)
        command = [sys.executable, "-W", "error", str(ROOT / "docs" / "examples" / "digits_fit.py")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path / name)

    killed = started("killed")
    until = time.monotonic() + 60
    while not list((tmp_path / "killed").glob("digits/0000003*.batchopt")):
        assert killed.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    printed = [process.communicate(timeout=280)[0] for process in (started("killed"), started("whole"))]
    assert printed[0] == printed[1] and "falls" in printed[0]
    logs = [(tmp_path / name / "digits.jsonl").read_text().splitlines() for name in ("killed", "whole")]
    assert len(logs[0]) == len(logs[1]) == 30
