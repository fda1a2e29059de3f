"""The form of pieces that one compiled evaluation serves, and the records of what is compiled for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from batchopt_workers.batch.batch import Piece
from batchopt_workers.life.torch_settings import TorchSettings
from batchopt_workers.wire.packing import Placement, pack
from batchopt_workers.wire.structures import PLAIN, items_of, tensors_in

# Where an input of a compiled evaluation comes from: tensors of a piece, parameters, the module's statistics, and other
# tensors of the program; by their index there.
PIECE, PARAMETER, STATISTIC, TENSOR = "piece", "parameter", "statistic", "tensor"


class PieceForm(NamedTuple):
    """The common form of pieces of one term: `structure` (types, keys, and all that is no tensor), and `tensors`: for
    each its dtype, whether it requires grad, and its shape without the number of samples. `by_sample`: which tensors
    have a row for each sample."""

    term: int
    structure: object
    tensors: tuple[tuple[object, ...], ...]
    by_sample: tuple[bool, ...]


def arguments_of(piece: Piece) -> tuple[Any, Any, dict[str, Any]]:
    """Return all of a piece that f depends on."""
    return piece.inputs, piece.targets, piece.attributes


def packed(piece: Piece, form: PieceForm, most: int) -> PackedPiece:
    """Return a piece of that form without its elements; evaluations of up to `most` samples are to be served."""
    found = pack(arguments_of(piece))
    placements = tuple(map(in_rows, found.placements))
    return PackedPiece(form, found.data, placements, len(piece.indices), most)


def in_rows(placement: Placement) -> Placement:
    """Return the placement of a tensor in row-major order, as libraries read all tensors: theirs would be wrong numbers
    if another one came in another order."""
    stride = torch.empty(placement.shape, device="meta").stride()
    return replace(placement, stride=stride)


def form_of(piece: Piece) -> PieceForm | None:
    """Return the form of a piece; None if it holds something that cannot be compared."""
    data, samples, tensors, by_sample = arguments_of(piece), len(piece.indices), [], []
    for tensor in tensors_in(data):
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.grad_fn is not None:
            return None
        rows = tensor.dim() > 0 and tensor.shape[0] == samples
        tensors.append((tensor.dtype, tensor.requires_grad, tuple(tensor.shape)[rows:]))
        by_sample.append(rows)
    try:
        structure = tuple(_structure(data))
    except TypeError:
        return None
    return PieceForm(piece.term, structure, tuple(tensors), tuple(by_sample))


def _structure(data: Any) -> Iterator[object]:
    """Yield types and keys of a structure, and whatever is no tensor. Raise `TypeError` for what has no value to
    compare."""
    yield type(data)
    if isinstance(data, torch.Tensor):
        return
    if type(data) in PLAIN or isinstance(data, (torch.dtype, torch.device)):
        yield data
        return
    items = [*items_of(data)]
    if not items and not isinstance(data, (tuple, list, dict)):
        raise TypeError(f"a {type(data).__name__}")
    for key, item in items:
        yield key
        yield from _structure(item)


class Artifact(NamedTuple):
    """A compiled evaluation of pieces of one form with `fewest` to `most` samples: the library `path`, which takes
    `inputs` and returns the loss, then a gradient for each of the parameters `used`, and the new statistics `written`.
    Equal `key`s compute equal bits on one machine."""

    key: str
    path: str
    form: PieceForm
    fewest: int
    most: int
    inputs: tuple[tuple[str, int], ...]
    used: tuple[int, ...]
    written: tuple[int, ...]


class PackedPiece(NamedTuple):
    """A piece without its elements, of `samples` samples; evaluations of up to `most` are to be served."""

    form: PieceForm
    data: bytes
    placements: tuple[Placement, ...]
    samples: int
    most: int


class Request(NamedTuple):
    """Evaluations to be compiled: of a packed program with these parameters, for `pieces`, with so many threads. The
    libraries go to the `directory`, which is that of the machine where it is done."""

    program: bytes
    placements: tuple[Placement, ...]
    parameters: tuple[Placement, ...]
    pieces: tuple[PackedPiece, ...]
    settings: TorchSettings
    threads: int
    directory: str = ""


class Reply(NamedTuple):
    """For each form of pieces an artifact, or why there is none; and the seconds that it took."""

    found: dict[PieceForm, Artifact | str]
    seconds: float
