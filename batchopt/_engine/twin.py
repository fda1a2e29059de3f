"""A function of a copy of the module, to compare with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from batchopt._data import arguments
from batchopt._engine.engine import Engine
from batchopt._engine.step import Counters
from batchopt._program.copies import copied
from batchopt._program.flat_module import FlatModule
from batchopt_workers.wire.failures import let_through

# The arguments of a `BatchOptimizer` that its twin may have otherwise.
CHANGEABLE = frozenset("parallelize threads_per_worker chunk_size reduction on_nonfinite seed graph".split())


def twin_of(engine: Engine, double: bool, hooks: bool, loaded: bool, changes: dict[str, Any]) -> Engine:
    """Return the engine; documented at `Extensible.twin`."""
    unknown = changes.keys() - CHANGEABLE
    if unknown:
        raise TypeError(f"a twin may differ in {sorted(CHANGEABLE)}; got {sorted(unknown)}")
    for name in changes.keys() - {"reduction"}:
        (arguments.read_count if name == "parallelize" else arguments.read)(name, changes[name])
    if changes.get("chunk_size") == "auto":
        raise ValueError("`chunk_size` of a twin must be a number or None, got 'auto'")
    if changes.get("chunk_size") is not None and engine.settings.threads_per_worker is None:
        changes = {"threads_per_worker": 1, **changes}  # else the bits would depend on their number
    whole = engine.workers.program
    try:
        program = copied(whole)
    except Exception as error:  # a hook may hold what cannot be copied
        let_through(error)
        program = copied(replace(whole, prehook=None, posthook=None))
        program = replace(program, prehook=whole.prehook, posthook=whole.posthook)
    if double:
        program.module._apply(doubled)  # type: ignore[no-untyped-call]  # complex ones too
        if isinstance(program.criterion, torch.nn.Module):
            program.criterion._apply(doubled)  # type: ignore[no-untyped-call]
    if not hooks:
        program = replace(program, prehook=None, posthook=None)
    workers = changes.get("parallelize", 1)
    plain: dict[str, Any] = dict.fromkeys(("speeds", "devices", "compress"))
    plain |= dict.fromkeys(("check_cut", "automatic", "sizes_chunks", "compile", "graph"), False)
    plain |= {"parallelize": 1, "backend": "serial" if workers == 1 else "process", "options": {}, "verbose": 0}
    plain |= {"candidates": ()}
    plain |= {"precode": None} if workers == 1 else {}  # it was run in this process already
    settings = replace(engine.settings, **plain, terms=engine.reader.terms).having(program)
    counters = Counters(steps=engine.past.counters.steps - 1)  # so its first step has the same draws
    twin = Engine(FlatModule(program.module), replace(settings, **changes), counters)
    if loaded:
        twin.begin(twin.workers.prepare(engine.current_step().batch))
    return twin


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """Return it in double precision, unless these are integers."""
    exact = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor if exact else tensor.to(torch.promote_types(tensor.dtype, torch.float64))
