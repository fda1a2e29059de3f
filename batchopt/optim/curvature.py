"""The limited-memory BFGS matrix in compact form: an approximate inverse Hessian built from the last steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchopt._machine.cores import torch_threads
from batchopt.optim.algebra import add, combination, copy, dots, products, products_among, scaled

Doubles = npt.NDArray[np.float64]

# A pair along which the slope changed by a smaller fraction than this is rounding only (the rule of L-BFGS-B).
LEAST = 2.3e-16


class _Known(NamedTuple):
    """Known products of the pairs; small, and replaced, never written. Matrices are allocated by torch, since the bits
    of products depend on the alignment of an address."""

    first: int  # the slot of the oldest pair; those of later pairs follow, in a ring
    sy: Doubles  # s_i . y_j for i <= j
    yy: Doubles  # y_i . y_j
    with_seen: Doubles  # s_i and y_i (shape `(2, pairs)`) times the vector that H last multiplied

    @property
    def pairs(self) -> int:
        return len(self.sy)

    def without_oldest(self, slots: int) -> _Known:
        return _Known((self.first + 1) % slots, self.sy[1:, 1:], self.yy[1:, 1:], self.with_seen[:, 1:])

    def with_pair(self, pair: _Pair, columns: Doubles) -> _Known:
        """Add `pair`; `columns`: the older s and y (shape `(2, pairs)`) times its y."""
        count = self.pairs
        sy, yy = (torch.zeros(count + 1, count + 1, dtype=torch.float64).numpy() for _ in range(2))
        sy[:count, :count], yy[:count, :count] = self.sy, self.yy
        sy[:count, count], yy[:count, count] = columns
        yy[count, :count] = columns[1]
        sy[count, count], yy[count, count] = pair.sy, pair.yy
        return _Known(self.first, sy, yy, self.with_seen)


class _Pair(NamedTuple):
    """A pair whose products with the older ones are still missing: they follow from those with the gradient `after` it,
    if that is what H multiplies next."""

    slot: int
    sy: float
    yy: float
    after: torch.Tensor | None


_NONE = np.zeros((0, 0))
_NO_PRODUCTS = np.zeros((2, 0))
_NOTHING = _Known(0, _NONE, _NONE, _NO_PRODUCTS)


class Curvature:
    """The last `most` pairs of s (a step) and y (the change of the gradient), and the matrix H that they define.

    H is the approximation of the inverse Hessian of Byrd, Nocedal and Schnabel, "Representations of quasi-Newton
    matrices and their use in limited memory methods", Mathematical Programming 63, 1994, equation 3.1. All pairs are
    rows of one matrix, s and y in turn (shape `(2 * most, size)`), which is read twice for a product: once for the
    scalar products of all rows with the vector, once for the combination of all rows.

    The products of the old rows with a new y are differences of those with two gradients (section 3.3 there), unless y
    is so much shorter than the gradients that digits would be lost: then the rows are read once more.
    """

    def __init__(self, size: int, most: int, dtype: torch.dtype, device: torch.device) -> None:
        self.most = most
        self._rows = torch.empty(2 * most, size, dtype=dtype, device=device)
        self._y = torch.empty(size, dtype=dtype, device=device)
        self._enough = torch.finfo(dtype).eps ** 0.25  # of |y| / |gradient|
        self._known = _NOTHING
        self._pair: _Pair | None = None
        self._seen: torch.Tensor | None = None  # the vector that H last multiplied
        self.changes = 0  # how often pairs were added or dropped

    def __len__(self) -> int:
        return self._known.pairs + (self._pair is not None)

    def clear(self) -> None:
        """Drop all pairs."""
        self.changes += 1
        self._known, self._pair, self._seen = _NOTHING, None, None

    def add(self, s: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Add the step `s` and the gradients `before` and `after` it (shapes `(size,)`), replacing the oldest pair if
        there are `most`. Return False, and change nothing, if the curvature along `s` is not positive. `after` must
        stay unchanged until H multiplies it, or another pair is added."""
        self._known, self._pair = self._completed(), None
        add(after, before, -1.0, out=self._y)
        sy, yy, sg, gg = dots((s, self._y), (self._y, self._y), (s, before), (after, after))
        if not (LEAST * abs(sg) < sy < math.inf and 0 < yy < math.inf):
            return False
        slot = (self._known.first + self._known.pairs) % self.most
        if self._known.pairs == self.most:
            self._known = self._known.without_oldest(self.most)
        self.changes += 1
        copy(s, self._rows[2 * slot])
        copy(self._y, self._rows[2 * slot + 1])
        chained = before is self._seen and yy > self._enough**2 * gg
        self._pair = _Pair(slot, sy, yy, after if chained else None)
        return True

    def _completed(self, columns: Doubles | None = None) -> _Known:
        """Return the known products including those of the new pair; `columns` as in `_Known.with_pair`."""
        if self._pair is None:
            return self._known
        if columns is None:
            columns = self._with_rows(self._rows[2 * self._pair.slot + 1])[:, :-1]
        return self._known.with_pair(self._pair, columns)

    def _with_rows(self, vector: torch.Tensor) -> Doubles:
        """Return s and y of all pairs, the oldest first (shape `(2, pairs)`), times `vector`."""
        if not len(self):
            return _NO_PRODUCTS
        found = products(self._rows[: 2 * len(self)], vector).numpy()
        return _turned(found.reshape(-1, 2), self._known.first).T

    def times(self, vector: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return `-H @ vector`, in `out` (shapes `(size,)`); `vector` must stay unchanged until a pair is added."""
        found, pair = self._with_rows(vector), self._pair
        chained = pair is not None and pair.after is vector
        with _quietly():
            known = self._completed(found[:, :-1] - self._known.with_seen if chained else None)
        self._known, self._pair, self._seen = known._replace(with_seen=found), None, vector
        if not len(self):
            return scaled(vector, -1.0, out)
        with _quietly():
            scale, weights = _weights(self._known)
        scaled(vector, -scale, out)
        weights = _turned(weights, -self._known.first).reshape(-1)
        return combination(torch.tensor(weights), self._rows[: 2 * len(self)], out)

    def step(
        self, vector: torch.Tensor, held: torch.Tensor, moves: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step s that is `moves` where `held`, and the gradient of the model after it, `vector + B s`, which
        is 0 elsewhere: B is the inverse of H; without pairs, of `scale`. All shapes `(size,)`.

        The small system is that of Byrd, Lu, Nocedal and Zhu, "A limited memory algorithm for bound constrained
        optimization", SIAM Journal on Scientific Computing 16, 1995, for the inverse.
        """
        known = self._known = self._completed()
        self._pair = self._seen = None
        rows = self._rows[: 2 * len(self)]
        if len(self):
            scale = float(known.sy[-1, -1] / known.yy[-1, -1])
        right = torch.where(held, -moves / scale, vector)
        image = scaled(right, scale, torch.empty_like(right))
        if len(self):
            order = torch.arange(len(rows)).view(-1, 2).roll(-known.first, 0).T.reshape(-1)  # as in `_with_rows`
            gram = products_among(rows, held.nonzero()[:, 0])[order[:, None], order]
            weights = torch.empty(len(rows), dtype=torch.float64)
            weights[order] = _restricted(known, scale, gram, torch.from_numpy(self._with_rows(right).reshape(-1)))
            combination(weights, rows, image)
        return torch.where(held, moves, -image), torch.where(held, vector + (2 * moves + image) / scale, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors: the pairs, the oldest first (shape `(pairs, 2, size)`), their products, and the position of
        the oldest one in the ring, which fixes the order of sums."""
        known = self._completed()
        pairs = torch.roll(self._rows.view(self.most, 2, -1)[: len(self)], -known.first, dims=0)
        return {
            "pairs": pairs,
            "sy": torch.tensor(known.sy),
            "yy": torch.tensor(known.yy),
            "first": torch.tensor(known.first),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `state_dict` returned, as many pairs as fit. Raises `ValueError` for pairs of another size."""
        pairs = state["pairs"]
        if pairs.shape[1:] != (2, self._rows.shape[1]):
            raise ValueError(f"the state has pairs of {pairs.shape[-1]} parameters; here are {self._rows.shape[1]}")
        dropped = max(len(pairs) - self.most, 0)
        kept = pairs[dropped:]
        first = int(state.get("first", torch.tensor(0))) if len(pairs) == self.most else 0
        self._rows[: 2 * len(kept)] = torch.roll(kept, first, dims=0).reshape(-1, kept.shape[-1]).to(self._rows)
        sy, yy = (state[key].cpu()[dropped:, dropped:].double().clone().numpy() for key in ("sy", "yy"))
        self._known = _Known(first, sy, yy, np.zeros((2, len(kept))))
        self._pair = self._seen = None
        self.changes += 1


def _quietly() -> np.errstate:
    """Silence NumPy's warnings: values that are not finite are detected in the direction."""
    return np.errstate(all="ignore")


def _turned(rows: Doubles, by: int) -> Doubles:
    """Rotate the rows so that row `by` comes first."""
    return np.concatenate((rows[by:], rows[:by])) if by else rows


def _weights(known: _Known) -> tuple[float, Doubles]:
    """Return the factors of `-H @ vector`: that of `-vector`, and those of s and y (shape `(pairs, 2)`)."""
    with_s, with_y = known.with_seen
    diagonal = known.sy.diagonal()
    scale = float(diagonal[-1] / known.yy[-1, -1])
    sy, yy = torch.from_numpy(known.sy), torch.from_numpy(known.yy)  # NumPy's products would start threads
    once = torch.linalg.solve_triangular(sy, torch.from_numpy(with_s)[:, None], upper=True)[:, 0]
    of_y = once.numpy()
    inner = diagonal * of_y + scale * (torch.mv(yy, once).numpy() - with_y)
    of_s = torch.linalg.solve_triangular(sy.T, torch.from_numpy(inner)[:, None], upper=False)[:, 0].numpy()
    return scale, np.stack((-of_s, scale * of_y), axis=1)


def _restricted(known: _Known, scale: float, gram: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the weights of s and y (shape `(2 * pairs,)`) in the image of a vector whose products with them are
    `right`; `gram`: their products among each other, over the elements that are held."""
    count = known.pairs
    sy, yy = torch.from_numpy(known.sy), torch.from_numpy(known.yy)
    matrix = gram.clone()
    matrix[:count, count:] -= sy
    matrix[count:, :count] -= sy.T
    matrix[count:, count:] -= yy + sy.diagonal().diag() / scale
    sizes = yy.diagonal().sqrt()  # pairs differ by orders of magnitude
    sizes = torch.cat((scale * sizes, sizes))
    with torch_threads(1):
        found: torch.Tensor = torch.linalg.solve_ex(matrix / sizes / sizes[:, None], right / sizes)[0]
    return scale * found / sizes
