"""The file of a checkpoint: plain data with a digest, written completely or not at all, read without executing it."""

from __future__ import annotations

import collections
import errno
import hashlib
import io
import itertools
import math
import os
import re
import secrets
import stat
import struct
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import NoneType
from typing import Any

import numpy
import torch

from batchopt.errors import CheckpointError
from batchopt_workers.life import faults
from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.layout import Layout

_FORMAT, _VERSION = "batchopt checkpoint", 1
_WIDEST = 2040  # bits: torch.load(weights_only=True) cannot read longer integers
_ALLOWED = f"plain data (dicts, lists, tuples, numbers below {_WIDEST} bits, text, None) or a dense tensor"
_PLACES = 10**5  # in which one list may be, and is copied: with nested ones it could take forever
_PROCESS = secrets.token_hex(4)  # in a container with few processes, the number of a dead one is soon reused
_numbers = itertools.count()


def write(path: str | os.PathLike[str], state: dict[str, Any], layout: Layout) -> None:
    """Make `path`, or the file that it links to, a checkpoint of `state`, for parameters with this `layout`.

    `state` consists of dicts (also ordered ones), lists, tuples, dense tensors, numbers, bools, strings and None. A
    tensor is stored as a CPU tensor, in row-major order, without the rest of its storage; two that are the same part of
    one storage are stored once. A new file is readable by its owner only, a replaced one keeps its mode.

    Raise `CheckpointError`, before a file is changed, if `path` is a directory, a device or a file without write
    permission, if its folder is missing or not writable, and if `state` contains anything else; and if the disk is full
    or fails. If this raises or is killed, `path` is unchanged or already complete; the next call removes the remains of
    a killed process.
    """
    with _reported("write", path, ""):
        content, digest = _plain({"format": _FORMAT, "version": _VERSION, **_described(layout), "state": state})
        _replace(os.path.realpath(os.fsdecode(path)), {**content, "sha256": digest})


def read(path: str | os.PathLike[str], layout: Layout) -> dict[str, Any]:
    """Return the state that was passed to `write`, with tensors on the CPU. Nothing in the file is executed.

    Raise `CheckpointError` if there is no such file; if it is damaged, of a newer version or not a checkpoint; and if
    it was written for parameters with another layout.
    """
    with _reported("read", path, "it is damaged, or not a checkpoint of batchopt: "):
        # opening a pipe would wait otherwise
        with open(path, "rb", opener=lambda at, how: os.open(at, how | os.O_NONBLOCK)) as file:
            content = _content(file)
        if differences := _differences(_described(layout), content):
            raise CheckpointError(f"{len(differences)} parts of the layout differ: {', '.join(differences[:3])}")
        return dict(content["state"])


@contextmanager
def _reported(verb: str, path: str | os.PathLike[str], else_: str) -> Iterator[None]:
    """Turn any error into a `CheckpointError` that names `path`, and says `else_` of one that does not speak for
    itself."""
    try:
        yield
    except Exception as error:
        let_through(error)
        cause = None if isinstance(error, CheckpointError) else error
        is_clear = cause is None or getattr(error, "filename", None) is not None
        reason = error if is_clear else f"{else_}{type(error).__name__}: {error}"
        raise CheckpointError(f"cannot {verb} checkpoint '{os.fsdecode(path)}': {reason}") from cause


# ---- the content


def _plain(content: dict[str, Any], largest: float = math.inf) -> tuple[dict[str, Any], str]:
    """Return a copy of plain data, and the sha256 of every type, key, dtype, shape and bit in it. Its tensors are on
    the CPU and alone in their storages; those that are so already are not copied.

    Raise `CheckpointError`, with the path to it, for anything else, and for a tensor of `largest` bytes or more."""
    sha, made, places = hashlib.sha256(), dict[Any, torch.Tensor](), collections.Counter[int]()

    def copied(value: Any, where: str) -> Any:
        # each item starts with a line that tells its length, so that no two values make the same bytes
        value = value.item() if isinstance(value, numpy.generic) else value
        kind = type(value)
        if kind in (NoneType, bool, int, str, float) and not (kind is int and value.bit_length() >= _WIDEST):
            text = "" if value is None or kind is float else value if kind is str else f"{value:x}"
            octets = struct.pack("<d", value) if kind is float else text.encode("utf-8", "surrogatepass")
            sha.update(f"{kind.__name__} {len(octets)}\n".encode() + octets)
            return value
        is_dense = kind is torch.Tensor and value.layout is torch.strided and not (value.is_nested or value.is_meta)
        if is_dense and not value.is_quantized and value.nbytes < largest:
            own = _alone(value, made)
            sha.update(f"{own.dtype} {list(own.shape)}\n".encode())
            sha.update(torch.empty(0, dtype=torch.uint8, device="cpu").set_(own.untyped_storage()).numpy().data)
            return own
        is_container = kind in (list, tuple, dict, OrderedDict)
        places[id(value)] += is_container and len(value) > 0
        if not is_container or places[id(value)] > _PLACES:
            raise CheckpointError(f"{where} is a {kind.__qualname__}, not {_ALLOWED}; or it is in too many places")
        sha.update(f"{kind.__name__} {len(value)}\n".encode())
        if kind in (list, tuple):
            return kind(copied(item, f"{where}[{index}]") for index, item in enumerate(value))
        copy = kind((copied(key, f"a key of {where}"), copied(value[key], f"{where}[{key!r}]")) for key in value)
        if kind is OrderedDict:  # module.state_dict() notes the versions of its modules in an attribute
            vars(copy).update(copied(vars(value), f"vars({where})"))
        return copy

    return copied(content, "content"), sha.hexdigest()


