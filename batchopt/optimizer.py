"""BatchOptimizer: a module, a criterion and `parallelize=N` become f(X) and df/dX for any optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from batchopt._checkpoint import file
from batchopt._checkpoint.resumption import check_residuals, check_state, class_of
from batchopt._data import arguments
from batchopt._data.terms import Term, reweighed
from batchopt._function.counters import Counters
from batchopt._function.function import BatchFunction
from batchopt._function.loader import undone_if_it_fails
from batchopt._function.observer import Trial, Trials
from batchopt._function.prepared import PreparedBatch
from batchopt._function.settings import Settings
from batchopt._function.workers import anticipate
from batchopt._machine.ownership import exclusive
from batchopt._machine.threads import torch_threads
from batchopt._mapreduce.reduce import LARGE
from batchopt._program.flat_module import FlatModule
from batchopt._program.flatten import trainable
from batchopt.doctor import Diagnosis, examine
from batchopt.errors import CheckpointError
from batchopt.evaluations import Evaluations
from batchopt.optim.choose import (
    OptimizerChoice,
    check_choice,
    check_goes_by_any_gradient,
    check_options,
    choose_optimizer,
)
from batchopt.optim.minimizer import Minimizer
from batchopt.optim.rollback import Rollback
from batchopt_workers.data.denominators import Denominators
from batchopt_workers.data.items import Collate
from batchopt_workers.map.objective import LossFunction
from batchopt_workers.map.squares import ResidualFunction
from batchopt_workers.worker import Hook, Precode

Self = TypeVar("Self", bound="BatchOptimizer")


class BatchOptimizer(Evaluations):
    """Evaluates `criterion(module(inputs), targets)` and its gradient over whole batches on `parallelize` workers.

    Args:
        module: its trainable parameters become views of one vector, `parameters`. Tensors that viewed their memory
            before (`p.data`, `p.detach()`) are no part of it. One that is given other memory later (`p.data = ...`) is
            copied into it at the next call; `BatchoptError` if it has another shape, dtype or device, is another
            Parameter (`load_state_dict(assign=True)`), or a tensor still views the memory that it had.
        criterion: `criterion(output, targets) -> scalar`; without it and without `loss_fn` the module returns the loss.
        optimizer: `"lbfgs"`, the default, `"cg"`, `"ssbroyden"` or `"lm"` for those of batchopt; the name of another
            class of `torch.optim`, in any case; a class, with its defaults; a factory `f(params)`, an instance over the
            module's parameters, or None to only evaluate.
        parallelize: number of workers, or `"auto"`: one a usable core; on Ray as many as there is room for, at each
            step anew. 1, the default, is this process itself, except on Ray.
        backend: where workers run: `"process"`, the default, worker processes on this machine; `"ranks"`, in all
            processes of a script that torchrun, srun or mpirun started, of which each has `parallelize` workers and
            makes the same calls; `"ray"`, the machines of a Ray cluster (`pip install batchopt[ray]`): the one that
            this process is connected to, else the one that `RAY_ADDRESS` names or this machine belongs to, else a new
            one on this machine.
        loss_fn: `loss_fn(module, inputs, targets) -> scalar`, instead of a criterion.
        residual: `residual(module, inputs, targets)`, shape `(samples, ...)`, instead of a criterion: the loss is the
            mean of the squares of these numbers (with the reduction `"sum"` their sum), and least squares know them.
        terms: for an objective of several terms, each over data of its own, instead of a criterion or `loss_fn`: a
            `Term` under each name. f is the weighted sum of the terms' means, and a batch is a dict with an entry for
            each: its inputs, or a tuple of inputs, targets and options.
        reduction: `"mean"` or `"sum"`: what the loss of some samples is. Default: the criterion's own, else the mean.
        denominators: for a mean that does not divide by the number of samples: `denominators(inputs, targets)`, called
            once a batch, returns what each sample adds to the denominator (shape `(samples,)`). Default: 1 each; for
            cross entropy and negative log likelihood the class weights of the targets that are not ignored.
        chunk_size: samples in one forward/backward. A number fixes the chunks by the data alone, and so the bits of the
            result for any number of workers. Default: a worker's whole share; a 32nd of the batch under
            `torch.use_deterministic_algorithms(True)`.
        collate_fn: for batches that are lists of samples: makes one forward's `(inputs, targets)` of a list of `(input,
            target)` pairs, or its inputs of a list of inputs where there are no targets. Default: one forward a sample.
            Of a Dataset, whose items are `(input, target)` or an input alone, it gets the list of items; default:
            torch's `default_collate`.
        cache: of a batch that is a Dataset, keep what a worker has read and collated of it until the next one is
            loaded, the default; False: read it in each evaluation, where it does not fit into memory.
        precode: `precode(worker)`, run once in each worker before the module arrives there. Workers import modules as
            their files are: what your program has changed in them (settings of a library, a patched method) is done
            here, too.
        prehook, posthook: `hook(worker, sample)`, before and after each forward/backward, in the worker. What posthook
            returns is in `hook_results`, in sample order. Both may be replaced at any time between evaluations.
        speeds: fixed relative speeds, one a worker. Default: measured on the first batch, and kept current.
        threads_per_worker: intra-op threads of each worker. Default: its part of the usable cores, at least 1; in this
            process what torch has. With `chunk_size` 1, here too, since the number of threads changes the bits.
        devices: of each worker, as `["cuda:0", "cuda:1", "cpu"]`, two or more; it settles `parallelize`. The module,
            the batch and X stay in this machine's memory; a worker keeps module and shard on its device, and X crosses
            with each order: once an evaluation, and for chunks that it takes over from another worker. Unequal devices
            are balanced by their measured speed, and are equal to rounding only. Default: all workers on the cores of
            this machine.
        timeout: seconds that a worker may make no progress (evaluate no chunk to its end, or be in one function of
            `run_on_workers`) before it is replaced. Default: 20 times what a chunk should take by its measured speed,
            but no less than 30 s, and 600 s before anything was measured; functions may take any time. What a worker
            does before it can work (precode) may take 60 s or `timeout`, whichever is longer; 600 s without a timeout.
        max_restarts: how many workers may be replaced in all, before `AllWorkersLostError`. Default: 4 for each worker.
        seed: of all random draws in the workers, which depend on it, the step and the chunk alone.
        on_nonfinite: `"raise"`, the default: a loss or gradient that is not finite raises `NonFiniteError`. `"return"`:
            the loss is infinity, for a line search that can back off.
        nonfinite_errors: classes of exceptions, such as `torch.linalg.LinAlgError`, by which the module or a loss says
            that f has no value at X: an evaluation that raises one is one whose loss is not finite. The optimizers of
            batchopt try a shorter step then, also with `on_nonfinite="raise"`. Default: none.
        check_cut: warn if the loss depends on how the batch is cut, as that of tokens without padding does without
            `denominators`. The first time that a batch is cut, the first 8 samples of each term are evaluated in one
            go, in two parts and, where that differs, in one go again, by one worker; `torch.nn`'s own losses are not.
            Default: True.
        verbose: 0 silent, 1 a progress bar, 2 a log record for every evaluation, 3 the workers' shares too.
        ray_options: what one worker takes of a machine on Ray, `num_cpus` (default 1, and as many threads), `num_gpus`
            (default 0; with 1 a worker computes on a GPU of its own), `memory`, `resources`; and other options of a Ray
            actor, such as `runtime_env`, for the actor that holds a machine's workers.
        compress: on several machines, with optimizers of first order: the format of gradients that leave one. `"fp16"`,
            `"bf16"`, or `{"type": "2bit", "threshold": 0.5}`: an element is 0 or plus or minus the threshold, and what
            that leaves over is added to the next gradient. Default: gradients come as they are.

    Raises `TypeError` or `ValueError` for arguments that cannot work, and for a tensor that requires grad, is reached
    by the criterion or a loss function, and is none of the module's parameters (it would never be trained), before a
    process starts; `WorkerError` if precode raises.
    """

    @arguments.called_here
    def __init__(
        self,
        module: torch.nn.Module,
        criterion: Callable[..., Any] | None = None,
        *,
        optimizer: OptimizerChoice = "lbfgs",
        parallelize: int | str = 1,
        backend: str = "process",
        loss_fn: LossFunction | None = None,
        residual: ResidualFunction | None = None,
        terms: Mapping[str, Term] | None = None,
        reduction: str | None = None,
        denominators: Denominators | None = None,
        chunk_size: int | None = None,
        collate_fn: Collate | None = None,
        cache: bool = True,
        precode: Precode | None = None,
        prehook: Hook | None = None,
        posthook: Hook | None = None,
        speeds: Sequence[float] | None = None,
        threads_per_worker: int | None = None,
        devices: Sequence[str | torch.device] | None = None,
        timeout: float | None = None,
        max_restarts: int | None = None,
        seed: int = 0,
        on_nonfinite: str = "raise",
        nonfinite_errors: type[Exception] | Sequence[type[Exception]] = (),
        verbose: int = 0,
        check_cut: bool = True,
        ray_options: Mapping[str, Any] | None = None,
        compress: str | Mapping[str, Any] | None = None,
    ) -> None:
        settings = Settings.read(locals())
        check_choice(optimizer, [parameter for _, parameter in trainable(module)])
        subject = FlatModule(module)
        anticipate(subject, settings)  # torch's optimizers import for a second, too
        self.optimizer = choose_optimizer(optimizer, subject.parameters)
        if settings.compress is not None:
            check_goes_by_any_gradient(self.optimizer)
        self._function = BatchFunction(subject, settings)
        self._owner = self._function.owner
        self._rollback = Rollback(subject.x, self.optimizer)

    # ---- steps

    @exclusive
    def step(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> float:
        """Load the batch and optimize on it once; returns `output`: the loss of the parameters that are left, wherever
        in the step they were evaluated.

        An optimizer that moves after its last evaluation (SGD, and whatever goes fixed steps) leaves parameters that
        were not evaluated: then it is the loss of the last evaluation. Whatever it raises, Ctrl-C included: parameters,
        buffers, counters and the optimizer's state are as before.
        """
        if isinstance(inputs, PreparedBatch):
            inputs.check_alone(targets, options)
            return self._step_on(inputs)
        return self._step(lambda: self.load(inputs, targets, options))

    def _step(self, load: Callable[[], None]) -> float:
        function, rollback = self._function, self._rollback
        function.check_open()
        function.end_step()
        owner = self._owner
        outer_work, owner.doing = owner.doing, owner.doing or "a step"
        try:
            rollback.take()
            try:
                with function.observers.doing("step"), undone_if_it_fails(function):
                    load()
                    trials = Trials(function.subject.x, function.subject.parameters, self._tells)
                    outer, function.observers.trials = function.observers.trials, trials
                    try:
                        self.optimize()
                    finally:
                        function.observers.trials = outer
                    left = self._left(trials)
                    function.end_step()
                    function.stepped(left)
            except BaseException:
                function.subject.bind()
                rollback.back()
                raise
        finally:
            owner.doing = outer_work
        return function.past.counters.loss

    @property
    def _tells(self) -> bool:
        """Whether the optimizer says which evaluation was of the parameters that it leaves: ours do."""
        return isinstance(self.optimizer, Minimizer) and type(self).optimize is BatchOptimizer.optimize

    def _left(self, trials: Trials) -> Trial | None:
        """The evaluation at the parameters that the step has left, if there was one."""
        if self._tells and isinstance(self.optimizer, Minimizer) and self.optimizer.result is not None:
            return trials.number(self.optimizer.result.number, self.optimizer.result.evaluations)
        return trials.left(self._rollback.start)

    def steps(self, batches: Iterable[Any]) -> Iterator[float]:
        """Step on each of `batches`, and yield its loss; while the workers compute, the next batch is read, and copied
        to where they will read it.

        Each batch is a tuple or list `(inputs,)`, `(inputs, targets)` or `(inputs, targets, options)`, as a
        `DataLoader` makes them; anything else is the inputs. With `terms` each batch is a dict, with one of these for
        each term. What `batches` raises is raised when its turn has come. Raises what `step` raises. `Batches` go on
        from their position to the end of the epoch, and count a batch when its step is over.
        """
        for batch in self.prepared(batches):
            yield self._step_on(batch)

    @exclusive
    def _step_on(self, batch: PreparedBatch) -> float:
        prepared = batch.take(self._function)
        loss = self._step(lambda: self._function.begin(prepared, batch.rows))
        batch.finish()
        return loss

    def prepared(self, batches: Iterable[Any]) -> Iterator[PreparedBatch]:
        """Each of `batches` (as for `steps`), for loops of your own: `for batch in opt.prepared(batches):
        opt.step(batch)`. The next one is read, and copied to where the workers will read it, while they compute.

        Each is for `step` or `load` of this optimizer: once, and before the next one is asked for; else they raise
        `BatchoptError`. `len(batch)` is its number of samples. Of `Batches` one counts when its step is over, when it
        is loaded, or when the loop goes on without it.
        """
        return self._function.prepared(batches)

    def optimize(self) -> None:
        """Take one step of `optimizer` on the loaded batch; a subclass may override it. Without an optimizer,
        evaluate once."""
        if self.optimizer is None:
            self.evaluate()
        else:
            with torch_threads(1 if self._fixes_threads else None):
                self.optimizer.step(self.closure)  # type: ignore[arg-type]  # annotated as returning a float

    @property
    def _fixes_threads(self) -> bool:
        """Whether the optimizer's own sums would have other bits with other numbers of threads. `Minimizer`'s have not,
        and long vectors are worth more than equal bits."""
        function = self._function
        alike = not function.workers.alone or function.settings.fixed_bits
        return alike and function.subject.x.numel() < LARGE and not isinstance(self.optimizer, Minimizer)

    @exclusive
    def check(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> Diagnosis:
        """Examine whether f and its gradient describe one function on this batch, and whether the parallel one is the
        serial one.

        Evaluates twice for equal bits; compares the gradient with finite differences, in float64 where the module can
        be evaluated there; the batch in chunks with the whole; workers with this process. How precise f is, of a module
        that computes in single precision inside or solves an equation to a tolerance, is measured, and differences that
        it explains are none: it finds a slope that is off by a thousandth, and a cut by a hundred-thousandth, or what
        that precision leaves. Returns a `Diagnosis`: `healthy`, `culprit`, and a report when printed. Parameters,
        counters and later draws are as before; hooks run, in this process too. The batch has to be loaded anew.
        """
        return examine(self._function, self.evaluate, inputs, targets, options)

    # ---- workers

    @property
    def prehook(self) -> Hook | None:
        """The hook before each forward; assigning replaces it in all workers."""
        return self._function.workers.hooks[0]

    @prehook.setter
    def prehook(self, hook: Hook | None) -> None:
        self._function.set_hooks(hook, self.posthook)

    @property
    def posthook(self) -> Hook | None:
        """The hook after each backward; assigning replaces it in all workers."""
        return self._function.workers.hooks[1]

    @posthook.setter
    def posthook(self, hook: Hook | None) -> None:
        self._function.set_hooks(self.prehook, hook)

    def run_on_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on each worker; the values in rank order.

        Waits for workers that are being replaced. Raises `WorkerError` if the function raises, and `WorkerLostError` if
        a worker ends in it: what it did there cannot be known, so it is not called again.
        """
        return self._function.run_on_workers(function, *args)

    def calibrate(self) -> list[float]:
        """Time the workers on equal shares of the loaded batch; returns the speeds in samples per second.

        The first evaluation, which is in equal shares, measures them anyway, and later ones keep the speeds current.
        Hooks do not run here. Fixed `speeds` are returned as they are.
        """
        return self._function.calibrate()

    def resize(self, parallelize: int | str, speeds: Sequence[float] | None = None) -> None:
        """Have `parallelize` workers from now on (as in `BatchOptimizer`); for between steps, a batch has to be loaded
        anew.

        Workers of the lowest ranks are kept, with their `state`; new ones start, and run precode. The optimizer's state
        and the counters are kept. Where speeds were given, `speeds` of the new workers must be.
        """
        self._function.resize(parallelize, speeds)

    # ---- saving and the end

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """The module's and the optimizer's state, the counters, the measured speeds, the seed, the step, the weights of
        the terms, and what compression has left of gradients; no code.

        Like `save`, `load_state_dict` and `load_checkpoint`, for between steps: called by a hook or a signal handler in
        the middle of one, it raises `BatchoptError`.
        """
        self._owner.check_between_steps("state_dict")
        return {
            "module": self._function.follow().module.state_dict(),
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else None,
            "optimizer_class": class_of(self.optimizer),
            "history": self._function.past.counters.state_dict(),
            "speeds": list(self._function.workers.speeds.values),
            "seed": self._function.settings.seed,
            "weights": dict(self.weights),
            "residuals": self._function.residuals(),
        }

    @exclusive
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; speeds only if the number of workers is the same. A batch has to be
        loaded anew.

        Raises `ValueError` if the seed, the names of the terms or the class of the optimizer differ, or an entry is
        missing or is not what `state_dict` returns (or `TypeError`); what torch raises if shapes differ. Then nothing
        was changed.
        """
        function = self._function
        function.check_open()
        self._owner.check_between_steps("load_state_dict")
        check_state(state, self.optimizer, function.settings.seed)
        weights, residuals = state.get("weights"), state.get("residuals", {})  # older states have none
        check_residuals(residuals, function.subject.x)
        terms = reweighed(function.terms, weights) if weights else function.terms
        function.end_step()
        before = {key: value.clone() for key, value in self.module.state_dict().items() if torch.is_tensor(value)}
        self._rollback.take()
        try:
            self.module.load_state_dict(state["module"])
            if self.optimizer is not None:
                # torch's own would share tensors with the optimizer that the state is of
                self.optimizer.load_state_dict(deepcopy(state["optimizer"]))
                check_options(self.optimizer)
            function.resume(Counters(**state["history"]), terms, state["speeds"], residuals)
        except BaseException:
            self.module.load_state_dict(before, strict=False)
            self._rollback.back()
            raise

    @exclusive
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict` to the file `path`: whole, or not at all.

        The file holds no code, and loads with `torch.load(path, weights_only=True)`. It is written beside `path`,
        synced, and renamed: killed or out of disk at any point, what was at `path` still is, or the new file is
        complete. Of several ranks the first one writes, and all wait for it. Raises `CheckpointError`.
        """
        self._function.check_open()
        self._owner.check_between_steps("save")
        self._function.end_step()
        state, layout = self.state_dict(), self._function.subject.flat.layout
        self._function.once(lambda: file.write(path, state, layout))

    @exclusive
    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file of `save`: with `chunk_size` bit for bit, with any number of workers.

        Nothing in the file is executed. Raises `CheckpointError` for a file that is damaged, or of a module with other
        parameters (by name and shape), other buffers, another seed or optimizer. Then nothing was changed.
        """
        self._function.check_open()
        self._owner.check_between_steps("load_checkpoint")
        state = file.read(path, self._function.subject.flat.layout)
        try:
            self.load_state_dict(state)
        except (ValueError, RuntimeError, KeyError, TypeError) as error:  # what torch says of other shapes and names
            raise CheckpointError(f"cannot go on from checkpoint '{os.fsdecode(path)}': {error}") from error

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes files: always but with `backend="ranks"`, where rank 0 does."""
        return self._function.is_main

    def close(self) -> None:
        """End the workers. The module keeps its parameters, in memory of this process alone unless another optimizer
        shares them; any number of times.

        In a signal handler (or a hook, or a finalizer) that comes while another call is at work, it has that one end:
        with `BatchoptError`, as soon as it can, and the workers after it. In a fork it does nothing: there are no
        workers.
        """
        self._function.close()

    def __enter__(self: Self) -> Self:
        self._function.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("this holds processes and cannot be copied or pickled: use state_dict()")
