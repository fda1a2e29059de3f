"""Ways to do a whole job: ours, and what people use today. Each is a generator: it yields first when it is ready to
step, and then, after each step, what tells how far it has come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import batchopt
from batchopt._machine.cores import usable_cores
from benchmarks.job_tasks import BOUNDS, Task


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
Array = npt.NDArray[np.float64]

ENDLESS: dict[str, Any] = {"max_iter": 10**9, "tolerance_grad": 0.0, "tolerance_change": 0.0}


def _loss(task: Task) -> Judge:
    """f at the module's parameters."""
    inputs = task.inputs if task.whole is None else task.whole()

    def judge() -> Come:
        with torch.enable_grad():  # whose derivatives f may have
            return Come(task.loss(task.module, inputs, task.targets).item())

    return judge


def workers(make: Callable[..., torch.optim.Optimizer], count: int | None = None) -> Way:
    """Ours: an optimizer over so many workers, if not one for each core, until a point that it accepts is there."""

    def way(task: Task, goal: Goal) -> Generator[Judge, None, None]:
        with batchopt.BatchOptimizer(
            task.module,
            loss_fn=task.loss,
            optimizer=lambda params: make(params, callback=lambda progress: goal.is_over(progress.f), **ENDLESS),
            parallelize=count or usable_cores(),
            **task.options,
        ) as opt:
            opt.load(task.inputs, task.targets)
            yield Come
            opt.step(task.inputs, task.targets)
            found = Come(opt.optimizer.result.f, opt.eval_counter)  # type: ignore[union-attr]
            yield lambda: found

    return way


def lbfgs(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Our L-BFGS."""
    return batchopt.LBFGS(params, max_eval=10**9, **options)


def ssbroyden(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Our self-scaled Broyden method."""
    return batchopt.SSBroyden(params, max_eval=10**9, **options)


class _Over(Exception):
    """Far enough, or time is up."""


def torch_lbfgs(task: Task, goal: Goal) -> Generator[Judge, None, None]:
    """`torch.optim.LBFGS` in one process, on all cores, until an evaluation is there; what samples are collated to is
    kept."""
    inputs = task.inputs if task.whole is None else task.whole()
    optimizer = torch.optim.LBFGS(
        task.module.parameters(), history_size=100, line_search_fn="strong_wolfe", max_eval=10**9, **ENDLESS
    )
    found, evaluations = Come(), 0

    def closure() -> torch.Tensor:
        nonlocal found, evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = task.loss(task.module, inputs, task.targets)
        found = Come(loss.item(), evaluations)
        if goal.is_over(found.f):
            raise _Over
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    yield Come
    with suppress(_Over):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    yield lambda: found


def torch_adam(task: Task, goal: Goal) -> Generator[Judge, None, None]:
    """`torch.optim.Adam` over mini-batches of 64, in one process."""
    optimizer = torch.optim.Adam(task.module.parameters(), lr=3e-3)
    judge = _loss(task)
    yield Come
    while True:
        for rows in torch.split(torch.randperm(len(task.targets)), 64):
            optimizer.zero_grad()
            task.loss(task.module, task.inputs[rows], task.targets[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield judge


def scikit_learn(tolerance: float, threads: int | None = None) -> Way:
    """`LogisticRegression`, which cannot be looked at on its way: to a tolerance with which it comes far enough; with
    so many threads of its libraries, if not as many as these take."""

    def way(task: Task, goal: Goal) -> Generator[Judge, None, None]:
        from sklearn.linear_model import LogisticRegression
        from threadpoolctl import threadpool_limits

        model = LogisticRegression(tol=tolerance, max_iter=100_000)
        inputs, labels = task.inputs.numpy(), task.targets.numpy()
        yield Come
        with threadpool_limits(threads):
            model.fit(inputs, labels)
        module: Any = task.module
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(model.coef_))
            module.bias.copy_(torch.from_numpy(model.intercept_))
        yield _loss(task)

    return way


def _by_scipy(function: Callable[[Array], tuple[float, Array]], x0: Array, goal: Goal) -> tuple[Come, Array]:
    """Where L-BFGS-B between bounds is over."""
    from scipy import optimize

    found, at, evaluations = Come(), x0, 0

    def watched(x: Array) -> tuple[float, Array]:
        nonlocal found, at, evaluations
        f, gradient = function(x)
        evaluations += 1
        found, at = Come(f, evaluations), x.copy()
        if goal.is_over(f):
            raise _Over
        return f, gradient

    options = {"maxiter": 10**6, "maxfun": 10**6, "ftol": 0.0, "gtol": 0.0, "maxcor": 50}
    with suppress(_Over):
        optimize.minimize(watched, x0, jac=True, method="L-BFGS-B", bounds=[BOUNDS] * len(x0), options=options)
    return found, at


def scipy_and_torch(task: Task, goal: Goal) -> Generator[Judge, None, None]:
    """SciPy's L-BFGS-B around torch on all cores."""
    parameters = list(task.module.parameters())

    def function(x: Array) -> tuple[float, Array]:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(x), parameters)
        loss = task.loss(task.module, task.inputs, task.targets)
        gradients = torch.autograd.grad(loss, parameters)
        return loss.item(), torch.nn.utils.parameters_to_vector(gradients).numpy()

    x0 = torch.nn.utils.parameters_to_vector(parameters).detach().clone().numpy()
    yield Come
    found, _ = _by_scipy(function, x0, goal)
    yield lambda: found


def scipy_and_workers(task: Task, goal: Goal) -> Generator[Judge, None, None]:
    """SciPy's L-BFGS-B around ours."""
    with batchopt.BatchOptimizer(
        task.module, loss_fn=task.loss, optimizer=None, parallelize=usable_cores(), **task.options
    ) as opt:
        opt.load(task.inputs, task.targets)
        objective = opt.objective()
        yield Come
        found, x = _by_scipy(objective.value_and_grad, objective.x0, goal)
        objective.assign(x)
        yield lambda: found
