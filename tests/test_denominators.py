"""What means divide by: torch's own mean over the whole batch is the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt._data.denominators import (
    given_denominators,
    own_denominators,
    resolve_reduction,
    rows_of_samples,
    running_denominators,
)
from batchopt_workers.data.batch import Columns, Samples
from batchopt_workers.map.weighting import Weighting

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
)
def test_where_all_samples_count_the_same_there_are_no_denominators(criterion: Any, targets: Any) -> None:
    assert own_denominators(criterion, targets) is None


@pytest.mark.parametrize("kind", [torch.nn.CrossEntropyLoss, torch.nn.NLLLoss])
@pytest.mark.parametrize(
    "options, targets, each",
    [
        ({}, [0, -100, 2, -100], [1, 0, 1, 0]),
        ({"ignore_index": 2}, [0, 1, 2, 1], [1, 1, 0, 1]),
        ({"weight": CLASS_WEIGHTS}, [0, 1, 2, 1], [0.5, 1, 4, 1]),
        ({"weight": CLASS_WEIGHTS, "ignore_index": 2}, [0, 1, 2, 1], [0.5, 1, 0, 1]),
        ({"weight": CLASS_WEIGHTS}, [[0, 1], [-100, 2], [2, 2], [-100, -100]], [1.5, 4, 8, 0]),
    ],
)
def test_samples_count_by_the_weights_of_their_targets(
    kind: type[torch.nn.Module], options: dict[str, Any], targets: list[Any], each: list[float]
) -> None:
    found = own_denominators(kind(**options), Columns(torch.tensor(targets)))
    assert found is not None
    assert found.dtype == torch.float64
    assert found.tolist() == each


@pytest.mark.parametrize("make", [int, torch.tensor, lambda label: torch.tensor([label])])
def test_in_a_list_of_single_classes_samples_count_the_same_way(make: Callable[[int], Any]) -> None:
    targets = [make(label) for label in (0, 1, 2, -100)]
    found = own_denominators(torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), Samples(targets))
    assert found is not None
    assert found.tolist() == [0.5, 1, 4, 0]


def test_running_denominators_are_the_sums_before_each_sample() -> None:
    running = running_denominators(torch.tensor([0.5, 1, 0, 4], dtype=torch.float64))
    assert running is not None
    assert running.dtype == torch.float64
    assert running.tolist() == [0, 0.5, 1.5, 1.5, 5.5]
    assert running_denominators(None) is None


@pytest.mark.parametrize(
    "each",
    [
        torch.tensor([0.0, 2.5, 4.0]),
        torch.tensor([0.0, 2.5, 4.0], requires_grad=True) * 1,
        np.array([0, 2.5, 4], dtype=np.float32),
        [0, 2.5, 4],
        [torch.tensor(0.0), torch.tensor(2.5), torch.tensor(4.0)],
    ],
)
def test_denominators_may_be_given_as_any_row_of_numbers(each: Any) -> None:
    found = given_denominators(lambda inputs, targets: each, None, None, 3)
    assert found.dtype == torch.float64
    assert not found.requires_grad
    assert found.tolist() == [0, 2.5, 4]


def test_counts_and_masks_are_denominators() -> None:
    lengths, mask = torch.tensor([3, 0]), torch.tensor([True, False])
    assert given_denominators(lambda inputs, targets: inputs, lengths, mask, 2).tolist() == [3, 0]
    assert given_denominators(lambda inputs, targets: targets, lengths, mask, 2).tolist() == [1, 0]


@pytest.mark.parametrize("kind", [torch.nn.BCELoss, torch.nn.BCEWithLogitsLoss])
@pytest.mark.parametrize(
    "weight, target",
    [((4,), (4,)), ((4, 3), (4, 3)), ((4, 1), (4, 3)), ((4, 2, 3), (4, 2, 3)), ((4, 4), (4, 4))],
)
def test_a_weight_with_a_row_for_each_sample_is_found(
    kind: type[torch.nn.BCELoss | torch.nn.BCEWithLogitsLoss], weight: tuple[int, ...], target: tuple[int, ...]
) -> None:
    rows = torch.rand(weight)
    made: dict[str, torch.nn.Module] = {"weight": kind(weight=rows)}
    if kind is torch.nn.BCEWithLogitsLoss:
        made["pos_weight"] = torch.nn.BCEWithLogitsLoss(pos_weight=rows)
    for name, criterion in made.items():
        found = rows_of_samples(criterion, Columns(torch.rand(target)))
        assert list(found) == [name] and torch.equal(found[name], rows)


@pytest.mark.parametrize(
    "criterion, targets",
    [
        (torch.nn.BCELoss(), Columns(torch.rand(4))),
        (torch.nn.BCELoss(weight=torch.rand(3)), Columns(torch.rand(4, 3))),
        (torch.nn.BCELoss(weight=torch.rand(4)), Columns(torch.rand(4, 4))),
        (torch.nn.BCELoss(weight=torch.rand(1, 3)), Columns(torch.rand(4, 3))),
        (torch.nn.BCELoss(weight=torch.rand(())), Columns(torch.rand(4))),
        (torch.nn.BCELoss(weight=torch.rand(1, 3)), Columns(torch.rand(1, 3))),
        (torch.nn.BCEWithLogitsLoss(pos_weight=torch.rand(4)), Columns(torch.rand(4, 4))),
        (torch.nn.CrossEntropyLoss(weight=torch.rand(4)), Columns(torch.arange(4))),
        (torch.nn.BCELoss(weight=torch.rand(4)), Samples([torch.rand(1)] * 4)),
        (torch.nn.BCELoss(weight=torch.rand(4)), None),
        (torch.nn.functional.binary_cross_entropy, Columns(torch.rand(4))),
        (None, Columns(torch.rand(4))),
    ],
)
def test_no_other_weight_is_one_of_samples(criterion: Any, targets: Columns | Samples | None) -> None:
    assert rows_of_samples(criterion, targets) == {}


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
    weighting = Weighting(reduction, n, running_denominators(own_denominators(criterion, Columns(classes))))
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
    weighting = Weighting("mean", 2, running_denominators(own_denominators(criterion, Columns(ignored))))
    assert math.isnan(criterion(torch.rand(2, CLASSES), ignored).item())
    assert math.isnan(weighting.of(0, 2))
    assert math.isnan(weighting.of(0, 1))
