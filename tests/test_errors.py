"""The exceptions: what a user can catch, and what the messages say."""

from __future__ import annotations

import pickle
import traceback

import pytest

from batchopt.errors import BatchoptError, NonFiniteError, RemoteTraceback, WorkerError, WorkerLostError

OVERFLOW = "loss is nan though that of each chunk is finite without hooks: a hook made it so, or the sum overflows"
UNCHANGED = (
    "parameters are unchanged (on_nonfinite='return' makes it an infinite loss, for line searches that step back)"
)


def non_finite(what: str, chunk: int | None, samples: range) -> NonFiniteError:
    return NonFiniteError(what, chunk, samples, step=5, evaluation=9)


@pytest.mark.parametrize(
    "error, message, attributes",
    [
        (
            WorkerError(3, "IndexError", "list index out of range", range(512, 768)),
            "IndexError in worker 3, samples 512..767: list index out of range",
            {"rank": 3, "type_name": "IndexError", "samples": range(512, 768)},
        ),
        (WorkerLostError("gone"), "gone", {}),
        (
            non_finite("loss is inf", 2, range(7, 8)),
            f"loss is inf in chunk 2 (sample 7), at step 5, evaluation 9; {UNCHANGED}",
            {"chunk": 2, "samples": range(7, 8)},
        ),
        (
            non_finite("loss is nan", None, range(0)),
            f"{OVERFLOW}, at step 5, evaluation 9; {UNCHANGED}",
            {"chunk": None, "samples": range(0)},
        ),
    ],
)
def test_an_error_says_what_where_and_when_also_once_it_was_pickled(
    error: Exception, message: str, attributes: dict[str, object]
) -> None:
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert type(one) is type(error) and isinstance(one, BatchoptError) and isinstance(one, RuntimeError)
        assert str(one) == message and {name: getattr(one, name) for name in attributes} == attributes


def test_the_remote_traceback_is_shown_in_the_chain() -> None:
    remote = 'Traceback (most recent call last):\n  File "model.py", line 7, in forward\nKeyError: 1\n'
    try:
        raise WorkerError(1, "KeyError", "1", range(4)) from RemoteTraceback(remote)
    except WorkerError as error:
        shown = "".join(traceback.format_exception(error))
    assert remote in shown
    assert shown.index(remote) < shown.index("KeyError in worker 1, samples 0..3: 1")
