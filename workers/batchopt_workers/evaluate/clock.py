"""The evaluations at which something is compared: 1, 2, 4, 8, ... of a program."""

from __future__ import annotations

# Comparisons that may be made at any time, and the evaluations that earn another one.
AT_FIRST, EARNED = 5, 32


class Clock:
    """Counts evaluations, by their numbers, since the program was changed. `is_due`: at the present one something is
    compared.

    What is wrong shows early, or grows; and the longer something has gone well, the rarer comparisons are. Where a
    program is changed again and again, as by an attribute that counts steps, an evaluation in 32 is compared.
    """

    def __init__(self) -> None:
        self._number = -1
        self._of_all = self._of_program = self._compared = 0
        self.is_due = False

    def begin(self, number: int) -> bool:
        """Begin an evaluation, or go on with it; tell whether it is another one than before."""
        if number == self._number:
            return False
        self._number, self._of_all, count = number, self._of_all + 1, self._of_program + 1
        self._of_program = count
        self.is_due = count & (count - 1) == 0 and self._compared < AT_FIRST + self._of_all // EARNED
        self._compared += self.is_due
        return True

    def restart(self) -> None:
        """Count from 1 again: there is another program, or code has run that may have changed it."""
        self._of_program = 0
