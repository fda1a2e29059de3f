"""The file of a checkpoint: plain data under a digest, written whole or not at all, read without running its code."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import os
import re
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import NoneType
from typing import Any

import torch

from batchopt.errors import CheckpointError
from batchopt_workers import faults
from batchopt_workers.layout import Layout

_FORMAT = "batchopt checkpoint"
_VERSION = 1
_DEEPEST = 100  # levels of nesting
_WIDEST = 2040  # bits: of longer integers torch.load(weights_only=True) knows nothing
_STEM = 200  # bytes of a file's name that go into its temporary file's, which has to be a name too


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `CheckpointError` if `write` could not make `path`, as far as that can be seen without writing.

    It cannot where `path` is a directory, a device or a file without write permission, or its folder is missing or
    may not be written to.
    """
    with _reported("write", path):
        _target(path)


def write(path: str | os.PathLike[str], state: dict[str, Any], layout: Layout) -> None:
    """Make `path`, or the file that it links to, a checkpoint of `state`, for parameters that lie as in `layout`.

    `state` is made of dicts (ordered ones too), lists, tuples, dense tensors, numbers, bools, strings and None. A
    tensor is stored on the cpu, in row-major order, without whatever else is in its storage; two that are the same
    part of one storage are stored once. A new file is readable by its owner alone, a replaced one keeps its mode.

    Raises `CheckpointError` where `check_writable` does; if something in `state` is anything else, before a file is
    touched; and if the disk is full or fails. Whenever this raises or is killed, `path` is still what it was, or
    already complete; what a killed process left is removed by the next call.
    """
    with _reported("write", path):
        target = _target(path)
        header = {"format": _FORMAT, "version": _VERSION, "layout": _listed(layout), "dtype": _name(layout.dtype)}
        plain = _Copies().of(state, ("state",))
        _replace(target, {**header, "sha256": _digest({**header, "state": plain}), "state": plain})


def read(path: str | os.PathLike[str], layout: Layout) -> dict[str, Any]:
    """The state that `write` was given, with tensors on the cpu. Nothing in the file is executed.

    Raises `CheckpointError` if there is no such file; if it is damaged, of a newer version or not a checkpoint; and if
    it was written for parameters that lie otherwise than in `layout`.
    """
    with _reported("read", path), _opened(path) as file, _distrusted():
        content = torch.load(file, map_location="cpu", mmap=False, weights_only=True)
        _check(content)
        if differences := _differences(layout, content):
            raise CheckpointError(f"layout differs: {_shortened(differences)}")
        state: dict[str, Any] = content["state"]
    return state


