"""Measures each worker's speed on the user's own module and data."""

from __future__ import annotations

import math
from collections.abc import Callable

from batchopt.backends.base import Backend
from batchopt_workers.messages import Cut, Order

# Seconds: a measurement shorter than this is repeated on twice as many samples.
LONG_ENOUGH = 0.02
# Samples in the first measurement.
FIRST = 16


def measure(backend: Backend, samples: int, number: Callable[[], int], step: int) -> tuple[list[int], list[float]]:
    """Samples and seconds of each worker on a part of the loaded batch of `samples`, all workers on the same part at
    the same time; 0 for one that was lost. `number` numbers the evaluations.

    The part is the start of the batch, which may be of its first term alone: workers are compared on the same work, and
    evaluations correct what it says of other samples.

    The part grows until it takes long enough to be timed, up to an equal share of the batch. The first run only warms
    up.
    """
    workers = len(backend.workers)
    share = math.ceil(samples / workers)
    size, warm = min(share, FIRST), False
    while True:
        seconds = backend.probe(Cut((0, size)), Order(number(), step, 0, 1))
        if warm and (max(seconds.values(), default=math.inf) > LONG_ENOUGH or size == share):
            ranks = range(workers)
            return [size if i in seconds else 0 for i in ranks], [seconds.get(i, 0.0) for i in ranks]
        if warm:
            size = min(2 * size, share)
        warm = True
