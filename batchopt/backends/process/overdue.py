"""Workers that are still at what somebody else did instead: how slow that shows them to be."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from batchopt.backends.process.channel import Reply
from batchopt.backends.process.worker import Asked, Child
from batchopt_workers.messages import Cut, Kind, Order, Report


class Pace(NamedTuple):
    """`samples` took `seconds`, or will have taken more."""

    samples: int
    seconds: float


@dataclass
class _Left:
    """An order that nobody waits for any more; the worker has been at one of its chunks, of so many samples, since then."""

    order: Order
    cut: Cut
    samples: int
    since: float


class Overdue:
    """What workers were at when an evaluation ended without them. Hears of it (it is a listener of the pool) when they
    are done after all; until then each evaluation says how long they have been at it, at least."""

    def __init__(self, paces: Mapping[Kind, dict[int, float]]) -> None:
        """Keeps `paces` (seconds a sample, by rank) current."""
        self._paces = paces
        self._left: dict[Child, _Left] = {}
        self._found: dict[Kind, dict[int, Pace]] = {kind: {} for kind in paces}

    @property
    def workers(self) -> list[Child]:
        """Who may still be at something."""
        return list(self._left)

    def leave(self, child: Child, order: Order, cut: Cut, chunk: int, since: float) -> None:
        """The worker is at `chunk` of that order since then, and nobody waits for it."""
        self._left[child] = _Left(order, cut, cut.bounds[chunk + 1] - cut.bounds[chunk], since)

    def heard(self, child: Child, asked: Asked, reply: Reply) -> None:
        """If it is the end of what was left, that is a measurement."""
        left = self._left.get(child)
        if left is None or asked.order != left.order or reply.kind not in (Kind.DONE, Kind.FAILED):
            return
        del self._left[child]
        if reply.kind is Kind.DONE:
            with suppress(ValueError, struct.error, IndexError):  # what is no report says nothing
                report, bounds = Report.decode(reply.body), left.cut.bounds
                self._note(child, left, bounds[report.next] - bounds[left.order.first], report.seconds)

    def lost(self, child: Child, ending: str) -> None:
        """It will not end."""
        self._left.pop(child, None)

    def take(self, kind: Kind, living: Iterable[Child]) -> dict[int, Pace]:
        """What was shown about orders of that kind since it was asked for, by rank: of those who have ended, how long they
        took; of the others, how long they have taken so far."""
        now, there = time.monotonic(), set(living)
        self._left = {child: left for child, left in self._left.items() if child in there and not child.free}
        for child, left in self._left.items():
            self._note(child, left, left.samples, now - left.since)
        found, self._found[kind] = self._found[kind], {}
        return found

    def _note(self, child: Child, left: _Left, samples: int, seconds: float) -> None:
        if samples > 0 and seconds > 0:
            self._found[left.order.kind][child.rank] = Pace(samples, seconds)
            self._paces[left.order.kind][child.rank] = seconds / samples
