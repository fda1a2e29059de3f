"""Products of the Hessian with vectors are those of plain torch, for any number of workers, and disturb nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from batchopt import BatchOptimizer, NonFiniteError, Sample, Worker, WorkerError
from tests.building import loaded, on
from tests.workloads import Workload, burgers, cnn, logistic, mlp, rnn

WAYS = pytest.mark.parametrize(
    "options",
    [{"parallelize": 1}, {"chunk_size": 5}, {"parallelize": 2, "chunk_size": 5}],
    ids=str,
)
EACH = pytest.mark.parametrize("parallelize", [1, 2])
ON_DEVICES = [{"devices": ["cpu:0", "cpu:0"], "chunk_size": size} for size in (None, 4)]


def direction(module: nn.Module, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = sum(parameter.numel() for parameter in module.parameters())
    return torch.randn(size, dtype=torch.float64, generator=generator)


def expected(module: nn.Module, f: Callable[[Callable[..., torch.Tensor]], torch.Tensor], v: torch.Tensor) -> Any:
    """By plain torch: `f` gets what to call in place of the module."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    parts = [
        part.view_as(p) for part, p in zip(torch.split(v, [p.numel() for p in parameters]), parameters, strict=True)
    ]

    def of(*values: torch.Tensor) -> torch.Tensor:
        return f(lambda *inputs: functional_call(module, dict(zip(names, values, strict=True)), inputs))

    _, found = torch.autograd.functional.hvp(of, parameters, tuple(parts))  # type: ignore[no-untyped-call]
    return torch.cat([part.reshape(-1) for part in found])


def of_workload(work: Workload, v: torch.Tensor) -> torch.Tensor:
    def f(module: Callable[..., torch.Tensor]) -> torch.Tensor:
        if isinstance(work.inputs, list):
            pairs = zip(work.inputs, work.targets, strict=True)
            return torch.stack([work.criterion(module(x), y) for x, y in pairs]).mean()
        output = module(work.inputs)
        return work.criterion(output) if work.targets is None else work.criterion(output, work.targets)

    product: torch.Tensor = expected(work.module, f, v)
    return product


def close(found: torch.Tensor, right: torch.Tensor) -> None:
    assert ((found - right).norm() / right.norm()).item() <= 1e-10


def wide() -> Workload:
    """Larger than what is collected during the backward."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 8000), nn.Tanh(), nn.Linear(8000, 1)).double()
    return Workload(module, nn.MSELoss(), torch.randn(12, 40).double(), torch.randn(12, 1).double())


@pytest.mark.sampled
@WAYS
@pytest.mark.parametrize("case", [mlp, burgers, logistic, cnn, rnn], ids=lambda case: case.__name__)
def test_products_are_those_of_plain_torch(case: Callable[[], Workload], options: dict[str, Any]) -> None:
    check_products(case(), options)


@pytest.mark.parametrize(
    "case, options", [(wide, {"parallelize": 2, "chunk_size": 3}), *((burgers, devices) for devices in ON_DEVICES)]
)
def test_products_of_a_large_model_and_on_devices(case: Callable[[], Workload], options: dict[str, Any]) -> None:
    check_products(case(), options)


def check_products(work: Workload, options: dict[str, Any]) -> None:
    v = direction(work.module)
    with on(work, **options) as opt:
        for count, scale in enumerate((1.0, 2.0), 1):
            opt.parameters.mul_(scale)
            with opt.timeline() as timeline:
                close(opt.hvp(scale * v), of_workload(work, scale * v))
            assert timeline.seconds("product") > 0 and "product" in str(timeline)
            assert (opt.product_counter, opt.eval_counter) == (count, 0)


def test_the_bits_are_those_of_one_worker_where_chunks_are_fixed() -> None:
    found = set()
    for options in ({}, {"parallelize": 2}, {"parallelize": 3}, {"devices": ["cpu:0", "cpu:0"]}):
        work = mlp(torch.float32)
        with on(work, chunk_size=4, **options) as opt:
            v = direction(work.module)
            found.add(opt.hvp(v).numpy().tobytes())
            # wherever the numbers lie
            padded = torch.cat([torch.zeros(1), v.float()])
            found.add(opt.hvp(padded[1:]).numpy().tobytes())
            found.add(opt.hvp(v.repeat_interleave(2)[::2]).numpy().tobytes())
    assert len(found) == 1


def test_products_go_on_with_more_and_fewer_workers() -> None:
    work = mlp()
    v = direction(work.module)
    with on(work, parallelize=2, chunk_size=4) as opt:
        bits = opt.hvp(v)
        for workers in (3, 1, 2):
            opt.resize(workers)
            opt.load(work.inputs, work.targets)
            assert torch.equal(opt.hvp(v), bits)


@EACH
def test_evaluations_are_untouched(parallelize: int) -> None:
    work = mlp()
    results: list[Any] = []

    def posthook(worker: Worker, sample: Sample) -> float:
        results.append(None)
        assert sample.loss is not None
        return sample.loss

    with on(work, parallelize=parallelize, chunk_size=5, posthook=posthook) as opt:
        loss = opt.evaluate()
        gradient, grads = opt.grad_parameters.clone(), [p.grad for p in work.module.parameters()]
        before = opt.output, opt.hook_results, opt.fingerprint(), [w.speed for w in opt.workers]
        calls = len(results)
        opt.hvp(direction(work.module))
        assert torch.equal(opt.grad_parameters, gradient)
        assert all(p.grad is g for p, g in zip(work.module.parameters(), grads, strict=True))
        assert (opt.output, opt.hook_results, opt.fingerprint(), [w.speed for w in opt.workers]) == before
        assert len(results) == calls
        assert opt.evaluate() == loss
        assert torch.equal(opt.grad_parameters, gradient)


@EACH
def test_a_product_sees_the_draws_and_leaves_the_buffers_of_its_step(parallelize: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 1)).double()
    x, y = torch.randn(24, 3).double(), torch.randn(24, 1).double()
    v = direction(module)
    h = 1e-5
    with (
        pytest.warns(UserWarning, match="BatchNorm1d"),
        BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=parallelize, chunk_size=8) as opt,
    ):
        opt.load(x, y)
        statistics = [buffer.clone() for buffer in module.buffers()]
        product = opt.hvp(v)
        assert all(map(torch.equal, module.buffers(), statistics))
        kept, gradients = opt.parameters.clone(), []
        for sign in (1, -1):
            opt.parameters.copy_(kept + sign * h * v)
            opt.evaluate()
            gradients.append(opt.grad_parameters.clone())
        opt.parameters.copy_(kept)
    slope = (gradients[0] - gradients[1]) / (2 * h)
    assert ((product - slope).norm() / slope.norm()).item() < 1e-6


class Partly(nn.Module):
    """Linear in `linear`, a square of `square`; nothing depends on `unused`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.square = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (x @ self.linear).mean() + (x @ self.square).square().mean()
        return loss


