from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchopt_workers.map.seeding import draws_kept, seed_draws

KEYS = st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
Draws = tuple[list[float], list[float], list[float]]


def draw() -> Draws:
    return torch.rand(3).tolist(), np.random.random(3).tolist(), [random.random() for _ in range(3)]


def draw_after(key: tuple[int, int, int]) -> Draws:
    with draws_kept():
        seed_draws(*key)
        return draw()


@pytest.fixture
def kept() -> Iterator[None]:
    """What a test draws outside `draws_kept` is its own affair."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@given(KEYS, KEYS, st.integers(0, 2))
@settings(deadline=None, max_examples=30)
def test_another_seed_step_or_chunk_draws_other_numbers_everywhere_and_the_same_ones_the_same(
    key: tuple[int, int, int], other: tuple[int, int, int], place: int
) -> None:
    assume((key[place] - other[place]) % 2**64 != 0)
    seed, step, chunk = (other[i] if i == place else key[i] for i in range(3))
    found = draw_after(key)
    assert found == draw_after(key)
    for one, another in zip(found, draw_after((seed, step, chunk)), strict=True):
        assert one != another


@pytest.mark.parametrize("normal_draws", [0, 1, 2, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_the_random_states_are_left_as_found_with_half_a_pair_of_normal_draws(
    kept: None, normal_draws: int, fails: bool
) -> None:
    def drawn(disturb: Callable[[], None]) -> tuple[Draws, list[float]]:
        seed_draws(0, 0, 0)
        np.random.standard_normal(normal_draws)
        disturb()
        return draw(), np.random.standard_normal(4).tolist()

    def disturb() -> None:
        for _ in range(2):
            with suppress(ZeroDivisionError), draws_kept():
                seed_draws(1, 2, 3)
                draw()
                np.random.standard_normal(normal_draws + 1)
                if fails:
                    raise ZeroDivisionError

    assert drawn(disturb) == drawn(lambda: None)


def test_a_generator_of_another_kind_is_left_as_found(kept: None) -> None:
    numpy_random: Any = np.random
    generator = numpy_random.get_bit_generator()
    try:
        numpy_random.set_bit_generator(np.random.PCG64(3))
        expected = np.random.random(5).tolist()
        numpy_random.set_bit_generator(np.random.PCG64(3))
        first = np.random.random(2).tolist()
        assert len(draw_after((1, 2, 3))) == 3
        assert [*first, *np.random.random(3).tolist()] == expected
        assert type(numpy_random.get_bit_generator()) is np.random.PCG64
    finally:
        numpy_random.set_bit_generator(generator)
