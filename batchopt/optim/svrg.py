"""Stochastic variance-reduced gradients, on top of any optimizer that steps along a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from batchopt.optim.line import Closure


class SVRG(torch.optim.Optimizer):
    """Steps of `base` along g(w) - g(v) + full(v): g is the gradient of a mini-batch, `full` that of all data, and v
    the parameters at the last snapshot.

    The variance of this direction goes to 0 with w - v, so the learning rate of `base` can stay constant. Each step
    evaluates the mini-batch twice; a snapshot takes one full pass.

    Args:
        base: an optimizer that needs no closure, over the parameters to move: `torch.optim.SGD(params, lr=0.1)`.
        update_freq: number of passes from one snapshot to the next. Default 2.

    `begin_pass(full)`, at the start of each pass over the data, takes the snapshots. Parameter groups, and so learning
    rates and schedulers, are those of `base`. Johnson and Zhang, "Accelerating stochastic gradient descent using
    predictive variance reduction", NIPS 2013. Raises `TypeError` or `ValueError` for arguments that cannot work.

    >>> x, model = torch.linspace(-1, 1, 100)[:, None], torch.nn.Linear(1, 1)
    >>> batches = batchopt.Batches((x, 2 * x), batch_size=10, shuffle=True)
    >>> factory = lambda params: batchopt.SVRG(torch.optim.SGD(params, lr=0.1))
    >>> with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), optimizer=factory) as opt:
    ...     for epoch in range(20):
    ...         snapshot = opt.optimizer.begin_pass(lambda: opt.full_gradient(batches))
    ...         losses = list(opt.steps(batches))
    >>> losses[-1] < 1e-4
    True
    """

    def __init__(self, base: torch.optim.Optimizer, update_freq: int = 2) -> None:
        if not isinstance(base, torch.optim.Optimizer):
            raise TypeError(f"`base` must be an optimizer, as torch.optim.SGD(params, lr=0.1); got {base!r}")
        if isinstance(update_freq, bool) or not isinstance(update_freq, int):
            raise TypeError(f"`update_freq` must be a number of passes, an int >= 1; got {update_freq!r}")
        if update_freq < 1:
            raise ValueError(f"`update_freq` must be >= 1; got {update_freq}")
        super().__init__([dict(group) for group in base.param_groups], base.defaults)
        self.base, self.update_freq = base, update_freq
        self._share()
        self._memory["passes"] = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, "update_freq": self.update_freq, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or an unpickled object."""
        super().__setstate__({**state, "param_groups": state["base"].param_groups, "state": state["base"].state})

    def _share(self) -> None:
        """Share the state and the list of groups with `base`."""
        self.param_groups, self.state = self.base.param_groups, self.base.state

    @property
    def _memory(self) -> dict[str, Any]:
        """The snapshot, stored under a name, since it belongs to no single parameter."""
        memory: dict[str, Any] = self.state["svrg"]  # type: ignore[index]
        return memory

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def begin_pass(self, full: Callable[[], Any]) -> bool:
        """Announce a pass over the data; return whether a snapshot was taken.

        `full()`, called only for a snapshot, evaluates f of all data at the current parameters and leaves df/dX in
        their `.grad`: `lambda: opt.full_gradient(loader)`.
        """
        memory = self._memory
        due = memory["passes"] % self.update_freq == 0
        if due:
            full()
            at = [parameter.detach().clone() for parameter in self._parameters]
            memory.update(at=at, full=_gradients(self._parameters))
        memory["passes"] += 1
        return bool(due)

    @torch.no_grad()
    def step(self, closure: Closure) -> torch.Tensor | float:  # type: ignore[override]
        """Make one step of `base`; return the loss of the mini-batch at the parameters before it.

        `closure()` evaluates f of the mini-batch, leaves df/dX in `.grad`, and returns f; it is called twice. Raises
        `RuntimeError` before the first `begin_pass`.
        """
        memory, parameters = self._memory, self._parameters
        if "at" not in memory:
            raise RuntimeError("SVRG has no snapshot: call begin_pass(full) at the start of each pass over the data")
        now = [parameter.detach().clone() for parameter in parameters]
        try:
            _assign(parameters, memory["at"])
            with torch.enable_grad():
                closure()
            there = _gradients(parameters)
        finally:
            _assign(parameters, now)
        with torch.enable_grad():
            loss = closure()
        for parameter, before, full in zip(parameters, there, memory["full"], strict=True):
            if not parameter.requires_grad:
                continue  # it was frozen since the snapshot
            if parameter.grad is None:
                parameter.grad = full - before
            else:
                parameter.grad.add_(full - before)
        self.base.step()
        return loss.detach() if isinstance(loss, torch.Tensor) else loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, including the snapshot."""
        self.base.load_state_dict(dict(state_dict))
        self._share()


def _assign(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.detach().copy_(value)


def _gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of the gradients; 0 where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]
