"""The record of a training for TensorBoard, by ignite's logger."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from batchopt.ignite.triggers import Filter


class TensorBoard:
    """Scalars in the folder `path`: the loss of each batch as `batch/loss`, and all numbers of each epoch."""

    interval: Filter | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import tensorboard  # torch's writer says less of what is missing
        except ImportError as error:
            raise ImportError(
                f"log={os.fspath(path)!r} is a folder for TensorBoard, and it is missing: "
                "pip install 'batchopt[tensorboard]'; a record without it is log='log.jsonl'"
            ) from error
        del tensorboard
        self._path = os.fspath(path)
        self._logger: Any = None

    def begin(self, state: Mapping[str, Any] | None, iteration: int) -> None:
        """Begin to write; what a killed run wrote after its checkpoint no longer counts."""
        from ignite.handlers import TensorboardLogger

        self._logger = TensorboardLogger(log_dir=self._path, purge_step=iteration + 1 if iteration else None)

    def batch(self, loss: float, iteration: int) -> None:
        """Write the loss of a batch."""
        self._logger.writer.add_scalar("batch/loss", loss, iteration)

    def write(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Write the numbers of an epoch, at its last iteration."""
        for name, value in numbers.items():
            if name != "iteration":
                self._logger.writer.add_scalar(name, value, iteration)
        self._logger.writer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the iteration says it all."""
        return {}

    def close(self) -> None:
        """Write what is left."""
        if self._logger is not None:
            self._logger.close()
            self._logger = None
