"""Saying what goes on: log records of the logger "batchopt", and a progress bar."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tqdm import tqdm

from batchopt.backends import Answer

logger = logging.getLogger("batchopt")


class Report:
    """`verbose` 0: silent. 1: a progress bar of evaluations on stderr. 2: a record for each evaluation, with its time.
    3: each worker's share and time too. Records have level INFO; without any logging set up they go to stderr."""

    def __init__(self, verbose: int) -> None:
        if verbose not in (0, 1, 2, 3):
            raise ValueError(f"`verbose` must be 0, 1, 2 or 3, got {verbose!r}")
        self._verbose = verbose
        self._bar: tqdm | None = None
        if verbose >= 2:
            logger.setLevel(logging.INFO)
            if not logger.hasHandlers():
                handler = logging.StreamHandler()
                handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
                logger.addHandler(handler)

    def evaluated(
        self, number: int, batch: int, loss: float, seconds: float, answers: Sequence[Answer], sizes: Sequence[int]
    ) -> None:
        """An evaluation is done: the `number`-th of all, on batch `batch`; `sizes[i]` samples on the worker of `answers[i]`."""
        if self._verbose == 1:
            if self._bar is None:
                self._bar = tqdm(desc="batchopt", unit=" evaluations", dynamic_ncols=True)
            self._bar.set_postfix_str(f"batch {batch}, loss {loss:.6g}", refresh=False)
            self._bar.update()
        if self._verbose >= 2:
            logger.info("evaluation %d, batch %d: loss %.9g, %.3f ms", number, batch, loss, seconds * 1e3)
        if self._verbose >= 3:
            for answer, size in zip(answers, sizes, strict=True):
                logger.info("  worker %d: %d samples, %.3f ms", answer.rank, size, answer.seconds * 1e3)

    def note(self, message: str, *arguments: object) -> None:
        """Something worth knowing at `verbose=2`."""
        if self._verbose >= 2:
            logger.info(message, *arguments)

    def close(self) -> None:
        """Finish the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
