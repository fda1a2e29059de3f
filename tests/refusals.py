"""All that is refused, with the words: a call, an error, and what it says, where `...` stands for anything.

Of a call with `<one | other>` each is tried, and `<>` in the words is its repr.
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import sklearn.metrics
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import batchopt
from batchopt import Batches, BatchOptimizer, Term
from tests.workloads import Listed, Mlp, Pairs, difference, misfit

X, Y = torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(0, 1, 16).view(4, 4)
V, TWO = torch.rand(3), [torch.rand(4, 2), torch.rand(4)]
LOCK = threading.Lock()


def build(module: Any = None, criterion: Any = None, **options: Any) -> BatchOptimizer:
    """With two workers, unless told otherwise."""
    if criterion is None and not options.keys() & {"loss_fn", "terms", "residual"}:
        criterion = nn.MSELoss()
    return BatchOptimizer(Mlp() if module is None else module, criterion, **{"parallelize": 2, **options})


def step(*batch: Any, **options: Any) -> float:
    """In this process: a batch is read the same way for any number of workers."""
    with build(**{"parallelize": 1, **options}) as opt:
        return opt.step(*(batch or (X, Y)))


def load(*batch: Any, **options: Any) -> None:
    """As `step` reads it."""
    with build(**{"parallelize": 1, "optimizer": None, **options}) as opt:
        opt.load(*batch)


def of_terms(*batch: Any) -> None:
    """Loads a batch of two terms."""
    load(*batch, module=nn.Linear(3, 3), terms={"pde": Term(misfit), "data": Term(misfit)})


def weigh(weights: Any) -> None:
    """Sets the weights of two terms."""
    with build(parallelize=1, terms={"pde": Term(misfit, 1.5), "data": Term(misfit)}) as opt:
        try:
            opt.weights = weights
        finally:
            assert opt.weights == {"pde": 1.5, "data": 1.0}


def on(call: Callable[[Any], object], **options: Any) -> object:
    """Calls it with an optimizer on a batch."""
    with build(**{"parallelize": 1, "optimizer": None, **options}) as opt:
        opt.load(X, Y)
        return call(opt)


# ---- modules


def layer_and(*tensors: torch.Tensor, **buffers: torch.Tensor) -> nn.Module:
    """An ordinary layer, then these as parameters and buffers: a refusal that came late would have moved the layer."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ParameterList([nn.Parameter(tensor) for tensor in tensors]))
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def sharing_its_weight(frozen: bool) -> nn.Module:
    module = layer_and(torch.ones(3))
    weight = module.get_parameter("0.weight").detach()
    if frozen:
        module.register_parameter("alias", nn.Parameter(weight[0], requires_grad=False))
    else:
        module.register_buffer("alias", weight)
    return module


class Rotation(nn.Parameter):
    """Adds in a way of its own."""

    def add_(self, *_: Any, **__: Any) -> Rotation:
        return self


def rotated() -> nn.Module:
    module = nn.Linear(3, 2)
    module.weight = Rotation(torch.ones(2, 3))
    return module


def hooked(register: str) -> nn.Module:
    module = Mlp()
    getattr(module.first.weight, register)(torch.zeros_like)
    return module


def of_dtypes(*dtypes: torch.dtype) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is an experiment of torch's
        return nn.ParameterList([torch.zeros(1, dtype=dtype) for dtype in dtypes])


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        return torch.jit.script(nn.Linear(2, 2))


def holding_a_lock() -> nn.Module:
    module = nn.Sequential(Mlp())
    vars(module[0])["lock"] = LOCK
    return module


STORAGE, LONG = torch.zeros(6), torch.zeros(100)
MODULES = r"""
Mlp -> TypeError: `module` must be ... instance; got the class Mlp - did you mean Mlp()?
torch.relu -> TypeError: `module` must be ... instance; got builtin_function
Mlp().parameters() -> TypeError: `module` must be ... got generator: a trainer or scheduler gets `opt.opt
Mlp().requires_grad_(False) -> ValueError: `module` has no parameter with requires_grad=True (4 frozen)
rotated() -> TypeError: parameter 'weight' is a Rotation, ... subclass of torch.nn.Parameter
nn.ReLU() -> ValueError: `module` has no parameter with requires_grad=True (0 frozen)
nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(4)) -> ValueError: '1.weight' is uninitialised (a lazy module): run one for
layer_and(torch.zeros(1, device="meta")) -> ValueError: are on 2 devices {'cpu': 2, 'meta': 1}: move the module to one
Mlp().to("meta") -> ValueError: on the meta device: ... module.to_empty
layer_and(torch.zeros(1).double()) -> ValueError: dtypes {'float32': 2, 'float64': 1} ('1.0' is float64): cast the
layer_and(torch.zeros(1, dtype=torch.complex128)) -> ValueError: ('1.0' is complex): beside complex64 ... cast the real
of_dtypes(torch.float64, torch.complex64) -> ValueError: beside complex64 there may be float32...module.double()
of_dtypes(torch.complex64, torch.complex128) -> ValueError: ('0' is complex)... p.data = p.data.to(dtype)
of_dtypes(torch.float16, torch.complex32) -> ValueError: '1' is torch.complex32; trainable ones must be ... complex64
layer_and(STORAGE[:4], STORAGE[2:]) -> ValueError: '1.0' and '1.1' are different tensors over one storage: to tie two
layer_and(LONG[30:40], b0=LONG, b1=LONG[10:20]) -> ValueError: are different
sharing_its_weight(<True | False>) -> ValueError: 'alias'
layer_and(torch.zeros(2, 100)[:, :1].expand(2, 3)) -> ValueError: '1.0' is expanded
layer_and(torch.zeros(20).as_strided((2, 2), (3, 3))) -> ValueError: '1.0' is expanded
layer_and(torch.zeros(2), torch.eye(2).to_sparse()) -> ValueError: '1.1' is sparse
hooked(<"register_hook" | "register_post_accumulate_grad_hook">) ->
    ValueError: 'first.weight' has a hook; hooks on tensors do not travel to workers
"""

