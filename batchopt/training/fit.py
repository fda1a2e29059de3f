"""A complete training in one call."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from operator import length_hint
from typing import Any

from batchopt.extending import Batches, LoaderSource, once, read_bool, read_count, read_positive, scored
from batchopt.optimizer import BatchOptimizer
from batchopt.training.checkpoint import Checkpoint
from batchopt.training.journal import Journal, Writing
from batchopt.training.logs import read_logs
from batchopt.training.loop import Training, Validation
from batchopt.training.moments import State, read_callbacks
from batchopt.training.monitor import Monitor
from batchopt.training.progress import progress
from batchopt.training.schedule import Schedule
from batchopt.training.triggers import EarlyStopping, EveryEpoch


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
            whose order is its own, and which can be resumed at ends of epochs alone.
        eval_data, metrics: as for `opt.score`. The values are named `eval_` plus the name of the metric. Without
            `eval_data`, metrics are of the training data, by a forward at the end of the epoch, under their own names.
        begin_epoch: number of epochs considered complete at the start.
        score_every: epochs from one validation to the next.
        on_batch, on_epoch, on_eval_batch, on_eval: a function of a `Moment`, or several; one that returns True stops.
        monitor: a `Monitor`. scheduler: one of torch over `opt.optimizer`, stepped by `scheduler_step`, `"epoch"` or
            `"batch"`; `ReduceLROnPlateau` watches `eval_loss`, or `loss` without it.
        checkpoint: a folder for checkpoints, of which the newest `keep` are kept; or a `Checkpoint`.
        resume: `"never"`; `"auto"`, from the newest checkpoint if there is one; or the path of one.
        log: the path of a record, `"log.jsonl"`; a folder for TensorBoard, `"runs/"`; a `Record`; a function
            `log(numbers, iteration)`, called at the end of each epoch; or several.
        patience: stop if `eval_loss` (or `loss`, without validation) has not improved for this many epochs; or an
            `EarlyStopping` of another number.
        epoch_0: also validate, write a line and call `on_epoch` before the first epoch.
        time_limit: stop after this many seconds, including those of the runs that this one resumes; an optimizer of
            batchopt also in the middle of a step. A run ends after a step that was `opt.stopped`, too.

    Returns the `State` at the end; `metrics` has the numbers of the last epoch. Exceptions in a step or a callback are
    raised unchanged. A run over `Batches` that was killed at any batch, and resumed, has the same bits as an
    uninterrupted one; with `chunk_size`, for any number of workers.

    >>> x, model = torch.linspace(-1, 1, 100)[:, None], torch.nn.Linear(1, 1)
    >>> batches = batchopt.Batches((x, 2 * x), batch_size=20, shuffle=True)
    >>> with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), optimizer="adam") as opt:
    ...     metrics = {"mse": torch.nn.MSELoss()}
    ...     state = batchopt.training.fit(opt, batches, epochs=3, eval_data=(x, 2 * x), metrics=metrics)
    >>> state.epoch, sorted(state.metrics)
    (3, ['eval_mse', 'loss'])
    """
    if not isinstance(opt, BatchOptimizer):
        raise TypeError(f"`opt` must be a BatchOptimizer; got {type(opt).__name__}")
    batches = _positioned(train if isinstance(train, Batches) else Batches(train), begin_epoch)
    epochs, prefix = read_count("epochs", epochs), "" if eval_data is None else "eval_"
    if not isinstance(checkpoint, Checkpoint | None):
        checkpoint = Checkpoint(checkpoint, keep=keep)
    _check_checkpoint(checkpoint, batches, resume)
    _check_metrics(opt, eval_data, metrics)
    with ExitStack() as ends:
        logs = [Writing(ends.enter_context(closing(one))) for one in read_logs(log, opt.is_main)]
        training = Training(
            opt,
            batches,
            epochs,
            Validation(eval_data, metrics, read_count("score_every", score_every), read_bool("epoch_0", epoch_0)),
            read_callbacks(on_batch=on_batch, on_epoch=on_epoch, on_eval_batch=on_eval_batch, on_eval=on_eval),
            Journal(opt, batches, logs, monitor, ends.enter_context(progress(opt, epochs))),
            None if scheduler is None else Schedule(scheduler, scheduler_step),
            checkpoint,
            None if patience is None else _read_patience(patience, prefix, metrics),
            None if time_limit in (None, math.inf) else read_positive("time_limit", time_limit, "number of seconds"),
            State(epoch_length=length_hint(batches) or None),
        )
        path = None if checkpoint is None else once(opt, lambda: checkpoint.choose(resume))
        if path is not None:
            training.resume(path)
        return training.run()


def _positioned(batches: Batches, begin_epoch: int) -> Batches:
    """Return the batches, after this many epochs. Raises `ValueError` at another position, or without a length."""
    begin = read_count("begin_epoch", begin_epoch, least=0)
    if begin and batches.iteration == 0:
        if not (length := length_hint(batches)):
            raise ValueError("`begin_epoch` needs the number of batches in an epoch, which this data does not tell")
        batches.load_state_dict({**batches.state_dict(), "epoch": begin, "iteration": begin * length})
    elif begin and (batches.epoch, batches.is_new_epoch) != (begin, True):
        raise ValueError(f"`begin_epoch` is {begin}, but these Batches are in epoch {batches.epoch}: leave it out")
    return batches


def _check_checkpoint(checkpoint: Checkpoint | None, batches: Batches, resume: str | os.PathLike[str]) -> None:
    if checkpoint is None and resume != "never":
        raise ValueError("`resume` needs `checkpoint`, the folder to resume from")
    every = checkpoint and checkpoint.interval
    at_ends = every is None or (isinstance(every, EveryEpoch) and every.is_of_whole_epochs)
    if isinstance(batches.source, LoaderSource) and not at_ends:
        what = (
            "a loader can be resumed at ends of epochs alone: leave `every` of the Checkpoint out, or give as `train`"
        )
        raise ValueError(f"{what} Batches(dataset, batch_size, shuffle=True), which can be resumed anywhere")


def _check_metrics(opt: BatchOptimizer, eval_data: Any, metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"`metrics` must be a dict of metrics by name; got {type(metrics).__name__}")
    if eval_data is not None and not metrics:
        raise ValueError("`eval_data` needs `metrics`: {'loss': torch.nn.functional.cross_entropy}, say")
    taken = [name for name in ("loss", "lr", "epoch", "iteration", "elapsed_time") if name in metrics]
    if eval_data is None and taken:
        what = f"`metrics` has {taken[0]!r}, which without `eval_data` is the name of another number of the training"
        raise ValueError(f"{what} ('loss' is the mean of its steps): call it something else")
    scored(opt, None, metrics)  # raises for what are no metrics


def _read_patience(patience: Any, prefix: str, metrics: Mapping[str, Any]) -> EarlyStopping:
    """Return the early stopping. Raises `ValueError` for a number that is not available at the end of an epoch."""
    known = ["loss", *(f"{prefix}{name}" for name in metrics)]
    stopping = patience if isinstance(patience, EarlyStopping) else EarlyStopping(f"{prefix}loss", patience)
    if stopping.key not in known:
        what = f"early stopping watches {stopping.key!r}, and epochs end with {known}"
        raise ValueError(f"{what}: give patience=EarlyStopping('eval_accuracy', mode='max'), say, or a metric 'loss'")
    return stopping
