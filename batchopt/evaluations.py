"""f of the loaded batch, its derivatives, and any other function of the batch, as users ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch

from batchopt._data import arguments
from batchopt._function.closure import Closure, loss_with_graph
from batchopt._function.derivatives import evaluate_many, hessian_products, input_gradients
from batchopt._function.full_gradient import full_gradient
from batchopt._function.function import BatchFunction
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
from batchopt._function.tasks import Functions, apply, collect, total
from batchopt._function.timeline import Timeline
from batchopt._machine.ownership import Owner, exclusive
from batchopt._mapreduce.answers import Answer
from batchopt.backends.base import WorkerInfo
from batchopt_workers.tasks.hogwild import Factory


class Evaluations:
    """f(X), df/dX and other functions of a loaded batch, evaluated by workers; a `BatchOptimizer` adds the steps."""

    _function: BatchFunction
    _owner: Owner

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
        if kind.map is Evaluations.map and kind.reduce is Evaluations.reduce and not {"map", "reduce"} & own.keys():
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

    @property
    def closure(self) -> Closure:
        """`evaluate` as an object: the closure of any optimizer, and for `LevenbergMarquardt` with the normal
        equations: `optimizer.step(opt.closure)`."""
        return Closure(self._function, self.evaluate)

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

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """Each worker's rank, pid, host, device, speed, samples, busy seconds, restarts, and whether it lives."""
        return self._function.workers.infos

    def timeline(self) -> AbstractContextManager[Timeline]:
        """Record who does what when, inside a `with` statement; costs nothing outside of it.

        `with opt.timeline() as timeline: ...`; then `print(timeline)` for each worker's utilisation and split,
        `timeline.save("trace.json")` for a trace viewer (Perfetto), `timeline.draw("timeline.png")` for a picture.
        """
        return self._function.observers.timeline()

    def fingerprint(self) -> str:
        """The sha256, in hexadecimal, of the parameters, the counters and all losses so far.

        Equal for two runs with the same bits: with `chunk_size`, for any number of workers.
        """
        return self._function.past.counters.fingerprint(self.parameters)
