"""The simulated card, for `test_card.py`.

It has to be known before the first backward of a process, which then has a thread for it, and must not fork any more.
So these tests are run in a process of their own, by `tests/test_cards.py`; by hand with BATCHOPT_CARD=1.
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

collect_ignore_glob = [] if os.environ.get("BATCHOPT_CARD") else ["test_card.py"]

# Real ones, where there are any.
CARDS = [pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else []


class Counted(CudaRecording):
    """A recording of a CUDA device that counts as the others of the tests do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.replays = 0
        Recorded.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        super().replay()


@pytest.fixture(params=["card", *CARDS])
def device(request: pytest.FixtureRequest) -> torch.device:
    return card.device() if request.param == "card" else torch.device("cuda:0")


@pytest.fixture
def recorded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Have evaluations on the device recorded; the recordings that were made."""
    monkeypatch.setitem(RECORDINGS, device.type, Counted if device.type == "cuda" else Recorded)
    Recorded.made.clear()
    yield Recorded.made


@pytest.fixture
def simulated(device: torch.device) -> Iterator[None]:
    """Skip what is seen on the simulated card only; its memory may be limited."""
    if device.type != "card":
        pytest.skip("what a card waits for is counted by the simulated one")
    yield
    card.limit(None)
