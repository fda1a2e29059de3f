"""The parent's end of the process that workers are forked from (`batchopt_workers.life.forkserver`): started when
the first worker is, and kept for the next ones."""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from multiprocessing import util

import torch.multiprocessing as mp

from batchopt._machine.cores import share_cores
from batchopt._machine.descriptors import apart_from_streams, close_all
from batchopt.backends.process.spawn import LaunchedProcess, preparation, standard_output
from batchopt.backends.process.stderr import Stderr
from batchopt_workers.evaluate.program import Program
from batchopt_workers.life import forkserver
from batchopt_workers.life.forkserver import HAS_THREADS, OF_JOBS, REPLY, Command, CommandMessage, Descriptors

# Timeouts in seconds of the fork server: to start and answer for the first time; to answer later, which takes
# milliseconds; and to end the workers and their remaining processes once it is no longer needed.
STARTING, ANSWERING, ENDING = 60.0, 2.0, 2.0
# Seconds after which a start is reported as slow.
SLOW = 5.0
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


class ForkServerError(OSError):
    """Raised if the fork server is gone, or does not answer."""


class _Life:
    """A worker process, until it is reaped."""

    def __init__(self, origin: ForkServer, pid: int, sentinel: int) -> None:
        self.origin, self.pid, self.sentinel = origin, pid, sentinel
        self.ended = False
        self.code: int | None = None

    def kill(self) -> None:
        """Kill it with all that it started, unless it was reaped: then its pid may belong to another process."""
        if not self.ended and (self.origin.lives or not _is_readable(self.sentinel, 0.0)):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Reap a process that has ended. What it started is killed first, before its pid can be reused."""
        self.kill()
        self.ended = True
        with suppress(ForkServerError):
            self.code = self.origin.call(Command.REAP, self.pid)

    def release(self, *ends: int) -> None:
        """End the process if it has not ended, without waiting for it, and close descriptors."""
        if not self.ended:
            self.kill()
            self.ended = True
            with suppress(ForkServerError):
                self.origin.tell(Command.FORGET, self.pid)
        close_all(*ends)


class ForkedProcess:
    """A worker process. It is killed, with all that it started, when this object is collected."""

    def __init__(self, origin: ForkServer, pid: int, name: str, alive: int, parent_alive: int) -> None:
        """Takes over two descriptors: `alive` becomes readable when the last process that has its other end is gone,
        and the worker ends once `parent_alive` is closed."""
        self.pid, self.name = pid, name
        try:
            self.sentinel = os.pidfd_open(pid)  # readable at its end, even if other processes hold its files
            os.close(alive)
        except (AttributeError, OSError):  # not on Linux, or not allowed in this container
            self.sentinel = alive
        self._life = _Life(origin, pid, self.sentinel)
        # At exit, before the fork server is ended, which reaps it.
        util.Finalize(self, self._life.release, (self.sentinel, parent_alive), exitpriority=10)

    @property
    def ended(self) -> bool:
        """Tell whether the process has ended, and reap it then."""
        self.join(0.0)
        return self._life.ended

    @property
    def exitcode(self) -> int | None:
        """The exit code once `ended`, or minus the signal that ended it; None if unknown."""
        return self._life.code

    def join(self, timeout: float) -> None:
        """Wait for its end, at most `timeout` seconds."""
        if not self._life.ended and _is_readable(self.sentinel, timeout):
            self._life.reap()

    def kill_group(self) -> None:
        """SIGKILL the process and whatever it started, unless it was reaped."""
        self._life.kill()


def _is_readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    # if this process was stopped while it waited, the result is out of date
    return bool(poll.poll(timeout * 1000) or poll.poll(0))


class ForkServer:
    """A process that forks workers; they depend on the values in `key`: interpreter, environment, cores, limits."""

    def __init__(self, key: object, environment: Mapping[str, str], libraries: Sequence[str]) -> None:
        """Start it without waiting; it imports these libraries first. Raises `OSError` if no process or descriptor is
        available."""
        self.key = key
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._numbers = count(1)
        self._answers: dict[int, int] = {}
        self._serves = threading.Event()
        self._imports = ", ".join(["torch", *libraries])
        with apart_from_streams():
            self._start(environment, libraries)
        with suppress(ForkServerError):  # it has ended already, and the first call says why
            self.tell(Command.GREET, 0)  # answered once it serves
        # Before multiprocessing waits at exit for its children.
        util.Finalize(self, _end, (self._process, self._socket, self._leash, self._serves), exitpriority=5)

    def _start(self, environment: Mapping[str, str], libraries: Sequence[str]) -> None:
        self._stderr = Stderr()
        ours, theirs = mp.get_context("spawn").Pipe(duplex=True)
        self._socket = socket.socket(fileno=ours.fileno())
        ours._handle = None  # type: ignore[attr-defined]  # the socket's now
        leash, self._leash = os.pipe()
        self._process = LaunchedProcess(
            environment,
            self._stderr.writer,
            leash,
            target=forkserver.main,
            args=(theirs, self._owner, leash, libraries, preparation()["sys_path"]),
            name="batchopt-forkserver",
            daemon=True,
        )
        try:
            with theirs:
                self._process.start()
        except BaseException:
            self._socket.close()
            os.close(self._leash)
            raise
        finally:
            os.close(leash)
            self._stderr.close_writer()

    @property
    def lives(self) -> bool:
        """Tell whether it can fork workers."""
        return self._owner == os.getpid() and self._process.exitcode is None

    @property
    def has_refused(self) -> bool:
        """Tell whether it has ended since a library started threads, which a fork would lose."""
        return self._process.exitcode == HAS_THREADS

    @property
    def serves(self) -> bool:
        """Tell whether it has begun to serve, or has ended."""
        with self._lock:
            if not self._serves.is_set() and _is_readable(self._socket.fileno(), 0.0):
                try:
                    self._hear()
                except ForkServerError:
                    return True
                self._serves.set()
        return self._serves.is_set()

    def call(self, task: Command, subject: int, *numbers: int, descriptors: tuple[int, ...] = ()) -> int:
        """Return the answer to a request. Raises `ForkServerError` if there is none.

        A request is sent, and an answer received, in one piece. So any interrupt, such as a garbage collection that
        ends another worker, leaves requests and answers in order.
        """
        with self._lock:
            number = self.tell(task, subject, *numbers, descriptors=descriptors)
            began, said = time.monotonic(), False
            while number not in self._answers:
                if _is_readable(self._socket.fileno(), ANSWERING):
                    self._hear()
                    continue
                silence = time.monotonic() - began
                if silence >= SLOW and not said:
                    said = True
                    logger.info("waiting for the process that workers are forked from, which imports %s", self._imports)
                if self._serves.is_set() or silence >= STARTING or self._process.is_stopped:
                    self._process.kill()
                    self._process.join(ENDING)
                    raise ForkServerError(
                        f"the process that workers are forked from did not answer for {silence:.0f} s"
                    )
            self._serves.set()
            self._stderr.pass_on()
            return self._answers.pop(number)

    def tell(self, task: Command, subject: int, *numbers: int, descriptors: tuple[int, ...] = ()) -> int:
        """Send a request and return its number. Raises `ForkServerError` if the fork server is gone."""
        if self._owner != os.getpid():
            raise ForkServerError("this process is a fork of the one that started the fork server")
        number = next(self._numbers)
        try:
            socket.send_fds(self._socket, [CommandMessage(number, task, subject, *numbers).encode()], list(descriptors))
        except OSError as error:
            raise self._gone() from error
        return number

    def _hear(self) -> None:
        try:
            message = self._socket.recv(REPLY.size, socket.MSG_WAITALL)
        except OSError as error:
            raise self._gone() from error
        if len(message) < REPLY.size:
            raise self._gone()
        number, answer = REPLY.unpack(message)
        self._answers[number] = answer

    def _gone(self) -> ForkServerError:
        self._process.join(1.0)
        self._stderr.pass_on()
        tail = f"\n--- its standard error ends with\n{self._stderr.tail}" if self._stderr.tail else ""
        return ForkServerError(
            f"the process that workers are forked from ended with code {self._process.exitcode}{tail}"
        )


def _end(process: LaunchedProcess, end: socket.socket, leash: int, serves: threading.Event) -> None:
    """Let it end by itself, with all remaining processes of workers; kill it if it has not begun to serve, or cannot
    end."""
    end.close()
    if serves.is_set():
        process.join(ENDING)
    process.kill()
    process.join(1.0)
    os.close(leash)


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
    key = (sys.executable, lasting, affinity, limits)
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
    for attempt in (1, 2):
        origin = _fork_server(threads)
        try:
            return _fork(origin, pipe, stderr, rank, world_size, threads)
        except ForkServerError:
            if attempt == 2 or origin.lives:
                raise
    raise AssertionError


def _handled() -> int:
    """Return the signals that workers are to ignore, as bits: those of a job's scheduler that this process handles."""
    return sum(1 << (number - 1) for number in OF_JOBS if callable(signal.getsignal(number)))


def _fork(
    origin: ForkServer, pipe: socket.socket, stderr: int, rank: int, world_size: int, threads: int
) -> ForkedProcess:
    with ExitStack() as ours, ExitStack() as theirs:
        alive, its_life = os.pipe()
        ours.callback(os.close, alive)
        theirs.callback(os.close, its_life)
        our_life, parent_alive = os.pipe()
        ours.callback(os.close, parent_alive)
        theirs.callback(os.close, our_life)
        stdout = standard_output()
        theirs.callback(os.close, stdout)
        descriptors = Descriptors(pipe.fileno(), our_life, its_life, stdout, stderr)
        pid = origin.call(Command.FORK, rank, world_size, threads, _handled(), descriptors=descriptors)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        ours.pop_all()
        return ForkedProcess(origin, pid, f"batchopt-worker-{rank}", alive, parent_alive)
