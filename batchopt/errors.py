"""What can go wrong, as exceptions.

    BatchoptError (a RuntimeError)
    ├── WorkerError       the user's code raised while it was evaluated
    ├── WorkerLostError   a worker process ended, or could not start
    └── NonFiniteError    the loss or its gradient is infinite or NaN

Wrong arguments raise `ValueError` or `TypeError` where they are given, before a process starts where that is possible.
"""

from __future__ import annotations


class BatchoptError(RuntimeError):
    """Any error of this library that is not about an argument; also raised for use after `close()`."""


class WorkerError(BatchoptError):
    """The module, the criterion or a hook raised in a worker.

    Its `__cause__` has the remote traceback. Parameters are as they were before the evaluation, and the optimizer can
    be used again once the cause is mended.
    """

    def __init__(self, rank: int, type_name: str, message: str, samples: range) -> None:
        self._arguments = (rank, type_name, message, samples)
        self.rank = rank
        self.type_name = type_name
        self.samples = samples
        where = f"worker {rank}"
        if samples:
            where += f", {_span(samples)}"
        super().__init__(f"{type_name} in {where}: {message}")

    def __reduce__(self) -> tuple[type[WorkerError], tuple[int, str, str, range]]:
        return type(self), self._arguments


class WorkerLostError(BatchoptError):
    """A worker process ended without being asked to. The optimizer was closed; build a new one."""


class NonFiniteError(BatchoptError):
    """The loss or its gradient is infinite or NaN; raised before the optimizer sees it.

    Parameters are as they were at the evaluation. Look at the samples named, or at the last step's length; with
    `on_nonfinite="return"` the optimizer gets an infinite loss instead, for a line search that can back off.
    """

    def __init__(self, what: str, chunk: int | None, samples: range, step: int, evaluation: int) -> None:
        self._arguments = (what, chunk, samples, step, evaluation)
        self.chunk = chunk
        self.samples = samples
        where = (
            "though that of each chunk is finite without hooks: a hook made it so, or the sum overflows"
            if chunk is None
            else f"in chunk {chunk} ({_span(samples)})"
        )
        super().__init__(f"{what} {where}, at step {step}, evaluation {evaluation}; parameters are unchanged")

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, int | None, range, int, int]]:
        return type(self), self._arguments


def _span(samples: range) -> str:
    return f"samples {samples.start}..{samples.stop - 1}" if len(samples) != 1 else f"sample {samples.start}"


class RemoteTraceback(Exception):
    """Carries the traceback of a worker's exception, as text, in the chain of the exception raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
