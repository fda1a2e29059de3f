"""An exception of one node, as all others raise it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from batchopt._mapreduce.compression import DoesNotFit
from batchopt.errors import BatchoptError, RemoteTraceback, WorkerError
from batchopt_workers.map.watch import StateWritten
from batchopt_workers.process.failures import Failure, describe


class NodeFailure(NamedTuple):
    """An exception on a node: as text, and as an object if its class is ours. Nothing of the user's is unpickled."""

    text: Failure
    error: BatchoptError | StateWritten | DoesNotFit | None

    @classmethod
    def of(cls, error: BaseException) -> NodeFailure:
        """Describe the exception. One of ours loses its cause when it is pickled: so the text has the worker's
        traceback."""
        text = describe(error)
        if not isinstance(error, (BatchoptError, StateWritten, DoesNotFit)):
            return cls(text, None)
        return cls(replace(text, traceback=getattr(error.__cause__, "text", text.traceback)), error)

    def error_of(self, name: str, first: int) -> BaseException:
        """The exception, to be raised here; the node has that name, and workers from that rank on."""
        error: BaseException | None = self.error
        if error is None:
            error = WorkerError(first, self.text.type_name, self.text.message, range(0), f"on {name}")
        elif isinstance(error, WorkerError):  # which has the rank on that node
            _, (rank, *others) = error.__reduce__()
            error = WorkerError(first + rank, *others)
        if self.text.traceback:
            error.__cause__ = RemoteTraceback(self.text.traceback)
        return error
