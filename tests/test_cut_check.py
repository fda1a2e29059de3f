"""A loss that is not the mean, or the sum, of its samples' is named once it is cut; what is right, or cannot be known,
is not."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Term, WorkerError
from tests.building import loaded
from tests.workloads import Listed, Mlp, mlp, size

TOKENS, PADDING = 5, -1
SAMPLES = 8  # that are compared


WAYS = pytest.mark.parametrize("options", [{"chunk_size": 4}, {"parallelize": 2}], ids=["chunks", "workers"])


def tagger() -> nn.Module:
    """Scores of 3 classes for each token."""
    return nn.Linear(4, 3).double()


def sentences(samples: int = 21) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences of 1 to 5 tokens, padded."""
    torch.manual_seed(0)
    lengths = torch.randint(1, TOKENS + 1, (samples, 1))
    tags = torch.randint(0, 3, (samples, TOKENS))
    tags[torch.arange(TOKENS) >= lengths] = PADDING
    return torch.randn(samples, TOKENS, 4).double(), tags


def of_tokens(scores: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten(), ignore_index=PADDING)


def of_tokens_fn(module: nn.Module, x: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    """The same as a `loss_fn`."""
    return of_tokens(module(x), tags)


class OwnLoss(nn.Linear):
    """A module that returns its loss."""

    def forward(self, x: torch.Tensor, tags: torch.Tensor | None = None) -> torch.Tensor:
        assert tags is not None
        return of_tokens(super().forward(x), tags)


def present(_: Any, tags: torch.Tensor) -> torch.Tensor:
    """What that mean divides by."""
    return (tags != PADDING).sum(1)


def root(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Not a mean."""
    return nn.functional.mse_loss(output, target).sqrt()


def said(opt: BatchOptimizer, *batch: Any) -> list[str]:
    """What a load is refused for, or warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            opt.load(*batch)
        except ValueError as error:
            return [str(error)]
    return [str(warning.message) for warning in caught]


@pytest.mark.rows
@WAYS
@pytest.mark.parametrize(
    "module, loss",
    [
        (tagger, {"criterion": of_tokens}),
        (tagger, {"criterion": lambda scores, tags: of_tokens(scores, tags)}),
        (tagger, {"loss_fn": of_tokens_fn}),
        (lambda: OwnLoss(4, 3).double(), {}),
    ],
    ids=["function", "lambda", "loss_fn", "module"],
)
def test_a_mean_over_tokens_is_refused(
    module: Callable[[], nn.Module], loss: dict[str, Any], options: dict[str, Any]
) -> None:
    x, tags = sentences()
    with BatchOptimizer(module(), optimizer=None, **loss, **options) as opt:
        (found,) = said(opt, x, tags)
        assert "in one forward, and" in found and "the loss of " in found
        assert all(remedy in found for remedy in ("`denominators`", "reduction='sum'", "check()", "check_cut=False"))
        assert said(opt, x, tags) == [found]
    for remedy in ({"denominators": present}, {"check_cut": False}):
        with BatchOptimizer(module(), optimizer=None, **loss, **options, **remedy) as opt:
            assert said(opt, x, tags) == []


def triplets(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over pairs of one class and a sample of another: none, and so 0, where all are of one class."""
    same = labels[:, None] == labels[None]
    distances = torch.cdist(output, output)
    off = (distances[:, :, None] - distances[:, None, :] + 1).relu()
    counts = (same[:, :, None] & ~same[:, None, :]).double()
    return (off * counts).sum() / counts.sum().clamp(min=1)


def by_class(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean with class weights, made by hand."""
    weights = torch.tensor([1.0, 5.0, 2.0]).double()[labels]
    return (weights * nn.functional.cross_entropy(output, labels, reduction="none")).sum() / weights.sum()


CLASSES = torch.arange(60).div(20, rounding_mode="floor")
LENGTHS = torch.arange(60).div(12, rounding_mode="floor")


def tokens(longest_first: bool) -> torch.Tensor:
    """Tags of sentences in order of their lengths."""
    lengths = 5 - LENGTHS if longest_first else LENGTHS + 1
    return torch.where(torch.arange(TOKENS) < lengths[:, None], torch.arange(60)[:, None] % 3, PADDING)


@pytest.mark.rows
@WAYS
@pytest.mark.parametrize(
    "criterion, inputs, targets",
    [
        (of_tokens, (60, TOKENS, 4), tokens(longest_first=True)),
        (of_tokens, (60, TOKENS, 4), tokens(longest_first=False)),
        (triplets, (60, 4), CLASSES),
        (by_class, (60, 4), CLASSES),
        (root, (60, 4), torch.arange(180.0).view(60, 3).double()),
    ],
    ids=["longest first", "longest last", "triplets", "classes", "root"],
)
def test_sorted_data_hides_nothing(
    criterion: Any, inputs: tuple[int, ...], targets: torch.Tensor, options: dict[str, Any]
) -> None:
    x = torch.arange(float(math.prod(inputs))).view(inputs).sin().double()
    options = {"chunk_size": 10} if "chunk_size" in options else options
    read = Listed(*zip(x, targets, strict=True))
    for data in ((x, targets), (list(x), list(targets)), (read,)):
        with BatchOptimizer(tagger(), criterion, optimizer=None, collate_fn=stack, **options) as opt:
            assert len(said(opt, *data)) == 1


@WAYS
def test_a_term_is_named_and_others_are_not(options: dict[str, Any]) -> None:
    x, tags = sentences()

    def penalised(module: nn.Module, x: torch.Tensor, _: Any) -> torch.Tensor:
        loss: torch.Tensor = module(x).square().sum() + sum(p.square().sum() for p in module.parameters())
        return loss

    terms = {
        "size": Term(size),
        "tags": Term(of_tokens_fn, 3.0),
        "penalised": Term(penalised, reduction="sum"),
        "counted": Term(of_tokens_fn, denominators=present),
    }
    with BatchOptimizer(tagger(), terms=terms, optimizer=None, **options) as opt:
        (found,) = said(opt, {"size": x, "tags": (x, tags), "penalised": x, "counted": (x, tags)})
    assert "of term 'tags'" in found and "as the mean over" in found
    assert "of term 'penalised'" in found and "as the sum over" in found
    assert "'size'" not in found and "'counted'" not in found


def stack(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collates."""
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def test_lists_are_compared_where_they_are_collated_and_one_forward_a_sample_is_what_it_says() -> None:
    x, tags = sentences()
    with BatchOptimizer(tagger(), of_tokens, optimizer=None, chunk_size=4, collate_fn=stack) as opt:
        assert len(said(opt, list(x), list(tags))) == 1

    def each(scores: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return of_tokens(scores.unsqueeze(0), tags.unsqueeze(0))

    with BatchOptimizer(tagger(), each, optimizer=None, chunk_size=4) as opt:
        assert said(opt, list(x), list(tags), [None] * len(x)) == []


class Noisy(Mlp):
    """Draws of its own, as dropout does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x))


class Raises(Mlp):
    """Cannot be evaluated on a few samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= SAMPLES:
            raise RuntimeError("too few")
        return super().forward(x)


@pytest.mark.parametrize(
    "module, criterion",
    [(Noisy, root), (Raises, root), (Mlp, lambda y, _: y.sum() * (math.nan if len(y) <= SAMPLES else 1.0))],
    ids=["random", "raises", "not a number"],
)
@pytest.mark.parametrize("options", [{"chunk_size": 12}, {"parallelize": 2}], ids=["chunks", "workers"])
def test_where_the_few_samples_tell_nothing_nothing_is_said(
    module: Callable[[], nn.Module], criterion: Any, options: dict[str, Any]
) -> None:
    case = mlp()
    with BatchOptimizer(module().double(), criterion, optimizer=None, speeds=None, **options) as opt:
        opt.prehook = lambda worker, sample: None  # the workers are not measured, which would raise
        assert said(opt, case.inputs, case.targets) == []


def drawn_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum, as of a variational bound: with a draw for all samples, and one for each."""
    return (output + 0.1 * torch.randn(()) + 0.1 * torch.randn_like(output) - target).square().sum()


@WAYS
def test_a_random_sum_is_told_from_a_mean(options: dict[str, Any]) -> None:
    case = mlp()
    means: dict[str, Any] = {"mean": lambda output, target: drawn_sum(output, target) / output.numel()}
    with BatchOptimizer(Mlp().double(), drawn_sum, optimizer=None, **options) as opt:
        (found,) = said(opt, case.inputs, case.targets)
        assert "as the mean over" in found
    for reduction, criterion in ({"sum": drawn_sum} | means).items():
        with BatchOptimizer(Mlp().double(), criterion, optimizer=None, reduction=reduction, **options) as opt:
            assert said(opt, case.inputs, case.targets) == []


def test_a_batch_is_compared_once_it_is_cut_also_after_a_check_and_batch_norm_is_blamed_alone() -> None:
    case = mlp()
    with BatchOptimizer(Mlp().double(), root, optimizer=None, chunk_size=20) as opt:
        assert not opt.check(case.inputs, case.targets).healthy
        assert said(opt, case.inputs[:20], case.targets[:20]) == []
        assert len(said(opt, case.inputs, case.targets)) == 1
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    with BatchOptimizer(module, root, optimizer=None, chunk_size=10) as opt:
        (found,) = said(opt, case.inputs, case.targets)
    assert "BatchNorm1d" in found


@pytest.mark.parametrize("seed", [7, 95, 113])
def test_rounding_of_a_sum_that_cancels_is_no_difference(seed: int) -> None:
    """By these seeds the sum of normalised numbers is far below one, and of each part another one."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4))
    with BatchOptimizer(module, lambda y, _: y.sum(), reduction="sum", optimizer=None, chunk_size=3) as opt:
        for _ in range(2):
            opt.load(torch.rand(6, 4), torch.rand(6))
            opt.evaluate()  # a warning is an error here


def test_torchs_own_criteria_are_not_compared_unless_denominators_are_given() -> None:
    case, calls = mlp(), []
    module = Mlp().double()
    module.register_forward_hook(lambda *_: calls.append(1))
    with loaded(module, nn.MSELoss(), case.inputs, case.targets, chunk_size=10) as opt:
        assert not calls

    def wrong(inputs: torch.Tensor, _: Any) -> torch.Tensor:
        return torch.arange(len(inputs))

    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, chunk_size=10, denominators=wrong) as opt:
        assert len(said(opt, case.inputs, case.targets)) == 1


class Running(Mlp):
    """Has a buffer that a forward writes, and draws."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y: torch.Tensor = super().forward(x)
        return y + 0.1 * nn.functional.dropout(y)


def drawn() -> tuple[Any, ...]:
    """The states of all generators."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.slow
def test_it_leaves_no_trace() -> None:
    case, found = mlp(), []
    for check in (True, False):
        torch.manual_seed(0)
        module = Running().double()
        with BatchOptimizer(module, nn.functional.mse_loss, check_cut=check, parallelize=2, chunk_size=10) as opt:
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            before = drawn()
            opt.load(case.inputs, case.targets)
            assert drawn() == before
            assert all(p.grad is not None and bool((p.grad == 1).all()) for p in module.parameters())
            state = opt.state_dict()["history"], module.state_dict()["count"].item(), opt.hook_results
            opt.step(case.inputs, case.targets)
            found.append((state, opt.fingerprint(), module.state_dict()["count"].item(), opt.eval_counter))
    assert found[0] == found[1]


PAIRS = [nn.MSELoss, nn.HuberLoss, nn.PoissonNLLLoss, nn.KLDivLoss]


@pytest.mark.rows
@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:reduction")
@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in PAIRS), (nn.L1Loss, {"chunk_size": 12}), (nn.MSELoss, {"parallelize": 2})],
)
def test_outputs_that_meet_the_targets_of_other_samples_are_refused(kind: Any, options: dict[str, Any]) -> None:
    x, y = torch.randn(40, 3), torch.rand(40)
    with BatchOptimizer(nn.Linear(3, 1), kind(), optimizer=None, **options) as opt:
        with pytest.raises(WorkerError, match=r"shape \(\d+, 1\) and the targets \(\d+,\).*targets\.unsqueeze"):
            opt.load(x, y)
            opt.evaluate()
    with loaded(nn.Linear(3, 1), kind(), x, y.unsqueeze(1), **options) as opt:
        assert math.isfinite(opt.evaluate().item())


@pytest.mark.filterwarnings("ignore")
def test_what_is_broadcast_within_a_sample_is_not_refused() -> None:
    x, y = torch.randn(40, 3).double(), torch.rand(40, 1).double()
    module, criterion = nn.Linear(3, 2).double(), nn.SmoothL1Loss()
    with loaded(module, criterion, x, y, chunk_size=7) as opt:
        assert opt.evaluate().item() == pytest.approx(criterion(module(x), y).item(), rel=1e-12)
