"""BatchOptimizer: turns a module, a criterion and `parallelize=N` into f(X) and df/dX for any optimizer."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch

from batchopt._data import arguments
from batchopt._data.terms import AnyTerm
from batchopt._engine import checkpoint
from batchopt._engine.choose import OptimizerChoice, check_choice, check_goes_by_any_gradient, choose_optimizer
from batchopt._engine.engine import Engine
from batchopt._engine.prepared import PreparedBatch, prepared
from batchopt._engine.resumption import ENTRIES, resuming, state_of
from batchopt._engine.rollback import Rollback
from batchopt._engine.settings import Settings
from batchopt._engine.steps import Steps
from batchopt._engine.stop_requests import StopRequests
from batchopt._engine.workers import anticipate
from batchopt._functions.closure import Closure, of_second_derivatives
from batchopt._machine.cores import torch_threads
from batchopt._machine.ownership import exclusive
from batchopt._mapreduce.reduce import LARGE
from batchopt._program.flat_module import FlatModule
from batchopt._program.flatten import trainable
from batchopt.errors import TRAINER_ADVICE, BatchoptError, CheckpointError
from batchopt.extras.history import History
from batchopt.optim.minimizer import Minimizer, Result
from batchopt.studies import Studies
from batchopt_workers.batch.items import Collate
from batchopt_workers.batch.weighting import Denominators
from batchopt_workers.evaluate.objective import LossFunction
from batchopt_workers.evaluate.program import Hook, Precode
from batchopt_workers.functions.squares import ResidualFunction

if TYPE_CHECKING:
    from batchopt.extras.multistart import Multistart

T = TypeVar("T")

OnNonfinite = Literal["raise", "return"] | type[Exception] | Sequence[Literal["raise", "return"] | type[Exception]]


class BatchOptimizer(Studies):
    """Evaluates `criterion(module(inputs), targets)` and its gradient over full batches on `parallelize` workers.

    In this documentation f is the loss of the batch, X the vector of all trainable parameters, and df/dX the gradient.

    What f is:
        module: its trainable parameters become views of one vector, `parameters`. Tensors that viewed their memory
            before (`p.data`, `p.detach()`) are not updated. A parameter that is assigned other memory later
            (`p.data = ...`) is copied into the vector at the next call; `BatchoptError` if it has another shape, dtype
            or device, is another Parameter (`load_state_dict(assign=True)`), or a tensor still views its former memory.
        criterion: `criterion(output, targets) -> scalar`; without it and without `loss_fn` the module returns the loss.
        loss_fn: `loss_fn(module, inputs, targets) -> scalar`, instead of a criterion.
        residual: `residual(module, inputs, targets)`, shape `(samples, ...)`, instead of a criterion: the loss is the
            mean of the squares of these numbers (with the reduction `"sum"` their sum), and least-squares methods can
            use them.
        terms: for an objective of several terms, each with its own data, instead of a criterion or `loss_fn`: a dict
            with a `Term` or a `Penalty` under each name. f is the weighted sum of the terms' means and the penalties,
            and a batch is a dict with an entry for each `Term`: its inputs, or a tuple of inputs, targets and options.
        reduction: `"mean"` or `"sum"`, the way in which the loss of several samples is formed. Default: the criterion's
            own, else the mean.
        denominators: for a mean that does not divide by the number of samples: `denominators(inputs, targets)`, called
            once per batch, returns what each sample adds to the denominator (shape `(samples,)`). Default: 1 each; for
            cross entropy and negative log likelihood the class weights of the targets that are not ignored.
        collate_fn: for batches that are lists of samples: makes one forward's `(inputs, targets)` from a list of
            `(input, target)` pairs, or its inputs from a list of inputs if there are no targets. Default: one forward
            per sample. For a Dataset, whose items are `(input, target)` or an input alone, it gets the list of items;
            default: torch's `default_collate`.
        cache: for a batch that is a Dataset: True, the default, keeps what a worker has read and collated of it until
            the next one is loaded; False reads it in each evaluation, for data that does not fit into memory.
        seed: of all random draws in the workers, which depend on it, the step and the chunk alone.
        check_cut: refuse a loss that depends on how the batch is cut, as for tokens without padding and without
            `denominators`. The first time that a batch is cut, one worker evaluates 8 samples of each term, from
            everywhere in the batch, in a single forward and in two parts; losses of `torch.nn` are not checked.
            Default: True.

    Where it is evaluated:
        parallelize: number of workers; 1, the default, is this process itself, except on Ray. `"auto"`: this process or
            workers on all usable cores, whichever is faster by the time of its evaluations; with hooks, `precode` or
            `speeds`, and from the first `run_on_workers` on, one worker per usable core, or one on each of `devices`,
            since workers may then have state. On Ray as many as there is room for, checked at each step.
        backend: where workers run. `"process"`, the default: worker processes on this machine. `"ranks"`: in all
            processes of a script started by torchrun, srun or mpirun, each of which has `parallelize` workers and makes
            the same calls. `"ray"`: the machines of a Ray cluster (`pip install batchopt[ray]`): the one that this
            process is connected to, else the one that `RAY_ADDRESS` names or this machine belongs to, else a new one on
            this machine.
        devices: the device of each worker, such as `["cuda:0", "cuda:1", "cpu"]`; this determines `parallelize`. With
            `parallelize="auto"` they are those that may be used, where that is faster than the cores; `chunk_size` and
            `compile=True` are refused then, as times decide about the bits. The module, the batch and X stay in this
            machine's memory; a worker keeps module and shard on its device, and X is transferred with each order: once
            per evaluation, and for chunks taken over from another worker. Unequal devices are balanced by their
            measured speed, and their results agree to rounding only. A module that is on a device is evaluated there,
            by this process; its own device as the only one means the same. Default: all workers on the cores of this
            machine.
        threads_per_worker: intra-op threads of each worker. Default: its part of the usable cores, at least 1; in this
            process torch's setting. With `chunk_size` it is 1 in this process too, since the number of threads changes
            the bits.
        speeds: fixed relative speeds, one per worker (of all ranks). Default: measured on the first batch, and kept
            current.
        ray_options: the resources of one worker on Ray: `num_cpus` (default 1, and as many threads), `num_gpus`
            (default 0; with 1 a worker computes on its own GPU), `memory`, `resources`; and other options of a Ray
            actor, such as `runtime_env`, for the actor that holds a machine's workers.
        compress: on several machines, with first-order optimizers: the format of gradients sent between machines.
            `"fp16"`, `"bf16"`, or `{"type": "2bit", "threshold": 0.5}`: an element is 0 or plus or minus the threshold,
            and the remainder is added to the next gradient. Default: gradients are sent uncompressed.
        precode: `precode(worker)`, run once in each worker before the module arrives there. Workers import modules from
            their files: repeat here what your program has changed in them (settings of a library, a patched method).
        prehook, posthook: `hook(worker, sample)`, before and after each forward/backward, in the worker. The results of
            posthook are in `hook_results`, in sample order. Both may be replaced at any time between evaluations.

    How:
        optimizer: `"lbfgs"`, the default, `"cg"`, `"ssbroyden"` or `"lm"` for those of batchopt; the name of another
            class of `torch.optim`, in any case; a class, with its defaults; a factory `f(params)`, an instance over the
            module's parameters, or None to only evaluate.
        chunk_size: samples in one forward/backward. A number fixes the chunks by the data alone, and so the bits of the
            result for any number of workers. "auto": a worker's share, a quarter or a sixteenth of it, whichever is
            the fastest by some evaluations of each. Default: a worker's full share; a 32nd of the batch under
            `torch.use_deterministic_algorithms(True)`.
        compile: None, the default: on a CUDA device an evaluation that repeats is recorded as a graph, which the device
            then does again without Python (what cannot be recorded is evaluated eagerly, and `workers` say why); on
            cores it is eager. False: eager everywhere. True or "auto": on cores a C++ program is made of f and its
            gradient, in a process of its own; up to twice as fast where derivatives of derivatives are taken. "auto":
            evaluations go on until it is there, and the faster way is kept; True: the first one waits for it, and what
            cannot be compiled is a `CompileError`. Needs a C++ compiler. Both are compared with eager evaluations now
            and then: graphs have the same bits, and compiled ones differ by rounding.
        history: `True`: `history` keeps a row for each accepted point of an optimizer of batchopt, or each step of
            another one; a number: each k-th. `{name: function}`: one for each, and in it what `function(module)`
            returns there, a number or a tensor of one or a few, shape `(k,)`. Default: none.
        verbose: 0 silent, 1 a progress bar, 2 a log record for every evaluation, 3 the workers' shares too.

    When something happens:
        on_nonfinite: `"raise"`, the default: a loss or gradient that is not finite raises `NonFiniteError`. `"return"`:
            the loss is infinity, for a line search that can backtrack. Classes of exceptions, such as
            `torch.linalg.LinAlgError`, alone or in a tuple with one of these words: an evaluation in which the module
            or a loss raises one has a loss that is not finite. The optimizers of batchopt then try a shorter step, also
            with `"raise"`.
        on_interrupt: after Ctrl-C in a step of an optimizer of batchopt: `"keep"`, the default, ends it at the best
            point that it found, with its curvature, counters and buffers, and raises `KeyboardInterrupt`;
            `"undo"` puts everything back, as after any other exception.
        stop_on: names of signals, such as `("SIGTERM", "SIGUSR1")`, by which a job is told that it ends soon: the step
            that is going on is `paused` at its next accepted point, every later one after its first evaluation;
            `stopped` has the name. From here to `close`, in the main thread; a handler that was there before is called,
            too, and put back. Workers ignore the signals that this process handles. Of ranks one is enough for all.
            Default: none.
        timeout: seconds that a worker may make no progress (complete no chunk, or stay in one function of
            `run_on_workers`) before it is replaced. Default: 20 times the expected time of a chunk by its measured
            speed, but at least 30 s, and 600 s before anything was measured; functions may take any time. The startup
            of a worker (precode) may take 60 s or `timeout`, whichever is longer; 600 s without a timeout.
        max_restarts: total number of workers that may be replaced before `AllWorkersLostError`. Default: 4 for each
            worker.

    Raises `TypeError` or `ValueError`, before a process starts, for arguments that cannot work, and for a tensor that
    requires grad and is reached by the criterion or a loss function, but is none of the module's parameters (it would
    never be trained); `WorkerError` if precode raises.

    >>> # examples of methods continue from this one
    >>> x = torch.linspace(-3, 3, 200, dtype=torch.float64)[:, None]
    >>> y = torch.sin(x)
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    >>> opt = batchopt.BatchOptimizer(model, torch.nn.MSELoss(), parallelize=2)
    >>> opt
    BatchOptimizer(Sequential of 25 parameters, MSELoss(), optimizer=LBFGS, parallelize=2, 0 batches, 0 evaluations)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        criterion: Callable[..., Any] | None = None,
        *,
        loss_fn: LossFunction | None = None,
        residual: ResidualFunction | None = None,
        terms: Mapping[str, AnyTerm] | None = None,
        reduction: Literal["mean", "sum"] | None = None,
        denominators: Denominators | None = None,
        collate_fn: Collate | None = None,
        cache: bool = True,
        seed: int = 0,
        check_cut: bool = True,
        parallelize: int | Literal["auto"] = 1,
        backend: str = "process",
        devices: Sequence[str | torch.device] | None = None,
        threads_per_worker: int | None = None,
        speeds: Sequence[float] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        compress: str | Mapping[str, Any] | None = None,
        precode: Precode | None = None,
        prehook: Hook | None = None,
        posthook: Hook | None = None,
        optimizer: OptimizerChoice = "lbfgs",
        chunk_size: int | Literal["auto"] | None = None,
        compile: bool | Literal["auto"] | None = None,
        history: bool | int | Mapping[str, Callable[[Any], Any]] = False,
        verbose: Literal[0, 1, 2, 3] = 0,
        on_nonfinite: OnNonfinite = "raise",
        on_interrupt: Literal["keep", "undo"] = "keep",
        stop_on: Sequence[str] = (),
        timeout: float | None = None,
        max_restarts: int | None = None,
    ) -> None:
        settings = Settings.read(locals())
        check_choice(optimizer, [parameter for _, parameter in trainable(module)])
        subject = FlatModule(module)
        settings = settings.at(subject.x.device)
        anticipate(subject, settings)  # meanwhile torch's optimizers are imported, which takes a second
        self._choice, self.optimizer = optimizer, choose_optimizer(optimizer, subject.parameters)
        if settings.compress is not None:
            check_goes_by_any_gradient(self.optimizer)
        me = weakref.proxy(self)
        agree = (lambda why: me._engine.workers.backend.first(why)) if settings.backend_class.has_peers else None
        requests = StopRequests(settings.stop_on, agree)  # first: workers ignore these signals
        weakref.finalize(self, requests.close)
        try:
            super().__init__(Engine(subject, settings))
        except BaseException:
            requests.close()
            raise
        self._rollback = Rollback(subject.x)
        self._steps = Steps(self._engine, self._rollback, requests)
        kept = settings.history
        self._history = History(1, kept, module) if isinstance(kept, Mapping) else History(kept) if kept else None
        if self._history is not None:
            self._engine.observers.append(self._history)

    # ---- steps

    @exclusive
    def step(
        self,
        inputs: Any,
        targets: Any = None,
        options: Sequence[Any] | None = None,
        *,
        time_limit: float | None = None,
    ) -> float:
        """Load the batch and optimize on it once; return `output`: the loss of the final parameters, or after an
        optimizer that is not batchopt's that of its last evaluation.

        time_limit: seconds after which an optimizer of batchopt pauses the step, at its next accepted point: see
        `paused`. Default: none.

        SGD, and any method with fixed steps, moves after its last evaluation; torch's L-BFGS may end at an earlier one:
        `evaluate()` says what f is there. After an exception parameters, buffers, counters and the optimizer's state
        are as before, but for Ctrl-C with `on_interrupt="keep"`; the curvature that `LBFGS` has learned is dropped.

        >>> losses = [opt.step(x, y) for _ in range(3)]
        >>> losses[0] > losses[1] > losses[2] == opt.output
        True
        """
        if time_limit is not None:
            time_limit = arguments.read("time_limit", time_limit)
        if isinstance(inputs, PreparedBatch):
            inputs.check_alone(targets, options)
            return self._step_on(inputs, time_limit)
        return self._step(lambda: self.load(inputs, targets, options), time_limit)

    def _step(self, load: Callable[[], None], time_limit: float | None = None) -> float:
        engine, owner = self._engine, self._owner
        engine.resync()
        engine.end_step()
        outer_work, owner.doing = owner.doing, owner.doing or "a step"
        reports = type(self).optimize is BatchOptimizer.optimize and isinstance(self.optimizer, Minimizer)
        try:
            return self._steps.make(load, self.optimize, self.optimizer, reports, time_limit)
        finally:
            owner.doing = outer_work

    def multistart(
        self, starts: Any, *, optimizer: OptimizerChoice = None, keep: int | None = None, steps: int = 1
    ) -> Multistart:
        """Minimise f of the loaded batch from each of `starts`, one after the other, leave X at the lowest end, and
        return all: a `Multistart`, of which `print` shows a table.

        starts: one vector like `parameters` per row, shape `(K, n)`. keep: the number of them, those with the lowest f,
        from which a run is made. Default: all. optimizer: a name, class or factory, as for `BatchOptimizer`, of which
        each run has one of its own. Default: that of this object. steps: of each optimizer; 1, the default, is a run of
        L-BFGS, and more are needed for optimizers such as Adam.

        Runs make steps like any other, which count, draw the same numbers, and are heard of by observers and by `stop`,
        which ends the run that is going on, and all. The lowest is that of the optimizer's own objective, with `l1`. A
        start where f is not finite is left out, and a run that ends at such a point is put back to its start. The ends
        are the same, with `chunk_size` bit for bit, for any number of workers. Raises `ValueError` without a factory,
        or a start where f is finite, and what `evaluate_many` and the optimizer raise; then X is as before.

        >>> opt.load(x, y)
        >>> found = opt.multistart(torch.randn(4, 25, dtype=opt.parameters.dtype), keep=2)
        >>> len(found.runs), found.runs[0].f <= found.runs[1].f, torch.equal(opt.parameters, found.points[0])
        (4, True, True)
        """
        from batchopt.extras.multistart import multistart_of

        self._owner.check_between_steps("multistart")
        choice, step = self._choice if optimizer is None else optimizer, self._step_with
        found = multistart_of(self, starts, choice, keep, steps, step, lambda: self.stopped is not None)
        self._engine.settle()
        return found

    @exclusive
    def _step_with(self, optimizer: torch.optim.Optimizer) -> float:
        """Take a step of another optimizer, made for this module's parameters, on the loaded batch; return the loss.
        Several have the same random draws, and begin from the same buffers."""
        self._engine.current_step()
        own, self.optimizer = self.optimizer, optimizer
        try:
            return self._step(self._engine.step_again)
        finally:
            self.optimizer = own

    def stop(self) -> None:
        """Pause the step that is going on, or else the next one, at its next accepted point, and end `steps` with it.

        May be called by a callback, a signal handler or another thread. It pauses steps of batchopt's optimizers;
        others make their step first. Raises `BatchoptError` on ranks, unless `stop_on` or the step's `time_limit` has
        them ask each other.

        >>> opt.stop()
        >>> loss = opt.step(x, y)
        >>> opt.stopped, opt.result.iterations
        ('stop()', 0)
        """
        self._steps.requests.ask()

    @property
    def stopped(self) -> str | None:
        """Why the last step ended early, or was the last one of `steps`: `"stop()"`, the name of a signal, or the time
        limit; None if nobody has asked. The same on all ranks."""
        return self._steps.requests.why

    @property
    def result(self) -> Result:
        """The outcome of the last step of an optimizer of batchopt. Raises `BatchoptError` before the first one, and
        for other optimizers."""
        found = self.optimizer.result if isinstance(self.optimizer, Minimizer) else None
        if found is None:
            raise BatchoptError("there is no result: it is that of a step of an optimizer of batchopt ('lbfgs', say)")
        return found

    @property
    def history(self) -> History:
        """The course of the run so far, with `history=True`. Raises `BatchoptError` without.

        >>> with batchopt.BatchOptimizer(torch.nn.Linear(3, 1), torch.nn.MSELoss(), history=True) as opt:
        ...     loss = opt.step(torch.randn(50, 3), torch.randn(50, 1))
        >>> opt.history["f"][-1] == opt.output, len(opt.history) == opt.result.iterations
        (True, True)
        """
        if self._history is None:
            raise BatchoptError("nothing was kept: give BatchOptimizer(..., history=True), or each k-th by history=k")
        return self._history

    @property
    def paused(self) -> bool:
        """True if the last step was ended before its optimizer would have. Its batch does not count yet: the next step
        on it, also of another process that has loaded what this one saved, makes the rest, with the same iterates, and
        with `chunk_size` the same bits."""
        return self._engine.past.counters.paused

    def close(self) -> None:
        self._steps.requests.close()
        super().close()

    def steps(self, batches: Iterable[Any]) -> Iterator[float]:
        """Step on each of `batches`, and yield its loss; the next batch is read and copied to the workers while they
        compute.

        Each batch is a tuple or list `(inputs,)`, `(inputs, targets)` or `(inputs, targets, options)`, as made by a
        `DataLoader`; anything else is the inputs. With `terms` each batch is a dict with one of these for each term.
        Exceptions of `batches` are raised when that batch is due. `Batches` continue from their position to the end of
        the epoch, and count a batch when its step is complete. Ends after a step that was `stopped`. Raises what `step`
        raises.

        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=50)
        >>> losses = list(opt.steps(loader))
        >>> len(losses), opt.sample_counter
        (4, 200)
        """
        for batch in prepared(self._engine, batches):
            yield self._step_on(batch)

    @exclusive
    def _step_on(self, batch: PreparedBatch, time_limit: float | None = None) -> float:
        prepared = batch.take(self._engine)
        engine, requests = self._engine, self._steps.requests
        counted = engine.past.counters.batches
        try:
            return self._step(lambda: engine.begin(prepared, batch.rows), time_limit)
        finally:
            batch.is_last = requests.why is not None
            if engine.past.counters.batches > counted:
                batch.finish()

    def optimize(self) -> None:
        """Take one step of `optimizer` on the loaded batch, or evaluate once without one; a subclass may override
        it."""
        if self.optimizer is None:
            self.evaluate()
        else:
            closure = Closure(self._engine, self.evaluate)
            try:
                with torch_threads(1 if self._fixes_threads else None):
                    if isinstance(self.optimizer, Minimizer):
                        self.optimizer.step(closure, watch=self._steps)
                    else:
                        if hasattr(self.optimizer, "first_step"):  # SAM's, by the gradient here, which is evaluated now
                            self.evaluate()
                        self.optimizer.step(closure)  # type: ignore[arg-type]  # annotated as returning a float
            except RuntimeError as error:
                found = of_second_derivatives(self.optimizer, error)
                if found is None:
                    raise
                raise found from error

    @property
    def _fixes_threads(self) -> bool:
        """Tell whether the bits of the optimizer's own sums depend on the number of threads. Those of `Minimizer` do
        not, and for long vectors speed matters more than equal bits."""
        engine = self._engine
        alike = not engine.workers.alone or engine.settings.fixed_bits
        return alike and engine.subject.x.numel() < LARGE and not isinstance(self.optimizer, Minimizer)

    # ---- workers

    @property
    def prehook(self) -> Hook | None:
        """The hook before each forward; assigning replaces it in all workers."""
        return self._engine.workers.hooks[0]

    @prehook.setter
    def prehook(self, hook: Hook | None) -> None:
        self._engine.set_hooks(hook, self.posthook)

    @property
    def posthook(self) -> Hook | None:
        """The hook after each backward; assigning replaces it in all workers."""
        return self._engine.workers.hooks[1]

    @posthook.setter
    def posthook(self, hook: Hook | None) -> None:
        self._engine.set_hooks(self.prehook, hook)

    def run_on_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(worker, *args)` on each worker; return the values in rank order.

        Waits for workers that are being replaced. Raises `WorkerError` if the function raises, and `WorkerLostError` if
        a worker ends in it: its effects there are unknown, so it is not called again.

        >>> opt.run_on_workers(lambda worker, factor: factor * worker.rank, 10)
        [0, 10]
        """
        return self._engine.run_on_workers(function, *args)

    def calibrate(self) -> list[float]:
        """Time the workers on equal shares of the loaded batch; return the speeds in samples per second.

        This is optional: the first evaluation, in equal shares, measures the speeds, and later ones keep them current.
        Hooks do not run here. Fixed `speeds` are returned unchanged.
        """
        return self._engine.calibrate()

    def resize(self, parallelize: int | str, speeds: Sequence[float] | None = None) -> None:
        """Change the number of workers to `parallelize` (as in `BatchOptimizer`), between steps; a batch has to be
        loaded again.

        Workers of the lowest ranks are kept, with their `state`; new ones start, and run precode. The optimizer's state
        and the counters are kept. If speeds were given, `speeds` of the new workers must be given too.

        >>> opt.resize(1)
        >>> len(opt.workers)
        1
        """
        self._engine.resize(parallelize, speeds)

    # ---- saving and the end

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Return the module's and the optimizer's state, the counters, the measured speeds, the seed, the step, and
        the weights of the terms; no code.

        Like `save`, `load_state_dict` and `load_checkpoint`, for use between steps: called by a hook or a signal
        handler in the middle of one, it raises `BatchoptError`.
        """
        self._owner.check_between_steps("state_dict")
        past = {} if self._history is None else {"course": self._history.state_dict()}
        return {**state_of(self._engine, self.optimizer), **past}

    @exclusive
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; speeds only if the number of workers is the same. A batch has to be loaded
        again.

        Raises `ValueError` if the seed, the names of the terms or the class of the optimizer differ, or an entry is
        missing or invalid (or `TypeError`); what torch raises if shapes differ. Then nothing is changed.
        """
        self._engine.resync()
        self._owner.check_between_steps("load_state_dict")
        with resuming(self._engine, self.optimizer, self._rollback, state):
            if self._history is not None:
                self._history.load_state_dict(state.get("course", {"rows": [], "seconds": 0.0}))

    @exclusive
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] = {},  # never modified
    ) -> None:
        """Write `state_dict` to the file `path`, atomically.

        extra: entries of yours, by name: plain data and tensors, which `load_checkpoint(take=)` passes back.

        The file holds no code, and loads with `torch.load(path, weights_only=True)`. It is written next to `path`,
        synced, and renamed: killed or out of disk space at any point, either the old file remains or the new one is
        complete. Of several ranks the first one writes, and all wait for it. Raises `CheckpointError`; `ValueError` for
        an extra entry with the name of one of ours.

        >>> opt.save("run.batchopt", extra={"note": "before the heat wave"})
        >>> opt.load_checkpoint("run.batchopt", take=print)
        {'note': 'before the heat wave'}
        """
        self._engine.resync()
        self._owner.check_between_steps("save")
        self._engine.end_step()
        state, layout = self.state_dict(), self._engine.subject.flat.layout
        if taken := ENTRIES & extra.keys():
            raise ValueError(f"`extra` has {sorted(taken)}, which state_dict() has: call them something else")
        self._engine.workers.backend.once(lambda: checkpoint.write(path, {**state, **extra}, layout))

    @exclusive
    def load_checkpoint(
        self, path: str | os.PathLike[str], *, take: Callable[[dict[str, Any]], object] | None = None
    ) -> None:
        """Resume from a file written by `save`: with `chunk_size` bit for bit, with any number of workers.

        take: called with the extra entries of the file, before anything changes; it may raise.

        Nothing in the file is executed. Raises `CheckpointError`, and changes nothing, for a file that is damaged, or
        of a module with other parameters (by name and shape), other buffers, another seed or optimizer.
        """
        self._engine.resync()
        self._owner.check_between_steps("load_checkpoint")
        state = checkpoint.read(path, self._engine.subject.flat.layout)
        try:
            if take is not None:
                take({name: value for name, value in state.items() if name not in ENTRIES})
            self.load_state_dict(state)
        except (ValueError, RuntimeError, KeyError, TypeError) as error:  # raised by torch for other shapes and names
            raise CheckpointError(f"cannot resume from checkpoint '{os.fsdecode(path)}': {error}") from error

    @property
    def is_main(self) -> bool:
        """Tell whether this process prints and writes files: always, or with `backend="ranks"` only on rank 0."""
        return self._engine.workers.backend.is_main

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            advice = f": {TRAINER_ADVICE}" if name == "param_groups" or hasattr(torch.optim.Optimizer, name) else ""
            raise AttributeError(f"BatchOptimizer has no attribute '{name}'{advice}", name=name, obj=self)

    def __repr__(self) -> str:
        engine, subject, past = self._engine, self._engine.subject, self._engine.past.counters
        loss = self.criterion or getattr(engine.settings.loss_fn, "residual", engine.settings.loss_fn)
        parts = [f"{type(subject.module).__name__} of {subject.x.numel():,} parameters"]
        parts += (
            [f"terms={[*engine.reader.terms]}"] if engine.reader.terms else [arguments.short(loss)] * (loss is not None)
        )
        parts.append(f"optimizer={None if self.optimizer is None else type(self.optimizer).__name__}")
        parts.append("closed" if engine.workers.closed else f"parallelize={len(engine.workers.infos)}")
        parts.append(f"{past.batches} batches, {past.evaluations} evaluations")
        parts += [f"loss {past.loss:.6g}"] * (past.evaluations > 0)
        compilation = engine.policies.compilation
        parts += [] if compilation is None else [str(compilation)]
        return f"BatchOptimizer({', '.join(parts)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("this holds processes and cannot be copied or pickled: use state_dict()")
