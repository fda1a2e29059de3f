"""The compact form of L-BFGS against the two loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt.optim import algebra
from batchopt.optim.curvature import Curvature
from tests.optim.reference import two_loops

Pair = tuple[torch.Tensor, torch.Tensor]
CPU = torch.device("cpu")


class Walk:
    """Steps over a quadratic, told to a `Curvature` and kept in a list."""

    def __init__(self, size: int, most: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.most = most
        self.diagonal = torch.rand(size, generator=self.random, dtype=torch.float64).to(dtype) * 5 + 0.1
        self.curvature = Curvature(size, most, dtype, CPU)
        self.x = torch.randn(size, generator=self.random, dtype=torch.float64).to(dtype)
        self.gradient = self.diagonal * self.x
        self.pairs: list[Pair] = []

    def step(self, length: float = 0.3) -> None:
        s = (torch.randn(len(self.x), generator=self.random, dtype=torch.float64) * length).to(self.x)
        after = self.diagonal * (self.x + s)
        assert self.curvature.add(s, self.gradient, after)
        self.pairs = [*self.pairs, (s, after - self.gradient)][-self.most :]
        self.x, self.gradient = self.x + s, after

    def times(self) -> torch.Tensor:
        return self.curvature.times(self.gradient, torch.empty_like(self.x))

    def error(self) -> float:
        expected = two_loops(self.pairs, self.gradient)
        return float((self.times().double() - expected).norm() / expected.norm())


@given(st.integers(1, 40), st.integers(1, 8), st.lists(st.booleans(), max_size=25), st.integers(0, 100))
@settings(deadline=None, max_examples=60)
def test_the_direction_is_that_of_the_two_loops(size: int, most: int, asks: list[bool], seed: int) -> None:
    walk = Walk(size, most, seed=seed)
    for ask in asks:
        walk.step()
        if ask:
            walk.times()
    assert walk.error() < 1e-9
    assert len(walk.curvature) == len(walk.pairs)


@pytest.mark.rows
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_more_elements_than_a_block(dtype: torch.dtype, tolerance: float) -> None:
    walk = Walk(algebra.BLOCK * 2 + 17, 3, dtype)
    for _ in range(5):
        walk.step()
        assert walk.error() < tolerance


def test_a_pair_without_positive_curvature_is_refused_and_changes_nothing() -> None:
    walk = Walk(10, 2)
    for _ in range(3):
        walk.step()
    expected = walk.times()
    s = torch.ones(10, dtype=torch.float64)
    assert not walk.curvature.add(s, walk.gradient, walk.gradient - s)
    assert not walk.curvature.add(s, walk.gradient, walk.gradient)
    assert not walk.curvature.add(s, walk.gradient, walk.gradient * torch.nan)
    torch.testing.assert_close(walk.times(), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("most", [2, 3, 5])
def test_state_goes_to_another_one_with_more_or_less_room(most: int) -> None:
    walk = Walk(12, 3)
    for _ in range(5):
        walk.step()
    other = Curvature(12, most, torch.float64, CPU)
    other.load_state_dict(walk.curvature.state_dict())
    expected = two_loops(walk.pairs[-most:], walk.gradient)
    torch.testing.assert_close(other.times(walk.gradient, torch.empty_like(expected)), expected)
    with pytest.raises(ValueError, match="pairs of 12 parameters; here are 13"):
        Curvature(13, most, torch.float64, CPU).load_state_dict(walk.curvature.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_threads_does_not_change_a_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "LARGE", 1)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            walk = Walk(algebra.BLOCK * 5 + 3, 2, dtype)
            for _ in range(3):
                walk.step()
                walk.times()
            vector = walk.times()
            found.append((vector, algebra.dot(vector, walk.x), algebra.norm(vector), algebra.absolute_sum(vector)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        assert other[1:] == found[0][1:]
