"""Measuring each worker's speed on the user's own module and data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchopt.backends import Backend
from batchopt.plan import Objective
from batchopt.split import cut_batch
from batchopt_workers.messages import Order

# Seconds: a measurement shorter than this is repeated on twice as many samples.
LONG_ENOUGH = 0.02
# Samples in the first measurement.
FIRST = 16


def measure(
    backend: Backend, objective: Objective, evaluation: int, step: int
) -> tuple[Sequence[int], Sequence[float]]:
    """Samples and seconds of each worker on a part of the loaded batch, all workers on the same part at the same time.

    The part grows until it takes long enough to be timed, up to an equal share of the batch. The first run only warms up.
    """
    workers = len(backend.workers)
    share = math.ceil(objective.size / workers)
    size, warm = min(share, FIRST), False
    while True:
        cut = cut_batch(objective.size, [0, size, objective.size] if size < objective.size else [0, size], "sum", None)
        answers = backend.evaluate(cut, [Order(evaluation, step, 0, 1)] * workers)
        seconds = [answer.seconds for answer in answers]
        if warm and (max(seconds) > LONG_ENOUGH or size == share):
            return [size] * workers, seconds
        if warm:
            size = min(2 * size, share)
        warm = True
