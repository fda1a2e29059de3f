"""The parent's end of the process that workers are forked from (`batchopt_workers.life.forkserver`): a plain
subprocess, started when the first worker is, and kept for the next ones.

It does not import the user's `__main__`, so no main guard is needed; it has an environment of its own; and it leads its
own session, so that Ctrl-C in a terminal reaches the parent only. The kernel kills it when the parent ends, whatever it
is doing then, and likewise its workers when it ends.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import spawn, util

from batchopt._machine.cores import share_cores
from batchopt._machine.descriptors import apart_from_streams, standard_output
from batchopt.backends.process.stderr import Stderr
from batchopt_workers.evaluate.program import Program
from batchopt_workers.life.forkserver import HAS_THREADS, NUMBER, OF_JOBS, REQUEST, Descriptors
from batchopt_workers.life.parent import tie

# Timeouts in seconds of the fork server: to start and answer for the first time; to answer later, which takes
# milliseconds; and to be gone once it is killed.
STARTING, ANSWERING, ENDING = 60.0, 2.0, 2.0
# Seconds after which a start is reported as slow.
SLOW = 5.0
# The program that it runs, along the parent's path.
START = "import sys; sys.path[:] = {path!r}; from batchopt_workers.life.forkserver import main; main{arguments}"
logger = logging.getLogger("batchopt")

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
# glibc returns large blocks to the kernel at every free, so that each forward faults its pages in again; workers keep
# them.
_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
# Variables that no library reads when it loads: pytest sets the first again for every test, torch's compiler the second
# when it is loaded, which torch's optimizers do.
_FLEETING = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


def worker_environment(threads: int) -> dict[str, str]:
    """The parent's environment, with every thread pool sized before the libraries that read it load; the allocator
    keeps its memory, unless the user has settings of their own."""
    return {**_ALLOCATOR, **os.environ, **{name: str(threads) for name in _THREAD_VARIABLES}}


def import_path() -> list[str]:
    """Return the path along which this process imports."""
    return [os.getcwd() if entry == "" else entry for entry in sys.path]


class ForkServerError(OSError):
    """Raised if the fork server is gone, or does not answer."""


class ForkedProcess:
    """A worker process. It is killed, with all that it started, when this object is collected."""

    def __init__(self, origin: ForkServer, pid: int, name: str, sentinel: int) -> None:
        """Takes over the reading end of the worker's pipe: it becomes readable when the worker was reaped, or has ended
        with the fork server."""
        self.pid, self.name, self.sentinel = pid, name, sentinel
        self.exitcode: int | None = None  # minus the signal that ended it; known once it has ended, unless by accident
        self._origin, self._ended = origin, threading.Event()
        util.Finalize(self, _release, (pid, sentinel, self._ended), exitpriority=10)  # before that of the fork server

    @property
    def ended(self) -> bool:
        """Tell whether the process has ended."""
        self.join(0.0)
        return self._ended.is_set()

    def join(self, timeout: float) -> None:
        """Wait for its end, at most `timeout` seconds."""
        if self._ended.is_set():
            return
        self._origin.go_on()
        if _is_readable(self.sentinel, timeout):
            self.exitcode = _read(self.sentinel)
            self._ended.set()

    def kill_group(self) -> None:
        """SIGKILL the process and whatever it started, unless it has ended: then nothing of it is left."""
        if not self._ended.is_set():
            _kill(self.pid, self.sentinel)


def _kill(pid: int, sentinel: int) -> None:
    # The pipe is written before the process is reaped: until then its id belongs to no other one.
    if not _is_readable(sentinel, 0.0):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _release(pid: int, sentinel: int, ended: threading.Event) -> None:
    if not ended.is_set():
        _kill(pid, sentinel)
    os.close(sentinel)


def _is_readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    # if this process was stopped while it waited, the result is out of date
    return bool(poll.poll(timeout * 1000) or poll.poll(0))


def _read(pipe: int) -> int | None:
    """Return the next number in a worker's pipe; None if there is no other."""
    data = os.read(pipe, NUMBER.size)
    return NUMBER.unpack(data)[0] if len(data) == NUMBER.size else None


