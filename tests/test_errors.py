"""The exceptions: what a user can catch, and what the messages say."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest
import torch

from batchopt import BatchOptimizer
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
        (WorkerError(0, "KeyError", "'x'", range(0)), "KeyError in worker 0: 'x'", {"rank": 0}),
        (WorkerLostError("gone"), "gone", {}),
        (
            non_finite("loss is inf", 2, range(7, 8)),
            f"loss is inf in chunk 2 (sample 7), at step 5, evaluation 9; {UNCHANGED}",
            {"chunk": 2, "samples": range(7, 8)},
        ),
        (
            non_finite("gradient is not finite", 0, range(4, 8)),
            f"gradient is not finite in chunk 0 (samples 4..7), at step 5, evaluation 9; {UNCHANGED}",
            {"chunk": 0, "samples": range(4, 8)},
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


class Own(torch.optim.SGD):
    """An optimizer of the user."""

    def step(self, closure: Any = None) -> Any:
        return closure()


@pytest.mark.sampled
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_traceback_has_the_frames_of_the_user(parallelize: int, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(module: torch.nn.Module, inputs: torch.Tensor, targets: None) -> torch.Tensor:
        raise KeyError("mine")

    def called(opt: BatchOptimizer) -> None:
        opt.step(torch.ones(8, 1))

    if full:
        monkeypatch.setenv("BATCHOPT_TRACEBACK", "full")
    optimizer = Own([*(module := torch.nn.Linear(1, 1)).parameters()])
    with BatchOptimizer(module, loss_fn=loss_fn, optimizer=optimizer, parallelize=parallelize) as opt:
        with pytest.raises(WorkerError) as found:
            called(opt)
    frames = [frame.name for frame in traceback.extract_tb(found.value.__traceback__)]
    cause = [frame.name for frame in traceback.extract_tb(found.value.__cause__.__traceback__)]  # type: ignore[union-attr]
    if full:
        assert {"called", "optimize", "evaluate"} < {*frames} and len(frames) > 9
    else:
        assert frames[1:] == ["called", "alone", "step"] and cause == ["loss_fn"] * (parallelize == 1)
