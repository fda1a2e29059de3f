"""Shortcuts: evaluations of a piece that do what eager ones do without their Python, and are compared with these.

What must hold: a shortcut is keyed by everything that f is known to depend on, and whoever holds it drops it when that
changes. What it does not know is found by comparison: at the first evaluation in each process, the second, and the
4th, 8th, 16th, a piece of each form is evaluated eagerly as well. Beyond rounding, `Differs` is raised, before anything
counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from batchopt_workers.data.batch import Piece
from batchopt_workers.data.structures import same_values
from batchopt_workers.map.seeding import set_torch_states, torch_states

# Sets the gradients of the parameters, writes the module's state, and returns the loss.
Eager = Callable[[Piece], torch.Tensor]


class Shortcuts(Protocol):
    """The shortcuts that there are in a process."""

    def begin(self, evaluation: int) -> None:
        """Begin an evaluation, or go on with it. Raise `Differs` for a change that makes them wrong."""

    def evaluate(self, piece: Piece, eager: Eager) -> torch.Tensor | None:
        """Set gradients and return the loss of a piece, valid until the next one is evaluated; None if there is no
        shortcut for it. Raise `Differs`."""


class Differs(Exception):
    """A shortcut finds something else than the eager evaluation, by more than rounding."""


def examined(
    shortcut: Callable[[], torch.Tensor],
    eager: Callable[[], torch.Tensor],
    parameters: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    comparison: Comparison,
) -> torch.Tensor:
    """Evaluate by a shortcut and by `eager`, from the same state (`written`) and with the same random numbers, and
    compare. Raise `Differs`."""
    before, states = [own.clone() for own in written], torch_states()
    value = eager().detach().clone()
    expected = [parameter.grad for parameter in parameters]
    after, drawn = [own.clone() for own in written], torch_states()
    with torch.no_grad():
        for own, then in zip(written, before, strict=True):
            own.copy_(then)
    set_torch_states(states)
    for parameter in parameters:
        parameter.grad = None
    found = shortcut()
    comparison.losses(found, value)
    comparison.gradients([parameter.grad for parameter in parameters], expected)
    for own, new in zip(written, after, strict=True):
        _check("a tensor of the module's state", own, new)
    if not all(map(torch.equal, torch_states(), drawn)):
        raise Differs("it draws another number of random numbers")
    return found


# Rounding errors of terms that cancel, in units of those of the largest loss and gradient so far.
NOISE = 1000.0


class Comparison:
    """Compares losses and gradients of one shortcut with eager ones.

    Rounding is relative to the terms that are added, which may cancel: those of a residual that has become small are as
    large as at the beginning. So the `loss` and the `gradient` (its largest element) of the beginning count as well.
    Where r is a residual and d its rounding error, that of its square is 2 r d + d d.
    """

    def __init__(self) -> None:
        self.loss = self.gradient = 0.0  # the largest so far

    def losses(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise `Differs` if they differ by more than rounding."""
        value, eps = abs(expected.item()), torch.finfo(expected.dtype).eps
        self.loss = max(self.loss, value) if math.isfinite(value) else self.loss
        noise = NOISE * eps * math.sqrt(self.loss)
        _check("the loss", found, expected, eps**0.5 * value + 2 * math.sqrt(value) * noise + noise * noise)

    def gradients(self, found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
        """Raise `Differs` if they are of other parameters, or differ by more than rounding of the largest."""
        if [gradient is None for gradient in found] != [gradient is None for gradient in expected]:
            raise Differs("it uses other parameters")
        sizes = [gradient.abs().max().item() for gradient in expected if gradient is not None and gradient.numel()]
        size = max(sizes, default=0.0)
        self.gradient = max(self.gradient, size) if math.isfinite(size) else self.gradient
        for mine, gradient in zip(found, expected, strict=True):
            if mine is not None and gradient is not None:
                eps = torch.finfo(gradient.dtype).eps
                _check("a gradient", mine, gradient, eps**0.5 * size + NOISE * eps * self.gradient)


def _check(what: str, found: torch.Tensor, expected: torch.Tensor, allowed: float | None = None) -> None:
    """Raise `Differs` if elements differ by more than is `allowed`, by default a part of the largest one."""
    expected = expected.detach()
    if not expected.numel() or same_values(found, expected):
        return
    if not expected.is_floating_point():
        raise Differs(f"{what} is another one")
    size = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    if not difference <= (torch.finfo(expected.dtype).eps ** 0.5 * size if allowed is None else allowed):  # or NaN
        raise Differs(f"{what} differs by {difference:.2g} of {size:.2g}")


class Comparisons:
    """The evaluations that are compared: the first, the second, and the 4th, 8th, 16th."""

    def __init__(self) -> None:
        self._evaluation, self._count = -1, 0

    def begin(self, evaluation: int) -> bool:
        """Begin an evaluation, or go on with it; tell whether it is another one than before."""
        if evaluation == self._evaluation:
            return False
        self._evaluation = evaluation
        self._count += 1
        return True

    @property
    def are_due(self) -> bool:
        """Tell whether this evaluation is compared."""
        return self._count & (self._count - 1) == 0
