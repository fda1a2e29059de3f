"""Running a case in a process apart from the tests, and what it has to leave."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.backends.scripts import assert_gone

HERE = Path(__file__).parent
LIMIT = 240.0
# What is raised in the last chunk by worker 1, and how the error begins.
ERRORS = {
    "raise ValueError('bad')": "WorkerError: ValueError in worker 1, samples 40..47: bad",
    "raise Untold": "WorkerError: Untold in worker 1, samples 40..47: <its __str__ raised KeyError>",
    "raise SystemExit(0)": "WorkerError: SystemExit in worker 1, samples 40..47: 0",
    "raise KeyboardInterrupt": "WorkerError: KeyboardInterrupt in worker 1, samples 40..47: ",
    "raise GeneratorExit": "WorkerError: GeneratorExit in worker 1, samples 40..47: ",
    "raise StopIteration": "WorkerError: ",
    "raise MemoryError": "WorkerError: MemoryError in worker 1, samples 40..47:  (a smaller chunk_size",
    "raise ValueError('x' * 10**7)": "WorkerError: ValueError in worker 1, samples 40..47: xxx",
}


@dataclass(frozen=True)
class Fault:
    """See `sitecustomize`."""

    point: str
    do: str
    who: int | str = "worker"
    chunk: int | None = None
    nth: int = 1
    times: int = 1


@dataclass
class Ended:
    """A case that is over: what the program found, what it printed, how often each chunk was evaluated, which faults
    fired how often, and how many processes of workers were started."""

    outcome: dict[str, Any]
    returncode: int
    stderr: str
    chunks: Counter[int]
    fired: list[int]
    pids: set[int] = field(default_factory=set)


class Host:
    """A process that plays one case after the other, with one process that all their workers are forked from: to start
    the two, which import torch, takes ten times as long as a case. Another one is started after a case that ended
    it."""

    def __init__(self, home: Path) -> None:
        """`home`: a folder of its own."""
        self._home = home
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._process.pid if self._process is not None else None

    def play(self, folder: Path, case: dict[str, Any]) -> tuple[int, str]:
        """Returns 0, or the exit code of the process that the case has ended; and what was written to standard
        error."""
        if self._process is None:
            paths = [str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
            environment = {"BATCHOPT_TEST_FAULTS": str(self._home), "PYTHONPATH": os.pathsep.join(paths)}
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.faults.program", str(self._home)],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None and answers is not None
        orders.write(json.dumps([case, str(folder)]) + "\n")
        orders.flush()
        code = 0
        if not select.select([answers], [], [], LIMIT)[0] or answers.readline() != "over\n":
            code = self.end()
        return code, (folder / "stderr").read_text()

    def end(self) -> int:
        """Kill the process, if there is one; its exit code."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        with process:
            process.kill()
        return process.returncode


def play(folder: Path, faults: Sequence[Fault], host: Host, **case: Any) -> Ended:
    """Play a case under the faults in `host`, to its end; fails if it leaves a process."""
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps([vars(fault) for fault in faults]))
    returncode, stderr = host.play(folder, case)
    log = folder / "log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    pids = {int(pid) for _, pid, _ in lines}
    assert_gone(pids - {host.pid})
    outcome = torch.load(folder / "outcome", weights_only=True) if (folder / "outcome").exists() else {}
    fired = [len(list(folder.glob(f"fired-{i}-*"))) for i in range(len(faults))]
    return Ended(outcome, returncode, stderr, Counter(int(chunk) for _, _, chunk in lines), fired, pids)


Play = Callable[..., Ended]


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Fail unless parameters, losses, optimizer state and counters are the same."""
    assert torch.equal(one["X"], other["X"])
    assert one["losses"] == other["losses"]
    assert one["fingerprint"] == other["fingerprint"]
    assert one["evaluations"] == other["evaluations"]
    assert equal(one["state"], other["state"])


def equal(one: Any, other: Any) -> bool:
    """Whether two nested structures have the same bits."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
