"""NumPy's global generator, put aside and put back.

`numpy.random.get_state` and `set_state` go through 624 numbers one by one, which takes a tenth of a millisecond each.
To put another bit generator in its place takes a microsecond, but lets NumPy forget the second one of a pair of normal
draws, which it keeps for the next call. So that one is asked for first.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

# Bytes of the state of MT19937 in memory: 624 words, and the position among them.
_BYTES = 625 * 4
# Generators that nobody uses now.
_spare: list[Any] = []


class NumpyDraws:
    """NumPy's global generator as it was when this was made."""

    def __init__(self) -> None:
        self._generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._state: Any = None  # where the generator alone is not all of it
        self._other: Any = None  # what is in its place

    def put_aside(self) -> None:
        """Let another one be in its place."""
        if type(self._generator) is not np.random.MT19937:
            self._state = np.random.get_state(legacy=False)
        elif (second := _second_of_pair(self._generator)) is not None:
            self._state = {**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": second}
        self._other = _spare.pop() if _spare else np.random.MT19937(0)
        np.random.set_bit_generator(self._other)  # type: ignore[attr-defined]

    def put_back(self) -> None:
        """Let it go on where it was."""
        np.random.set_bit_generator(self._generator)  # type: ignore[attr-defined]
        if self._state is not None:
            np.random.set_state(self._state)
        if self._other is not None:
            _spare.append(self._other)


def _second_of_pair(generator: Any) -> float | None:
    """The normal draw that NumPy keeps, which is taken from it; None if there is none. A draw moves the generator only
    then, which is undone."""
    address = generator.ctypes.state_address
    before = ctypes.string_at(address, _BYTES)
    draw = float(np.random.standard_normal())
    if ctypes.string_at(address, _BYTES) == before:
        return draw
    np.random.standard_normal()  # the second one of the pair that was just made
    ctypes.memmove(address, before, _BYTES)
    return None
