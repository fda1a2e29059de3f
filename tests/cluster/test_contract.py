"""The Ray backend keeps the contract of every backend."""

from __future__ import annotations

import pytest
from ray.cluster_utils import Cluster

from tests.backends.contract import Contract


@pytest.mark.slow
@pytest.mark.timeout(180)
class TestTwoNodes(Contract):
    """Two nodes, with a worker each."""

    backend = "ray"
    parallelize = 2

    @pytest.fixture(autouse=True)
    def _cluster(self, two_nodes: Cluster) -> None:
        """There is one."""
