"""Programs that the tests start: how they end, and whom they leave."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

SCRIPT = """
import sys, torch, batchopt

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
    def forward(self, x):
        return helper(self.layer(x))

def helper(x):
    return torch.tanh(x)

torch.manual_seed(0)
x, y = torch.randn(9, 3), torch.randn(9, 2)
net = Net()
criterion = torch.nn.MSELoss()
expected = criterion(net(x), y).item()
indices = lambda worker, sample: list(sample.indices)
opt = batchopt.BatchOptimizer(net, criterion, parallelize=2, optimizer=None, posthook=indices)
opt.load(x, y)
assert abs(opt.evaluate().item() - expected) < 1e-6
assert sum(opt.hook_results, []) == list(range(9))
print("PIDS", *[worker.pid for worker in opt.workers], flush=True)
"""


def python(*arguments: str, script: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter to its end, with all warnings shown."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments], input=script, text=True, capture_output=True, timeout=280, cwd=cwd
    )


def printed(script: str, code: int = 0) -> str:
    """What the program prints, which ends with this code."""
    ended = python("-c", script)
    assert ended.returncode == code, ended.stderr
    return ended.stdout


@contextmanager
def running(script: str, *words: str, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program once it has printed all the words, each as often as it is given, and what it printed until then.
    It is killed at last."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **{**pipes, **options}) as program:
        try:
            assert program.stdout is not None
            said = ""
            while any(said.count(word) < words.count(word) for word in words):
                line = program.stdout.readline()
                assert line, said
                said += line
            yield program, said
        finally:
            program.kill()


def pids(output: str) -> list[int]:
    """The process ids that the script printed after `PIDS`."""
    return [int(pid) for line in output.splitlines() if line.startswith("PIDS") for pid in line.split()[1:]]


def assert_gone(pids: Iterable[int], seconds: float = 20.0) -> None:
    """Each process ends within so many seconds, or has ended."""
    living = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            living.append(psutil.Process(pid))
    _, left = psutil.wait_procs(living, timeout=seconds)
    assert not [process for process in left if not ended(process)]


def ended(process: psutil.Process) -> bool:
    """Whether it is gone, or a zombie that its parent has not asked for."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