class ForkServer:
    """A process that forks workers; they depend on the values in `key`: interpreter, environment, cores, limits."""

    def __init__(self, key: object, environment: Mapping[str, str], libraries: Sequence[str]) -> None:
        """Start it without waiting; it imports these libraries first. Raises `OSError` if no process or descriptor is
        available."""
        self.key = key
        self._owner = os.getpid()
        self._imports = ", ".join(["torch", *libraries])
        with apart_from_streams(), ExitStack() as ours, ExitStack() as theirs:
            self._stderr = Stderr()
            theirs.callback(self._stderr.close_writer)
            self._socket, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(self._socket)
            theirs.enter_context(end)
            leash, held = os.pipe()
            ours.callback(os.close, held)
            theirs.callback(os.close, leash)
            stdout = standard_output()
            theirs.callback(os.close, stdout)
            program = START.format(path=import_path(), arguments=(end.fileno(), self._owner, *libraries))
            flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
            self._process = subprocess.Popen(
                [spawn.get_executable(), *flags, "-c", program, "batchopt-forkserver"],
                pass_fds=(end.fileno(), leash),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=self._stderr.writer,
                env=environment,
                start_new_session=True,
            )
            tie(leash, self._process.pid)
            ours.pop_all()
        util.Finalize(self, _end, (self._process, self._socket, held), exitpriority=5)

    @property
    def lives(self) -> bool:
        """Tell whether it can fork workers."""
        return self._owner == os.getpid() and self._process.poll() is None

    @property
    def has_refused(self) -> bool:
        """Tell whether it has ended since a library started threads, which a fork would lose."""
        return self._process.poll() == HAS_THREADS

    @property
    def serves(self) -> bool:
        """Tell whether it has begun to serve, or has ended."""
        return _is_readable(self._socket.fileno(), 0.0)  # its greeting, which stays there

    def go_on(self) -> None:
        """Have it continue, if a signal has stopped it."""
        if self.lives:
            self._process.send_signal(signal.SIGCONT)

    def fork(self, end: socket.socket, stderr: int, rank: int, world_size: int, threads: int) -> ForkedProcess:
        """Fork a worker that serves `end`. Raises `ForkServerError` if the fork server is gone or silent,
        `OSError` if no process or descriptor is available."""
        ignored = sum(1 << number for number in OF_JOBS if callable(signal.getsignal(number)))  # handled here
        with ExitStack() as ours:
            sentinel, pipe = os.pipe()
            ours.callback(os.close, sentinel)
            with ExitStack() as theirs:
                theirs.callback(os.close, pipe)
                stdout = standard_output()
                theirs.callback(os.close, stdout)
                descriptors = Descriptors(end.fileno(), pipe, stdout, stderr)
                with suppress(ConnectionError):  # it is gone, and so is the other end of the pipe
                    socket.send_fds(self._socket, [REQUEST.pack(rank, world_size, threads, ignored)], descriptors)
            if not self._answers(sentinel):
                self._process.kill()
                raise self._error("did not answer, and ended")
            pid = _read(sentinel)
            self._stderr.pass_on()
            if pid is None:
                raise self._error("ended")
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            ours.pop_all()
        return ForkedProcess(self, pid, f"batchopt-worker-{rank}", sentinel)

    def _answers(self, pipe: int) -> bool:
        """Wait for an answer in a worker's pipe, and tell whether there is one."""
        self.go_on()
        if self.serves:
            return _is_readable(pipe, ANSWERING)
        if _is_readable(pipe, SLOW):
            return True
        logger.info("waiting for the process that workers are forked from, which imports %s", self._imports)
        self.go_on()
        return _is_readable(pipe, STARTING)

    def _error(self, what: str) -> ForkServerError:
        """Wait for its end, and return the error that says how it came about."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)
        self._stderr.pass_on()
        tail = f"\n--- its standard error ends with\n{self._stderr.tail}" if self._stderr.tail else ""
        return ForkServerError(
            f"the process that workers are forked from {what} with code {self._process.returncode}{tail}"
        )


def _end(process: subprocess.Popen[bytes], end: socket.socket, held: int) -> None:
    end.close()
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING)
    os.close(held)


# Those that the next workers may be forked from, the latest last. Another number of threads needs another one, and
# whoever tries several ("auto", `devices`, `resize`) comes back to the first. An idle one has about 200 MB, for a
# minute.
_kept: list[ForkServer] = []
KEPT = 3
_lock = threading.Lock()


def _fork_server(threads: int, libraries: Sequence[str] = ()) -> ForkServer:
    """The fork server whose workers are as those of a new one would be; a new one imports these libraries."""
    environment = worker_environment(threads)
    lasting = {name: value for name, value in environment.items() if name not in _FLEETING}
    affinity = None
    with suppress(AttributeError, OSError):  # not on this system, or forbidden in this sandbox
        affinity = os.sched_getaffinity(0)
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    key = (spawn.get_executable(), lasting, affinity, limits)
    with _lock:
        if any(server.has_refused for server in _kept):
            libraries = ()
        living = [server for server in _kept if server.lives]
        found = next((server for server in living if server.key == key), None) or ForkServer(
            key, environment, libraries
        )
        _kept[:] = [*(server for server in living if server is not found), found][-KEPT:]
        return found


def anticipate(workers: int, threads: int | None, libraries: Sequence[str] = ()) -> None:
    """Start the fork server, if there is none, for `workers` workers that will be needed soon, and will import these
    libraries. Do nothing if that is impossible."""
    with suppress(OSError):
        _fork_server(max(share_cores(workers, threads)), libraries)


def _library_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})


def libraries_of(program: Program) -> list[str]:
    """Return the modules of installed libraries that define parts of the program. Those of the user may be edited and
    reloaded, so each worker imports them from their files."""
    parts = [*map(type, program.module.modules()), program.criterion, *program.loss_fns]
    names = {str(getattr(part, "__module__", None) or type(part).__module__) for part in parts}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    own = ("torch", "batchopt", "batchopt_workers", "numpy")
    installed = [name for name, file in files.items() if file.startswith(_library_folders())]
    return sorted(name for name in installed if name.partition(".")[0] not in own)


def is_ready() -> bool:
    """Tell whether the fork server that was anticipated would fork a worker at once; also if it is gone."""
    return not _kept or not _kept[-1].lives or _kept[-1].serves


def fork_worker(pipe: socket.socket, stderr: int, rank: int, world_size: int, threads: int) -> ForkedProcess:
    """Fork a worker that serves `pipe`. Raises `OSError` if no process or descriptor is available."""
    try:
        return _fork_server(threads).fork(pipe, stderr, rank, world_size, threads)
    except ForkServerError:  # another one may do better
        return _fork_server(threads).fork(pipe, stderr, rank, world_size, threads)
