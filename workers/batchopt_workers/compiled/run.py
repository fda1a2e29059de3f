"""Evaluations by libraries that were compiled before, and their comparison with eager ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from batchopt_workers.compiled.form import (
    PARAMETER,
    PIECE,
    STATISTIC,
    TENSOR,
    Artifact,
    PieceForm,
    arguments_of,
    form_of,
)
from batchopt_workers.data.batch import Piece
from batchopt_workers.data.structures import same_values, tensors_in


class CompiledDiffers(Exception):
    """A compiled evaluation finds something else than the eager one, by more than rounding."""


class Sources(NamedTuple):
    """The tensors that compiled evaluations take beside those of a piece: parameters, the module's statistics, and all
    of the program, in the order in which it was packed."""

    parameters: Sequence[torch.Tensor]
    statistics: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]


class Library:
    """A loaded artifact; call it to set the gradients of the parameters, write the statistics and return the loss."""

    def __init__(self, artifact: Artifact, sources: Sources) -> None:
        self.artifact = artifact
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(artifact.path, 1)
        self._run: Callable[..., list[torch.Tensor]] = runner.run
        of: Mapping[str, Sequence[torch.Tensor]] = {
            PARAMETER: sources.parameters,
            STATISTIC: sources.statistics,
            TENSOR: sources.tensors,
        }
        self._inputs: list[torch.Tensor | int] = [i if kind == PIECE else of[kind][i] for kind, i in artifact.inputs]
        self._used = [sources.parameters[i] for i in artifact.used]
        self._written = [sources.statistics[i] for i in artifact.written]
        self._comparison = Comparison()
        self._forms = self._forms_now()

    def _forms_now(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(x.shape, x.dtype) for x in self._inputs if isinstance(x, torch.Tensor)]

    def check(self) -> None:
        """Raise `CompiledDiffers` if a tensor of the program was given another form: the library would read memory that
        is not there."""
        if self._forms_now() != self._forms:
            raise CompiledDiffers("a tensor of the module or the loss was given another shape")

    def __call__(self, piece: Sequence[torch.Tensor]) -> torch.Tensor:
        """Evaluate the piece with these tensors."""
        with torch.no_grad():
            found = self._run([(piece[x] if isinstance(x, int) else x).detach().contiguous() for x in self._inputs])
            for parameter, gradient in zip(self._used, found[1:], strict=False):
                parameter.grad = gradient.view(parameter.shape)
            for own, new in zip(self._written, found[1 + len(self._used) :], strict=True):
                own.copy_(new)
        return found[0]

    def examined(
        self, piece: Sequence[torch.Tensor], eager: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Evaluate it also by `eager`, which must draw the same numbers, and compare. Raise `CompiledDiffers`."""
        before, state = [own.clone() for own in self._written], torch.get_rng_state()
        value = eager()
        expected = [parameter.grad for parameter in parameters]
        after, drawn = [own.clone() for own in self._written], torch.get_rng_state()
        with torch.no_grad():
            for own, then in zip(self._written, before, strict=True):
                own.copy_(then)
        torch.set_rng_state(state)
        for parameter in parameters:
            parameter.grad = None
        found = self(piece)
        self._comparison.losses(found, value)
        self._comparison.gradients([parameter.grad for parameter in parameters], expected)
        for own, new in zip(self._written, after, strict=True):
            _check("a tensor of the module's state", own, new)
        if not torch.equal(torch.get_rng_state(), drawn):
            raise CompiledDiffers("it draws another number of random numbers")
        return found


# Rounding errors of terms that cancel, in units of those of the largest loss and gradient so far.
NOISE = 1000.0


class Comparison:
    """Compares losses and gradients of one library with eager ones.

    Rounding is relative to the terms that are added, which may cancel: those of a residual that has become small are as
    large as at the beginning. So the `loss` and the `gradient` (its largest element) of the beginning count as well.
    Where r is a residual and d its rounding error, that of its square is 2 r d + d d.
    """

    def __init__(self) -> None:
        self.loss = self.gradient = 0.0  # the largest so far

    def losses(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise `CompiledDiffers` if they differ by more than rounding."""
        value, eps = abs(expected.item()), torch.finfo(expected.dtype).eps
        self.loss = max(self.loss, value) if math.isfinite(value) else self.loss
        noise = NOISE * eps * math.sqrt(self.loss)
        _check("the loss", found, expected, eps**0.5 * value + 2 * math.sqrt(value) * noise + noise * noise)

    def gradients(self, found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
        """Raise `CompiledDiffers` if they are of other parameters, or differ by more than rounding of the largest."""
        if [gradient is None for gradient in found] != [gradient is None for gradient in expected]:
            raise CompiledDiffers("it uses other parameters")
        sizes = [gradient.abs().max().item() for gradient in expected if gradient is not None and gradient.numel()]
        size = max(sizes, default=0.0)
        self.gradient = max(self.gradient, size) if math.isfinite(size) else self.gradient
        for mine, gradient in zip(found, expected, strict=True):
            if mine is not None and gradient is not None:
                eps = torch.finfo(gradient.dtype).eps
                _check("a gradient", mine, gradient, eps**0.5 * size + NOISE * eps * self.gradient)


def _check(what: str, found: torch.Tensor, expected: torch.Tensor, allowed: float | None = None) -> None:
    """Raise `CompiledDiffers` if elements differ by more than is `allowed`, by default a part of the largest one."""
    expected = expected.detach()
    if not expected.numel() or same_values(found, expected):
        return
    if not expected.is_floating_point():
        raise CompiledDiffers(f"{what} is another one")
    size = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    if not difference <= (torch.finfo(expected.dtype).eps ** 0.5 * size if allowed is None else allowed):  # or NaN
        raise CompiledDiffers(f"{what} differs by {difference:.2g} of {size:.2g}")


class CompiledPieces:
    """The libraries for a program. The first evaluation by each in this process, the second, and the 4th, 8th, 16th,
    are compared with eager ones."""

    def __init__(self, artifacts: Iterable[Artifact], sources: Sources) -> None:
        self._parameters = sources.parameters
        self._libraries = {artifact.form: Library(artifact, sources) for artifact in artifacts}
        self._evaluation, self._evaluations = -1, 0
        self._due: set[PieceForm] = set()

    def begin(self, evaluation: int) -> None:
        """Begin an evaluation, or go on with it."""
        if evaluation != self._evaluation:
            for library in self._libraries.values():
                library.check()
            self._evaluation = evaluation
            self._evaluations += 1
            if self._evaluations & (self._evaluations - 1) == 0:
                self._due = set(self._libraries)

    def evaluate(self, piece: Piece, eager: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Set gradients and return the loss of a piece; None if there is no library for it."""
        form = form_of(piece)
        library = None if form is None else self._libraries.get(form)
        if library is None or not library.artifact.fewest <= len(piece.indices) <= library.artifact.most:
            return None
        assert form is not None
        tensors = [*tensors_in(arguments_of(piece))]
        if form in self._due:
            self._due.remove(form)
            return library.examined(tensors, eager, self._parameters)
        return library(tensors)
