"""Ways to do a whole job: ours, and what people use today. Each is a generator: it yields first when it is ready to
step, and then, after each step, what tells how far it has come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, NamedTuple

import torch

import batchopt
from benchmarks.job_tasks import Task
from benchmarks.pinn_deepxde import example, look_often


class Come(NamedTuple):
    """How far a run has come: f, and after how many evaluations of f and its gradient over the whole batch, if these
    can be counted."""

    f: float = math.inf
    evaluations: int | None = None


class Goal:
    """To bring f down to `f`, within so many seconds from the first step on."""

    def __init__(self, f: float, seconds: float) -> None:
        self.f, self._seconds = f, seconds
        self._until = math.inf

    def begin(self) -> None:
        """Now is the first step."""
        self._until = time.monotonic() + self._seconds

    def is_over(self, f: float) -> bool:
        """Whether f is low enough, or time is up."""
        return f <= self.f or time.monotonic() > self._until


# What tells it; asking takes no time of the job.
Judge = Callable[[], Come]
Way = Callable[[Task, Goal], Generator[Judge, None, None]]

ENDLESS: dict[str, Any] = {"tolerance_grad": 0.0, "tolerance_change": 0.0}


def ours(make: Callable[..., torch.optim.Optimizer], criterion: torch.nn.Module | None = None, **options: Any) -> Way:
    """Ours: an optimizer, as many workers as pay, until a point that it accepts is there."""

    def way(task: Task, goal: Goal) -> Generator[Judge, None, None]:
        def optimizer(params: Any) -> torch.optim.Optimizer:
            return make(params, callback=lambda progress: goal.is_over(progress.f), max_iter=10**9, **options)

        f: dict[str, Any] = {"loss_fn": task.loss} if criterion is None else {"criterion": criterion}
        with batchopt.BatchOptimizer(task.module, **f, optimizer=optimizer, parallelize="auto") as opt:
            yield Come
            opt.step(task.inputs, task.targets)
            found = Come(opt.result.f, opt.eval_counter)
            yield lambda: found

    return way


def pypose(task: Task, goal: Goal) -> Generator[Judge, None, None]:
    """The Levenberg-Marquardt of PyPose, with its defaults."""
    import pypose as pp

    optimizer = pp.optim.LM(task.module)
    yield Come
    while True:
        optimizer.step(task.inputs, task.targets)
        yield lambda: Come(task.f())


def deepxde(task: Task, goal: Goal) -> Generator[Judge, None, None]:
    """Burgers' equation by DeepXDE, its own way: 2,000 steps of Adam, then L-BFGS. As many points as the task, which
    it draws itself, and weights with which its f is the task's."""
    library, model = example(0, num_domain=2300, num_boundary=200, num_initial=500)
    weights = [3000 / 3700 * part for part in (1.0, 2 / 7, 5 / 7)]
    look_often(library)
    model.compile("adam", lr=1e-3, loss_weights=weights)
    found = Come()

    class Look(library.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self) -> None:
            nonlocal found
            if self.model.train_state.step:
                found = Come(float(sum(self.model.train_state.loss_train)), self.model.train_state.step)
            self.model.stop_training = goal.is_over(found.f)

    yield Come
    model.train(iterations=2000, display_every=50, callbacks=[Look()], verbose=0)
    if not goal.is_over(found.f):
        model.compile("L-BFGS", loss_weights=weights)
        model.train(display_every=50, callbacks=[Look()], verbose=0)
    yield lambda: found


class _Over(Exception):
    """Far enough, or time is up."""


def torch_lbfgs(task: Task, goal: Goal) -> Generator[Judge, None, None]:
    """`torch.optim.LBFGS` in one process, on all cores, until an evaluation is there."""
    limits = {**ENDLESS, "max_iter": 10**9, "max_eval": 10**9}
    optimizer = torch.optim.LBFGS(task.module.parameters(), history_size=100, line_search_fn="strong_wolfe", **limits)
    found, evaluations = Come(), 0

    def closure() -> torch.Tensor:
        nonlocal found, evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = task.loss(task.module, task.inputs, task.targets)
        found = Come(loss.item(), evaluations)
        if goal.is_over(found.f):
            raise _Over
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    yield Come
    with suppress(_Over):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    yield lambda: found


def scikit_learn(tolerance: float, threads: int | None = None) -> Way:
    """`LogisticRegression`, which cannot be looked at on its way: to a tolerance with which it comes far enough; with
    so many threads of its libraries, if not as many as these take."""

    def way(task: Task, goal: Goal) -> Generator[Judge, None, None]:
        from sklearn.linear_model import LogisticRegression
        from threadpoolctl import threadpool_limits

        model = LogisticRegression(tol=tolerance, max_iter=100_000)
        yield Come
        with threadpool_limits(threads):
            model.fit(task.inputs.numpy(), task.targets.numpy())
        module: Any = task.module
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(model.coef_))
            module.bias.copy_(torch.from_numpy(model.intercept_))
        yield lambda: Come(task.f())

    return way
