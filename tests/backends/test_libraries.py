"""Libraries that the program is made of are imported once, by the process that workers are forked from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = """
import os, threading, torch
with open(os.environ["NOTES"], "a") as notes:
    notes.write(str(os.getpid()) + " ")
{more}
class Layer(torch.nn.Linear):
    pass
"""
PROGRAM = """
import os, sys, torch, batchopt, a_library
from batchopt.backends.process import forkserver
forkserver._library_folders = lambda: {folders}
torch.manual_seed(0)
x = torch.randn(64, 3)
for _ in range(2):
    module = a_library.Layer(3, 1)
    with batchopt.BatchOptimizer(module, torch.nn.MSELoss(), optimizer=None, parallelize=2, {options}) as opt:
        opt.load(x, x[:, :1])
        opt.evaluate()
        servers = set(opt.run_on_workers(lambda worker: os.getppid()))
print(os.getpid(), *servers)
"""


def importers(tmp_path: Path, more: str = "", folders: str = "", options: str = "") -> tuple[list[str], list[str]]:
    """Who has imported the library, in order; the program's process and the one that workers are forked from."""
    (tmp_path / "a_library.py").write_text(LIBRARY.format(more=more))
    notes = tmp_path / "notes"
    program = PROGRAM.format(folders=folders or f"('{tmp_path}/',)", options=options)
    found = {"PYTHONPATH": str(tmp_path), "NOTES": str(notes)}
    environment = {**os.environ, **found}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return notes.read_text().split(), done.stdout.split()


@pytest.mark.slow
def test_a_library_is_imported_once_for_all_workers_of_all_optimizers(tmp_path: Path) -> None:
    who, expected = importers(tmp_path)
    assert who == expected and len(who) == 2


STARTS_THREADS = "threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.nightly
@pytest.mark.rows
@pytest.mark.parametrize(
    "given, times",
    [
        ({"folders": "('/somewhere/else/',)"}, 5),  # the user's own module may be edited
        ({"options": "precode=lambda worker: None"}, 5),  # which may be for that import
        ({"more": STARTS_THREADS}, 6),  # once in a process that has ended
    ],
)
def test_each_worker_imports_what_may_have_to_be_imported_there(
    tmp_path: Path, given: dict[str, str], times: int
) -> None:
    who, (parent, server) = importers(tmp_path, **given)
    assert len(who) == times and who[0] == parent and server not in who
