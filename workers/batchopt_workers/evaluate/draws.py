"""Seeds the random generators for each chunk, so that all evaluations of a step see one function.

Forward and loss draw from torch's generators. NumPy's global one and `random` are seeded where other code of the user
runs: datasets, collate functions, hooks and functions of the batch.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class Draws:
    """The random draws of chunks, which `seed`, step and chunk determine. `looks`: whether a chunk draws is to be found
    out; `others`: NumPy and `random` are seeded too."""

    def __init__(self, seed: int) -> None:
        self.looks = self.others = False
        self._seed = seed % 2**64
        self._states: tuple[object, ...] = ()  # at the beginning of the chunk or the forward
        self._drew = False  # before that

    def begin(self, step: int, chunk: int, part: int = 0) -> None:
        """Begin a chunk, or the forward of a term there: seed from `(seed, step, chunk)` alone. So the state is the
        same in each evaluation of a step, in any process, and differs in the next step."""
        if self.looks:
            self._drew = bool(part) and self.found
        key = struct.pack("<QQQ", self._seed, step, chunk + (part << 32))
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(number)
        if self.others:
            np.random.seed(number % 2**32)
            random.seed(number)
        if self.looks:
            self._states = self._now()

    def _now(self) -> tuple[object, ...]:
        cpu, *cards = torch_states()
        own = cpu.numpy().tobytes(), *map(torch.Tensor.tolist, cards)
        return (*own, *other_states()) if self.others else own

    @property
    def found(self) -> bool:
        """Tell whether the chunk at hand has drawn random numbers, where that is looked for."""
        return self._drew or self._states != self._now()


def torch_states() -> list[torch.Tensor]:
    """Return the states of torch's generators: the CPU's, then one for each card."""
    cards: list[torch.Tensor] = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cards = torch.cuda.get_rng_state_all()
    return [torch.default_generator.get_state(), *cards]


def set_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Set what `torch_states` has returned."""
    cpu, *cards = states
    torch.default_generator.set_state(cpu)
    if cards:
        torch.cuda.set_rng_state_all(cards)


def other_states() -> tuple[object, ...]:
    """Return what changes with every draw from NumPy's global generator and from `random`."""
    return pickle.dumps(np.random.get_state(legacy=False)), random.getstate()


class draws_kept:
    """Restores the random states of torch, NumPy and `random` at the end of the body, which must seed what it draws;
    NumPy uses another generator there."""

    def __enter__(self) -> None:
        numpy: Any = np.random
        self._torch = torch_states()
        self._others = numpy.get_bit_generator(), np.random.get_state(legacy=False), random.getstate()
        try:
            numpy.set_bit_generator(np.random.MT19937(0))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        generator, state, python = self._others
        set_torch_states(self._torch)
        np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
        np.random.set_state(state)  # with the second of a pair of normal draws, which the generator has not
        random.setstate(python)