def _alone(tensor: torch.Tensor, made: dict[Any, torch.Tensor]) -> torch.Tensor:
    storage = (tensor.device, tensor.untyped_storage().data_ptr())
    form = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    if (storage, form) not in made:
        own = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # torch.save refuses a storage that is used with two dtypes
        is_alone = made.setdefault(storage, own) is own and own.untyped_storage().nbytes() == own.nbytes
        made[storage, form] = own if is_alone else own.clone()
    return made[storage, form]


def _described(layout: Layout) -> dict[str, Any]:
    slots = [[slot.name, [*slot.shape, *["complex"] * slot.is_complex]] for slot in layout.slots]
    return {"layout": slots, "dtype": str(layout.dtype).removeprefix("torch.")}


def _differences(ours: dict[str, Any], content: dict[str, Any]) -> list[str]:
    """Return, in words, the differences between the parameters here and in the content of a file."""
    here, there = ({name: tuple(form) for name, form in one["layout"]} for one in (ours, content))
    here["dtype of all"], there["dtype of all"] = ours["dtype"], content["dtype"]
    found = []
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            found.append(f"'{name}' is {here.get(name, 'missing')} here and {there.get(name, 'missing')} in the file")
    return found if found or [*here] == [*there] else ["the same parameters are in another order in the file"]


# ---- the file


def _replace(target: str, content: dict[str, Any]) -> None:
    """Write next to the old file, sync, rename."""
    folder, name = os.path.split(target)
    mode = 0o600  # the umask cannot be read without setting it
    with suppress(FileNotFoundError):
        mode = os.stat(target).st_mode
        if not stat.S_ISREG(mode) or not os.access(target, os.W_OK):
            raise CheckpointError("it is not a regular file, or may not be written")
    stem = f".{os.fsdecode(os.fsencode(name)[:200])}."  # the length of names is limited
    for entry in os.listdir(folder):
        if _is_left(entry, stem):
            with suppress(OSError):
                os.unlink(os.path.join(folder, entry))
    faults.point("checkpoint.start")
    temporary = os.path.join(folder, f"{stem}{os.getpid()}.{_PROCESS}.{next(_numbers)}.tmp")
    try:
        _write(temporary, mode & 0o777, content)  # it does not run as its owner
        faults.point("checkpoint.replace")
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    faults.point("checkpoint.replaced")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support it
            raise
    finally:
        os.close(descriptor)


def _write(path: str, mode: int, content: dict[str, Any]) -> None:
    outer = sys.exc_info()[1]
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's own hides that of the file, or of a signal handler
            raise (None if error.__context__ is outer else error.__context__) or error from None
        faults.point("checkpoint.writing")
        file.flush()
        os.fchmod(file.fileno(), mode)
        faults.point("checkpoint.sync")
        os.fsync(file.fileno())


def _is_left(name: str, stem: str) -> bool:
    """Tell whether this is a temporary file of a process that no longer exists."""
    found = re.fullmatch(rf"{re.escape(stem)}([1-9][0-9]{{0,8}})\.(?!{_PROCESS})[0-9a-f]{{8}}\.[0-9]+\.tmp", name)
    with suppress(ProcessLookupError):
        return found is not None and (int(found[1]) == os.getpid() or os.getpgid(int(found[1])) < 0)
    return True


def _content(file: io.BufferedReader) -> dict[str, Any]:
    """Return the content of a file whose digest is right."""
    if not file.peek(4).startswith(b"PK\x03\x04"):  # torch.load would try older formats
        raise CheckpointError("it is not a checkpoint of batchopt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's are about its own code
        content = torch.load(file, map_location="cpu", mmap=False, weights_only=True)
    if type(content) is not dict or content.get("format") != _FORMAT:
        raise CheckpointError("it is not a checkpoint of batchopt")
    if (version := content["version"]) > _VERSION:
        raise CheckpointError(f"it is of version {version}, and this batchopt reads up to {_VERSION}: take a newer one")
    expected = content.pop("sha256")
    content, digest = _plain(content, os.fstat(file.fileno()).st_size)
    if digest != expected:
        raise CheckpointError("it is damaged: its content is not what was written (sha256)")
    return content
