"""A training that is killed on one backend goes on on a cluster, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.training.common import Killed
from tests.training.test_resume import run

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


@pytest.mark.nightly
def test_from_this_process_to_a_cluster_to_worker_processes(two_nodes: Cluster, tmp_path: Path) -> None:
    expected = run(tmp_path / "whole")
    for backend, parallelize, last in (("process", 1, 2), ("ray", 3, 5)):
        with pytest.raises(Killed):
            run(tmp_path / "run", parallelize=parallelize, killed=last, backend=backend)
    assert run(tmp_path / "run", parallelize=2) == expected
