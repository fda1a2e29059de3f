"""A complete training in one call."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from ignite.engine import Engine, State

from batchopt.extending import Batches, arguments, once, read_bool, read_count
from batchopt.ignite.checkpoint import Checkpoint, restore
from batchopt.ignite.evaluator import create_evaluator
from batchopt.ignite.logs import read_logs
from batchopt.ignite.loop import Loop, Parts, progress, read_callbacks
from batchopt.ignite.loop import Moment as Moment
from batchopt.ignite.monitor import Monitor
from batchopt.ignite.schedule import Schedule
from batchopt.ignite.train_data import batches_of
from batchopt.ignite.trainer import create_trainer, length_of
from batchopt.ignite.triggers import EarlyStopping
from batchopt.optimizer import BatchOptimizer


def fit(
    opt: BatchOptimizer,
    train: Any,
    *,
    epochs: int,
    eval_data: Any = None,
    metrics: Any = {},  # noqa: B006  # never modified
    begin_epoch: int = 0,
    score_every: int = 1,
    on_batch: Any = (),
    on_epoch: Any = (),
    on_eval_batch: Any = (),
    on_eval: Any = (),
    monitor: Monitor | None = None,
    scheduler: Any = None,
    scheduler_step: str = "epoch",
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    keep: int = 1,
    resume: str | os.PathLike[str] = "never",
    log: Any = None,
    patience: int | EarlyStopping | None = None,
    epoch_0: bool = False,
    time_limit: float | None = None,
) -> State:
    """Step with `opt` on all batches of `train` until `epochs` epochs are complete, including those of an earlier run.

    After each batch: scheduler (if by batch), monitor, `on_batch`, log and checkpoint if they are due then. After each
    epoch: validation, with `on_eval_batch` after each of its batches and `on_eval` at its end; scheduler; early
    stopping; log; `on_epoch`; checkpoint. So `on_epoch` receives the numbers of the validation.

    Args:
        train: `Batches`, continued from their position; else tensors or a Dataset, as one batch; or a `DataLoader`,
            whose order is then a function of the seed of `opt` and the epoch.
        eval_data, metrics: as for `opt.score`. The values are named `eval_` plus the name of the metric. Without
            `eval_data`, metrics are of the training data, by a forward at the end of the epoch, under their own names.
        begin_epoch: number of epochs considered complete at the start.
        score_every: epochs from one validation to the next.
        on_batch, on_epoch, on_eval_batch, on_eval: a function of a `Moment`, or several; one that returns True stops.
        monitor: a `Monitor`. scheduler: one of torch or ignite over `opt.optimizer`, stepped by `scheduler_step`,
            `"epoch"` or `"batch"`; `ReduceLROnPlateau` watches `eval_loss`, or `loss` without it.
        checkpoint: a folder for checkpoints, of which the newest `keep` are kept; or a `Checkpoint`.
        resume: `"never"`; `"auto"`, from the newest checkpoint if there is one; or the path of one.
        log: the path of a record, `"log.jsonl"`; a folder for TensorBoard, `"runs/"`; a `Record`; a logger of
            ignite (W&B, MLflow, ClearML ...), which gets the numbers of each epoch; or several.
        patience: stop if `eval_loss` (or `loss`, without validation) has not improved for this many epochs; or an
            `EarlyStopping` of another number.
        epoch_0: also validate, write a line and call `on_epoch` before the first epoch.
        time_limit: stop after this many seconds, including those of the runs that this one resumes; an optimizer of
            batchopt also in the middle of a step. A run ends after a step that was `opt.stopped`, too.

    Returns the state of the engine; `metrics` has the numbers of the last epoch. Exceptions in a step or a callback are
    raised unchanged. A run that was killed at any batch, and resumed, has the same bits as an uninterrupted one; with
    `chunk_size`, for any number of workers.

    >>> x, model = torch.linspace(-1, 1, 100)[:, None], torch.nn.Linear(1, 1)
    >>> batches = batchopt.Batches((x, 2 * x), batch_size=20, shuffle=True)
    >>> with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), optimizer="adam") as opt:
    ...     metrics = {"mse": torch.nn.MSELoss()}
    ...     state = batchopt.ignite.fit(opt, batches, epochs=3, eval_data=(x, 2 * x), metrics=metrics)
    >>> state.epoch, sorted(state.metrics)
    (3, ['eval_mse', 'loss'])
    """
    batches = _positioned(batches_of(train, arguments(opt)["seed"]), begin_epoch)
    trainer = create_trainer(opt)
    parts = Parts(
        read_count("epochs", epochs),
        score_every=read_count("score_every", score_every),
        on_batch=read_callbacks("on_batch", on_batch),
        on_epoch=read_callbacks("on_epoch", on_epoch),
        on_eval_batch=read_callbacks("on_eval_batch", on_eval_batch),
        on_eval=read_callbacks("on_eval", on_eval),
        monitor=monitor,
        schedule=None if scheduler is None else Schedule(scheduler, scheduler_step),
        checkpoint=checkpoint if isinstance(checkpoint, Checkpoint | None) else Checkpoint(checkpoint, keep=keep),
        logs=read_logs(log, opt.is_main),
        epoch_0=read_bool("epoch_0", epoch_0),
        time_limit=_read_time_limit(time_limit),
    )
    _read_metrics(parts, opt, eval_data, metrics)
    parts.stopping = _read_patience(patience, parts)
    if resume != "never" and parts.checkpoint is None:
        raise ValueError("`resume` needs `checkpoint`, the folder to resume from")
    with progress(opt, parts.epochs) as parts.progress:
        loop = Loop(opt, trainer, batches, parts)
        loop.attach()
        try:
            return _run(trainer, batches, parts, loop, opt, resume)
        finally:
            for one in parts.logs:
                one.close()


def _run(
    trainer: Engine, batches: Batches, parts: Parts, loop: Loop, opt: BatchOptimizer, resume: str | os.PathLike[str]
) -> State:
    checkpoint = parts.checkpoint
    path = None if checkpoint is None else once(opt, lambda: checkpoint.choose(resume))
    if path is not None:
        before = batches.state_dict()
        try:
            restore(opt, path, loop.load_state_dict)
        except BaseException:
            batches.load_state_dict(before)
            raise
        if loop.is_over:
            trainer.state.epoch, trainer.state.iteration = batches.epoch, batches.iteration
            return trainer.state
    return trainer.run(batches, max_epochs=parts.epochs)


def _positioned(batches: Batches, begin_epoch: int) -> Batches:
    """Return the batches, after this many epochs. Raises `ValueError` at another position, or without a length."""
    begin = read_count("begin_epoch", begin_epoch, least=0)
    if begin and batches.iteration == 0:
        length = length_of(batches)
        if length is None:
            raise ValueError("`begin_epoch` needs the number of batches in an epoch, which this data does not tell")
        batches.load_state_dict({**batches.state_dict(), "epoch": begin, "iteration": begin * length})
    elif begin and (batches.epoch, batches.is_new_epoch) != (begin, True):
        raise ValueError(f"`begin_epoch` is {begin}, but these Batches are in epoch {batches.epoch}: leave it out")
    return batches


def _read_time_limit(time_limit: Any) -> float | None:
    if time_limit is None or time_limit == math.inf:
        return None
    if isinstance(time_limit, bool) or not isinstance(time_limit, int | float):
        raise TypeError(f"`time_limit` must be a number of seconds or None; got {time_limit!r}")
    if not time_limit >= 0:
        raise ValueError(f"`time_limit` must be >= 0 seconds; got {time_limit!r}")
    return float(time_limit)


def _read_metrics(parts: Parts, opt: BatchOptimizer, eval_data: Any, metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"`metrics` must be a dict of metrics by name; got {type(metrics).__name__}")
    if eval_data is not None and not metrics:
        raise ValueError("`eval_data` needs `metrics`: {'loss': torch.nn.functional.cross_entropy}, say")
    taken = [name for name in ("loss", "lr", "epoch", "iteration", "elapsed_time") if name in metrics]
    if eval_data is None and taken:
        raise ValueError(
            f"`metrics` has {taken[0]!r}, which without `eval_data` is the name of another number of the training "
            "('loss' is the mean of its steps): call it something else"
        )
    parts.metrics = metrics
    if eval_data is not None:
        parts.evaluator, parts.eval_data = create_evaluator(opt, metrics), eval_data


def _read_patience(patience: Any, parts: Parts) -> EarlyStopping | None:
    """Return the early stopping. Raises `ValueError` for a number that is not available at the end of an epoch."""
    prefix = "" if parts.evaluator is None else "eval_"
    known = ["loss", *(f"{prefix}{name}" for name in parts.metrics)]
    if patience is None or isinstance(patience, EarlyStopping):
        stopping: EarlyStopping | None = patience
    else:
        stopping = EarlyStopping(f"{prefix}loss", patience)
    if stopping is not None and stopping.key not in known:
        raise ValueError(
            f"early stopping watches {stopping.key!r}, and epochs end with {known}: "
            "give patience=EarlyStopping('eval_accuracy', mode='max'), say, or a metric 'loss'"
        )
    return stopping
