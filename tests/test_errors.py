"""The exceptions: what a user can catch, and what the messages say."""

from __future__ import annotations

import pickle
import traceback

import pytest

from batchopt.errors import BatchoptError, NonFiniteError, RemoteTraceback, WorkerError, WorkerLostError


@pytest.mark.parametrize(
    "error",
    [
        WorkerError(0, "ValueError", "no", range(0)),
        WorkerLostError("gone"),
        NonFiniteError("loss is nan", 0, range(1), 1, 1),
    ],
)
def test_every_error_is_a_batchopt_error_and_a_runtime_error(error: Exception) -> None:
    assert isinstance(error, BatchoptError)
    assert isinstance(error, RuntimeError)


def test_a_worker_error_says_who_where_and_what() -> None:
    error = WorkerError(3, "ZeroDivisionError", "division by zero", range(512, 768))
    assert str(error) == "ZeroDivisionError in worker 3, samples 512..767: division by zero"
    assert (error.rank, error.type_name, error.samples) == (3, "ZeroDivisionError", range(512, 768))


def test_a_worker_error_outside_of_an_evaluation_names_no_samples() -> None:
    assert str(WorkerError(0, "KeyError", "'x'", range(0))) == "KeyError in worker 0: 'x'"


def test_the_remote_traceback_is_shown_in_the_chain() -> None:
    remote = 'Traceback (most recent call last):\n  File "model.py", line 7, in forward\nKeyError: 1\n'
    try:
        raise WorkerError(1, "KeyError", "1", range(4)) from RemoteTraceback(remote)
    except WorkerError as error:
        shown = "".join(traceback.format_exception(error))
    assert remote in shown
    assert shown.index(remote) < shown.index("KeyError in worker 1, samples 0..3: 1")


def test_a_worker_error_survives_pickling() -> None:
    error = WorkerError(2, "ValueError", "bad", range(3, 5))
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.rank, twin.samples) == (str(error), 2, range(3, 5))


@pytest.mark.parametrize(
    "what, chunk, samples, message",
    [
        (
            "loss is inf",
            2,
            range(7, 8),
            "loss is inf in chunk 2 (sample 7), at step 5, evaluation 9; parameters are unchanged",
        ),
        (
            "gradient is not finite",
            0,
            range(4, 8),
            "gradient is not finite in chunk 0 (samples 4..7), at step 5, evaluation 9; parameters are unchanged",
        ),
        (
            "loss is nan",
            None,
            range(0),
            "loss is nan though that of each chunk is finite without hooks: a hook made it so, or the sum overflows, "
            "at step 5, evaluation 9; parameters are unchanged",
        ),
    ],
    ids=["one sample", "many samples", "no chunk"],
)
def test_a_non_finite_error_says_what_where_and_when(
    what: str, chunk: int | None, samples: range, message: str
) -> None:
    error = NonFiniteError(what, chunk, samples, step=5, evaluation=9)
    assert str(error) == message
    assert (error.chunk, error.samples) == (chunk, samples)
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is NonFiniteError
    assert (str(twin), twin.chunk, twin.samples) == (message, chunk, samples)
