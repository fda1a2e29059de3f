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
from contextlib import suppress
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
        self._environment, self._stderr = process.environment, process.stderr
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
                stderr=self._stderr,
                start_new_session=True,
            )
        finally:
            _close_all(child_end, child_alive)
        # Before multiprocessing waits at exit for its children: a stopped one would never end.
        self._killer = util.Finalize(self, _end_group, (self._child,), exitpriority=10)
        self.pid = self._child.pid
        self.sentinel = _exit_descriptor(self._child.pid, parent_end)
        if self.sentinel != parent_end:
            self._closer = util.Finalize(self, os.close, (self.sentinel,))
        with open(parent_alive, "wb", closefd=False) as pipe:
            pipe.write(payload.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, once the process has ended; whatever it started is killed before it is reaped."""
        if self.returncode is None and _has_ended(self._child, flag):
            _kill_group(self._child)
            self.returncode = self._child.wait()
        return self.returncode


def _exit_descriptor(pid: int, otherwise: int) -> int:
    """What becomes readable when the process ends, even if others hold the files that it had."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on Linux, or not allowed in this container
        return otherwise


def _has_ended(child: subprocess.Popen[bytes], flag: int) -> bool:
    """Whether the process is over, without reaping it; waits for that unless `flag` is WNOHANG."""
    if not hasattr(os, "waitid"):
        return child.poll() is not None if flag == os.WNOHANG else child.wait() is not None
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | flag) is not None
    except ChildProcessError:  # reaped by somebody else
        return True


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL the process and whatever it started, unless it was reaped: then the number may be another's."""
    if child.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill it, and reap it unless the kernel cannot let it go."""
    _kill_group(child)
    with suppress(subprocess.TimeoutExpired):
        child.wait(1.0)


class WorkerProcess(SpawnProcess):
    """A spawned process with its own environment and standard error (a descriptor); everything else as in
    `torch.multiprocessing`. Its sentinel is readable once it has ended, whatever it started."""

    def __init__(self, environment: Mapping[str, str], stderr: int | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.environment, self.stderr = environment, stderr

    _Popen = staticmethod(_Popen)  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        """Arrive as the plain kind, so that the worker does not import this package; its environment it has already."""
        state = {key: value for key, value in vars(self).items() if key not in ("environment", "stderr")}
        return copyreg._reconstructor, (SpawnProcess, object, None), state  # type: ignore[attr-defined]

    def kill_group(self) -> None:
        """SIGKILL the process and whatever it started, unless it was reaped."""
        popen = self._popen  # type: ignore[attr-defined]
        if popen is not None:
            _kill_group(popen._child)


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
