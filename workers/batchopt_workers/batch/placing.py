"""Bringing the pieces of a batch to the device on which a worker computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from batchopt_workers.batch.batch import Piece
from batchopt_workers.wire.structures import map_tensors


class Placing:
    """The pieces of a batch on a `device`, each brought there once: they are kept until `forget`, but those of tasks
    (not `keeps`), and those that are read again in each evaluation."""

    def __init__(self, device: torch.device) -> None:
        self.keeps = True
        self._device = device
        self._pieces: dict[tuple[int, int, int], Piece] = {}
        self._stream: Any = None  # of copies to a card

    def forget(self) -> None:
        """Forget the pieces, because the batch or its cut was changed."""
        self._pieces = {}

    def __call__(self, piece: Piece) -> Piece:
        """Return the piece on the device."""
        if not (self.keeps and piece.kept):
            return _map_piece(self._brought, piece)
        key = piece.term, piece.indices.start, piece.indices.stop
        if key not in self._pieces:
            self._pieces[key] = _map_piece(self._brought, piece)
        return _map_piece(_leaf, self._pieces[key])

    def _brought(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        if self._device.type == "cuda" and tensor.device.type == "cpu":
            return self._sent(tensor.detach()).requires_grad_(tensor.requires_grad)
        return tensor.detach().to(self._device, copy=True).requires_grad_(tensor.requires_grad)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the card, which goes on with the piece before meanwhile."""
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            found = tensor.pin_memory().to(self._device, non_blocking=True)
        current.wait_stream(self._stream)
        found.record_stream(current)
        return found


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a new leaf of the autograd graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _map_piece(function: Callable[[torch.Tensor], torch.Tensor], piece: Piece) -> Piece:
    return dataclasses.replace(
        piece,
        inputs=map_tensors(function, piece.inputs),
        targets=map_tensors(function, piece.targets),
        attributes=map_tensors(function, piece.attributes),
    )
