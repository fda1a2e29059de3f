"""The traceback of a mistake in the user's code: without the frames of this library."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from types import TracebackType

import torch
import torch.utils._contextlib

import batchopt_workers

# Directories and files whose frames are left out: of both packages, and of torch around each step of an optimizer.
_OURS = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(batchopt_workers.__file__) + os.sep,
    inspect.getfile(torch.optim.Optimizer),
    inspect.getfile(torch.utils._contextlib),
)


def hide_frames(error: BaseException) -> None:
    """Leave the library's frames out of the traceback of an error and of its cause, unless the environment has
    `BATCHOPT_TRACEBACK=full`."""
    if os.environ.get("BATCHOPT_TRACEBACK") != "full":
        for one in (error, error.__cause__):
            if one is not None:
                one.__traceback__ = _without_ours(one.__traceback__)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    kept = None
    for entry in reversed([*_entries(traceback)]):
        if not entry.tb_frame.f_code.co_filename.startswith(_OURS):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
