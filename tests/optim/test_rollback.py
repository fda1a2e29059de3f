"""A step that fails is undone: afterwards everything runs on as if it had never been, with any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import batchopt
from batchopt import BatchOptimizer, WorkerError
from tests.workloads import mlp

Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def two_groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """With learning rates of their own."""
    return [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.01}]


def lbfgs(search: str | None, history: int = 3, lr: float = 0.1) -> Factory:
    """Few iterations a step, and a history that is soon full."""
    return lambda p: torch.optim.LBFGS(p, lr=lr, max_iter=2, history_size=history, line_search_fn=search)


OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "sgd in two groups": lambda p: torch.optim.SGD(two_groups(p), lr=0.02, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adam, all at once": lambda p: torch.optim.Adam(p, lr=0.05, foreach=True),
    "adam with a tensor as lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05)),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
    "lbfgs": lbfgs(None),
    "lbfgs with strong_wolfe": lbfgs("strong_wolfe", lr=1.0),
    "lbfgs with a long history": lbfgs("strong_wolfe", history=100, lr=1.0),
    "our lbfgs": lambda p: batchopt.LBFGS(p, max_iter=2, history_size=3),
    "our lbfgs with a long history": lambda p: batchopt.LBFGS(p, max_iter=2),
    "our lbfgs with l1": lambda p: batchopt.LBFGS(p, max_iter=2, history_size=3, l1=0.01),
    "cg": lambda p: batchopt.CG(p, max_iter=2),
    "ssbroyden": lambda p: batchopt.SSBroyden(p, max_iter=2),
    "levenberg-marquardt": lambda p: batchopt.LevenbergMarquardt(p, max_iter=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_steps_that_failed_everything_runs_on_as_without_them(name: str, tmp_path: Path) -> None:
    """They fail in an evaluation, and once all is done, with learning rates and X changed, too."""
    case = mlp(samples=12)
    before_all = [parameter.detach().clone() for parameter in case.module.parameters()]

    def present(opt: BatchOptimizer) -> bytes:
        opt.save(tmp_path / "present")
        return (tmp_path / "present").read_bytes()

    def run(detours: list[int]) -> bytes:
        with torch.no_grad():
            for parameter, value in zip(case.module.parameters(), before_all, strict=True):
                parameter.copy_(value)
        with BatchOptimizer(case.module, case.criterion, optimizer=OPTIMIZERS[name], speeds=[1.0]) as opt:
            assert opt.optimizer is not None
            evaluations: list[None] = []
            least = 1 if "max_iter" in opt.optimizer.param_groups[0] else 0  # the others evaluate once a step

            def fail(worker: Any, sample: Any) -> None:
                evaluations.append(None)
                if len(evaluations) > least:
                    raise ArithmeticError

            def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                for group in optimizer.param_groups:
                    if isinstance(group.get("lr"), torch.Tensor):
                        group["lr"].fill_(7.0)
                    else:
                        group.update({key: 7.0 for key in ("lr", "damping") if key in group})
                opt.parameters.mul_(3.0)
                raise KeyboardInterrupt

            for count in detours:
                for _ in range(count):
                    before = present(opt)
                    handle = opt.optimizer.register_step_post_hook(spoil)
                    with pytest.raises(KeyboardInterrupt):
                        opt.step(case.inputs, case.targets)
                    handle.remove()
                    assert present(opt) == before
                    opt.prehook = fail
                    evaluations.clear()
                    with pytest.raises(WorkerError, match="ArithmeticError"):
                        opt.step(case.inputs, case.targets)
                    opt.prehook = None
                    assert present(opt) == before
                opt.step(case.inputs, case.targets)
            return present(opt)

    assert run([0, 0, 0, 0]) == run([1, 0, 2, 1])
