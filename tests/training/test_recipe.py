"""pytorch-ignite as it is, around `opt.step`: the recipe of docs/training.md."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from batchopt.training import fit
from tests.test_docs import ROOT, blocks
from tests.training.common import batches, optimizer


@pytest.fixture(scope="module")
def ignite() -> Any:
    """The library, whose import warns of torch's names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pytest.importorskip("ignite")


def test_an_engine_makes_the_steps_of_a_loop_and_its_metrics_see_them(ignite: Any) -> None:
    with optimizer() as opt:
        epochs, losses = batches(), []
        while epochs.epoch < 2:
            losses += [*opt.steps(epochs)]
        expected = opt.fingerprint()
    found: list[float] = []
    with optimizer() as opt:
        trainer = ignite.engine.Engine(lambda engine, batch: opt.step(*batch))
        ignite.metrics.RunningAverage(alpha=0.7, output_transform=lambda loss: loss).attach(trainer, "average")
        completed = ignite.engine.Events.ITERATION_COMPLETED
        trainer.add_event_handler(completed, lambda: found.append(trainer.state.metrics["average"]))
        trainer.run(batches(), max_epochs=2)
        assert opt.fingerprint() == expected
    average = math.nan
    for loss, shown in zip(losses, found, strict=True):
        average = loss if math.isnan(average) else 0.7 * average + 0.3 * loss
        assert shown == pytest.approx(average)


def test_a_schedule_of_its_own_is_called_by_a_callback(ignite: Any) -> None:
    found: list[float] = []
    with optimizer() as opt:
        assert opt.optimizer is not None
        (group,) = opt.optimizer.param_groups
        schedule = ignite.handlers.PiecewiseLinear(opt.optimizer, "lr", [(0, 1.0), (4, 0.0)])
        schedule(None)
        fit(opt, batches(), epochs=1, on_batch=[lambda _: found.append(group["lr"]), lambda _: schedule(None)])
    assert found == [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.slow
def test_the_recipe_of_the_page_ends_with_the_bits_of_fit(
    ignite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, *others = blocks(ROOT / "docs" / "training.md")
    recipe = next(block for block in others if "from ignite" in block)
    exec(compile(first + recipe, "training.md", "exec"), {"__name__": "program"})
    assert len([*(tmp_path / "saved").iterdir()]) == 2
