"""What means divide by: torch's own mean over the whole batch is the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt.batches import read_batch
from batchopt.denominators import resolve_reduction, sample_weights
from batchopt.split import cut_batch

CLASSES = 3
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "given_reduction, criterion, reduction",
    [
        (None, None, "mean"),
        (None, torch.nn.MSELoss(), "mean"),
        (None, torch.nn.MSELoss(reduction="sum"), "sum"),
        (None, torch.nn.KLDivLoss(reduction="batchmean"), "mean"),
        (None, torch.nn.functional.mse_loss, "mean"),
        ("sum", None, "sum"),
        ("mean", torch.nn.functional.mse_loss, "mean"),
        ("sum", torch.nn.L1Loss(reduction="sum"), "sum"),
    ],
)
def test_the_reduction_is_the_one_given_or_the_criterions_own(
    given_reduction: str | None, criterion: Any, reduction: str
) -> None:
    assert resolve_reduction(given_reduction, criterion) == reduction


@pytest.mark.parametrize(
    "given_reduction, criterion, message",
    [
        (None, torch.nn.MSELoss(reduction="none"), r"`criterion` has reduction='none': use reduction='mean' or 'sum'"),
        ("mean", torch.nn.MSELoss(reduction="none"), r"`criterion` has reduction='none'"),
        ("average", None, r"`reduction` must be 'mean' or 'sum', got 'average'"),
        ("sum", torch.nn.MSELoss(), r"`reduction` is 'sum' but the criterion's own is 'mean'"),
        ("mean", torch.nn.MSELoss(reduction="sum"), r"`reduction` is 'mean' but the criterion's own is 'sum'"),
    ],
)
def test_impossible_reductions_are_refused(given_reduction: str | None, criterion: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reduction(given_reduction, criterion)


@pytest.mark.parametrize(
    "criterion, targets",
    [
        (torch.nn.CrossEntropyLoss(), torch.tensor([0, 1, 2, 1])),
        (torch.nn.MSELoss(), torch.tensor([0, 1, -100, 1])),
        (torch.nn.functional.cross_entropy, torch.tensor([0, 1, -100, 1])),
        (torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), torch.rand(4, CLASSES)),
    ],
    ids=["all counted", "no classes", "function", "class probabilities"],
)
def test_where_all_samples_count_the_same_there_are_no_weights(criterion: Any, targets: torch.Tensor) -> None:
    assert sample_weights(criterion, read_batch(torch.rand(4, CLASSES), targets, None, None)) is None


@pytest.mark.parametrize("kind", [torch.nn.CrossEntropyLoss, torch.nn.NLLLoss])
@pytest.mark.parametrize(
    "options, targets, weights",
    [
        ({}, [0, -100, 2, -100], [1, 0, 1, 0]),
        ({"ignore_index": 2}, [0, 1, 2, 1], [1, 1, 0, 1]),
        ({"weight": CLASS_WEIGHTS}, [0, 1, 2, 1], [0.5, 1, 4, 1]),
        ({"weight": CLASS_WEIGHTS, "ignore_index": 2}, [0, 1, 2, 1], [0.5, 1, 0, 1]),
        ({"weight": CLASS_WEIGHTS}, [[0, 1], [-100, 2], [2, 2], [-100, -100]], [1.5, 4, 8, 0]),
    ],
    ids=["ignored", "ignored class", "weighted", "weighted and ignored", "a target a pixel"],
)
def test_samples_count_by_the_weights_of_their_targets(
    kind: type[torch.nn.Module], options: dict[str, Any], targets: list[Any], weights: list[float]
) -> None:
    batch = read_batch(torch.rand(4, CLASSES), torch.tensor(targets), None, None)
    found = sample_weights(kind(**options), batch)
    assert found is not None
    assert found.dtype == "float64"
    assert found.tolist() == weights


@given(st.lists(st.sampled_from([0, 1, 2, -100]), min_size=1, max_size=30).filter(lambda t: max(t) >= 0), st.data())
@settings(deadline=None)
def test_weighted_losses_of_the_chunks_that_count_sum_to_the_whole_loss(
    targets: list[int], data: st.DataObject
) -> None:
    weight = data.draw(st.sampled_from([None, CLASS_WEIGHTS]))
    smoothing = data.draw(st.sampled_from([0.0, 0.2]))
    criterion = torch.nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing)
    n = len(targets)
    outputs = torch.randn(n, CLASSES, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    classes = torch.tensor(targets)
    inner = data.draw(st.sets(st.integers(1, n - 1))) if n > 1 else set()
    cut = cut_batch(
        n, [0, *sorted(inner), n], "mean", sample_weights(criterion, read_batch(outputs, classes, None, None))
    )
    loss = sum(
        share * criterion(outputs[start:stop], classes[start:stop]).item()
        for share, start, stop in zip(cut.weights, cut.bounds, cut.bounds[1:], strict=False)
        if share
    )
    assert loss == pytest.approx(criterion(outputs, classes).item(), rel=1e-12)
