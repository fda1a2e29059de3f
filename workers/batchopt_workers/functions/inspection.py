"""Inspects modules for state outside of parameters and buffers, and for layers whose result depends on the whole
chunk."""

from __future__ import annotations

import hashlib

import cloudpickle
import torch

from batchopt_workers.evaluate.program import Worker

_OF_TORCH = ("_parameters", "_buffers", "_modules")


def written(worker: Worker) -> dict[str, str]:
    """Return a digest, by name, of everything that a forward may write: the buffers, frozen parameters and own
    attributes of each part of the module and of the criterion; the digest is empty for what cannot be pickled."""
    found = {}
    for prefix, whole in (("", worker.module), ("criterion", worker.criterion)):
        if isinstance(whole, torch.nn.Module):
            for name, part in whole.named_modules(prefix=prefix):
                found.update({f"{name}.{key}".lstrip("."): _digest(value) for key, value in _kept(part).items()})
    return found


def _kept(part: torch.nn.Module) -> dict[str, object]:
    own = {key: value for key, value in vars(part).items() if key not in _OF_TORCH}
    frozen = {key: value for key, value in part._parameters.items() if value is not None and not value.requires_grad}
    return {**own, **part._buffers, **frozen}


def name_of(part: torch.nn.Module, module: torch.nn.Module) -> str:
    """Return the name of a part within `module`."""
    found: str = next(name for name, other in module.named_modules() if other is part)
    return found


def normalises_by_chunk(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the first batch normalisation by the statistics of the current samples, not by running ones, or None."""
    for part in module.modules():
        is_norm = isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
        if is_norm and (part.training or part.running_mean is None):
            return part
    return None


def counts_frequencies(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the first part whose gradient depends on how often each entry occurs in the current samples, or None."""
    for part in module.modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.scale_grad_by_freq:
            return part
    return None


def _digest(value: object) -> str:
    try:
        value = value.get_state() if isinstance(value, torch.Generator) else value
        if isinstance(value, torch.Tensor):
            octets = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            return hashlib.sha256(octets.data).hexdigest()
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
    except Exception:
        return ""
