"""Evaluations by libraries that were compiled before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from batchopt_workers.batch.batch import Piece
from batchopt_workers.shortcuts.form import (
    PARAMETER,
    PIECE,
    STATISTIC,
    TENSOR,
    Artifact,
    PieceForm,
)
from batchopt_workers.shortcuts.shortcuts import Differs, Eager, Shortcuts


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
        self._forms = self._forms_now()

    def _forms_now(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(x.shape, x.dtype) for x in self._inputs if isinstance(x, torch.Tensor)]

    def check(self) -> None:
        """Raise `Differs` if a tensor of the program was given another form: the library would read memory that is not
        there."""
        if self._forms_now() != self._forms:
            raise Differs("a tensor of the module or the loss was given another shape")

    def __call__(self, piece: Sequence[torch.Tensor]) -> torch.Tensor:
        """Evaluate the piece with these tensors."""
        with torch.no_grad():
            found = self._run([(piece[x] if isinstance(x, int) else x).detach().contiguous() for x in self._inputs])
            for parameter, gradient in zip(self._used, found[1:], strict=False):
                parameter.grad = gradient.view(parameter.shape)
            for own, new in zip(self._written, found[1 + len(self._used) :], strict=True):
                own.copy_(new)
        return found[0]


class CompiledPieces(Shortcuts):
    """The libraries for a program."""

    def __init__(self, artifacts: Iterable[Artifact], sources: Sources) -> None:
        super().__init__(sources.parameters, lambda: sources.statistics)
        self._libraries = {artifact.form: Library(artifact, sources) for artifact in artifacts}
        self._table |= self._libraries

    def look(self, evaluation: int) -> None:
        """See `Shortcuts.look`."""
        for library in self._libraries.values():
            library.check()

    def key_of(self, form: PieceForm, piece: Piece, tensors: Sequence[torch.Tensor]) -> PieceForm | None:
        """See `Shortcuts.key_of`."""
        library = self._libraries.get(form)
        fits = library is not None and library.artifact.fewest <= len(piece.indices) <= library.artifact.most
        return form if fits else None

    def evaluate(self, piece: Piece, eager: Eager) -> torch.Tensor | None:
        """See `Shortcuts.evaluate`."""
        try:
            return super().evaluate(piece, eager)
        except RuntimeError as error:
            eager(piece)  # which raises what is the user's own error, as an index out of range
            raise Differs(f"the library fails ({str(error).splitlines()[0]})") from error
