"""Looking at what a module keeps beside its parameters and buffers."""

from __future__ import annotations

import hashlib

import cloudpickle
import torch

from batchopt_workers.worker import Worker

_OF_TORCH = ("_parameters", "_buffers", "_modules", "training")


def attributes(worker: Worker) -> dict[str, str]:
    """A digest of each submodule's own attributes, by the submodule's name; those that cannot be pickled are left
    out."""
    assert worker.module is not None
    found = {}
    for name, part in worker.module.named_modules():
        for key, value in vars(part).items():
            if key not in _OF_TORCH:
                found[f"{name}.{key}".lstrip(".")] = _digest(value)
    return found


def _digest(value: object) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().tolist()
    try:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
    except Exception:
        return ""
