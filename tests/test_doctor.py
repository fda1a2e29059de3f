"""The doctor finds what is planted, names it, and is silent on the healthy."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Sample, Worker
from batchopt.extras.doctor import Culprit
from tests.workloads import WORKLOADS, Mlp, Workload, cnn, mlp


class Environment(Mlp):
    """Depends on what another process may not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(os.environ.get("BATCHOPT_TEST_SCALE", "1"))


class Counting(Mlp):
    """Keeps a number from one evaluation to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Detached(Mlp):
    """A part of the gradient is lost."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) + self.first(x)[:, :4].detach()
        return y


class Frozen(Mlp):
    """The gradient of one parameter is lost as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) * self.rate.detach()
        return y


def clip(worker: Worker, sample: Sample) -> None:
    """Clip the gradient in the worker."""
    assert worker.module is not None
    nn.utils.clip_grad_norm_(worker.module.parameters(), 1e-3)


class Noisy(Mlp):
    """Noise that no seed reaches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + int.from_bytes(os.urandom(2), "little") * 1e-9)


class Remembers(nn.MSELoss):
    """A criterion that keeps a number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(output, target) * (1 + 0.01 * self.calls)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))


def noised(of_all: float, of_each: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A sum of squares with draws of its own: one for all samples, and one for each number."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = output * (1 + of_all * torch.randn(())) + of_each * torch.randn_like(output)
        return (output - target).square().sum()

    return loss


def mean_of(sum_: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda output, target: sum_(output, target) / output.numel()


def root(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target).sqrt()


def nearly_a_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Weighs samples a little: as a mean of means it is off by a thousandth."""
    weights = 1 + 0.1 * target[:, 0].sign()
    loss: torch.Tensor = (weights * (output - target).square().mean(1)).sum() / weights.sum()
    return loss


PLANTED: dict[str, tuple[Any, Any, dict[str, Any], Culprit, str]] = {
    "randomness": (Noisy, nn.MSELoss(), {}, Culprit.RANDOMNESS, ""),
    "state": (Counting, nn.MSELoss(), {}, Culprit.STATE, "calls"),
    "state of the criterion": (Mlp, Remembers(), {}, Culprit.STATE, "criterion.calls"),
    "batch norm": (normed, nn.MSELoss(), {}, Culprit.BATCH_NORM, "1"),
    "clipping": (Mlp, nn.MSELoss(), {"posthook": clip}, Culprit.HOOK, ""),
    "sum": (Mlp, noised(0.0, 0.0), {}, Culprit.REDUCTION, ""),
    "sum with draws": (Mlp, noised(0.1, 0.0), {}, Culprit.REDUCTION, ""),
    "noise": (Mlp, mean_of(noised(0.0, 100.0)), {}, Culprit.UNDECIDED, ""),
    "root": (Mlp, root, {"chunk_size": 10, "check_cut": False}, Culprit.CUT, ""),
    "gradient": (Detached, nn.MSELoss(), {}, Culprit.GRADIENT, ""),
    "parameter": (Frozen, nn.MSELoss(), {}, Culprit.GRADIENT, ""),
}


@pytest.mark.rows
@pytest.mark.parametrize(("fault", "parallelize"), [*((fault, 1) for fault in PLANTED), ("state", 2), ("clipping", 2)])
def test_a_planted_fault_is_found_and_named(fault: str, parallelize: int) -> None:
    kind, criterion, options, culprit, detail = PLANTED[fault]
    case = mlp(torch.float32 if parallelize == 2 else torch.float64)
    module = kind().to(case.inputs.dtype)
    with BatchOptimizer(module, criterion, parallelize=parallelize, **options) as opt:
        found = opt.check(case.inputs, case.targets)
        assert (found.culprit, found.detail) == (culprit, detail), str(found)
        assert not found.healthy and "FAIL" in str(found) and culprit.value in str(found)


def test_what_draws_for_each_sample_is_no_fault() -> None:
    case = mlp(samples=64)
    with BatchOptimizer(Mlp().double(), mean_of(noised(0.0, 0.1))) as opt:
        found = opt.check(case.inputs, case.targets)
    assert found.healthy and "of a few samples: no difference" in str(found)


