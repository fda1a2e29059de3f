"""The record of who did what when."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer
from batchopt.extending import Answer, Evaluated
from batchopt.extras.timeline import PARENT, Timeline

X, Y = torch.randn(40, 3), torch.randn(40, 1)


def span(began: float, seconds: float, first: int, last: int) -> Any:
    """Chunks that a worker says to have evaluated, and how long that took."""
    return SimpleNamespace(began=began, seconds=seconds, first=first, last=last)


def made() -> Timeline:
    """Two evaluations of ten samples in five chunks: the first worker has four, the second six."""
    timeline = Timeline()
    for start in (100.0, 110.0):
        answers = [
            Answer(0, 4, 2.0, [], spans=[span(start + 0.5, 2.0, 0, 2)]),
            Answer(1, 6, 3.5, [], spans=[span(start + 0.5, 1.5, 2, 3), span(start + 2.0, 2.0, 3, 5)]),
        ]
        bounds = [0, 2, 4, 6, 8, 10]
        timeline.evaluated(Evaluated(1, 1, 0.5, {}, answers, bounds, start, start + 4, start + 5))
    return timeline


def test_numbers() -> None:
    timeline = made()
    assert timeline.lanes == [PARENT, 0, 1]
    assert timeline.split == pytest.approx({0: 0.4, 1: 0.6})
    assert timeline.utilisation == pytest.approx({0: 0.4, 1: 0.7})
    assert (timeline.seconds("map"), timeline.seconds("chunks", 1)) == (8.0, 7.0)
    assert "2 evaluations" in str(timeline) and "40.0% of the samples, busy  40.0%" in str(timeline)


def test_the_trace_is_one_that_viewers_read(tmp_path: Path) -> None:
    made().save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "parent", 1: "worker 0", 2: "worker 1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 10 and min(event["ts"] for event in spans) == 0.0
    last = max(spans, key=lambda event: event["ts"])
    assert (last["name"], last["ts"], last["dur"], last["tid"]) == ("reduce", 14e6, 1e6, 0)


def test_the_picture(tmp_path: Path) -> None:
    figure = made().draw(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["worker 1\n60% of samples, busy 70%", "worker 0\n40% of samples, busy 40%", "parent"]
    Timeline().draw()  # of nothing


@pytest.mark.parametrize("parallelize", [1, 2])
def test_what_happens_is_recorded_inside_only(parallelize: int) -> None:
    with BatchOptimizer(nn.Linear(3, 1), nn.MSELoss(), optimizer="sgd", parallelize=parallelize, chunk_size=5) as opt:
        opt.step(X, Y)
        with opt.timeline() as timeline:
            opt.step(X, Y)
            opt.step(X, Y)
        opt.step(X, Y)
    assert sum(event.name == "map" for event in timeline.events) == 2
    assert sum(event.details.get("samples", 0) for event in timeline.events) == 2 * 40
    assert set(timeline.split) <= set(range(parallelize))
    assert {"map", "reduce", "load", "step"} <= {event.name for event in timeline.events if event.lane == PARENT}
    assert all(0 < busy <= 1 for busy in timeline.utilisation.values())
    starts = [event.began for event in timeline.events if event.name == "chunks"]
    maps = [event for event in timeline.events if event.name == "map"]
    assert all(any(m.began <= start <= m.began + m.seconds for m in maps) for start in starts)  # one clock for all
