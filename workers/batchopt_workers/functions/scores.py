"""Scores: the gradients of the losses of single samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call, grad, vmap

from batchopt_workers.batch.weighting import Denominators
from batchopt_workers.evaluate.objective import LossFunction, Objective
from batchopt_workers.functions.bound import Bound
from batchopt_workers.wire.structures import map_tensors, tensors_in

# Numbers in the scores that are held at a time.
ROOM = 2**22


@dataclass(frozen=True)
class ScoreSums:
    """A function of a chunk, for `total`: the sum of the scores of its samples, shape `(n,)`, and of their outer
    products, shape `(n, n)`, in float64.

    criterion, loss_fn: as for an `Objective`, called with one sample, as a batch. names: of the parameters by which it
    is differentiated. weight: the factor of all losses; denominators: those of the samples.
    """

    criterion: Callable[..., Any] | None
    loss_fn: LossFunction | None
    names: Sequence[str]
    weight: float = 1.0
    denominators: Denominators | None = None

    def __call__(self, module: torch.nn.Module, inputs: Any, targets: Any) -> dict[str, torch.Tensor]:
        bound, own = Bound(module, self._loss), dict(module.named_parameters())
        at, leaves = {f"module.{name}": own[name].detach() for name in self.names}, [*tensors_in((inputs, targets))]

        def one(trained: dict[str, torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
            given = iter(rows)
            sample = map_tensors(lambda _: next(given).unsqueeze(0), (inputs, targets))
            loss: torch.Tensor = functional_call(bound, trained, sample)
            return loss.reshape(())

        size, scores = sum(tensor.numel() for tensor in at.values()), vmap(grad(one), (None, *[0] * len(leaves)))
        total, products = torch.zeros(size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
        each = 1.0 if self.denominators is None else torch.as_tensor(self.denominators(inputs, targets)).double().cpu()
        step = max(ROOM // size, 1)
        for start in range(0, len(leaves[0]), step):
            found = scores(at, *[leaf[start : start + step] for leaf in leaves])
            rows = torch.cat([g.reshape(len(g), -1) for g in found.values()], 1).to("cpu", torch.float64) * self.weight
            rows *= each[start : start + step, None] if isinstance(each, torch.Tensor) else each
            total += rows.sum(0)
            products.addmm_(rows.T, rows)
        return {"scores": total, "products": products}

    def _loss(self, module: torch.nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        return Objective(module, self.criterion, self.loss_fn)(inputs, targets)[1]
