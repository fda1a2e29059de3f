"""The user's module as an optimizer sees it: one vector of parameters, one of gradients, and the remaining state."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from batchopt._program.flatten import check_hooks, check_trained, flatten, moved, registrations, replaced
from batchopt_workers.evaluate.state import ModuleState
from batchopt_workers.wire.layout import Layout


class Gradient:
    """df/dX (`vector`: shape `(n,)`, X's dtype and device), and the part of each parameter, over the same memory."""

    def __init__(self, x: torch.Tensor, layout: Layout) -> None:
        self.vector = torch.zeros_like(x)
        self.views = layout.views(self.vector)
        self.loan: weakref.ref[npt.NDArray[np.uint8]] | None = None

    @property
    def lent(self) -> bool:
        """Tell whether a tensor still uses the lent memory."""
        return self.loan is not None and self.loan() is not None

    def lend(self) -> torch.Tensor:
        """Return the vector as another tensor over the same memory, which is lent as long as a tensor uses it; on an
        accelerator return a copy."""
        if self.vector.device.type != "cpu" or not self.vector.numel():
            return self.vector.clone()
        memory = self.vector.view(torch.uint8).numpy()
        self.loan = weakref.ref(memory)  # kept alive only by the storages of those tensors
        return torch.frombuffer(memory, dtype=self.vector.dtype)


class FlatModule:
    """A module whose trainable `parameters` are views of `flat.vector` (X), and whose gradients are views of `gradient`
    (df/dX); `buffers` is its state during a step."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Raise `TypeError` or `ValueError` for a module that cannot be flattened, before it is changed."""
        self.module = module
        self.flat, self.parameters = flatten(module)
        self.named = [(slot.name, p) for slot, p in zip(self.flat.layout.slots, self.parameters, strict=True)]
        self._registrations = registrations(module, self.parameters)
        # the memory of df/dX, and earlier ones that are, or until recently were, lent
        self._gradients = [Gradient(self.flat.vector, self.flat.layout)]
        self.buffers = ModuleState(module)

    @property
    def x(self) -> torch.Tensor:
        """X: shape `(n,)`."""
        return self.flat.vector

    @property
    def gradient(self) -> torch.Tensor:
        """df/dX: shape `(n,)`."""
        return self._gradients[0].vector

    def lend_gradient(self) -> torch.Tensor:
        """Return df/dX as a tensor that no later evaluation overwrites: those use other memory as long as a tensor uses
        this."""
        return self._gradients[0].lend()

    def renew_gradient(self) -> Gradient:
        """Return memory for df/dX that is not lent, whose vector is then `gradient`; if possible memory that was
        returned, since new memory is slow."""
        first = self._gradients[0]
        if first.loan is not None and first.lent:
            lent = [gradient for gradient in self._gradients if gradient.lent]
            free = next((gradient for gradient in self._gradients if not gradient.lent), None)
            self._gradients = [free or Gradient(self.flat.vector, self.flat.layout), *lent]
        return self._gradients[0]

    def resync(self) -> bool:
        """Copy into X the values of parameters that were given other memory; tell whether one has a hook, for which
        `check_hooks` raises.

        Raise `BatchoptError` if that is impossible, and for a parameter that is another object than before.
        """
        hooked = False
        for owner, key, name, parameter in self._registrations:
            held = owner._parameters  # not a dict if torch.jit made it
            if key not in held or held[key] is not parameter:
                raise replaced(name)
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                hooked = True
        if self.flat.vector.data_ptr() != self.flat.base:
            raise moved()
        if rebound := self.flat.rebound(self.parameters):
            self.flat.take_over(self.module, self.parameters, rebound)
        return hooked

    def check(self) -> None:
        """Raise `BatchoptError` unless X is what the module trains, `ValueError` for a parameter with a hook, which
        would only run in this process."""
        if self.resync():
            check_hooks(self.named)
        check_trained(self.module, self.parameters)

    def written(self) -> None:
        """Note that X was written as a vector: graphs that need earlier values can no longer be differentiated."""
        torch.autograd.graph.increment_version(self.parameters)

    def bind(self) -> None:
        """Make all parameters views of X again, whatever they hold."""
        self.flat.bind(self.parameters)

    def show_gradients(self, used: bytes | None = None) -> None:
        """Make every parameter's `.grad` the view of df/dX; None if its entry in `used` is 0."""
        for i, (parameter, view) in enumerate(zip(self.parameters, self._gradients[0].views, strict=True)):
            parameter.grad = view if used is None or used[i] else None

    @contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """Restore each `.grad` after the body, even if it is df/dX, which the body writes."""
        gradients = [parameter.grad for parameter in self.parameters]
        for i, (gradient, view) in enumerate(zip(gradients, self._gradients[0].views, strict=True)):
            if gradient is not None and gradient.data_ptr() == view.data_ptr():
                gradients[i] = gradient.clone()
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
