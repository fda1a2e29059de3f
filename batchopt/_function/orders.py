"""The orders of a task: its cut among the workers, and again if they had too little memory for it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from batchopt._mapreduce.plan import Plan, choose_chunk_size, make_plan, plan_of
from batchopt._mapreduce.reduce import Answers
from batchopt.errors import WorkerError
from batchopt_workers.batch.batch import Batch
from batchopt_workers.functions.task import Task
from batchopt_workers.wire.orders import Cut, Kind

if TYPE_CHECKING:
    from batchopt._function.engine import Engine


def answers_to(engine: Engine, task: Task, batch: Batch, kind: Kind, cut: Cut | None) -> tuple[Plan, Answers]:
    """Return the plan and the answers of a task that the workers have begun; `cut`: as it is to be cut, None as
    evaluations are."""
    workers, sizes = engine.workers, engine.policies.sizes
    while True:
        plan = _plan(engine, task, batch, cut)
        order = plan.order(workers.number(), engine.history.counters.steps, kind)
        evaluate = partial(workers.backend.evaluate, plan.cut, order, plan.runs, engine.observers.busy)
        try:
            return plan, evaluate()
        except WorkerError as error:
            if cut is not None or sizes is None or not sizes.shrinks(engine, error, plan.cut):
                raise


def _plan(engine: Engine, task: Task, batch: Batch, cut: Cut | None) -> Plan:
    """Return the step's plan for all terms of its batch, so that draws match its evaluations; else a new plan."""
    if not task.aside and len(engine.loaded().batch.parts) == len(batch.parts):
        return engine.loaded().plan
    settings, speeds = engine.settings, engine.workers.speeds_of_tasks
    if cut is not None:
        return plan_of(cut, speeds)
    given = settings.chunk_size if engine.policies.sizes is None else engine.policies.sizes.size_for(batch.size)
    return make_plan(batch.size, choose_chunk_size(batch.size, given, settings.deterministic), speeds)