# ---- the other arguments


def made(kind: Any = torch.optim.SGD, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory whose product has these options, set where torch does not look."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        groups = parameters if kind is torch.optim.LBFGS else [{"params": [parameter]} for parameter in parameters]
        optimizer: torch.optim.Optimizer = kind(groups)
        optimizer.param_groups[-1].update(options)
        return optimizer

    return make


class Needy(torch.optim.SGD):
    """Has no default learning rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)


class LossClass:
    """What makes a loss function, and could be called as one."""

    def __init__(self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None: ...


def loss_fn(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.zeros(())


def two(worker: object, sample: object) -> None:
    """A hook."""


def writes_a_log() -> Callable[..., Any]:
    with open(os.devnull, "w") as log:
        return lambda worker, sample=None: log.write("x")


def ones(inputs: torch.Tensor, targets: Any) -> torch.Tensor:
    return torch.ones(len(inputs))


NONE, SUM = nn.MSELoss(reduction="none"), nn.MSELoss(reduction="sum")
FOREIGN = torch.optim.SGD([*nn.Linear(4, 10).parameters()])
ARGUMENTS = r"""
build(parallelize=<0 | -1>) -> ValueError: `parallelize` must be >= 1, got <>
build(parallelize=<2.5 | True | None>) -> TypeError: `parallelize` must be an int, got ... <>
build(parallelize=10_000) -> ValueError: needs about 2200.0 GB of memory and 70000 open files; this machine has ... GB,
build(backend="serial") -> ValueError: `backend` 'serial' is this process alone: use parallelize=1, got 2
build(backend="threads") -> ValueError: `backend` must be one of [...'process'...'serial'...], got 'threads'
build(nn.Sequential(Mlp(), scripted())) -> TypeError: made by torch.jit (RecursiveScriptModule)...or use parallelize=1
build(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))) -> ValueError: '0' has max_norm: it writes its weight
build(nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True))) -> ValueError: scale_grad_by_freq: ... parallelize=1
build(history=<0 | -1>, parallelize=1) -> ValueError: `history`
build(history=<"all" | 1.5>, parallelize=1) -> TypeError: `history`
build(criterion=NONE) -> ValueError: `criterion` has reduction='none': use reduction='mean' or 'sum'
build(loss_fn=loss_fn, reduction="average") -> ValueError: `reduction` must be 'mean' or 'sum', got 'average'
build(reduction="sum") -> ValueError: `reduction` is 'sum' but the criterion's own is 'mean'
build(criterion=SUM, reduction="mean") -> ValueError: `reduction` is 'mean' but the criterion's own is 'sum'
build(criterion=nn.MSELoss(), loss_fn=loss_fn) -> ValueError: `criterion` and `loss_fn` are both given
build(criterion=nn.MSELoss(), residual=loss_fn) -> ValueError: `residual` and `criterion` are both given
build(loss_fn=loss_fn, residual=loss_fn) -> ValueError: `residual` and `loss_fn` are both given
build(residual=loss_fn, denominators=ones) -> ValueError: `residual` and `denominators` are both given
build(residual=loss_fn, terms={"a": Term(misfit)}) -> ValueError: `terms` and `residual` are both given
build(criterion=nn.MSELoss(), terms={"a": Term(misfit)}) -> ValueError: `criterion` are both given: each Term has its ow
build(reduction="mean", terms={"a": Term(misfit)}) -> ValueError: `terms` and `reduction` are both given: each Term
build(denominators=ones, terms={"a": Term(misfit)}) -> ValueError: `terms` and `denominators` are both given: each Term
build(collate_fn=torch.stack, terms={"a": Term(misfit)}) -> ValueError: `terms` and `collate_fn` are both given: each Te
build(criterion=nn.MSELoss) -> TypeError: got the class MSELoss - did you mean MSELoss()?
build(criterion="mse") -> TypeError: `criterion` must be callable as criterion(output, targets); got str
build(loss_fn="mse") -> TypeError: `loss_fn` must be callable as loss_fn(module, inputs, targets); got str 'mse'
build(loss_fn=LossClass) -> TypeError: `loss_fn` must be a function of ...; got the class LossClass
build(loss_fn=two) -> TypeError: `loss_fn` must be callable as ...got a function of (worker
build(criterion=nn.Linear(2, 2)) -> ValueError: `criterion` has trainable parameters, which would not be trained
build(prehook=<"look" | 3>) -> TypeError: `prehook` must be callable as prehook(worker, sample); got ... <>
build(prehook=lambda worker, sample, *, log: None) -> TypeError: got a function of (worker, sample, *, log)
build(prehook=functools.partial(two, 1)) -> TypeError: got a function of (sample
build(precode=two) -> TypeError: `precode` must be callable as precode(worker); got a function of ...refusals.py:
build(posthook=lambda worker: None) -> TypeError: `posthook` must be callable as posthook(worker, sample); got a functio
build(holding_a_lock()) -> TypeError: cannot be sent to worker processes: ...0.lock' (...lock)
build(precode=writes_a_log()) -> TypeError: `precode` cannot be sent...it captures 'log' (_io.TextIOWrapper)
build(criterion=lambda output, targets, lock=LOCK: output.sum()) -> TypeError: lock' (...lock)
build(loss_fn=lambda module, inputs, targets, lock=LOCK: None) -> TypeError: lock' (...lock)
build(prehook=lambda worker, sample, n=(n for n in X): None) -> TypeError: `prehook`...it captures 'n' (generator)
build(optimizer=<"bfgs" | "BFGS">) -> ValueError: got <>: did you mean 'ssbroyden'?
build(optimizer=<"newton" | "" | "optimizer">) -> ValueError: must be one of [...'adam'...'lbfgs'...]...got <>
build(optimizer=nn.Linear) -> TypeError: a class of optimizers, a factory, an instance or None; got <class
build(optimizer=Needy) -> TypeError: (missing a required argument: 'lr'): pass lambda params: Needy(params, ...)
build(optimizer=3) -> TypeError: `optimizer` must be a name, a class of optimizers, a factory, an instance or None; got
build(optimizer=lambda p: <None | torch.optim.SGD>) -> TypeError: factory given as `optimizer` returned ..., not a torch
build(optimizer=lambda p: torch.optim.LBFGS([{"params": [q]} for q in p])) -> ValueError: parameter groups
build(optimizer=<FOREIGN | lambda p: FOREIGN>) ->
    ValueError: 2 parameters of `optimizer` are not ... of the module (first: shape (10, 4))
build(optimizer=made(lr=<-0.5 | -1 | math.nan | math.inf>)) -> ValueError: has lr <>...it must be finite and >= 0
build(optimizer=made(torch.optim.LBFGS, max_iter=<0 | -1>)) -> ValueError: max_iter <>: it must be >= 1 (optimizer=None
build(speeds=[1, 2, 3]) -> ValueError: `speeds` has 3 entries for 2 workers
build(speeds=<[1, -1] | [0, 0] | [1, math.inf] | [1, math.nan]>) -> ValueError: must be finite and >= 0, and not all 0;
build(speeds=<"12" | 2.0 | {1: 1, 2: 2}>) -> TypeError: `speeds` must be a sequence of 2 numbers or None, got
build(speeds=<["1", 1] | [None, 1] | [1j, 1] | [[1], [1]]>) -> TypeError: `speeds` must be numbers, got <>
build(timeout=<"5s" | True | [1] | 1j>) -> TypeError: `timeout` must be a positive number of seconds or None, got <>
build(timeout=<0 | -1.5 | math.nan | math.inf>) -> ValueError: `timeout` must be a positive number of seconds or None, g
build(<max_restarts | seed>=-1) -> ValueError: must be >= 0, got -1
build(<max_restarts | chunk_size | seed>=2.0) -> TypeError: must be an int, got float 2.0
build(chunk_size=0) -> ValueError: `chunk_size` must be >= 1, got 0
build(chunk_size="some") -> TypeError: `chunk_size`
build(on_nonfinite=<"ignore" | "Raise" | None | True | ["raise", "return"]>) -> ValueError: got <>
build(verbose=<-1 | 4 | 1.0 | "1" | True | None>) -> ValueError: `verbose` must be 0, 1, 2 or 3, got <>
build(check_cut=<1 | "yes" | None>) -> TypeError: `check_cut` must be True or False
build(on_nonfinite=<ArithmeticError("one") | int | KeyboardInterrupt | "ArithmeticError" | ("raise", int)>) ->
    ValueError: `on_nonfinite` must be 'raise' or 'return', classes of exceptions
build(devices="cuda:0", parallelize=1) -> TypeError: one device a worker
build(devices=["cpu", "cpu"], parallelize=3) -> ValueError: 2 entries for 3 workers
build(devices=[], parallelize=1) -> ValueError: is empty
build(devices=["cpu", "gpu"], parallelize=1) -> ValueError: no device
build(devices=["cpu", "meta"], parallelize=1) -> ValueError: got 'meta'
build(devices=["cuda:99", "cpu"], parallelize=1) -> ValueError: CUDA devices
build(devices=["cpu:0"], parallelize="auto", chunk_size=4) -> ValueError: bits differ, and `chunk_size` fixes them
build(devices=["cpu:0"], parallelize="auto", backend="ranks") -> ValueError: are for backend='process'
build(devices=["cpu:0"], parallelize="auto", compile=True) -> ValueError: compile=True is for cores alone
build(backend="ray", ray_options=[1]) -> TypeError: `ray_options` must be a dict of options of a Ray actor, got list
build(backend="ray", ray_options={"max_restarts": 3}) -> ValueError: may not have ['max_restarts']: workers are placed a
build(backend="ray", ray_options={"num_gpus": <-1 | "all">}) -> ValueError: 'num_gpus' is what one worker takes...got <>
build(backend="ray", criterion=nn.MSELoss, optimizer="newton") -> TypeError: got the class MSELoss
build(backend="ray", devices=["cpu", "cpu"]) -> ValueError: on Ray use ray_options={'num_gpus': 1}
build(backend="ray", compile=True) -> ValueError: `compile` is for workers of this machine and for ranks
build(backend="ray", compress=16) -> TypeError: `compress` must be None, 'fp16', 'bf16', '2bit', or a dict as ...got int
build(backend="ray", compress={"type": "2bit", "size": 3}) -> ValueError: unknown ['size']: beside 'type', '2bit' has ['
build(backend="ray", compress={"type": "2bit", "threshold": 0}) -> ValueError: has threshold 0: it must be finite and >
build(compress="fp16", optimizer="sgd") -> ValueError: for gradients that cross a network, got backend='process', where
build(backend="ray", compress="fp16", optimizer=<"lbfgs" | "cg" | torch.optim.LBFGS | lambda p: SVRG(made()(p))>) ->
    ValueError: `compress` rounds gradients, and ... compares them with each other: use an
build(ray_options={}) -> ValueError: `ray_options` are for backend='ray', got backend='process'
build(terms={}) -> ValueError: `terms` is empty: give one Term at least
build(terms=[Term(misfit)]) -> TypeError: `terms` must be a dict of names and batchopt.Term, got list
build(terms={3: Term(misfit)}) -> TypeError: the names in `terms` must be strings, got int 3
build(terms={"a": misfit}) -> TypeError: `terms['a']` must be a batchopt.Term or Penalty, ...did you mean Term(misfit)?
Term(None) -> TypeError: got None
Term(nn.MSELoss) -> TypeError: got the class MSELoss
Term(lambda x: x) -> TypeError: must be callable as loss_fn
Term(misfit, <math.inf | -1>) -> ValueError: `weight` of a Term must be a finite number >= 0, got <>
Term(misfit, "1") -> TypeError: must be a finite number
Term(misfit, torch.ones(())) -> TypeError: call .item()
Term(misfit, reduction="none") -> ValueError: `reduction` must be 'mean' or 'sum', got 'none'
Term(misfit, collate_fn=3) -> TypeError: `collate_fn` must be callable
Term(misfit, denominators=3) -> TypeError: `denominators` must be
Term(residual=difference, loss="huge") -> ValueError: `loss` of a Term must be one of ['linear', 'soft_l1'
Term(residual=difference, loss="huber", scale=0.0) -> ValueError: `scale` of a Term must be > 0
Term(residual=difference, loss="huber", scale=-1.0) -> ValueError: `scale` of a Term must be a finite number >= 0
Term(misfit, loss="huber") -> ValueError: are those of its `residual`
build(n_jobs=2) -> TypeError: unexpected keyword argument 'n_jobs'
"""

# ---- batches, and what shows only when the loss is evaluated


class WithoutLength(Dataset[Any]):
    """Says nothing about how many there are."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(6)


class Stream(IterableDataset[Any]):
    """Has a length, and no index."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(3, 6))


class Frame:
    """As those of pandas."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.to_numpy = tensor.numpy


class Keywords(Mlp):
    """Has an argument for each tensor, as models of transformers have."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * mask)


def failing(function: Callable[..., Any], *arguments: Any) -> nn.Module:
    """A module that raises what a function does."""
    module = Mlp()
    module.register_forward_pre_hook(lambda *_: function(*arguments) and None)
    return module


class Record(NamedTuple):
    points: torch.Tensor
    values: torch.Tensor


def ragged() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends another layout
        return torch.nested.nested_tensor([X[0], X[1]], layout=torch.strided)


def itself() -> dict[str, Any]:
    batch: dict[str, Any] = {"x": X}
    batch["itself"] = batch
    return batch


def deep() -> tuple[Any, ...]:
    return functools.reduce(lambda batch, _: (batch,), range(5000), (X,))


def full(*batches: Any) -> object:
    with build(parallelize=1) as opt:
        return opt.full_gradient(batches)


def weighted(weights: Any, **options: Any) -> None:
    """Loads samples with these weights."""
    load(batchopt.Weighted(X, weights), *([] if "targets" in options else [Y]), **options)


LOADED, PAIRS, NESTED = TensorDataset(X, Y), Pairs(X, Y), batchopt.Weighted(X, torch.ones(4))
ODD = torch.arange(4)
SPARSE, SCALAR, GRADED = torch.eye(3).to_sparse(), torch.tensor(1.0), torch.rand(3, requires_grad=True) * 2
BATCHES = r"""
load(V, torch.rand(2), ["a"]) -> ValueError: `inputs` has 3 samples but `targets` has 2 and `options` has 1
load(TWO, V) -> ValueError: `inputs` has 2 samples but `targets` has 3: a list has one entry a sample; pass a tuple
load((V, torch.rand(2))) -> ValueError: `inputs[0]` has 3 samples but `inputs[1]` has 2: what belongs to all samples
load({"a": [V], "b": V[:2]}) -> ValueError: `inputs['a'][0]` has 3 ...`inputs['b']` has 2
load(Record(V, torch.rand(2))) -> ValueError: has 3 samples but ... has 2
load([X] * 4, options=["a"] * 4) -> TypeError: options
load(V, None, SCALAR) -> TypeError: `options` must be a sequence
load(<torch.rand(0, 3) | [] | Listed()>) -> ValueError: the batch has 0 samples
load(SCALAR) -> TypeError: `inputs` is a 0-dim tensor: there is no dimension of samples ...; a number for all samples is
load(V, SCALAR) -> TypeError: `targets` is a 0-dim tensor
load({"a": V, "b": SPARSE}) -> ValueError: `inputs['b']` is sparse (torch.sparse_coo): call .to_dense() on it
load(<GRADED | (V, GRADED) | [{"a": GRADED}]>) -> ValueError: requires grad and is not a leaf: call .detach() on it
load(lambda: 1.0) -> TypeError: `inputs` must be ...got function: a trainer or ... `opt.loss()`
load("abc") -> TypeError: `inputs` must be a tensor ..., a tuple or dict of tensors, or a list...got str
load(<Frame(X) | (X, Frame(Y))>) -> TypeError: `inputs` is or has a Frame: call .to_numpy() on it
load(X, Frame(Y)) -> TypeError: `targets` is or has a Frame: call .to_numpy() on it
load(np.zeros(3, dtype=object)) -> TypeError: `inputs` must be a tensor (torch.as_tensor makes
load(V, "abc") -> TypeError: `targets` must be ...got str
load(V, None, <"abc" | {0: "a"}>) -> TypeError: `options` must be a sequence with one entry a sample...got
load(<None | iter([V]) | (1, 2, 3) | {}>) -> TypeError: `inputs` must be ...got
load(ragged()) -> ValueError: `inputs` is a nested tensor: pass the list of its samples, list(inputs.unbind())
load(<itself() | deep()>) -> ValueError: nested too deeply to be read, or contains itself
load(DataLoader(LOADED)) -> TypeError: got DataLoader: `for loss in opt.steps(loader)` steps on each ... opt.full_gradie
load(DataLoader(PAIRS)) -> TypeError: loader.dataset, which the
load(Batches(X, 2)) -> TypeError: got Batches: `for loss in opt.steps(batches)` steps on each
load(SimpleNamespace(to_data_list=None)) -> TypeError: pass the list of graphs, ...from_data_list
full([LOADED[i] for i in range(4)]) -> ValueError: got 4 items. Lists of samples ...collate_fn=lambda pairs: tuple(map(
load(WithoutLength()) -> TypeError: a dataset must be map-style, ...; WithoutLength has no `__len__`: use a Data
load(Stream()) -> TypeError: ; Stream is an IterableDataset, whose samples have no index: use a DataLoader
load(ODD, ODD, module=nn.Embedding(4, 2, scale_grad_by_freq=True), chunk_size=2) -> ValueError: scale_grad_by_freq
load(PAIRS, Y) -> ValueError: `targets` of a Dataset come with its items
load(X, PAIRS) -> TypeError: got Pairs: a dataset takes the place of inputs and targets
load(PAIRS, None, [1, 2]) -> ValueError: `inputs` has 4 samples but `options` has 2
load({"a": WithoutLength()}, terms={"a": Term(misfit)}) -> TypeError: term 'a': a dataset must be map-style
step(Listed(*[(X[0], Y[0], 1)] * 4)) -> WorkerError: items of a dataset must be (input, target) or an input
step(Listed(*[(X[0], Y[0]), (X[0, :5], Y[0])] * 2)) -> WorkerError: RuntimeError in worker 0, sample...equal size
step(Listed(*[(X[0], object())] * 4)) -> WorkerError: TypeError in worker 0, sample...default_collate: batch must contai
load(X, Y, denominators=lambda x, y: torch.ones(2)) -> ValueError: `denominators` must return one number a sample, shape
load(X, Y, denominators=lambda x, y: 3.0) -> ValueError: one number a sample, shape (4,); got shape ()
load(X, Y, denominators=lambda x, y: [1, 1, 1, <-1 | math.inf | math.nan>]) -> ValueError: finite numbers >= 0
load(PAIRS, denominators=lambda x, y: torch.full((len(x),), -1.0)) -> ValueError: finite numbers >= 0
load(PAIRS, denominators=lambda x, y: torch.ones(2), chunk_size=3) -> WorkerError: returned `result` of shape (2,)
of_terms(V) -> TypeError: the batch must be a dict with an entry for each of ['pde', 'data']; got Tensor
of_terms({"pde": V}) -> ValueError: the batch lacks ['data']: the terms are ['pde', 'data']
of_terms({"pde": V, "bc": V}) -> ValueError: the batch lacks ['data'] and has unknown ['bc']
of_terms({"pde": V, "data": (V, V), 3: V}) -> ValueError: the batch has unknown [3]
of_terms({"pde": V, "data": (V, V)}, V) -> ValueError: `targets` of terms go into the batch
of_terms({"pde": V, "data": (V, V)}, None, [1]) -> ValueError: `options` of terms go into the batch
of_terms({"pde": V, "data": (V, V[:2])}) -> ValueError: term 'data': `inputs` has 3 samples but `targets` has 2
of_terms({"pde": V, "data": <(V, V, [1], 2) | ()>}) -> ValueError: term 'data': a tuple must be ...; got
of_terms({"pde": V[:0], "data": (V, V)}) -> ValueError: term 'pde': the batch has 0 samples
of_terms({"pde": 3, "data": (V, V)}) -> TypeError: term 'pde': `inputs` must be a tensor
of_terms({"pde": V, "data": (V, V, [1])}) -> ValueError: term 'data': ... but `options` has 1
weigh([1.0, 2.0]) -> TypeError: `weights` must be a dict with one number a term, got list
weigh({"pde": 1.0}) -> ValueError: `weights` lacks ['data']
weigh({"pde": 1.0, "data": 1.0, "x": 1.0}) -> ValueError: `weights` has unknown ['x']
weigh({"pde": 1.0, "data": math.nan}) -> ValueError: `weights['data']` must be a finite number >= 0, got nan
weigh({"pde": True, "data": 1.0}) -> TypeError: `weights['pde']` must be a finite number >= 0, got True
on(lambda opt: setattr(opt, "weights", {"data": 1.0})) -> ValueError: this BatchOptimizer has none
weighted(torch.ones(3)) -> ValueError: 4 finite numbers >= 0, one a sample; got shape (3,)
weighted(<-torch.ones(4) | torch.zeros(4) | [math.nan] * 4>) -> ValueError: finite numbers >= 0, one a sample, not all 0
weighted("many") -> TypeError: one a sample; got str
weighted(torch.ones(4) * 1j) -> TypeError: complex
load(batchopt.Weighted(NESTED, torch.ones(4)), Y) -> TypeError: twice
load(NESTED, Y, loss_fn=misfit) -> ValueError: samples can have weights where their losses are known
load(NESTED, Y, criterion=lambda output, targets: output.mean()) -> ValueError: samples can have weights where their los
load(NESTED, Y, denominators=ones) -> ValueError: samples can have weights where their losses are known
load({"a": (NESTED, Y)}, terms={"a": Term(misfit)}) -> ValueError: samples can have weights where their losses are known
on(lambda opt: opt.collect(misfit, NESTED)) -> ValueError: samples can have weights where
step(criterion=lambda output, targets: output) -> WorkerError: `criterion` must return a scalar; got shape (4, 4): use r
step(criterion=lambda o, y: o.sum().item()) -> WorkerError: a scalar tensor; got float
step(criterion=lambda o, y: (o - y).detach().mean()) -> WorkerError: does not depend on any trainable parameter (it has
step(X, Y.masked_fill(Y > 0.7, math.nan), optimizer="sgd") ->
    NonFiniteError: loss is nan in chunk 0 (sample 2)...; parameters are unchanged (on_nonfinite='return' makes it an
step(module=failing(torch.linalg.cholesky, -torch.eye(2))) -> WorkerError: if f is infinite where this is raised, say so
step(module=failing(math.sqrt, -1)) -> WorkerError: math domain error (if ...by on_nonfinite=..., with the class
step(X, Y, loss_fn=lambda m, x, y: (m(x) - Y).mean(), chunk_size=2) -> WorkerError: of the 4 samples: what has a row for
step(X, Y, loss_fn=lambda m, x, y: (m(x) - Y).mean(), parallelize=2) -> WorkerError: cannot be divided: use parallelize
step({"x": X, "mask": X}, Y, module=Keywords()) -> WorkerError: a dict; for ...: loss_fn=lambda m, x, t: criterion(m(**x
step(X, parallelize=<1 | 2>) -> WorkerError: 'target' (the batch has no targets: ...give step(inputs, targets)
step({"a": X}, terms={"a": Term(misfit)}) -> WorkerError: (the batch has no targets: ...give {'a': (inputs, targets)})
step(X.double(), Y) -> WorkerError: (the batch has torch.float64, and the parameters are torch.float32: convert
step((X, X), Y, module=Keywords(), parallelize=2) -> WorkerError: a tuple; for...: loss_fn=...criterion(m(*x), t))
step(Listed(*[({"x": X[0]}, Y[0])] * 4)) -> WorkerError: a dict; for an argument for each item: loss_fn=
on(lambda opt: opt.hvp([1.0] * 103)) -> TypeError: got list
on(lambda opt: opt.hvp(torch.ones(103, dtype=torch.int64))) -> TypeError: a tensor of torch.int64
on(lambda opt: opt.hvp(torch.ones(103) * 1j)) -> TypeError: a tensor of torch.complex64
on(lambda opt: opt.hvp(torch.ones(<102 | 1, 103>))) -> ValueError: shape (103,)... got (
build(parallelize=1).objective()(np.zeros(103)) -> BatchoptError: no batch was loaded
on(lambda opt: opt.objective()<(np.zeros(102)) | .gradient(np.zeros((1, 103))) | .assign(1.0)>) ->
    ValueError: `x` must have shape (103,), as `x0`; got (
on(lambda opt: opt.objective()(np.zeros(103, dtype=complex))) -> TypeError: real numbers... complex128
on(lambda opt: opt.objective()(["a"] * 103)) -> TypeError: real numbers
on(lambda opt: opt.objective()(np.full(103, 1e300))) -> ValueError: not a finite number of torch.float32
on(lambda opt: opt.objective().hvp(opt.objective().x0, np.zeros(102))) -> ValueError: `v` must have shape (103,)
on(lambda opt: opt.objective().least_squares().fun(np.ones(103)), criterion=nn.L1Loss()) -> ValueError: f is not known t
on(lambda opt: opt.covariance("bayes")) -> ValueError: `kind` must be one of ['least squares', 'likelihood', 'sandwich']
on(lambda opt: opt.covariance(sigma=<0 | -1.0>)) -> ValueError: `sigma` must be
on(lambda opt: opt.covariance("sandwich", sigma=1.0)) -> ValueError: is for kind='least squares'; got 'sandwich'
on(lambda opt: opt.covariance("least squares"), criterion=nn.L1Loss()) -> ValueError: f is not known to be a sum
on(lambda opt: opt.covariance()) -> ValueError: 16 residuals leave 103 parameters no degrees of freedom... pass `sigma`
on(lambda opt: opt.covariance("likelihood", limit=102)) -> ValueError: the Hessian of 103 parameters... give `limit`
"""

# ---- batches in epochs, metrics, optimizers


def resumed(**changes: Any) -> None:
    """Loads a state with these entries, which changes nothing."""
    batches = Batches(torch.arange(10), 3, shuffle=True)
    next(iter(batches))
    before = batches.state_dict()
    try:
        batches.load_state_dict({**before, **changes})
    finally:
        assert batches.state_dict() == before


class Half:
    """An update without an end."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None: ...


def score(metrics: Any) -> object:
    """Of a batch."""
    return on(lambda opt: opt.score((X, Y), metrics))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return 1.0


WIDE = torch.ones(2, dtype=torch.float64, requires_grad=True)
ONE, OTHER = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
COMPLEX, NAMED = torch.ones(2, dtype=torch.complex64, requires_grad=True), [("a", ONE)]
KINDS = {"LBFGS": batchopt.LBFGS, "CG": batchopt.CG, "SSBroyden": batchopt.SSBroyden, "LM": batchopt.LevenbergMarquardt}
SCORER = sklearn.metrics.make_scorer(sklearn.metrics.f1_score, average="macro")


def of(kind: str, params: Any = None, **options: Any) -> torch.optim.Optimizer:
    """An optimizer over one parameter."""
    optimizer: torch.optim.Optimizer = KINDS[kind]([ONE] if params is None else params, **options)
    return optimizer


def lm(closure: Any, **options: Any) -> object:
    """A step of Levenberg-Marquardt."""
    return batchopt.LevenbergMarquardt([ONE], **options).step(closure)


def svrg(*arguments: Any) -> batchopt.SVRG:
    """Around plain SGD."""
    return batchopt.SVRG(torch.optim.SGD([ONE], lr=0.1), *arguments)


OTHERS = r"""
Batches(V, 0) -> ValueError: `batch_size` must be >= 1, got 0
Batches(V, seed=-1) -> ValueError: `seed` must be >= 0
Batches(V, shuffle=1) -> TypeError: `shuffle` must be True or False
Batches((V, V[:2])) -> ValueError: `data[0]` has 3 samples but `data[1]` has 2
Batches(<V[:0] | []>) -> ValueError: `data` has 0 samples
Batches(SCALAR) -> ValueError: `data` has no dimension of samples
Batches(V, 20, drop_last=True) -> ValueError: drop_last=True leaves them out
Batches(V, collate_fn=list) -> ValueError: `collate_fn` is for lists of samples and datasets
Batches(Stream()) -> TypeError: Stream is an IterableDataset, whose samples have no
Batches(iter([1])) -> TypeError: got list_iterator, which can be iterated over once only
Batches(5) -> TypeError: got int, which cannot be iterated over
Batches(DataLoader(PAIRS), <3 | shuffle=True | seed=3>) -> ValueError: cannot be given for a loader (DataLoad
resumed(length=11) -> ValueError: `length` was 11 where this state was saved, and is 10 here
resumed(<seed | batch_size | shuffle>=4) -> ValueError: was 4 where this state was saved, and is
resumed(index=4) -> ValueError: `index` of a state must be less than the 4 batches of an epoch, got 4
resumed(epoch=<-1 | 1.0>) -> ValueError: `epoch` of a state must be an int >= 0, got <>
resumed(more=1) -> ValueError: has the entries ... got ...'more'
score(<"accuracy" | None>) -> TypeError: `metrics` is not a metric: got <> of type ...; a metric is a function
score({"fine": accuracy, "bad": 3}) -> TypeError: `metrics['bad']` is not a metric: got 3 of type int
score([accuracy]) -> TypeError: `metrics` is a list: give a dict, with a name for each
score({"c": Half}) -> TypeError: `metrics['c']` is a class, not a metric: make an object of it, Half(...)
score(Half()) -> TypeError: `metrics` is not a metric: got <...Half... of type Half
score({<"" | 1>: accuracy}) -> TypeError: names of `metrics` must be strings that are not empty; got <>
score(SCORER) -> TypeError: `metrics` is a scorer of scikit-learn, make_scorer(f1_score...give the function that it is m
score({"s": sklearn.metrics.silhouette_score}) -> TypeError: sklearn's silhouette_score, which does not begin with y_tru
score({}) -> ValueError: `metrics` is empty
of(<SEARCHES>, lr=0.0) -> ValueError: `lr` must be positive
of(<SEARCHES>, lr="fast") -> TypeError: `lr` must be a number
of(<EACH>, max_iter=0) -> ValueError: `max_iter` must be >= 1
of(<EACH>, max_eval=True) -> TypeError: `max_eval` must be an int
of(<EACH>, tolerance_grad=-1.0) -> ValueError: `tolerance_grad` must be >= 0
of(<EACH>, tolerance_change=math.nan) -> ValueError: `tolerance_change` must be >= 0
of(<EACH>, [{"params": [ONE]}, {"params": [OTHER]}]) -> ValueError: one group of parameters
of(<EACH>, [ONE, WIDE]) -> ValueError: one dtype
of(<EACH>).add_param_group({"params": [OTHER]}) -> ValueError: moves one vector
of(<SEARCHES>).step(None) -> TypeError: `closure` must be a function
of(<EACH>, tol=1) -> TypeError: unexpected keyword argument 'tol'
of("LBFGS", bounds=<1 | "all" | []>) -> TypeError: `bounds` must be a dictionary from parameters or their names to pairs
of(<BOTH>, bounds={"rate": (0, 1)}) -> ValueError: `bounds` has 'rate', which is none...names need module.named_paramete
of(<BOTH>, NAMED, bounds={"b": (0, 1)}) -> ValueError: `bounds` has 'b', which is none of the optimizer's parameters: a
of(<BOTH>, bounds={OTHER: (0, 1)}) -> ValueError: `bounds` has a tensor of shape (2,), which is none of
of("LM", bounds=[<(1, 0) | (math.nan, 0) | (0, -math.inf)>]) ->
    ValueError: `bounds` of parameter 0: each lower bound must be <= its upper bound
of(<BOTH>, bounds=[(0, V)]) -> ValueError: must be numbers or have its shape, (2,); got (3,)
of("LM", bounds=[<0 | (0,)>]) -> TypeError: `bounds` of parameter 0 must be a pair (lower, upper); got <>
of(<BOTH>, bounds=[(0, "a")]) -> TypeError: must be numbers, tensors of its shape or None; got 'a'
of(<BOTH>, [COMPLEX], bounds=[(0, 1)]) -> ValueError: complex numbers have no order
of("LBFGS", bounds=[(0, 1)], l1=0.1) -> ValueError: `l1` 0.1 and `bounds` are not minimised together
of(<"LBFGS" | "SSBroyden">, when_data_change="ask") -> ValueError: must be one of 'forget', 'keep'; got 'ask'
of("LBFGS", line_search_fn="wolfe") -> ValueError: 'strong_wolfe', 'armijo', None; got 'wolfe'
of("LBFGS", history_size=0) -> ValueError: `history_size` must be >= 1
of("LM", damping=0.0) -> ValueError: `damping` must be positive and finite; got 0.0
of("LM", scaling="unit") -> ValueError: `scaling` must be one of 'diagonal', 'identity'; got 'unit'
of("LM", geodesic=1) -> TypeError: `geodesic` must be a bool; got 1
of("LM", dense=1.5) -> TypeError: `dense` must be an int >= 0
lm(lambda: ONE.square().sum()) -> TypeError: returned a scalar: return the residuals themselves
lm(lambda: [1.0]) -> TypeError: must return a tensor
lm(lambda: torch.ones(3)) -> ValueError: the residuals depend on no parameter
batchopt.SVRG([ONE]) -> TypeError: `base` must be an optimizer
svrg(0) -> ValueError: `update_freq` must be >= 1
svrg().step(lambda: ONE.sum()) -> RuntimeError: call begin_pass
on(lambda opt: resample(opt, None, (X, Y), samples=2, <k=-1.0 | c=math.nan>)) -> ValueError: must be finite and >= 0
on(lambda opt: hogwild(opt, (X, Y), made(), batch_size=0)) -> ValueError: `batch_size` must be >= 1
on(lambda opt: hogwild(opt, (X, Y), "sgd", batch_size=8)) -> TypeError: `optimizer` must be callable
on(lambda opt: hogwild(opt, ([*X], [*Y]), made(), batch_size=8)) -> ValueError: lists of samples need a `collate_fn`
on(lambda opt: opt.scaling(seconds=<math.nan | -1>)) -> ValueError: `seconds` must be a positive number of
on(lambda opt: resample(opt, None, (X, Y), samples=5)) -> ValueError: at most the number of candidates, 4
on(lambda opt: resample(opt, None, (X, Y), samples=2, keep=X)) -> ValueError: structure of `candidates`
on(lambda opt: resample(opt, "pde", (X, Y), samples=2)) -> ValueError: `term` must be None
on(lambda opt: resample(opt, None, (X, Y[:2]), samples=2)) -> ValueError: a row for each point
on(lambda opt: resample(opt, None, <[1.0, 2.0] | "points" | [X, Y]>, samples=1)) -> TypeError: `candidates`
on(lambda opt: opt.multistart(torch.ones(0, 103)), optimizer="lbfgs") -> ValueError: `starts` has no row: give at least
on(lambda opt: opt.multistart(torch.ones(2, 102)), optimizer="lbfgs") -> ValueError: must have shape (K, 103)
on(lambda opt: opt.multistart(torch.ones(2, 103), <keep | steps>=0), optimizer="lbfgs") -> ValueError: must be >= 1
on(lambda opt: pickle.dumps(opt.objective())) -> BatchoptError: have the solver call it in this process
on(lambda opt: opt.step(X, Y, time_limit=<0 | -1.0>)) -> ValueError: `time_limit` must be a positive number of seconds
step(optimizer="lbfgs", stop_on=<["SIGKILL"] | ["TERM"] | [15]>) -> ValueError: `stop_on` has
"""

BOTH = '"LBFGS" | "LM"'
SEARCHES, EACH = '"LBFGS" | "CG" | "SSBroyden"', '"LBFGS" | "CG" | "SSBroyden" | "LM"'
USED = math, np, pickle, DataLoader, SimpleNamespace, Listed, difference  # by the calls in the tables
NAMES: dict[str, Any] = {**vars(batchopt), **globals()}


class Refusal(NamedTuple):
    """A row: the call, as text, the class of its error, and what matches the words."""

    call: str
    error: type[Exception]
    words: str

    def provoke(self) -> object:
        """Does what is refused."""
        return eval(self.call, NAMES)


def rows(table: str) -> list[Refusal]:
    """Those of a table, with a row for each of the values."""
    found = []
    for line in table.strip().replace(" ->\n    ", " -> ").splitlines():
        call, error, words = re.fullmatch(r"(.*?) -> (\w+): (.*)", line).groups()  # type: ignore[union-attr]
        for name, kinds in {"SEARCHES": SEARCHES, "EACH": EACH, "BOTH": BOTH}.items():
            call = call.replace(f"<{name}>", f"<{kinds}>")
        values = re.search(r"<(.*)>", call)
        for value in values[1].split(" | ") if values else [""]:
            told = words.replace("<>", repr(eval(value, NAMES))) if value and "<>" in words else words
            one = call.replace(values[0], value) if values else call
            found.append(Refusal(one, eval(error, NAMES), ".*".join(map(re.escape, told.split("...")))))
    return found
