"""The map: evaluating a run of chunks. One function, wherever it runs: in the parent, in a child, on another
machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from batchopt_workers import faults
from batchopt_workers.batch import Batch, Piece
from batchopt_workers.buffers import StepBuffers
from batchopt_workers.collation import Collation
from batchopt_workers.items import Unreadable
from batchopt_workers.messages import Cut, Kind, Order, Report, Summary
from batchopt_workers.objective import LossFunction, Objective
from batchopt_workers.rows import Row, Rows
from batchopt_workers.seeding import has_drawn, seed_draws
from batchopt_workers.tree import Fold, Node
from batchopt_workers.watch import BatchWatch, Watch
from batchopt_workers.worker import Hook, Sample, Worker


@dataclass(frozen=True)
class Program:
    """The program that every worker evaluates: a function for each term, None where the loss is the criterion's or the
    module's own.

    Hooks belong to it, for they may share objects with the module and the losses. `module_hooks` are those of all
    modules of a process; `state` names the tensors of the module that a forward writes, beside small buffers.
    """

    module: torch.nn.Module
    criterion: Any
    loss_fns: tuple[LossFunction | None, ...]
    seed: int
    prehook: Hook | None = None
    posthook: Hook | None = None
    module_hooks: Mapping[str, Any] = field(default_factory=dict)
    state: frozenset[str] = frozenset()


@dataclass
class _Partial:
    row: int
    losses: tuple[float, ...]
    used: bytes


class _Sums:
    """The partials of one evaluation, in rows.

    Two are summed in the row of the younger one, which nobody was told of; so whatever was reported stays as it is
    until something else is reported.
    """

    def __init__(self, evaluation: int, chunks: int) -> None:
        self.evaluation = evaluation
        self._fold: Fold[_Partial] = Fold(chunks, self._merge)
        self._rows: Rows | None = None  # of the chunk that was added last, with its row
        self._young = -1

    def free_row(self) -> int:
        """The lowest row that holds nothing that counts."""
        taken = {partial.row for _, partial in self._fold.partials}
        return next(row for row in range(len(taken) + 1) if row not in taken)

    def add(self, chunk: int, partial: _Partial, rows: Rows) -> None:
        """Take in the partial of a chunk."""
        self._rows = rows
        self._young = partial.row
        self._fold.add(Node(0, chunk), partial)

    def _merge(self, left: _Partial, right: _Partial) -> _Partial:
        young, old = (right, left) if right.row == self._young else (left, right)
        assert self._rows is not None
        into, of = self._rows[young.row], self._rows[old.row]
        into.gradient.add_(of.gradient)
        into.changes.add_(of.changes)
        losses = tuple(map(add, left.losses, right.losses))
        return _Partial(young.row, losses, bytes(map(max, left.used, right.used)))

    def report(self, done: int, began: float, drew: bool) -> Report:
        """The report once the chunks before `done` of the order, begun at `began`, were added."""
        summaries = tuple(Summary(node, p.row, p.losses, p.used) for node, p in self._fold.partials)
        return Report(self.evaluation, done, time.perf_counter() - began, summaries, began, drew)


# Elements of all gradients together from which on each is collected as soon as it is there: more are not in the
# processor's cache any more when the backward is over.
LARGE = 2**18


class _Collector:
    """Adds the parameters' gradients, times `weight`, to a row; in the row's precision, which is at least single.

    A first gradient overwrites what the row held: cheaper than zeroing the row and accumulating there. Entered, it
    collects each gradient when the backward has made it, which frees its memory for the next one.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], row: Row, weight: float, used: bytearray, chunk: int
    ) -> None:
        self._parameters, self._row = parameters, row
        self._weight, self._used, self._chunk = weight, used, chunk
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        if len(self._row.gradient) < LARGE:
            return
        for i, parameter in enumerate(self._parameters):
            if parameter.requires_grad and not getattr(parameter, "_post_accumulate_grad_hooks", None):  # the user's
                hook = partial(self._collect, i)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def collect(self) -> None:
        """Collect what is there."""
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._collect(i, parameter)

    @torch.no_grad()
    def _collect(self, i: int, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        view = self._row.views[i]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self._used[i]:
            view.add_(gradient, alpha=self._weight)
        elif self._weight == 1.0:
            view.copy_(gradient)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, self._weight, out=view)
        else:
            view.copy_(gradient).mul_(self._weight)
        self._used[i] = 1
        faults.point("worker.collect", self._chunk)


