"""BatchOptimizer: a module, a criterion and `parallelize=N` become f(X) and df/dX for any optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from batchopt._checkpoint import file
from batchopt._checkpoint.resumption import check_residuals, check_state, class_of
from batchopt._data import arguments
from batchopt._data.terms import Term, reweighed
from batchopt._function.closure import Closure
from batchopt._function.counters import Counters
from batchopt._function.derivatives import evaluate_many, hessian_products, input_gradients
from batchopt._function.full_gradient import full_gradient
from batchopt._function.function import BatchFunction, undone_if_it_fails
from batchopt._function.graph import loss_with_graph
from batchopt._function.hogwild import HogwildResult, hogwild
from batchopt._function.least_squares import (
    LARGEST,
    Normal,
    gauss_newton_product,
    gram,
    jacobian_product,
    normal,
    residuals,
    transposed_product,
)
from batchopt._function.numpy_objective import FlatObjective
from batchopt._function.prediction import iter_predict, predict, score
from batchopt._function.prepared import PreparedBatch
from batchopt._function.settings import Settings
from batchopt._function.tasks import Functions, apply, collect, total
from batchopt._function.timeline import Timeline
from batchopt._function.trials import Trial, Trials
from batchopt._function.workers import anticipate
from batchopt._machine.ownership import exclusive
from batchopt._machine.threads import torch_threads
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.reduce import LARGE
from batchopt._program.flat_module import FlatModule
from batchopt._program.flatten import trainable
from batchopt.backends.base import WorkerInfo
from batchopt.doctor import Diagnosis, examine
from batchopt.errors import CheckpointError
from batchopt.optim.choose import (
    OptimizerChoice,
    check_choice,
    check_goes_by_any_gradient,
    check_options,
    choose_optimizer,
)
from batchopt.optim.minimizer import Minimizer
from batchopt.optim.rollback import Rollback
from batchopt_workers.denominators import Denominators
from batchopt_workers.hogwild import Factory
from batchopt_workers.items import Collate
from batchopt_workers.objective import LossFunction
from batchopt_workers.squares import ResidualFunction
from batchopt_workers.worker import Hook, Precode

Self = TypeVar("Self", bound="BatchOptimizer")


class BatchOptimizer:
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

    # ---- f

    def load(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> None:
        """Make this the batch of the evaluations to come; nothing is evaluated, but the first batch measures the
        workers.

        `inputs` and `targets` are tensors or NumPy arrays, or tuples, lists, mappings or dataclasses of them, whose
        first dimension is the sample; or lists with one entry a sample. `inputs` alone may be a map-style
        `torch.utils.data.Dataset`: each worker reads the samples of its chunks itself. `options` has one object a
        sample, for the hooks. With `terms`, `inputs` is a dict with an entry for each: its inputs, or a tuple of
        inputs, targets and options. A new step begins: the module, the criterion, loss functions and hooks, with all
        that they refer to, are taken as they are now, and so are `weights`. Do not change the data before the next
        `load`: when it is read, at once or when it is needed, depends on the backend. Raises `ValueError` or
        `TypeError` for data that is no batch, for a program that cannot be sent any more, and if X is no longer the
        module's.
        """
        self._function.load(inputs, targets, options)

    def evaluate(self) -> torch.Tensor:
        """f at the current parameters (0-dim, float64), and df/dX in `grad_parameters` and every parameter's `.grad`.

        Any number of times; the closure for any optimizer: `torch_optimizer.step(opt.evaluate)`. Gradients are
        overwritten, not accumulated; a parameter that f does not depend on gets None. Torch's settings and contexts
        (autocast, default dtype, ...) are those in force here. Raises `WorkerError` if the user's code raised,
        `NonFiniteError` for an infinite or NaN result, and `ValueError` for a context that workers cannot be in, and
        for a forward that writes what is too large to be kept for each chunk; X is untouched then, gradients are of no
        use.
        """
        kind, own = type(self), vars(self)
        if (
            kind.map is BatchOptimizer.map
            and kind.reduce is BatchOptimizer.reduce
            and not {"map", "reduce"} & own.keys()
        ):
            return self._function.evaluate()
        return self._function.evaluate(self.map, self.reduce)

    def map(self) -> list[Answer]:
        """The first half of `evaluate`: partial losses and gradients from every worker that had a share.

        A subclass may override it, and `reduce`.
        """
        return self._function.map()

    def reduce(self, answers: Sequence[Answer]) -> torch.Tensor:
        """The second half of `evaluate`: merge `answers` into f, which is returned, and df/dX."""
        return self._function.reduce(answers)

    def loss(self) -> torch.Tensor:
        """f at the current parameters as a 0-dim tensor (float64) with a graph: one evaluation, whose gradient
        `backward` hands to autograd.

        So a penalty added in this process, a scaled loss, and trainers that call `loss.backward()` themselves get
        df/dX, times the gradient from above, added to every parameter's `.grad`; a parameter that f does not depend on
        gets nothing. Until then each `.grad` is as it was, and `grad_parameters` has df/dX; `backward` may make `.grad`
        of its memory. Raises what `evaluate` raises; `backward` raises `BatchoptError` with `create_graph=True`: see
        `hvp`.
        """
        return loss_with_graph(self._function, self.evaluate)

    def hvp(self, v: torch.Tensor) -> torch.Tensor:
        """The Hessian of f at the current parameters times `v`: a new tensor of X's dtype, in the shape of `v`.

        `v` has shape `(n,)`, as long as `parameters`, or `(n, k)` for k vectors, of any floating dtype; where one is
        not finite in X's dtype its product is NaN. The product is of the function that `evaluate` sees: the same
        chunks, draws and buffers; with `chunk_size` bit for bit for any number of workers. It takes two to three times
        as long as an evaluation, of which the first backward is made once for all k, and keeps the graph of that.
        Gradients, `output` and counters other than `product_counter` are untouched; prehook runs, posthook does not.
        Raises `TypeError` or `ValueError` for another `v`, what `evaluate` raises, and `WorkerError` where the module
        cannot be differentiated twice; with `on_nonfinite="return"` a product that is not finite is returned.
        """
        return hessian_products(self._function, v)

    # ---- least squares

    def residuals(self, inputs: Any = None, targets: Any = None) -> Any:
        """The residuals in the order of samples: shape `(samples, d)`, their dtype; a dict where there are terms.

        For a criterion that is `torch.nn.MSELoss`, whose residuals are output less target, or terms that are
        `Term(residual=...)`: f is the sum over the terms of `weight` times the mean square of the term's residuals.
        Default: those of the loaded batch; else of other data, as in `collect`, which may leave terms out. Raises
        `ValueError` where f, or one of these terms, is not known to be a sum of squares, and what `collect` raises.
        """
        return residuals(self._function, inputs, targets)

    def jvp(self, v: torch.Tensor) -> Any:
        """J times `v` (shape `(n,)`), where J is the Jacobian of the residuals of the loaded batch with respect to X:
        in the shape of `residuals`. Raises what that raises."""
        return jacobian_product(self._function, v)

    def vjp(self, u: Any) -> torch.Tensor:
        """Jᵀ times `u`, which is like `residuals`: shape `(n,)`, X's dtype, summed in float64 along the tree of chunks.
        Raises what `residuals` raises, and `NonFiniteError`."""
        return transposed_product(self._function, u)

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """JᵀWJ times `v`, shape `(n,)`, or times each column of it, shape `(n, k)`: the same shape, X's dtype.

        f is rᵀWr: W has the weight of each square in f, the term's by the number of its residuals. Twice this is the
        Hessian of f without the curvature of the residuals, and never negative. No matrix is made. Raises what `vjp`
        raises.
        """
        return gauss_newton_product(self._function, v)

    def normal(self, *, limit: int = LARGEST) -> Normal:
        """f, JᵀWr and JᵀWJ of the loaded batch at X in one pass over the samples: see `Normal`.

        Workers make rows of J (by `torch.func`, or the module with parameters for each sample), some MB at a time, and
        sum their products in float64. What neither way can evaluate takes a backward a row, and a warning. With
        `chunk_size` the same bits for any number of workers, as in `total`. Raises `ValueError` for more than `limit`
        parameters, with the size of the matrix; `NonFiniteError`; and what `residuals` raises.
        """
        return normal(self._function, limit)

    def gram(self, *, limit: int = LARGEST) -> torch.Tensor:
        """JJᵀ of the loaded batch, without weights: shape `(N, N)`, float64, for the N residuals in the order of
        `residuals`, one term after the other. For few residuals: all rows of J are held at a time. Raises `ValueError`
        for more than `limit` of them, and what `residuals` raises."""
        return gram(self._function, limit)

    def evaluate_many(
        self, points: torch.Tensor | Sequence[torch.Tensor], gradients: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """f of the loaded batch at each of `points`, in place of the current parameters: shape `(K,)`, float64.

        `points` has one vector like `parameters` a row: shape `(K, n)`, any floating dtype. Each worker evaluates whole
        points, as many as its speed allows: for line searches in parallel, several starts, evolution strategies. With
        `gradients` a tuple: df/dX at each point, too, shape `(K, n)`, X's dtype. Both are what `evaluate` would give
        there; with `chunk_size` bit for bit. Where f or its gradient is not finite, or one of `nonfinite_errors` is
        raised, f is infinity. Nothing else
        changes: parameters, gradients, buffers, counters; prehook runs, posthook does not. Each worker takes memory for
        a point, and on a cluster each machine gets the whole batch. Raises `TypeError` or `ValueError` for other
        points, and `WorkerError` if the user's code raises.
        """
        return evaluate_many(self._function, points, gradients)

    def input_gradients(self, inputs: Any = None, targets: Any = None) -> Any:
        """df/d(inputs): the gradient of f with respect to the inputs, in their structure, a row for each sample.

        Of the loaded batch, or of `inputs` and `targets` as a batch of their own, whose f it is then. A tensor of
        integers has None. With `terms` a dict. Everything else is as in `collect`.
        """
        return input_gradients(self._function, inputs, targets)

    # ---- any function of the batch

    def collect(
        self,
        function: Functions = None,
        inputs: Any = None,
        targets: Any = None,
        *,
        grad: bool = False,
        train: bool | None = None,
        layers: Sequence[str] = (),
    ) -> Any:
        """`function(module, inputs, targets)` of each chunk on the workers, the results put together in sample order.

        It returns a tensor, or a tuple, list or dict of tensors, whose first dimension is the samples: so does this; or
        a list with one object a sample. Where the batch is a list of samples without `collate_fn` it is called for each
        sample, and a list of what it returned comes back. Without data it is applied to the loaded batch, in the chunks
        and with the random draws of its evaluations, and the step goes on as if nothing had happened; `inputs` and
        `targets` as for `load` are a batch of their own. With `terms`: `function` may be a dict with a function for
        some of them, and the results are a dict.

        grad: whether autograd records. train: the mode of the module meanwhile, False for evaluation mode; None as it
        is. layers: names of parts of the module (`module.named_modules()`): the result is a dict with the output of
        each; with a function, a tuple of its result and that dict.

        Tensors come through shared memory, written once. Parameters, gradients, buffers, counters and draws stay as
        they are; hooks do not run; NaN stays where it is. Raises `WorkerError` if the function raises, changes a
        parameter, or returns something else than rows for its samples; `ValueError`, which names the chunk, for results
        of several shapes; `TypeError` for a function that cannot be sent; what `load` raises for the data.
        """
        data = inputs, targets
        return apply(self._function, collect, function, data, grad=grad, train=train, layers=layers)

    def total(
        self,
        function: Functions,
        inputs: Any = None,
        targets: Any = None,
        *,
        grad: bool = False,
        train: bool | None = None,
    ) -> Any:
        """The sum of `function(module, inputs, targets)` over the chunks: tensors in any structure, of fixed shapes.

        Summed along the tree of chunks, as gradients are: with `chunk_size` the same bits for any number of workers.
        Single precision is summed as such, unless there is another dtype among the tensors: then all are summed in
        double precision, integers and booleans exactly (up to 2**53). Everything else is as in `collect`. Raises
        `NonFiniteError`, which names the samples, for a sum that is not finite; with `on_nonfinite="return"` it is
        returned.
        """
        return apply(self._function, total, function, (inputs, targets), grad=grad, train=train)

    def outputs(self) -> Any:
        """What the module returned in the last evaluation, in the order of samples, without another forward.

        For that, set `keep_outputs` before the evaluation. The structure is as in `collect`. It is of the parameters
        that were evaluated, which a line search may have left since. Raises `BatchoptError` if outputs were not kept.
        """
        return self._function.outputs()

    @property
    def keep_outputs(self) -> bool:
        """Whether evaluations keep what the module returns, for `outputs`; False at first. It costs a copy of it.

        Only where a criterion is given the output: with `loss_fn`, `terms` or a module that is its own loss, setting it
        raises `ValueError`.
        """
        return self._function.keeps_outputs

    @keep_outputs.setter
    def keep_outputs(self, keep: bool) -> None:
        if arguments.read_bool("keep_outputs", keep) and self.criterion is None:
            raise ValueError(
                "outputs are seen only where a criterion is given them, and here the loss is made by a function: use "
                "opt.collect(lambda module, inputs, targets: module(inputs))"
            )
        self._function.keep_outputs(keep)

    def predict(self, inputs: Any = None, *, transform: Callable[[Any], Any] | None = None) -> Any:
        """The module's outputs for all of `inputs`, in their order: evaluation mode, no graph, no targets needed.

        inputs: a batch as for `load`, a map-style `Dataset`, or a loader, whose batches are `(inputs,)`,
        `(inputs, targets)` or inputs alone; with `terms`, too, one batch of inputs. Default: those of the loaded batch,
        which the workers have already; a dict where there are terms. transform: what workers make of the
        output of a chunk before it is returned, `transform(outputs)`: a softmax, an argmax, one of several outputs.
        Returns what the module does (a tensor, or tuples, lists and dicts of tensors, the first dimension being the
        samples), or a list with one entry a sample. The memory that it takes is that of the outputs and of a chunk in
        each worker: `chunk_size` bounds it. Everything else is as in `collect`.
        """
        return predict(self._function, inputs, transform)

    def iter_predict(
        self, batches: Iterable[Any], *, transform: Callable[[Any], Any] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """Yield `(outputs, batch)` for each batch of a loader, as `predict`; the next one is read meanwhile."""
        return iter_predict(self._function, batches, transform)

    def score(self, data: Any, metrics: Any, *, transform: Callable[[Any], Any] | None = None) -> Any:
        """Metrics of the module's outputs for all of `data`: a dict of values by name, or the value of a single metric.

        data: `(inputs, targets)`, a loader of such batches, or a map-style `Dataset` of such items. metrics: one, or a
        dict of them: functions `metric(outputs, targets)`; objects of torchmetrics (`update`, `compute`, `reset`) or of
        ignite; functions of `sklearn.metrics`. Outputs are gathered as `predict` does, with `transform`, and each
        metric is given all of them at once, in order: so it is the serial number. Values are floats where they are one
        number. Raises `TypeError` for what is no metric, `ValueError` where there are no targets, and what `predict`
        raises.
        """
        return score(self._function, data, metrics, transform)

    @property
    def parameters(self) -> torch.Tensor:
        """X: a 1-D tensor (shape `(n,)`, the module's dtype) that shares memory with the trainable parameters, both
        ways. Complex ones come first, and are real and imaginary parts by turns.

        A parameter that was given other memory (`p.data = ...`) is copied into X and is a view of it again, here and
        with every other call. Raises `BatchoptError` where that cannot be: see `BatchOptimizer`.
        """
        return self._function.parameters

    @property
    def grad_parameters(self) -> torch.Tensor:
        """df/dX at the last evaluation, in the order of `parameters`; shares memory with the parameters' `.grad`,
        both ways. Another tensor after `loss`, whose gradients are not overwritten."""
        return self._function.subject.gradient

    @property
    def module(self) -> torch.nn.Module:
        """The user's module."""
        return self._function.subject.module

    @property
    def criterion(self) -> Callable[..., Any] | None:
        """The user's criterion."""
        return self._function.settings.criterion

    @property
    def losses(self) -> dict[str, float]:
        """The mean (or sum) of each term, by name, without its weight, where `output` is of; empty without terms and
        before the first evaluation."""
        return dict(self._function.past.counters.terms)

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each term in f, by name; empty without terms.

        Assigning a dict with a weight for each term takes effect with the batch loaded next. Raises `TypeError` or
        `ValueError` unless it has exactly the terms' names, and each weight is finite and >= 0.
        """
        return MappingProxyType({name: term.weight for name, term in (self._function.terms or {}).items()})

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        self._function.set_weights(weights)

    @property
    def hook_results(self) -> list[Any]:
        """Results of the posthook in the last evaluation, in sample order."""
        return self._function.past.hook_results

    @property
    def output(self) -> float:
        """The loss of the parameters that the last step left, if it evaluated there; else that of the last evaluation.
        0 before the first one."""
        return self._function.past.counters.loss

    @property
    def eval_counter(self) -> int:
        """Evaluations so far."""
        return self._function.past.counters.evaluations

    @property
    def batch_counter(self) -> int:
        """Batches stepped on so far."""
        return self._function.past.counters.batches

    @property
    def sample_counter(self) -> int:
        """Samples of the batches stepped on so far."""
        return self._function.past.counters.samples

    @property
    def product_counter(self) -> int:
        """Products of the Hessian with a vector so far."""
        return self._function.past.counters.products

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

    @property
    def closure(self) -> Closure:
        """`evaluate` as an object: the closure of any optimizer, and for `LevenbergMarquardt` with the normal
        equations: `optimizer.step(opt.closure)`."""
        return Closure(self._function, self.evaluate)

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
    def full_gradient(self, data: Iterable[Any]) -> tuple[float, torch.Tensor]:
        """f and df/dX (a new tensor, shape `(n,)`, X's dtype) of all of `data`, which comes in batches as for `steps`.

        Exactly those of one batch with all samples: batches may differ in size, and count by what their mean divides
        by. Summed in float64, in the order of the batches; with `chunk_size` the same bits for any number of workers.
        It is left in `grad_parameters` and every `.grad`, too. X, buffers, later draws and the counters of batches are
        as before; each batch is an evaluation, and `output` is the last one's. A batch has to be loaded anew. Raises
        `ValueError` where there is no sample, or more than one term: each has a mean of its own, and in a batch's
        gradient they are summed already; and where all targets of a batch have class weight 0 under label smoothing.
        Raises what `load` and `evaluate` raise, and what `data` does; then the counters are as before, too.
        """
        return full_gradient(self._function, data, self.evaluate)

    def objective(self) -> FlatObjective:
        """f of the loaded batch as a function of a flat NumPy vector, for solvers outside of torch: `FlatObjective`,
        with `x0`, `value_and_grad(x)`, `gradient(x)`, `hvp(x, v)` and `assign(x)`; `least_squares()` of it has the
        residuals and their Jacobian."""
        self._function.check_exact("objective()")
        return FlatObjective(self._function, self.evaluate)

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

    def hogwild(
        self, data: Any, optimizer: Factory, *, batch_size: int, epochs: int = 1, shuffle: bool = True
    ) -> HogwildResult:
        """Let each worker step on mini-batches of its own, on parameters that all of them write, without waiting.

        data: `(inputs, targets)`, inputs, or a map-style `Dataset`. optimizer: `optimizer(params)`, a factory, called
        once in each worker: its state (momentum) is the worker's own. batch_size: samples in a mini-batch, whose loss
        is its mean. epochs: how often all samples come; with `shuffle` in an order of `seed` and the epoch. Worker `i`
        of `n` has every `n`-th mini-batch; what a slow worker has not begun, others take over. A worker that dies is
        replaced, and its unfinished mini-batches are stepped on by others, with an optimizer that begins anew.

        With one worker this is plain SGD, bit for bit; with several, writes overwrite each other as the processor has
        it, and no two runs are alike: for models of which a mini-batch touches few parameters, such as embeddings with
        `sparse=True` (Niu, Recht, Ré and Wright: "Hogwild!", 2011). Returns the losses of each worker. Raises
        `ValueError` for running statistics, which nobody would put together; `NonFiniteError` for a mini-batch whose
        loss or gradient is not finite, on which no step is made; and what `collect` raises. Then parameters are
        wherever the steps before have left them. No worker steps any more once the call has ended. Not on a cluster,
        nor with `devices`.
        """
        return hogwild(self._function, data, optimizer, batch_size, epochs, shuffle)

    # ---- workers

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """Each worker's rank, pid, host, device, speed, samples, busy seconds, restarts, and whether it lives."""
        return self._function.workers.infos

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

    def timeline(self) -> AbstractContextManager[Timeline]:
        """Record who does what when, inside a `with` statement; costs nothing outside of it.

        `with opt.timeline() as timeline: ...`; then `print(timeline)` for each worker's utilisation and split,
        `timeline.save("trace.json")` for a trace viewer (Perfetto), `timeline.draw("timeline.png")` for a picture.
        """
        return self._function.observers.timeline()

    # ---- saving and the end

    def fingerprint(self) -> str:
        """The sha256, in hexadecimal, of the parameters, the counters and all losses so far.

        Equal for two runs with the same bits: with `chunk_size`, for any number of workers.
        """
        return self._function.past.counters.fingerprint(self.parameters)

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