@WAYS
def test_what_f_is_linear_in_or_does_not_depend_on_is_zero(options: dict[str, Any]) -> None:
    x = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with loaded(Partly(), None, x, **options) as opt:
        product = opt.hvp(torch.ones(7))
        assert product[:5].tolist() == [0.0] * 5
        close(product[5:], 2 * x.T @ x @ torch.ones(2, dtype=torch.float64) / 12)
    with loaded(nn.Linear(2, 1), None, torch.ones(12, 2), loss_fn=lambda m, x, y: m(x).mean(), **options) as opt:
        assert opt.hvp(torch.ones(3)).tolist() == [0.0] * 3


@EACH
def test_frozen_parameters_are_left_out(parallelize: int) -> None:
    work = mlp()
    v = direction(work.module)
    with on(work, parallelize=parallelize) as opt:
        bias = work.module.get_parameter("first.bias")
        bias.requires_grad_(False)
        opt.load(work.inputs, work.targets)
        product = opt.hvp(v)
        assert product[54:63].tolist() == [0.0] * 9 and product.count_nonzero() == len(v) - 9


def squared_once() -> Callable[[torch.Tensor], torch.Tensor]:
    """A square whose backward cannot be differentiated; of a class that is sent by value, as one of a script is."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            result: torch.Tensor = 2 * x * grad
            return result

    return Once.apply


@pytest.mark.skipif(torch.__version__ < "2.7", reason="functions of a script cannot be pickled there")
@EACH
def test_a_module_without_a_second_derivative_is_an_error_with_torchs_words(parallelize: int) -> None:
    work, squared = mlp(), squared_once()
    once = Workload(work.module, lambda o, y: squared(o - y).square().mean(), work.inputs, work.targets)
    with on(once, parallelize=parallelize, chunk_size=10) as opt:
        loss = opt.evaluate()
        with pytest.raises(WorkerError, match="once_differentiable"):
            opt.hvp(direction(work.module))
        assert opt.evaluate() == loss
        assert opt.product_counter == 0


@EACH
def test_a_product_that_is_not_finite_names_its_sample(parallelize: int) -> None:
    """The second derivative of |x|^1.5 at 0, where loss and gradient are finite."""
    x = torch.ones(12, 1, dtype=torch.float64)
    x[7] = 0.0

    def loss_fn(module: nn.Module, x: torch.Tensor, _: None) -> torch.Tensor:
        loss: torch.Tensor = (module(x) + 1e-320).abs().pow(1.5).mean()
        return loss

    module = nn.Linear(1, 1, dtype=torch.float64)
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)
    options: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": None, "parallelize": parallelize, "chunk_size": 3}
    with BatchOptimizer(module, **options) as opt:
        opt.load(x)
        assert math.isfinite(opt.evaluate().item())
        huge = torch.full((2,), 1e300, dtype=torch.float64)
        with pytest.raises(NonFiniteError, match=r"Hessian-vector product is not finite in chunk 2 \(sample 7\)"):
            opt.hvp(huge)
        assert opt.product_counter == 0
        assert torch.isfinite(opt.hvp(torch.ones(2) * 1e-3)).all()
    with BatchOptimizer(module, **options, on_nonfinite="return") as opt:
        opt.load(x)
        assert not torch.isfinite(opt.hvp(huge)).all()


@pytest.mark.parametrize(
    "v",
    [
        torch.tensor([1.0] * 50 + [math.nan] * 53),
        torch.full((103,), math.inf),
        torch.full((103,), 1e300, dtype=torch.float64),
    ],
    ids=["NaN", "infinity", "too much for X"],
)
def test_the_product_with_what_is_not_finite_is_nan(v: torch.Tensor) -> None:
    """Solvers try such vectors, and recover."""
    with on(mlp(torch.float32)) as opt:
        product = opt.hvp(v)
        assert product.isnan().all() and product.dtype == torch.float32 and opt.product_counter == 0
        flat = opt.objective()
        assert np.isnan(flat.hvp(flat.x0, v.double().numpy())).all()
        assert torch.isfinite(opt.hvp(torch.ones(103))).all()
