"""The comparison of compiled evaluations with eager ones: rounding passes, anything else does not."""

from __future__ import annotations

import pytest
import torch

from batchopt_workers.map.shortcuts import Comparison, Differs

D = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=D)


def test_rounding_passes() -> None:
    comparison = Comparison()
    comparison.losses(tensor(1.0 + 1e-12), tensor(1.0))
    comparison.gradients([tensor(1e-14, 1.0), None], [tensor(0.0, 1.0), None])


def test_of_residuals_that_cancel_rounding_is_that_of_their_terms() -> None:
    """At the minimum of a sum of squares f is nothing but rounding."""
    comparison = Comparison()
    comparison.losses(tensor(1.0), tensor(1.0))
    comparison.gradients([tensor(1.0)], [tensor(1.0)])
    comparison.losses(tensor(2e-28), tensor(1e-28))
    comparison.gradients([tensor(2e-14)], [tensor(1e-14)])
    with pytest.raises(Differs, match="the loss differs by 1e-12 of 1e-12"):
        comparison.losses(tensor(2e-12), tensor(1e-12))
    with pytest.raises(Differs, match="a gradient differs"):
        comparison.gradients([tensor(2e-8)], [tensor(1e-8)])


def test_nothing_else_passes() -> None:
    comparison = Comparison()
    with pytest.raises(Differs, match="the loss differs"):
        comparison.losses(tensor(1.001), tensor(1.0))
    with pytest.raises(Differs, match="other parameters"):
        comparison.gradients([None], [tensor(1.0)])
    with pytest.raises(Differs, match="the loss differs by nan"):
        comparison.losses(tensor(float("nan")), tensor(1.0))
    with pytest.raises(Differs, match="a gradient differs by nan"):
        comparison.gradients([tensor(float("nan"))], [tensor(1.0)])


def test_what_is_not_finite_in_both_is_the_same() -> None:
    comparison = Comparison()
    for value in (float("nan"), float("inf")):
        comparison.losses(tensor(value), tensor(value))
        comparison.gradients([tensor(value, 1.0)], [tensor(value, 1.0)])
