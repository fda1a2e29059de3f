"""Gradients of every kind, and of models so large that they are collected while the backward makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from batchopt import BatchOptimizer, WorkerError
from tests.building import loaded

SIZE = 12
X = torch.linspace(-1, 2, SIZE * 3, dtype=torch.float64).sin().view(SIZE, 3)
Y = torch.linspace(0, 3, SIZE * 2, dtype=torch.float64).cos().view(SIZE, 2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def stacked(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.stack(column) for column in zip(*pairs, strict=True))


@pytest.mark.slow
@given(
    st.integers(1, 200),
    st.sampled_from(["mean", "sum", "classes", "collated"]),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None, max_examples=20, derandomize=True)
@example(49, "mean", torch.float32)
@example(49, "collated", torch.float64)
@example(107, "classes", torch.float64)
@example(161, "classes", torch.float64)
def test_one_chunk_gives_the_bits_of_one_process(size: int, kind: str, dtype: torch.dtype) -> None:
    x, module = torch.linspace(-1, 2, size * 3, dtype=dtype).sin().view(size, 3), network().to(dtype)
    y = torch.linspace(0, 3, size * 2, dtype=dtype).cos().view(size, 2)
    criterion: Any = nn.MSELoss(reduction="sum" if kind == "sum" else "mean")
    if kind == "classes":
        y = torch.tensor([(0, 1, -100, 1)[index % 4] for index in range(size)])
        criterion = nn.CrossEntropyLoss(torch.tensor([0.3, 2.1], dtype=dtype))
    batch: tuple[Any, Any] = ([*x], [*y]) if kind == "collated" else (x, y)
    options = {"collate_fn": stacked} if kind == "collated" else {}
    loss = criterion(module(x), y)
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, [*module.parameters()])])
    with loaded(module, criterion, *batch, threads_per_worker=torch.get_num_threads(), **options) as opt:
        assert opt.evaluate().item() == loss.item() and torch.equal(opt.grad_parameters, gradient)


@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_sparse_gradient_is_summed_like_a_dense_one(parallelize: int) -> None:
    gradients = []
    for sparse in (False, True):
        module = nn.Embedding(4, 2, sparse=sparse, dtype=torch.float64)
        with torch.no_grad():
            module.weight.copy_(torch.arange(8.0).view(4, 2))
        loss: Any = lambda m, x, _: m(x).pow(2).sum()  # noqa: E731
        options: dict[str, Any] = {"loss_fn": loss, "reduction": "sum", "chunk_size": 2, "parallelize": parallelize}
        with loaded(module, None, torch.tensor([0, 2, 2]), **options) as opt:
            opt.evaluate()
            gradients.append(opt.grad_parameters.clone())
    assert gradients[0].tolist() == [0, 2, 0, 0, 16, 20, 0, 0]
    assert torch.equal(gradients[0], gradients[1])


def twice(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(module(inputs) + module(2 * inputs), targets)


def inner(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    module(inputs).sum().backward()  # stays in .grad
    return nn.functional.mse_loss(module(inputs), targets)


def hooked(module: nn.Module) -> bool:
    """Whether a gradient that has been made is told to anybody."""
    return any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in module.parameters())


def built(large: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> BatchOptimizer:
    """Any module counts as large, or none."""
    monkeypatch.setattr("batchopt_workers.evaluate.sums.LARGE", 0 if large else 10**9)
    return loaded(network(), options.pop("criterion", None), X, Y, **{"chunk_size": 5, "check_cut": False, **options})


@pytest.mark.parametrize("loss_fn", [None, twice, inner])
def test_collected_in_the_backward_or_after_it_they_are_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, loss_fn: Any
) -> None:
    """A parameter that is used twice counts in full, and a backward of the loss function itself as in plain torch."""
    found = []
    criterion = nn.MSELoss() if loss_fn is None else None
    for large in (False, True):
        with built(large, monkeypatch, criterion=criterion, loss_fn=loss_fn) as opt:
            opt.evaluate()
            found.append(opt.grad_parameters.clone())
            assert not hooked(opt.module)
    assert torch.equal(*found)


def test_a_backward_that_raises_leaves_no_hook_and_hooks_see_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fails(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = module(x)
        if seen:
            outputs.register_hook(lambda gradient: 1 / 0)  # type: ignore[no-untyped-call]
        return outputs.sum()

    def look(worker: Any, sample: Any) -> None:
        seen.append([parameter.grad is not None for parameter in worker.module.parameters()])

    with built(True, monkeypatch, loss_fn=fails, reduction="sum", posthook=look, chunk_size=SIZE) as opt:
        opt.evaluate()
        assert seen == [[True] * 4]
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            opt.evaluate()
        assert not hooked(opt.module)


def test_a_large_model_keeps_no_second_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the backward goes on, what was collected is gone."""
    kept: list[Any] = []

    def loss_fn(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = module[:2](x)
        hidden.register_hook(lambda gradient: kept.append([p.grad is None for p in module[2].parameters()]))
        return nn.functional.mse_loss(module[2](hidden), y)

    with built(True, monkeypatch, loss_fn=loss_fn, chunk_size=SIZE) as opt:
        opt.evaluate()
    assert kept == [[True, True]]
