"""What samples add to the divisor of a mean."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchopt_workers.map.weighting import ClassDenominators, GivenDenominators, class_denominators

NOTHING = nn.Identity()


@pytest.mark.parametrize("shape", [(9,), (9, 5), (9, 2, 3)])
@pytest.mark.parametrize("weighted", [True, False])
def test_they_sum_to_what_torchs_mean_divides_by(shape: tuple[int, ...], weighted: bool) -> None:
    torch.manual_seed(0)
    classes, weight = torch.randint(0, 4, shape), torch.rand(4).double() if weighted else None
    outputs = torch.randn(9, 4, *shape[1:]).double()
    mean, total = (
        nn.functional.cross_entropy(outputs, classes, weight, ignore_index=2, reduction=reduction)
        for reduction in ("mean", "sum")
    )
    each = class_denominators(classes, weight, 2)
    assert each.shape == (9,) and each.sum().item() == pytest.approx((total / mean).item(), rel=1e-12)


def test_those_of_chunks_are_those_of_the_whole() -> None:
    classes, weight = torch.tensor([0, 1, 2, 1]), torch.tensor([1.0, 0.5, 4.0])
    found = ClassDenominators(weight, 2)
    each = torch.cat([found(NOTHING, None, part) for part in (classes[:3], classes[3:])])
    assert each.tolist() == [1.0, 0.5, 0.0, 0.5]
    assert found(NOTHING, None, torch.rand(4, 3)).isnan().all()
    with pytest.raises(TypeError, match="need targets that are a tensor; got NoneType"):
        found(NOTHING, None, None)


def test_the_users_function_may_return_any_sequence() -> None:
    assert GivenDenominators(lambda x, y: [1, 2])(NOTHING, None, None).tolist() == [1, 2]
