"""Starting a process as `torch.multiprocessing` spawns one, without the drawbacks of spawning.

Compared with a plain spawned process, it does not import the user's `__main__` (no main guard is needed, and it works
from a notebook and from standard input), has its own environment without a change to the parent's, leads its own
process group (Ctrl-C in a terminal reaches only the parent), starts no resource tracker, sets no global start method,
works if any of the standard streams is closed, and from the first moment on ends with the parent, even if it is
stopped.
"""

from __future__ import annotations

import copyreg
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import process as mp_process
from multiprocessing import reduction, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen as SpawnPopen
from typing import Any

from batchopt._machine.descriptors import close_all
from batchopt_workers.life.parent import tie


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
        tie(self._leash, self.pid)
        self.sentinel = parent_end
        with suppress(BrokenPipeError), open(parent_alive, "wb", buffering=0, closefd=False) as pipe:
            unwritten = payload.getbuffer()
            while unwritten:  # it may have ended already: its exit code will tell
                unwritten = unwritten[pipe.write(unwritten) :]

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code once the process has ended; None after `timeout`. Its children may have inherited its
        sentinel."""
        try:
            self.returncode = self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        return self.returncode

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code if the process has ended, else None."""
        if self.returncode is None:
            self.returncode = self._child.poll() if flag == os.WNOHANG else self._child.wait()
        return self.returncode


class LaunchedProcess(SpawnProcess):
    """A spawned process with its own environment and standard error (a descriptor); everything else as in
    `torch.multiprocessing`. It is killed when the other end of the pipe `leash` (a descriptor) is closed everywhere."""

    def __init__(self, environment: Mapping[str, str], stderr: int, leash: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.environment, self.stderr, self.leash = environment, stderr, leash

    _Popen = staticmethod(_Popen)  # type: ignore[assignment]

    @property
    def is_stopped(self) -> bool:
        """Tell whether a signal has stopped the process."""
        with suppress(OSError):  # it has ended
            return os.waitid(os.P_PID, self.pid or 0, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def __reduce__(self) -> Any:
        """Arrive as the plain kind, so that the new process does not import this package; it has its environment
        already."""
        state = {key: value for key, value in vars(self).items() if key not in ("environment", "stderr", "leash")}
        return copyreg._reconstructor, (SpawnProcess, object, None), state  # type: ignore[attr-defined]


def standard_output() -> int:
    """Return a descriptor of this process's current standard output; of /dev/null if it was started without one, since
    its number may then belong to something else."""
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
