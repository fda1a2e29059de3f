"""The exceptions that batchopt raises.

    BatchoptError (a RuntimeError)
    ├── WorkerError                the user's code raised in a worker
    ├── WorkerLostError            a worker process ended and cannot be replaced for this call
    │   ├── WorkerStartError       workers do not start
    │   ├── PoisonChunkError       a chunk repeatedly killed workers
    │   └── AllWorkersLostError    no worker remains, and `max_restarts` is spent
    ├── NodeLostError              another process of the group has ended, or does not respond
    ├── NodesDifferError           the ranks have diverged
    ├── NonFiniteError             the loss or its gradient is infinite or NaN
    └── CheckpointError            a checkpoint cannot be written, or is not one of this optimizer

Wrong arguments raise `ValueError` or `TypeError` where they are given, if possible before a process starts. After any
of these, parameters, buffers and counters are as they were before the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from batchopt_workers.batch.batch import Batch
from batchopt_workers.evaluate.objective import LossFunction, is_of_module

_NO_TERMS: Mapping[str, range] = MappingProxyType({})

# Advice where a library wants a `torch.optim.Optimizer`: that is passed closures, never the batch, which workers need.
TRAINER_ADVICE = "a trainer or scheduler gets `opt.optimizer`, and `opt.loss()` in place of its loss (docs/recipes.md)"


class BatchoptError(RuntimeError):
    """Any error of this library that is not about an argument.

    Also raised for use after `close()`, or from another process or thread than the one that uses the optimizer.
    """


class WorkerError(BatchoptError):
    """The module, the criterion or a hook raised in a worker.

    `rank`, `type_name` and `samples` (the positions in the batch being evaluated) locate and name the error; its
    `__cause__` has the remote traceback. Where there are terms, `samples` are numbered one term after the other, and
    `terms` has their positions within each term, by name. The optimizer can be used again once the cause is fixed.
    """

    def __init__(
        self,
        rank: int,
        type_name: str,
        message: str,
        samples: range,
        doing: str = "",
        terms: Mapping[str, range] = _NO_TERMS,
        kinds: tuple[str, ...] = (),
    ) -> None:
        self._arguments = (rank, type_name, message, samples, doing, dict(terms), kinds)
        self.kinds = kinds  # the names of its classes
        self.rank = rank
        self.type_name, self.message = type_name, message
        self.samples, self.terms = samples, dict(terms)
        where = f"worker {rank}"
        if samples:
            where += f", {_where(samples, terms)}"
        if doing:
            where += f", {doing}"
        super().__init__(f"{type_name} in {where}: {message}{_advice(type_name, message)}")

    def __reduce__(self) -> tuple[type[WorkerError], tuple[Any, ...]]:
        return type(self), self._arguments


def _advice(type_name: str, message: str) -> str:
    """Return advice on an exception of the user's code, if there is any."""
    found = _ADVICE.get(type_name.rpartition(".")[2].lstrip("_"), "")
    if any(words in message for words in _UNDEFINED):
        found = _NOT_FINITE
    if "on the same device" in message or "not on the expected device" in message:
        found = " (if the batch is on another device than the module, move it there: inputs.to(device))"
    return found


_NOT_FINITE = (
    " (if f is infinite where this is raised, say so by on_nonfinite=..., with the class of the exception, and "
    "on_nonfinite='return' for line searches that step back)"
)
# Of `math`, torch.distributions and torchdiffeq, where parameters have gone too far.
_UNDEFINED = "math domain error", "math range error", "to satisfy the constraint", "underflow in dt"
_ADVICE = {
    "OutOfMemoryError": " (chunk_size='auto' finds chunks that fit into the memory of the device; or give a number)",
    **dict.fromkeys(("LinAlgError", "NotPSDError", "NanError", "FloatingPointError"), _NOT_FINITE),
    **dict.fromkeys(("ZeroDivisionError", "OverflowError"), _NOT_FINITE),
    "ModuleNotFoundError": " (install it where the workers run, or send the module: by value, with "
    "cloudpickle.register_pickle_by_value(module), or on Ray with ray.init(runtime_env={'py_modules': [module]}))",
    "MemoryError": " (a smaller chunk_size needs less memory at a time)",
}


class WorkerLostError(BatchoptError):
    """A worker process ended during a call that cannot be repeated for it, such as `run_on_workers`.

    The message describes how it ended and has the tail of its standard error. A new worker takes its place; call again.
    """


