"""f, its gradient and Jacobian by finite differences where there are fewer samples than workers: these divide the
elements of X."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from batchopt._engine.engine import Engine
from batchopt._functions.tasks import total
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.reduce import weighed
from batchopt.errors import NonFiniteError, WorkerError
from batchopt_workers.batch.batch import Batch, Columns, Part
from batchopt_workers.batch.weighting import Weighting
from batchopt_workers.functions.columns import GradientColumns, JacobianColumns
from batchopt_workers.functions.task import Task
from batchopt_workers.wire.orders import Cut, Kind


def deals(engine: Engine) -> bool:
    """Tell whether workers divide the columns of the loaded batch's Jacobian: nothing comes from its samples alone."""
    mode = engine.workers.mode
    return engine.loaded().deals and mode.posthook is None and not mode.outputs and not engine.rules.compresses


def _parts(engine: Engine) -> tuple[Batch, Cut]:
    """Return the elements of X as a batch, and its equal parts, one for each worker."""
    size, workers = len(engine.parameters), len(engine.workers.infos)
    bounds = sorted({size * i // workers for i in range(workers + 1)})
    return Batch((Part(Columns(torch.arange(size)), None, None, Weighting("sum", size)),)), Cut(tuple(bounds))


def evaluate_by_columns(engine: Engine) -> torch.Tensor:
    """Evaluate f and df/dX as `Engine.evaluate`, with the same bits."""
    found = list[dict[str, torch.Tensor]]()

    def map() -> Sequence[Answer]:
        task = Task(GradientColumns(engine.current_step().plan.cut), aside=True, whole=True)
        batch, cut = _parts(engine)
        try:
            found.append(total(engine, task, batch, run_task=partial(engine.run_task_amid, cut=cut)))
        except (NonFiniteError, WorkerError):  # evaluated in another way, it names the samples
            return engine.map()
        return ()

    def reduce(answers: Sequence[Answer]) -> torch.Tensor:
        if not found:
            return engine.reduce(answers)
        (whole,), step, subject = found, engine.loaded(), engine.subject
        subject.renew_gradient().vector.copy_(whole["gradient"])
        subject.show_gradients(bytes(whole["used"].tolist()))
        losses, changes = tuple(whole["losses"].tolist()), whole["changes"]
        engine.step = step._replace(losses=losses, changes=changes if changes.numel() else None)
        if step.ended:
            engine.end_step()
        return torch.scalar_tensor(weighed(losses, step.weights), dtype=torch.float64, device="cpu")

    return engine.evaluate(map, reduce)


def jacobian_by_columns(engine: Engine) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the residuals (shape `(samples, d)`) and the Jacobian (shape `(samples, d, n)`) of the loaded batch; None
    if its columns are not dealt."""
    step = engine.current_step()
    if len(step.batch.parts) > 1 or step.batch.parts[0].one_by_one or not deals(engine):
        return None
    batch, cut = _parts(engine)
    task = Task(JacobianColumns(step.plan.cut), aside=True, whole=True)
    put_together = partial(engine.put_together, samples=batch.size)
    found = engine.run_task(task, batch, Kind.COLLECT, put_together, cut)
    samples = step.batch.size
    return found["residuals"][0].reshape(samples, -1), found["rows"].T.contiguous().view(samples, -1, batch.size)
