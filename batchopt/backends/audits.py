"""Audits of the user's own module, by copies from before and after an evaluation: see `evaluate.audit`."""

from __future__ import annotations

import torch

from batchopt._machine.cores import torch_threads
from batchopt._program.copies import evaluator_of_copy
from batchopt.backends.base import Setup
from batchopt.errors import WorkerError
from batchopt_workers.evaluate.audit import Copied, audit, check_parameters, few, last_samples
from batchopt_workers.evaluate.clock import Clock
from batchopt_workers.evaluate.draws import draws_kept
from batchopt_workers.evaluate.evaluator import Evaluator
from batchopt_workers.evaluate.sums import GradsKept
from batchopt_workers.wire.failures import kinds_of, let_through, message_of
from batchopt_workers.wire.orders import Kind, Order


class Audits:
    """The audits of an evaluator on the user's own module, of copies from before and after an evaluation; `clock`: when
    they come."""

    def __init__(self, setup: Setup, evaluator: Evaluator) -> None:
        self.clock = Clock()
        self._setup, self._evaluator = setup, evaluator
        self._before: Copied | None = None

    def begin(self, order: Order) -> bool:
        """Copy the program and a few samples before an evaluation that is due; tell whether it will be audited: what
        cannot be copied is not."""
        self._before = self._copy(order)
        return self._before is not None

    def _copy(self, order: Order) -> Copied | None:
        mine, setup = self._evaluator, self._setup
        try:
            with torch.inference_mode(False):
                copy = evaluator_of_copy(setup.program, setup.flat, setup.parameters)
                batch = few(mine.loaded.batch, last_samples(order, mine))
        except Exception as error:
            let_through(error)
            return None
        copy.loss.weights = mine.loss.weights
        return Copied(copy.worker, lambda: copy.eagerly(order.step, batch))

    def end(self, order: Order, threads: int | None) -> None:
        """Raise `WorkerError` if the module is one that finds something else than before the evaluation."""
        before, self._before, mine = self._before, None, self._evaluator
        assert before is not None
        mine.walk.current = last_samples(order, mine)  # for an error
        try:
            check_parameters(mine.worker.module, mine.parameters)
            after = self._copy(order)
            with draws_kept(), torch_threads(threads), torch.inference_mode(False), GradsKept(mine.parameters):
                if after is not None:
                    audit(after, before)
        except ValueError as error:
            raise error_of(mine, order, 0, error) from error
        finally:
            mine.walk.current = range(0)


def error_of(evaluator: Evaluator, order: Order, rank: int, error: Exception) -> WorkerError:
    """Return the error of the worker of that rank, which raised `error` at its current samples."""
    loaded = evaluator.loaded if order.kind is Kind.EVALUATE else evaluator.tasks.loaded
    samples = evaluator.current
    name, message, kinds = type(error).__name__, message_of(error), kinds_of(error)
    return WorkerError(rank, name, message, samples, terms=loaded.batch.numbering.within(samples), kinds=kinds)