class Single(Mlp):
    """Computes in single precision inside; and loses a hundredth of the gradient, if it is told to."""

    def __init__(self, lost: float) -> None:
        super().__init__()
        self.lost = lost

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)).float()
        kept = hidden * (1 - self.lost) + self.lost * hidden.detach()
        y: torch.Tensor = self.second((kept / kept.square().mean(-1, keepdim=True).sqrt()).to(x.dtype))
        return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lost", [0.0, 0.1])
def test_a_gradient_is_found_wrong_as_far_as_the_precision_of_the_module_goes(lost: float, dtype: torch.dtype) -> None:
    case = mlp(dtype)
    with BatchOptimizer(Single(lost).to(dtype), case.criterion) as opt:
        found = opt.check(case.inputs, case.targets)
    assert found.culprit is (Culprit.GRADIENT if lost else Culprit.NONE), str(found)


@pytest.mark.parametrize("module", [Mlp, lambda: Single(0.0)], ids=["double", "single inside"])
def test_a_cut_that_is_off_by_a_thousandth_is_found(module: Any) -> None:
    case = mlp()
    with BatchOptimizer(module().double(), nearly_a_mean, parallelize=2, check_cut=False) as opt:
        found = opt.check(case.inputs, case.targets)
    assert found.culprit is Culprit.CUT, str(found)
    assert 1e-4 < float(found.checks[-1].numbers.split()[-1]) < 1e-2


def test_what_can_only_be_evaluated_whole_and_is_is_no_fault() -> None:
    case = mlp()
    with BatchOptimizer(Mlp().double(), root) as opt:
        found = opt.check(case.inputs, case.targets)
    assert found.healthy and "the batch in chunks is the batch: no, difference" in str(found)


def test_a_slope_that_is_lost_in_rounding_does_not_tell() -> None:
    x = torch.linspace(-1, 1, 20).double()[:, None]
    line = nn.Linear(1, 1).double()
    with BatchOptimizer(line, nn.MSELoss(), optimizer="lm") as opt:
        opt.step(x, x.square())
        assert "which does not tell, as at a minimum" in str(opt.check(x, x.square()))


def test_workers_that_lack_something_are_found() -> None:
    case = mlp()
    options: dict[str, Any] = {"parallelize": 2, "precode": lambda worker: os.environ.update(BATCHOPT_TEST_SCALE="2")}
    with BatchOptimizer(Environment().double(), case.criterion, **options) as opt:
        assert opt.check(case.inputs, case.targets).culprit is Culprit.PARALLEL


HEALTHY: dict[str, Callable[[], Workload]] = {
    **{name: functools.partial(make, torch.float64) for name, make in WORKLOADS.items()},
    "single": lambda: cnn(torch.float32),
    "relu": lambda: Workload(
        nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)),
        nn.L1Loss(),
        torch.randn(64, 4),
        torch.zeros(64, 1),
    ),
}


@pytest.mark.rows
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("rnn", "logistic", "burgers"))) for name in HEALTHY],
)
def test_the_doctor_is_silent_on_the_healthy(name: str) -> None:
    torch.manual_seed(0)
    case = HEALTHY[name]()
    with BatchOptimizer(case.module, case.criterion, parallelize=1 + (name == "single")) as opt:
        for _ in range(2):  # nearer to a minimum the slope is less of f
            found = opt.check(case.inputs, case.targets)
            assert found.healthy, str(found)
            assert str(found).count("ok") == 4 and "none found" in str(found)
            opt.step(case.inputs, case.targets)


@pytest.mark.parametrize("double", [True, False])
def test_it_stays_in_the_dtype_of_the_parameters_if_asked_to(double: bool) -> None:
    with BatchOptimizer(nn.Linear(6, 4), nn.MSELoss()) as opt:
        found = opt.check(torch.rand(40, 6), torch.rand(40, 4), double=double)
    assert found.healthy and f"slope of f (torch.float{64 if double else 32})" in str(found), str(found)


def test_the_patient_is_as_before() -> None:
    case, found = mlp(), []
    for parallelize in (2, 1):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 4)).double()
        with BatchOptimizer(module, case.criterion, parallelize=parallelize, optimizer="sgd", chunk_size=8) as opt:
            opt.step(case.inputs, case.targets)
            before, step = opt.fingerprint(), opt.state_dict()["history"]
            if parallelize == 2:
                assert opt.check(case.inputs, case.targets).healthy
            assert opt.fingerprint() == before and opt.state_dict()["history"] == step
            opt.step(case.inputs, case.targets)
            found.append(opt.fingerprint())
    assert found[0] == found[1]
