"""Complex parameters: X has their real and imaginary parts, and everything is as for a module that holds those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Term, WorkerError, extending
from tests.workloads import difference

SAMPLES, WIDTH, MODES = 12, 3, 4
X = torch.linspace(-2.0, 2.0, SAMPLES * 8, dtype=torch.float64).reshape(SAMPLES, 8).sin()
Y = torch.linspace(-1.0, 3.0, SAMPLES * 2, dtype=torch.float64).reshape(SAMPLES, 2).cos()


# ---- modules, of complex parameters or of real pairs


def weights(seed: int, pairs: bool, *shape: int) -> nn.Parameter:
    numbers = torch.randn(*shape, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / 2
    return nn.Parameter(numbers if pairs else torch.view_as_complex(numbers))


def as_complex(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.is_complex() else torch.view_as_complex(weight)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self, seed: int, pairs: bool) -> None:
        super().__init__()
        self.local = nn.Conv1d(WIDTH, WIDTH, 1).double()
        self.weight = weights(seed, pairs, WIDTH, WIDTH, MODES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.einsum("nim,iom->nom", torch.fft.rfft(x)[..., :MODES], as_complex(self.weight))
        return torch.tanh(torch.fft.irfft(modes, n=x.shape[-1]) + self.local(x))


class Operator(nn.Module):
    """Two such layers, of one complex parameter if `tied`, between real ones that come before and after."""

    def __init__(self, pairs: bool, tied: bool = False, frozen: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.lift, self.layers = nn.Linear(1, WIDTH).double(), nn.Sequential(*(Spectral(i, pairs) for i in range(2)))
        self.last = nn.Linear(WIDTH * 8, 2).double()
        if tied:
            self.layers[1].weight = self.layers[0].weight
        if frozen:
            for parameter in (self.layers[0].weight, self.lift.bias):
                parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.layers(self.lift(x[..., None]).transpose(1, 2)).flatten(1))
        return found


class Waves(nn.Module):
    """Complex parameters alone, with their conjugates, one of them without dimensions and an empty one."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        self.first, self.second = weights(3, pairs, 8, 3), weights(4, pairs, 3, 2)
        self.phase, self.nothing = weights(5, pairs), weights(6, pairs, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = as_complex(self.first), as_complex(self.second)
        found = torch.tanh((x + 0j) @ first.conj()) @ second * as_complex(self.phase).exp()
        return (found + found.conj() @ second.mH @ second).abs()


Make = Callable[[bool], nn.Module]
MSE: dict[str, Any] = {"criterion": nn.MSELoss()}
CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "operator": (lambda pairs: Operator(pairs), MSE),
    "tied": (lambda pairs: Operator(pairs, tied=True), MSE),
    "frozen": (lambda pairs: Operator(pairs, frozen=True), MSE),
    "complex alone": (Waves, MSE),
    "a term": (lambda pairs: Operator(pairs), {"terms": {"a": Term(residual=difference, weight=3.0, loss="cauchy")}}),
}
PAIR = pytest.mark.parametrize(("make", "options"), CASES.values(), ids=CASES)


def opened(module: nn.Module, options: dict[str, Any], **others: Any) -> BatchOptimizer:
    return BatchOptimizer(module, **{"optimizer": None, **options, **others})


def loaded(module: nn.Module, options: dict[str, Any], **others: Any) -> BatchOptimizer:
    opt = opened(module, options, **others)
    opt.load({"a": (X, Y)} if "terms" in options else X, None if "terms" in options else Y)
    return opt


def places(module: nn.Module, twin: nn.Module) -> torch.Tensor:
    """Where each number of the module's X is in that of the twin of real pairs, which is in the order of
    `parameters()`."""
    start, offset = {}, 0
    for name, parameter in twin.named_parameters():
        if parameter.requires_grad:
            start[name], offset = torch.arange(offset, offset + parameter.numel()), offset + parameter.numel()
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    in_order = [name for of_complex in (True, False) for name, p in named if p.is_complex() is of_complex]
    return torch.cat([start[name] for name in in_order])


def close(found: Any, right: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance * float(right.abs().max()))


