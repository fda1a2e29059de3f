"""Shortcuts: evaluations of a piece that do what eager ones do without their Python, and are compared with these.

    a piece ─► its form ─► in the table? ─► by the shortcut; now and then (`Clock`) compared with an eager one
                              │ no                     │ differs by more than rounding: `Differs`, and nothing counts
                              └─► made, or eager ◄─────┘

What must hold: a shortcut is keyed by everything that f is known to depend on, and whoever holds it drops it when that
changes. What it does not know is found by comparison.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from batchopt_workers.batch.batch import Piece
from batchopt_workers.evaluate.clock import Clock
from batchopt_workers.evaluate.draws import other_states, set_torch_states, torch_states
from batchopt_workers.shortcuts.form import PieceForm, arguments_of, form_of
from batchopt_workers.wire.structures import same_values, tensors_in

# Sets the gradients of the parameters, writes the module's state, and returns the loss: of a piece, and of its tensors.
Eager = Callable[[Piece], torch.Tensor]
Shortcut = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Differs(Exception):
    """A shortcut finds something else than the eager evaluation, by more than rounding."""


class Start:
    """The start of an evaluation: the elements of the module's `state`, and the states of the generators."""

    def __init__(self, state: Sequence[torch.Tensor]) -> None:
        self._state = [(own, own.detach().clone()) for own in state]
        self._torch, self._others = torch_states(), (np.random.get_state(legacy=False), random.getstate())
        self._seen = other_states()

    @property
    def obstacle(self) -> str | None:
        """Anything that an evaluation since has done, and a graph would not do."""
        if other_states() != self._seen:
            return "it draws from the generators of NumPy or Python"
        return None

    def restore(self, parameters: Sequence[torch.Tensor]) -> None:
        """Start again, without gradients and casts."""
        torch.clear_autocast_cache()
        with torch.no_grad():
            for own, before in self._state:
                own.detach_().copy_(before) if own.grad_fn is not None else own.copy_(before)
        set_torch_states(self._torch)
        np.random.set_state(self._others[0])
        random.setstate(self._others[1])
        for parameter in parameters:
            parameter.grad = None


class Outcome(NamedTuple):
    """The outcome of an evaluation: what it found, wrote and drew."""

    loss: torch.Tensor
    gradients: Sequence[torch.Tensor | None]
    state: Sequence[torch.Tensor]
    draws: Sequence[torch.Tensor]


# Units in the last place of X: what such a change of it makes is rounding.
ULPS = 16


