"""The file of a checkpoint: plain data with a digest, written completely or not at all, read without executing it."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from batchopt._checkpoint.atomic_write import check_regular, replace_file, target_of
from batchopt._checkpoint.plain_data import copied, digest
from batchopt.errors import CheckpointError
from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.layout import Layout

_FORMAT = "batchopt checkpoint"
_VERSION = 1


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
    with _reported("write", path):
        target = target_of(path)
        header = {"format": _FORMAT, "version": _VERSION, "layout": _listed(layout), "dtype": _name(layout.dtype)}
        plain = copied(state)
        replace_file(target, {**header, "sha256": digest({**header, "state": plain}), "state": plain})


def read(path: str | os.PathLike[str], layout: Layout) -> dict[str, Any]:
    """Return the state that was passed to `write`, with tensors on the CPU. Nothing in the file is executed.

    Raise `CheckpointError` if there is no such file; if it is damaged, of a newer version or not a checkpoint; and if
    it was written for parameters with another layout.
    """
    with _reported("read", path), _opened(path) as file, _distrusted():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's are about its own code; they are no damage where they are errors
            content = torch.load(file, map_location="cpu", mmap=False, weights_only=True)
        _check(content)
        if differences := _differences(layout, content):
            raise CheckpointError(f"layout differs: {_shortened(differences)}")
        state: dict[str, Any] = content["state"]
    return state


@contextmanager
def _reported(verb: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError`, or a `CheckpointError` without `path`, into a `CheckpointError` that names `path`."""
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
    """Turn any error that a damaged or hostile file causes while it is read into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        let_through(error)
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise CheckpointError(f"it is damaged, or not a checkpoint of batchopt ({reason})") from error


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    check_regular(os.stat(path))
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
    if content["sha256"] != digest(signed):
        raise CheckpointError("it is damaged: its content is not what was written (sha256)")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(layout: Layout) -> list[list[Any]]:
    return [[slot.name, [*slot.shape, *["complex"] * slot.is_complex]] for slot in layout.slots]


def _differences(layout: Layout, content: Mapping[str, Any]) -> list[str]:
    """Return, in words, the differences between the parameters in `content` and `layout`."""
    here = {name: tuple(form) for name, form in _listed(layout)}
    there = {name: tuple(form) for name, form in content["layout"]}
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
