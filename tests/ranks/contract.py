"""The contract, as each of several ranks runs it: see `test_contract.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from batchopt import BatchOptimizer
from tests.backends.contract import Contract

BatchOptimizer(nn.Linear(1, 1), nn.MSELoss(), backend="ranks").close()  # rank 0 listens from now on
FOLDER = Path(os.environ["FOLDER_OF_RANKS"])
WORKERS = [int(number) for number in os.environ["WORKERS_OF_RANKS"].split()]


class TestRanks(Contract):
    """As many workers on each rank as the environment says."""

    backend = "ranks"
    parallelize = sum(WORKERS)
    processes = min(WORKERS) > 1

    @pytest.fixture
    def shared(self, request: pytest.FixtureRequest) -> Path:
        """A folder that all ranks see."""
        path = FOLDER / str(request.node.name)
        path.mkdir(exist_ok=True)
        return path

    @property
    def asked(self) -> int:
        """The number of this rank."""
        return WORKERS[int(os.environ["RANK"])]
