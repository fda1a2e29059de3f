"""f of a piece, with the hooks and weights in force, and the work of evaluating f and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from batchopt_workers.batch.batch import Piece
from batchopt_workers.evaluate.chunk import LoadedBatch, Walk
from batchopt_workers.evaluate.objective import Objective
from batchopt_workers.evaluate.program import Hook, Program, Sample, Worker
from batchopt_workers.evaluate.sums import PartialSum, Rows, collect, collecting, is_large
from batchopt_workers.evaluate.work import ChunkResult
from batchopt_workers.functions.forms import Output, write_results
from batchopt_workers.life import faults
from batchopt_workers.shortcuts.shortcuts import Shortcuts
from batchopt_workers.wire.structures import same_values

T = TypeVar("T")


class PieceLoss:
    """f of a piece: the objective of each term, the `weights` of the terms, and the hooks, which run only if
    `hooked`."""

    def __init__(self, program: Program, worker: Worker, walk: Walk) -> None:
        self.prehook, self.posthook, self.hooked = program.prehook, program.posthook, True
        self.weights: Sequence[float] = (1.0,) * len(program.loss_fns)
        self.names: Sequence[str | None] = (None,) * len(program.loss_fns)  # of the terms
        self.objectives = [Objective(program.module, program.criterion, loss_fn) for loss_fn in program.loss_fns]
        self._worker, self._walk = worker, walk

    def sample(self, piece: Piece, term: int) -> Sample:
        """Return the samples of a piece as hooks see them, as the prehook has left them."""
        sample = Sample(piece.inputs, piece.targets, piece.options, piece.indices, term=self.names[term])
        prehook = self.prehook
        if prehook is not None and self.hooked:
            self._call("prehook", lambda: prehook(self._worker, sample))
            torch._C._set_grad_enabled(True)
        return sample

    def of(self, piece: Piece, term: int) -> torch.Tensor:
        """Return the loss of a piece for that term, with its graph, after the prehook."""
        return self.forward(piece, self.sample(piece, term), term)[1]

    def forward(
        self, piece: Piece, sample: Piece | Sample, term: int, keeps: bool = False, needs_graph: bool = True
    ) -> tuple[Any, torch.Tensor]:
        """Return the output and the loss of a piece, whose inputs and targets are those of `sample`: see
        `Objective`."""
        if faults.hook is not None:
            faults.point("worker.forward", self._walk.chunk)
        found = self.objectives[term](sample.inputs, sample.targets, piece.attributes, keeps, needs_graph)
        if faults.hook is not None:
            faults.point("worker.backward", self._walk.chunk)
        return found

    def after(self, posthook: Hook, sample: Piece | Sample, output: Any, loss: float) -> Any:
        """Return what the posthook returns for a piece."""
        assert isinstance(sample, Sample)
        sample.output, sample.loss = output, loss
        return self._call("posthook", lambda: posthook(self._worker, sample))

    def _call(self, name: str, hook: Callable[[], T]) -> T:
        """Call a hook, whose changes of attributes last for its piece only. Raise `ValueError` if it writes the
        module's state, which would be taken for forward's."""
        state = self._walk.state
        before = state.copies() if state.statistics else []
        found = self._walk.undoable(hook)
        if before and not all(map(same_values, state.copies(), before)):
            raise ValueError(f"`{name}` writes a buffer of the module: write a copy, or write it between steps")
        return found


class GradientWork:
    """The work of evaluating f and its gradient: in `rows`, or only the losses if these are None. What the module
    returns is written to `outputs`, if there is any.

    `hooks`: whether the posthook runs, if there is one.
    """

    drew = False

    def __init__(self, loss: PieceLoss, walk: Walk, parameters: Sequence[torch.Tensor], hooks: bool = True) -> None:
        self.rows: Rows | None = None
        self.outputs: Output | None = None
        self.shortcuts: Shortcuts | None = None  # by which pieces are evaluated, where hooks and outputs allow it
        self._defers = parameters[0].device.type != "cpu"  # reading a loss: a card goes on meanwhile
        self._loss, self._walk, self._parameters = loss, walk, parameters
        self._hooks, self._collects_early = hooks, is_large(parameters)
        self._looked: tuple[int, bool] | None = None  # the step, and `hooked`, for which `drew` was found out
        self.paired: bool | None = None  # the `hooked` for which outputs and targets of the batch were compared

    def _eagerly(self, piece: Piece) -> torch.Tensor:
        """Return the loss of a piece, without its graph, and leave gradients at the parameters."""
        value = self._loss.of(piece, piece.term)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def do(self, pieces: Iterable[Piece], loaded: LoadedBatch, step: int, chunk: int, number: int) -> ChunkResult:
        """See `Work.do`."""
        loss, outputs, parameters, hooked = self._loss, self.outputs, self._parameters, self._loss.hooked
        row, draws = None if self.rows is None else self.rows[number], self._walk.draws
        prehook, posthook = (loss.prehook, loss.posthook if self._hooks else None) if hooked else (None, None)
        is_alone = row is not None and outputs is None and prehook is posthook is None
        shortcuts = self.shortcuts if is_alone else None
        looks = draws.looks = self._looked != (step, hooked)
        losses, used = list[Any]([0.0] * len(loss.weights)), bytearray(len(parameters))
        returned, made = list[Any](), list[Any]()
        for piece in pieces:
            term, sample = piece.term, piece if prehook is posthook is None else loss.sample(piece, piece.term)
            for parameter in parameters if row is not None else ():
                parameter.grad = None
            weight = piece.weight * loss.weights[term]
            output, value = None, None
            if shortcuts is not None and weight != 0.0:
                value = shortcuts.evaluate(piece, self._eagerly)
            if value is None:
                output, value = loss.forward(piece, sample, term, outputs is not None, row is not None)
                if row is not None and weight != 0.0:  # otherwise nothing counts, and a mean over nothing is NaN
                    if posthook is None and self._collects_early:  # a posthook may look at the gradients
                        with collecting(parameters, row, weight, used, chunk):
                            value.backward()  # type: ignore[no-untyped-call]
                    else:
                        value.backward()  # type: ignore[no-untyped-call]
            found = value.detach().to(torch.float64, copy=True) if self._defers else value.item()
            if piece.weight != 0.0:
                losses[term] += found * piece.weight
            if posthook is not None:
                returned.append(loss.after(posthook, sample, output, float(found)))
            if row is not None:
                torch._C._set_grad_enabled(False)
                collect(enumerate(parameters), row, weight, used, chunk)
                torch._C._set_grad_enabled(True)
                if outputs is not None:
                    made.append(output)
                if self.paired != hooked and loss.objectives[term].compares_pairs:
                    loss.objectives[term].check_pairs(output, sample.targets)
        self.paired = hooked
        if looks:
            self._looked, self.drew = (step, hooked), draws.found
        if row is not None and self._walk.state.size:
            self._walk.state.changes(row.changes, loaded.chunk(chunk).share, chunk == 0)
        for view, was_used in zip(row.views, used, strict=True) if row is not None and 0 in used else ():
            if not was_used:
                view.zero_()
        form = None
        if outputs is not None and made:
            form = write_results(outputs, made, loaded.batch.parts[0], loaded.chunk(chunk).samples)
        return PartialSum(number, tuple(losses), bytes(used)), None if posthook is None else returned, form
