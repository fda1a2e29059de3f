"""Nodes that this process places keep the contract of every backend."""

from __future__ import annotations

import pytest

from tests.backends.contract import Contract


@pytest.mark.slow
@pytest.mark.rows
class TestTwoNodes(Contract):
    """Two nodes, with a worker each."""

    backend = "local nodes"
    parallelize = 2
