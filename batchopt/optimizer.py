"""BatchOptimizer: a module, a criterion and `parallelize=N` become f(X) and df/dX for any optimizer."""

from __future__ import annotations

import hashlib
import math
import struct
import time
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch

from batchopt import arguments
from batchopt.backends import Answer, Setup, WorkerInfo, start_backend
from batchopt.batches import Reading, read_batch
from batchopt.calibrate import measure
from batchopt.choice import OptimizerChoice, choose_optimizer
from batchopt.denominators import Denominators, resolve_reduction
from batchopt.doctor import CHUNKS, Diagnosis, Loaded, examine
from batchopt.errors import BatchoptError, NonFiniteError
from batchopt.flatten import flatten, trainable
from batchopt.nonfinite import is_finite, locate
from batchopt.plan import Plan, choose_chunk_size, follow, make_plan
from batchopt.reduce import reduce_answers
from batchopt.report import Report
from batchopt.speeds import Speeds
from batchopt_workers.batch import Batch, Collate
from batchopt_workers.buffers import StepBuffers
from batchopt_workers.evaluate import Program
from batchopt_workers.objective import LossFunction
from batchopt_workers.worker import Hook, Precode


class BatchOptimizer:
    """Evaluates `criterion(module(inputs), targets)` and its gradient over whole batches on `parallelize` workers.

    Args:
        module: its trainable parameters become views of one vector, `parameters`.
        criterion: `criterion(output, targets) -> scalar`; without it and without `loss_fn` the module returns the loss.
        optimizer: a name of a `torch.optim` class in lower case, a factory `f(params)`, an instance over the module's parameters, or
            None to only evaluate. Default `"lbfgs"`: `torch.optim.LBFGS` with strong Wolfe line search.
        parallelize: number of workers, or `"auto"`: one a usable core. 1, the default, evaluates in this process.
        backend: where workers run: `"process"`, worker processes on this machine.
        loss_fn: `loss_fn(module, inputs, targets) -> scalar`, instead of a criterion.
        reduction: `"mean"` or `"sum"`: what the loss of some samples is. Default: the criterion's own, else the mean.
        denominators: for a mean that does not divide by the number of samples: `denominators(inputs, targets)`, called once a batch, returns what
            each sample adds to the denominator (shape `(samples,)`). Default: 1 each; for cross entropy and negative log likelihood the
            class weights of the targets that are not ignored.
        chunk_size: samples in one forward/backward. A number fixes the chunks by the data alone, and so the bits of the result for any number of
            workers. Default: a worker's whole share; a 32nd of the batch under `torch.use_deterministic_algorithms(True)`.
        collate_fn: for batches that are lists of samples: makes one forward's `(inputs, targets)` of a list of `(input, target)` pairs,
            or its inputs of a list of inputs where there are no targets. Default: one forward a sample.
        precode: `precode(worker)`, run once in each worker before the module arrives there.
        prehook, posthook: `hook(worker, sample)`, before and after each forward/backward, in the worker. What posthook returns
            is in `hook_results`, in sample order. Both may be replaced at any time between evaluations.
        speeds: fixed relative speeds, one a worker. Default: measured on the first batch, and kept current.
        threads_per_worker: intra-op threads of each worker. Default: usable cores // workers, at least 1; in this process what torch
            has. With `chunk_size` 1, here too, since the number of threads changes the bits.
        seed: of all random draws in the workers, which depend on it, the step and the chunk alone.
        on_nonfinite: `"raise"`, the default: a loss or gradient that is not finite raises `NonFiniteError`. `"return"`: the loss is infinity, for
            a line search that can back off.
        verbose: 0 silent, 1 a progress bar, 2 a log record for every evaluation, 3 the workers' shares too.

    Raises `TypeError` or `ValueError` for arguments that cannot work, before a process starts; `WorkerError` if precode raises.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        criterion: Callable[..., Any] | None = None,
        *,
        optimizer: OptimizerChoice = "lbfgs",
        parallelize: int | str = 1,
        backend: str = "process",
        loss_fn: LossFunction | None = None,
        reduction: str | None = None,
        denominators: Denominators | None = None,
        chunk_size: int | None = None,
        collate_fn: Collate | None = None,
        precode: Precode | None = None,
        prehook: Hook | None = None,
        posthook: Hook | None = None,
        speeds: Sequence[float] | None = None,
        threads_per_worker: int | None = None,
        seed: int = 0,
        on_nonfinite: str = "raise",
        verbose: int = 0,
    ) -> None:
        workers = arguments.read_workers(parallelize, backend)
        arguments.check_criterion(criterion, loss_fn)
        arguments.check_hooks(precode=precode, prehook=prehook, posthook=posthook)
        arguments.check_callable("collate_fn", collate_fn, ("samples",))
        threads = arguments.read_optional_count("threads_per_worker", threads_per_worker)
        self._chunk_size = arguments.read_optional_count("chunk_size", chunk_size)
        self._on_nonfinite = arguments.read_on_nonfinite(on_nonfinite)
        arguments.check_callable("denominators", denominators, ("inputs", "targets"))
        self._reading = Reading(collate_fn, resolve_reduction(reduction, criterion), criterion, denominators)
        self._seed = arguments.read_seed(seed)
        self._speeds = arguments.read_speeds(speeds, workers)
        self._report = Report(verbose)
        self._module, self._criterion = module, criterion
        self._twins = {
            "loss_fn": loss_fn,
            "reduction": reduction,
            "denominators": denominators,
            "collate_fn": collate_fn,
            "chunk_size": chunk_size,
            "seed": seed,
        }
        self.optimizer = choose_optimizer(optimizer, [parameter for _, parameter in trainable(module)])
        self._flat, self._params = flatten(module)
        self._grad = torch.zeros_like(self._flat.vector)
        self._grad_views = self._flat.layout.views(self._grad)
        self._buffers = StepBuffers(module)

        self._batch: Batch | None = None
        self._plan: Plan
        self._chunks: int | None
        self._movable = True  # whether chunks may be cut anew during a step
        self._changes: torch.Tensor | None = None  # of buffers, in the step's last evaluation
        self._orders = 0
        self._step = 0
        self.eval_counter = 0
        self.batch_counter = 0
        self.sample_counter = 0
        self.output = 0.0
        self._losses = bytes(32)  # a digest of all losses so far
        self.hook_results: list[Any] = []

        self._deterministic = torch.are_deterministic_algorithms_enabled()
        fixed_bits = self._chunk_size is not None or self._deterministic
        if threads is None and fixed_bits:
            threads = 1
        program = Program(module, criterion, loss_fn, self._seed)
        setup = Setup(workers, fixed_bits, threads, precode, program, self._flat, self._params, self._buffers)
        self._backend = start_backend(backend, setup)
        self._closed = False
        try:
            self._set_hooks(prehook, posthook)
        except BaseException:
            self.close()
            raise

    @property
    def parameters(self) -> torch.Tensor:
        """X: a 1-D tensor (shape `(n,)`, the module's dtype) that shares memory with the trainable parameters, both ways."""
        return self._flat.vector

    @property
    def grad_parameters(self) -> torch.Tensor:
        """df/dX at the last evaluation, in the order of `parameters`; shares memory with the parameters' `.grad`, both ways."""
        return self._grad

    @property
    def module(self) -> torch.nn.Module:
        """The user's module."""
        return self._module

    @property
    def criterion(self) -> Callable[..., Any] | None:
        """The user's criterion."""
        return self._criterion

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """Each worker's rank, pid, host, device, speed, samples, busy seconds, restarts, and whether it lives."""
        return self._backend.workers

    @property
    def prehook(self) -> Hook | None:
        """The hook before each forward; assigning replaces it in all workers."""
        return self._prehook

    @prehook.setter
    def prehook(self, hook: Hook | None) -> None:
        self._set_hooks(hook, self._posthook)

    @property
    def posthook(self) -> Hook | None:
        """The hook after each backward; assigning replaces it in all workers."""
        return self._posthook

    @posthook.setter
    def posthook(self, hook: Hook | None) -> None:
        self._set_hooks(self._prehook, hook)

    def _set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        self._check_open()
        arguments.check_hooks(prehook=prehook, posthook=posthook)
        self._backend.set_hooks(prehook, posthook)
        self._prehook, self._posthook = prehook, posthook

    def step(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> float:
        """Load the batch and optimize on it once; returns the loss of the last evaluation, `output`."""
        self.load(inputs, targets, options)
        self.optimize()
        self._end_step()
        self.batch_counter += 1
        self.sample_counter += self._loaded().size
        return self.output

    def load(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> None:
        """Make this the batch of the evaluations to come; nothing is evaluated, but the first batch measures the workers.

        `inputs` and `targets` are tensors, or tuples, lists or dicts of tensors, whose first dimension is the sample; or lists with one entry a sample. `options`
        has one object a sample, for the hooks. A new step begins: the module's buffers, modes and frozen parameters are taken
        as they are now. Raises `ValueError` or `TypeError` for data that is no batch, and if X is no longer the module's.
        """
        self._check_open()
        self._end_step()
        self._flat.check(self._module, self._params)
        batch = read_batch(inputs, targets, options, self._reading)
        self._buffers.begin_step()
        self._backend.load(batch)
        self._batch = batch
        self._step += 1
        if not self._speeds.measured and len(self.workers) > 1 and self._prehook is None and self._posthook is None:
            self.calibrate()
        self._chunks = choose_chunk_size(batch.size, self._chunk_size, self._deterministic)
        self._plan = make_plan(batch.size, self._chunks, self._speeds)
        self._movable = not self._report.cut_matters(self._module, self._plan.cut.chunks)

    def calibrate(self) -> list[float]:
        """Time each worker on a part of the loaded batch; returns the speeds in samples per second.

        Runs by itself at the first batch, unless there are hooks: then the first evaluation, in equal shares, is the measurement. Later
        evaluations keep the speeds current. Hooks do not run here. Fixed `speeds` are returned as they are.
        """
        samples = self._loaded().size
        if not self._speeds.fixed:
            self._backend.set_hooks(None, None)
            try:
                self._observe(*measure(self._backend, samples, self._next_order(), self._step))
            finally:
                self._backend.set_hooks(self._prehook, self._posthook)
            self._report.note("calibrated: %s samples/s", [round(speed) for speed in self._speeds.relative()])
        return self._speeds.relative()

    def evaluate(self) -> torch.Tensor:
        """f at the current parameters (0-dim, float64), and df/dX in `grad_parameters` and every parameter's `.grad`.

        Any number of times; the closure for any optimizer: `torch_optimizer.step(opt.evaluate)`. Gradients are overwritten, not
        accumulated; a parameter that f does not depend on gets None. Raises `WorkerError` if the user's code raised, with the
        gradients as they were.
        """
        started = time.perf_counter()
        answers = self.map()
        loss = self.reduce(answers)
        self.eval_counter += 1
        self._losses = hashlib.sha256(self._losses + struct.pack("<d", self.output)).digest()
        sizes = [self._samples_of(answer) for answer in answers]
        seconds = time.perf_counter() - started
        self._report.evaluated(self.eval_counter, self.batch_counter + 1, self.output, seconds, answers, sizes)
        return loss

    def map(self) -> list[Answer]:
        """The first half of `evaluate`: partial losses and gradients from every worker that had a share.

        A subclass may override it, and `reduce`.
        """
        self._loaded()
        if self._movable:
            self._plan = follow(self._plan, self._chunks, self._speeds)
        answers = self._backend.evaluate(self._plan.cut, self._plan.orders(self._next_order(), self._step))
        samples, seconds = [0] * len(self.workers), [0.0] * len(self.workers)
        for answer in answers:
            worker = self.workers[answer.rank]
            samples[answer.rank], seconds[answer.rank] = self._samples_of(answer), answer.seconds
            worker.samples += samples[answer.rank]
            worker.busy_seconds += answer.seconds
        self._observe(samples, seconds)
        self.hook_results = [result for answer in answers for result in answer.results]
        return answers

    def reduce(self, answers: Sequence[Answer]) -> torch.Tensor:
        """The second half of `evaluate`: merge `answers` into f, which is returned, and df/dX."""
        whole = reduce_answers(answers, self._plan.cut.chunks)
        with torch.no_grad():
            self._grad.copy_(whole.gradient)
        for parameter, view, used in zip(self._params, self._grad_views, whole.used, strict=True):
            parameter.grad = view if used else None
        self._changes = whole.changes.clone()
        self.output = whole.loss
        if not is_finite(whole.loss, self._grad):
            if self._on_nonfinite == "raise":
                raise self._non_finite()
            self.output = math.inf
        return torch.tensor(self.output, dtype=torch.float64)

    def _non_finite(self) -> NonFiniteError:
        self._changes = None
        self._backend.set_hooks(None, None)
        try:
            place = locate(self._backend, self._plan, self._next_order(), self._step)
        finally:
            self._backend.set_hooks(self._prehook, self._posthook)
        what = place.what if place is not None else "loss or gradient is not finite"
        chunk, samples = (place.chunk, place.samples) if place is not None else (None, range(0))
        return NonFiniteError(what, chunk, samples, self._step, self.eval_counter + 1)

    def optimize(self) -> None:
        """Take one step of `optimizer` on the loaded batch; a subclass may override it. Without an optimizer, evaluate once."""
        if self.optimizer is None:
            self.evaluate()
        else:
            self.optimizer.step(self.evaluate)  # type: ignore[arg-type]  # annotated as returning a float

    def check(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> Diagnosis:
        """Examine whether f and its gradient describe one function on this batch, and whether the parallel one is the serial one.

        Evaluates twice for equal bits; compares the gradient with a finite difference, in float64 where the module can be
        evaluated there; the batch in chunks with the whole; workers with this process. Returns a `Diagnosis`: `healthy`, `culprit`, and a report when
        printed. Parameters, counters and later draws are as before; hooks run, in this process too. The batch has to be loaded anew.
        """
        self._check_open()
        self._end_step()
        kept = {name: getattr(self, name) for name in _KEPT_BY_CHECK}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.load(inputs, targets, options)
                size = self._loaded().size
                self._chunks = self._chunks or math.ceil(size / max(CHUNKS, len(self.workers)))
                self._plan = make_plan(size, self._chunks, self._speeds)
                batch = Loaded(inputs, targets, options, size, self._chunks)
                return examine(self, self._criterion, self._twin, batch)
        finally:
            self._batch = self._changes = None
            for name, value in kept.items():
                setattr(self, name, value)

    def _twin(self, module: torch.nn.Module, criterion: Any, hooks: bool = True, **changes: Any) -> BatchOptimizer:
        """One like this, in this process, over another module."""
        if hooks:
            changes = {"prehook": self._prehook, "posthook": self._posthook, **changes}
        twin = BatchOptimizer(module, criterion, optimizer=None, **{**self._twins, **changes})
        twin._step = self._step - 1  # its load begins the same step, with the same draws
        return twin

    def run_on_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on each worker; the values in rank order. Raises `WorkerError` if one raises."""
        self._check_open()
        return self._backend.run(function, args)

    def fingerprint(self) -> str:
        """The sha256, in hexadecimal, of the parameters, the counters and all losses so far.

        Equal for two runs if and only if these have the same bits: with `chunk_size`, for any number of workers.
        """
        counters = struct.pack("<QQQ", *(getattr(self, name) for name in _COUNTERS))
        parameters = self._flat.vector.detach().cpu().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(self._losses + counters + parameters).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """The module's and the optimizer's state, the counters, the measured speeds, the seed and the step; no code."""
        return {
            "module": self._module.state_dict(),
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else None,
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "speeds": list(self._speeds.values),
            "seed": self._seed,
            "step": self._step,
            "output": self.output,
            "losses": self._losses.hex(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; speeds only if the number of workers is the same.

        Raises `ValueError` if the seed differs, or one of the two has no optimizer; what torch raises if shapes differ.
        """
        self._check_open()
        if state["seed"] != self._seed:
            raise ValueError(
                f"`seed` is {self._seed} here and {state['seed']} in the state: build the BatchOptimizer with that seed"
            )
        if (state["optimizer"] is None) != (self.optimizer is None):
            raise ValueError("the state and this BatchOptimizer must both have an optimizer, or neither")
        self._module.load_state_dict(state["module"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        for name in _COUNTERS:
            setattr(self, name, state["counters"][name])
        if len(state["speeds"]) == len(self.workers) and not self._speeds.fixed:
            self._speeds = Speeds(tuple(state["speeds"]))
        self._step = state["step"]
        self.output = state["output"]
        self._losses = bytes.fromhex(state["losses"])

    def close(self) -> None:
        """End the workers. The module keeps its parameters; any number of times."""
        if not self._closed:
            self._closed = True
            self._end_step()
            self._report.close()
            self._backend.close()

    def __enter__(self) -> BatchOptimizer:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a BatchOptimizer holds processes and cannot be copied or pickled: use state_dict()")

    def _end_step(self) -> None:
        """Take over the buffers as the step's last evaluation left them; does nothing the second time."""
        if self._changes is not None:
            self._buffers.take_over(self._changes)
            self._changes = None

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    def _samples_of(self, answer: Answer) -> int:
        bounds = self._plan.cut.bounds
        return bounds[answer.order.last] - bounds[answer.order.first]

    def _observe(self, samples: Sequence[int], seconds: Sequence[float]) -> None:
        self._speeds = self._speeds.observed(samples, seconds)
        for worker, speed in zip(self.workers, self._speeds.values, strict=True):
            worker.speed = speed

    def _check_open(self) -> None:
        if self._closed:
            raise BatchoptError("this BatchOptimizer was closed: build a new one")

    def _loaded(self) -> Batch:
        self._check_open()
        if self._batch is None:
            raise BatchoptError("no batch was loaded: call load(inputs, targets) or step(inputs, targets)")
        return self._batch


_COUNTERS = ("eval_counter", "batch_counter", "sample_counter")
_KEPT_BY_CHECK = (*_COUNTERS, "_step", "_losses", "output", "hook_results")
