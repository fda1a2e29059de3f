"""What people did with `FeedForward` of MXNet.jl; docs/coming-from.md has the rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from batchopt import Batches, BatchOptimizer
from batchopt.ignite import Moment, fit
from tests.ignite.common import batches, data, optimizer

SCHEDULES: dict[str, Callable[[int], float]] = {
    "fixed": lambda time: 1.0,
    "exponential": lambda time: 0.9**time,
    "inverse": lambda time: 1 / (1 + 0.9 * time) ** 0.5,
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("by", ["epoch", "batch"])
def test_rates_that_fall_by_epoch_or_by_batch(name: str, by: str) -> None:
    found: list[float] = []

    def note(moment: Moment) -> None:
        assert moment.opt.optimizer is not None
        found.append(moment.opt.optimizer.param_groups[0]["lr"])

    with optimizer(optimizer=lambda p: torch.optim.SGD(p, lr=0.01)) as opt:
        assert opt.optimizer is not None
        schedule = LambdaLR(opt.optimizer, SCHEDULES[name])
        fit(opt, batches(), epochs=2, scheduler=schedule, scheduler_step=by, on_epoch=note)
    assert found == pytest.approx([0.01 * SCHEDULES[name](time) for time in ((1, 2) if by == "epoch" else (5, 10))])


def test_callbacks_every_so_often_see_where_the_training_is_and_its_parameters() -> None:
    found: list[tuple[str, int, int, int]] = []
    values: list[torch.Tensor] = []

    def every_second_batch(moment: Moment) -> None:
        if moment.batch % 2 == 0:
            found.append(("batch", moment.epoch, moment.batch, moment.iteration))
            values.append(moment.opt.module.state_dict()["0.weight"].clone())

    def every_second_epoch(moment: Moment) -> None:
        if moment.epoch % 2 == 0:
            found.append(("epoch", moment.epoch, moment.batch, moment.iteration))

    with optimizer() as opt:
        fit(opt, batches(), epochs=2, epoch_0=True, on_batch=every_second_batch, on_epoch=every_second_epoch)
    assert found == [
        ("epoch", 0, 0, 0),
        ("batch", 1, 2, 2),
        ("batch", 1, 4, 4),
        ("batch", 2, 2, 7),
        ("batch", 2, 4, 9),
        ("epoch", 2, 0, 10),
    ]
    assert not any(torch.equal(one, two) for one, two in pairwise(values))


@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.filterwarnings("ignore:.*BatchNorm1d:UserWarning")
def test_validation_of_any_batch_size_leaves_statistics_and_draws(parallelize: int) -> None:
    def run(**options: Any) -> tuple[str, list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
        found: list[float] = []
        with BatchOptimizer(net, nn.MSELoss(), optimizer="adam", parallelize=parallelize, chunk_size=5) as opt:
            fit(opt, batches(), epochs=2, on_epoch=lambda m: found.append(m.numbers.get("eval_l", 0.0)), **options)
            net.eval()
            x, y = data()
            assert not options or found[-1] == pytest.approx(nn.functional.mse_loss(net(x), y).item(), rel=1e-12)
            return opt.fingerprint(), [buffer.clone() for buffer in net.buffers()], found

    plain = run()
    for size in (50, 7):
        fingerprint, buffers, _ = run(eval_data=Batches(data(), size), metrics={"l": nn.functional.mse_loss})
        assert fingerprint == plain[0]
        assert all(torch.equal(one, two) for one, two in zip(buffers, plain[1], strict=True))


def test_no_sample_is_made_up_for_the_last_batch() -> None:
    x, y = data()
    seen: list[torch.Tensor] = []
    with optimizer() as opt:
        for outputs, (inputs, _) in opt.iter_predict(Batches((x, y), 20)):
            assert len(outputs) == len(inputs)
            seen.append(outputs)
        assert [len(rows) for rows in seen] == [20, 20, 10]
        torch.testing.assert_close(torch.cat(seen), opt.predict(x))
        fit(opt, Batches((x, y), 20), epochs=1)
        assert opt.sample_counter == 50
