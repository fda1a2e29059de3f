"""What people did with `FeedForward` of MXNet.jl; docs/ancestors.md has the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchopt import Batches, BatchOptimizer
from batchopt.training import fit
from tests.training.common import batches, data, optimizer


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
