"""The checked arguments of a BatchOptimizer, except the module and the optimizer."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from batchopt._data import arguments
from batchopt._data.batches import BatchSpec, BatchSpecs
from batchopt._data.denominators import resolve_reduction
from batchopt._data.terms import Term, read_terms
from batchopt._engine.search import Way
from batchopt._mapreduce.speeds import Speeds
from batchopt.backends import BACKENDS, backend_class, effective_backend
from batchopt.backends.base import Backend, CompressingBackend
from batchopt.backends.nodes.compression import Compression, read_compress
from batchopt_workers.batch.items import Collate, CollatesAll
from batchopt_workers.batch.weighting import Denominators
from batchopt_workers.evaluate.objective import LossFunction, is_of_module
from batchopt_workers.evaluate.program import Hook, Precode, Program
from batchopt_workers.functions.simulation import is_by_differences
from batchopt_workers.functions.squares import MeanSquare
from batchopt_workers.wire.failures import names_of

# The arguments that are read one by one.
_READ = (
    "chunk_size threads_per_worker timeout max_restarts seed verbose cache check_cut "
    "compile stop_on on_interrupt history"
)


@dataclass(frozen=True)
class Settings:
    """The arguments of `BatchOptimizer`, by the same names and as documented there, as checked by `read`.

    `on_nonfinite` is divided into what is done and `nonfinite_errors`, and `compile` into what is compiled and whether
    a card records (`graph`). `reduction` None: the criterion's own, else the mean. `parallelize` None: as many workers
    as there is room for at any time. `threads_per_worker` None: chosen by the backend. `deterministic`: torch was set
    to use deterministic algorithms. `options` are the backend's own. `automatic`: the number of workers is chosen by
    measured times, on the cores or on `candidates` (`devices` is None); `sizes_chunks`: so is the size of chunks, and
    `chunk_size` is None.
    """

    criterion: Callable[..., Any] | None
    loss_fn: LossFunction | None
    terms: dict[str, Term] | None
    parallelize: int | None
    backend: str
    reduction: str | None
    denominators: Denominators | None
    chunk_size: int | None
    collate_fn: Collate | None
    cache: bool
    precode: Precode | None
    prehook: Hook | None
    posthook: Hook | None
    speeds: Speeds | None
    threads_per_worker: int | None
    devices: tuple[torch.device, ...] | None
    timeout: float | None
    max_restarts: int | None
    seed: int
    on_nonfinite: str
    nonfinite_errors: tuple[type[Exception], ...]
    verbose: int
    check_cut: bool
    compile: bool | str
    graph: bool
    stop_on: tuple[signal.Signals, ...]
    on_interrupt: str
    history: int | Mapping[str, arguments.NumberFunction]
    compress: Compression | None
    automatic: bool = False
    candidates: tuple[torch.device, ...] = ()
    sizes_chunks: bool = False
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """Check every argument in `given`, which may contain others too. Nothing is started. Raises `TypeError` or
        `ValueError` that names the first one that cannot work."""
        found = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        kind, options = backend_class(found["backend"]), _read_options(given)
        devices = arguments.read_devices(found["devices"], found["parallelize"])
        if found["parallelize"] == "auto" and devices is not None and found["backend"] != "process":
            raise ValueError("`devices` with parallelize='auto' are for backend='process': leave `parallelize` out")
        workers = kind.read_workers(found["parallelize"] if devices is None else len(devices))
        instead = {name: found[name] for name in ("criterion", "loss_fn", "reduction", "denominators", "collate_fn")}
        automatic = _is_automatic(found, workers)
        candidates = devices if automatic and devices is not None else ()
        terms = read_terms(found["terms"], residual=given["residual"], **instead)
        if given["residual"] is not None:
            found["loss_fn"] = _mean_square(given["residual"], found)
        arguments.check_criterion(found["criterion"], found["loss_fn"])
        for name in ("precode", "prehook", "posthook", "collate_fn", "denominators"):
            arguments.check_callable(name, found[name])
        resolve_reduction(found["reduction"], found["criterion"])
        found["graph"] = found["compile"] is not False
        found |= {name: arguments.read(name, found[name]) for name in _READ.split()}
        found["on_nonfinite"], found["nonfinite_errors"] = arguments.read_nonfinite(found["on_nonfinite"])
        found["compress"] = read_compress(found["compress"])
        if found["chunk_size"] == "auto":
            found |= {"chunk_size": None, "sizes_chunks": not torch.are_deterministic_algorithms_enabled()}
        found |= {"devices": None if automatic else devices, "parallelize": 1 if automatic else workers}
        settings = cls(**{**found, "terms": terms, "candidates": candidates})
        if settings.compress is not None and not issubclass(kind, CompressingBackend):
            raise ValueError(
                f"`compress` is for gradients that cross a network, got backend={settings.backend!r}, where none does: "
                "leave it out, or use backend='ray'"
            )
        if candidates:
            _check_candidates(settings)
        if settings.compile and not kind.compiles:
            raise ValueError(
                f"`compile` is for workers of this machine and for ranks, got backend={settings.backend!r}, whose "
                "machines may not make the same code: leave it out"
            )
        threads = settings.threads_per_worker
        speeds = arguments.read_speeds(found["speeds"], None if kind.has_peers else workers)  # of all ranks, later
        if threads is None and settings.fixed_bits:
            threads = 1
        return replace(settings, options=options, threads_per_worker=threads, speeds=speeds, automatic=automatic)

    def at(self, device: torch.device) -> Settings:
        """Return these settings for a module on that device: on a card it is evaluated by this process, which its own
        device as the only one of `devices` asks for, too."""
        if device.type == "cpu":
            return self
        devices = self.devices or self.candidates or None
        is_its_own = devices is not None and [_indexed(one) for one in devices] == [_indexed(device)]
        return replace(self, devices=None if is_its_own else devices, automatic=False, candidates=())

    def using(self, way: Way) -> Settings:
        """Return these settings with other workers."""
        workers, threads, devices, _ = way
        return replace(self, parallelize=workers, threads_per_worker=threads, devices=devices or None)

    @property
    def loss_fns(self) -> tuple[LossFunction | None, ...]:
        """The loss function of each term; without terms, `loss_fn` or None alone."""
        return (self.loss_fn,) if self.terms is None else tuple(term.loss_fn for term in self.terms.values())

    def having(self, program: Program) -> Settings:
        """Return these settings with the criterion, loss functions and hooks of another program."""
        changed = replace(self, criterion=program.criterion, prehook=program.prehook, posthook=program.posthook)
        if self.terms is None:
            return replace(changed, loss_fn=program.loss_fns[0])
        pairs = zip(self.terms.items(), program.loss_fns, strict=True)
        terms = {name: replace(term, loss_fn=loss_fn) for (name, term), loss_fn in pairs if loss_fn is not None}
        return replace(changed, terms=terms)

    def specs(self, device: torch.device | None, here: torch.device) -> BatchSpecs:
        """Return the rules by which data becomes a batch, on `device` if given, with the current criterion; X is
        `here`. Raises `ValueError` for a criterion that no longer reduces, or not as `reduction` says."""
        if self.terms is None:
            return {None: self._reading(self, resolve_reduction(self.reduction, self.criterion), device)}
        specs = {name: self._reading(term, term.reduction, device) for name, term in self.terms.items()}
        own = torch.zeros(1, device=here)
        return {n: replace(spec, own=own) if is_of_module(spec.loss_fn) else spec for n, spec in specs.items()}

    def _reading(self, of: Settings | Term, reduction: str, device: torch.device | None) -> BatchSpec:
        criterion, collate = of.criterion if isinstance(of, Settings) else None, of.collate_fn
        if collate is not None and reduction == "mean" and of.denominators is None:
            collate = CollatesAll(collate)  # only with `denominators` may it omit samples: they tell what counts
        return BatchSpec(collate, reduction, criterion, of.denominators, device, self.cache, of.loss_fn)

    @property
    def backend_class(self) -> type[Backend]:
        """The class of the backend that will evaluate."""
        return effective_backend(self.backend, self.parallelize if self.devices is None else None)

    @property
    def kinds_as_infinite(self) -> frozenset[str]:
        """The names of the exception classes that mean an infinite loss."""
        return frozenset(names_of(self.nonfinite_errors))

    @cached_property
    def alone(self) -> bool:
        """Tell whether this process is the worker."""
        return self.backend_class is backend_class("serial")

    @property
    def fixed_bits(self) -> bool:
        """Tell whether the bits of the result must not depend on which worker evaluates what."""
        return self.chunk_size is not None or self.deterministic

    def by_differences(self, module: torch.nn.Module) -> bool:
        """Tell whether part of f, of this module, is differentiated by finite differences."""
        loss_fns = [getattr(loss_fn, "residual", loss_fn) for loss_fn in self.loss_fns]
        return any(is_by_differences(module, loss_fn) for loss_fn in loss_fns)


def _indexed(device: torch.device) -> torch.device:
    return torch.device(device.type, device.index or 0)


def _is_automatic(found: Mapping[str, Any], workers: int | None) -> bool:
    """Tell whether times decide about workers: with hooks or precode they may have state that another number loses."""
    asked = found["parallelize"] == "auto" and found["backend"] == "process"
    is_choice = workers != 1 or found["devices"] is not None
    return asked and is_choice and all(found[name] is None for name in ("speeds", "precode", "prehook", "posthook"))


def _check_candidates(settings: Settings) -> None:
    """Raise `ValueError` for settings under which times cannot decide between cores and devices."""
    between = "parallelize='auto' with `devices` takes whatever is faster, cores or devices"
    if settings.fixed_bits:
        fixing = "`chunk_size`" if settings.chunk_size is not None else "torch.use_deterministic_algorithms(True)"
        raise ValueError(f"{between}, whose bits differ, and {fixing} fixes them: use one of both, without 'auto'")
    if settings.compile is True:
        raise ValueError(f"{between}, and compile=True is for cores alone: leave out `devices`, or use compile='auto'")


def _mean_square(residual: Any, found: Mapping[str, Any]) -> MeanSquare:
    """Return the loss that is the mean square, or sum of squares, of residuals. Raises `TypeError`, `ValueError`."""
    for name in ("criterion", "loss_fn", "denominators"):
        if found[name] is not None:
            raise ValueError(f"`residual` and `{name}` are both given: the loss is the mean of the residuals' squares")
    arguments.check_callable("residual", residual)
    return MeanSquare(residual, resolve_reduction(found["reduction"], None))


def _read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the requested backend, in the argument `<backend>_options`; raise `ValueError` for those of
    another one."""
    options: dict[str, Any] = {}
    for name in given:
        owner, _, rest = name.rpartition("_")
        if rest != "options" or owner not in BACKENDS or given[name] is None:
            continue
        if owner != given["backend"]:
            raise ValueError(f"`{name}` are for backend={owner!r}, got backend={given['backend']!r}: leave them out")
        options = given[name]
    return options
