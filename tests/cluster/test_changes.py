"""On a cluster, too, whatever the user changes between steps is seen."""

from __future__ import annotations

import pytest
from ray.cluster_utils import Cluster

from tests.test_changes import Changes


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestTwoNodes(Changes):
    """Two nodes, with a worker each."""

    backend = "ray"
    workers = (2,)
    examples = 10

    @pytest.fixture(autouse=True)
    def _cluster(self, two_nodes: Cluster) -> None:
        """There is one."""
