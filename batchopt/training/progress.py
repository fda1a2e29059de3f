"""The progress of a training on the screen."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from batchopt.extending import Observer, ProgressBar, observe, report, verbosity
from batchopt.optimizer import BatchOptimizer

logger = logging.getLogger("batchopt")


class Progress(Observer):
    """Shows progress, by `verbose`: 1: a bar for each epoch. 2 and 3: a log record for each epoch, with its numbers."""

    def __init__(self, verbose: int, epochs: int) -> None:
        self._verbose, self._epochs = verbose, epochs
        self._bar: ProgressBar | None = None

    def decided(self, message: str) -> None:
        """Say it beside the bar."""
        ProgressBar.write(f"batchopt: {message}", file=sys.stderr)

    def batch(self, epoch: int, batch: int, batches: int | None, loss: float) -> None:
        """Show the finished batch with this number in its epoch, out of `batches`."""
        if self._verbose != 1:
            return
        if self._bar is None:
            title = f"epoch {epoch}/{self._epochs}"
            self._bar = ProgressBar(desc=title, total=batches, initial=batch - 1, unit=" batches", dynamic_ncols=True)
        self._bar.set_postfix_str(f"loss {loss:.6g}", refresh=False)
        self._bar.update()

    def epoch(self, epoch: int, numbers: Mapping[str, float]) -> None:
        """Show the end of an epoch."""
        text = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=True)
        self.close()
        if self._verbose >= 2:
            logger.info("epoch %d/%d: %s", epoch, self._epochs, text)

    def close(self) -> None:
        """Finish the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@contextmanager
def progress(opt: BatchOptimizer, epochs: int) -> Iterator[Progress]:
    """Show the progress of `opt`, in place of its own bar."""
    verbose = verbosity(opt)
    shown = Progress(verbose, epochs)
    if verbose != 1:
        yield shown
        return
    report(opt, 0)
    try:
        with observe(opt, shown):
            yield shown
    finally:
        report(opt, verbose)
        shown.close()
