"""Makes things go wrong, as planned, in every Python process that is started with this folder on its path.

The plan is a folder: `plan.json` is a list of faults `{"who": rank | "parent" | "worker", "point": name, "chunk":
number or null, "nth": number, "do": action, "times": number}`. A fault fires at the `nth` time that its point is
reached in a process, `times` times in all processes together; each firing leaves a file. Chunks that are evaluated
are written to `log`. In a process that plays one case after the other the folder has no plan, but a file `case`: the
path of the one that has.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any


class Untold(Exception):
    """Cannot be pickled, nor shown."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = sys._getframe

    def __str__(self) -> str:
        raise KeyError("no text")


class Plan:
    """The hook of `batchopt_workers.life.faults`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._faults = json.loads((folder / "plan.json").read_text())
        self._seen = [0] * len(self._faults)

    def __call__(self, point: str, chunk: int) -> None:
        from batchopt_workers.life import faults

        if point == "worker.forward":
            log = os.open(self._folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(log, f"{faults.rank} {os.getpid()} {chunk}\n".encode())
            os.close(log)
        for i, fault in enumerate(self._faults):
            who = "parent" if faults.rank < 0 else faults.rank
            mine = fault["who"] == who or (fault["who"] == "worker" and who != "parent")
            if mine and fault["point"] == point and fault.get("chunk") in (None, chunk):
                self._seen[i] += 1
                if self._seen[i] >= fault.get("nth", 1) and self._fires(i, fault):
                    act(fault["do"], sys._getframe(2))

    def _fires(self, i: int, fault: dict[str, Any]) -> bool:
        for time_ in range(fault.get("times", 1)):
            try:
                os.close(os.open(self._folder / f"fired-{i}-{time_}", os.O_CREAT | os.O_EXCL))
                return True
            except FileExistsError:
                continue
        return False


class LatestPlan:
    """That of the case which is being played when a process comes to its first point: a worker, for what it was forked
    from comes to none."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def __call__(self, point: str, chunk: int) -> None:
        from batchopt_workers.life import faults

        faults.hook = Plan(Path((self._home / "case").read_text()))
        faults.hook(point, chunk)


def act(action: str, caller: FrameType) -> None:
    """Do it, in the process that reached the point; `caller` is the code there."""
    if action.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, action))
        time.sleep(0.01 if action == "SIGINT" else 60)  # for it to arrive
    elif action == "stop and continue":
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "stop the parent":
        parent = multiprocessing.parent_process()
        assert parent is not None
        time.sleep(0.3)  # until it waits
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {parent.pid}"], start_new_session=True)
        os.kill(parent.pid or 0, signal.SIGSTOP)
    elif action == "segfault":
        ctypes.string_at(0)
    elif action == "C exit":
        ctypes.CDLL(None).exit(0)
    elif action == "hang":
        time.sleep(1e6)
    elif action == "hold the GIL":
        ctypes.PyDLL(None).sleep(10**6)
    elif action == "delay":
        time.sleep(0.4)
    elif action == "close the pipe":
        caller.f_locals["mailbox"]._end.close()
    elif action == "garbage":
        caller.f_locals["mailbox"]._end.send(bytes(range(256)))
    elif action == "twice":
        caller.f_locals["self"]._end.send(caller.f_locals["reply"].data)
    elif action == "a wrong number":
        caller.f_locals["self"]._end.send((10**6).to_bytes(8, "big") + caller.f_locals["reply"].data[8:])
    elif action in LIES:
        from batchopt_workers.wire import page

        slot = page.SLOTS + (caller.f_locals["number"] & 1) * page.SLOT
        caller.f_locals["ints"][slot + LIES[action](page)] = 10**6
    else:
        exec(action, {"os": os, "sys": sys, "Untold": Untold})


# Where on the page there is a number that cannot be right.
LIES = {
    "a chunk that is not there": lambda page: page.NEXT,
    "a partial too many": lambda page: page.COUNT,
    "a row that is not there": lambda page: page.PARTIALS + 2,
    "a place that is not there": lambda page: page.PARTIALS + 1,
}


def install(folder: Path) -> None:
    """From now on this process follows the plan in `folder`, or the one that `case` there names."""
    from batchopt_workers.life import faults

    if not (folder / "plan.json").exists():
        faults.hook = LatestPlan(folder)
        return
    faults.hook = Plan(folder)


if "BATCHOPT_TEST_FAULTS" in os.environ:
    install(Path(os.environ["BATCHOPT_TEST_FAULTS"]))
