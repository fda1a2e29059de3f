"""Learning rates that change by the epoch or by the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ignite.engine import Engine
from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchopt.ignite.checkpoint import plain


class Schedule:
    """A torch scheduler, stepped after each batch or epoch, or one of ignite, called before it."""

    def __init__(self, scheduler: Any, step: str) -> None:
        if step not in ("epoch", "batch"):
            raise ValueError(f"`scheduler_step` must be 'epoch' or 'batch'; got {step!r}")
        self._is_torchs = hasattr(scheduler, "step")
        if not hasattr(scheduler, "state_dict") or not (self._is_torchs or callable(scheduler)):
            raise TypeError(
                "`scheduler` must be one of torch.optim.lr_scheduler or of ignite.handlers, over `opt.optimizer`; got "
                f"{type(scheduler).__name__}"
            )
        self._scheduler, self.by = scheduler, step

    def before(self, engine: Engine) -> None:
        """Handle the beginning of a batch or an epoch."""
        if not self._is_torchs:
            self._scheduler(engine)

    def after(self, numbers: Mapping[str, Any]) -> None:
        """Handle its end, with these numbers."""
        if not self._is_torchs:
            return
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(numbers.get("eval_loss", numbers["loss"]))
        else:
            self._scheduler.step()

    def state_dict(self) -> Any:
        """Return the state as plain data."""
        state = plain(self._scheduler.state_dict())
        return {"class": type(self._scheduler).__name__, "step": self.by, "state": state}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `ValueError` for the state of another class of scheduler, or of another `scheduler_step`."""
        for name, here in (("class", type(self._scheduler).__name__), ("step", self.by)):
            if state.get(name, here) != here:
                what = "`scheduler_step`" if name == "step" else "`scheduler`"
                raise ValueError(f"it was written with {what} {state[name]}, and here is {here}: give fit() the same")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there."""
        own = state["state"] if "class" in state else state  # an older file
        self._scheduler.load_state_dict(_counted(own, self._scheduler.state_dict()))


def _counted(state: Any, like: Any) -> Any:
    """Return the state with Counters where `like` has them, such as the milestones of a scheduler."""
    if isinstance(like, Counter):
        return Counter(state)
    if isinstance(like, dict) and isinstance(state, dict):
        return {key: _counted(value, like.get(key)) for key, value in state.items()}
    if isinstance(like, list | tuple) and isinstance(state, list | tuple) and len(like) == len(state):
        return type(state)(map(_counted, state, like))
    return state
