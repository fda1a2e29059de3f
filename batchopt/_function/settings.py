"""What a BatchOptimizer is told, checked: everything but the module and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchopt._data.batches import Reading, Readings
from batchopt._data.denominators import Denominators, resolve_reduction
from batchopt._data.terms import Term, read_terms
from batchopt._function import arguments
from batchopt._mapreduce.speeds import Speeds
from batchopt.backends import is_alone
from batchopt_workers.batch import Collate
from batchopt_workers.evaluate import Program
from batchopt_workers.objective import LossFunction
from batchopt_workers.worker import Hook, Precode


@dataclass(frozen=True)
class Settings:
    """The arguments of `BatchOptimizer`, as documented there. `deterministic`: torch was told to use deterministic
    algorithms. `elastic`: there are to be as many workers as there is room for. `options` are the backend's own.

    `threads` None: as many as the backend thinks right.
    """

    criterion: Callable[..., Any] | None
    loss_fn: LossFunction | None
    terms: dict[str, Term] | None
    workers: int
    backend: str
    reduction: str
    denominators: Denominators | None
    chunk_size: int | None
    collate_fn: Collate | None
    precode: Precode | None
    prehook: Hook | None
    posthook: Hook | None
    speeds: Speeds
    threads: int | None
    devices: tuple[torch.device, ...] | None
    timeout: float | None
    restarts: int
    seed: int
    on_nonfinite: str
    verbose: int
    check_cut: bool
    deterministic: bool
    elastic: bool
    options: Mapping[str, Any]

    @classmethod
    def read(
        cls,
        *,
        criterion: Any,
        loss_fn: Any,
        terms: Any,
        parallelize: Any,
        backend: Any,
        reduction: Any,
        denominators: Any,
        speeds: Any,
        threads_per_worker: Any,
        devices: Any,
        chunk_size: Any,
        collate_fn: Any,
        precode: Any,
        prehook: Any,
        posthook: Any,
        timeout: Any,
        max_restarts: Any,
        seed: Any,
        on_nonfinite: Any,
        verbose: Any,
        check_cut: Any,
        ray_options: Any,
    ) -> Settings:
        """Check every argument; raises `TypeError` or `ValueError` that names the first one that cannot work."""
        devices = arguments.read_devices(devices, parallelize)
        options = arguments.read_ray_options(ray_options, backend)
        workers = arguments.read_workers(parallelize if devices is None else len(devices), backend, options)
        instead = {"criterion": criterion, "loss_fn": loss_fn, "reduction": reduction, "denominators": denominators}
        terms = read_terms(terms, **instead, collate_fn=collate_fn)
        arguments.check_criterion(criterion, loss_fn)
        arguments.check_hooks(precode=precode, prehook=prehook, posthook=posthook)
        arguments.check_callable("collate_fn", collate_fn, ("samples",))
        arguments.check_callable("denominators", denominators, ("inputs", "targets"))
        chunk_size = arguments.read_optional_count("chunk_size", chunk_size)
        threads = arguments.read_optional_count("threads_per_worker", threads_per_worker)
        deterministic = torch.are_deterministic_algorithms_enabled()
        if threads is None and (chunk_size is not None or deterministic):
            threads = 1
        return cls(
            criterion=criterion,
            loss_fn=loss_fn,
            terms=terms,
            workers=workers,
            backend=backend,
            reduction=resolve_reduction(reduction, criterion),
            denominators=denominators,
            chunk_size=chunk_size,
            collate_fn=collate_fn,
            precode=precode,
            prehook=prehook,
            posthook=posthook,
            speeds=arguments.read_speeds(speeds, workers),
            threads=threads,
            devices=devices,
            timeout=arguments.read_timeout(timeout),
            restarts=arguments.read_restarts(max_restarts, workers),
            seed=arguments.read_seed(seed),
            on_nonfinite=arguments.read_on_nonfinite(on_nonfinite),
            verbose=arguments.read_verbose(verbose),
            check_cut=arguments.read_bool("check_cut", check_cut),
            deterministic=deterministic,
            elastic=arguments.is_elastic(parallelize, backend),
            options=options,
        )

    @property
    def loss_fns(self) -> tuple[LossFunction | None, ...]:
        """Of each term; where there are no terms, the one `loss_fn` or None."""
        return (self.loss_fn,) if self.terms is None else tuple(term.loss_fn for term in self.terms.values())

    def having(self, program: Program) -> Settings:
        """The same with the criterion, loss functions and hooks of another program."""
        changed = replace(self, criterion=program.criterion, prehook=program.prehook, posthook=program.posthook)
        if self.terms is None:
            return replace(changed, loss_fn=program.loss_fns[0])
        pairs = zip(self.terms.items(), program.loss_fns, strict=True)
        terms = {name: replace(term, loss_fn=loss_fn) for (name, term), loss_fn in pairs if loss_fn is not None}
        return replace(changed, terms=terms)

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each term in f; where there are no terms, 1."""
        return (1.0,) if self.terms is None else tuple(term.weight for term in self.terms.values())

    def readings(self, device: torch.device | None) -> Readings:
        """How data becomes a batch, all of it on `device` if that is given."""
        if self.terms is None:
            return {None: Reading(self.collate_fn, self.reduction, self.criterion, self.denominators, device)}
        return {
            name: Reading(term.collate_fn, term.reduction, None, term.denominators, device)
            for name, term in self.terms.items()
        }

    @property
    def alone(self) -> bool:
        """Whether this process is the worker."""
        return is_alone(self.backend, self.workers)

    @property
    def fixed_bits(self) -> bool:
        """Whether the bits of the result must not depend on who evaluates what."""
        return self.chunk_size is not None or self.deterministic
