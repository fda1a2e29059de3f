"""Seeds the random generators for each chunk, so that all evaluations of a step see one function."""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# The state of MT19937 in memory: 624 words, and the position among them.
_State = ctypes.c_char * (625 * 4)
# The same of Python's generator, which has the position first; its `getstate` makes 625 numbers of it, one by one.
_python = _State.from_address(id(random._inst) + object.__basicsize__)
# Unused generators.
_spare: list[Any] = []


class NumpyDraws:
    """The state of NumPy's global generator when this was made, to be set aside and restored.

    `get_state` and `set_state` go through 624 numbers one by one, which takes a tenth of a millisecond each. Replacing
    the bit generator takes a microsecond, but NumPy then forgets the second of a pair of normal draws, which it keeps
    for the next call. Hence that one is requested first.
    """

    def __init__(self) -> None:
        self._generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._state: Any = None  # if the generator alone is not the complete state
        self._other: Any = None  # the generator in its place

    def put_aside(self) -> None:
        """Put another generator in its place."""
        if type(self._generator) is not np.random.MT19937:
            self._state = np.random.get_state(legacy=False)
        elif (second := _second_of_pair(self._generator)) is not None:
            self._state = {**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": second}
        self._other = _spare.pop() if _spare else np.random.MT19937(0)
        np.random.set_bit_generator(self._other)  # type: ignore[attr-defined]

    def put_back(self) -> None:
        """Restore the generator and its state."""
        np.random.set_bit_generator(self._generator)  # type: ignore[attr-defined]
        if self._state is not None:
            np.random.set_state(self._state)
        if self._other is not None:
            _spare.append(self._other)


def _second_of_pair(generator: Any) -> float | None:
    """Take the normal draw that NumPy keeps, and return it; None if there is none. Only then a draw moves the
    generator, which is undone."""
    state = _State.from_address(generator.ctypes.state_address)
    before = state.raw
    draw = float(np.random.standard_normal())
    if state.raw == before:
        return draw
    np.random.standard_normal()  # the second one of the pair that was just made
    state.raw = before
    return None


def seed_draws(seed: int, step: int, chunk: int) -> None:
    """Seed torch, NumPy's global generator and `random` from `(seed, step, chunk)` alone.

    So the state is the same in each evaluation of a step, in any process, and differs in the next step.
    """
    digest = hashlib.blake2b(struct.pack("<QQQ", seed % 2**64, step, chunk), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def generator_states() -> tuple[object, ...]:
    """Return what changes with every draw from the generators that `seed_draws` has seeded."""
    numpy: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    own = type(numpy) is np.random.MT19937
    cards = _cuda_states()
    return (
        _State.from_address(numpy.ctypes.state_address).raw if own else str(numpy.state),
        _python.raw if _is_known else random.getstate(),
        torch.default_generator.get_state().numpy().tobytes(),
        *([state.numpy().tobytes() for state in cards] if cards else ()),
    )


class Draws:
    """The random draws of chunks, which `seed`, step and chunk determine. `looks`: whether a chunk draws is to be found
    out; `seeds` False: somebody compares the generators' states instead (`Undrawn`)."""

    def __init__(self, seed: int) -> None:
        self.seeds, self.looks, self._seed = True, False, seed
        self._states: tuple[object, ...] = ()  # at the beginning of the chunk

    def begin(self, step: int, chunk: int) -> None:
        """Begin a chunk."""
        if self.seeds:
            seed_draws(self._seed, step, chunk)
        if self.looks:
            self._states = generator_states()

    @property
    def found(self) -> bool:
        """Tell whether the chunk at hand has drawn random numbers, where that is looked for."""
        return self._states != generator_states()


class Undrawn:
    """The states of the generators before code that probably draws nothing, to find out whether it did.

    Comparing them takes a third of the time that it takes to set them aside, seed and restore them. So what has not
    drawn in its last evaluation is not seeded in the next one; if it has drawn after all, it is evaluated again.
    """

    def __init__(self) -> None:
        numpy: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self.is_known = _is_known and type(numpy) is np.random.MT19937
        if self.is_known and (second := _second_of_pair(numpy)) is not None:  # which no state of a generator shows
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": second})
            self.is_known = False
        self._address = numpy.ctypes.state_address if self.is_known else 0
        self._states: tuple[Any, ...] = generator_states() if self.is_known else ()

    def restore(self) -> bool:
        """Return whether something was drawn, after restoring the states."""
        if generator_states() == self._states:
            return False
        numpy, python, *torchs = self._states
        _State.from_address(self._address).raw, _python.raw = numpy, python
        set_torch_states([torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in torchs])
        return True


def torch_states() -> list[torch.Tensor]:
    """Return the states of torch's generators: the CPU's, then one for each card."""
    return [torch.default_generator.get_state(), *_cuda_states()]


def set_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Set what `torch_states` has returned."""
    cpu, *cards = states
    torch.default_generator.set_state(cpu)
    if cards:
        torch.cuda.set_rng_state_all(cards)


def _cuda_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


class draws_kept:
    """Restores the random states of torch, NumPy and `random` at the end of the body. The body must seed what it draws;
    NumPy uses another generator there."""

    def __enter__(self) -> None:
        self._torch, self._numpy, self._python = torch.get_rng_state(), NumpyDraws(), random.getstate()
        self._cards = _cuda_states()
        try:
            self._numpy.put_aside()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._torch)
        self._numpy.put_back()
        random.setstate(self._python)
        if self._cards:
            torch.cuda.set_rng_state_all(self._cards)


_is_known = struct.unpack("<625I", _python.raw) == (random.getstate()[1][-1], *random.getstate()[1][:-1])
