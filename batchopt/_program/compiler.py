"""The process that compiles evaluations, as the parent sees it, and the directory of what was compiled.

A library in that directory is code that will run here. So it belongs to this user, who alone may write it, and what
belongs to anybody else is refused, not used.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch

from batchopt._machine.descriptors import apart_from_streams
from batchopt.errors import BatchoptError
from batchopt_workers.life.parent import tie
from batchopt_workers.shortcuts.form import Artifact, PieceForm, Reply, Request

# The environment variable that names the directory of what was compiled.
DIRECTORY = "BATCHOPT_CACHE_DIR"
_START = "import sys; sys.path[:] = {path!r}; from batchopt_workers.shortcuts.compiler import main; main({leash})"


def directory() -> Path:
    """Return the directory of this user for what was compiled, after making it. Raises `BatchoptError` if others may
    write it."""
    try:
        found = _directory()
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = os.lstat(found)
    except (OSError, RuntimeError) as error:  # the latter where there is no home
        raise BatchoptError(f"the directory of what is compiled cannot be made ({error}): set {DIRECTORY}") from error
    if state.st_uid != os.getuid() or not stat.S_ISDIR(state.st_mode) or state.st_mode & 0o022:
        raise BatchoptError(
            f"{found} holds code that will run here, and others than this user may write it: chmod 700 it, or set "
            f"{DIRECTORY} to a directory of yours"
        )
    return found


def _directory() -> Path:
    if given := os.environ.get(DIRECTORY):
        return Path(given) / "compiled"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchopt" / "compiled"


@cache
def compiler() -> str | None:
    """Return the C++ compiler that is used; None if there is none."""
    given = os.environ.get("CXX")
    for name in (given,) if given else ("g++", "clang++"):
        if found := shutil.which(name):
            return found
    return None


def _checked(reply: Reply, forms: Iterable[PieceForm]) -> Reply:
    """Return a reply for pieces of these forms, with a reason in place of each library that cannot be used."""
    found: dict[PieceForm, Artifact | str] = {}
    for form, artifact in zip(forms, reply.found.values(), strict=True):
        found[form] = artifact
        if isinstance(artifact, Artifact):
            found[form] = artifact._replace(form=form)
            try:
                _check(artifact)
            except OSError as error:
                found[form] = f"the library cannot be used: {error}"
    return reply._replace(found=found)


def _check(artifact: Artifact) -> None:
    """Raise `OSError` if its library is not there, or not this user's alone."""
    state = os.lstat(artifact.path)
    if state.st_uid != os.getuid() or not stat.S_ISREG(state.st_mode) or state.st_mode & 0o022:
        raise PermissionError(f"{artifact.path} may be written by others than this user")


# What was found in this process: another optimizer of the same program need not wait for it.
_found: dict[Request, Reply] = {}


def _known(request: Request) -> Reply | None:
    """Return the reply to an equal request, if there was one and its libraries are still there."""
    reply = _found.get(request)
    artifacts = [found for found in reply.found.values() if isinstance(found, Artifact)] if reply is not None else []
    return reply if all(os.path.exists(artifact.path) for artifact in artifacts) else None


class Compiler:
    """A process that carries out one request after the other. It ends with this object, or with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None  # started by the first request that needs it
        self._stderr: IO[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._found: list[Reply | str] = []
        self._end: Callable[[], object] = lambda: None

    def obstacle(self) -> str | None:
        """Return why nothing can be compiled here, as far as it is known before; None if there is no reason."""
        return obstacle()

    def request(self, request: Request) -> None:
        """Begin to carry out a request; there may be one at a time. Raises `BatchoptError` if there is no directory for
        what is compiled."""
        assert not self.is_busy
        request = request._replace(directory=str(directory()))
        reply = _known(request)
        self._found = found = list[Reply | str]([] if reply is None else [reply])
        if reply is None:
            # with a list of its own: what is closed meanwhile does not answer the next request
            arguments = request, self._started(), self._stderr, found
            self._thread = threading.Thread(target=_exchange, args=arguments, daemon=True)
            self._thread.start()

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process, which is started if there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory() / "inductor"), "OMP_NUM_THREADS": "1"}
        self._stderr = tempfile.TemporaryFile()  # closed with this object
        with apart_from_streams():
            leash, end = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(path=sys.path, leash=leash)],
            pass_fds=[leash],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,
        )
        tie(leash, self._process.pid)
        os.close(leash)
        files = self._process.stdin, self._process.stdout, self._stderr, open(end, "wb")
        self._end = weakref.finalize(self, _end, self._process, files, os.getpid())
        return self._process

    @property
    def is_busy(self) -> bool:
        """Tell whether a request is being carried out."""
        return self._thread is not None and not self._found

    def reply(self, waits: bool) -> Reply | str | None:
        """Return the reply, or why there will be none; None if there is none yet, unless it `waits`."""
        if self._thread is not None and waits:
            while self._thread.is_alive():
                self._thread.join(0.5)  # Ctrl-C gets through
        if not self._found:
            return None
        self._thread = None
        return self._found[0]

    def close(self) -> None:
        """End the process, and what it does."""
        self._end()
        self._process, self._thread, self._found = None, None, []


def _exchange(
    request: Request, process: subprocess.Popen[bytes], stderr: IO[bytes] | None, replies: list[Reply | str]
) -> None:
    """Have a request carried out, and add the reply."""
    assert process.stdin is not None and process.stdout is not None
    # forms by their numbers: they name classes, which may be those of `__main__` or of a function
    pieces = [piece._replace(form=piece.form._replace(structure=i)) for i, piece in enumerate(request.pieces)]
    try:
        process.stdin.write(pickle.dumps(request._replace(pieces=tuple(pieces))))
        process.stdin.flush()
        found: Any = pickle.load(process.stdout)
        if isinstance(found, Reply):
            found = _found[request] = _checked(found, [piece.form for piece in request.pieces])
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):
        found = f"the process that compiles has ended: {_last_line(stderr)}"
    except Exception as error:  # whoever waits is to be told
        found = f"it cannot be sent to the process that compiles: {type(error).__name__}: {error}"
    replies.append(found)


def _last_line(stderr: IO[bytes] | None) -> str:
    """Return the last thing that was said."""
    assert stderr is not None
    with suppress(ValueError):  # closed
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return "it was killed"


def _end(process: subprocess.Popen[bytes], files: Iterable[IO[bytes] | None], owner: int) -> None:
    if os.getpid() != owner:  # a fork
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for file in files:
        with suppress(OSError):
            if file is not None:
                file.close()


def obstacle() -> str | None:
    """Return why nothing can be compiled in this process; None if there is no reason."""
    if sys.platform != "linux":
        return f"evaluations are compiled on Linux, and this is {sys.platform}"
    if compiler() is None:
        return "there is no C++ compiler (g++ or clang++): install one, or name it in CXX"
    if not hasattr(torch._C, "_aoti"):
        return f"torch {torch.__version__} cannot load what is compiled"
    return None
