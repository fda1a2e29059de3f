"""Every loss of `torch.nn`, for any cut: f and df/dX are those of the whole batch.

The table names every class; one that torch adds later fails the last test until it is decided.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.building import loaded

# what a mean of KLDivLoss divides by is announced to change: from elements to samples, which are as many in each sample
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")

N = 23  # samples: no multiple of anything
CLASSES = 5
Loss = Callable[[nn.Module, Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A loss and targets that suit it. `loss_fn` calls a criterion that takes more than an output and a target."""

    criterion: nn.Module
    targets: Any
    loss_fn: Loss | None = None
    denominators: Callable[[Any, Any], torch.Tensor] | None = None


def _scores(activation: nn.Module | None = None) -> nn.Module:
    """Scores of classes for each sample."""
    return nn.Sequential(nn.Linear(4, CLASSES), activation or nn.Identity()).double()


def _targets(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _classes(ignored: bool = False, shape: tuple[int, ...] = (N,)) -> torch.Tensor:
    classes = torch.randint(0, CLASSES, shape)
    if ignored:
        classes[:9] = -100  # whole chunks, and a part of one
        classes[-1:] = -100
    return classes


def _signs(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).double() * 2 - 1


def _ctc(criterion: nn.Module) -> Case:
    def loss_fn(module: nn.Module, x: torch.Tensor, targets: Any) -> torch.Tensor:
        steps = torch.stack([module(x + t) for t in range(8)]).log_softmax(-1)  # shape (time, samples, classes)
        loss: torch.Tensor = criterion(steps, targets[0], torch.full((len(x),), 8), targets[1])
        return loss

    return Case(criterion, (torch.randint(1, CLASSES, (N, 3)), torch.randint(1, 4, (N,))), loss_fn)


def _gaussian(criterion: nn.Module) -> Case:
    return Case(criterion, _targets(N, 2), lambda m, x, y: criterion(m(x)[:, :2], y, m(x)[:, 2:4].exp()))


def _pairs(criterion: nn.Module) -> Case:
    return Case(criterion, _signs(N), lambda m, x, y: criterion(m(x), m(x.flip(1)), y))


def _ranks(criterion: nn.Module) -> Case:
    return Case(criterion, _signs(N), lambda m, x, y: criterion(m(x)[:, 0], m(x)[:, 1], y))


def _triplets(criterion: nn.Module) -> Case:
    return Case(criterion, None, lambda m, x, _: criterion(m(x), m(x.flip(1)), m(x * 2)))


def _weights() -> torch.Tensor:
    return torch.rand(CLASSES, dtype=torch.float64) + 0.1


def _some_zero() -> torch.Tensor:
    """Two classes of weight 0: their targets count nothing in what a mean divides by."""
    return torch.cat([torch.zeros(2, dtype=torch.float64), _weights()[2:]])


def _sorted() -> torch.Tensor:
    """Sorted, so that whole chunks have targets of weight 0, after some that are ignored."""
    return _classes(ignored=True).sort().values


def _probabilities() -> torch.Tensor:
    return _targets(N, CLASSES).softmax(1)


# For each class of loss: what to try, given the reduction. None: it has no reduction to try (said why).
TABLE: dict[str, list[Callable[[str], Case]] | None] = {
    "L1Loss": [lambda r: Case(nn.L1Loss(reduction=r), _targets(N, CLASSES))],
    "MSELoss": [lambda r: Case(nn.MSELoss(reduction=r), _targets(N, CLASSES))],
    "SmoothL1Loss": [lambda r: Case(nn.SmoothL1Loss(reduction=r, beta=0.3), _targets(N, CLASSES))],
    "HuberLoss": [lambda r: Case(nn.HuberLoss(reduction=r, delta=0.5), _targets(N, CLASSES))],
    "PoissonNLLLoss": [lambda r: Case(nn.PoissonNLLLoss(reduction=r, full=True), _targets(N, CLASSES).abs())],
    "SoftMarginLoss": [lambda r: Case(nn.SoftMarginLoss(reduction=r), _signs(N, CLASSES))],
    "HingeEmbeddingLoss": [lambda r: Case(nn.HingeEmbeddingLoss(reduction=r), _signs(N, CLASSES))],
    "GaussianNLLLoss": [lambda r: _gaussian(nn.GaussianNLLLoss(reduction=r))],
    "KLDivLoss": [
        lambda r: Case(nn.KLDivLoss(reduction=r), _probabilities()),
        lambda r: Case(nn.KLDivLoss(reduction="batchmean"), _probabilities()),
    ],
    "BCELoss": [
        lambda r: Case(nn.BCELoss(reduction=r), torch.rand(N, CLASSES).double()),
        lambda r: Case(nn.BCELoss(_weights(), reduction=r), torch.rand(N, CLASSES).double()),
        lambda r: Case(nn.BCELoss(torch.rand(N, CLASSES).double(), reduction=r), torch.rand(N, CLASSES).double()),
        lambda r: Case(nn.BCELoss(torch.rand(N, 1).double(), reduction=r), torch.rand(N, CLASSES).double()),
    ],
    "BCEWithLogitsLoss": [
        lambda r: Case(nn.BCEWithLogitsLoss(reduction=r, pos_weight=_weights()), torch.rand(N, CLASSES).double()),
        lambda r: Case(nn.BCEWithLogitsLoss(torch.rand(N, 1).double(), reduction=r), torch.rand(N, CLASSES).double()),
    ],
    "NLLLoss": [
        lambda r: Case(nn.NLLLoss(reduction=r), _classes()),
        lambda r: Case(nn.NLLLoss(_weights(), reduction=r), _classes(ignored=True)),
        lambda r: Case(nn.NLLLoss(_weights(), reduction=r, ignore_index=2), _classes()),
    ],
    "NLLLoss2d": None,  # deprecated: NLLLoss under another name
    "CrossEntropyLoss": [
        lambda r: Case(nn.CrossEntropyLoss(reduction=r), _classes(ignored=True)),
        lambda r: Case(nn.CrossEntropyLoss(_weights(), reduction=r), _classes(ignored=True)),
        lambda r: Case(nn.CrossEntropyLoss(_weights(), reduction=r, label_smoothing=0.2), _classes(ignored=True)),
        lambda r: Case(nn.CrossEntropyLoss(reduction=r, label_smoothing=0.2, ignore_index=0), _classes()),
        lambda r: Case(nn.CrossEntropyLoss(_some_zero(), reduction=r), _sorted()),
        lambda r: Case(nn.CrossEntropyLoss(_some_zero(), reduction=r, label_smoothing=0.2), _classes().sort().values),
        lambda r: Case(nn.CrossEntropyLoss(_some_zero(), reduction=r, label_smoothing=0.2), _sorted()),
        lambda r: Case(nn.CrossEntropyLoss(_some_zero(), reduction=r, label_smoothing=0.2), _probabilities()),
        lambda r: Case(nn.CrossEntropyLoss(_weights(), reduction=r), _probabilities()),
        lambda r: Case(nn.CrossEntropyLoss(_weights(), reduction=r, label_smoothing=0.1), _probabilities()),
    ],
    "LinearCrossEntropyLoss": [
        lambda r: Case(
            nn.LinearCrossEntropyLoss(CLASSES, CLASSES, weight=_weights(), reduction=r).double().requires_grad_(False),
            _classes(ignored=True),
        )
    ],
    "MultiLabelMarginLoss": [lambda r: Case(nn.MultiLabelMarginLoss(reduction=r), _classes(shape=(N, CLASSES)))],
    "MultiLabelSoftMarginLoss": [
        lambda r: Case(nn.MultiLabelSoftMarginLoss(_weights(), reduction=r), torch.rand(N, CLASSES).double())
    ],
    "MultiMarginLoss": [lambda r: Case(nn.MultiMarginLoss(weight=_weights(), reduction=r), _classes())],
    "CosineEmbeddingLoss": [lambda r: _pairs(nn.CosineEmbeddingLoss(reduction=r, margin=0.2))],
    "MarginRankingLoss": [lambda r: _ranks(nn.MarginRankingLoss(reduction=r, margin=0.1))],
    "TripletMarginLoss": [lambda r: _triplets(nn.TripletMarginLoss(reduction=r))],
    "TripletMarginWithDistanceLoss": [lambda r: _triplets(nn.TripletMarginWithDistanceLoss(reduction=r))],
    "CTCLoss": [lambda r: _ctc(nn.CTCLoss(reduction=r))],
    "AdaptiveLogSoftmaxWithLoss": None,  # a module with parameters and no reduction: a part of the user's module
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "BCELoss": nn.Sigmoid,
    "NLLLoss": lambda: nn.LogSoftmax(1),
    "KLDivLoss": lambda: nn.LogSoftmax(1),
}
CASES = [
    pytest.param(name, i, id=f"{name}-{i}")
    for name, makers in TABLE.items()
    for i in range(len(makers or []))
    if hasattr(nn, name)
]


def check(module: nn.Module, case: Case, x: torch.Tensor, *ways: tuple[Any, dict[str, Any]], **options: Any) -> None:
    """f and df/dX of the batch in each form, with these options, are those of torch alone on the whole batch."""
    values: torch.Tensor = (
        case.loss_fn(module, x, case.targets) if case.loss_fn else case.criterion(module(x), case.targets)
    )
    assert values.isfinite()
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(values, parameters, allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    reduction, criterion = getattr(case.criterion, "reduction", None), None if case.loss_fn else case.criterion
    given = {"loss_fn": case.loss_fn, "denominators": case.denominators, **options}
    for (inputs, targets), more in ways:
        if case.loss_fn and case.denominators is None:
            more = {"reduction": reduction, **more}
        with loaded(module, criterion, inputs, targets, **given, **more) as opt:
            torch.testing.assert_close(opt.evaluate(), values.detach().double(), rtol=1e-12, atol=0)
            torch.testing.assert_close(
                opt.grad_parameters, torch.cat([part.flatten() for part in parts]), rtol=1e-11, atol=1e-13
            )


def module_of(name: str) -> nn.Module:
    return _scores(ACTIVATIONS[name]() if name in ACTIVATIONS else None)


def made(name: str) -> list[Callable[[str], Case]]:
    found = TABLE[name]
    assert found is not None
    return found


def inputs(samples: int = N) -> torch.Tensor:
    return torch.randn(samples, 4, dtype=torch.float64)


@pytest.mark.rows
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name, which", CASES)
def test_every_loss_for_every_cut(name: str, which: int, reduction: str) -> None:
    torch.manual_seed(which)
    case, x = made(name)[which](reduction), inputs()
    check(module_of(name), case, x, *(((x, case.targets), {"chunk_size": size}) for size in (1, 4, N)))


class Focal(nn.CrossEntropyLoss):
    """The focal loss: the mean over samples, not over class weights."""

    def forward(self, scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        entropy = nn.functional.cross_entropy(scores, classes, reduction="none")
        assert self.weight is not None
        loss: torch.Tensor = (self.weight[classes] * (1 - (-entropy).exp()) ** 2 * entropy).mean()
        return loss


def _replaced() -> nn.Module:
    criterion = nn.CrossEntropyLoss(_weights())
    criterion.forward = Focal(criterion.weight)  # type: ignore[method-assign]
    return criterion


@pytest.mark.parametrize(
    "make",
    [
        lambda: Case(Focal(_weights()), _classes()),
        lambda: Case(_replaced(), _classes()),
    ],
    ids=["subclass", "replaced forward"],
)
def test_a_loss_with_a_forward_of_its_own_is_not_torchs(make: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    case, x = make(), inputs()
    check(_scores(nn.Sigmoid()), case, x, *(((x, case.targets), {"chunk_size": size}) for size in (4, 10)))


def test_the_table_names_every_loss_of_torch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = {name for name in dir(nn) if "Loss" in name and isinstance(getattr(nn, name), type)}
    assert losses <= TABLE.keys(), f"decide what a mean divides by: {losses - TABLE.keys()}"
