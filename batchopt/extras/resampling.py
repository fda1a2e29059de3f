"""Resampling of collocation points where the residuals are large."""

from __future__ import annotations

import hashlib
import math
import struct
from numbers import Real
from typing import Any

import torch

from batchopt.evaluations import Evaluations
from batchopt.extending import arguments, as_tensors, is_tensor, items_of, map_tensors, position, read_count, tensors_in


def resample(
    opt: Evaluations,
    term: str | None,
    candidates: Any,
    *,
    samples: int,
    k: float = 1.0,
    c: float = 1.0,
    keep: Any = None,
    seed: int | None = None,
) -> Any:
    """Draw points of a term from `candidates`, preferring those with large residuals, for the term's entry of the next
    batch.

    A candidate with the residuals r has the probability ``p ∝ |r|ᵏ / mean(|r|ᵏ) + c``, where ``|r|`` is the Euclidean
    norm over the sample's numbers and the mean is over the candidates: the residual-based adaptive distribution of Wu,
    Zhu, Tan, Kartha and Lu, "A comprehensive study of non-adaptive and residual-based adaptive sampling for
    physics-informed neural networks", Computer Methods in Applied Mechanics and Engineering 403, 2023. All points are
    new (RAD there), or added to those kept (RAR-D there).

    Args:
        opt: its workers evaluate the residuals of all candidates at the current parameters; it is otherwise unchanged.
        term: the name of a `Term(residual=...)`; None without terms, if the criterion is `torch.nn.MSELoss`.
        candidates: inputs, or a tuple `(inputs, targets)`: tensors in tuples, mappings and dataclasses, with a row for
            each candidate. Inputs that are a tuple themselves go into another one: `((x, t),)`.
        samples: number of points to draw, without replacement.
        k: 0 or more; 0 is the uniform distribution, a large one prefers the largest residuals.
        c: 0 or more: the larger, the more uniform.
        keep: points that come before the drawn ones, in the structure of the candidates.
        seed: of the draw. Default: derived from opt's seed, its `position` and the term's name, so that a run that is
            paused, or resumes from a checkpoint, has the same points as an uninterrupted one.

    Returns rows of the candidates in their order and structure. With `chunk_size` they are the same for any number of
    workers. Without it, residuals may differ in their last bits, and the same points are drawn unless two of them are
    equally likely up to these. Raises `ValueError` or `TypeError` for arguments that cannot work, for a term whose
    residuals are not known, and for a residual that is not finite, with the number of its candidate; and what
    `BatchOptimizer.residuals` raises.

    >>> terms = {"equation": batchopt.Term(residual=lambda net, x, _: net(x) - torch.exp(x))}
    >>> with batchopt.BatchOptimizer(torch.nn.Linear(1, 1), terms=terms) as opt:
    ...     points = batchopt.resample(opt, "equation", torch.rand(1000, 1), samples=100)
    >>> points.shape
    torch.Size([100, 1])
    """
    entry, kept = _read(candidates), None if keep is None else _read(keep)
    size = _check_rows("candidates", entry)
    if kept is not None:
        _check_rows("keep", kept)
        _check_alike(kept, entry)
    if read_count("samples", samples) > size:
        raise ValueError(f"`samples` must be at most the number of candidates, {size}; got {samples}")
    k, c = _read_factor("k", k), _read_factor("c", c)
    number = _seed_of(opt, term) if seed is None else read_count("seed", seed, least=0)
    weights = _weights(_sizes(opt, term, entry), k, c, term)
    if int((weights > 0).sum()) < samples:
        raise ValueError(
            f"only {int((weights > 0).sum())} of {size} candidates have a residual other than 0, up to rounding: "
            f"{samples} cannot be drawn with c=0; let `c` be larger, or `k` smaller"
        )
    drawn = _rows(entry, _draw(weights, samples, number))
    return drawn if kept is None else _joined(kept, drawn)


# ---- the distribution


