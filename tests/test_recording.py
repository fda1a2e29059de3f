"""The memory that graphs of a device share; `tests/card` has what is recorded."""

from __future__ import annotations

import gc
from itertools import count

import pytest
import torch

from batchopt_workers.graphs.recording import GraphMemory


class Graph:
    """A user of a pool."""


def test_graphs_of_a_device_share_a_pool_as_long_as_one_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(GraphMemory, "_of", {})
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    assert [GraphMemory.of(here).handle, GraphMemory.of(here).handle] == [0, 1]  # nobody used the first one
    one, other = Graph(), Graph()
    GraphMemory.of(here).users.add(one)
    handle = GraphMemory.of(here).handle
    GraphMemory.of(here).users.add(other)
    del one
    gc.collect()
    assert GraphMemory.of(here).handle == handle != GraphMemory.of(there).handle
    del other
    gc.collect()
    assert GraphMemory.of(here).handle != handle