class Evaluator:
    """Evaluates chunks of the loaded batch on one module.

    `parameters` are the module's trainable ones, in the order of the layout, and `direction` what their Hessian is
    multiplied with, in their shapes. `weights` are those of the terms in f. Hooks run only if `hooked`.
    `current` is the range of samples, numbered through all terms, in the forward that runs, or ran last.
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
        self._batch: Batch | None = None
        self.weights: Sequence[float] = (1.0,) * len(program.loss_fns)
        self.direction: Sequence[torch.Tensor] = ()
        self.cut = Cut((0,))
        self.current = range(0)
        self.watch = watch or Watch(program.module, (), (*parameters, *buffers.tensors))
        self._watched: dict[int, BatchWatch] = {}  # by the first sample of the chunk
        self._collation: tuple[Cut | None, Collation] = None, Collation()
        self.place: Callable[[Piece], Piece] = lambda piece: piece  # brings it to where the module is
        self._sums: _Sums | None = None
        self._at = -1  # the chunk being evaluated
        # whether the first forward here of a step, with or without hooks, drew random numbers
        self._looked: tuple[int, bool] | None = None
        self._drew = False
        self._seed = program.seed
        self._parameters = parameters
        self._buffers = buffers
        self._objectives = [Objective(program.module, program.criterion, loss_fn) for loss_fn in program.loss_fns]

    @property
    def batch(self) -> Batch | None:
        """Use this batch from now on."""
        return self._batch

    @batch.setter
    def batch(self, batch: Batch | None) -> None:
        self._batch, self._watched, self._collation = batch, {}, (None, Collation())

    def evaluate(self, order: Order, rows: Rows) -> Iterator[tuple[Report, list[Any]]]:
        """Evaluate the chunks of `order` one after the other into `rows`; after each, what this worker now has of the
        evaluation, and what the posthook returned.

        Rows that were merged away are used again only when the next report is asked for. `rows` may grow from order to
        order, but has to be the same for all chunks of one.
        """
        if self._sums is None or self._sums.evaluation != order.evaluation:
            self._sums = _Sums(order.evaluation, self.cut.chunks)
        began = time.perf_counter()
        self.watch.begin()
        for chunk in range(order.first, order.last):
            row = self._sums.free_row()
            results: list[Any] = []
            losses, used = self._chunk(order, chunk, rows[row], results)
            faults.point("worker.merge", chunk)
            self._sums.add(chunk, _Partial(row, losses, used), rows)
            self.current = range(0)
            yield self._sums.report(chunk + 1, began, self._drew), results

    def _chunk(self, order: Order, chunk: int, row: Row, results: list[Any]) -> tuple[tuple[float, ...], bytes]:
        assert self.batch is not None
        numbering = self.batch.numbering
        start, stop = self.cut.bounds[chunk], self.cut.bounds[chunk + 1]
        self._at = chunk
        seed_draws(self._seed, order.step, chunk)
        losses, used = [0.0] * len(self.weights), bytearray(len(row.views))
        self.current = range(start, stop)  # while samples are cut out and collated
        batch_watch = self._watch_batch(start, stop)
        batch_watch.begin()
        collation = self._collated()
        collation.begin()
        if torch._C._is_any_autocast_enabled():
            torch.clear_autocast_cache()  # X may have changed under the casts of its parameters
        try:
            for piece in map(self.place, self.batch.pieces(start, stop, collation)):
                self.current = numbering.position(piece.term, piece.indices)
                sample = Sample(
                    piece.inputs, piece.targets, piece.options, piece.indices, term=numbering.names[piece.term]
                )
                weight = piece.weight * self.weights[piece.term]
                collector = _Collector(self._parameters, row, weight, used, self._at)
                if order.kind is Kind.MULTIPLY:
                    losses[piece.term] += self._multiply(piece, sample, weight, collector)
                else:
                    losses[piece.term] += self._forward_backward(piece, sample, weight, collector, results)
                    collector.collect()
                self.current = range(self.current.stop, stop)
            self.current = range(start, stop)
            batch_watch.check()
            collation.check()
            self.watch.check()
            if self._looked != (order.step, self.hooked):
                self._looked = order.step, self.hooked
                self._drew = has_drawn(self._seed, order.step, chunk)
            self._buffers.changes(row.changes, (stop - start) / self.batch.size, chunk == 0)
            if self.worker.device.type == "cuda":  # what was asked for is done before one says so
                torch.cuda.synchronize(self.worker.device)
        except BaseException as error:
            collation.forget()
            self.watch.put_back()
            if isinstance(error, Unreadable):  # an item of the term that comes next
                term, _ = next(numbering.split(self.current))
                self.current = numbering.position(term, range(error.index, error.index + 1))
                raise error.error from None
            raise
        finally:
            self._buffers.restore()
        for view, was_used in zip(row.views, used, strict=True):
            if not was_used:
                view.zero_()
        return tuple(losses), bytes(used)

    def _collated(self) -> Collation:
        cut, found = self._collation
        if cut is not self.cut:
            assert self.batch is not None
            found = Collation(self.batch.tensors())
            self._collation = self.cut, found
        return found

    def _watch_batch(self, start: int, stop: int) -> BatchWatch:
        assert self.batch is not None
        watch = self._watched.get(start)
        if watch is None or watch.stop != stop:
            watch = self._watched[start] = BatchWatch(self.batch, start, stop)
        return watch

    def _forward_backward(
        self, piece: Piece, sample: Sample, weight: float, collector: _Collector, results: list[Any]
    ) -> float:
        for parameter in self._parameters:
            parameter.grad = None
        posthook = self.posthook if self.hooked else None
        loss = self._forward(piece, sample)
        if weight != 0.0:  # else nothing of it counts, and the mean of nothing is NaN
            with collector if posthook is None else nullcontext():  # a posthook may look at the gradients
                loss.backward()  # type: ignore[no-untyped-call]
        sample.loss = loss.item()
        if posthook is not None:
            results.append(posthook(self.worker, sample))
        return _part_of(sample.loss, piece)

    def _multiply(self, piece: Piece, sample: Sample, weight: float, collector: _Collector) -> float:
        """The gradient's own gradient along `direction`; leaves each `.grad` as it was."""
        loss = self._forward(piece, sample)
        if weight != 0.0:
            trained = [(p, v) for p, v in zip(self._parameters, self.direction, strict=True) if p.requires_grad]
            gradients = torch.autograd.grad(loss, [p for p, _ in trained], create_graph=True, allow_unused=True)
            varying = [
                (g, v) for g, (_, v) in zip(gradients, trained, strict=True) if g is not None and g.requires_grad
            ]
            with _grads_kept(self._parameters), collector:
                # `autograd.grad` would pass over functions that cannot be differentiated twice; this raises
                torch.autograd.backward([g for g, _ in varying], [v for _, v in varying])
                collector.collect()
        return _part_of(loss.item(), piece)

    def _forward(self, piece: Piece, sample: Sample) -> torch.Tensor:
        """The loss of what the prehook makes of the sample."""
        if self.prehook is not None and self.hooked:
            self.prehook(self.worker, sample)
        faults.point("worker.forward", self._at)
        with torch.enable_grad():
            objective = self._objectives[piece.term]
            sample.output, loss = objective(sample.inputs, sample.targets, piece.attributes)
        faults.point("worker.backward", self._at)
        return loss


@contextmanager
def _grads_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have no `.grad` inside, and afterwards those of before."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def _part_of(loss: float, piece: Piece) -> float:
    """The contribution of a piece's loss to its term."""
    return loss * piece.weight if piece.weight != 0.0 else 0.0
