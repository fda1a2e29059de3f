"""Whole jobs end at their goal, each way, and methods over the primitives lower f."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from benchmarks import jobs
from benchmarks.job_tasks import Task


def started(name: str) -> Task:
    """The task of a job, if its libraries are there."""
    for module in jobs.JOBS[name].needs:
        pytest.importorskip(module)
    return jobs.JOBS[name].make()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", jobs.JOBS)
def test_every_way_is_at_the_same_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each says of how far it has come is f at the module's parameters."""
    before = torch.get_default_dtype()
    try:
        for way, steps in jobs.JOBS[name].ways.items():
            if "SciPy" in way or "scipy" in repr(steps):  # they come back at the goal alone
                continue
            task = started(name)
            whole = task.inputs if task.whole is None else task.whole()
            first = task.loss(task.module, whole, task.targets).item()
            *_, judge = islice(steps(task), 3)
            with torch.enable_grad():
                f = task.loss(task.module, whole, task.targets).item()
            assert judge() == pytest.approx(f, rel=1e-4, abs=1e-12)
            assert f < first
    finally:
        torch.set_default_dtype(before)
