"""`loss()`: f with a graph, as a part of what is computed in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchoptError, BatchOptimizer
from tests.building import on
from tests.workloads import Workload, mlp


@pytest.fixture(params=[1, 2])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[BatchOptimizer, Workload]]:
    case = mlp()
    with on(case, parallelize=request.param) as opt:
        yield opt, case


def back(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def agrees(case: Workload, use: Callable[[], Any], of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What `use` leaves in `.grad`, and returns, is what plain torch says of this function of f."""
    case.module.zero_grad()
    value = of(case.criterion(case.module(case.inputs), case.targets))
    back(value)
    expected = gradients(case.module)
    case.module.zero_grad()
    found = use()
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found.detach(), value.detach(), rtol=1e-9, atol=0.0)
    for one, two in zip(gradients(case.module), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_backward_hands_the_gradient_to_autograd(made: tuple[BatchOptimizer, Workload]) -> None:
    opt, case = made

    def use() -> torch.Tensor:
        loss = opt.loss()
        assert loss.shape == () and loss.dtype == torch.float64 and loss.requires_grad and opt.eval_counter == 1
        assert all(p.grad is None for p in case.module.parameters())
        back(loss)
        assert opt.eval_counter == 1
        return loss

    agrees(case, use, lambda loss: loss)


def test_it_is_a_part_of_what_is_computed_here(made: tuple[BatchOptimizer, Workload]) -> None:
    opt, case = made

    def penalised(loss: torch.Tensor) -> torch.Tensor:
        return (3.0 * loss).exp() + 0.1 * sum((p.square().sum() for p in case.module.parameters()), torch.tensor(0.0))

    def use() -> torch.Tensor:
        total = penalised(opt.loss())
        back(total)
        return total

    agrees(case, use, penalised)


def test_gradients_add_up_whoever_made_them(made: tuple[BatchOptimizer, Workload]) -> None:
    """Two losses, and what `evaluate` had left in `.grad`."""
    opt, case = made

    def use() -> None:
        opt.evaluate()
        back(opt.loss() + opt.loss())

    agrees(case, use, lambda loss: 3.0 * loss)


def test_its_gradient_is_of_where_it_was_evaluated(made: tuple[BatchOptimizer, Workload]) -> None:
    opt, case = made

    def use() -> None:
        loss = opt.loss()
        opt.parameters.mul_(1.5)
        opt.evaluate()
        opt.module.zero_grad()
        back(loss)

    agrees(case, use, lambda loss: loss)


def test_a_graph_that_is_retained_is_differentiated_again(made: tuple[BatchOptimizer, Workload]) -> None:
    opt, case = made

    def use() -> None:
        loss = opt.loss()
        for _ in range(3):
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        back(loss)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            back(loss)

    agrees(case, use, lambda loss: 4.0 * loss)


@pytest.mark.rows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("parallelize", [1, 2])
def test_its_gradient_has_the_bits_of_evaluate(dtype: torch.dtype, parallelize: int) -> None:
    case = mlp(dtype)
    with BatchOptimizer(
        case.module, case.criterion, optimizer=None, parallelize=parallelize, chunk_size=5
    ) as opt:  # else the chunks follow the speeds of the workers
        opt.load(case.inputs, case.targets)
        opt.evaluate()
        wanted = opt.grad_parameters.clone()
        case.module.zero_grad()
        back(opt.loss())
        found = [p.grad for p in case.module.parameters() if p.grad is not None]
        assert torch.equal(torch.cat([part.flatten() for part in found]), wanted)


@pytest.mark.slow
def test_gradients_that_somebody_keeps_are_not_overwritten(made: tuple[BatchOptimizer, Workload]) -> None:
    """As by plain torch, whose every backward makes new ones."""
    opt, case = made
    kept, copies = [], []
    for evaluate in (lambda: back(opt.loss()), opt.evaluate, lambda: back(opt.loss())) * 2:
        case.module.zero_grad()
        back(opt.loss())
        kept.append([p.grad for p in case.module.parameters()])
        copies.append(gradients(case.module))
        case.module.zero_grad()
        opt.parameters.mul_(1.1)
        evaluate()
    for some, copied in zip(kept, copies, strict=True):
        for one, two in zip(some, copied, strict=True):
            assert one is not None and two is not None and torch.equal(one, two)


def test_what_has_no_derivative_and_what_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 1))
    with BatchOptimizer(module, loss_fn=lambda m, x, _: m[0](x).square().mean(), optimizer=None) as opt:  # type: ignore[index]
        with pytest.raises(BatchoptError, match="no batch was loaded"):
            opt.loss()
        opt.load(torch.ones(4, 2))
        back(opt.loss())
        assert [p.grad is not None for p in module.parameters()] == [True, True, False, False]
        with pytest.raises(BatchoptError, match=r"create_graph=True.* use hvp\(v\)"):
            torch.autograd.grad(opt.loss(), [*module[0].parameters()], create_graph=True)
