"""The exceptions: what a user can catch, and what the messages say."""

from __future__ import annotations

import pickle
import traceback

import pytest

from batchopt.errors import BatchoptError, RemoteTraceback, WorkerError, WorkerLostError


@pytest.mark.parametrize("error", [WorkerError(0, "ValueError", "no", range(0)), WorkerLostError("gone")])
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
