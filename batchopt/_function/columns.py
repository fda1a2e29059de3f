"""f, its gradient and Jacobian by finite differences where there are fewer samples than workers: these divide the
elements of X."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from batchopt._function.engine import Engine
from batchopt._function.tasks import total
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.reduce import weighed
from batchopt.errors import NonFiniteError, WorkerError
from batchopt_workers.batch.batch import Batch, Columns, Part
from batchopt_workers.batch.weighting import Weighting
from batchopt_workers.functions.columns import GradientColumns, JacobianColumns
from batchopt_workers.functions.task import Task
from batchopt_workers.wire.orders import Cut, Kind


def deals(function: Engine) -> bool:
    """Tell whether workers divide the columns of the loaded batch's Jacobian: nothing comes from its samples alone."""
    mode = function.workers.mode
    return function.loaded().deals and mode.posthook is None and not mode.outputs and not function.rules.compresses


def _parts(function: Engine) -> tuple[Batch, Cut]:
    """Return the elements of X as a batch, and its equal parts, one for each worker."""
    size, workers = len(function.parameters), len(function.workers.infos)
    bounds = sorted({size * i // workers for i in range(workers + 1)})
    return Batch((Part(Columns(torch.arange(size)), None, None, Weighting("sum", size)),)), Cut(tuple(bounds))


def evaluate_by_columns(function: Engine) -> torch.Tensor:
    """Evaluate f and df/dX as `Engine.evaluate`, with the same bits."""
    found = list[dict[str, torch.Tensor]]()

    def map() -> Sequence[Answer]:
        task = Task(GradientColumns(function.ready().plan.cut), aside=True, whole=True)
        batch, cut = _parts(function)
        try:
            found.append(total(function, task, batch, carry_out=partial(function.work_on, cut=cut)))
        except (NonFiniteError, WorkerError):  # evaluated in another way, it names the samples
            return function.map()
        return ()

    def reduce(answers: Sequence[Answer]) -> torch.Tensor:
        if not found:
            return function.reduce(answers)
        (whole,), step, subject = found, function.loaded(), function.subject
        subject.renew_gradient().vector.copy_(whole["gradient"])
        subject.show_gradients(bytes(whole["used"].tolist()))
        losses, changes = tuple(whole["losses"].tolist()), whole["changes"]
        function.step = step._replace(losses=losses, changes=changes if changes.numel() else None)
        if step.ended:
            function.end_step()
        return torch.scalar_tensor(weighed(losses, step.weights), dtype=torch.float64, device="cpu")

    return function.evaluate(map, reduce)


def jacobian_by_columns(function: Engine) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the residuals (shape `(samples, d)`) and the Jacobian (shape `(samples, d, n)`) of the loaded batch; None
    if its columns are not dealt."""
    step = function.ready()
    if len(step.batch.parts) > 1 or step.batch.parts[0].one_by_one or not deals(function):
        return None
    batch, cut = _parts(function)
    task = Task(JacobianColumns(step.plan.cut), aside=True, whole=True)
    put_together = partial(function.put_together, samples=batch.size)
    found = function.carry_out(task, batch, Kind.COLLECT, put_together, cut)
    samples = step.batch.size
    return found["residuals"][0].reshape(samples, -1), found["rows"].T.contiguous().view(samples, -1, batch.size)
