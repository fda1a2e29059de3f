"""New points where the residuals are large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchopt
from batchopt import BatchOptimizer, Term
from tests.workloads import difference, size

POINTS = torch.linspace(-1.0, 1.0, 200, dtype=torch.float64).unsqueeze(1)


def steep(module: Any, points: torch.Tensor, _: Any) -> torch.Tensor:
    """Two numbers a sample, of different sizes."""
    return torch.cat([module(points) - points.exp(), 3 * points.square()], dim=1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def of_terms(**options: Any) -> BatchOptimizer:
    terms = {"equation": Term(residual=steep), "initial": Term(residual=difference), "rest": Term(size)}
    return BatchOptimizer(net(), terms=terms, **options)


def of_sizes() -> BatchOptimizer:
    """Its residuals are the inputs."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    return BatchOptimizer(module, nn.MSELoss())


def probabilities(module: nn.Module, k: float, c: float) -> torch.Tensor:
    """By torch alone, as the paper has them."""
    sizes = steep(module, POINTS, None).detach().norm(dim=1)
    powers = torch.pow(sizes, k)
    weights = powers / powers.mean() + c
    return weights / weights.sum()


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize(("k", "c"), [(1.0, 1.0), (3.0, 0.0), (0.5, 2.0), (0.0, 0.0)])
def test_points_are_drawn_with_the_published_probabilities(monkeypatch: pytest.MonkeyPatch, k: float, c: float) -> None:
    drawn = torch.zeros(len(POINTS), dtype=torch.float64)
    draws = 4000
    with of_terms() as opt:
        expected = probabilities(opt.module, k, c)
        residuals = opt.residuals({"equation": POINTS})
        monkeypatch.setattr(opt, "residuals", lambda data: residuals)
        for seed in range(draws):
            found = batchopt.resample(opt, "equation", POINTS, samples=1, k=k, c=c, seed=seed)
            drawn[(POINTS == found).nonzero()[0, 0]] += 1
    # chi square, which has a mean of 199 and a standard deviation of 20
    likely = expected * draws
    assert float(((drawn - likely).square() / likely).sum()) < 199 + 5 * 20


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_with_the_same_points(tmp_path: Path) -> None:
    def draw(opt: BatchOptimizer) -> Any:
        return batchopt.resample(opt, "equation", POINTS, samples=20)

    data = {"equation": POINTS, "initial": (POINTS, POINTS), "rest": POINTS}
    with of_terms(chunk_size=50, optimizer="sgd") as opt:
        first = draw(opt)
        assert torch.equal(first, draw(opt))  # of the same parameters and batches
        opt.step(data)
        opt.save(tmp_path / "run.pt")
        second = draw(opt)
        assert not torch.equal(first, second)
        opt.step({**data, "equation": second})
        third = draw(opt)
    with of_terms(chunk_size=50, optimizer="sgd", parallelize=2) as opt:
        opt.load_checkpoint(tmp_path / "run.pt")
        again = draw(opt)
        assert torch.equal(again, second)
        opt.step({**data, "equation": again})
        assert torch.equal(draw(opt), third)


def test_a_term_with_targets_and_points_that_are_kept() -> None:
    inputs, values = POINTS.clone().requires_grad_(), POINTS.sin()
    old = POINTS[:3] + 5, POINTS[:3] - 5
    with of_terms() as opt:
        x, y = batchopt.resample(opt, "initial", (inputs, values), samples=30)
        assert x.shape == y.shape == (30, 1) and torch.equal(x.sin(), y) and x.requires_grad and x.is_leaf
        assert bool((x[1:] > x[:-1]).all())  # in the order of the candidates
        more = batchopt.resample(opt, "initial", (inputs, values), samples=30, keep=old)
        assert torch.equal(more[0], torch.cat([old[0], x])) and torch.equal(more[1], torch.cat([old[1], y]))
        loss = opt.step({"equation": POINTS, "initial": more, "rest": POINTS})
        assert loss > 0


def test_candidates_without_a_probability_are_named() -> None:
    """Other refusals are in `refusals.py`."""
    zeros = torch.zeros(4, 1)
    with of_sizes() as opt:
        for candidates, message in (
            ((zeros, zeros), "all residuals are 0"),
            ((torch.tensor([[1.0], [0.0]]), zeros[:2]), "only 1 of 2 candidates"),
            ((torch.tensor([[1.0], [torch.nan]]), zeros[:2]), "residual of candidate 1 is nan"),
        ):
            with pytest.raises(ValueError, match=message):
                batchopt.resample(opt, None, candidates, samples=2, c=0.0)
    with of_terms() as opt:
        with pytest.raises(ValueError, match=r"`term` must be one of .*'equation'"):
            batchopt.resample(opt, None, POINTS, samples=1)


def test_residuals_of_some_terms_alone() -> None:
    with of_terms() as opt:
        found = opt.residuals({"initial": (POINTS, POINTS)})
        assert [*found] == ["initial"]
        torch.testing.assert_close(found["initial"], (opt.module(POINTS) - POINTS).detach())
        with pytest.raises(ValueError, match=r"unknown .*nothing"):
            opt.residuals({"nothing": POINTS})
        with pytest.raises(ValueError, match="'rest' is not known"):
            opt.residuals({"equation": POINTS, "initial": (POINTS, POINTS), "rest": POINTS})
