"""The map: evaluating a run of chunks. One function, wherever it runs: in the parent, in a child, on another
machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from batchopt_workers.batch import Batch, Piece
from batchopt_workers.buffers import StepBuffers
from batchopt_workers.draws import seed_draws
from batchopt_workers.messages import Cut, Done, Order, Summary
from batchopt_workers.objective import LossFunction, Objective
from batchopt_workers.rows import Row, Rows
from batchopt_workers.tree import Fold, Node
from batchopt_workers.worker import Hook, Sample, Worker


@dataclass(frozen=True)
class Program:
    """What every worker evaluates, for as long as it lives."""

    module: torch.nn.Module
    criterion: Any
    loss_fn: LossFunction | None
    seed: int


@dataclass
class _Partial:
    row: int
    loss: float
    used: bytes


class Evaluator:
    """Evaluates chunks of the loaded batch on one module.

    `parameters` are the module's trainable ones, in the order of the layout. `at_hand` is the range of samples in
    the forward that runs, or ran last.
    """

    def __init__(
        self, program: Program, worker: Worker, parameters: Sequence[torch.Tensor], buffers: StepBuffers
    ) -> None:
        self.worker = worker
        self.prehook: Hook | None = None
        self.posthook: Hook | None = None
        self.batch: Batch | None = None
        self.cut = Cut((0,))
        self.at_hand = range(0)
        self._seed = program.seed
        self._parameters = parameters
        self._buffers = buffers
        self._objective = Objective(program.module, program.criterion, program.loss_fn)

    def evaluate(self, order: Order, rows: Rows) -> tuple[Done, list[Any]]:
        """Evaluate the chunks of `order` into `rows`; returns the partials and what the posthook returned, in sample
        order."""
        started = time.perf_counter()
        free = list(range(len(rows)))[::-1]
        results: list[Any] = []

        def merge(left: _Partial, right: _Partial) -> _Partial:
            rows[left.row].gradient.add_(rows[right.row].gradient)
            rows[left.row].changes.add_(rows[right.row].changes)
            free.append(right.row)
            return _Partial(left.row, left.loss + right.loss, bytes(map(max, left.used, right.used)))

        fold: Fold[_Partial] = Fold(self.cut.chunks, merge)
        for chunk in range(order.first, order.last):
            row = free.pop()
            loss, used = self._chunk(order.step, chunk, rows[row], results)
            fold.add(Node(0, chunk), _Partial(row, loss, used))
        self.at_hand = range(0)
        summaries = tuple(Summary(node, p.row, p.loss, p.used) for node, p in fold.partials)
        return Done(order.evaluation, time.perf_counter() - started, summaries), results

    def _chunk(self, step: int, chunk: int, row: Row, results: list[Any]) -> tuple[float, bytes]:
        assert self.batch is not None
        start, stop = self.cut.bounds[chunk], self.cut.bounds[chunk + 1]
        seed_draws(self._seed, step, chunk)
        loss, used = 0.0, bytearray(len(row.views))
        self.at_hand = range(start, stop)  # while samples are cut out and collated
        try:
            for piece in self.batch.pieces(start, stop):
                weight = self.batch.weighting.of(piece.indices.start, piece.indices.stop)
                loss += self._forward_backward(piece, weight, results)
                self._collect(row, weight, used)
            self._buffers.changes(row.changes, (stop - start) / self.batch.size, chunk == 0)
        finally:
            self._buffers.restore()
        for view, was_used in zip(row.views, used, strict=True):
            if not was_used:
                view.zero_()
        return loss, bytes(used)

    def _forward_backward(self, piece: Piece, weight: float, results: list[Any]) -> float:
        self.at_hand = piece.indices
        for parameter in self._parameters:
            parameter.grad = None
        sample = Sample(piece.inputs, piece.targets, piece.options, piece.indices)
        if self.prehook is not None:
            self.prehook(self.worker, sample)
        with torch.enable_grad():
            sample.output, loss = self._objective(sample.inputs, sample.targets, piece.criterion_weight)
            if weight != 0.0:  # nothing of it counts, and the mean of nothing is NaN
                loss.backward()  # type: ignore[no-untyped-call]
        sample.loss = loss.item()
        if self.posthook is not None:
            results.append(self.posthook(self.worker, sample))
        return sample.loss * weight if weight != 0.0 else 0.0

    def _collect(self, row: Row, weight: float, used: bytearray) -> None:
        """Add the parameters' gradients, times `weight`, to the row; in the row's precision, which is at least single.

        A first gradient overwrites what the row held: cheaper than zeroing the row and accumulating there.
        """
        with torch.no_grad():
            for i, (parameter, view) in enumerate(zip(self._parameters, row.views, strict=True)):
                gradient = parameter.grad
                if gradient is None:
                    continue
                parameter.grad = None
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
                if used[i]:
                    view.add_(gradient, alpha=weight)
                elif weight == 1.0:
                    view.copy_(gradient)
                elif gradient.dtype == view.dtype:
                    torch.mul(gradient, weight, out=view)
                else:
                    view.copy_(gradient).mul_(weight)
                used[i] = 1
