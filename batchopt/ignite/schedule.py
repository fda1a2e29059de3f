"""Learning rates that change by the epoch or by the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ignite.engine import Engine
from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchopt.ignite.checkpoint import plain


class Schedule:
    """A scheduler of torch, which is stepped after each batch or epoch; or one of ignite, which is called before."""

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
        """A batch, or an epoch, begins."""
        if not self._is_torchs:
            self._scheduler(engine)

    def after(self, numbers: Mapping[str, Any]) -> None:
        """It is over, with these numbers."""
        if not self._is_torchs:
            return
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(numbers.get("eval_loss", numbers["loss"]))
        else:
            self._scheduler.step()

    def state_dict(self) -> Any:
        """Plain data."""
        return plain(self._scheduler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        present = self._scheduler.state_dict()
        counted = {key for key, value in present.items() if isinstance(value, Counter)}
        self._scheduler.load_state_dict(
            {key: Counter(value) if key in counted else value for key, value in state.items()}
        )
