"""The Jacobian of residuals with respect to X: its rows, and products with it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.func import functional_call, vjp, vmap

from batchopt_workers.batch.batch import Columns
from batchopt_workers.functions.bound import Bound
from batchopt_workers.functions.per_sample import PerSample, Unmappable, sample_tensors
from batchopt_workers.functions.simulation import is_by_differences
from batchopt_workers.functions.squares import MeanSquare, checked
from batchopt_workers.life.torch_settings import differentiable_twice
from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.layout import Layout, in_form_of, reals
from batchopt_workers.wire.structures import tensors_in

# Rows of a Jacobian that are held at a time, in bytes.
ROOM = 32 * 2**20
# Samples that are evaluated together if backwards of rows go through all of them, and rows of one backward at most.
EACH, AT_ONCE = 32, 256
# Residuals of a sample that are differentiated one by one: for more, `vmap` over them is faster than a loop.
FEW = 4
# Residuals and gradients computed in two ways agree to this fraction of the digits of their dtype.
SAME = 0.5
_GOLDEN = (5.0**0.5 - 1.0) / 2.0


class Block(NamedTuple):
    """The residuals of `samples` samples, shape `(rows,)`, and their Jacobian, shape `(rows, n)`."""

    residuals: torch.Tensor
    rows: torch.Tensor
    samples: int = 1


# Returns the block of samples at parameters of these names.
Rows = Callable[[Mapping[str, torch.Tensor], Any, Any, int], Block]


class PieceResiduals(NamedTuple):
    """The residuals of one piece, as functions of X. `key`: of the piece in its batch; None if the batch is not kept.
    `sample_weight`: see `Piece`."""

    jacobian: Jacobian
    inputs: Any
    targets: Any
    samples: int | None  # None: a single sample, without a dimension for samples
    key: object = None
    sample_weight: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Return them, shape `(samples, ...)`, with their graph, which may be differentiated twice."""
        with differentiable_twice():
            return self.jacobian.residuals(self.inputs, self.targets, self.samples)

    def blocks(self) -> Iterator[Block]:
        """Yield them with their rows, as many at a time as there is room for."""
        return self.jacobian.blocks(self.inputs, self.targets, self.samples, self.key)


