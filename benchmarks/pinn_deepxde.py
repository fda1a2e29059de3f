"""DeepXDE's example of Burgers' equation, in a given time."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch

from benchmarks.curves import Curve
from benchmarks.pinn_problems import NU, burgers_solution, relative


def example(seed: int, **points: int) -> tuple[Any, Any]:
    """The library, and its model over so many points, not compiled."""
    os.environ["DDE_BACKEND"] = "pytorch"
    import deepxde

    deepxde.config.set_default_float("float64")
    deepxde.config.set_random_seed(seed)

    def pde(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        along_x, along_t = (deepxde.grad.jacobian(u, x, i=0, j=j) for j in range(2))
        left: torch.Tensor = along_t + u * along_x - NU * deepxde.grad.hessian(u, x, i=0, j=0)
        return left

    domain = deepxde.geometry.GeometryXTime(deepxde.geometry.Interval(-1, 1), deepxde.geometry.TimeDomain(0, 0.99))
    sides = deepxde.icbc.DirichletBC(domain, lambda x: 0, lambda _, on_boundary: on_boundary)
    start = deepxde.icbc.IC(domain, lambda x: -np.sin(np.pi * x[:, 0:1]), lambda _, on_initial: on_initial)
    data = deepxde.data.TimePDE(domain, pde, [sides, start], **points)
    return deepxde, deepxde.Model(data, deepxde.nn.FNN([2, 20, 20, 20, 1], "tanh", "Glorot normal"))


def look_often(deepxde: Any) -> None:
    """Have its L-BFGS go on without tolerances, and call back every 50 iterations."""
    deepxde.optimizers.set_LBFGS_options(maxiter=10**6, gtol=0.0)
    deepxde.optimizers.config.LBFGS_options |= {"iter_per_step": 50, "fun_per_step": 65}


def run(seed: int, seconds: float) -> Curve:
    """Adam for a third of the time, then L-BFGS."""
    deepxde, model = example(seed, num_domain=2540, num_boundary=80, num_initial=160)
    t, x, solution = burgers_solution()
    at = torch.from_numpy(np.stack((x.ravel(), t.ravel()), 1))

    def error() -> float:
        with torch.no_grad():
            return relative(model.net(at).reshape(solution.shape), solution)

    class Look(deepxde.callbacks.Callback):  # type: ignore[misc, name-defined]
        """Stops when the part of the time is over."""

        def on_epoch_end(self) -> None:
            steps = self.model.train_state.step
            curve.look(steps, float(sum(self.model.train_state.loss_train)) if steps else math.nan)
            self.model.stop_training = curve.seconds >= until

    model.compile("adam", lr=1e-3)
    curve, until = Curve(error, seconds), seconds / 3
    model.train(iterations=10**9, callbacks=[Look()], verbose=0)
    look_often(deepxde)
    model.compile("L-BFGS")
    until = seconds
    model.train(callbacks=[Look()], verbose=0)
    return curve
