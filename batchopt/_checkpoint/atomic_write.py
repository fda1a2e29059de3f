"""A file that is written completely or not at all: next to the old one, synced, then renamed to replace it."""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import stat
from contextlib import suppress
from typing import Any

import torch

from batchopt.errors import CheckpointError
from batchopt_workers.life import faults
from batchopt_workers.wire.failures import let_through

_STEM = 200  # bytes of a file's name that are used in the name of its temporary file, which is also limited


_numbers = itertools.count()
_in_use: set[str] = set()  # the temporary files that threads of this process are writing


def target_of(path: str | os.PathLike[str]) -> str:
    """Return the file that `path` refers to, following links; raise `OSError` if it could not be replaced."""
    target = os.path.realpath(os.fsdecode(path))
    folder = os.path.dirname(target)
    if not stat.S_ISDIR(os.stat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
    with suppress(FileNotFoundError):
        check_regular(os.stat(target))
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return target


def check_regular(status: os.stat_result) -> None:
    """Raise `OSError` or `CheckpointError` for anything but a regular file."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError("it is not a regular file")


class _Temporary(io.FileIO):
    """A file for torch.save, which hides the error of a failed write behind one of its own."""

    error: BaseException | None = None
    _begun = False

    def write(self, data: Any) -> int:
        """Write all of `data`, and return its size."""
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view:
                view = view[super().write(view) :]
            if not self._begun:
                self._begun = True
                faults.point("checkpoint.writing")
        except BaseException as error:
            self.error = self.error or error
            raise
        return size


def replace_file(target: str, content: dict[str, Any]) -> None:
    """Make `target` a file of torch.save of `content`. Raise `OSError`; in that case, or if the process is killed,
    there is either the old file or the complete new one."""
    folder_name, name = os.path.split(target)
    folder = os.open(folder_name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove_leftovers(folder, name)
        faults.point("checkpoint.start")
        temporary = f"{_stem(name)}{os.getpid()}.{next(_numbers)}.tmp"
        _in_use.add(temporary)
        try:
            _write_temporary(folder, temporary, _mode(folder, name), content)
            faults.point("checkpoint.replace")
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        finally:
            _in_use.discard(temporary)
        faults.point("checkpoint.replaced")
        _sync_folder(folder)
    finally:
        os.close(folder)


def _write_temporary(folder: int, name: str, mode: int, content: dict[str, Any]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with _Temporary(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        try:
            torch.save(content, file)
        except Exception as error:
            let_through(error)
            if file.error is None:
                raise CheckpointError(f"torch.save failed: {error}") from error
        if file.error is not None:
            raise file.error
        os.fchmod(file.fileno(), mode)
        faults.point("checkpoint.sync")
        os.fsync(file.fileno())


def _mode(folder: int, name: str) -> int:
    """Return the permissions of the file that will be replaced, without setuid and setgid; or those of a new file."""
    try:
        return stat.S_IMODE(os.stat(name, dir_fd=folder).st_mode) & ~(stat.S_ISUID | stat.S_ISGID)
    except FileNotFoundError:
        return 0o600  # the umask cannot be read without setting it


def _stem(name: str) -> str:
    return f".{os.fsdecode(os.fsencode(name)[:_STEM])}."


def _remove_leftovers(folder: int, name: str) -> None:
    """Remove the temporary files for `name` of processes that no longer exist."""
    pattern = re.compile(re.escape(_stem(name)) + r"([1-9][0-9]{0,8})\.[0-9]+\.tmp")
    for entry in os.listdir(folder):
        found = pattern.fullmatch(entry)
        if found is not None and not _is_being_written(entry, int(found[1])):
            with suppress(OSError):
                os.unlink(entry, dir_fd=folder)


def _is_being_written(temporary: str, pid: int) -> bool:
    if pid == os.getpid():  # in a container with few processes, the number of a dead one is soon reused
        return temporary in _in_use
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support it
            raise
