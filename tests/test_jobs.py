"""The benchmark of whole jobs compares ways to minimise the same function."""

from __future__ import annotations

import pytest
import torch

from benchmarks import jobs
from benchmarks.job_tasks import Task
from benchmarks.job_ways import Come, Goal


def started(name: str) -> Task:
    """The task of a job, if its libraries are there."""
    for module in jobs.JOBS[name].needs:
        pytest.importorskip(module)
    return jobs.JOBS[name].make()


def at(task: Task) -> float:
    """f at the module's parameters."""
    with torch.enable_grad():
        return task.loss(task.module, task.inputs if task.whole is None else task.whole(), task.targets).item()


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # other libraries warn when they are imported
@pytest.mark.parametrize("name", jobs.JOBS)
def test_every_way_minimises_the_same_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else a library that shows progress leaves a thread
    before = torch.get_default_dtype()
    try:
        first = at(started(name))
        for called, way in jobs.JOBS[name].ways.items():
            task, goal, come = started(name), Goal(0.95 * first, 60.0), Come()
            goal.begin()
            for judge in way(task, goal):
                come = judge()
                if goal.is_over(come.f):
                    break
            if called != "DeepXDE":  # its network is another one, and so are its points
                assert come.f == pytest.approx(at(task), rel=1e-4, abs=1e-12)
            assert come.f <= goal.f
    finally:
        torch.set_default_dtype(before)


def test_a_run_is_over_at_its_goal_or_when_time_is_up() -> None:
    goal = Goal(1.0, 0.0)
    assert goal.is_over(1.0) and not goal.is_over(1.1)
    goal.begin()
    assert goal.is_over(1.1)
