"""Modules on a card, simulated or real: see `tests/card`, whose tests need processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path.name for path in (ROOT / "tests/card").glob("test_*.py"))


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler to build the card with")
@pytest.mark.timeout(480)
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_module_on_a_card(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"tests/card/{name}"]
    environment = {**os.environ, "BATCHOPT_CARD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout or "cannot be built for torch" in done.stdout
