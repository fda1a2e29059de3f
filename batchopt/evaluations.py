"""f of the loaded batch, its derivatives, and other functions of the batch: the public interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from batchopt._data import arguments
from batchopt._data.terms import reweighed
from batchopt._engine.engine import Engine
from batchopt._functions.closure import loss_with_graph
from batchopt._functions.columns import deals, evaluate_by_columns
from batchopt._functions.derivatives import (
    check_exact,
    evaluate_many,
    full_gradient,
    hessian_products,
    input_gradients,
    term_gradients,
)
from batchopt._functions.least_squares import (
    LARGEST,
    Normal,
    gauss_newton_product,
    gram,
    jacobian_product,
    normal,
    residuals,
    transposed_product,
)
from batchopt._functions.numpy_objective import FlatObjective
from batchopt._functions.prediction import iter_predict, predict, score
from batchopt._functions.tasks import Functions, apply, collect, total
from batchopt._machine.ownership import exclusive
from batchopt._mapreduce.answers import Answer
from batchopt.backends.base import WorkerInfo
from batchopt.errors import BatchoptError

if TYPE_CHECKING:
    import numpy as np

    Array = torch.Tensor | np.ndarray[Any, Any]  # a batch of these has results of the function's own type
    Points = torch.Tensor | Sequence[torch.Tensor]

Self = TypeVar("Self", bound="Evaluations")
R = TypeVar("R")


class Evaluations:
    """f(X), df/dX and other functions of a loaded batch, evaluated by workers; a `BatchOptimizer` adds the steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._owner = engine, engine.owner

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") or name.startswith("__")]

    def __enter__(self: Self) -> Self:
        self._engine.resync()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers; may be called repeatedly. The module keeps its parameters, in memory of this process alone
        unless another optimizer shares them.

        In a signal handler (or a hook, or a finalizer) that interrupts another call, it makes that call end as soon as
        possible, with `BatchoptError`, and then stops the workers. In a fork it does nothing, as a fork has no workers.
        """
        self._engine.close()

    # ---- f

    def load(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> None:
        """Load the batch for the next evaluations; nothing is evaluated, except that the first batch measures the
        workers.

        `inputs` and `targets` are tensors or NumPy arrays, or tuples, mappings or dataclasses of them, whose first
        dimension is the sample; or lists with one entry per sample. `inputs` alone may be a map-style
        `torch.utils.data.Dataset`: each worker reads the samples of its chunks itself. `options` has one object per
        sample, for the hooks. With `terms`, `inputs` is a dict with an entry for each: its inputs, or a tuple of
        inputs, targets and options. A new step begins, with the current module, criterion, loss functions and hooks,
        everything that they refer to, and the current `weights`. Do not change the data before the next `load`: it
        depends on the backend whether it is read at once or when it is needed. Raises `ValueError` or `TypeError` for
        data that is no batch, for a program that can no longer be sent, and if X is no longer the module's.
        """
        self._engine.load(inputs, targets, options)

    def evaluate(self) -> torch.Tensor:
        """Return f at the current parameters (0-dim, float64), and set df/dX in `grad_parameters` and every parameter's
        `.grad`.

        May be called any number of times; it is a closure for any optimizer: `torch_optimizer.step(opt.evaluate)`.
        Gradients are overwritten, not accumulated; a parameter that f does not depend on gets None. Torch's settings
        and contexts (autocast, default dtype, ...) are captured at each evaluation. Raises `WorkerError` if the user's
        code raised, `NonFiniteError` for an infinite or NaN result, and `ValueError` for a context that workers cannot
        enter, and for a forward that writes state too large to be kept for each chunk; then X is unchanged, and
        gradients are unspecified.

        >>> opt.load(x, y)
        >>> torch.allclose(opt.evaluate(), torch.nn.functional.mse_loss(model(x), y))
        True
        >>> model[0].weight.grad.shape
        torch.Size([8, 1])
        >>> start = torch.optim.LBFGS(model.parameters()).step(opt.evaluate)
        """
        kind, own = type(self), vars(self)
        if kind.map is Evaluations.map and kind.reduce is Evaluations.reduce and not {"map", "reduce"} & own.keys():
            engine = self._engine
            dealt = engine.step is not None and engine.step.deals and deals(engine)
            return evaluate_by_columns(engine) if dealt else engine.evaluate()
        return self._engine.evaluate(self.map, self.reduce)

    def map(self) -> Sequence[Answer]:
        """Return partial losses and gradients from every worker that had a share: the first half of `evaluate`.

        A subclass may override this and `reduce`.
        """
        return self._engine.map()

    def reduce(self, answers: Sequence[Answer]) -> torch.Tensor:
        """Merge `answers` into df/dX and f, which is returned: the second half of `evaluate`."""
        return self._engine.reduce(answers)

    def loss(self) -> torch.Tensor:
        """Return f at the current parameters as a 0-dim tensor (float64) with a graph, by one evaluation; `backward`
        passes its gradient to autograd.

        So a penalty added in this process, a scaled loss, and trainers that call `loss.backward()` themselves get
        df/dX, times the gradient from above, added to every parameter's `.grad`; a parameter that f does not depend on
        gets nothing. Until then each `.grad` is unchanged, and `grad_parameters` has df/dX; `backward` may reuse its
        memory for `.grad`. Raises what `evaluate` raises; `backward` raises `BatchoptError` with `create_graph=True`:
        see `hvp`.

        >>> opt.load(x, y)
        >>> penalised = opt.loss() + 1e-3 * model[0].weight.square().sum()
        >>> penalised.backward()
        """
        return loss_with_graph(self._engine, self.evaluate)

    def hvp(self, v: torch.Tensor) -> torch.Tensor:
        """Return the Hessian of f at the current parameters times `v`: a new tensor of X's dtype, in the shape of `v`.

        `v` has shape `(n,)`, as long as `parameters`, or `(n, k)` for k vectors, of any floating dtype; the product of
        a vector that is not finite in X's dtype is NaN. The product is of the function that `evaluate` computes, with
        the same chunks, draws and buffers; with `chunk_size` it is bit for bit equal for any number of workers. It
        takes two to three times as long as an evaluation; for k vectors the first backward is made once, and its graph
        is kept. Gradients, `output` and counters are unchanged; prehook runs, posthook
        does not. Raises `TypeError` or `ValueError` for another `v`, what `evaluate` raises, and `WorkerError` if the
        module cannot be differentiated twice; with `on_nonfinite="return"` a product that is not finite is returned. A
        `torch.autograd.Function` whose backward leaves torch, as for NumPy, cannot be seen here: its derivative counts
        as a constant, as in torch (`jvp` and `gauss_newton` refuse it).

        >>> opt.load(x, y)
        >>> v = torch.ones_like(opt.parameters)
        >>> opt.hvp(v).shape, opt.hvp(torch.stack((v, 2 * v), 1)).shape
        (torch.Size([25]), torch.Size([25, 2]))
        """
        return hessian_products(self._engine, v)

    def term_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradient of each term of the loaded batch with respect to X, times its weight, by name: shape
        `(n,)`, X's dtype. They sum up to df/dX, to rounding.

        By one pass over the samples, with the chunks, draws and order of summation of `evaluate`: with `chunk_size`
        the bits are the same for any number of workers. Gradients, `output` and counters are unchanged; prehook runs,
        posthook does not. Each worker needs memory for some gradients of all terms. Raises `ValueError` without terms,
        and what `evaluate` raises.

        >>> known = batchopt.Term(residual=lambda model, x, y: model(x) - y)
        >>> ridge = batchopt.Penalty(lambda model: model.weight.square().sum(), weight=0.1)
        >>> line = torch.nn.Linear(1, 1).double()
        >>> with batchopt.BatchOptimizer(line, terms={"known": known, "ridge": ridge}) as terms:
        ...     terms.load({"known": (x, y)})
        ...     gradients = terms.term_gradients()
        >>> torch.allclose(gradients["ridge"], torch.tensor([0.2 * line.weight.item(), 0.0]).double())
        True
        """
        return term_gradients(self._engine)

    # ---- least squares

    @overload
    def residuals(self, inputs: Array, targets: Any = None) -> torch.Tensor: ...
    @overload
    def residuals(self, inputs: Any = None, targets: Any = None) -> Any: ...
    def residuals(self, inputs: Any = None, targets: Any = None) -> Any:
        """Return the residuals in sample order: shape `(samples, d)`, their dtype; a dict where there are terms.

        For the criterion `torch.nn.MSELoss`, whose residuals are output minus target, or for terms
        `Term(residual=...)`: f is the sum over the terms of `weight` times the mean square of the term's residuals. By
        default those of the loaded batch; else of other data, as in `collect`, which may omit terms. Raises
        `ValueError` if f, or one of these terms, is not known to be a sum of squares, and what `collect` raises.

        >>> opt.load(x, y)
        >>> r = opt.residuals()
        >>> r.shape, torch.allclose(r.square().mean(), opt.evaluate())
        (torch.Size([200, 1]), True)
        """
        return residuals(self._engine, inputs, targets)

    def jvp(self, v: torch.Tensor) -> Any:
        """Return J times `v` (shape `(n,)`), where J is the Jacobian of the residuals of the loaded batch with respect
        to X: in the shape of `residuals`. Raises what `residuals` raises."""
        return jacobian_product(self._engine, v)

    def vjp(self, u: Any) -> torch.Tensor:
        """Return Jᵀ times `u`, which is like `residuals`: shape `(n,)`, X's dtype, summed in float64 along the tree of
        chunks. Raises what `residuals` raises, and `NonFiniteError`."""
        return transposed_product(self._engine, u)

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """Return JᵀWJ times `v`, shape `(n,)`, or times each column of it, shape `(n, k)`: the same shape, X's dtype.

        f is rᵀWr: W has the weight of each square in f, the term's divided by the number of its residuals. Twice this
        is the Hessian of f without the curvature of the residuals, and positive semidefinite. No matrix is made. Raises
        what `vjp` raises.

        >>> opt.load(x, y)
        >>> v = torch.ones_like(opt.parameters)
        >>> torch.allclose(opt.gauss_newton(v), opt.normal().matrix @ v)
        True
        """
        return gauss_newton_product(self._engine, v)

    def normal(self, *, limit: int = LARGEST) -> Normal:
        """Return f, JᵀWr and JᵀWJ of the loaded batch at X in one pass over the samples: see `Normal`.

        Workers make rows of J (by `torch.func`, or by parameters for each sample), some MB at a time, and sum their
        products in float64. If neither is possible, each row takes a backward, with a warning. With `chunk_size` the
        bits are the same for any number of workers, as in `total`. Raises `ValueError` for more than `limit`
        parameters, with the size of the matrix; `NonFiniteError`; and what `residuals` raises.

        >>> opt.load(x, y)
        >>> f, normal = opt.evaluate(), opt.normal()
        >>> normal.matrix.shape, torch.allclose(2 * normal.vector, opt.grad_parameters)
        (torch.Size([25, 25]), True)
        """
        return normal(self._engine, limit)

    def gram(self, *, limit: int = LARGEST) -> torch.Tensor:
        """Return JJᵀ of the loaded batch, without weights: shape `(N, N)`, float64, for the N residuals in the order of
        `residuals`, one term after the other. For few residuals: all rows of J are in memory together. Raises
        `ValueError` for more than `limit` of them, and what `residuals` raises."""
        return gram(self._engine, limit)

    @overload
    def evaluate_many(self, points: Points, gradients: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def evaluate_many(self, points: Points, gradients: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def evaluate_many(self, points: Points, gradients: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    def evaluate_many(
        self, points: Points, gradients: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return f of the loaded batch at each of `points` instead of the current parameters: shape `(K,)`, float64.

        `points` has one vector like `parameters` per row: shape `(K, n)`, any floating dtype. Each worker evaluates
        complete points, as many as its speed allows: for parallel line searches, several starts, evolution strategies.
        With `gradients` it returns a tuple, also with df/dX at each point, shape `(K, n)`, X's dtype. Both equal the
        results of `evaluate` there; with `chunk_size` bit for bit. Where f or its gradient is not finite, or one of
        `on_nonfinite` is raised, f is infinity. Parameters, gradients, buffers and counters are unchanged; prehook
        runs, posthook does not. Each worker needs memory for a point, and on a cluster each machine gets the full
        batch. Raises `TypeError` or `ValueError` for other points, and `WorkerError` if the user's code raises.

        >>> opt.load(x, y)
        >>> points = opt.parameters + torch.tensor([[0.0], [0.1], [0.2]])
        >>> losses, gradients = opt.evaluate_many(points, gradients=True)
        >>> losses.shape, gradients.shape
        (torch.Size([3]), torch.Size([3, 25]))
        """
        return evaluate_many(self._engine, points, gradients)

    def input_gradients(self, inputs: Any = None, targets: Any = None) -> Any:
        """Return df/d(inputs), the gradient of f with respect to the inputs, in their structure, a row for each sample.

        By default for the loaded batch, else for `inputs` and `targets` as a separate batch with its own f. A tensor of
        integers has None. With `terms` a dict. Everything else is as in `collect`.

        >>> opt.input_gradients(x, y).shape
        torch.Size([200, 1])
        """
        return input_gradients(self._engine, inputs, targets)

    # ---- any function of the batch

    @overload
    def collect(
        self,
        function: Callable[[torch.nn.Module, Any, Any], R],
        inputs: Array,
        targets: Any = None,
        *,
        grad: bool = False,
        train: bool | None = None,
    ) -> R: ...
    @overload
    def collect(
        self,
        function: Functions = None,
        inputs: Any = None,
        targets: Any = None,
        *,
        grad: bool = False,
        train: bool | None = None,
        layers: Sequence[str] = (),
    ) -> Any: ...
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
        """Call `function(module, inputs, targets)` for each chunk on the workers; return the results joined in sample
        order.

        The function returns a tensor, or a tuple, list or dict of tensors, whose first dimension is the samples, and so
        does this method; or a list with one object per sample. If the batch is a list of samples without `collate_fn`
        it is called for each sample, and the result is a list. Without data it is applied to the loaded batch, in the
        chunks and with the random draws of its evaluations, and the step is not affected; `inputs` and `targets` as for
        `load` are a separate batch. With `terms`, `function` may be a dict with a function for some of them, and the
        results are a dict.

        Args:
            grad: whether autograd records.
            train: the mode of the module during the call, False for evaluation mode; None keeps it.
            layers: names of parts of the module (`module.named_modules()`): the result is a dict with the output of
                each; with a function, a tuple of its result and that dict.

        Results come through shared memory, written once. Parameters, gradients, buffers, counters and draws are
        unchanged; hooks do not run; NaN is kept. Raises `WorkerError` if the function raises, changes a parameter, or
        does not return rows for its samples; `ValueError`, which names the chunk, for results of several shapes;
        `TypeError` for a function that cannot be sent; and what `load` raises for the data.

        >>> errors = opt.collect(lambda net, inputs, targets: (net(inputs) - targets).abs(), x, y)
        >>> errors.shape
        torch.Size([200, 1])
        >>> opt.collect(inputs=x, layers=["0", "2"])["0"].shape
        torch.Size([200, 8])
        """
        data = inputs, targets
        return apply(self._engine, collect, function, data, grad=grad, train=train, layers=layers)

    @overload
    def total(
        self,
        function: Callable[[torch.nn.Module, Any, Any], R],
        inputs: Array,
        targets: Any = None,
        *,
        grad: bool = False,
        train: bool | None = None,
    ) -> R: ...
    @overload
    def total(
        self,
        function: Functions,
        inputs: Any = None,
        targets: Any = None,
        *,
        grad: bool = False,
        train: bool | None = None,
    ) -> Any: ...
    def total(
        self,
        function: Functions,
        inputs: Any = None,
        targets: Any = None,
        *,
        grad: bool = False,
        train: bool | None = None,
    ) -> Any:
        """Return the sum of `function(module, inputs, targets)` over the chunks: tensors in any structure, of fixed
        shapes.

        Sums follow the tree of chunks, like gradients: with `chunk_size` the bits are the same for any number of
        workers. Single precision is summed as such, unless there is another dtype among the tensors: then all are
        summed in double precision, integers and booleans exactly (up to 2**53). Everything else is as in `collect`.
        Raises `NonFiniteError`, which names the samples, for a sum that is not finite; with `on_nonfinite="return"` it
        is returned.

        >>> total = opt.total(lambda net, inputs, targets: (net(inputs) - targets).square().sum(), x, y)
        >>> torch.allclose(total / len(x), torch.nn.functional.mse_loss(model(x), y))
        True
        """
        return apply(self._engine, total, function, (inputs, targets), grad=grad, train=train)

    def outputs(self) -> Any:
        """Return the module's outputs in the last evaluation, in sample order, without another forward.

        Set `keep_outputs` before that evaluation. The structure is as in `collect`. They belong to the parameters
        evaluated, which a line search may have left since. Raises `BatchoptError` if outputs were not kept.

        >>> opt.keep_outputs = True
        >>> opt.load(x, y)
        >>> f = opt.evaluate()
        >>> torch.allclose(torch.nn.functional.mse_loss(opt.outputs(), y), f)
        True
        """
        self._engine.resync()
        found = self._engine.past.outputs
        if found is None:
            raise BatchoptError(
                "there are no outputs: set opt.keep_outputs = True before the batch is evaluated, or call "
                "opt.collect(lambda module, inputs, targets: module(inputs)), which takes a forward"
            )
        return found

    @property
    def keep_outputs(self) -> bool:
        """Tell whether evaluations keep the module's outputs, as a copy, for `outputs`; False at first.

        This needs a criterion, which is given the output: with `loss_fn`, `terms` or a module that returns its loss,
        setting it raises `ValueError`.
        """
        return self._engine.workers.mode.outputs

    @keep_outputs.setter
    @exclusive
    def keep_outputs(self, keep: bool) -> None:
        if arguments.read_bool("keep_outputs", keep) and self.criterion is None:
            raise ValueError(
                "outputs are seen only where a criterion is given them, and here the loss is made by a function: use "
                "opt.collect(lambda module, inputs, targets: module(inputs))"
            )
        self._engine.workers.keep_outputs(keep)

    @overload
    def predict(self, inputs: Array, *, transform: Callable[[Any], R]) -> R: ...
    @overload
    def predict(self, inputs: Any = None, *, transform: Callable[[Any], Any] | None = None) -> Any: ...
    def predict(self, inputs: Any = None, *, transform: Callable[[Any], Any] | None = None) -> Any:
        """Return the module's outputs for all of `inputs`, in order: in evaluation mode, without graph and targets.

        Args:
            inputs: a batch as for `load`, a map-style `Dataset`, or a loader, whose batches are `(inputs,)`,
                `(inputs, targets)` or inputs alone; with `terms`, too, one batch of inputs. Default: those of the
                loaded batch, which the workers have already; a dict where there are terms.
            transform: `transform(outputs)`, applied by workers to the output of a chunk: a softmax, an argmax, one of
                several outputs.

        Returns what the module does (a tensor, or tuples, lists and dicts of tensors, the first dimension being the
        samples), or a list with one entry per sample. The memory needed is that of the outputs and of a chunk in each
        worker: `chunk_size` bounds it. Everything else is as in `collect`.

        >>> torch.allclose(opt.predict(x), model(x))
        True
        >>> opt.predict(x, transform=lambda outputs: outputs > 0).dtype
        torch.bool
        """
        return predict(self._engine, inputs, transform)

    def iter_predict(
        self, batches: Iterable[Any], *, transform: Callable[[Any], Any] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """Yield `(outputs, batch)` for each batch of a loader, like `predict`, while the next one is read."""
        return iter_predict(self._engine, batches, transform)

    @overload
    def score(
        self, data: Any, metrics: Mapping[str, Any], *, transform: Callable[[Any], Any] | None = None
    ) -> dict[str, Any]: ...
    @overload
    def score(self, data: Any, metrics: Any, *, transform: Callable[[Any], Any] | None = None) -> Any: ...
    def score(self, data: Any, metrics: Any, *, transform: Callable[[Any], Any] | None = None) -> Any:
        """Return metrics of the module's outputs for all of `data`: a dict of values by name, or the value of a single
        metric.

        Args:
            data: `(inputs, targets)`, a loader of such batches, or a map-style `Dataset` of such items.
            metrics: one, or a dict of them: functions `metric(outputs, targets)`; objects of torchmetrics (`update`,
                `compute`, `reset`) or of ignite; functions of `sklearn.metrics`.

        Outputs are computed as by `predict`, with `transform`, and each metric is given all of them at once, in order,
        so its value is the serial one. Values that are one number are floats. Raises `TypeError` for anything but
        metrics, `ValueError` if there are no targets, and what `predict` raises.

        >>> found = opt.score((x, y), {"mse": torch.nn.functional.mse_loss, "worst": lambda a, b: (a - b).abs().max()})
        >>> sorted(found), type(found["mse"])
        (['mse', 'worst'], <class 'float'>)
        """
        return score(self._engine, data, metrics, transform)

    @property
    def parameters(self) -> torch.Tensor:
        """X: a 1-D tensor (shape `(n,)`, the module's dtype) that shares memory with the trainable parameters, in both
        directions. Complex ones come first, with alternating real and imaginary parts.

        A parameter that was assigned other memory (`p.data = ...`) is copied into X and becomes a view of it again,
        here and in every other call. Raises `BatchoptError` where that is impossible: see `BatchOptimizer`.
        """
        return self._engine.parameters

    @property
    def grad_parameters(self) -> torch.Tensor:
        """df/dX at the last evaluation, in the order of `parameters`; shares memory with the parameters' `.grad`, in
        both directions. Another tensor after `loss`, whose gradients are not overwritten."""
        return self._engine.subject.gradient

    @property
    def module(self) -> torch.nn.Module:
        """The user's module."""
        return self._engine.subject.module

    @property
    def criterion(self) -> Callable[..., Any] | None:
        """The user's criterion."""
        return self._engine.settings.criterion

    @property
    def losses(self) -> dict[str, float]:
        """The mean (or sum) of each term by name, without its weight, at the evaluation of `output`; empty without
        terms and before the first evaluation."""
        return dict(self._engine.past.counters.terms)

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each term in f, by name; empty without terms.

        Assigning a dict with a weight for each term takes effect with the batch loaded next. Raises `TypeError` or
        `ValueError` unless it has exactly the terms' names, and each weight is finite and >= 0.
        """
        return MappingProxyType({name: term.weight for name, term in (self._engine.reader.terms or {}).items()})

    @weights.setter
    @exclusive
    def weights(self, weights: Mapping[str, float]) -> None:
        reader = self._engine.reader
        reader.terms = reweighed(reader.terms, weights)

    @property
    def hook_results(self) -> list[Any]:
        """Results of the posthook in the last evaluation, in sample order."""
        return self._engine.past.hook_results

    @property
    def output(self) -> float:
        """The loss of the parameters after the last step if evaluated, else that of the last evaluation; 0 at first."""
        return self._engine.past.counters.loss

    @property
    def eval_counter(self) -> int:
        """The number of evaluations so far."""
        return self._engine.past.counters.evaluations

    @property
    def batch_counter(self) -> int:
        """The number of batches stepped on so far."""
        return self._engine.past.counters.batches

    @property
    def sample_counter(self) -> int:
        """The number of samples of the batches stepped on so far."""
        return self._engine.past.counters.samples

    @exclusive
    def full_gradient(
        self, data: Iterable[Any], *, convert: Callable[[Any], Any] | None = None
    ) -> tuple[float, torch.Tensor]:
        """Return f and df/dX (a new tensor, shape `(n,)`, X's dtype) of all of `data`, which comes in batches as for
        `prepared`.

        They equal those of one batch with all samples: batches may differ in size, and are weighted by the divisors of
        their means. Sums are in float64, in the order of the batches; with `chunk_size` the bits are the same for any
        number of workers. The gradient is also left in `grad_parameters` and every `.grad`. X, buffers, later draws and
        the counters of batches are unchanged; each batch is an evaluation, and `output` is the last one's. A batch has
        to be loaded again. Raises `ValueError` if there is no sample, or more than one `Term`, as each has its own mean
        and a batch's gradient is their sum; and if all targets of a batch have class weight 0 under label smoothing.
        Raises what `load`, `evaluate` and `data` raise; then the counters are unchanged too.

        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=60)
        >>> f, gradient = opt.full_gradient(loader)
        >>> opt.load(x, y)
        >>> abs(f - opt.evaluate().item()) < 1e-12
        True
        """
        return full_gradient(self._engine, data, self.evaluate, convert)

    def objective(self) -> FlatObjective:
        """Return f of the loaded batch as a function of a flat NumPy vector, for solvers outside torch: a
        `FlatObjective`, with `x0`, `value_and_grad(x)`, `gradient(x)`, `hvp(x, v)` and `assign(x)`; its
        `least_squares()` has the residuals and their Jacobian.

        >>> from scipy.optimize import minimize
        >>> opt.load(x, y)
        >>> objective = opt.objective()
        >>> found = minimize(objective.value_and_grad, objective.x0, jac=True, method="L-BFGS-B")
        >>> objective.assign(found.x)
        >>> abs(opt.evaluate().item() - found.fun) < 1e-9
        True
        """
        check_exact(self._engine, "objective()")
        return FlatObjective(self._engine, self.evaluate)

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """Each worker's rank, pid, host, device, speed, samples, busy seconds, restarts, and whether it lives."""
        return self._engine.workers.infos

    def fingerprint(self) -> str:
        """Return the sha256, in hexadecimal, of the parameters, the counters and all losses so far.

        It is equal for two runs with the same bits: with `chunk_size`, for any number of workers.
        """
        return self._engine.past.counters.fingerprint(self.parameters)