@pytest.mark.slow
@pytest.mark.rows
@PAIR
@pytest.mark.filterwarnings("ignore:.*rows of the Jacobian took a backward each")
def test_everything_is_as_for_real_pairs(make: Make, options: dict[str, Any]) -> None:
    module, twin = make(False), make(True)
    at = places(module, twin)
    with loaded(module, options, parallelize=2) as opt, loaded(twin, options) as right:
        assert opt.parameters.dtype is torch.float64
        assert torch.equal(opt.parameters, right.parameters[at])
        close(opt.evaluate(), right.evaluate())
        close(opt.grad_parameters, right.grad_parameters[at])
        v = torch.randn(len(at), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        moved = torch.zeros_like(v)
        moved[at] = v
        close(opt.hvp(v[:, 0]), right.hvp(moved[:, 0])[at])
        close(opt.hvp(v), right.hvp(moved)[at])
        close(opt.gauss_newton(v), right.gauss_newton(moved)[at])
        ones, others = opt.jvp(v[:, 0]), right.jvp(moved[:, 0])
        close(*(found["a"] if "terms" in options else found for found in (ones, others)))
        close(opt.vjp(ones), right.vjp(others)[at])
        found, normal = opt.normal(), right.normal()
        close(found.vector, normal.vector[at])
        close(found.matrix, normal.matrix[at][:, at])
        close(opt.gram(), right.gram())
        close(
            extending.closure(opt).accelerations(v.T)[0], extending.closure(right).accelerations(moved.T)[0, at], 1e-7
        )
        slopes, others = opt.input_gradients(), right.input_gradients()
        close(*(found["a"] if "terms" in options else found for found in (slopes, others)))
        points = torch.stack([right.parameters, right.parameters + 0.1 * moved[:, 1]])
        for one, other in zip(
            opt.evaluate_many(points[:, at], gradients=True), right.evaluate_many(points, gradients=True), strict=True
        ):
            close(one, other[:, at] if other.dim() == 2 else other)


def test_single_precision_and_every_number_in_its_place() -> None:
    module: Any = nn.ParameterList([torch.zeros(3), torch.ones(2, dtype=torch.complex64)])
    with opened(module, {"loss_fn": lambda m, x, y: (m[0].sum() - m[1].sum().conj() * 1j).abs()}) as opt:
        assert opt.parameters.dtype is torch.float32
        assert opt.parameters.tolist() == [1, 0, 1, 0, 0, 0, 0]
        opt.parameters.copy_(torch.arange(7.0))
        assert module[1].tolist() == [1j, 2 + 3j]
        assert module[0].tolist() == [4, 5, 6]
        opt.load(torch.zeros(4, 1))
        opt.evaluate()
        assert module[1].grad is not None
        assert module[1].grad.dtype is torch.complex64
        module[1].grad.fill_(1 - 2j)
        assert opt.grad_parameters[:4].tolist() == [1, -2, 1, -2]


def test_complex_numbers_are_aligned_behind_an_odd_number_of_real_ones() -> None:
    module = nn.ParameterList(
        [torch.zeros(1).double(), torch.zeros(3, dtype=torch.complex128), torch.zeros(2).double()]
    )
    with opened(module, {"loss_fn": lambda m, x, y: m[1].abs().sum()}) as opt:
        assert [module[i].data_ptr() - opt.parameters.data_ptr() for i in range(3)] == [48, 0, 56]


# ---- SciPy, the doctor, statistics


def test_a_conjugate_parameter_keeps_its_values() -> None:
    numbers = weights(9, False, 3, 2).data
    module: Any = nn.ParameterList([nn.Parameter(numbers.conj())])
    with opened(module, {"loss_fn": lambda m, x, y: m[0].abs().sum()}) as opt:
        assert torch.equal(opt.parameters, torch.view_as_real(numbers.conj().resolve_conj()).flatten())
        assert not module[0].is_conj()


# ---- what is refused


def test_residuals_and_losses_have_to_be_real() -> None:
    with loaded(Waves(False), {"residual": lambda m, x, y: (x + 0j) @ m.first}) as opt:
        with pytest.raises(WorkerError, match=r"got torch\.complex128: return torch\.view_as_real of it"):
            opt.normal()
    with loaded(Waves(False), {"loss_fn": lambda m, x, y: m.first.sum()}) as opt:
        with pytest.raises(
            WorkerError, match=r"`loss_fn` must return a real number; got torch\.complex128: return \.real or"
        ):
            opt.evaluate()
