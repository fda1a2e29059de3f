"""Levenberg-Marquardt on a cluster, on points that are drawn anew: the bits of one process."""

from __future__ import annotations

import pytest
from ray.cluster_utils import Cluster

from tests.test_adaptive import adapted


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_levenberg_marquardt_on_drawn_points_has_the_bits_of_one_process(two_nodes: Cluster) -> None:
    assert adapted(2, backend="ray") == adapted(1)
