"""Refuses, by name, what cannot be sent to workers or shared with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from batchopt._program.unpicklable import blame
from batchopt_workers.process.interrupts import let_through


@contextmanager
def sending(what: str, *objects: Any) -> Iterator[None]:
    """Turn an error of pickling `objects` into a `TypeError` that names `what`, and what it captures."""
    try:
        yield
    except Exception as error:
        let_through(error)
        blamed = next((found for found in map(blame, objects) if found), None)
        reason = str(error) if blamed is None else f"it captures {blamed}: {error}"
        raise TypeError(f"{what} cannot be sent to worker processes: {reason}") from error


def check_module(module: torch.nn.Module) -> None:
    """Raise `TypeError` for a module whose parameters cannot be those of X in workers, and `ValueError` for one whose
    forward writes its parameters, which all workers share."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(p.requires_grad for p in part.parameters()):
            what = f"'{name}'" if name else "`module`"
            raise TypeError(
                f"{what} was made by torch.jit ({type(part).__name__}), whose parameters cannot be made views of X in "
                "workers: pass the module that it was made of, or use parallelize=1"
            )
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.max_norm is not None:
            raise ValueError(
                f"'{name}' has max_norm: it writes its weight in every forward, which all workers share; normalise "
                "what comes out of it instead, or use parallelize=1"
            )
