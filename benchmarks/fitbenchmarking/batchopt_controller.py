"""batchopt as a fitting software of FitBenchmarking, which finds this module by its name."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from fitbenchmarking.controllers.base_controller import Controller

import batchopt
from batchopt.optim.minimizer import Status

LIMIT = 500  # iterations, as FitBenchmarking gives SciPy
FLAGS = {Status.GRADIENT: 0, Status.CHANGE: 0, Status.NO_DECREASE: 0, Status.ITERATIONS: 1, Status.EVALUATIONS: 1}


class BatchoptController(Controller):  # type: ignore[misc]
    """Each fit makes an optimizer with its defaults, for at most 500 iterations, and takes one step."""

    controller_name = "batchopt"
    algorithm_check: ClassVar[dict[str, list[str]]] = {
        **{kind: [] for kind in Controller.algorithm_check},
        "all": ["LevenbergMarquardt", "LBFGS", "SSBroyden"],
        "ls": ["LevenbergMarquardt"],
        "general": ["LBFGS", "SSBroyden"],
        "levenberg-marquardt": ["LevenbergMarquardt"],
        "bfgs": ["LBFGS", "SSBroyden"],
    }
    jacobian_enabled_solvers = algorithm_check["all"]
    no_bounds_minimizers: ClassVar[list[str]] = ["SSBroyden"]
    support_for_bounds = True

    def setup(self) -> None:
        """Translate the bounds."""
        self.bounds = {}
        if self.value_ranges is not None:
            lower, upper = torch.tensor(self.value_ranges, dtype=torch.float64).T
            self.bounds = {"bounds": [(lower, upper)]}

    def fit(self) -> None:
        """Run the optimizer from the start."""
        self.x = torch.nn.Parameter(torch.tensor(self.initial_params, dtype=torch.float64))
        make = getattr(batchopt, self.minimizer)
        self.optimizer = make([self.x], max_iter=LIMIT, **self.bounds)
        self.optimizer.step(self.residuals if self.minimizer == "LevenbergMarquardt" else self.value)

    def residuals(self) -> torch.Tensor:
        """Return the residuals, with a graph in which the Jacobian is constant."""
        at = self.x.detach().numpy()
        residuals, rows = self.cost_func.eval_r(at), self.cost_func.jac_res(at)
        return torch.from_numpy(residuals) + torch.from_numpy(rows) @ (self.x - self.x.detach())

    def value(self) -> torch.Tensor:
        """Return f, with its gradient in `.grad`."""
        at = self.x.detach().numpy()
        self.x.grad = torch.from_numpy(np.asarray(self.cost_func.jac_cost(at), dtype=np.float64))
        return torch.tensor(self.cost_func.eval_cost(at), dtype=torch.float64)

    def cleanup(self) -> None:
        """Hand over the parameters, and why the optimizer stopped."""
        result: Any = self.optimizer.result
        self.flag = FLAGS.get(result.status, 2)
        self.func_evals, self.iteration_count = result.evaluations, result.iterations
        self.final_params = self.x.detach().numpy()
