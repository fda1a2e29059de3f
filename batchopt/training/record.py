"""The record of a training: a file with a line of JSON for each epoch, or at another interval."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from batchopt.extras.figure import blank
from batchopt.training.journal import Log
from batchopt.training.triggers import read_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Record(Log):
    """A file with one JSON object per line, which can be read while it is written.

    Args:
        path: of the file. A new run overwrites it; a resumed one continues after the line of its checkpoint, and lines
            that a killed run wrote after that are written again.
        every: a number of iterations, or a trigger such as `EveryEpoch(0.5)`. Default: each epoch. `loss` is the mean
            since the last line.
        keys: the numbers to write, in addition to `epoch`, `iteration` and `elapsed_time`. Default: all.
    """

    def __init__(self, path: str | os.PathLike[str], every: Any = None, keys: Sequence[str] | None = None) -> None:
        super().__init__(read_interval("every", every))
        self.path, self.keys = Path(path), None if keys is None else list(keys)
        self._file: IO[bytes] | None = None

    def begin(self, state: Mapping[str, Any] | None, iteration: int) -> None:
        """Open the file: a new one, or as it was when `state_dict` was called."""
        position = 0 if state is None else state["position"]
        if position and self.path.exists():
            self._file = self.path.open("r+b")
            written = self._file.read(position)
            if len(written) < position:
                what = f"'{self.path}' has {len(written)} bytes, and had {position} at the checkpoint"
                warnings.warn(f"{what}: lines are missing; it goes on after the last whole one", stacklevel=2)
            self._file.truncate(written.rfind(b"\n") + 1)
            self._file.seek(0, os.SEEK_END)
        else:
            self._file = self.path.open("wb")

    def write(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Write a line, flushed at once. Numbers that are not finite become null, as JSON has no notation for them."""
        assert self._file is not None
        names = numbers if self.keys is None else {"epoch", "iteration", "elapsed_time", *self.keys}
        line = {name: one if math.isfinite(one) else None for name, one in numbers.items() if name in names}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def state_dict(self) -> dict[str, int]:
        """Return the length of the file."""
        return {"position": 0 if self._file is None else self._file.tell()}

    def close(self) -> None:
        """Close the file; it can still be read."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self) -> list[dict[str, Any]]:
        """Return all complete lines, of this run or another one."""
        *complete, _ = self.path.read_text().split("\n")
        return [json.loads(line) for line in complete]

    def table(self, keys: Sequence[str] | None = None) -> str:
        """Return the lines as a table, for `print`, with these numbers or all."""
        lines = self.lines()
        names = [*(keys or dict.fromkeys(name for line in lines for name in line))]
        rows = [names, *([_shown(line.get(name)) for name in names] for line in lines)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    def plot(self, path: str | os.PathLike[str] | None = None, keys: Sequence[str] | None = None) -> Figure:
        """Return a figure, saved to `path` if given: numbers over epochs. Default: all but learning rate and time.
        Raises `ImportError` where matplotlib is missing: it comes with the extra `plot`."""
        lines, others = self.lines(), ("epoch", "iteration", "elapsed_time", "lr")
        found = dict.fromkeys(name for line in lines for name in line if name not in others)
        figure, axes = blank(8, 5)
        for key in found if keys is None else keys:
            points = [(line["epoch"], line[key]) for line in lines if line.get(key) is not None]
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=key)
        axes.set_xlabel("epoch")
        if axes.lines:
            axes.legend(frameon=False)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)
