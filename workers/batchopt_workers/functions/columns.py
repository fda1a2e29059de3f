"""Derivatives by some elements of X, for workers that divide the columns of a Jacobian by finite differences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchopt_workers.batch.batch import Piece
from batchopt_workers.functions.simulation import columns_alone
from batchopt_workers.functions.task import PieceContext
from batchopt_workers.wire.orders import Cut


@dataclass(frozen=True)
class GradientColumns:
    """An evaluation of the loaded batch with this cut, as a sum over pieces whose samples are elements of X: each has
    df/dX by its own, and the first has the rest."""

    cut: Cut

    def __call__(self, piece: Piece, context: PieceContext) -> dict[str, torch.Tensor]:
        columns = piece.indices
        with columns_alone(context.parameters, columns):
            losses, slope, changes, used = context.evaluate(self.cut, True)
        found = {"losses": torch.tensor(losses, dtype=torch.float64), "changes": changes, "used": torch.tensor([*used])}
        if columns.start:
            found = {name: torch.full_like(tensor, -0.0) for name, tensor in found.items()}
        found["gradient"] = torch.full_like(slope, -0.0)  # which, added, changes no bit
        found["gradient"][columns.start : columns.stop] = slope[columns.start : columns.stop]
        return found


@dataclass(frozen=True)
class JacobianColumns:
    """The columns of the Jacobian of the loaded batch, with this cut, by elements of X, which are the samples: `rows`
    and, with each, all `residuals`, both of shape `(columns, residuals)`."""

    cut: Cut

    def __call__(self, piece: Piece, context: PieceContext) -> dict[str, torch.Tensor]:
        columns = piece.indices
        with columns_alone(context.parameters, columns):
            blocks = context.jacobian(self.cut)
        rows = torch.cat([block.rows for block in blocks])[:, columns.start : columns.stop].T
        residuals = torch.cat([block.residuals for block in blocks])
        return {"rows": rows.contiguous(), "residuals": residuals.expand(len(columns), -1).contiguous()}
