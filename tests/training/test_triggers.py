"""When triggers are due: Chainer's tables, also after a resume."""

from __future__ import annotations

from typing import Any

import pytest

from batchopt import Batches
from batchopt.training import EarlyStopping, EveryEpoch, EverySeconds, State
from batchopt.training.triggers import read_interval
from tests.training.common import data

T, F = True, False


# batches an epoch, the trigger, and at which iterations it is due: what Chainer's tests of IntervalTrigger expect; then
# two of our own, where its floating-point positions miss some
TABLE: list[tuple[float, Any, list[bool]]] = [
    (5, 2, [F, T, F, T, F, T, F]),
    (5, lambda state: state.iteration in (2, 7), [F, T, F, F, F, F, T]),
    (1, EveryEpoch(3), [F, F, T, F, F, T, F]),
    (2, EveryEpoch(1.5), [F, F, T, F, F, T, F]),
    (2.5, EveryEpoch(1), [F, F, T, F, T, F, F]),
    (0.5, EveryEpoch(1), [T, T, T, T, T, T, T]),
    # ours
    (10, EveryEpoch(0.1), [T, T, T, T, T, T, T]),
    (3, EveryEpoch(0.5), [F, T, T, F, T, T, F]),
]


@pytest.mark.parametrize("epoch_length, every, due", TABLE)
@pytest.mark.parametrize("resumed", [0, 3, 4])
def test_intervals_are_due_as_in_chainer_also_after_a_resume(
    epoch_length: Any, every: Any, due: list[bool], resumed: int
) -> None:
    trigger = read_interval("every", every)
    assert trigger is not None
    found = [trigger(State(1, i, epoch_length)) for i in range(resumed + 1, len(due) + 1)]
    assert found == due[resumed:]


def test_the_position_of_batches_counts_samples() -> None:
    batches = Batches(data()[0], 20)  # 20, 20 and 10 samples: 0.4, 0.8 and 1
    trigger, found = EveryEpoch(0.4, batches), []
    for _ in range(2):
        found += [trigger(State()) for _ in batches]
    assert found == [T, T, F, T, T, T]  # 1.4 and 1.8 pass 1.2 and 1.6; 2.0 is a multiple


STOPPING: dict[str, tuple[list[float], list[bool]]] = {
    "max": ([0.5, 0.5, 0.6, 0.7, 0.6, 0.4, 0.3, 0.2], [F, F, F, F, F, F, T, T]),
    "min": ([100, 80, 30, 10, 20, 24, 30, 35], [F, F, F, F, F, F, T, T]),
}


@pytest.mark.parametrize("mode", STOPPING)
@pytest.mark.parametrize("resumed", range(8))
def test_early_stopping_is_due_as_in_chainer_also_after_a_resume(mode: str, resumed: int) -> None:
    numbers, due = STOPPING[mode]
    trigger, found = EarlyStopping("m", 3, mode), []
    for number, value in enumerate(numbers):
        if number == resumed:
            state, trigger = trigger.state_dict(), EarlyStopping("m", 3, mode)
            trigger.load_state_dict(state)
        found.append(trigger(State(metrics={"m": value})))
        assert trigger.reached == found[-1]
    assert found == due


def test_seconds_go_on_after_a_resume() -> None:
    now = [0.0]
    trigger = EverySeconds(10, lambda: now[0])
    found = []
    for now[0] in (100, 105, 111, 112, 121, 155, 159):
        found.append(trigger(State()))
    assert found == [F, F, T, F, T, T, F]
    state = trigger.state_dict()
    assert state == {"left": 1.0}
    trigger = EverySeconds(10, lambda: now[0])
    trigger.load_state_dict(state)
    found = []
    for now[0] in (1000, 1000.5, 1001, 1002):
        found.append(trigger(State()))
    assert found == [F, F, T, F]


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: EveryEpoch(0), ValueError, "`period` must be a positive number of epochs, got 0"),
        (lambda: EveryEpoch("1"), TypeError, "`period` must be a positive number of epochs"),  # type: ignore[arg-type]
        (lambda: EverySeconds(-1), ValueError, "`period` must be a positive number of seconds"),
        (lambda: EverySeconds("1"), TypeError, "`period` must be a positive number of seconds"),  # type: ignore[arg-type]
        (lambda: EarlyStopping(patience=0), ValueError, "`patience` must be >= 1"),
        (lambda: EarlyStopping("m", mode="most"), ValueError, "`mode` must be 'min' or 'max'"),
        (lambda: read_interval("every", 0), ValueError, "`every` must be >= 1"),
        (lambda: read_interval("every", "epoch"), TypeError, "`every` must be a number of iterations, or a trigger"),
        (lambda: read_interval("every", lambda engine, event: True), TypeError, r"callable as every\(state\)"),
        (lambda: EveryEpoch(1)(State(1, 1, None)), ValueError, "does not tell"),
    ],
)
def test_wrong_arguments_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