def examined(
    shortcut: Callable[[], torch.Tensor],
    eager: Callable[[], torch.Tensor],
    parameters: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Evaluate by a shortcut and by `eager`, from the same `state` and with the same random numbers, and compare. Raise
    `Differs`.

    Rounding is relative to the terms that are added, and these may cancel, more and more as f falls. So where more
    differs than a small part of the largest element, `eager` is asked how much of it an X beside this one makes.
    """
    start = Start(state)

    def outcome(evaluation: Callable[[], torch.Tensor]) -> Outcome:
        start.restore(parameters)
        loss = evaluation().detach().clone()
        gradients = [parameter.grad for parameter in parameters]
        return Outcome(loss, gradients, [own.detach().clone() for own in state], torch_states())

    expected, found = outcome(eager), outcome(shortcut)
    try:
        compare(found, expected, expected)
    except Differs:
        own = [parameter.data for parameter in parameters]  # shared, so it is replaced and not written
        try:
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data = _beside(data)
            nearby = outcome(eager)
        finally:
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data = data
        compare(found, expected, nearby)
        outcome(shortcut)  # whose gradients and state count
    return found.loss


def _beside(x: torch.Tensor) -> torch.Tensor:
    """Return other numbers, each some units of its last place away, in a direction of no symmetry."""
    ways = torch.arange(x.numel(), device=x.device).cos().view(x.shape)
    return x + x * (ULPS * torch.finfo(x.dtype).eps * ways).to(x.dtype)


def compare(found: Outcome, expected: Outcome, nearby: Outcome) -> None:
    """Raise `Differs` if two outcomes differ by more than rounding; `nearby`: the expected one at an X beside."""
    if [gradient is None for gradient in found.gradients] != [gradient is None for gradient in expected.gradients]:
        raise Differs("it uses other parameters")
    _check("the loss", [(found.loss, expected.loss, nearby.loss)])
    _check("a gradient", zip(found.gradients, expected.gradients, nearby.gradients, strict=True))
    for state in zip(found.state, expected.state, nearby.state, strict=True):
        _check("a tensor of the module's state", [state])
    if not all(map(torch.equal, found.draws, expected.draws)):
        raise Differs("it draws another number of random numbers")


def _check(what: str, outcomes: Iterable[tuple[torch.Tensor | None, ...]]) -> None:
    """Raise `Differs` if the first of three tensors differs from the second by more than rounding: a part of the
    largest element of all, or more than the third one does."""
    there = [[tensor.detach() for tensor in three if tensor is not None] for three in outcomes]
    there = [three for three in there if len(three) == 3 and three[1].numel()]
    if all(same_values(mine, own) for mine, own, _ in there):
        return
    if not all(own.is_floating_point() for _, own, _ in there):
        raise Differs(f"{what} is another one")
    size = max(own.abs().max().item() for _, own, _ in there)
    noise = max(filter(math.isfinite, [(beside - own).abs().max().item() for _, own, beside in there]), default=0.0)
    for mine, own, _ in there:
        difference = 0.0 if same_values(mine, own) else (mine - own).abs().max().item()
        if not difference <= torch.finfo(own.dtype).eps ** 0.5 * size + noise:  # or NaN
            raise Differs(f"{what} differs by {difference:.2g} of {size:.2g}")


class Shortcuts:
    """The table of a process, by the form of pieces. `reason`: why pieces were evaluated eagerly last; `is_over`: and
    always will be."""

    def __init__(self, parameters: Sequence[torch.Tensor], state: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._parameters, self._state = parameters, state
        self._clock = Clock()
        self._table: dict[Any, Shortcut] = {}
        self._due: set[Any] = set()  # keys of shortcuts that are to be compared
        self.reason, self.is_over = "nothing was evaluated yet", False

    def begin(self, evaluation: int) -> None:
        """Begin an evaluation, or go on with it. Raise `Differs` for a change that makes shortcuts wrong."""
        if self._clock.begin(evaluation):
            self.look(evaluation)
            if self._clock.is_due:
                self._due = set(self._table)

    def evaluate(self, piece: Piece, eager: Eager) -> torch.Tensor | None:
        """Set gradients and return the loss of a piece, valid until the next one is evaluated; None if there is no
        shortcut for it. Raise `Differs`."""
        form = None if self.is_over else form_of(piece)
        if form is None:
            self.reason = self.reason if self.is_over else "the samples hold something that cannot be compared"
            return None
        tensors = [*tensors_in(arguments_of(piece))]
        key = self.key_of(form, piece, tensors)
        shortcut = self._table.get(key)
        if shortcut is None:
            return self.missing(key, piece, eager)
        if key not in self._due:
            return shortcut(tensors)
        self._due.remove(key)
        try:
            return self.compared(shortcut, piece, eager)
        except Differs as error:
            self.stop(f"it found something else: {error}")
            raise

    def compared(self, shortcut: Shortcut, piece: Piece, eager: Eager) -> torch.Tensor:
        """Return the loss of a piece by a shortcut that is compared with an eager evaluation. Raise `Differs`."""
        call = partial(shortcut, [*tensors_in(arguments_of(piece))])
        return examined(call, partial(eager, piece), self._parameters, self._state())

    def stop(self, reason: str) -> None:
        """Evaluate eagerly from now on."""
        self._table, self._due, self.reason, self.is_over = {}, set(), reason, True

    def look(self, evaluation: int) -> None:
        """Look whether the shortcuts still serve."""

    def key_of(self, form: PieceForm, piece: Piece, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the key of the shortcut for a piece."""
        return form

    def missing(self, key: Any, piece: Piece, eager: Eager) -> torch.Tensor | None:
        """Evaluate a piece for which there is no shortcut yet, or leave that to others."""
        return None