class WorkerStartError(WorkerLostError):
    """Worker processes end before they can work: while they start, run precode, or receive the module.

    Raised when the optimizer is made (or resized). The message describes how they ended and has the tail of their
    standard error.
    """


class PoisonChunkError(WorkerLostError):
    """The same chunk was running each time when three workers died or hung (six, by signals that may have been sent
    from outside), the last time on a worker that had nothing else to do; it is not tried again.

    `chunk` and `samples` (positions in the batch; with `terms`, as in `WorkerError`) name it. Evaluate those samples
    alone in one process to see why; if they need more memory than there is, use a smaller `chunk_size`.
    """

    def __init__(
        self, chunk: int, samples: range, ending: str, terms: Mapping[str, range] = _NO_TERMS, deaths: int = 3
    ) -> None:
        self._arguments = (chunk, samples, ending, dict(terms), deaths)
        self.chunk = chunk
        self.samples, self.terms = samples, dict(terms)
        super().__init__(
            f"chunk {chunk} ({_where(samples, terms)}) ended {deaths} workers and is not tried again; the last one: "
            f"{ending}"
        )

    def __reduce__(self) -> tuple[type[PoisonChunkError], tuple[int, range, str, dict[str, range], int]]:
        return type(self), self._arguments


class AllWorkersLostError(WorkerLostError):
    """No worker remains and none may be started: `max_restarts` is spent, or new workers do not start.

    The message describes how the last one ended. Build a new optimizer, with a larger `max_restarts` if the cause is
    fixed.
    """


class NodeLostError(BatchoptError):
    """Another rank has ended, was stopped, or did not respond for `timeout` seconds; `place` is its number.

    The optimizer can no longer be used. Launchers such as torchrun start all ranks again: load a checkpoint first.
    """

    def __init__(self, message: str, place: int) -> None:
        self._arguments = (message, place)
        self.place = place
        super().__init__(message)

    def __reduce__(self) -> tuple[type[NodeLostError], tuple[str, int]]:
        return type(self), self._arguments


class NodesDifferError(BatchoptError):
    """The ranks have diverged: another seed, batch, program (mode, attribute, criterion) or number of calls. All ranks
    raise this.

    The message says what differs, and on which ranks. The optimizer can no longer be used.
    """


class CompileError(BatchoptError):
    """`compile=True` was given, and the evaluation at hand cannot be compiled; the message says why."""


class NonFiniteError(BatchoptError):
    """The loss or its gradient is infinite or NaN; raised before the optimizer sees it.

    Look at the samples named (`samples`; with `terms`, as in `WorkerError`), or at the last step's length; with
    `on_nonfinite="return"` the optimizer gets an infinite loss instead, for a line search that can backtrack.
    """

    def __init__(
        self,
        what: str,
        chunk: int | None,
        samples: range,
        step: int,
        evaluation: int,
        terms: Mapping[str, range] = _NO_TERMS,
        where: str = "",
    ) -> None:
        """`where`: the rest of the message, if it is not about an evaluation."""
        self._arguments = (what, chunk, samples, step, evaluation, dict(terms), where)
        self.chunk = chunk
        self.samples, self.terms = samples, dict(terms)
        when = (
            f", at step {step}, evaluation {evaluation}; parameters are unchanged (on_nonfinite='return' makes it an "
            "infinite loss, for line searches that step back)"
        )
        if where:
            when = ""
        elif chunk is not None:
            where = f"in chunk {chunk} ({_where(samples, terms)})"
        elif len(samples):
            where = f"in the sum over {_where(samples, terms)}"
        else:
            where = "though that of each chunk is finite without hooks: a hook made it so, or the sum overflows"
        super().__init__(f"{what} {where}{when}")

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, int | None, range, int, int, dict[str, range], str]]:
        return type(self), self._arguments


class CheckpointError(BatchoptError):
    """A checkpoint cannot be written, or a file is not one that can be used here.

    The message has the path and the reason. A previous file at the path is kept if writing failed.
    """


