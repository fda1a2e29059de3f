"""Starting a worker process: a `torch.multiprocessing` process of the spawn kind, less what makes spawning awkward.

Compared with the plain one: it does not import the user's `__main__` (no main guard needed, works from a notebook and
from standard input), gets an environment of its own without a change to the parent's, leads a process group of its
own (its children can be ended with it; Ctrl-C in a terminal reaches the parent only), starts no resource tracker, and
settles no global start method.
"""

from __future__ import annotations

import copyreg
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import process as mp_process
from multiprocessing import reduction, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen as SpawnPopen
from typing import Any

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


# glibc gives large blocks back to the kernel at every free, so that each forward faults its pages in again; workers
# keep them.
_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}


def worker_environment(threads: int) -> dict[str, str]:
    """The parent's environment, with every thread pool sized before the libraries that read it load; the allocator
    keeps its memory, unless the user has settings of their own."""
    return {**_ALLOCATOR, **os.environ, **{name: str(threads) for name in _THREAD_VARIABLES}}


class _Popen(SpawnPopen):
    def __init__(self, process: WorkerProcess) -> None:
        self._environment = process.environment
        super().__init__(process)

    def _launch(self, process: WorkerProcess) -> None:
        payload = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(_preparation(process.name), payload)
            reduction.dump(process, payload)
        finally:
            set_spawning_popen(None)
        parent_end, child_alive = os.pipe()
        child_end, parent_alive = os.pipe()
        self.finalizer = util.Finalize(self, _close_all, (parent_end, parent_alive))
        try:
            self._child = subprocess.Popen(
                spawn.get_command_line(tracker_fd=None, pipe_handle=child_end),
                executable=spawn.get_executable(),
                pass_fds=[child_end, child_alive, *self._fds],  # type: ignore[attr-defined]
                env=self._environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            _close_all(child_end, child_alive)
        self.pid = self._child.pid
        self.sentinel = parent_end
        with open(parent_alive, "wb", closefd=False) as pipe:
            pipe.write(payload.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        self.returncode = self._child.poll() if flag == os.WNOHANG else self._child.wait()
        return self.returncode


class WorkerProcess(SpawnProcess):
    """A spawned process with its own environment; everything else as in `torch.multiprocessing`."""

    def __init__(self, environment: Mapping[str, str], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.environment = environment

    _Popen = staticmethod(_Popen)  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        """Arrive as the plain kind, so that the worker does not import this package; its environment it has already."""
        state = {key: value for key, value in vars(self).items() if key != "environment"}
        return copyreg._reconstructor, (SpawnProcess, object, None), state  # type: ignore[attr-defined]

    def kill_group(self) -> None:
        """SIGKILL the process and whatever it started, unless it was reaped."""
        if self.pid is not None and self.exitcode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _preparation(name: str) -> dict[str, Any]:
    """What the child's start-up code reads; without `__main__`, and without a start method."""
    if getattr(mp_process.current_process(), "_inheriting", False):
        raise RuntimeError(
            "batchopt was started while a spawned child was importing the main script: "
            'put the script under `if __name__ == "__main__":`'
        )
    path = [os.getcwd() if entry == "" else entry for entry in sys.path]
    return {
        "log_to_stderr": False,
        "authkey": mp_process.current_process().authkey,
        "name": name,
        "sys_path": path,
        "sys_argv": sys.argv,
        "dir": os.getcwd(),
        "orig_dir": mp_process.ORIGINAL_DIR,  # type: ignore[attr-defined]
    }


def _close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
