"""Memory that an evaluation in this process frees: kept for the next one, and returned at the end."""

from __future__ import annotations

import ctypes
import json
import os

import pytest

from tests.backends.scripts import running

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")


# Two optimizers in turn: each evaluation makes and frees 40 blocks of 1 MB.
SCRIPT = """
import json, resource
import psutil, torch
import batchopt

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
    def forward(self, x):
        for _ in range(20):
            x = torch.tanh(x * self.scale)
        return x

def faults(evaluate):
    for _ in range(6):
        evaluate()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        evaluate()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 3

def megabytes():
    return psutil.Process().memory_info().rss / 2**20

x = torch.ones(250, 1000)
found = []
one, two = [batchopt.BatchOptimizer(Wide(), torch.nn.MSELoss(), optimizer=None) for _ in range(2)]
for opt in (one, two):
    opt.load(x, x)
    found.append(faults(opt.evaluate))
    opt.close()
    found.append(megabytes())
print(json.dumps(found))
"""


def play(**environment: str) -> list[float]:
    """Page faults of an evaluation by the first optimizer, memory after its end, and the same of the second."""
    with running(SCRIPT, "]", env={**os.environ, **environment}) as (_, said):
        return [float(number) for number in json.loads(said)]


@pytest.mark.nightly
def test_memory_is_kept_from_one_evaluation_to_the_next_until_the_last_optimizer_is_closed() -> None:
    faults, kept, later, left = play()
    assert faults < 2500 and later < 2500  # of 10,000 pages; a busy machine takes some back
    assert left < kept - 20


@pytest.mark.nightly
def test_settings_of_the_user_are_left_alone() -> None:
    faults, _, later, _ = play(MALLOC_MMAP_THRESHOLD_="131072")
    assert faults > 5000 and later > 5000
