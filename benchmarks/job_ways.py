"""Ways to do a whole job: ours, and what people use today. Each is a generator: it yields first when it is ready to
step, and then, after each step, what tells how far it has come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import batchopt
from batchopt._machine.cores import usable_cores
from benchmarks.job_tasks import BOUNDS, Task

# What tells it; asking takes no time of the job.
Judge = Callable[[], float]
Way = Callable[[Task], Iterator[Judge]]
Array = npt.NDArray[np.float64]

FOR_EVER: dict[str, Any] = {"max_eval": 10**9, "tolerance_grad": 0.0, "tolerance_change": 0.0}
ITERATIONS = 5  # of a step


def _never() -> float:
    return math.inf


def _loss(task: Task) -> Judge:
    """f at the module's parameters."""
    inputs = task.inputs if task.whole is None else task.whole()

    def judge() -> float:
        with torch.enable_grad():  # whose derivatives f may have
            return task.loss(task.module, inputs, task.targets).item()

    return judge


def workers(make: Callable[[Any], torch.optim.Optimizer]) -> Way:
    """Ours: an optimizer over a worker for each core."""

    def way(task: Task) -> Iterator[Judge]:
        with batchopt.BatchOptimizer(
            task.module, loss_fn=task.loss, optimizer=make, parallelize=usable_cores(), **task.options
        ) as opt:
            opt.load(task.inputs, task.targets)
            yield _never
            while True:
                opt.step(task.inputs, task.targets)
                yield lambda: opt.optimizer.result.f  # type: ignore[union-attr]

    return way


def lbfgs(params: Any) -> torch.optim.Optimizer:
    """Our L-BFGS."""
    return batchopt.LBFGS(params, max_iter=ITERATIONS, **FOR_EVER)


def ssbroyden(params: Any) -> torch.optim.Optimizer:
    """Our self-scaled Broyden method."""
    return batchopt.SSBroyden(params, max_iter=ITERATIONS, **FOR_EVER)


def torch_lbfgs(task: Task) -> Iterator[Judge]:
    """`torch.optim.LBFGS` in one process, on all cores; what samples are collated to is kept."""
    inputs = task.inputs if task.whole is None else task.whole()
    optimizer = torch.optim.LBFGS(
        task.module.parameters(), max_iter=ITERATIONS, history_size=100, line_search_fn="strong_wolfe", **FOR_EVER
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = task.loss(task.module, inputs, task.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    judge = _loss(task)
    yield _never
    while True:
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        yield judge


def torch_adam(task: Task) -> Iterator[Judge]:
    """`torch.optim.Adam` over mini-batches of 64, in one process."""
    optimizer = torch.optim.Adam(task.module.parameters(), lr=3e-3)
    judge = _loss(task)
    yield _never
    while True:
        for rows in torch.split(torch.randperm(len(task.targets)), 64):
            optimizer.zero_grad()
            task.loss(task.module, task.inputs[rows], task.targets[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield judge


def scikit_learn(tolerance: float) -> Way:
    """`LogisticRegression`, which cannot be looked at on its way: to a tolerance with which it comes far enough."""

    def way(task: Task) -> Iterator[Judge]:
        from sklearn.linear_model import LogisticRegression

        model = LogisticRegression(tol=tolerance, max_iter=100_000)
        inputs, labels = task.inputs.numpy(), task.targets.numpy()
        yield _never
        model.fit(inputs, labels)
        module: Any = task.module
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(model.coef_))
            module.bias.copy_(torch.from_numpy(model.intercept_))
        yield _loss(task)

    return way


class _Reached(Exception):
    """Far enough."""


def _by_scipy(function: Callable[[Array], tuple[float, Array]], x0: Array, goal: float) -> float:
    """f where L-BFGS-B between bounds first comes to the goal."""
    from scipy import optimize

    found = math.inf

    def watched(x: Array) -> tuple[float, Array]:
        nonlocal found
        found, gradient = function(x)
        if found <= goal:
            raise _Reached
        return found, gradient

    try:
        options = {"maxiter": 10**6, "maxfun": 10**6, "ftol": 0.0, "gtol": 0.0, "maxcor": 50}
        optimize.minimize(watched, x0, jac=True, method="L-BFGS-B", bounds=[BOUNDS] * len(x0), options=options)
    except _Reached:
        pass
    return found


def scipy_and_torch(goal: float) -> Way:
    """SciPy's L-BFGS-B around torch on all cores."""

    def way(task: Task) -> Iterator[Judge]:
        parameters = list(task.module.parameters())

        def function(x: Array) -> tuple[float, Array]:
            torch.nn.utils.vector_to_parameters(torch.from_numpy(x), parameters)
            loss = task.loss(task.module, task.inputs, task.targets)
            gradients = torch.autograd.grad(loss, parameters)
            return loss.item(), torch.nn.utils.parameters_to_vector(gradients).numpy()

        x0 = torch.nn.utils.parameters_to_vector(parameters).detach().clone().numpy()
        yield _never
        found = _by_scipy(function, x0, goal)
        yield lambda: found

    return way


def scipy_and_workers(goal: float) -> Way:
    """SciPy's L-BFGS-B around ours."""

    def way(task: Task) -> Iterator[Judge]:
        with batchopt.BatchOptimizer(
            task.module, loss_fn=task.loss, optimizer=None, parallelize=usable_cores(), **task.options
        ) as opt:
            opt.load(task.inputs, task.targets)
            objective = opt.objective()
            yield _never
            found = _by_scipy(objective.value_and_grad, objective.x0, goal)
            yield lambda: found

    return way
