"""The destinations of a training's numbers: records, TensorBoard, and functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

from batchopt.extending import NumberFunction, Stepped, check_callable, observe
from batchopt.extras.history import History
from batchopt.optim import Iteration
from batchopt.optimizer import BatchOptimizer
from batchopt.training.journal import Log, learning_rate, writable
from batchopt.training.record import Record

# A destination of numbers by name, and of the iteration that they belong to.
Write = Callable[[Mapping[str, float], int], Any]


def read_logs(log: Any, is_main: bool) -> list[Log]:
    """Return the logs that `log` of `fit` names. Raises `TypeError` or `ValueError` for anything else."""
    given = log if isinstance(log, list | tuple) else [] if log is None else [log]
    found = [_read(one) for one in given]
    if len({id(one) for one in given}) < len(given):
        raise ValueError("`log` has the same record twice: it would write each line twice")
    return found if is_main else [Log(one.interval) for one in found]


def _read(one: Any) -> Log:
    if isinstance(one, str | os.PathLike):
        return Record(one) if os.fspath(one).endswith(".jsonl") else TensorBoard(one)
    if isinstance(one, Log):
        return one
    if callable(one):
        return _Function(one)
    raise TypeError(f"`log` must be a file '*.jsonl', a folder for TensorBoard, a Record or a function; got {one!r}")


class _Function(Log):
    """A function that is called for each line."""

    def __init__(self, function: Write) -> None:
        super().__init__()
        check_callable("log", function, ("numbers", "iteration"))
        self._function = function

    def write(self, numbers: Mapping[str, float], iteration: int) -> None:
        self._function(numbers, iteration)


class TensorBoard(Log):
    """Scalars in the folder `path`: the loss of each batch as `batch/loss`, and all numbers of each epoch."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path, self._writer = os.fspath(path), cast(Any, None)
        if find_spec("tensorboard") is None:  # torch's writer has a less helpful message
            missing = "is a folder for TensorBoard, and it is missing: pip install 'batchopt[tensorboard]'"
            raise ImportError(f"log={self._path!r} {missing}; a record without it is log='log.jsonl'")

    def begin(self, state: Mapping[str, Any] | None, iteration: int) -> None:
        """Start writing; entries that a killed run wrote after its checkpoint are discarded."""
        from torch.utils.tensorboard import SummaryWriter

        purged: Any = {"purge_step": iteration + 1} if iteration else {}
        self._writer = SummaryWriter(self._path, **purged)

    def batch(self, loss: float, iteration: int) -> None:
        """Write the loss of a batch."""
        self._writer.add_scalar("batch/loss", loss, iteration)

    def write(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Write the numbers of an epoch, at its last iteration."""
        for name, value in numbers.items():
            if name != "iteration":
                self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        """Write pending entries."""
        if self._writer is not None:
            self._writer.close()


@contextmanager
def log_steps(
    opt: BatchOptimizer,
    *logs: Write,
    every: int = 1,
    numbers: Mapping[str, NumberFunction] = {},  # never modified
) -> Iterator[None]:
    """Call `log(numbers, iteration)` with the numbers of each step in the body: for loops of your own, as
    `fit(log=...)` does for its own.

    It is called for each accepted point of an optimizer of batchopt (with `every`, for each so many-th), and for each
    step of another one: `loss`, `evaluations`, `seconds`, `lr`, the `gradient` and the other numbers of a row of
    `opt.history`, and the loss of each term as `loss/` plus its name. `numbers` are of yours: what `function(module)`
    returns there, under its name, a number or a tensor of one; of several, shape `(k,)`, as `name/0`, `name/1`, ...
    Iterations go on from a checkpoint. Lines are passed on at once: those of a step that is undone stay. With several
    ranks only the first one calls. Raises `TypeError` for anything but a function of two arguments.

    >>> x, model = torch.linspace(-1, 1, 100)[:, None], torch.nn.Linear(1, 1)
    >>> with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), optimizer="adam") as opt:
    ...     with batchopt.training.log_steps(opt, lambda numbers, iteration: print(iteration, sorted(numbers))):
    ...         loss = opt.step(x, 2 * x)
    1 ['evaluations', 'loss', 'lr', 'seconds', 'step']
    """
    for log in logs:
        check_callable("log", log, ("numbers", "iteration"))
    with observe(opt, _Passed(opt, logs if opt.is_main else (), every, numbers)):
        yield


class _Passed(History):
    """Rows that are passed on to functions instead of being kept."""

    def __init__(
        self, opt: BatchOptimizer, logs: Sequence[Write], every: int, numbers: Mapping[str, NumberFunction]
    ) -> None:
        super().__init__(every, numbers, opt.module)
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
            several = {n: row[n] for n in self.numbers if isinstance(row[n], list)}
            each = {f"{name}/{i}": one for name, found in several.items() for i, one in enumerate(found)}
            line = {"loss": row["f"], **row, **terms, **each, **learning_rate(self._opt.optimizer)}
            del line["f"], line["iteration"]
            for log in self._logs:
                log(writable(line), row["iteration"])
        self.rows.clear()
