"""Looking into a module: what it keeps beside its parameters and buffers, and what looks at a whole batch."""

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


def normalises_by_chunk(part: torch.nn.Module) -> bool:
    """Whether `part` is a batch normalisation by the statistics of the samples at hand, not by running ones."""
    is_norm = isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
    return is_norm and (part.training or part.running_mean is None)


def counts_frequencies(part: torch.nn.Module) -> bool:
    """Whether the gradient of `part` depends on how often each of its entries is among the samples at hand."""
    return isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.scale_grad_by_freq


def _digest(value: object) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().tolist()
    try:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
    except Exception:
        return ""
