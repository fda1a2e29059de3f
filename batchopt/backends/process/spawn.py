"""Starting a process: of the `torch.multiprocessing` spawn kind, less what makes spawning awkward.

Compared with the plain one: it does not import the user's `__main__` (no main guard needed, works from a notebook and
from standard input), gets an environment of its own without a change to the parent's, leads a process group of its own
(Ctrl-C in a terminal reaches the parent only), starts no resource tracker, settles no global start method, does with
any of the standard streams closed, and ends with the parent from its first moment on, even if it is stopped.
"""

from __future__ import annotations

import copyreg
import fcntl
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import process as mp_process
from multiprocessing import reduction, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen as SpawnPopen
from typing import Any

_F_SETSIG = 10  # Linux; Python does not name it


class _Popen(SpawnPopen):
    def __init__(self, process: LaunchedProcess) -> None:
        self._environment, self._stderr, self._leash = process.environment, process.stderr, process.leash
        super().__init__(process)

    def _launch(self, process: LaunchedProcess) -> None:
        payload = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump({**preparation(), "name": process.name}, payload)
            reduction.dump(process, payload)
        finally:
            set_spawning_popen(None)
        parent_end, child_alive = os.pipe()
        child_end, parent_alive = os.pipe()
        self.finalizer = util.Finalize(self, close_all, (parent_end, parent_alive))
        stdout = standard_output()
        try:
            self._child = subprocess.Popen(
                spawn.get_command_line(tracker_fd=None, pipe_handle=child_end),
                executable=spawn.get_executable(),
                pass_fds=[child_end, child_alive, self._leash, *self._fds],  # type: ignore[attr-defined]
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=self._stderr,
                start_new_session=True,
            )
        finally:
            close_all(child_end, child_alive, stdout)
        self.pid = self._child.pid
        _tie(self._leash, self.pid)
        self.sentinel = parent_end
        with suppress(BrokenPipeError), open(parent_alive, "wb", buffering=0, closefd=False) as pipe:
            unwritten = payload.getbuffer()
            while unwritten:  # it may have ended already: whoever asks it will find out how
                unwritten = unwritten[pipe.write(unwritten) :]

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, once the process has ended; None if it takes longer. What it started may have its sentinel."""
        try:
            self.returncode = self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        return self.returncode

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, once the process has ended."""
        if self.returncode is None:
            self.returncode = self._child.poll() if flag == os.WNOHANG else self._child.wait()
        return self.returncode


class LaunchedProcess(SpawnProcess):
    """A spawned process with its own environment and standard error (a descriptor); everything else as in
    `torch.multiprocessing`. It is killed when the other end of the pipe `leash`, a descriptor too, is closed
    everywhere."""

    def __init__(self, environment: Mapping[str, str], stderr: int, leash: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.environment, self.stderr, self.leash = environment, stderr, leash

    _Popen = staticmethod(_Popen)  # type: ignore[assignment]

    @property
    def is_stopped(self) -> bool:
        """Tell whether a signal has stopped the process, if it has not ended."""
        with suppress(OSError):  # it has ended
            return os.waitid(os.P_PID, self.pid or 0, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def __reduce__(self) -> Any:
        """Arrive as the plain kind, so that it does not import this package; its environment it has already."""
        state = {key: value for key, value in vars(self).items() if key not in ("environment", "stderr", "leash")}
        return copyreg._reconstructor, (SpawnProcess, object, None), state  # type: ignore[attr-defined]


def _tie(leash: int, pid: int) -> None:
    """Have the kernel kill the group `pid` when the other end of the pipe closes, whatever those processes are at."""
    fcntl.fcntl(leash, fcntl.F_SETOWN, -pid)
    fcntl.fcntl(leash, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)


@contextmanager
def apart_from_streams() -> Iterator[None]:
    """Keep descriptors opened inside off the numbers of the standard streams, even if this process was started without
    some: a child has its own at these numbers."""
    taken = []
    try:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            taken.append(fd)
        os.close(fd)
        yield
    finally:
        close_all(*taken)


def standard_output() -> int:
    """A descriptor of what is this process's standard output now; of nothing if it was started without one, for then
    something else may have its number."""
    if sys.__stdout__ is not None:
        with suppress(OSError):  # closed since
            return os.dup(1)
    return os.open(os.devnull, os.O_WRONLY)


def preparation() -> dict[str, Any]:
    """Return multiprocessing's preparation data without `__main__` and without a start method."""
    if getattr(mp_process.current_process(), "_inheriting", False):
        raise RuntimeError(
            "batchopt was started while a spawned child was importing the main script: "
            'put the script under `if __name__ == "__main__":`'
        )
    path = [os.getcwd() if entry == "" else entry for entry in sys.path]
    return {
        "log_to_stderr": False,
        "authkey": bytes(mp_process.current_process().authkey),
        "sys_path": path,
        "sys_argv": sys.argv,
        "dir": os.getcwd(),
        "orig_dir": mp_process.ORIGINAL_DIR,  # type: ignore[attr-defined]
    }


def close_all(*fds: int) -> None:
    """Close each."""
    for fd in fds:
        os.close(fd)
