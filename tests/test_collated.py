"""Lists are collated once or twice a step, whoever evaluates them, and f stays what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from batchopt import BatchOptimizer, WorkerError
from tests.building import loaded

INPUTS = [torch.linspace(0, 1, 3 * n).view(n, 3) for n in (1, 2, 3, 4, 5, 6)]
TARGETS = [torch.tensor([float(n)]) for n in range(6)]


class Collate:
    """Concatenates, and writes down that it did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, pairs: list[Any]) -> Any:
        with open(self.folder / "collated", "a") as file:
            file.write(".")
        lengths = torch.tensor([len(x) for x, _ in pairs])
        return (torch.cat([x for x, _ in pairs]), lengths), torch.cat([y for _, y in pairs])

    @property
    def count(self) -> int:
        return len((self.folder / "collated").read_text())


class Pool(nn.Module):
    """The mean over each sample's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows, lengths = inputs
        index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        sums: torch.Tensor = torch.zeros(len(lengths), 1).index_add(0, index, self.linear(rows))
        return (sums / lengths[:, None])[:, 0]


@pytest.mark.rows
@pytest.mark.parametrize("parallelize, chunk_size", [(1, None), (1, 2), (2, None), (2, 1)])
def test_each_chunk_of_a_list_is_collated_no_more_than_twice_a_step_and_worker_but_for_audits(
    parallelize: int, chunk_size: int | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    collate, module = Collate(tmp_path), Pool()
    options: dict[str, Any] = {"parallelize": parallelize, "chunk_size": chunk_size, "speeds": [1.0] * parallelize}
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, collate_fn=collate, check_cut=False, **options) as opt:
        for _ in range(2):
            opt.load(INPUTS, TARGETS)
            for _ in range(10):
                expected = nn.functional.mse_loss(module((torch.cat(INPUTS), torch.arange(1, 7))), torch.cat(TARGETS))
                assert opt.evaluate().item() == pytest.approx(expected.item(), rel=1e-5)
                with torch.no_grad():
                    opt.parameters.add_(0.01)
            chunks = 6 // chunk_size if chunk_size else parallelize
    audits = 5 * 2 * parallelize  # of evaluations 1, 2, 4, 8 and 16
    assert collate.count <= 2 * 2 * chunks * parallelize + audits


@pytest.mark.rows
@pytest.mark.parametrize("options", [{}, {"chunk_size": 5}, {"parallelize": 2}])
@pytest.mark.parametrize("as_dataset", [False, True])
def test_samples_that_are_left_out_are_refused_unless_denominators_tell_what_counts(
    as_dataset: bool, options: dict[str, Any]
) -> None:
    x, y = torch.randn(20, 3).double(), torch.arange(20.0).double()[:, None]

    def collate(pairs: list[Any]) -> Any:
        inputs, targets = zip(*((a, b) for a, b in pairs if b % 5 != 1), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    data = (TensorDataset(x, y),) if as_dataset else (list(x), list(y))
    module = nn.Linear(3, 1).double()
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, collate_fn=collate, **options) as opt:
        with pytest.raises(WorkerError, match=r"`collate_fn` was given \d+ samples and made a tensor of \d+.*Subset"):
            opt.load(*data)
            opt.evaluate()
    if as_dataset:
        return

    def denominators(inputs: list[torch.Tensor], targets: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(targets) % 5 != 1

    options = {**options, "collate_fn": collate, "denominators": denominators}
    with loaded(module, nn.MSELoss(), *data, **options) as opt:
        kept = y[:, 0] % 5 != 1
        assert opt.evaluate().item() == pytest.approx(nn.MSELoss()(module(x[kept]), y[kept]).item(), rel=1e-9)
