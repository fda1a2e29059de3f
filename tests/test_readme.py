"""The README's programs run as they are written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def blocks() -> list[str]:
    """The Python blocks, in order, but for those that need a cluster: `tests/cluster` runs them."""
    found = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return [block for block in found if 'backend="ray"' not in block]


def test_the_examples_run_one_after_the_other(tmp_path: Path) -> None:
    first, *more = blocks()
    program = tmp_path / "readme.py"
    program.write_text("\n".join([first, "criterion = torch.nn.MSELoss()", *more, "print('loss', losses[-1])"]))
    ended = subprocess.run(
        [sys.executable, "-W", "error", program], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    *steps, last = ended.stdout.splitlines()
    losses = [float(line.split()[1]) for line in steps]
    assert len(losses) == 10 and losses[-1] < losses[0] / 100
    assert float(last.split()[1]) < losses[0] / 100  # of a part of the data


def test_every_argument_and_member_is_in_the_tables() -> None:
    import inspect

    import batchopt

    text = README.read_text()
    for name in inspect.signature(batchopt.BatchOptimizer).parameters:
        assert f"`{name}`" in text, name
    for_the_doctor = {"load_in_chunks", "program", "twin", "unobserved"}
    for name in dir(batchopt.BatchOptimizer):
        if not name.startswith("_") and name not in for_the_doctor | {"module", "criterion"}:
            assert re.search(rf"`{name}[(`]|, {name}[(`]", text), name
