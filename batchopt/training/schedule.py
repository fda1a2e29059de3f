"""Learning rates that change by the epoch or by the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau


class Schedule:
    """A scheduler of torch, stepped after each batch or epoch: `by` says which."""

    def __init__(self, scheduler: Any, step: str) -> None:
        if step not in ("epoch", "batch"):
            raise ValueError(f"`scheduler_step` must be 'epoch' or 'batch'; got {step!r}")
        if not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
            found = type(scheduler).__name__
            raise TypeError(f"`scheduler` must be one of torch.optim.lr_scheduler, over `opt.optimizer`; got {found}")
        self.scheduler, self.by = scheduler, step

    def step(self, numbers: Mapping[str, Any]) -> None:
        """Step, at the end of a batch or an epoch with these numbers."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(numbers.get("eval_loss", numbers["loss"]))
        else:
            self.scheduler.step()

    def state_dict(self) -> Any:
        """Return the state as plain data."""
        return {**kind(self), "state": _plain(self.scheduler.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there."""
        self.scheduler.load_state_dict(_like(self.scheduler.state_dict(), state["state"]))


def kind(schedule: Schedule | None) -> dict[str, Any]:
    """Return the class of a scheduler, and when it is stepped, by the names of their arguments."""
    name = None if schedule is None else type(schedule.scheduler).__name__
    return {"scheduler": name, "scheduler_step": schedule and schedule.by}


def check(schedule: Schedule | None, state: Mapping[str, Any] | None) -> None:
    """Raise `ValueError` for the state of another class of scheduler, or of another `scheduler_step`."""
    for name, here in kind(schedule).items():
        if (there := (state or {}).get(name)) != here:
            raise ValueError(f"it was written with `{name}` {there}, and here is {here}: give fit() the same")


def _plain(state: Any) -> Any:
    """Return the state with subclasses of dict, such as the Counter of milestones, as dicts."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return type(state)(map(_plain, state)) if isinstance(state, list | tuple) else state


def _like(own: Any, state: Any) -> Any:
    """Return the plain state with the subclasses of dict that the scheduler's `own` has in these places."""
    if isinstance(own, dict) and isinstance(state, dict):
        return type(own)({key: _like(own.get(key), value) for key, value in state.items()})
    if isinstance(own, list | tuple) and isinstance(state, list | tuple) and len(own) == len(state):
        return type(own)(map(_like, own, state))
    return state
