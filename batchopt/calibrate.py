"""Measuring each worker's speed on the user's own module and data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchopt.backends import Backend
from batchopt_workers.messages import Cut, Order

# Seconds: a measurement shorter than this is repeated on twice as many samples.
LONG_ENOUGH = 0.02
# Samples in the first measurement.
FIRST = 16


def measure(backend: Backend, samples: int, evaluation: int, step: int) -> tuple[Sequence[int], Sequence[float]]:
    """Samples and seconds of each worker on a part of the loaded batch of `samples`, all workers on the same part at
    the same time.

    The part grows until it takes long enough to be timed, up to an equal share of the batch. The first run only warms
    up.
    """
    workers = len(backend.workers)
    share = math.ceil(samples / workers)
    size, warm = min(share, FIRST), False
    while True:
        answers = backend.evaluate(Cut((0, size)), [Order(evaluation, step, 0, 1)] * workers)
        seconds = [answer.seconds for answer in answers]
        if warm and (max(seconds) > LONG_ENOUGH or size == share):
            return [size] * workers, seconds
        if warm:
            size = min(2 * size, share)
        warm = True
