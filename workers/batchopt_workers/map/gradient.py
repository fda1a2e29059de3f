"""f of a piece, with the hooks and weights in force, and the work of evaluating f and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from batchopt_workers.data.batch import Piece
from batchopt_workers.map.chunk import LoadedBatch, Walk
from batchopt_workers.map.module_state import ModuleState
from batchopt_workers.map.objective import Objective
from batchopt_workers.map.program import Program
from batchopt_workers.map.sums import PartialSum, Row, Rows, collect, collecting, is_large
from batchopt_workers.process import faults
from batchopt_workers.process.messages import Order
from batchopt_workers.tasks.forms import Form, Output, write_results
from batchopt_workers.worker import Hook, Sample, Worker


class PieceLoss:
    """f of a piece: the objective of each term, the `weights` of the terms, and the hooks, which run only if
    `hooked`."""

    def __init__(self, program: Program, worker: Worker, walk: Walk) -> None:
        self.prehook, self.posthook, self.hooked = program.prehook, program.posthook, True
        self.weights: Sequence[float] = (1.0,) * len(program.loss_fns)
        self.names: Sequence[str | None] = (None,) * len(program.loss_fns)  # of the terms
        self.objectives = [Objective(program.module, program.criterion, loss_fn) for loss_fn in program.loss_fns]
        self._worker, self._walk = worker, walk

    @property
    def has_hooks(self) -> bool:
        """Tell whether hooks run."""
        return self.hooked and (self.prehook is not None or self.posthook is not None)

    def sample(self, piece: Piece, term: int) -> Sample:
        """Return the samples of a piece as hooks see them, as the prehook has left them."""
        sample = Sample(piece.inputs, piece.targets, piece.options, piece.indices, term=self.names[term])
        prehook = self.prehook
        if prehook is not None and self.hooked:
            self._walk.hooked("prehook", lambda: prehook(self._worker, sample))
            torch._C._set_grad_enabled(True)
        return sample

    def of(self, piece: Piece, term: int) -> torch.Tensor:
        """Return the loss of a piece for that term, with its graph, after the prehook."""
        return self.forward(piece, self.sample(piece, term), term)[1]

    def forward(self, piece: Piece, sample: Piece | Sample, term: int, keeps: bool = False) -> tuple[Any, torch.Tensor]:
        """Return the output and the loss of a piece, whose inputs and targets are those of `sample`."""
        if faults.hook is not None:
            faults.point("worker.forward", self._walk.chunk)
        found = self.objectives[term](sample.inputs, sample.targets, piece.attributes, keeps)
        if faults.hook is not None:
            faults.point("worker.backward", self._walk.chunk)
        return found

    def after(self, posthook: Hook, sample: Sample, output: Any, loss: float) -> Any:
        """Return what the posthook returns for a piece."""
        sample.output, sample.loss = output, loss
        return self._walk.hooked("posthook", lambda: posthook(self._worker, sample))


class GradientWork:
    """The work of evaluating f and its gradient: in `rows`, or only the losses if these are None. What the module
    returns is written to `outputs`, if there is any.

    `has_posthook`: whether the posthook runs, if there is one.
    """

    form: Form | None = None
    results: Sequence[Any] | None = None
    drew = False

    def __init__(
        self, loss: PieceLoss, walk: Walk, parameters: Sequence[torch.Tensor], state: ModuleState, hooks: bool = True
    ) -> None:
        self.rows: Rows | None = None
        self.outputs: Output | None = None
        self._loss, self._walk, self._parameters, self._state = loss, walk, parameters, state
        self._hooks, self._collects_early = hooks, is_large(parameters)
        self._looked: tuple[int, bool] | None = None  # the step, and `hooked`, for which `drew` was found out
        self._paired: tuple[LoadedBatch, bool] | None = None  # those for which outputs and targets were compared

    def begin(self, loaded: LoadedBatch, order: Order, chunk: int, row: int) -> None:
        """See `Work.begin`."""
        self._loaded, self._chunk, self._number, self._step = loaded, chunk, row, order.step
        self._walk.looks_for_draws = self._looked != (order.step, self._loss.hooked)
        self._row: Row | None = None if self.rows is None else self.rows[row]
        self._losses, self._used = [0.0] * len(self._loss.weights), bytearray(len(self._parameters))
        self._outputs: list[Any] = []
        self._posthook = self._loss.posthook if self._loss.hooked and self._hooks else None
        self._returned: list[Any] = []

    def piece(self, piece: Piece) -> None:
        """See `Work.piece`."""
        loss, term, posthook = self._loss, piece.term, self._posthook
        sample = piece if posthook is None and loss.prehook is None else loss.sample(piece, term)
        if self._row is None:
            value = loss.forward(piece, sample, term)[1].item()
        else:
            for parameter in self._parameters:
                parameter.grad = None
            output, found = loss.forward(piece, sample, term, self.outputs is not None)
            weight = piece.weight * loss.weights[term]
            into = self._row, weight, self._used, self._chunk
            if weight != 0.0:  # otherwise nothing counts, and a mean over nothing is NaN
                if posthook is None and self._collects_early:  # a posthook may look at the gradients
                    with collecting(self._parameters, *into):
                        found.backward()  # type: ignore[no-untyped-call]
                else:
                    found.backward()  # type: ignore[no-untyped-call]
            value = found.item()
            if posthook is not None:
                assert isinstance(sample, Sample)
                self._returned.append(loss.after(posthook, sample, output, value))
            torch._C._set_grad_enabled(False)
            collect(enumerate(self._parameters), *into)
            torch._C._set_grad_enabled(True)
            if self.outputs is not None:
                self._outputs.append(output)
            if self._paired != (self._loaded, loss.hooked) and loss.objectives[term].compares_pairs:
                loss.objectives[term].check_pairs(output, sample.targets)
        if piece.weight != 0.0:
            self._losses[term] += value * piece.weight

    def end(self) -> PartialSum:
        """See `Work.end`."""
        row, loaded, hooked = self._row, self._loaded, self._loss.hooked
        if self._walk.looks_for_draws:
            self._looked, self.drew = (self._step, hooked), self._walk.has_drawn
        self._paired = loaded, hooked
        self.results = None if self._posthook is None else self._returned
        if row is not None:
            if self._state.size:
                self._state.changes(row.changes, loaded.chunk(self._chunk).share, self._chunk == 0)
            if 0 in self._used:
                for view, was_used in zip(row.views, self._used, strict=True):
                    if not was_used:
                        view.zero_()
        if self.outputs is not None and self._outputs:
            samples = loaded.chunk(self._chunk).samples
            self.form = write_results(self.outputs, self._outputs, loaded.batch.parts[0], samples)
        return PartialSum(self._number, tuple(self._losses), bytes(self._used))
