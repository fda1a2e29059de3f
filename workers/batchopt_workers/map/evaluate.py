"""The map: evaluating a run of chunks. The same function runs in the parent, in a child and on another machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from batchopt_workers.data.batch import Batch, Piece
from batchopt_workers.data.layout import Layout
from batchopt_workers.map.buffers import StepBuffers
from batchopt_workers.map.chunk import LoadedBatch, Walk, restoring
from batchopt_workers.map.objective import LossFunction, Objective
from batchopt_workers.map.squares import squares_of
from batchopt_workers.map.sums import PartialSum, Row, Rows, Sums, collect, collecting, grads_kept, is_large
from batchopt_workers.map.tree import most_held
from batchopt_workers.map.watch import Watch
from batchopt_workers.process import faults
from batchopt_workers.process.messages import TASKS, Cut, Kind, Order
from batchopt_workers.process.torch_settings import differentiable_twice
from batchopt_workers.tasks.forms import Form, Output, write_results
from batchopt_workers.tasks.jacobian import Jacobian, PieceResiduals
from batchopt_workers.tasks.task_runner import ChunkDone, TaskRunner
from batchopt_workers.worker import Hook, Sample, Worker

# Target of a piece's gradients: the row, the weight of the piece, which parameters had a gradient, the chunk.
_Into = tuple[Row, float, bytearray, int]


@dataclass(frozen=True)
class Program:
    """The program that every worker evaluates. `loss_fns`: a function per term, None if the loss is the criterion's or
    the module's own.

    Hooks belong to it, because they may share objects with the module and the losses. `module_hooks` are those of all
    modules of a process; `state` names the tensors of the module, in addition to small buffers, that a forward writes.
    """

    module: torch.nn.Module
    criterion: Any
    loss_fns: tuple[LossFunction | None, ...]
    seed: int
    prehook: Hook | None = None
    posthook: Hook | None = None
    module_hooks: Mapping[str, Any] = field(default_factory=dict)
    state: frozenset[str] = frozenset()


class Evaluator:
    """Evaluates chunks of the loaded batch on one module.

    `parameters` are the module's trainable ones, in the order of the layout; `direction`, in their shapes, is what
    their Hessian is multiplied by. `weights` are those of the terms in f. Hooks run only if `hooked`. `tasks` runs
    everything else on chunks.
    """

    def __init__(
        self,
        program: Program,
        worker: Worker,
        parameters: Sequence[torch.Tensor],
        buffers: StepBuffers,
        watch: Watch | None = None,
    ) -> None:
        self.worker = worker
        self.prehook, self.posthook, self.hooked = program.prehook, program.posthook, True
        self.weights: Sequence[float] = (1.0,) * len(program.loss_fns)
        self.direction: Sequence[torch.Tensor] = ()
        self.outputs: Output | None = None  # where evaluations write what the module returns
        watch = watch or Watch(program.module, (), (*parameters, *buffers.tensors))
        self.walk = Walk(worker, program.seed, buffers, watch, parameters)
        self._loaded: LoadedBatch | None = None
        self._cut = Cut((0,))
        self._sums = self._cut, Sums(-1, 0)
        # the step and `hooked` for which `_drew` was determined: random numbers were drawn
        self._looked: tuple[int, bool] | None = None
        self._drew = False
        self._parameters = parameters
        self._collects_early = is_large(parameters)
        self._buffers = buffers
        self._objectives = [Objective(program.module, program.criterion, loss_fn) for loss_fn in program.loss_fns]
        self._module = program.module
        self._jacobians: dict[int, Jacobian] = {}  # by term
        self.tasks = TaskRunner(self.walk, program.module, parameters)

    @property
    def batch(self) -> Batch | None:
        """The loaded batch; set it to use another one."""
        return None if self._loaded is None else self._loaded.batch

    @batch.setter
    def batch(self, batch: Batch | None) -> None:
        self._loaded = None if batch is None else LoadedBatch(batch, self._cut)
        for jacobian in self._jacobians.values():
            jacobian.looked_at.clear()

    def begin_again(self, loaded: LoadedBatch) -> None:
        """Use this batch, which was used before and has other elements now."""
        self._loaded, loaded.cut = loaded, self._cut
        for jacobian in self._jacobians.values():
            jacobian.looked_at.clear()

    @property
    def loaded(self) -> LoadedBatch:
        """The loaded batch with its cut. Raise `RuntimeError` if there is none."""
        if self._loaded is None:
            raise RuntimeError("no batch was loaded in this worker")
        return self._loaded

    @property
    def cut(self) -> Cut:
        """The cut of the loaded batch, and of later ones."""
        return self._cut

    @cut.setter
    def cut(self, cut: Cut) -> None:
        self._cut = cut
        if self._loaded is not None:
            self._loaded.cut = cut

    @property
    def current(self) -> range:
        """The samples, numbered through all terms, of the running or last forward."""
        return self.walk.current

    def evaluate(self, order: Order, rows: Rows | None) -> Iterator[ChunkDone]:
        """Evaluate the chunks of `order` one after the other into `rows`.

        Rows that were merged into others are reused only when the next report is requested. `rows` may grow from order
        to order, but must be the same for all chunks of one. Orders of tasks have memory of their own.
        """
        self.walk.has_hooks = self.hooked and (self.prehook or self.posthook) is not None
        if order.kind in TASKS:
            yield from self.tasks.evaluate(order, self)
            return
        assert rows is not None
        loaded, (cut, sums) = self.loaded, self._sums
        if cut is not loaded.cut:
            cut, sums = self._sums = loaded.cut, Sums(-1, loaded.cut.chunks)
        if sums.evaluation != order.evaluation:
            sums.begin(order.evaluation)
            if not loaded.is_of_columns:
                loaded.collation.settle()
        began = time.perf_counter()
        self.walk.watch.begin()
        for chunk in range(order.first, order.last):
            row = sums.free_row()
            results: list[Any] = []
            outputs: list[Any] = []
            losses, used = self._chunk(loaded, order, chunk, rows[row], results, outputs)
            form = self._write(outputs, chunk) if outputs else None
            if faults.hook is not None:
                faults.point("worker.merge", chunk)
            sums.add(chunk, PartialSum(row, losses, used), rows)
            self.walk.current = range(0)
            yield ChunkDone(sums, chunk + 1, began, time.perf_counter() - began, self._drew, results, form)

    def _write(self, outputs: Sequence[Any], chunk: int) -> Form:
        """Write what the module returned for a chunk, and return its form."""
        loaded = self.loaded
        assert self.outputs is not None
        return write_results(self.outputs, outputs, loaded.batch.parts[0], range(*loaded.cut.bounds[chunk : chunk + 2]))

    def _chunk(
        self, loaded: LoadedBatch, order: Order, chunk: int, row: Row, results: list[Any], outputs: list[Any]
    ) -> tuple[tuple[float, ...], bytes]:
        names = loaded.batch.numbering.names
        looks = order.evaluation >= -1 and self._looked != (order.step, self.hooked)  # not in a repetition
        losses, used = [0.0] * len(self.weights), bytearray(len(row.views))
        with restoring(self.walk, loaded):
            for piece in self.walk.pieces(loaded, order.step, chunk):
                term = piece.term
                sample = Sample(piece.inputs, piece.targets, piece.options, piece.indices, None, None, names[term])
                weight = piece.weight * self.weights[term]
                into = row, weight, used, chunk
                if order.kind is Kind.MULTIPLY:
                    loss = self._multiply(piece, sample, into)
                else:
                    loss = self._forward_backward(piece, sample, into, results)
                    torch._C._set_grad_enabled(False)
                    collect(enumerate(self._parameters), *into)
                    torch._C._set_grad_enabled(True)
                    if self.outputs is not None:
                        outputs.append(sample.output)
                if piece.weight != 0.0:
                    losses[term] += loss * piece.weight
                if looks and self._objectives[term].compares_pairs:
                    self._objectives[term].check_pairs(sample.output, sample.targets)
            if looks:
                self.look(order.step)
            if self._buffers.size:
                self._buffers.changes(row.changes, loaded.chunk(chunk).share, chunk == 0)
        if 0 in used:
            for view, was_used in zip(row.views, used, strict=True):
                if not was_used:
                    view.zero_()
        return tuple(losses), bytes(used)

    def look(self, step: int) -> bool:
        """Tell whether the chunk that was evaluated last drew random numbers; determined once per step."""
        if self._looked != (step, self.hooked):
            self._looked, self._drew = (step, self.hooked), self.walk.has_drawn(step)
        return self._drew

    def _forward_backward(self, piece: Piece, sample: Sample, into: _Into, results: list[Any]) -> float:
        for parameter in self._parameters:
            parameter.grad = None
        posthook = self.posthook if self.hooked else None
        loss = self._forward(piece, sample)
        if into[1] != 0.0:  # the weight; otherwise nothing counts, and a mean over nothing is NaN
            if posthook is None and self._collects_early:  # a posthook may look at the gradients
                with collecting(self._parameters, *into):
                    loss.backward()  # type: ignore[no-untyped-call]
            else:
                loss.backward()  # type: ignore[no-untyped-call]
        sample.loss = found = loss.item()
        if posthook is not None:
            results.append(self.walk.hooked("posthook", lambda: posthook(self.worker, sample)))
        return found

    def _multiply(self, piece: Piece, sample: Sample, into: _Into) -> float:
        """Accumulate the gradient's own gradient along `direction`; each `.grad` is left unchanged."""
        with differentiable_twice():
            loss = self._forward(piece, sample)
        if into[1] != 0.0:
            trained = [(p, v) for p, v in zip(self._parameters, self.direction, strict=True) if p.requires_grad]
            gradients = torch.autograd.grad(loss, [p for p, _ in trained], create_graph=True, allow_unused=True)
            varying = [
                (g, v) for g, (_, v) in zip(gradients, trained, strict=True) if g is not None and g.requires_grad
            ]
            early = collecting(self._parameters, *into) if self._collects_early else nullcontext()
            with grads_kept(self._parameters):
                with early:
                    # `autograd.grad` would pass over functions that cannot be differentiated twice; this raises
                    torch.autograd.backward([g for g, _ in varying], [v for _, v in varying])
                with torch.no_grad():
                    collect(enumerate(self._parameters), *into)
        return loss.item()

    def look_again(self) -> None:
        """Forget what was derived from the program, because it was changed."""
        self._jacobians.clear()

    # ---- for tasks

    def loss_of(self, piece: Piece, term: int) -> torch.Tensor:
        """Return the loss of a piece for that term, with its graph."""
        return self._forward(replace(piece, term=term), self._sample(piece, term))

    def residuals_of(self, piece: Piece, term: int) -> PieceResiduals:
        """Return the residuals whose mean square is the loss of a piece for that term."""
        objective, jacobian = self._objectives[term], self._jacobians.get(term)
        squares = squares_of(objective.criterion, objective.loss_fn)
        assert squares is not None  # otherwise the parent does not request residuals
        if jacobian is None or not jacobian.serves(squares, self._parameters):
            jacobian = self._jacobians[term] = Jacobian(self._module, self._parameters, squares)
        sample = self._sample(piece, term)
        self._before(sample)
        samples = None if self.tasks.loaded.batch.parts[piece.term].one_by_one else len(piece.indices)
        return PieceResiduals(jacobian, sample.inputs, sample.targets, samples, piece.indices, piece.sample_weight)

    def _sample(self, piece: Piece, term: int) -> Sample:
        names = [None] * len(self.weights) if self._loaded is None else self._loaded.batch.numbering.names
        return Sample(piece.inputs, piece.targets, piece.options, piece.indices, term=names[term])

    def weight_of(self, term: int) -> float:
        """Return the weight of that term in f."""
        return self.weights[term]

    def loaded_batch(self) -> Batch:
        """Return the loaded batch, as far as this worker has it."""
        return self.loaded.batch

    def evaluate_all(
        self, step: int, cut: Cut, gradient: bool, batch: Batch | None = None, later: int = 0
    ) -> tuple[tuple[float, ...], torch.Tensor]:
        """Return the loss of each term of the loaded batch, with this cut, and df/dX (shape `(n,)`; empty without
        `gradient`), with the bits of an evaluation; or of another `batch` of the same terms. Draws are those of a step
        that is so much `later`. The posthook does not run."""
        step += later
        is_cut_so = batch is None and self.loaded.cut.bounds == cut.bounds  # then its cache can be used
        loaded = self.loaded if is_cut_so else LoadedBatch(batch or self.loaded.batch, cut, keeps=False)
        layout = Layout.of((("", parameter) for parameter in self._parameters), self._parameters[0].dtype)
        count = most_held(0, cut.chunks, cut.chunks) if gradient else 0
        rows = Rows(layout, self._buffers.size, count, None, self.worker.device)
        sums, posthook, self.posthook = Sums(-1, cut.chunks), self.posthook, None
        try:
            for chunk in range(cut.chunks):
                row, order = sums.free_row(), Order(-1, step, chunk, chunk + 1)
                if gradient:
                    losses, used = self._chunk(loaded, order, chunk, rows[row], [], [])
                else:
                    losses, used = self._losses(loaded, order, chunk), b""
                sums.add(chunk, PartialSum(row, losses, used), rows if gradient else None)
        finally:
            self.posthook = posthook
        whole = sums.root
        return whole.losses, rows[whole.row].gradient if gradient else torch.empty(0)

    def _losses(self, loaded: LoadedBatch, order: Order, chunk: int) -> tuple[float, ...]:
        losses, names = [0.0] * len(self.weights), loaded.batch.numbering.names
        with restoring(self.walk, loaded):
            for piece in self.walk.pieces(loaded, order.step, chunk):
                sample = Sample(piece.inputs, piece.targets, piece.options, piece.indices, term=names[piece.term])
                loss = self._forward(piece, sample).item()
                if piece.weight != 0.0:
                    losses[piece.term] += loss * piece.weight
        return tuple(losses)

    def _before(self, sample: Sample) -> None:
        prehook = self.prehook
        if prehook is not None and self.hooked:
            self.walk.hooked("prehook", lambda: prehook(self.worker, sample))

    def _forward(self, piece: Piece, sample: Sample) -> torch.Tensor:
        """Return the loss of the sample, as modified by the prehook."""
        if self.prehook is not None and self.hooked:
            self._before(sample)
            torch._C._set_grad_enabled(True)
        if faults.hook is not None:
            faults.point("worker.forward", self.walk.chunk)
        objective, keeps = self._objectives[piece.term], self.outputs is not None
        sample.output, loss = objective(sample.inputs, sample.targets, piece.attributes, keeps)
        if faults.hook is not None:
            faults.point("worker.backward", self.walk.chunk)
        return loss
