"""Progress reports: records of the logger "batchopt", and a progress bar."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import torch
from tqdm import tqdm

from batchopt._engine.observer import Evaluated, Observer
from batchopt_workers.functions.inspection import name_of, normalises_by_chunk

logger = logging.getLogger("batchopt")


class ProgressBar(tqdm):  # type: ignore[misc]  # tqdm is untyped
    """A progress bar on stderr."""

    monitor_interval = 0  # no thread that outlives the bar


class Reporter(Observer):
    """Reports evaluations, by `verbose`: 0: nothing. 1: a progress bar on stderr, and a record of a slow start. 2: a
    record per evaluation, with its time. 3: also each worker's share and time. Records have level INFO; without any
    logging set up they go to stderr."""

    def __init__(self, verbose: int) -> None:
        self._warned = False
        self._said_idle = False
        self._bar: ProgressBar | None = None
        self._handler: logging.Handler | None = None
        self.verbose = 0
        self.become(verbose)

    def become(self, verbose: int) -> None:
        """Report so much from now on."""
        self.close()
        self.verbose = verbose
        self._level = logger.level
        if verbose:
            if not logger.isEnabledFor(logging.INFO):
                logger.setLevel(logging.INFO)
            if not logger.hasHandlers():
                self._handler = logging.StreamHandler()
                self._handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
                logger.addHandler(self._handler)

    def evaluated(self, found: Evaluated) -> None:
        """Report the loss and the time taken."""
        if self.verbose == 1:
            if self._bar is None:
                self._bar = ProgressBar(desc="batchopt", unit=" evaluations", dynamic_ncols=True)
            self._bar.set_postfix_str(f"batch {found.batch}, loss {found.loss:.6g}", refresh=False)
            self._bar.update()
        if self.verbose >= 2:
            milliseconds = (found.ended - found.began) * 1e3
            logger.info(
                "evaluation %d, batch %d: loss %.9g, %.3f ms", found.number, found.batch, found.loss, milliseconds
            )
        if self.verbose >= 3:
            for answer in found.answers:
                logger.info("  worker %d: %d samples, %.3f ms", answer.rank, answer.samples, answer.seconds * 1e3)

    def cut_matters(self, module: torch.nn.Module, chunks: int) -> bool:
        """Tell whether cutting the batch into `chunks` changes the loss; if so, warn once."""
        if chunks == 1:
            return False
        norm = normalises_by_chunk(module)
        if norm is not None and not self._warned:
            self._warned, why = True, "is in training mode" if norm.training else "keeps no running statistics"
            warn(
                f"'{name_of(norm, module)}' ({type(norm).__name__}) {why}: it normalises by the statistics of "
                "a chunk, so the loss depends on how the batch is cut. Call module.eval() (with running statistics), "
                "or use GroupNorm or LayerNorm; with chunk_size it is at least the same for any number of workers"
            )
        return norm is not None

    def idle(self, samples: int, chunks: int | None, workers: int) -> None:
        """Warn, once, if some of `workers` are idle, with fewer `samples` or `chunks` (None: one per worker)."""
        most = samples if chunks is None else min(samples, chunks)
        if most < workers and not self._said_idle:
            self._said_idle = True
            what = "sample" if chunks is None or chunks >= samples else "chunk"
            warn(f"{most} {what}{'s' * (most != 1)} for {workers} workers: {workers - most} idle")

    def not_grown(self, workers: int, error: Exception) -> None:
        """Warn that additional workers, on a machine that has joined, did not start."""
        warn(f"could not start {workers} additional workers though there is room; continuing without them: {error}")

    def decided(self, message: str) -> None:
        """Say it beside the bar, or in the log."""
        if self.verbose == 1:
            ProgressBar.write(f"batchopt: {message}", file=sys.stderr)
        self.note("%s", message)

    def note(self, message: str, *arguments: object) -> None:
        """Log an informative message at `verbose=2`."""
        if self.verbose >= 2:
            logger.info(message, *arguments)

    def close(self) -> None:
        """Finish the bar, and restore the logger."""
        if self.verbose:
            logger.setLevel(self._level)
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def warn(message: str) -> None:
    """Warn at the user's line: the one that called into this package, through any number of its functions."""
    here = os.path.dirname(os.path.dirname(__file__)) + os.sep
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
