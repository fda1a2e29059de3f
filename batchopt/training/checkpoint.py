"""The checkpoints of a training: `opt.save` files that also hold the data position and the loop's state."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchopt.errors import CheckpointError
from batchopt.extending import once, read_count
from batchopt.optimizer import BatchOptimizer
from batchopt.training.triggers import read_interval

# The key of the loop's state in the state of a BatchOptimizer.
ENTRY = "fit"

_NAME = re.compile(r"(\d{8,})(?:,score=([^,]+))?\.batchopt")


class Saved(NamedTuple):
    """A checkpoint file, with its iteration and score."""

    iteration: int
    score: float | None
    path: Path


class Checkpoint:
    """The folder, the times and the number of the checkpoints that `fit` writes.

    A file is written completely or not at all, holds no code, and loads with `torch.load(path, weights_only=True)`;
    `opt.load_checkpoint(path)` loads parameters and optimizer from it.

    Args:
        folder: for the files, which are named after their iteration; created if missing.
        every: a number of iterations, or a trigger such as `EveryEpoch(0.5)` or `EverySeconds(600)`. Default: each
            epoch, the only times at which a loader (not `Batches` of data) can be resumed. At the end of an epoch,
            validation and callbacks come first. The end of the run is saved too, unless it is an exception.
        keep: how many of the newest to keep.
        best: how many to keep in addition, those with the best `score`, the name of a number available at the end of an
            epoch (`"eval_accuracy"`). mode: `"max"` if more is better, or `"min"`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: Any = None,
        keep: int = 1,
        best: int = 0,
        score: str = "eval_loss",
        mode: str = "min",
    ) -> None:
        self.folder = Path(folder)
        self.interval = read_interval("every", every)
        self.keep = read_count("keep", keep)
        self.best_of = read_count("best", best, least=0)
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max'; got {mode!r}")
        self.score, self._sign = score, -1.0 if mode == "min" else 1.0

    def files(self) -> list[Saved]:
        """Return the existing checkpoints, the oldest first."""
        found = [(_NAME.fullmatch(path.name), path) for path in self.folder.glob("*.batchopt")]
        saved = [Saved(int(m[1]), None if m[2] is None else float(m[2]), path) for m, path in found if m is not None]
        return sorted(saved, key=lambda one: (one.iteration, one.path.name))

    def newest(self) -> Path | None:
        """Return the path of the newest checkpoint, if there is one."""
        files = self.files()
        return files[-1].path if files else None

    def best(self) -> Path | None:
        """Return the path of the checkpoint with the best score, if one has a score; the older one of equals."""
        ranked = self._ranked()
        return ranked[0].path if ranked else None

    def _ranked(self) -> list[Saved]:
        scored = [one for one in self.files() if one.score is not None]
        return sorted(scored, key=lambda one: (-self._sign * (one.score or 0.0), one.iteration))

    def save(self, opt: BatchOptimizer, iteration: int, state: Any, numbers: Mapping[str, Any]) -> None:
        """Write the checkpoint of this iteration, with the loop's `state`; delete surplus ones. Raises
        `CheckpointError`."""
        score = numbers.get(self.score) if self.best_of else None
        suffix = f",score={float(score)!r}" if isinstance(score, int | float) and math.isfinite(score) else ""
        target = self.folder / f"{iteration:08d}{suffix}.batchopt"
        once(opt, self._make_folder)
        opt.save(target, extra={ENTRY: state})
        once(opt, lambda: self._delete_surplus(target, iteration))

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder of checkpoints '{self.folder}': {error.strerror}") from error

    def _delete_surplus(self, target: Path, iteration: int) -> None:
        kept = {target, *(one.path for one in self.files()[-self.keep :])}
        kept |= {one.path for one in self._ranked()[: self.best_of]}
        for one in self.files():
            if one.path not in kept or (one.iteration == iteration and one.path != target):
                one.path.unlink(missing_ok=True)

    def choose(self, resume: str | os.PathLike[str]) -> Path | None:
        """Return the file to resume from, by the argument `resume` of `fit`: `"never"`, `"auto"` (the newest) or a
        path. Raises `ValueError` if files of another run would be mistaken for those of this one."""
        files = self.files()
        if resume == "auto":
            return files[-1].path if files else None
        if resume == "never":
            if files:
                what = f"'{self.folder}' has checkpoints, up to iteration {files[-1].iteration}"
                raise ValueError(f"{what}: resume from there with resume='auto', or give a folder without any")
            return None
        path = Path(resume)
        number = next((one.iteration for one in files if one.path.resolve() == path.resolve()), None)
        if number is not None and files[-1].iteration > number:
            what = (
                f"'{self.folder}' has checkpoints after '{path.name}', which would be taken for newer ones of this run"
            )
            raise ValueError(f"{what}: give another folder, or move them away")
        return path


def own_of(extra: Mapping[str, Any], path: Path) -> Any:
    """Return the loop's state in the extra entries of the file `path`. Raises `CheckpointError` if there is none."""
    if ENTRY not in extra:
        what = f"cannot resume from checkpoint '{path}': it was not written by fit(), and has no position in the data"
        raise CheckpointError(f"{what}; opt.load_checkpoint() takes over parameters and optimizer")
    return extra[ENTRY]
