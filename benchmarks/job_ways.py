"""Ways to do a whole job: ours, and what people use today. Each is a generator: it yields first when it is ready to
step, and then, after each step, what tells how far it has come."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import batchopt
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


def ours(make: Callable[..., torch.optim.Optimizer]) -> Way:
    """Ours: an optimizer, as many workers as pay, until a point that it accepts is there."""

    def way(task: Task, goal: Goal) -> Generator[Judge, None, None]:
        with batchopt.BatchOptimizer(
            task.module,
            loss_fn=task.loss,
            optimizer=lambda params: make(params, callback=lambda progress: goal.is_over(progress.f), **ENDLESS),
            parallelize="auto",
            **task.options,
        ) as opt:
            yield Come
            opt.step(task.inputs, task.targets)
            found = Come(opt.result.f, opt.eval_counter)
            yield lambda: found

    return way


def lbfgs(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Our L-BFGS."""
    return batchopt.LBFGS(params, max_eval=10**9, **options)


def ssbroyden(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Our self-scaled Broyden method."""
    return batchopt.SSBroyden(params, max_eval=10**9, **options)


def levenberg(task: Task, goal: Goal) -> Generator[Judge, None, None]:
    """Our Levenberg-Marquardt, of the mean square of what the module returns less the targets."""
    with batchopt.BatchOptimizer(
        task.module,
        torch.nn.MSELoss(),
        optimizer=lambda params: batchopt.LevenbergMarquardt(
            params, callback=lambda progress: goal.is_over(progress.f), max_iter=10**6
        ),
        parallelize="auto",
    ) as opt:
        yield Come
        opt.step(task.inputs, task.targets)
        found = Come(opt.result.f, opt.eval_counter)
        yield lambda: found


def pypose(task: Task, goal: Goal) -> Generator[Judge, None, None]:
    """The Levenberg-Marquardt of PyPose, with its defaults."""
    import pypose as pp

    optimizer = pp.optim.LM(task.module)
    judge = _loss(task)
    yield Come
    while True:
        optimizer.step(task.inputs, task.targets)
        yield judge


def deepxde(task: Task, goal: Goal) -> Generator[Judge, None, None]:
    """Burgers' equation by DeepXDE, its own way: 2,000 steps of Adam, then L-BFGS. As many points as the task, which
    it draws itself, and weights with which its f is the task's."""
    os.environ["DDE_BACKEND"] = "pytorch"
    import deepxde

    deepxde.config.set_default_float("float64")
    deepxde.config.set_random_seed(0)

    def pde(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        along_x, along_t = (deepxde.grad.jacobian(u, x, i=0, j=j) for j in range(2))
        left: torch.Tensor = along_t + u * along_x - 0.01 / math.pi * deepxde.grad.hessian(u, x, i=0, j=0)
        return left

    domain = deepxde.geometry.GeometryXTime(deepxde.geometry.Interval(-1, 1), deepxde.geometry.TimeDomain(0, 0.99))
    sides = deepxde.icbc.DirichletBC(domain, lambda x: 0, lambda _, on_boundary: on_boundary)
    start = deepxde.icbc.IC(domain, lambda x: -np.sin(np.pi * x[:, 0:1]), lambda _, on_initial: on_initial)
    data = deepxde.data.TimePDE(domain, pde, [sides, start], num_domain=2300, num_boundary=200, num_initial=500)
    model = deepxde.Model(data, deepxde.nn.FNN([2, 20, 20, 20, 1], "tanh", "Glorot normal"))
    weights = [3000 / 3700 * part for part in (1.0, 2 / 7, 5 / 7)]
    deepxde.optimizers.set_LBFGS_options(maxiter=10**6, gtol=0.0)
    deepxde.optimizers.config.LBFGS_options |= {"iter_per_step": 50, "fun_per_step": 65}  # to look at f
    model.compile("adam", lr=1e-3, loss_weights=weights)
    found = Come()

    class Look(deepxde.callbacks.Callback):  # type: ignore[misc]
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
    """`torch.optim.LBFGS` in one process, on all cores, until an evaluation is there; what samples are collated to is
    kept."""
    inputs = task.inputs
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
    inputs = inputs if task.whole is None else task.whole()
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
        task.module, loss_fn=task.loss, optimizer=None, parallelize="auto", **task.options
    ) as opt:
        opt.load(task.inputs, task.targets)
        objective = opt.objective()
        yield Come
        found, x = _by_scipy(objective.value_and_grad, objective.x0, goal)
        objective.assign(x)
        yield lambda: found
