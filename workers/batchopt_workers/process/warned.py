"""Warnings of a worker, which its parent issues in its own process; they are sent as marked lines of standard error."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from typing import Any, NamedTuple, TextIO

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
