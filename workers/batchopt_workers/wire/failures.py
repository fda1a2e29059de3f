"""Exceptions and warnings of the user's code as plain data, which any process can read: no user object is unpickled.

Exceptions out of signal handlers are none of that code's: `let_through` tells them apart.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO


@dataclass(frozen=True)
class Failure:
    """An exception of the user's code in a worker, as text: the name of its type, its message, the traceback, and the
    current samples (empty if there were none). `kinds`: the names of its classes."""

    type_name: str
    message: str
    traceback: str
    samples: range = range(0)
    kinds: tuple[str, ...] = ()

    _HEAD = struct.Struct("<QQIIII")
    _LIMIT = 100_000  # characters of each text

    def encode(self) -> bytes:
        """Return the frame after its kind byte."""
        found = (self.type_name, self.message, self.traceback, "\n".join(self.kinds))
        texts = [text[-self._LIMIT :].encode("utf-8", "backslashreplace") for text in found]
        head = self._HEAD.pack(self.samples.start, self.samples.stop, *(len(text) for text in texts))
        return head + b"".join(texts)

    @classmethod
    def decode(cls, frame: bytes) -> Failure:
        """Invert `encode`; raise `ValueError` for any other frame."""
        try:
            start, stop, *lengths = cls._HEAD.unpack_from(frame)
        except struct.error as error:
            raise ValueError(f"not a frame: {error}") from error
        if len(frame) != cls._HEAD.size + sum(lengths):
            raise ValueError(f"a frame of {len(frame)} bytes for texts of {lengths}")
        texts, offset = [], cls._HEAD.size
        for length in lengths:
            texts.append(frame[offset : offset + length].decode("utf-8", "replace"))
            offset += length
        return cls(texts[0], texts[1], texts[2], range(start, stop), tuple(texts[3].splitlines()))


def names_of(kinds: Iterable[type]) -> tuple[str, ...]:
    """Return the names of classes, which are the same in every process."""
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def kinds_of(error: BaseException) -> tuple[str, ...]:
    """Return the names of the exception's classes, its own first."""
    return names_of(type(error).__mro__)


def message_of(error: BaseException) -> str:
    """Return the exception's message as printable text, even if its own methods raise."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except BaseException as inner:
        return f"<its __str__ raised {type(inner).__name__}>"


def describe(error: BaseException, samples: range = range(0)) -> Failure:
    """Return the exception as text, even if its own methods raise."""
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:
        trace = "".join(traceback.format_tb(error.__traceback__))
    return Failure(type(error).__name__, message_of(error), trace, samples, kinds_of(error))


# Delimits a marked line; no text of this package contains it.
_MARK = "\x1e"
MARKED = re.compile(f"{_MARK}batchopt (\\[.*?\\]){_MARK}\n", re.DOTALL)
BEGUN = re.compile(f"{_MARK}batchopt (?:(?!{_MARK}).)*\\Z", re.DOTALL)


class Warned(NamedTuple):
    """A warning: the names of its class and of that class's module, its text, and where it was issued."""

    module: str
    category: str
    text: str
    file: str
    line: int

    def give(self) -> None:
        """Issue it here, as a `UserWarning` if its class does not exist here."""
        kind: Any = sys.modules.get(self.module)
        for name in self.category.split("."):
            kind = getattr(kind, name, None)
        known = isinstance(kind, type) and issubclass(kind, Warning)
        warnings.warn_explicit(self.text, kind if known else UserWarning, self.file, self.line)


def tell_parent() -> None:
    """Show warnings of this process as marked lines from now on."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        warned = Warned(category.__module__, category.__qualname__, str(message), filename, lineno)
        if file is None:
            os.write(2, f"{_MARK}batchopt {json.dumps(warned)}{_MARK}\n".encode())
        else:
            file.write(warnings.formatwarning(message, category, filename, lineno, line))

    warnings.showwarning = show


def let_through(error: BaseException) -> None:
    """Raise the exception unchanged if a signal handler raised it; otherwise, caught around the user's code, it would
    be taken for an error of that code.

    Python calls a handler with a signal's number and the very frame that it interrupts, which identifies it here.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        code, known = trace.tb_frame.f_code, trace.tb_frame.f_locals
        given = [known.get(name) for name in code.co_varnames[: code.co_argcount + bool(code.co_flags & _VARARGS)]]
        if any(value is interrupted for item in given for value in (item if type(item) is tuple else (item,))):
            raise error


_VARARGS = 0x04  # inspect.CO_VARARGS, without the import