class Jacobian:
    """The residuals of a term and their derivatives with respect to X, whose tensors are `parameters`.

    Rows are computed in one of three ways, the first that works and agrees with a plain backward: `torch.func` over the
    samples; the residuals of all samples at once, with separate parameters for each in the module (for residuals that
    use `torch.autograd.grad` themselves); a backward for each row, of as few samples as possible.
    """

    def __init__(self, module: torch.nn.Module, parameters: Sequence[torch.Tensor], squares: MeanSquare) -> None:
        self.squares = squares
        self.one_by_one = 0  # number of rows that took a backward each
        # the pieces whose samples do not depend on each other, with the number of residuals of each sample
        self.looked_at: dict[object, int] = {}
        self._module = module
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._layout = Layout.of([(str(i), p) for i, p in enumerate(parameters)], parameters[0].dtype)
        places = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
        self._slots = [self._layout.slots[i] for i in places]
        self._trained = {names[id(parameters[i])]: parameters[i] for i in places}
        self._by_differences = is_by_differences(module, squares.residual)
        self._called = Bound(module, squares.residual)
        self._ways: list[Rows] = [self._mapped, self._per_sample]
        self._agreed = False  # whether the first of these was seen to agree with a plain backward
        self._refuses_many = False  # several backwards at once

    def serves(self, squares: MeanSquare, parameters: Sequence[torch.Tensor]) -> bool:
        """Tell whether it is for these residuals, and the trained parameters are those from when it was made."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        ours = [*self._trained.values()]
        return squares == self.squares and len(trained) == len(ours) and all(map(operator.is_, trained, ours))

    def residuals(self, inputs: Any, targets: Any, samples: int | None) -> torch.Tensor:
        """Return residuals, shape `(samples, ...)`, with their graph; `samples` None: of a single sample."""
        with torch.enable_grad():
            return checked(self.squares.residual(self._module, inputs, targets), samples)

    # ---- rows

    def blocks(self, inputs: Any, targets: Any, samples: int | None, key: object = None) -> Iterator[Block]:
        """Yield residuals and rows, as many samples at a time as there is room for. Raise `ValueError` for samples that
        depend on others of the piece, which is checked once for each `key`."""
        if self._by_differences:  # for parts of the samples the function would have to be called again
            residuals = self.residuals(inputs, targets, samples)
            units = torch.eye(self._layout.size, dtype=self._layout.dtype, device=residuals.device)
            columns = [self.times(residuals, unit).reshape(-1) for unit in units]
            yield Block(residuals.detach().reshape(-1), torch.stack(columns, dim=1), samples or 1)
            return
        if samples is None or not _sliceable((inputs, targets), samples):
            yield self._block((inputs, targets), samples)._replace(samples=samples or 1)
            return
        whole, among_all = Columns((inputs, targets)), None
        if key not in self.looked_at:
            among_all = self.residuals(inputs, targets, samples).detach().reshape(samples, -1)
        each = self.looked_at[key] if among_all is None else max(among_all.shape[1], 1)
        start = 0
        while start < samples:
            stop = min(start + max(ROOM // (8 * self._layout.size) // each, 1), samples)
            block = self._block(whole.data if stop - start == samples else whole.slice(start, stop), stop - start)
            if among_all is not None:
                expected = among_all[start:stop].reshape(-1)
                here = range(start, stop)
                if not self._ways:  # its samples were evaluated together, and take a backward each anyway
                    self._refuse_coupled(block, whole, here, [[i] for i in here])
                elif self._ways[0] == self._per_sample or not _alike(
                    block.residuals, expected, float(expected.abs().max())
                ):  # together, too, or different from those of each sample, which may be rounding
                    self._refuse_coupled(block, whole, here, _parted(here))
            yield block._replace(samples=stop - start)
            start = stop
        if key is not None:
            self.looked_at[key] = each

    def _block(self, data: tuple[Any, Any], samples: int | None) -> Block:
        inputs, targets = data
        parts: list[tuple[Any, Any, Any]] = [(inputs, targets, samples)]
        if samples is not None and _sliceable(data, samples):
            bounds = [*range(0, samples, EACH), samples]
            parts = [(*Columns(data).slice(start, stop), stop - start) for start, stop in pairwise(bounds)]
        ways = [*self._ways]
        while self._ways and samples is not None:
            try:
                if self._agreed:
                    with differentiable_twice():  # only its plain operations have a batching rule
                        return self._ways[0](self._trained, inputs, targets, samples)
                own = self._copies()
                with torch.random.fork_rng(devices=[]), differentiable_twice():
                    for some in (*parts[:1], (inputs, targets, samples)):  # a wrong way may take memory for samples^2
                        block = self._ways[0](own, *some)
                        self._agreed = self._agree(block, own, *some)
                return block
            except Exception as error:  # torch, the module or the function may refuse this way for any reason
                let_through(error)
                self._ways.pop(0)
                self._agreed = False
        try:
            found = [self._each(*part) for part in parts]
        except Exception:
            self._ways = ways  # these samples failed, not the way
            raise
        return Block(torch.cat([block.residuals for block in found]), torch.cat([block.rows for block in found]))

    def _refuse_coupled(self, block: Block, data: Columns, here: range, parts: Sequence[Sequence[int]]) -> None:
        """Raise `ValueError` if residuals of the block's samples, which are `here`, differ by more than rounding from
        those among all samples if they are computed in `parts`."""
        own = self._copies()

        def found(samples: Sequence[int]) -> torch.Tensor:
            inputs, targets = (
                data.slice(samples.start, samples.stop) if isinstance(samples, range) else data.picked(samples).data
            )
            return self._plain(own, inputs, targets, len(samples)).detach()

        among_all = found(range(len(data)))[here.start : here.stop]
        few = torch.empty_like(among_all)
        for part in parts:
            few[[sample - here.start for sample in part]] = found(part)
        if not bool(few.isfinite().all() & among_all.isfinite().all()):
            return
        try:
            self._same_residuals(Block(few.reshape(-1), block.rows), own, among_all)
        except Unmappable:
            self._ways, self._agreed = [self._mapped, self._per_sample], False  # these samples failed, not the ways
            raise ValueError(
                "the residuals of a sample depend on the other samples of its chunk, or on random numbers: there is no "
                "Jacobian by rows. Make each row of its own sample alone (normalisation layers in evaluation mode, no "
                "dropout, no means over samples)"
            ) from None

    def _copies(self) -> dict[str, torch.Tensor]:
        """Return copies of the current X, which may be written in the meantime if another worker finished this chunk
        first."""
        return {name: parameter.detach().clone().requires_grad_() for name, parameter in self._trained.items()}

    def _plain(self, trained: Mapping[str, torch.Tensor], inputs: Any, targets: Any, samples: int) -> torch.Tensor:
        """Return the residuals at these parameters, with their graph."""
        with torch.enable_grad():
            found = functional_call(
                self._called, {f"module.{name}": p for name, p in trained.items()}, (inputs, targets)
            )
        return checked(found, samples)

    def _agree(
        self, block: Block, trained: Mapping[str, torch.Tensor], inputs: Any, targets: Any, samples: int
    ) -> bool:
        """Raise `Unmappable` unless residuals and a sum of rows are those of a plain forward and backward. Return False
        if that cannot be determined, because these are not finite."""
        found = self._plain(trained, inputs, targets, samples)
        if not bool(found.isfinite().all()):
            return False
        self._same_residuals(block, trained, found)
        weights = torch.linspace(1.0, 2.0, found.numel()).to(
            found
        )  # different weights: at a minimum, equal ones could cancel
        gradients = torch.autograd.grad(found, [*trained.values()], weights.view_as(found), allow_unused=True)
        whole = self._joined(gradients, 1)[0]
        if not bool(whole.isfinite().all()):
            return False
        if not _alike(weights @ block.rows, whole, float((weights @ block.rows.abs()).max())):
            raise Unmappable
        return True

    def _same_residuals(self, block: Block, trained: Mapping[str, torch.Tensor], found: torch.Tensor) -> None:
        """Raise `Unmappable` unless these equal the block's within their rounding: they may be small differences of
        large numbers."""
        x = self._joined([parameter.detach() for parameter in trained.values()], 1)[0]
        scale = float(found.detach().abs().max()) + float((block.rows.abs() @ x.abs()).max())
        if not _alike(block.residuals, found.detach().reshape(-1), scale):
            raise Unmappable

    def _joined(self, gradients: Sequence[torch.Tensor | None], rows: int) -> torch.Tensor:
        """Return one matrix of these, each with `rows` rows; columns without gradient are 0."""
        found = [None if g is None else reals(dense(g)).reshape(rows, -1) for g in gradients]
        if len(self._slots) == len(self._layout.slots) and all(g is not None for g in found):
            return torch.cat([g for g in found if g is not None], dim=1)
        device = next(iter(self._trained.values())).device
        whole = torch.zeros(rows, self._layout.size, dtype=self._layout.dtype, device=device)
        for slot, gradient in zip(self._slots, found, strict=True):
            if gradient is not None:
                whole[:, slot.offset : slot.offset + slot.numel] = gradient
        return whole

    def _mapped(self, trained: Mapping[str, torch.Tensor], inputs: Any, targets: Any, samples: int) -> Block:
        """Compute a block by `torch.func`, sample by sample."""
        leaves, rebuild = sample_tensors((inputs, targets), samples)
        names, tensors = [f"module.{name}" for name in trained], [tensor.detach() for tensor in trained.values()]

        def one(*rows: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            sample = rebuild([row.unsqueeze(0) for row in rows])

            def residuals(*parameters: torch.Tensor) -> torch.Tensor:
                found = functional_call(self._called, dict(zip(names, parameters, strict=True)), sample)
                return checked(found, 1).reshape(-1)

            found, backward = vjp(residuals, *tensors)[:2]
            basis = torch.eye(len(found), dtype=found.dtype, device=found.device)
            if len(found) > FEW:
                return found, vmap(backward)(basis)
            return found, tuple(map(torch.stack, zip(*map(backward, basis), strict=True)))

        residuals, found = vmap(one)(*leaves)
        rows = residuals.numel()
        return Block(residuals.reshape(-1), self._joined(found, rows))

    def _per_sample(self, trained: Mapping[str, torch.Tensor], inputs: Any, targets: Any, samples: int) -> Block:
        """Compute a block at once, through a module that has separate parameters for each sample."""
        parameters = {  # one memory for all: to read a copy for each would take as long as their gradients
            name: parameter.detach().expand(samples, *parameter.shape).requires_grad_()
            for name, parameter in trained.items()
        }
        module: Any = PerSample(self._module, "", parameters, samples)
        with torch.enable_grad():
            residuals = checked(self.squares.residual(module, inputs, targets), samples).reshape(samples, -1)
        columns = []
        for column in residuals.unbind(1):
            found = torch.autograd.grad(column.sum(), [*parameters.values()], retain_graph=True, allow_unused=True)
            columns.append(self._joined(found, samples))
        rows = columns[0] if len(columns) == 1 else torch.stack(columns, 1).flatten(0, 1)
        return Block(residuals.detach().reshape(-1), rows)

    def _each(self, inputs: Any, targets: Any, samples: int | None) -> Block:
        """Compute a block by a backward for each row, of many rows at once where torch can do that."""
        with differentiable_twice():
            residuals = self.residuals(inputs, targets, samples).reshape(-1)
            check_depend(residuals)
            units, rows = torch.eye(len(residuals)).to(residuals), [self._joined([None] * len(self._trained), 0)]
            most = max(min(AT_ONCE, ROOM // (8 * self._layout.size)), 1)
            for start in range(0, len(residuals), most):
                rows.append(self._backward(residuals, units[start : start + most]))
        return Block(residuals.detach(), torch.cat(rows))

    def _backward(self, residuals: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        """Return the rows of the Jacobian that these units, shape `(rows, residuals)`, choose."""
        differentiate = partial(torch.autograd.grad, residuals, [*self._trained.values()], retain_graph=True)
        if not self._refuses_many:
            try:
                rows = self._joined(differentiate(units, allow_unused=True, is_grads_batched=True), len(units))
                weights = torch.linspace(1.0, 2.0, len(units)).to(units)
                expected = self._joined(differentiate(weights @ units, allow_unused=True), 1)[0]
                finite = bool(expected.isfinite().all())  # otherwise these samples failed, not the way
                if not finite or _alike(weights @ rows, expected, float((weights @ rows.abs()).max())):
                    return rows
            except Exception as error:  # a function of torch or of the user without a rule for it may raise anything
                let_through(error)
            self._refuses_many = True
        self.one_by_one += len(units)
        return torch.cat([self._joined(differentiate(unit, allow_unused=True), 1) for unit in units])

    # ---- products

    def times(self, residuals: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        """Return J times a vector (shape `(n,)`), in the shape of `residuals`, whose graph is kept.

        The derivative of Jᵀu along the direction is linear in u, with J times the direction as its gradient: two
        backwards, whatever the functions are. Raise `ValueError` if the first one has no derivative, e.g. for a
        function whose backward uses NumPy: then the direction times Jᵀu is not u times the product.
        """
        parameters = [*self._trained.values()]
        return product_with(residuals, parameters, [self._slot(direction, i) for i in range(len(parameters))])

    def transposed_times(self, residuals: torch.Tensor, weights: torch.Tensor, keep: bool = False) -> torch.Tensor:
        """Return Jᵀ times numbers in the shape of `residuals`: shape `(n,)`, float64. `keep`: their graph is kept."""
        check_depend(residuals)
        product = torch.zeros(self._layout.size, dtype=torch.float64, device=residuals.device)
        parameters = [*self._trained.values()]
        found = torch.autograd.grad(residuals, parameters, weights, retain_graph=keep, allow_unused=True)
        for slot, gradient in zip(self._slots, found, strict=True):
            if gradient is not None:
                product[slot.offset : slot.offset + slot.numel] = reals(dense(gradient)).reshape(-1)
        return product

    def _slot(self, vector: torch.Tensor, number: int) -> torch.Tensor:
        slot = self._slots[number]
        return vector[slot.offset : slot.offset + slot.numel]


def check_depend(residuals: torch.Tensor) -> None:
    """Raise `ValueError` for residuals whose Jacobian would be 0 since they have no graph."""
    if not residuals.requires_grad and residuals.numel():
        raise ValueError(
            "the residuals do not depend on any trainable parameter (they have no grad_fn): "
            "look for .detach(), .item(), torch.no_grad() or frozen parameters on their way"
        )


def product_with(
    residuals: torch.Tensor, parameters: Sequence[torch.Tensor], direction: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return J times a vector, given as a flat part per parameter: see `Jacobian.times`."""
    check_depend(residuals)
    weights = torch.linspace(1.0, 2.0, residuals.numel()).to(residuals).view_as(residuals).requires_grad_()
    with torch.enable_grad():
        found = torch.autograd.grad(residuals, [*parameters], weights, create_graph=True, allow_unused=True)
    pairs = [(dense(g), in_form_of(g, v)) for g, v in zip(found, direction, strict=True) if g is not None]
    linear = [(gradient, v) for gradient, v in pairs if gradient.requires_grad]
    product: torch.Tensor | None = None
    if linear:
        (product,) = torch.autograd.grad(
            [g for g, _ in linear], weights, [v for _, v in linear], retain_graph=True, allow_unused=True
        )
    product = torch.zeros_like(residuals) if product is None else product.detach()
    _check_adjoint(pairs, weights.detach(), product)
    return product


