"""BatchOptimizer: a module, a criterion and `parallelize=N` become f(X) and df/dX for any optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from batchopt._checkpoint import file
from batchopt._checkpoint.resumption import check_state, class_of
from batchopt._data.denominators import Denominators
from batchopt._data.prefetch import Ahead, as_arguments, as_batch_of_terms
from batchopt._data.terms import Term, reweighed
from batchopt._function.counters import History
from batchopt._function.hessian import Curved
from batchopt._function.numpy_objective import FlatObjective
from batchopt._function.settings import Settings
from batchopt._function.total import Total
from batchopt._machine.ownership import exclusive
from batchopt._machine.threads import torch_threads
from batchopt._mapreduce.reduce import LARGE
from batchopt._mapreduce.speeds import Speeds
from batchopt._program.flatten import trainable
from batchopt.backends.base import Prepared
from batchopt.doctor import Diagnosis, examine
from batchopt.errors import CheckpointError
from batchopt.optim.choose import OptimizerChoice, check_choice, check_options, choose_optimizer
from batchopt.optim.descent import Descent
from batchopt.optim.rollback import Undo
from batchopt.optim.trials import Trial, Trials
from batchopt_workers.batch import Collate
from batchopt_workers.objective import LossFunction
from batchopt_workers.worker import Hook, Precode

T = TypeVar("T")


class BatchOptimizer(Curved):
    """Evaluates `criterion(module(inputs), targets)` and its gradient over whole batches on `parallelize` workers.

    Args:
        module: its trainable parameters become views of one vector, `parameters`. Tensors that viewed their memory before
            (`p.data`, `p.detach()`) are no part of it. One that is given other memory later (`p.data = ...`) is copied
            into it at the next call; `BatchoptError` if it has another shape, dtype or device, is another Parameter
            (`load_state_dict(assign=True)`), or a tensor still views the memory that it had.
        criterion: `criterion(output, targets) -> scalar`; without it and without `loss_fn` the module returns the loss.
        optimizer: `"lbfgs"`, the default, `"cg"` or `"ssbroyden"` for those of batchopt; the name of another class of
            `torch.optim` in lower case; a factory `f(params)`, an instance over the module's parameters, or None to only
            evaluate.
        parallelize: number of workers, or `"auto"`: one a usable core; on Ray as many as there is room for, at each step
            anew. 1, the default, is this process itself, except on Ray.
        backend: where workers run: `"process"`, the default, worker processes on this machine; `"ray"`, the machines of a
            Ray cluster (`pip install batchopt[ray]`): the one that this process is connected to, else the one that
            `RAY_ADDRESS` names or this machine belongs to, else a new one on this machine.
        loss_fn: `loss_fn(module, inputs, targets) -> scalar`, instead of a criterion.
        terms: for an objective of several terms, each over data of its own, instead of a criterion or `loss_fn`: a `Term`
            under each name. f is the weighted sum of the terms' means, and a batch is a dict with an entry for each:
            its inputs, or a tuple of inputs, targets and options.
        reduction: `"mean"` or `"sum"`: what the loss of some samples is. Default: the criterion's own, else the mean.
        denominators: for a mean that does not divide by the number of samples: `denominators(inputs, targets)`, called
            once a batch, returns what each sample adds to the denominator (shape `(samples,)`). Default: 1 each; for
            cross entropy and negative log likelihood the class weights of the targets that are not ignored.
        chunk_size: samples in one forward/backward. A number fixes the chunks by the data alone, and so the bits of
            the result for any number of workers. Default: a worker's whole share; a 32nd of the batch under
            `torch.use_deterministic_algorithms(True)`.
        collate_fn: for batches that are lists of samples: makes one forward's `(inputs, targets)` of a list of
            `(input, target)` pairs, or its inputs of a list of inputs where there are no targets. Default: one
            forward a sample.
        precode: `precode(worker)`, run once in each worker before the module arrives there. Workers import modules as their
            files are: what your program has changed in them (settings of a library, a patched method) is done here, too.
        prehook, posthook: `hook(worker, sample)`, before and after each forward/backward, in the worker. What posthook
            returns is in `hook_results`, in sample order. Both may be replaced at any time between evaluations.
        speeds: fixed relative speeds, one a worker. Default: measured on the first batch, and kept current.
        threads_per_worker: intra-op threads of each worker. Default: its part of the usable cores, at least 1; in this
            process what torch has. With `chunk_size` 1, here too, since the number of threads changes the bits.
        devices: of each worker, as `["cuda:0", "cuda:1", "cpu"]`, two or more; it settles `parallelize`. The module, the
            batch and X stay in this machine's memory; a worker keeps module and shard on its device, and X crosses
            with each order: once an evaluation, and for chunks that it takes over from another worker. Unequal devices are balanced by their measured speed, and are equal to rounding only.
            Default: all workers on the cores of this machine.
        timeout: seconds that a worker may make no progress (evaluate no chunk to its end, or be in one function of
            `run_on_workers`) before it is replaced. Default: 20 times what a chunk should take by its measured speed, but no
            less than 30 s, and 600 s before anything was measured; functions may take any time. What a worker does
            before it can work (precode) may take 60 s or `timeout`, whichever is longer; 600 s without a timeout.
        max_restarts: how many workers may be replaced in all, before `AllWorkersLostError`. Default: 4 for each worker.
        seed: of all random draws in the workers, which depend on it, the step and the chunk alone.
        on_nonfinite: `"raise"`, the default: a loss or gradient that is not finite raises `NonFiniteError`.
            `"return"`: the loss is infinity, for a line search that can back off.
        check_cut: warn if the loss depends on how the batch is cut, as that of tokens without padding does without
            `denominators`. The first time that a batch is cut, the first 8 samples of each term are evaluated in one
            go, in two parts and, where that differs, in one go again, by one worker; `torch.nn`'s own losses are not.
            Default: True.
        verbose: 0 silent, 1 a progress bar, 2 a log record for every evaluation, 3 the workers' shares too.
        ray_options: what one worker takes of a machine on Ray, `num_cpus` (default 1, and as many threads), `num_gpus`
            (default 0; with 1 a worker computes on a GPU of its own), `memory`, `resources`; and other options of a Ray
            actor, such as `runtime_env`, for the actor that holds a machine's workers.

    Raises `TypeError` or `ValueError` for arguments that cannot work, and for a tensor that requires grad, is reached by the
    criterion or a loss function, and is none of the module's parameters (it would never be trained), before a process
    starts; `WorkerError` if precode raises.
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
        terms: Mapping[str, Term] | None = None,
        reduction: str | None = None,
        denominators: Denominators | None = None,
        chunk_size: int | None = None,
        collate_fn: Collate | None = None,
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
        verbose: int = 0,
        check_cut: bool = True,
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        settings = Settings.read(locals())
        check_choice(optimizer)
        self.optimizer = choose_optimizer(optimizer, [parameter for _, parameter in trainable(module)])
        super().__init__(module, settings)
        self._undo = Undo(self._flat.vector, self.optimizer)

    @exclusive
    def step(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> float:
        """Load the batch and optimize on it once; returns `output`: the loss of the parameters that are left, wherever in
        the step they were evaluated.

        An optimizer that moves after its last evaluation (SGD, and whatever goes fixed steps) leaves parameters that were not
        evaluated: then it is the loss of the last evaluation.
        Whatever it raises, Ctrl-C included: parameters, buffers, counters and the optimizer's state are as before.
        """
        return self._step(lambda: self.load(inputs, targets, options))

    def _step(self, load: Callable[[], None]) -> float:
        self._check_open()
        self._end_step()
        with self._in_the_middle_of("a step"):
            self._undo.take()
            try:
                with self._doing("step"), self._undone_if_it_fails():
                    load()
                    trials = self._trials = Trials(self._flat.vector, self._params, self._tells)
                    self.optimize()
                    self._end_step()
                    self._count(self._left(trials))
            except BaseException:
                self._flat.bind(self._params)
                self._undo.back()
                raise
            finally:
                self._trials = None
        return self.output

    @property
    def _tells(self) -> bool:
        """Whether the optimizer says which evaluation was of the parameters that it leaves: ours do."""
        return isinstance(self.optimizer, Descent) and type(self).optimize is BatchOptimizer.optimize

    def _left(self, trials: Trials) -> Trial | None:
        """The evaluation at the parameters that the step has left, if there was one."""
        if self._tells and isinstance(self.optimizer, Descent) and self.optimizer.result is not None:
            return trials.number(self.optimizer.result.number, self.optimizer.result.evaluations)
        return trials.left(self._undo.start)

    def _count(self, left: Trial | None) -> None:
        """A step was made; `left`: the evaluation at the parameters that it leaves, if there was one."""
        past = self._history
        if left is not None:
            past = replace(past, loss=left.loss, terms=dict(left.terms))
        samples = past.samples + self._loaded().size
        self._history = replace(past, batches=past.batches + 1, samples=samples)

    def steps(self, batches: Iterable[Any]) -> Iterator[float]:
        """Step on each of `batches`, and yield its loss; while the workers compute, the next batch is read, and copied
        to where they will read it.

        Each batch is a tuple or list `(inputs,)`, `(inputs, targets)` or `(inputs, targets, options)`, as a `DataLoader`
        makes them; anything else is the inputs. With `terms` each batch is a dict, with one of these for each term. What `batches` raises is raised when its turn has come. Raises what `step`
        raises. Between two steps nothing else may load a batch.
        """
        return self._for_each(batches, self._step_on)

    def _for_each(self, batches: Iterable[Any], use: Callable[[Prepared], T]) -> Iterator[T]:
        """`use` each of `batches`; the next one is read while the workers compute."""
        read = as_arguments if self._settings.terms is None else as_batch_of_terms
        ahead = Ahead(batches, lambda batch: self._prepare(*read(batch), ahead=True))

        def fetch() -> None:
            with torch_threads(1):  # the workers have the cores
                ahead.fetch()

        for prepared in ahead:
            self._meanwhile = fetch
            try:
                found = use(prepared)
            finally:
                self._meanwhile = None
            yield found

    @exclusive
    def _step_on(self, prepared: Prepared) -> float:
        return self._step(lambda: self._begin(prepared))

    def optimize(self) -> None:
        """Take one step of `optimizer` on the loaded batch; a subclass may override it. Without an optimizer,
        evaluate once."""
        if self.optimizer is None:
            self.evaluate()
        else:
            # of the sums in the optimizer's algebra, too, the bits depend on the threads
            alike = not self._settings.alone or self._settings.fixed_bits
            small = self._flat.vector.numel() < LARGE and not isinstance(
                self.optimizer, Descent
            )  # which sees to it itself
            with torch_threads(1 if alike and small else None):
                self.optimizer.step(self.evaluate)  # type: ignore[arg-type]  # annotated as returning a float

    @exclusive
    def full_gradient(self, data: Iterable[Any]) -> tuple[float, torch.Tensor]:
        """f and df/dX (a new tensor, shape `(n,)`, X's dtype) of all of `data`, which comes in batches as for `steps`.

        Exactly those of one batch with all samples: batches may differ in size, and count by what their mean divides
        by. Summed in float64, in the order of the batches; with `chunk_size` the same bits for any number of workers.
        It is left in `grad_parameters` and every `.grad`, too. X, buffers, later draws and the counters of batches are as
        before; each batch is an evaluation, and `output` is the last one's. A batch has to be loaded anew. Raises `ValueError` where there is no sample, or
        more than one term: each has a mean of its own, and in a batch's gradient they are summed already; and where all
        targets of a batch have class weight 0 under label smoothing. Raises what `load` and `evaluate` raise, and what
        `data` does; then the counters are as before, too.
        """
        self._check_open()
        if len(self._settings.loss_fns) > 1:
            raise ValueError(
                "full_gradient needs an objective of one term: the means of several divide by different denominators, "
                f"and there are {len(self._settings.loss_fns)}; load all data as one batch and call evaluate()"
            )
        self._end_step()
        total, before = Total(self._flat.vector), self._history
        try:
            with self._in_the_middle_of("full_gradient()"):
                for _ in self._for_each(data, lambda prepared: self._add(prepared, total)):
                    pass
            whole = total.whole()
        except BaseException:
            self._history = before
            raise
        finally:
            self._batch = self._changes = None
        self._history = replace(self._history, steps=before.steps)
        self._grad.copy_(whole[1])
        for parameter, view in zip(self._params, self._grad_views, strict=True):
            parameter.grad = view
        return whole

    def _add(self, prepared: Prepared, total: Total) -> None:
        """Evaluate a batch of `full_gradient`, unless nothing in it counts."""
        (part,) = prepared.batch.parts
        if part.weighting.divided_once and not part.weighting.divisor:
            raise ValueError(
                "the class weights of all targets of a batch are 0, and with label smoothing it has a loss all the same, "
                "which no mean of it says: make the batches larger, or leave those samples out"
            )
        if part.weighting.divisor:
            self._begin(prepared)
            total.add(self.evaluate().item(), self._grad, part.weighting)
            self._changes = None

    def objective(self) -> FlatObjective:
        """f of the loaded batch as a function of a flat NumPy vector, for solvers outside of torch: `FlatObjective`,
        with `x0`, `value_and_grad(x)`, `gradient(x)`, `hvp(x, v)` and `assign(x)`."""
        return FlatObjective(self, self._owner, self._ready)

    @exclusive
    def check(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> Diagnosis:
        """Examine whether f and its gradient describe one function on this batch, and whether the parallel one is the
        serial one.

        Evaluates twice for equal bits; compares the gradient with finite differences, in float64 where the module
        can be evaluated there; the batch in chunks with the whole; workers with this process. How precise f is, of a module
        that computes in single precision inside or solves an equation to a tolerance, is measured, and differences that it
        explains are none: it finds a slope that is off by a thousandth, and a cut by a hundred-thousandth, or what that
        precision leaves. Returns a `Diagnosis`: `healthy`, `culprit`, and a report when printed. Parameters, counters and later draws are as before; hooks
        run, in this process too. The batch has to be loaded anew.
        """
        return examine(self, inputs, targets, options)

    def fingerprint(self) -> str:
        """The sha256, in hexadecimal, of the parameters, the counters and all losses so far.

        Equal for two runs with the same bits: with `chunk_size`, for any number of workers.
        """
        return self._history.fingerprint(self.parameters)

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """The module's and the optimizer's state, the counters, the measured speeds, the seed, the step and the weights
        of the terms; no code.

        Like `save`, `load_state_dict` and `load_checkpoint`, for between steps: called by a hook or a signal handler in the
        middle of one, it raises `BatchoptError`.
        """
        self._check_between_steps("state_dict")
        self._follow()
        return {
            "module": self._module.state_dict(),
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else None,
            "optimizer_class": class_of(self.optimizer),
            "history": self._history.state_dict(),
            "speeds": list(self._speeds.values),
            "seed": self._settings.seed,
            "weights": dict(self.weights),
        }

    @exclusive
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; speeds only if the number of workers is the same. A batch has to be
        loaded anew.

        Raises `ValueError` if the seed, the names of the terms or the class of the optimizer differ, or an entry is missing
        or is not what `state_dict` returns (or `TypeError`); what torch raises if shapes differ. Then nothing was changed.
        """
        self._check_open()
        self._check_between_steps("load_state_dict")
        check_state(state, self.optimizer, self._settings.seed)
        terms = self._settings.terms
        if weights := state.get("weights"):  # older states have none
            terms = reweighed(terms, weights)
        self._end_step()
        before = {key: value.clone() for key, value in self._module.state_dict().items() if torch.is_tensor(value)}
        self._undo.take()
        try:
            self._module.load_state_dict(state["module"])
            if self.optimizer is not None:
                self.optimizer.load_state_dict(state["optimizer"])
                check_options(self.optimizer)
            self._history = History(**state["history"])
            self._settings = replace(self._settings, terms=terms)
        except BaseException:
            self._module.load_state_dict(before, strict=False)
            self._undo.back()
            raise
        self._batch = None
        if len(state["speeds"]) == len(self.workers) and not self._speeds.fixed:
            self._speeds = Speeds(tuple(state["speeds"]))

    @exclusive
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict` to the file `path`: whole, or not at all.

        The file holds no code, and loads with `torch.load(path, weights_only=True)`. It is written beside `path`, synced,
        and renamed: killed or out of disk at any point, what was at `path` still is, or the new file is complete.
        Raises `CheckpointError`.
        """
        self._check_open()
        self._check_between_steps("save")
        self._end_step()
        file.write(path, self.state_dict(), self._flat.layout)

    @exclusive
    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file of `save`: with `chunk_size` bit for bit, with any number of workers.

        Nothing in the file is executed. Raises `CheckpointError` for a file that is damaged, or of a module with other
        parameters (by name and shape), other buffers, another seed or optimizer. Then nothing was changed.
        """
        self._check_open()
        self._check_between_steps("load_checkpoint")
        state = file.read(path, self._flat.layout)
        try:
            self.load_state_dict(state)
        except (ValueError, RuntimeError, KeyError, TypeError) as error:  # what torch says of other shapes and names
            raise CheckpointError(f"cannot go on from checkpoint '{os.fsdecode(path)}': {error}") from error
