"""Which machines have room, and how workers are spread over them; what is said where there is no Ray, or an open
one."""

from __future__ import annotations

import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchopt import BatchOptimizer
from batchopt.backends.nodes.placing import Capacity, spread
from batchopt.backends.ray import cluster
from batchopt.backends.ray.cluster import Needs, fitting


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_workers_are_spread_in_proportion_to_the_room(capacities: list[int], data: st.DataObject) -> None:
    rooms = [Capacity(f"node {i}", capacity) for i, capacity in enumerate(capacities)]
    workers = data.draw(st.integers(0, sum(capacities)))
    places = dict(spread(workers, rooms))
    assert sum(places.values()) == workers and all(places.values())
    for room in rooms:
        exact = workers * room.workers / sum(capacities)
        assert abs(places.get(room.machine, 0) - exact) < 1 and places.get(room.machine, 0) <= room.workers
    with pytest.raises(ValueError, match="do not fit where there is room for"):
        spread(sum(capacities) + 1, rooms)


def test_what_a_worker_takes() -> None:
    needs = Needs.read({"num_cpus": 2, "num_gpus": 0.5, "resources": {"license": 1}, "runtime_env": {"pip": []}})
    assert needs.each == {"CPU": 2.0, "GPU": 0.5, "license": 1}
    assert needs.threads == 2 and Needs.read(None).threads == 1
    options = {"num_cpus": 6.0, "num_gpus": 1.5, "resources": {"license": 3}, "runtime_env": {"pip": []}}
    assert needs.options(3) == options
    assert fitting({"CPU": 16.0, "GPU": 2.0, "license": 3.0}, needs.each) == 3
    assert fitting({"CPU": 16.0}, needs.each) == 0
    assert fitting({"CPU": 0.3}, {"CPU": 0.1}) == 3


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"backend 'ray' needs Ray: pip install 'batchopt\[ray\]'"):
        BatchOptimizer(nn.Linear(1, 1), nn.MSELoss(), backend="ray", parallelize=2)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9"])
def test_an_address_where_nobody_listens_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConnectionError, match=rf"no Ray cluster answers at {address}"):
        BatchOptimizer(nn.Linear(1, 1), nn.MSELoss(), backend="ray", parallelize=2)


def test_a_cluster_without_tokens_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_warned", False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    cluster._warn_without_token()
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.warns(UserWarning, match="anyone who reaches its ports can run code on it"):
        cluster._warn_without_token()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster._warn_without_token()


def test_sixteen_workers_on_machines_of_8_16_and_4_cores() -> None:
    assert spread(16, [Capacity("a", 8), Capacity("b", 16), Capacity("c", 4)]) == [("a", 5), ("b", 9), ("c", 2)]
