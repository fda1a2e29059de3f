"""The programs of docs/libraries.md compute what plain torch computes, with one and two workers."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.libraries import PAGE, programs

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]  # each program imports its library, some for a minute

PROGRAMS = programs()
# In units of the dtype's rounding, relative to the largest element; sums of a matrix's factors lose some digits.
ROUNDING = 1e4


@pytest.mark.parametrize("library", PROGRAMS)
def test_f_and_its_gradient_are_those_of_plain_torch(library: str, tmp_path: Path) -> None:
    needed = re.findall(r"^(?:import|from) (\w+)", PROGRAMS[library], re.MULTILINE)
    needed += re.findall(r"^import (\w+), torch", PROGRAMS[library], re.MULTILINE)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; .ci/nightly installs it")
    script = Path(__file__).parent / "libraries.py"
    ended = subprocess.run([sys.executable, script, library], capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert list(found) == ["1", "2"]
    for workers in found.values():
        assert workers["f"] < ROUNDING and workers["gradient"] < ROUNDING, found


def test_every_program_has_its_install_line() -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert [text.partition("\n")[0] for text in sections] == list(PROGRAMS)
    for text in sections:
        assert "```sh\npip install -c constraints.txt " in text and PROGRAMS[text.partition("\n")[0]]
