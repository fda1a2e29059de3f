"""The function of one forward: from inputs and targets to a scalar loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from batchopt_workers.batch.weighting import SAMPLE_WEIGHT, weighted
from batchopt_workers.functions.squares import MeanSquare, checked
from batchopt_workers.wire.structures import map_tensors

# Losses that compare each element of the output with one of the targets, and broadcast.
_OF_PAIRS = {
    kind.forward
    for kind in (
        torch.nn.MSELoss,
        torch.nn.L1Loss,
        torch.nn.SmoothL1Loss,
        torch.nn.HuberLoss,
        torch.nn.PoissonNLLLoss,
        torch.nn.MultiLabelSoftMarginLoss,
        torch.nn.HingeEmbeddingLoss,
        torch.nn.KLDivLoss,
    )
}

LossFunction = Callable[[torch.nn.Module, Any, Any], torch.Tensor]
ModuleFunction = Callable[[Any], torch.Tensor]  # of a module of any class


@dataclass(frozen=True)
class OfModule:
    """A function of the module alone, called as the loss function or (`is_residual`) as the residual of a term with a
    single sample, at which it does not look."""

    function: ModuleFunction
    is_residual: bool = False

    def __call__(self, module: torch.nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        found = self.function(module)
        return checked(found).reshape(1, -1) if self.is_residual else found


def is_of_module(loss_fn: LossFunction | None) -> bool:
    """Tell whether a loss function, or its residual, is a function of the module alone."""
    return isinstance(getattr(loss_fn, "residual", loss_fn), OfModule)


@dataclass(frozen=True)
class Objective:
    """`loss_fn(module, inputs, targets)`, or `criterion(module(inputs), targets)`; with neither, the module returns its
    own loss.

    Without targets `criterion(output)` is called; a module that returns its own loss is called with `(inputs)` or
    `(inputs, targets)`.
    """

    module: torch.nn.Module
    criterion: Callable[..., Any] | None
    loss_fn: LossFunction | None

    def __call__(
        self,
        inputs: Any,
        targets: Any,
        attributes: Mapping[str, Any] = MappingProxyType({}),
        keeps: bool = False,
        needs_graph: bool = True,
    ) -> tuple[Any, torch.Tensor]:
        """Return the module's output (None if only `loss_fn` sees it) and the loss, a scalar; if it `needs_graph`, one
        that depends on parameters.

        `attributes`: what replaces the criterion's own for these samples: its rows of a weight of each sample, another
        reduction; and the weights of the samples themselves. `keeps`: return a copy of the output, which the criterion
        cannot write.

        Raise `TypeError` or `ValueError`, saying what to do, for any other loss.
        """
        arguments = (inputs,) if targets is None else (inputs, targets)
        output = None
        sample_weight = attributes.get(SAMPLE_WEIGHT)
        if isinstance(self.loss_fn, MeanSquare):
            source, loss = "residual", self.loss_fn(self.module, inputs, targets, sample_weight)
        elif self.loss_fn is not None:
            source = "function" if isinstance(self.loss_fn, OfModule) else "loss_fn"
            loss = self.loss_fn(self.module, inputs, targets)
        elif self.criterion is not None:
            found = self.module(inputs)
            output = map_tensors(torch.clone, found) if keeps else found
            source = "criterion"
            if not attributes:
                loss = self.criterion(found, *arguments[1:])
            elif sample_weight is None:
                with _having(self.criterion, attributes):
                    loss = self.criterion(found, *arguments[1:])
            else:
                loss = self._weighted(found, arguments[1:], attributes, sample_weight)
        else:
            source, loss = "module", self.module(*arguments)
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex()):
            raise _refusal(source, loss)
        if needs_graph and not loss.requires_grad:
            raise ValueError(
                f"the loss of `{source}` does not depend on any trainable parameter (it has no grad_fn): look for "
                ".detach(), .item(), NumPy, torch.no_grad() or frozen parameters on their way; a simulator without "
                "gradients is given them by @batchopt.finite_differences"
            )
        return output, loss

    def _weighted(
        self, output: Any, targets: tuple[Any, ...], attributes: Mapping[str, Any], sample_weight: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss of weighted samples, for one of torch's criteria."""
        given = {"reduction": getattr(self.criterion, "reduction", "mean"), **attributes}
        reduction = given["reduction"]
        del given[SAMPLE_WEIGHT]
        if sample_weight.dim():
            given["reduction"] = "none"
        with _having(self.criterion, given):
            assert self.criterion is not None
            elements = self.criterion(output, *targets)
        return weighted(elements, sample_weight, reduction)

    @property
    def compares_pairs(self) -> bool:
        """Tell whether the criterion compares each element of the output with one of the targets."""
        return self.loss_fn is None and getattr(getattr(self.criterion, "forward", None), "__func__", None) in _OF_PAIRS

    def check_pairs(self, output: Any, targets: Any) -> None:
        """Raise `ValueError` if broadcasting pairs elements of different samples."""
        if not isinstance(output, torch.Tensor) or not isinstance(targets, torch.Tensor):
            return
        one, two = output.shape, targets.shape
        if len(one) == len(two):
            return
        whole: torch.Size = torch.broadcast_shapes(one, two)  # type: ignore[no-untyped-call]
        if whole.numel() > max(one.numel(), two.numel()):
            raise ValueError(
                f"the outputs have shape {tuple(one)} and the targets {tuple(two)}: {type(self.criterion).__name__} "
                f"broadcasts them to {tuple(whole)}, which compares each sample with all others; give both the same "
                "shape, by targets.unsqueeze(1) or output.squeeze(1), say"
            )


@contextmanager
def _having(criterion: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Replace the criterion's own `attributes` in the body."""
    own = {name: getattr(criterion, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(criterion, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(criterion, name, value)


def _refusal(source: str, loss: Any) -> TypeError | ValueError:
    if not isinstance(loss, torch.Tensor):
        return TypeError(f"`{source}` must return a scalar tensor; got {type(loss).__name__}")
    if loss.numel() != 1:
        return ValueError(
            f"`{source}` must return a scalar; got shape {tuple(loss.shape)}: use reduction='mean' or 'sum'"
        )
    return TypeError(f"`{source}` must return a real number; got {loss.dtype}: return .real or .abs() of it")
