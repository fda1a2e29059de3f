"""The simulated card, for all tests in this folder.

It has to be known before the first backward of a process, which then has a thread for it, and must not fork any more.
So these tests are run in processes of their own, by `tests/test_cards.py`; by hand with BATCHOPT_CARD=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from batchopt_workers.shortcuts.recording import RECORDINGS, CudaRecording
from tests import card
from tests.card.recorded import Recorded

collect_ignore_glob = [] if os.environ.get("BATCHOPT_CARD") else ["test_*.py"]

# A real one, too, where there is one.
KINDS = ["card", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]


class Counted(CudaRecording):
    """A recording of a CUDA device that counts as those of the simulated card do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.replays = 0
        Recorded.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        super().replay()


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> torch.device:
    return card.device() if request.param == "card" else torch.device("cuda:0")


@pytest.fixture
def recorded(device: torch.device) -> Iterator[list[Any]]:
    """Have evaluations on the card recorded; the recordings that were made."""
    before = RECORDINGS.get(device.type)
    RECORDINGS[device.type] = Recorded if device.type == "card" else Counted
    Recorded.made.clear()
    yield Recorded.made
    if before is None:
        del RECORDINGS[device.type]
    else:
        RECORDINGS[device.type] = before


@pytest.fixture
def simulated(device: torch.device) -> None:
    """Skip what is seen on the simulated card only."""
    if device.type != "card":
        pytest.skip("what a card waits for is counted by the simulated one")


@pytest.fixture
def memory(device: torch.device, simulated: None) -> Iterator[None]:
    """Have the card's memory limited by a test."""
    yield
    card.limit(None)
