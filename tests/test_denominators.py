"""What means divide by: torch's own mean over the whole batch is the reference."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt.denominators import resolve_reduction, running_denominators
from batchopt_workers.batch import Columns, Samples
from batchopt_workers.weighting import Weighting

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
        (torch.nn.CrossEntropyLoss(), Columns(torch.tensor([0, 1, 2, 1]))),
        (torch.nn.MSELoss(), Columns(torch.tensor([0, 1, -100, 1]))),
        (torch.nn.functional.cross_entropy, Columns(torch.tensor([0, 1, -100, 1]))),
        (torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), Columns(torch.rand(4, CLASSES))),
        (torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), Samples(list(torch.rand(4, CLASSES)))),
        (torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), Samples([torch.zeros(n, dtype=torch.long) for n in (1, 2)])),
        (torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), None),
    ],
    ids=["all counted", "no classes", "function", "probabilities", "list of probabilities", "many a sample", "none"],
)
def test_where_all_samples_count_the_same_there_are_no_denominators(criterion: Any, targets: Any) -> None:
    assert running_denominators(criterion, targets) is None


@pytest.mark.parametrize("kind", [torch.nn.CrossEntropyLoss, torch.nn.NLLLoss])
@pytest.mark.parametrize(
    "options, targets, running",
    [
        ({}, [0, -100, 2, -100], [0, 1, 1, 2, 2]),
        ({"ignore_index": 2}, [0, 1, 2, 1], [0, 1, 2, 2, 3]),
        ({"weight": CLASS_WEIGHTS}, [0, 1, 2, 1], [0, 0.5, 1.5, 5.5, 6.5]),
        ({"weight": CLASS_WEIGHTS, "ignore_index": 2}, [0, 1, 2, 1], [0, 0.5, 1.5, 1.5, 2.5]),
        ({"weight": CLASS_WEIGHTS}, [[0, 1], [-100, 2], [2, 2], [-100, -100]], [0, 1.5, 5.5, 13.5, 13.5]),
    ],
    ids=["ignored", "ignored class", "weighted", "weighted and ignored", "a target a pixel"],
)
def test_samples_count_by_the_weights_of_their_targets(
    kind: type[torch.nn.Module], options: dict[str, Any], targets: list[Any], running: list[float]
) -> None:
    found = running_denominators(kind(**options), Columns(torch.tensor(targets)))
    assert found is not None
    assert found.dtype == torch.float64
    assert found.tolist() == running


@pytest.mark.parametrize("shape", [(), (1,)])
def test_in_a_list_of_single_classes_samples_count_alike(shape: tuple[int, ...]) -> None:
    targets = [torch.tensor(label).reshape(shape) for label in (0, 1, 2, -100)]
    found = running_denominators(torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), Samples(targets))
    assert found is not None
    assert found.tolist() == [0, 0.5, 1.5, 5.5, 5.5]


@given(st.lists(st.sampled_from([0, 1, 2, -100]), min_size=1, max_size=30).filter(lambda t: max(t) >= 0), st.data())
@settings(deadline=None)
def test_weighted_losses_of_the_chunks_that_count_sum_to_the_whole_loss(
    targets: list[int], data: st.DataObject
) -> None:
    weight = data.draw(st.sampled_from([None, CLASS_WEIGHTS]))
    smoothing = data.draw(st.sampled_from([0.0, 0.2]))
    reduction = data.draw(st.sampled_from(["mean", "sum"]))
    criterion = torch.nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing, reduction=reduction)
    n = len(targets)
    outputs = torch.randn(n, CLASSES, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    classes = torch.tensor(targets)
    weighting = Weighting(reduction, n, running_denominators(criterion, Columns(classes)))
    assert weighting.of(0, n) == 1.0
    inner = data.draw(st.sets(st.integers(1, n - 1))) if n > 1 else set()
    loss = 0.0
    for start, stop in pairwise([0, *sorted(inner), n]):
        part = criterion(outputs[start:stop], classes[start:stop]).item()
        if share := weighting.of(start, stop):
            loss += share * part
        else:  # torch's mean over nothing
            assert math.isnan(part)
    assert loss == pytest.approx(criterion(outputs, classes).item(), rel=1e-12)


def test_a_mean_over_nothing_is_not_a_number_as_in_torch() -> None:
    criterion, ignored = torch.nn.CrossEntropyLoss(), torch.tensor([-100, -100])
    weighting = Weighting("mean", 2, running_denominators(criterion, Columns(ignored)))
    assert math.isnan(criterion(torch.rand(2, CLASSES), ignored).item())
    assert math.isnan(weighting.of(0, 2))
    assert math.isnan(weighting.of(0, 1))
