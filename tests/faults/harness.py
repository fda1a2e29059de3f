"""Running a case in a process of its own, and what it has to leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

HERE = Path(__file__).parent
LIMIT = 60.0


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


def play(folder: Path, faults: Sequence[Fault], program: str = "tests.faults.program", **case: Any) -> Ended:
    """Run the program under the faults, to its end; fails if it leaves a process."""
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps([vars(fault) for fault in faults]))
    environment = os.environ | {
        "BATCHOPT_TEST_FAULTS": str(folder),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]),
    }
    arguments = [sys.executable, "-W", "error", "-m", program, json.dumps(case), str(folder)]
    with subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, stderr = process.communicate(timeout=LIMIT)
        finally:
            if process.poll() is None:
                process.kill()
    log = folder / "log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    pids = {int(pid) for _, pid, _ in lines}
    gone(pids)
    outcome = torch.load(folder / "outcome", weights_only=True) if (folder / "outcome").exists() else {}
    fired = [len(list(folder.glob(f"fired-{i}-*"))) for i in range(len(faults))]
    return Ended(outcome, process.returncode, stderr, Counter(int(chunk) for _, _, chunk in lines), fired, pids)


def gone(pids: set[int], seconds: float = 2.0) -> None:
    """Fail if one of the processes lives on."""
    living = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(living, timeout=seconds)
    assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


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
