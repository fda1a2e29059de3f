"""The Hessian of f, by its products with vectors: what Newton's method asks for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from batchopt._function.function import BatchFunction
from batchopt._function.nonfinite import explain
from batchopt._machine.ownership import exclusive, undisturbed
from batchopt._mapreduce.reduce import reduce_answers
from batchopt_workers.messages import Kind


class Curved(BatchFunction):
    """f, its gradient, and its Hessian times any vector."""

    @exclusive
    @undisturbed
    def hvp(self, v: torch.Tensor) -> torch.Tensor:
        """The Hessian of f at the current parameters times `v`: a new tensor, shape `(n,)`, X's dtype.

        `v` is 1-D, as long as `parameters`, of any floating dtype; where it is not finite in X's dtype the product is NaN, and
        nothing is evaluated. The product is of the function that `evaluate` sees:
        the same chunks, draws and buffers; with `chunk_size` bit for bit for any number of workers. It takes two to
        three times as long as an evaluation, and keeps the graph of the first backward too. Gradients, `output` and
        counters other than `product_counter` are untouched; prehook runs, posthook does not. Raises `TypeError` or
        `ValueError` for another `v`, what `evaluate` raises, and `WorkerError` where the module cannot be
        differentiated twice; with `on_nonfinite="return"` a product that is not finite is returned.
        """
        batch = self._ready()
        direction = self._read_direction(v)
        if not bool(direction.isfinite().all()):
            return torch.full_like(direction, math.nan)
        with self._doing("product"), self._in_the_middle_of("a product"):
            self._backend.set_direction(direction)
            answers = self._evaluate_plan(Kind.MULTIPLY)
            product = torch.empty_like(self._flat.vector)
            whole = reduce_answers(answers, self._plan.cut.chunks, product)
        if not whole.finite and self._settings.on_nonfinite == "raise":
            with self._without_hooks():
                raise explain(
                    self._backend, self._plan.cut, batch.numbering, self._next_number, self._history, Kind.MULTIPLY
                )
        self._history = replace(self._history, products=self._history.products + 1)
        return product

    def _read_direction(self, v: Any) -> torch.Tensor:
        x = self._flat.vector
        if not isinstance(v, torch.Tensor) or not v.is_floating_point():
            given = f"a tensor of {v.dtype}" if isinstance(v, torch.Tensor) else type(v).__name__
            raise TypeError(f"`v` must be a tensor of floating-point numbers, shape ({len(x)},); got {given}")
        if v.shape != x.shape:
            raise ValueError(f"`v` must have shape ({len(x)},), as `parameters`; got {tuple(v.shape)}")
        return torch.empty_like(x).copy_(v.detach())  # laid out as in shared memory, for the same bits

    @property
    def product_counter(self) -> int:
        """Products of the Hessian with a vector so far."""
        return self._history.products
