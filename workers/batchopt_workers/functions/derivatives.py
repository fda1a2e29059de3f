"""Derivatives of f other than the gradient with respect to X, as functions of a piece of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from batchopt_workers.batch.batch import Piece
from batchopt_workers.batch.weighting import Denominators
from batchopt_workers.evaluate.sums import GradsKept
from batchopt_workers.functions.task import PieceContext
from batchopt_workers.life.torch_settings import differentiable_twice
from batchopt_workers.wire.failures import kinds_of
from batchopt_workers.wire.layout import Layout, reals
from batchopt_workers.wire.orders import Cut
from batchopt_workers.wire.structures import map_tensors, tensors_in


def _layout(parameters: Sequence[torch.Tensor]) -> Layout:
    return _layout_of(tuple([(p.shape, p.dtype) for p in parameters]))


@lru_cache(maxsize=8)  # a product takes hardly longer than making it
def _layout_of(forms: tuple[tuple[torch.Size, torch.dtype], ...]) -> Layout:
    found = [(str(i), torch.empty(shape, dtype=dtype, device="meta")) for i, (shape, dtype) in enumerate(forms)]
    return Layout.of(found, forms[0][1])


@dataclass(frozen=True)
class InputGradients:
    """df/d(inputs): the gradient of f with respect to the inputs of the samples, in their structure; None for integer
    tensors. `denominators`: the user's function, if only workers read the inputs that are passed to it."""

    denominators: Denominators | None = None

    def __call__(self, piece: Piece, context: PieceContext) -> Any:
        given = piece.inputs
        if self.denominators is not None:
            refuse_varying(self.denominators, given, piece.targets)
        piece.inputs = inputs = map_tensors(_leaf, given)
        leaves = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        if not leaves:
            raise TypeError("the inputs have no floating-point tensor: there is nothing to differentiate by")
        try:
            found = iter(torch.autograd.grad(context.loss(), leaves, allow_unused=True))
        finally:
            piece.inputs = given

        def gradient(tensor: torch.Tensor) -> torch.Tensor | None:
            if not tensor.requires_grad:
                return None
            own = next(found)
            return torch.zeros_like(tensor) if own is None else own * context.weight

        return map_tensors(gradient, inputs)


def refuse_varying(denominators: Denominators, inputs: Any, targets: Any) -> None:
    """Raise `ValueError` if `denominators` of these samples has a derivative with respect to the inputs."""
    try:
        with torch.enable_grad():
            found = denominators(map_tensors(_leaf, inputs), targets)
        varies = any(tensor.requires_grad for tensor in tensors_in(found))
    except RuntimeError:  # .numpy() of a tensor that requires grad
        varies = True
    if varies:
        raise ValueError(
            "`denominators` is made of the inputs, so what the mean divides by changes with them, which "
            "input_gradients() does not differentiate: make it of the targets; or, if it is to count as a constant, "
            "call .detach() on the inputs in it, and in the loss where that divides by it"
        )


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach()
    return found.requires_grad_() if found.is_floating_point() or found.is_complex() else found


@dataclass(frozen=True)
class HessianProducts:
    """The product of the Hessian of f with each of the `directions` (shape `(k, n)`); the first backward is shared."""

    directions: torch.Tensor

    def __call__(self, piece: Piece, context: PieceContext) -> torch.Tensor:
        parameters = context.parameters
        layout = _layout(parameters)
        device = parameters[0].device
        products = torch.zeros(len(self.directions), layout.size, dtype=layout.sum_dtype, device=device)
        with differentiable_twice():
            loss = context.loss()
        if context.weight == 0.0:
            return products
        places = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
        wanted = [parameters[i] for i in places]
        gradients = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        varying = [
            (i, gradient)
            for i, gradient in zip(places, gradients, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        for direction, product in zip(self.directions.to(device), products, strict=True):
            views = layout.views(direction.clone())
            with GradsKept(parameters):
                # `autograd.grad` would pass over functions that cannot be differentiated twice; this raises
                torch.autograd.backward([g for _, g in varying], [views[i] for i, _ in varying], retain_graph=True)
                _take(layout, context, product)
        return products


def _take(layout: Layout, context: PieceContext, row: torch.Tensor) -> None:
    """Write what a backward has left at the parameters, times the weight in f, to a row of zeros, shape `(n,)`."""
    for slot, parameter in zip(layout.slots, context.parameters, strict=True):
        if parameter.grad is not None:
            found = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            own = row[slot.offset : slot.offset + slot.numel]
            own.copy_(reals(found).flatten())
            if context.weight != 1.0:
                own.mul_(context.weight)


@dataclass(frozen=True)
class TermGradients:
    """The gradient of each of so many `terms`, with its weight in f: shape `(terms, n)`."""

    terms: int

    def __call__(self, piece: Piece, context: PieceContext) -> torch.Tensor:
        layout, device = _layout(context.parameters), context.parameters[0].device
        found = torch.zeros(self.terms, layout.size, dtype=layout.sum_dtype, device=device)
        with GradsKept(context.parameters):
            loss = context.loss()
            if context.weight != 0.0:
                loss.backward()  # type: ignore[no-untyped-call]
                _take(layout, context, found[piece.term])
        return found


@dataclass(frozen=True)
class AtPoints:
    """The losses of the terms of the loaded batch, with this cut, at several points in place of X, which are the
    inputs; on request also df/dX there. Where an exception of one of the `kinds` is raised, the losses are infinite."""

    cut: Cut
    gradients: bool
    terms: int = 1
    kinds: frozenset[str] = frozenset()

    def __call__(self, piece: Piece, context: PieceContext) -> dict[str, torch.Tensor]:
        layout = _layout(context.parameters)
        losses, gradients = [], []
        before = [parameter.data for parameter in context.parameters]
        try:
            for point in piece.inputs:
                memory = point.to(context.parameters[0].device, copy=True)  # laid out as X is, for the same bits
                for parameter, view in zip(context.parameters, layout.views(memory), strict=True):
                    parameter.data = view
                try:
                    terms, gradient, *_ = context.evaluate(self.cut, self.gradients)
                except Exception as error:
                    if self.kinds.isdisjoint(kinds_of(error)):
                        raise
                    terms = (math.inf,) * self.terms
                    gradient = torch.full((layout.size,), math.nan, dtype=layout.sum_dtype)
                losses.append(terms)
                gradients.append(gradient)
        finally:
            for parameter, data in zip(context.parameters, before, strict=True):
                parameter.data = data
        found = {"losses": torch.tensor(losses, dtype=torch.float64)}
        return {**found, "gradients": torch.stack(gradients)} if self.gradients else found