def _sizes(opt: Evaluations, term: str | None, entry: Any) -> torch.Tensor:
    """Return |r| of each candidate, in float64 on the CPU."""
    names = [*opt.weights]
    if term is None and not names:
        found = opt.residuals(*entry) if type(entry) is tuple else opt.residuals(entry)
    elif term in names:
        found = opt.residuals({term: entry})[term]
    else:
        raise ValueError(
            f"`term` must be one of {names}, got {term!r}"
            if names
            else f"`term` must be None: this BatchOptimizer has no terms; got {term!r}"
        )
    rows = found.to("cpu", torch.float64)
    scale = rows.abs().max()
    scale = scale if bool(scale.isfinite()) and float(scale) > 0.0 else torch.ones_like(scale)
    sizes: torch.Tensor = torch.linalg.vector_norm(rows / scale, dim=1) * scale  # scaled so that no square overflows
    bad = (~sizes.isfinite()).nonzero()
    if len(bad):
        where = f"candidate {int(bad[0])}" + (f" of term {term!r}" if term is not None else "")
        more = f"; {len(bad) - 1} more are not finite" if len(bad) > 1 else ""
        raise ValueError(f"the residual of {where} is {float(sizes[bad[0]])}{more}")
    return sizes


def _weights(sizes: torch.Tensor, k: float, c: float, term: str | None) -> torch.Tensor:
    """Return the probabilities up to a factor. If all residuals are 0, only `c` counts."""
    largest = float(sizes.max())
    if largest == 0.0:
        if c == 0.0:
            where = "" if term is None else f" of term {term!r}"
            raise ValueError(f"all residuals{where} are 0, which leaves nothing to prefer with c=0")
        return torch.ones_like(sizes)
    powers: torch.Tensor = torch.pow(sizes / largest, k)  # scaled so that none overflows
    return powers / powers.mean() + c


def _draw(weights: torch.Tensor, samples: int, seed: int) -> torch.Tensor:
    """Return the rows drawn, in ascending order: one by one without replacement, each by its weight among the remaining
    ones.

    Draws all at once by sorting an exponential time for each row (Efraimidis and Spirakis, "Weighted random sampling
    with a reservoir", Information Processing Letters 97, 2006). This needs no sums of the weights, whose rounding
    errors would add up: a weight that differs in its last bits only matters between two times that are equal up to
    these.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(weights), generator=generator, dtype=torch.float64)
    times = -torch.log1p(-uniform) / weights
    return torch.sort(times, stable=True).indices[:samples].sort().values


def _seed_of(opt: Evaluations, term: str | None) -> int:
    key = struct.pack("<QQ", arguments(opt)["seed"] % 2**64, position(opt)) + repr(term).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")


# ---- structures


def _read(entry: Any) -> Any:
    """Return the entry with arrays as tensors. Raises `ValueError` for a tuple that is not inputs and targets."""
    if type(entry) is not tuple:
        return as_tensors(entry)
    if len(entry) not in (1, 2):
        raise ValueError(f"a tuple of points must be (inputs,) or (inputs, targets); got {len(entry)} items")
    return tuple(map(as_tensors, entry))


def _check_rows(name: str, entry: Any) -> int:
    """Return the number of rows. Raises `TypeError` or `ValueError` unless all tensors have the same."""
    if isinstance(entry, list) or (type(entry) is tuple and any(isinstance(part, list) for part in entry)):
        raise TypeError(f"`{name}` has a list: pass tensors with a row for each point, in tuples or dicts")
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_in(entry)}
    if not sizes:
        raise TypeError(f"`{name}` must be tensors with a row for each point; got {type(entry).__name__}")
    size = next(iter(sizes))
    if len(sizes) > 1 or not size:
        raise ValueError(f"the tensors of `{name}` must have a row for each point, one at least; got {sizes} rows")
    return size


def _check_alike(kept: Any, entry: Any) -> None:
    form, needed = _form(kept), _form(entry)
    if form != needed:
        raise ValueError(f"`keep` must have the structure of `candidates`, {needed}; got {form}")


def _form(entry: Any) -> Any:
    """Return the properties that rows must share to be concatenated."""
    if is_tensor(entry):
        return f"{entry.dtype} {tuple(entry.shape[1:])} on {entry.device}"
    parts = [(key, _form(item)) for key, item in items_of(entry)]
    return (type(entry).__name__, parts) if parts else type(entry).__name__


def _rows(entry: Any, rows: torch.Tensor) -> Any:
    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()[rows.to(tensor.device)].requires_grad_(tensor.requires_grad)

    return map_tensors(take, entry)


def _joined(first: Any, then: Any) -> Any:
    leading = tensors_in(first)

    def join(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([next(leading).detach(), tensor.detach()]).requires_grad_(tensor.requires_grad)

    return map_tensors(join, then)


def _read_factor(name: str, value: Any) -> float:
    """Return the number. Raises `TypeError` or `ValueError` unless it is finite and >= 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number >= 0; got {value!r}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"`{name}` must be finite and >= 0; got {value!r}")
    return float(value)