def _check_adjoint(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], weights: torch.Tensor, product: torch.Tensor
) -> None:
    """Raise `ValueError` unless the gradients times their directions are the weights times the product."""
    factors = [(reals(g.detach()).reshape(-1), reals(v).reshape(-1)) for g, v in pairs]
    one = sum(float(g.dot(v)) for g, v in factors)
    other = float(weights.reshape(-1).dot(product.reshape(-1)))
    scale = sum(_norm(g) * _norm(v) for g, v in factors) + _norm(weights) * _norm(product)
    off, dtype = abs(one - other), torch.finfo(product.dtype)
    lost = dtype.tiny * (product.numel() + sum(len(g) for g, _ in factors))  # of products that underflowed
    if math.isfinite(off) and off > max(dtype.eps**SAME * scale, lost):
        raise ValueError(
            "a product with the Jacobian takes the derivative of a backward, and one of them has none (a function with "
            "@once_differentiable, or whose backward is NumPy's): make it of torch's functions, or use what needs one "
            "backward alone: normal(), vjp(), and LevenbergMarquardt with a matrix (dense=)"
        )


def _norm(vector: torch.Tensor) -> float:
    """Return the Euclidean length, also where squares of elements underflow."""
    largest = float(vector.abs().max()) if vector.numel() else 0.0
    return largest * float((vector / largest).norm()) if 0 < largest < math.inf else largest


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient as a dense tensor, also for an embedding with sparse=True."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _parted(samples: range) -> list[list[int]]:
    """Return two parts of the samples, which separate neighbours, halves and other pairs alike: those in which a
    multiple of the golden ratio has its fraction below one half, and the others."""
    is_first = [math.modf((i + 1) * _GOLDEN)[0] < 0.5 for i in range(len(samples))]
    parts = [[s for s, one in zip(samples, is_first, strict=True) if one is first] for first in (True, False)]
    return [part for part in parts if part]


def _sliceable(data: Any, samples: int) -> bool:
    """Tell whether each tensor has a row for each sample, and there is one."""
    leaves = [*tensors_in(data)]
    return bool(leaves) and all(leaf.shape[:1] == (samples,) for leaf in leaves)


def _alike(one: torch.Tensor, two: torch.Tensor, scale: float) -> bool:
    return one.shape == two.shape and bool(((one - two).abs() <= torch.finfo(one.dtype).eps ** SAME * scale).all())