@contextmanager
def _reported(verb: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes a `CheckpointError` that names `path` of an `OSError`, and of one that does not name it."""
    name = os.fsdecode(path)
    what = f"cannot {verb} checkpoint '{name}'"
    try:
        yield
    except OSError as error:
        where = f": '{error.filename}'" if error.filename not in (None, name) else ""
        raise CheckpointError(f"{what}: {error.strerror or error}{where}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error.__cause__


@contextmanager
def _distrusted() -> Iterator[None]:
    """Makes a `CheckpointError` of whatever a damaged or hostile file makes of the code that reads it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise CheckpointError(f"it is damaged, or not a checkpoint of batchopt ({reason})") from error


# What may be in a state, and how it is digested.

_SCALARS: dict[type, Callable[[Any], bytes]] = {
    NoneType: lambda _: b"",
    bool: lambda value: b"%d" % value,
    int: lambda value: b"%x" % value,
    float: struct.Struct("<d").pack,
    str: lambda value: value.encode("utf-8", "surrogatepass"),
}


class _Copies:
    """Copies plain data without its tensors' other memory: a tensor that has its storage to itself is not copied."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        self._storages: set[tuple[Any, ...]] = set()

    def of(self, value: Any, where: tuple[str, ...]) -> Any:
        """The copy of `value`; raises `CheckpointError`, with the place `where` it is, if it is not plain data."""
        if len(where) > _DEEPEST:
            raise CheckpointError(f"{''.join(where[:4])}... contains itself, or is nested {_DEEPEST} deep")
        kind = type(value)
        if kind in _SCALARS:
            return _checked_scalar(value, where)
        if kind is torch.Tensor:
            return self._of_tensor(value, where)
        if kind in (list, tuple):
            return kind(self.of(item, (*where, f"[{index}]")) for index, item in enumerate(value))
        if kind in (dict, OrderedDict):
            copy = kind(
                (_checked_scalar(key, (*where, " has a key that")), self.of(item, (*where, f"[{key!r}]")))
                for key, item in value.items()
            )
            if kind is OrderedDict:  # module.state_dict() notes the versions of its modules in an attribute
                vars(copy).update({name: self.of(item, (*where, f".{name}")) for name, item in vars(value).items()})
            return copy
        raise CheckpointError(f"{''.join(where)} is a {kind.__qualname__}, not plain data")

    def _of_tensor(self, tensor: torch.Tensor, where: tuple[str, ...]) -> torch.Tensor:
        if not _is_dense(tensor):
            raise CheckpointError(f"{''.join(where)} is a sparse, nested, quantized or meta tensor, not a dense one")
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        part = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        key = (*storage, *part)
        if key not in self._tensors:
            own = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            # torch.save refuses a storage that is seen with two dtypes
            if storage in self._storages or not _is_whole(own):
                own = own.clone()
            self._storages.add(storage)
            self._tensors[key] = own
        return self._tensors[key]


def _checked_scalar(value: Any, where: tuple[str, ...]) -> Any:
    kind = type(value)
    if kind not in _SCALARS:
        raise CheckpointError(f"{''.join(where)} is a {kind.__qualname__}, not plain data")
    if kind is int and value.bit_length() >= _WIDEST:
        raise CheckpointError(f"{''.join(where)} is an integer of {_WIDEST} bits or more")
    return value


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is all of its storage, in row-major order."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _has_marks(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is more than its dtype, shape and memory."""
    return tensor.requires_grad or tensor.is_conj() or tensor.is_neg()


def _digest(value: Any) -> str:
    """The sha256 of every type, key, dtype, shape and bit in plain data as `_Copies` makes it; raises
    `CheckpointError` for anything else."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: hashlib._Hash, value: Any) -> None:
    # each item starts with a line that says where it ends, so that no two values make the same bytes
    kind = type(value)
    if kind in _SCALARS:
        text = _SCALARS[kind](value)
        sha.update(f"{kind.__name__} {len(text)}\n".encode() + text)
    elif kind is torch.Tensor and _is_dense(value) and _is_whole(value) and not _has_marks(value):
        sha.update(f"{value.dtype} {list(value.shape)}\n".encode())
        octets = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value.untyped_storage())
        sha.update(octets.numpy().data)
    elif kind in (list, tuple):
        sha.update(f"{kind.__name__} {len(value)}\n".encode())
        for item in value:
            _feed(sha, item)
    elif kind in (dict, OrderedDict):
        sha.update(f"{kind.__name__} {len(value)}\n".encode())
        for item in itertools.chain.from_iterable(value.items()):
            _feed(sha, item)
        if kind is OrderedDict:
            _feed(sha, vars(value))
    else:
        raise CheckpointError(f"it holds a {kind.__qualname__} that `write` would not have written")


# The file: written beside the old one, then put in its place.

_numbers = itertools.count()
_in_use: set[str] = set()  # the temporary files that threads of this process are writing


def _target(path: str | os.PathLike[str]) -> str:
    """The file that `path` stands for, links followed; raises `OSError` where it could not be replaced."""
    target = os.path.realpath(os.fsdecode(path))
    folder = os.path.dirname(target)
    if not stat.S_ISDIR(os.stat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
    with suppress(FileNotFoundError):
        _check_regular(os.stat(target))
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return target


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError("it is not a regular file")


class _Temporary(io.FileIO):
    """A file for torch.save, which hides the error of a failed write behind one of its own."""

    error: BaseException | None = None
    _begun = False

    def write(self, data: Any) -> int:
        """Write all of `data`."""
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


def _replace(target: str, content: dict[str, Any]) -> None:
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
            if file.error is None:
                raise CheckpointError(f"torch.save failed: {error}") from error
        if file.error is not None:
            raise file.error
        os.fchmod(file.fileno(), mode)
        faults.point("checkpoint.sync")
        os.fsync(file.fileno())


def _mode(folder: int, name: str) -> int:
    """The permissions of the file that will be replaced, else those of a new one."""
    try:
        return stat.S_IMODE(os.stat(name, dir_fd=folder).st_mode)
    except FileNotFoundError:
        return 0o600  # what the umask would leave cannot be asked for without setting it


def _stem(name: str) -> str:
    return f".{os.fsdecode(os.fsencode(name)[:_STEM])}."


def _remove_leftovers(folder: int, name: str) -> None:
    """Remove the temporary files for `name` of processes that are no more."""
    pattern = re.compile(re.escape(_stem(name)) + r"([1-9][0-9]{0,8})\.[0-9]+\.tmp")
    for entry in os.listdir(folder):
        found = pattern.fullmatch(entry)
        if found is not None and not _is_being_written(entry, int(found[1])):
            with suppress(OSError):
                os.unlink(entry, dir_fd=folder)


def _is_being_written(temporary: str, pid: int) -> bool:
    if pid == os.getpid():  # where few processes run, in a container, a dead one's number soon is one's own
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
        if error.errno != errno.EINVAL:  # the file system has no such thing
            raise


# Reading, and what is compared.


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    _check_regular(os.stat(path))
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":  # torch.load would try older formats
            raise CheckpointError("it is not a checkpoint of batchopt")
        file.seek(0)
        yield file


def _check(content: Any) -> None:
    if type(content) is not dict or content.get("format") != _FORMAT:
        raise CheckpointError("it is not a checkpoint of batchopt")
    if content["version"] > _VERSION:
        raise CheckpointError(
            f"it is of version {content['version']}, and this batchopt reads up to {_VERSION}: take a newer batchopt"
        )
    signed = {key: value for key, value in content.items() if key != "sha256"}
    if content["sha256"] != _digest(signed):
        raise CheckpointError("it is damaged: its content is not what was written (sha256)")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(layout: Layout) -> list[list[Any]]:
    return [[slot.name, list(slot.shape)] for slot in layout.slots]


def _differences(layout: Layout, content: Mapping[str, Any]) -> list[str]:
    """In words, how the parameters in `content` lie otherwise than in `layout`."""
    here = {slot.name: tuple(slot.shape) for slot in layout.slots}
    there = {name: tuple(shape) for name, shape in content["layout"]}
    found = []
    if content["dtype"] != _name(layout.dtype):
        found.append(f"dtype is {_name(layout.dtype)} here and {content['dtype']} in the file")
    for name in [*here, *(name for name in there if name not in here)]:
        if name not in there:
            found.append(f"'{name}' is missing in the file")
        elif name not in here:
            found.append(f"'{name}' is in the file and missing here")
        elif here[name] != there[name]:
            found.append(f"'{name}' is {here[name]} here and {there[name]} in the file")
    if not found and content["layout"] != _listed(layout):
        found.append("the same parameters are in another order in the file")
    return found


def _shortened(items: list[str], shown: int = 3) -> str:
    more = f", and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more
