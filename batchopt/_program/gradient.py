"""df/dX in one vector, whose memory may be lent to autograd, which makes `.grad` of it."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt
import torch

from batchopt_workers.layout import Layout


class Gradient:
    """df/dX (`vector`: shape `(n,)`, X's dtype and device), and the part of each parameter, which shares its memory."""

    def __init__(self, x: torch.Tensor, layout: Layout) -> None:
        self.vector = torch.zeros_like(x)
        self.views = layout.views(self.vector)
        self._loan: weakref.ref[npt.NDArray[np.uint8]] | None = None

    @property
    def lent(self) -> bool:
        """Whether a tensor is left over the memory that was lent."""
        return self._loan is not None and self._loan() is not None

    def lend(self) -> torch.Tensor:
        """The vector as another tensor over the same memory, which is lent for as long as there is a tensor over it;
        on an accelerator a copy."""
        if self.vector.device.type != "cpu" or not self.vector.numel():
            return self.vector.clone()
        memory = self.vector.view(torch.uint8).numpy()
        self._loan = weakref.ref(memory)  # kept alive by the storages of those tensors, and by nothing else
        return torch.frombuffer(memory, dtype=self.vector.dtype)


class Gradients:
    """Where df/dX is written: `current`, and what was it before and is still lent, or was until now."""

    def __init__(self, x: torch.Tensor, layout: Layout) -> None:
        self._x, self._layout = x, layout
        self.current = Gradient(x, layout)
        self._others: list[Gradient] = []

    def renew(self) -> None:
        """Make `current` one that is not lent; one that was given back where there is one, since new memory is slow."""
        if not self.current.lent:
            return
        lent = [self.current, *(other for other in self._others if other.lent)]
        free = (other for other in self._others if not other.lent)
        self.current = next(free, None) or Gradient(self._x, self._layout)
        self._others = lent
