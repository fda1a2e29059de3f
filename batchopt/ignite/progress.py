"""What is said of a training, by the optimizer's `verbose`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from batchopt._function.reporter import ProgressBar, logger
from batchopt.optimizer import BatchOptimizer


class Progress:
    """`verbose` 1: a bar for each epoch. 2 and 3: a log record for each epoch, with its numbers."""

    def __init__(self, verbose: int, epochs: int) -> None:
        self._verbose, self._epochs = verbose, epochs
        self._bar: ProgressBar | None = None

    def batch(self, epoch: int, batch: int, batches: int | None, loss: float) -> None:
        """A batch of this number in its epoch is done, of so many."""
        if self._verbose != 1:
            return
        if self._bar is None:
            title = f"epoch {epoch}/{self._epochs}"
            self._bar = ProgressBar(desc=title, total=batches, initial=batch - 1, unit=" batches", dynamic_ncols=True)
        self._bar.set_postfix_str(f"loss {loss:.6g}", refresh=False)
        self._bar.update()

    def epoch(self, epoch: int, numbers: Mapping[str, Any]) -> None:
        """An epoch is over."""
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
    """Of `opt`, whose own bar rests meanwhile."""
    shown = Progress(opt._function.verbose, epochs)
    try:
        with opt._function.without_bar():
            yield shown
    finally:
        shown.close()
