"""What people did with MXNet's `Module` and `SVRGModule`; docs/ancestors.md has the rows."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchopt
from batchopt import Batches, BatchOptimizer
from batchopt.training import fit
from tests.workloads import mlp

each_number = pytest.mark.parametrize("parallelize", [1, 2])


@pytest.mark.rows
@each_number
def test_hidden_states_are_inputs_and_the_next_ones_are_collected(parallelize: int) -> None:
    """Sequences that are read in parts: each goes on with the state that it had at the end of the part before."""
    torch.manual_seed(0)
    sequence, targets = torch.randn(9, 6, 3).double(), torch.randn(9, 5).double()
    cell = nn.GRU(3, 5, batch_first=True).double()

    def loss(module: nn.Module, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
        part, state = inputs
        return nn.functional.mse_loss(module(part, state[None])[1][0], targets)

    with BatchOptimizer(cell, loss_fn=loss, optimizer=None, parallelize=parallelize) as opt:
        state = torch.zeros(9, 5).double()
        for part in torch.split(sequence, 2, dim=1):
            opt.load((part, state), targets)
            opt.evaluate()
            state = opt.collect(lambda module, inputs, targets: module(inputs[0], inputs[1][None])[1][0])
        torch.testing.assert_close(state, cell(sequence)[1][0].detach())
        assert opt.output == pytest.approx(nn.functional.mse_loss(cell(sequence)[1][0], targets).item(), rel=1e-12)


@pytest.mark.rows
@each_number
@pytest.mark.parametrize("sizes", [(7, 14, 7), (10, 3, 20, 20, 5)])
def test_a_step_is_as_long_after_a_batch_of_another_size(sizes: tuple[int, ...], parallelize: int) -> None:
    """The mean of the outputs has the slope 1 for the bias, whatever the number of samples."""
    net = nn.Linear(2, 1)
    nn.init.zeros_(net.bias)
    with BatchOptimizer(
        net, torch.mean, optimizer=lambda p: torch.optim.SGD([p[1]], lr=1.0), parallelize=parallelize
    ) as opt:
        found = []
        for _ in opt.steps((torch.zeros(size, 2),) for size in sizes):
            found.append(net.bias.item())
    assert found == pytest.approx([-1.0 - step for step in range(len(sizes))])


@pytest.mark.parametrize("name", ["fc1", "fullyconnected0_weight", "full_gradient", "data", "softmax_label"])
def test_the_names_of_parameters_do_not_matter_to_svrg(name: str) -> None:
    case = mlp()

    def run(name: str) -> torch.Tensor:
        torch.manual_seed(0)
        net = nn.Sequential()
        net.add_module(name, nn.Linear(6, 4).double())
        svrg: Any = lambda p: batchopt.SVRG(torch.optim.SGD(p, lr=0.1), update_freq=1)  # noqa: E731
        with BatchOptimizer(net, case.criterion, optimizer=svrg, chunk_size=5) as opt:
            fit(opt, Batches((case.inputs, case.targets), 10), epochs=3)
            return opt.parameters.clone()

    assert torch.equal(run(name), run("layer"))


@each_number
def test_the_first_batches_of_a_loader_are_scored_and_predicted(parallelize: int) -> None:
    case = mlp()
    loader = DataLoader(TensorDataset(case.inputs, case.targets), 10)
    with BatchOptimizer(case.module, case.criterion, optimizer=None, parallelize=parallelize) as opt:
        first = opt.predict(islice(loader, 2))
        torch.testing.assert_close(first, case.module(case.inputs[:20]).detach())
        found = opt.score(islice(loader, 2), nn.functional.mse_loss)
        assert found == pytest.approx(nn.functional.mse_loss(first, case.targets[:20]).item(), rel=1e-12)


EMPTY: dict[str, Any] = {
    "no samples": lambda: (torch.zeros(0, 2), torch.zeros(0, 1)),
    "no list": list,
    "batches that are left out": lambda: Batches((torch.zeros(3, 2), torch.zeros(3, 1)), 10, drop_last=True),
    "a loader of none": lambda: DataLoader(
        TensorDataset(torch.zeros(3, 2), torch.zeros(3, 1)), batch_size=10, drop_last=True
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_epoch_without_batches_is_an_error_that_says_so(name: str) -> None:
    with BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), optimizer="sgd") as opt:
        with pytest.raises(ValueError, match=r"0 samples|leaves them out|empty"):
            fit(opt, EMPTY[name](), epochs=1)
