"""Seeds the random generators for each chunk, so that all evaluations of a step see one function."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from batchopt_workers.numpy_draws import NumpyDraws


def seed_draws(seed: int, step: int, chunk: int) -> None:
    """Seed torch, NumPy's global generator and `random` from `(seed, step, chunk)` alone.

    The same in each evaluation of a step and wherever the chunk is evaluated; another in the next step.
    """
    digest = hashlib.blake2b(struct.pack("<QQQ", seed % 2**64, step, chunk), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def has_drawn(seed: int, step: int, chunk: int) -> bool:
    """Whether a random number was drawn since `seed_draws` of the same; seeds anew to find out."""
    after = _next_draws()
    seed_draws(seed, step, chunk)
    return after != _next_draws()


def _next_draws() -> tuple[object, ...]:
    """The next numbers of Python's and NumPy's generators, whose states are slow to read, and the states of torch's."""
    states = [torch.get_rng_state(), *_cuda_states()]
    return random.getrandbits(64), np.random.random_sample(), *(state.numpy().tobytes() for state in states)


def _cuda_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


@contextmanager
def draws_kept() -> Iterator[None]:
    """Leave the random states of torch, NumPy and `random` as they were found. In the body, which seeds what it draws,
    NumPy's has a state of its own."""
    torch_state, numpy_draws, python_state = torch.get_rng_state(), NumpyDraws(), random.getstate()
    cuda_states = _cuda_states()
    try:
        numpy_draws.put_aside()
        yield
    finally:
        torch.set_rng_state(torch_state)
        numpy_draws.put_back()
        random.setstate(python_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