def explain(
    error: BatchoptError,
    batch: Batch,
    rows: Sequence[int] | None,
    loss_fns: Sequence[LossFunction | None],
    criterion: Any,
    x: torch.dtype,
) -> None:
    """Add to the message of an error in an evaluation what the batch has to do with it. `rows`: the indices of its
    samples in the data, if they are known; `loss_fns`: of its terms; `x`: the dtype of the parameters."""
    _add_data_indices(error, rows)
    _add_whole(error, batch.size)
    pairs = zip(batch.parts, loss_fns, strict=True)
    lacking = [p.name for p, loss_fn in pairs if p.targets is None and p.collate is None and not is_of_module(loss_fn)]
    _add_lack_of_targets(error, lacking, criterion)
    _add_dtypes(error, [tensor.dtype for tensor in batch.tensors()], x)
    if tuple(loss_fns) == (None,):
        _add_way_to_call(error, batch.example)


def _add_data_indices(error: BatchoptError, rows: Sequence[int] | None) -> None:
    """Add to the message the indices in the data of the samples that it names; `rows` has them for the full batch."""
    samples = getattr(error, "samples", None)
    if samples and rows is not None and not getattr(error, "terms", None):
        first = ", ".join(str(int(rows[sample])) for sample in samples[:3])
        error.args = (f"{error} [of the data: {first}{', ...' if len(samples) > 3 else ''}]",)


def _add_way_to_call(error: BatchoptError, inputs: Any) -> None:
    """Add to the message of a wrong call how a module is called with the items of `inputs`, if they have some."""
    if not isinstance(error, WorkerError) or error.type_name not in ("TypeError", "AttributeError"):
        return
    if isinstance(inputs, Mapping) or "not dict" in error.message or "'dict' object" in error.message:
        kind, call = "dict", "m(**x)"
    elif isinstance(inputs, tuple) or "not tuple" in error.message:
        kind, call = "tuple", "m(*x)"
    else:
        return
    error.args = (
        f"{error} (the module is given its inputs as one argument, a {kind}; for an argument for each item: "
        f"loss_fn=lambda m, x, t: criterion({call}, t))",
    )


def _add_lack_of_targets(error: BatchoptError, lacking: Sequence[str | None], criterion: Any) -> None:
    """Add to the message of a wrong call that the batch has no targets for the terms `lacking` (None: there are no
    terms), if the criterion needs them, or None was used in their place."""
    if not isinstance(error, WorkerError) or error.type_name not in ("TypeError", "AttributeError"):
        return
    names = [name for name in lacking if name is None or name in error.terms]
    called = getattr(criterion, "__name__", f"{type(criterion).__name__}.forward")
    if names and (f"{called}() missing" in error.message or "NoneType" in error.message):
        given = "step(inputs, targets)" if names[0] is None else f"{{{names[0]!r}: (inputs, targets)}}"
        error.args = (f"{error} (the batch has no targets: if the loss needs them, give {given})",)


def _add_dtypes(error: BatchoptError, dtypes: Iterable[torch.dtype], x: torch.dtype) -> None:
    """Add to the message of an operation between dtypes those of the data that are not the parameters' `x`."""
    others = sorted({str(dtype) for dtype in dtypes if dtype.is_floating_point and dtype != x})
    if not isinstance(error, WorkerError) or error.type_name != "RuntimeError" or not others:
        return
    if re.search(r"dtype|scalar type|type .*should be the same", error.message):
        error.args = (
            f"{error} (the batch has {' and '.join(others)}, and the parameters are {x}: convert the data by .to({x}), "
            f"or the module by .to({others[0]}))",
        )


def _add_whole(error: BatchoptError, size: int) -> None:
    """Add to the message of an error in a part of the batch, which names the `size` of the whole, how to see it all."""
    if isinstance(error, WorkerError) and 0 < len(error.samples) < size and re.search(rf"\b{size}\b", error.message):
        error.args = (
            f"{error} (these are {len(error.samples)} of the {size} samples: what has a row for each belongs into the "
            "batch; a loss that needs all at once cannot be divided: use parallelize=1 without `chunk_size`)",
        )


def _where(samples: range, terms: Mapping[str, range]) -> str:
    """Describe the samples, by terms if there are any."""
    return ", ".join(f"{_span(part)} of term {name!r}" for name, part in terms.items()) or _span(samples)


def _span(samples: range) -> str:
    return f"samples {samples.start}..{samples.stop - 1}" if len(samples) != 1 else f"sample {samples.start}"


class RemoteTraceback(Exception):
    """Carries the traceback of a worker's exception, as text, in the chain of the exception raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
