"""OpenMP's threads end before workers compute, and nothing else does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from batchopt._machine.cores import _pauses, end_spinning
from tests.building import Child, loaded

pytestmark = pytest.mark.skipif(not _pauses(), reason="there is no libgomp in this process")


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
    end_spinning()


def compute() -> torch.Tensor:
    """In parallel."""
    return torch.arange(1_000_000, dtype=torch.float64).sqrt()


def gone(count: int) -> bool:
    """Whether there are as few threads soon: they end by themselves once they are told to."""
    waited = threading.Event()
    for _ in range(1000):
        if threads() <= count:
            return True
        waited.wait(0.01)
    return False


def test_threads_end_and_come_back() -> None:
    end_spinning()
    expected, before = compute(), threads()
    end_spinning()
    assert gone(before - 2)
    assert torch.equal(compute(), expected) and threads() == before


def test_the_threads_of_another_thread_stay() -> None:
    computed, stopped, found = threading.Event(), threading.Event(), []

    def other() -> None:
        torch.set_num_threads(3)
        found.append(compute())
        computed.set()
        stopped.wait()
        found.append(compute())

    thread = threading.Thread(target=other)
    thread.start()
    computed.wait()
    compute()
    before = threads()
    end_spinning()
    assert gone(before - 2)
    stopped.set()
    thread.join()
    assert torch.equal(*found)


def test_they_end_where_workers_evaluate() -> None:
    with loaded(torch.nn.Linear(2, 1), torch.nn.MSELoss(), torch.ones(4, 2), torch.ones(4, 1), parallelize=2) as opt:
        end_spinning()
        loss = opt.evaluate()
        compute()
        before = threads()
        assert torch.equal(opt.evaluate(), loss)
        assert gone(before - 2)


def test_a_fork_does_not_wait_for_threads_that_it_does_not_have() -> None:
    compute()
    assert Child(end_spinning).said() == "None"
