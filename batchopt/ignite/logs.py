"""The destinations of a training's numbers: records, TensorBoard, and the loggers of ignite."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ignite.engine import Engine, Events
from ignite.handlers.base_logger import BaseLogger

from batchopt.extending import Stepped, observe
from batchopt.extras.history import History
from batchopt.ignite.loop import Log, learning_rate, writable
from batchopt.ignite.record import Record
from batchopt.ignite.triggers import Filter
from batchopt.optim import Iteration
from batchopt.optimizer import BatchOptimizer


class _Silent(Log):
    """A log in a process that writes no files."""

    def __init__(self, log: Log) -> None:
        self.interval = log.interval

    def state_dict(self) -> dict[str, Any]:
        """Return no state: the process that writes has it."""
        return {}


def read_logs(log: Any, is_main: bool) -> list[Log]:
    """Return the logs that `log` of `fit` names. Raises `TypeError` or `ValueError` for anything else."""
    given = log if isinstance(log, list | tuple) else [] if log is None else [log]
    found: list[Log] = []
    for one in given:
        if isinstance(one, str | os.PathLike):
            found.append(Record(one) if os.fspath(one).endswith(".jsonl") else TensorBoard(one))
        elif isinstance(one, Record | TensorBoard):
            found.append(one)
        elif isinstance(one, BaseLogger):
            found.append(_Attached(one))
        else:
            raise TypeError(
                f"`log` must be a file '*.jsonl', a folder for TensorBoard, a Record or a logger of ignite; got {one!r}"
            )
    if len({id(one) for one in given}) < len(given):
        raise ValueError("`log` has the same record twice: it would write each line twice")
    return found if is_main else [_Silent(one) for one in found]


class _Attached(Log):
    """A logger of ignite, attached to an engine whose only event is a line of numbers. It stays open: it is the
    user's."""

    def __init__(self, logger: BaseLogger) -> None:
        self.interval = None
        self._numbers: Mapping[str, float] = {}
        self._iteration = 0
        self._engine = Engine(lambda engine, batch: None)
        logger.attach_output_handler(
            self._engine,
            Events.EPOCH_COMPLETED,
            tag="batchopt",
            output_transform=lambda _: {name: value for name, value in self._numbers.items() if name != "iteration"},
            global_step_transform=lambda *_: self._iteration,
        )

    def write(self, numbers: Mapping[str, float], iteration: int) -> None:
        self._numbers, self._iteration = numbers, iteration
        self._engine.fire_event(Events.EPOCH_COMPLETED)

    def state_dict(self) -> dict[str, Any]:
        return {}


class TensorBoard:
    """Scalars in the folder `path`: the loss of each batch as `batch/loss`, and all numbers of each epoch."""

    interval: Filter | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import tensorboard  # torch's writer has a less helpful message if it is missing
        except ImportError as error:
            raise ImportError(
                f"log={os.fspath(path)!r} is a folder for TensorBoard, and it is missing: "
                "pip install 'batchopt[tensorboard]'; a record without it is log='log.jsonl'"
            ) from error
        del tensorboard
        self._path = os.fspath(path)
        self._logger: Any = None

    def begin(self, state: Mapping[str, Any] | None, iteration: int) -> None:
        """Start writing; entries that a killed run wrote after its checkpoint are discarded."""
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
        """Return no state: the iteration suffices."""
        return {}

    def close(self) -> None:
        """Write pending entries."""
        if self._logger is not None:
            self._logger.close()
            self._logger = None


@contextmanager
def log_steps(opt: BatchOptimizer, *loggers: BaseLogger, every: int = 1) -> Iterator[None]:
    """Pass the numbers of each step in the body to loggers of ignite (TensorBoard, MLflow, W&B, ClearML ...): for loops
    of your own, as `fit(log=...)` does for its own.

    A line for each accepted point of an optimizer of batchopt (with `every`, for each so many-th), and for each step of
    another one: `loss`, `evaluations`, `seconds`, `lr`, the `gradient` and the other numbers of a row of `opt.history`,
    and the loss of each term as `loss/` plus its name. Lines are numbered by iterations, which go on from a checkpoint.
    They are passed on at once: those of a step that is undone stay. Loggers stay open. Raises `TypeError` for anything
    but a logger of ignite.

    >>> from ignite.handlers import TensorboardLogger
    >>> x, model = torch.linspace(-1, 1, 100)[:, None], torch.nn.Linear(1, 1)
    >>> with batchopt.BatchOptimizer(model, torch.nn.MSELoss()) as opt, TensorboardLogger(log_dir="runs") as logger:
    ...     with batchopt.ignite.log_steps(opt, logger):
    ...         loss = opt.step(x, 2 * x)
    """
    for one in loggers:
        if not isinstance(one, BaseLogger):
            raise TypeError(f"`loggers` must be loggers of ignite, as ignite.handlers.MLflowLogger(); got {one!r}")
    with observe(opt, _Passed(opt, read_logs(loggers, opt.is_main), every)):
        yield


class _Passed(History):
    """Rows that are passed on to logs instead of being kept."""

    def __init__(self, opt: BatchOptimizer, logs: Sequence[Log], every: int) -> None:
        super().__init__(every)
        self._opt, self._logs = opt, logs

    def accepted(self, step: int, point: Iteration) -> None:
        super().accepted(step, point)
        self._pass_on()

    def step_ended(self, found: Stepped | None) -> None:
        super().step_ended(found)
        self._pass_on()

    def _pass_on(self) -> None:
        for row in self.rows:
            terms = {f"loss/{name}": loss for name, loss in row.get("terms", {}).items()}
            line = {"loss": row["f"], **row, **terms, **learning_rate(self._opt.optimizer)}
            del line["f"], line["iteration"]
            for log in self._logs:
                log.write(writable(line), row["iteration"])
        self.rows.clear()
