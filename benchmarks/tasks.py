"""An evaluation over a Ray cluster, as one writes it by hand: a task for each part of the batch."""

from __future__ import annotations

import warnings
from typing import Any

import cloudpickle
import numpy as np
import ray
import torch

from benchmarks.arms import share
from benchmarks.workloads import Workload, build

_kept: dict[bytes, Workload] = {}  # in the processes of tasks


def evaluate(key: bytes, case: list[Any], x: Any) -> tuple[float, Any]:
    """A task: the loss of its part of the batch at X, and the gradient. What is behind the reference in `case` is
    fetched once a process."""
    torch.set_num_threads(1)
    if key not in _kept:
        _kept[key] = cloudpickle.loads(ray.get(case[0]))
    part = _kept[key]
    parameters = list(part.module.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # X cannot be written
        torch.nn.utils.vector_to_parameters(torch.from_numpy(x).clone(), parameters)
    for parameter in parameters:
        parameter.grad = None
    loss = part.loss(part.module, part.inputs, part.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
    return loss.item(), gradient.numpy()


class Tasks:
    """One evaluation by hand: X put once, a task a part, gradients added here."""

    def __init__(self, workload: str, count: int) -> None:
        ray.init(log_to_driver=False, configure_logging=False)
        self._case = build(workload)
        self._parts = []
        for i in range(count):
            part = ray.put(cloudpickle.dumps(share(self._case, i, count)))
            self._parts.append((f"{workload} {count} {i}".encode(), [part]))
        self._task = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(evaluate)
        self._parameters = list(self._case.module.parameters())

    def __call__(self) -> float:
        x = ray.put(torch.nn.utils.parameters_to_vector(self._parameters).detach().numpy())
        found = ray.get([self._task.remote(*part, x) for part in self._parts])
        total = np.copy(found[0][1])
        for _, gradient in found[1:]:
            total += gradient
        total /= len(found)
        gradients, at = torch.from_numpy(total), 0
        for parameter in self._parameters:
            parameter.grad = gradients[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        return float(np.mean([loss for loss, _ in found]))
