"""The backends, by which workers evaluate: one module or folder each, imported on demand."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from batchopt.backends.base import Backend

BACKENDS = {
    "serial": "batchopt.backends.serial:SerialBackend",
    "process": "batchopt.backends.process.backend:ProcessBackend",
    "ranks": "batchopt.backends.ranks.backend:RanksBackend",
    "ray": "batchopt.backends.ray.backend:RayBackend",
}


def backend_class(name: Any) -> type[Backend]:
    """Return the backend called `name`. Raises `ValueError` if there is none."""
    if name not in BACKENDS:
        raise ValueError(f"`backend` must be one of {sorted(BACKENDS)}, got {name!r}")
    module, _, attribute = BACKENDS[name].partition(":")
    found: type[Backend] = getattr(import_module(module), attribute)
    return found


def effective_backend(name: str, workers: int | None) -> type[Backend]:
    """Return the backend that evaluates for `workers` of the one called `name`: a single local worker is this
    process."""
    kind = backend_class(name)
    return backend_class("serial") if workers == 1 and kind.local else kind
