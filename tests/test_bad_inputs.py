"""What the user may do wrong, and what the error says: what was given, what is needed, how to mend it.

Left out are those about other machines, and those that a test needs running workers for: see the backends' contract.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import scipy.optimize
import torch
from torch import nn

import batchopt
from batchopt import BatchOptimizer, NonFiniteError, WorkerError
from batchopt._data import arguments
from batchopt.backends.process import forkserver, startup
from batchopt.backends.process.backend import ProcessBackend
from batchopt.errors import BatchoptError
from batchopt_workers.data import memory
from tests.workloads import Mlp

X, Y = torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(0, 1, 16).view(4, 4)
LOCK = threading.Lock()


Refusals = list[tuple[Callable[[], Any], type[Exception], str]]


def build(module: Any = None, criterion: Any = None, **options: Any) -> BatchOptimizer:
    """With two workers, unless told otherwise."""
    if criterion is None and not options.keys() & {"loss_fn", "terms", "residual"}:
        criterion = nn.MSELoss()
    return BatchOptimizer(Mlp() if module is None else module, criterion, **{"parallelize": 2, **options})


def step(inputs: Any = X, targets: Any = Y, sample_options: Any = None, **options: Any) -> float:
    """In this process: a batch is read the same way for any number of workers."""
    with build(**{"parallelize": 1, **options}) as opt:
        return opt.step(inputs, targets, sample_options)


# ---- modules


def module_of(*tensors: torch.Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])


def layer_and(*tensors: torch.Tensor, **buffers: torch.Tensor) -> nn.Module:
    """An ordinary layer, then these as parameters and buffers: a refusal that came late would have moved the layer."""
    module = nn.Sequential(nn.Linear(2, 2), module_of(*tensors))
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


def hooked(register: str, hook: Callable[..., Any]) -> nn.Module:
    module = Mlp()
    getattr(module.first.weight, register)(hook)
    return module


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        return torch.jit.script(nn.Linear(2, 2))


def holding_a_lock() -> nn.Module:
    module = nn.Sequential(Mlp())
    vars(module[0])["lock"] = LOCK
    return module


STORAGE, LONG = torch.zeros(6), torch.zeros(100)
ALIASES = r"'0\.weight' and 'alias'|'alias' and '0\.weight'"
ONE_STORAGE = "are different tensors over one storage: to tie two"
UNTRAINED = r"`module` has no parameter with requires_grad=True"
MODULES: Refusals = [
    (lambda: Mlp, TypeError, r"`module` must be .* instance; got the class Mlp - did you mean Mlp\(\)\?"),
    (lambda: torch.relu, TypeError, r"`module` must be .* instance; got builtin_function"),
    (lambda: Mlp().parameters(), TypeError, r"`module` must be .* got generator: a trainer or scheduler gets `opt.opt"),
    (lambda: Mlp().requires_grad_(False), ValueError, UNTRAINED + r" \(4 frozen\)"),
    (rotated, TypeError, r"parameter 'weight' is a Rotation, .* subclass of torch.nn.Parameter"),
    (nn.ReLU, ValueError, UNTRAINED + r" \(0 frozen\)"),
    (
        lambda: nn.ParameterList([nn.Parameter(torch.arange(3), requires_grad=False)]),
        ValueError,
        UNTRAINED + r" \(1 frozen\)",
    ),
    (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(4)),
        ValueError,
        r"parameter '1\.weight' is uninitialised \(a lazy module\): run one forward pass first",
    ),
    (
        lambda: layer_and(torch.zeros(1, device="meta")),
        ValueError,
        r"are on 2 devices \{'cpu': 2, 'meta': 1\}: move the module to one",
    ),
    (lambda: Mlp().to("meta"), ValueError, r"on the meta device: .* module\.to_empty"),
    (
        lambda: layer_and(torch.zeros(1).double()),
        ValueError,
        r"have dtypes \{'float32': 2, 'float64': 1\} \('1\.0' is float64\): cast the module with",
    ),
    (
        lambda: layer_and(torch.zeros(1, dtype=torch.complex128)),
        ValueError,
        r"dtypes \{'float32': 2, 'complex128': 1\} \('1\.0' is complex\): beside complex64 .* beside complex128 "
        r"float64; cast the real ones with module\.float",
    ),
    (
        lambda: layer_and(STORAGE[:4], STORAGE[2:]),
        ValueError,
        r"'1\.0' and '1\.1' are different tensors over one storage",
    ),
    (lambda: layer_and(STORAGE, STORAGE), ValueError, ONE_STORAGE),
    (
        lambda: layer_and(LONG[30:40], b0=LONG, b1=LONG[10:20]),
        ValueError,
        "'b0' and '1.0' are different|'1.0' and 'b0' are different",
    ),
    (lambda: sharing_its_weight(True), ValueError, ALIASES),
    (lambda: sharing_its_weight(False), ValueError, ALIASES),
    (lambda: layer_and(torch.ones(1).expand(3)), ValueError, r"parameter '1\.0' is expanded"),
    (lambda: layer_and(torch.zeros(2, 100)[:, :1].expand(2, 3)), ValueError, r"'1\.0' is expanded"),
    (lambda: layer_and(torch.zeros(20).as_strided((2, 2), (3, 3))), ValueError, r"'1\.0' is expanded"),
    (lambda: layer_and(torch.zeros(2), torch.eye(2).to_sparse()), ValueError, r"'1\.1' is sparse"),
    (
        lambda: hooked("register_hook", torch.zeros_like),
        ValueError,
        r"parameter 'first\.weight' has a hook; hooks on tensors do not travel to workers",
    ),
    (
        lambda: hooked("register_post_accumulate_grad_hook", lambda parameter: None),
        ValueError,
        r"parameter 'first\.weight' has a hook",
    ),
]

# ---- the other arguments


def made(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory whose product has these options, set where torch does not look."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        groups = parameters if kind is torch.optim.LBFGS else [{"params": [parameter]} for parameter in parameters]
        optimizer = kind(groups)  # type: ignore[call-arg]
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


FOREIGN = torch.optim.SGD([*nn.Linear(4, 10).parameters()])
HOOK = r"^`prehook` must be callable as prehook\(worker, sample\); got "
SPEEDS = "`speeds` must be a sequence of 2 numbers or None, got "
NOT_FINITE = r"^`speeds` must be finite and >= 0, and not all 0; got "
OTHERS: dict[str, dict[str, Any]] = {
    "criterion": {"criterion": nn.MSELoss()},
    "loss_fn": {"loss_fn": loss_fn},
    "denominators": {"denominators": lambda x, y: torch.ones(len(x))},
}
UNKNOWN: list[Any] = ["ignore", "Raise", "", None, True, ["raise"], {}]
ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"parallelize": 0}, ValueError, r"`parallelize` must be >= 1, got 0"),
    ({"parallelize": -1}, ValueError, r"`parallelize` must be >= 1, got -1"),
    ({"backend": "serial"}, ValueError, r"`backend` 'serial' is this process alone: use parallelize=1, got 2"),
    ({"backend": "threads"}, ValueError, r"`backend` must be one of \[.*'process'.*'serial'.*\], got 'threads'"),
    ({"parallelize": 2.5}, TypeError, r"`parallelize` must be an int, got float 2\.5"),
    ({"parallelize": "4"}, TypeError, r"`parallelize` must be an int, got str '4'"),
    ({"parallelize": True}, TypeError, r"`parallelize` must be an int, got bool True"),
    ({"parallelize": None}, TypeError, r"`parallelize` must be an int, got NoneType None"),
    (
        {"parallelize": 10_000},
        ValueError,
        r"^`parallelize` 10000 needs about 2200\.0 GB of memory and 70000 open files; this machine has .* GB, and",
    ),
    (
        {"module": nn.Sequential(Mlp(), scripted())},
        TypeError,
        r"'1' was made by torch\.jit \(RecursiveScriptModule\).*: pass the module .* or use parallelize=1",
    ),
    (
        {"module": nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))},
        ValueError,
        r"'0' has max_norm: it writes its weight",
    ),
    (
        {"criterion": nn.MSELoss(reduction="none")},
        ValueError,
        r"`criterion` has reduction='none': use reduction='mean' or 'sum'",
    ),
    ({"criterion": nn.MSELoss(reduction="none"), "reduction": "mean"}, ValueError, r"`criterion` has reduction='none'"),
    ({"loss_fn": loss_fn, "reduction": "average"}, ValueError, r"`reduction` must be 'mean' or 'sum', got 'average'"),
    ({"reduction": "sum"}, ValueError, r"`reduction` is 'sum' but the criterion's own is 'mean'"),
    (
        {"criterion": nn.MSELoss(reduction="sum"), "reduction": "mean"},
        ValueError,
        r"`reduction` is 'mean' but the criterion's own is 'sum'",
    ),
    ({"criterion": nn.MSELoss(), "loss_fn": loss_fn}, ValueError, r"`criterion` and `loss_fn` are both given"),
    *(
        ({"residual": loss_fn, **other}, ValueError, f"`residual` and `{name}` are both given")
        for name, other in OTHERS.items()
    ),
    (
        {"residual": loss_fn, "terms": {"a": batchopt.Term(residual=loss_fn)}},
        ValueError,
        "`terms` and `residual` are both given",
    ),
    ({"criterion": nn.MSELoss}, TypeError, r"got the class MSELoss - did you mean MSELoss\(\)\?"),
    ({"criterion": "mse"}, TypeError, r"`criterion` must be callable as criterion\(output, targets\); got str"),
    ({"loss_fn": "mse"}, TypeError, r"`loss_fn` must be callable as loss_fn\(module, inputs, targets\); got str 'mse'"),
    ({"loss_fn": LossClass}, TypeError, r"`loss_fn` must be a function of .*; got the class LossClass"),
    ({"loss_fn": two}, TypeError, r"`loss_fn` must be callable as .*got a function of \(worker"),
    ({"criterion": nn.Linear(2, 2)}, ValueError, r"`criterion` has trainable parameters, which would not be trained"),
    ({"prehook": "look"}, TypeError, HOOK + "str 'look'"),
    ({"prehook": 3}, TypeError, HOOK + "int 3"),
    ({"prehook": lambda worker: None}, TypeError, HOOK + r"a function of \(worker\) \(.*test_bad_inputs\.py:\d+\)"),
    ({"prehook": lambda worker, sample, third: None}, TypeError, HOOK + r"a function of \(worker, sample, third\)"),
    ({"prehook": lambda worker, sample, *, log: None}, TypeError, HOOK + r"a function of \(worker, sample, \*, log\)"),
    ({"prehook": functools.partial(two, 1)}, TypeError, HOOK + r"a function of \(sample"),
    ({"precode": two}, TypeError, r"`precode` must be callable as precode\(worker\); got a function of"),
    ({"posthook": lambda worker: None}, TypeError, r"`posthook` must be callable as posthook\(worker, sample\)"),
    ({"module": holding_a_lock()}, TypeError, r"cannot be sent to worker processes: .*0\.lock' \(.*lock\)"),
    (
        {"precode": lambda worker, lock=LOCK: None},
        TypeError,
        r"`precode` cannot be sent to worker processes: it captures 'lock' \(.*lock\)",
    ),
    (
        {"precode": writes_a_log()},
        TypeError,
        r"`precode` cannot be sent to worker processes: it captures 'log' \(_io\.TextIOWrapper\)",
    ),
    ({"criterion": lambda output, targets, lock=LOCK: output.sum()}, TypeError, r"lock' \(.*lock\)"),
    ({"loss_fn": lambda module, inputs, targets, lock=LOCK: None}, TypeError, r"lock' \(.*lock\)"),
    (
        {"prehook": lambda worker, sample, numbers=(n for n in X): None},
        TypeError,
        r"`prehook`.* cannot be sent to worker processes: it captures 'numbers' \(generator\)",
    ),
    *(
        ({"optimizer": name}, ValueError, rf"`optimizer` must be one of \[.*'adam'.*'lbfgs'.*\].*got '{name}'")
        for name in ("newton", "", "optimizer")
    ),
    (
        {"optimizer": nn.Linear},
        TypeError,
        r"a class of optimizers, a factory, an instance or None; got <class .*Linear",
    ),
    (
        {"optimizer": Needy},
        TypeError,
        r"Needy cannot .* \(missing a required argument: 'lr'\): pass lambda params: Needy\(params, \.\.\.\)",
    ),
    (
        {"optimizer": 3},
        TypeError,
        r"`optimizer` must be a name, a class of optimizers, a factory, an instance or None; got 3$",
    ),
    (
        {"optimizer": lambda params: None},
        TypeError,
        r"the factory given as `optimizer` returned NoneType, not a torch\.optim\.Optimizer",
    ),
    ({"optimizer": lambda params: torch.optim.SGD}, TypeError, r"the factory given as `optimizer` returned type"),
    (
        {"optimizer": lambda params: torch.optim.LBFGS([{"params": [p]} for p in params])},
        ValueError,
        r"parameter groups",
    ),
    (
        {"optimizer": FOREIGN},
        ValueError,
        r"^2 parameters of `optimizer` are not .* of the module \(first: shape \(10, 4\)\)",
    ),
    (
        {"optimizer": lambda params: FOREIGN},
        ValueError,
        r"^2 parameters of `optimizer` are not trainable parameters of the module",
    ),
    *(
        (
            {"optimizer": made(kind, lr=lr)},
            ValueError,
            rf"^`optimizer` has lr {float(lr)}: it must be finite and >= 0$".replace(".0:", r"(\.0)?:"),
        )
        for kind in (torch.optim.SGD, torch.optim.LBFGS)
        for number in (math.nan, -0.5, math.inf, -1)
        for lr in (number, torch.tensor(float(number)))
    ),
    *(
        (
            {"optimizer": made(torch.optim.LBFGS, max_iter=count)},
            ValueError,
            rf"`optimizer` has max_iter {count}: it must be >= 1 \(optimizer=None only",
        )
        for count in (0, -1)
    ),
    ({"speeds": [1, 2, 3]}, ValueError, r"`speeds` has 3 entries for 2 workers"),
    ({"speeds": []}, ValueError, r"`speeds` has 0 entries for 2 workers"),
    ({"speeds": [1, -1]}, ValueError, NOT_FINITE + r"\[1, -1\]"),
    ({"speeds": [0, 0]}, ValueError, NOT_FINITE + r"\[0, 0\]"),
    ({"speeds": [1, math.inf]}, ValueError, NOT_FINITE + r"\[1, inf\]"),
    ({"speeds": [1, math.nan]}, ValueError, NOT_FINITE + r"\[1, nan\]"),
    ({"speeds": "12"}, TypeError, SPEEDS + "str"),
    ({"speeds": 2.0}, TypeError, SPEEDS + "float"),
    ({"speeds": {1: 1, 2: 2}}, TypeError, SPEEDS + "dict"),
    *(
        ({"speeds": speeds}, TypeError, rf"^`speeds` must be numbers, got {re.escape(str(speeds))}$")
        for speeds in (["1", 1], [None, 1], [1j, 1], [[1], [1]])
    ),
    *(
        (
            {"timeout": timeout},
            error,
            rf"^`timeout` must be a positive number of seconds or None, got {re.escape(repr(timeout))}$",
        )
        for error, timeouts in ((TypeError, ("5s", "5", True, [1], 1j)), (ValueError, (0, -1.5, math.nan, math.inf)))
        for timeout in timeouts
    ),
    ({"max_restarts": -1}, ValueError, r"`max_restarts` must be >= 0, got -1"),
    ({"max_restarts": 2.5}, TypeError, r"`max_restarts` must be an int, got float 2\.5"),
    ({"max_restarts": "4"}, TypeError, r"`max_restarts` must be an int, got str '4'"),
    ({"max_restarts": True}, TypeError, r"`max_restarts` must be an int, got bool True"),
    ({"chunk_size": 0}, ValueError, r"`chunk_size` must be >= 1, got 0"),
    ({"chunk_size": 2.0}, TypeError, r"`chunk_size` must be an int, got float 2\.0"),
    ({"seed": -1}, ValueError, r"`seed` must be >= 0, got -1"),
    ({"seed": None}, TypeError, r"`seed` must be an int, got NoneType None"),
    *(
        (
            {"on_nonfinite": value},
            ValueError,
            rf"^`on_nonfinite` must be 'raise' or 'return', got {re.escape(repr(value))}$",
        )
        for value in UNKNOWN
    ),
    *(
        ({"verbose": value}, ValueError, rf"`verbose` must be 0, 1, 2 or 3, got {value!r}")
        for value in (-1, 4, 1.0, 1.5, "1", True, None)
    ),
    *(({"check_cut": value}, TypeError, "`check_cut` must be True or False") for value in (1, "yes", None)),
    *(
        ({"nonfinite_errors": value}, TypeError, "`nonfinite_errors` must be classes of exceptions")
        for value in (ArithmeticError("one"), int, KeyboardInterrupt, "ArithmeticError", None)
    ),
    *(
        ({"devices": devices, "parallelize": parallelize}, error, message)
        for devices, parallelize, error, message in (
            ("cuda:0", 1, TypeError, "one device a worker"),
            (["cpu", "cpu"], 3, ValueError, "2 entries for 3 workers"),
            ([], 1, ValueError, "is empty"),
            (["cpu", "gpu"], 1, ValueError, "no device"),
            (["cpu", "meta"], 1, ValueError, "got 'meta'"),
            (["cuda:99", "cpu"], 1, ValueError, "CUDA devices"),
        )
    ),
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[BaseProcess]:
    """The processes that the library tries to start: it fails. The fork server is there: it may start before all is
    checked, and is none that works."""
    forkserver.anticipate(2, None)
    tried: list[BaseProcess] = []

    def start(process: BaseProcess) -> None:
        tried.append(process)
        raise AssertionError("a process was started")

    monkeypatch.setattr(BaseProcess, "start", start)
    return tried


def check_refused(provoke: Callable[[], object], error: type[Exception], message: str, started: list[Any]) -> None:
    """The error comes, and no process was to be started until then."""
    children = psutil.Process().children(recursive=True)
    with pytest.raises(error, match=message) as caught:
        provoke()
    assert type(caught.value) is error
    assert started == []
    assert psutil.Process().children(recursive=True) == children


def memory_of(module: Any) -> list[tuple[object, ...]]:
    """Which parameters it has, where they are, and how often they were written."""
    if not isinstance(module, nn.Module):
        return []
    known = [p for p in module.parameters() if not isinstance(p, nn.UninitializedParameter)]
    strided = {p: (p.data_ptr(), p.stride()) for p in known if p.layout is torch.strided}
    return [(id(p), strided.get(p), p._version) for p in known]


@pytest.mark.parametrize("make, error, message", MODULES)
def test_a_module_that_cannot_be_optimized_is_refused_untouched_before_a_process_starts(
    make: Callable[[], Any], error: type[Exception], message: str, started: list[BaseProcess]
) -> None:
    module = make()
    before = memory_of(module)
    check_refused(lambda: build(module), error, message, started)
    assert memory_of(module) == before


@pytest.mark.parametrize("options, error, message", ARGUMENTS)
def test_arguments_that_cannot_work_are_refused_before_a_process_starts(
    options: dict[str, Any], error: type[Exception], message: str, started: list[BaseProcess]
) -> None:
    check_refused(lambda: build(**options), error, message, started)


def test_parameters_on_an_accelerator() -> None:
    """As far as the backend can tell: nothing shared, and not on the cpu."""
    setup: Any = SimpleNamespace(flat=SimpleNamespace(block=None, vector=torch.empty(3, device="meta")))
    with pytest.raises(ValueError, match=r"parameters are on meta; workers run on cpu: call"):
        ProcessBackend.check(setup)


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch, started: list[BaseProcess]) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    message = r"^0\.\d MB of shared memory are needed and 0\.0 MB are free: use a smaller batch, fewer workers, or give"
    check_refused(build, MemoryError, message, started)


@pytest.mark.parametrize(
    "name, here",
    [
        ("n_jobs", "it is parallelize=... here"),
        ("num_workers", "it is parallelize=... here"),
        ("lr", "it is optimizer=lambda params: torch.optim.Adam(params, lr=...), for example here"),
        ("device", "devices=[...], with one for each worker here"),
        ("paralellize", "it is parallelize=... here"),
        (
            "tol",
            "it is optimizer=lambda params: batchopt.LBFGS(params, max_iter=..., tolerance_grad=...), for example here",
        ),
        (
            "bounds",
            "minimize opt.objective() by scipy.optimize (docs/solvers.md), or parametrize what is bounded, as by exp "
            "or sigmoid in forward",
        ),
        ("epochs", "batchopt.ignite.fit(opt, batches, epochs=...)"),
    ],
)
def test_an_argument_that_there_is_not_is_told_what_it_is_called_here(name: str, here: str) -> None:
    with pytest.raises(TypeError, match=rf"^BatchOptimizer has no argument `{name}`: .*{re.escape(here)}$"):
        build(**{name: 2})
    with pytest.raises(TypeError, match=r"^BatchOptimizer has no argument `zzz`$"):
        build(zzz=1)


@pytest.mark.parametrize("kind", [batchopt.LBFGS, batchopt.CG, batchopt.SSBroyden, batchopt.LevenbergMarquardt])
def test_an_option_that_there_is_not_is_told_what_it_is_called_here(kind: Any) -> None:
    for name, here in {
        "tol": "it is tolerance_grad=... here",
        "maxiter": "it is max_iter=... here",
        "tolerance_chang": "it is tolerance_change=... here",
        "bounds": "the optimizers here have none: minimize opt.objective() by scipy.optimize",
        "epochs": "call opt.step for each batch",
    }.items():
        with pytest.raises(TypeError, match=f"^{kind.__name__} has no argument `{name}`: {re.escape(here)}"):
            kind(nn.Linear(2, 1).parameters(), **{name: 1})


class Curious(torch.optim.SGD):
    """Differentiates the gradient, as AdaHessian and SophiaH do."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = self.param_groups[0]["params"]
        torch.autograd.grad([p.grad for p in parameters], parameters, [torch.ones_like(p) for p in parameters])
        return loss


def test_an_optimizer_that_differentiates_the_gradient_is_told_of_products() -> None:
    with (
        BatchOptimizer(nn.Linear(3, 1), nn.MSELoss(), optimizer=lambda p: Curious(p, lr=0.1)) as opt,
        pytest.raises(BatchoptError, match=r"^Curious differentiates the gradient, .*: use opt\.hvp\(v\)"),
    ):
        opt.step(torch.ones(8, 3), torch.zeros(8, 1))


# ---- batches, and what shows only when the loss is evaluated


LOADED = torch.utils.data.TensorDataset(X, Y)


def ragged() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends another layout
        return torch.nested.nested_tensor([X[0], X[1]], layout=torch.strided)


def itself() -> dict[str, Any]:
    batch: dict[str, Any] = {"x": X}
    batch["itself"] = batch
    return batch


def deep() -> tuple[Any, ...]:
    batch: tuple[Any, ...] = (X,)
    for _ in range(5000):
        batch = (batch,)
    return batch


def full(*batches: Any) -> object:
    with build(parallelize=1) as opt:
        return opt.full_gradient(batches)


TOO_DEEP = r"nested too deeply to be read, or contains itself"
BATCHES: Refusals = [
    (
        lambda: step(torch.utils.data.DataLoader(LOADED)),
        TypeError,
        r"got DataLoader: `for loss in opt\.steps\(loader\)` steps on each .* opt\.full_gradient\(loader\) sums",
    ),
    (lambda: step(SimpleNamespace(to_data_list=None)), TypeError, r"pass the list of graphs, .*from_data_list"),
    (
        lambda: full([LOADED[i] for i in range(4)]),
        ValueError,
        r"got 4 items\. Lists of samples are inputs .* collate_fn=lambda pairs: tuple\(map\(list, zip\(\*pairs\)\)\)",
    ),
    (
        lambda: step(ragged()),
        ValueError,
        r"`inputs` is a nested tensor: pass the list of its samples, list\(inputs\.unbind\(\)\)",
    ),
    (lambda: step(itself()), ValueError, TOO_DEEP),
    (lambda: step(deep()), ValueError, TOO_DEEP),
    (
        lambda: step(criterion=lambda output, targets: output),
        WorkerError,
        r"ValueError in worker 0, .*`criterion` must return a scalar; got shape \(4, 4\): use reduction=",
    ),
    (
        lambda: step(criterion=lambda output, targets: (output - targets).detach().square().mean()),
        WorkerError,
        r"ValueError in worker 0, .*does not depend on any trainable parameter \(it has no grad_fn\): look for",
    ),
    (
        lambda: step(targets=Y.masked_fill(Y > 0.7, math.nan), optimizer="sgd"),
        NonFiniteError,
        r"loss is nan in chunk 0 \(sample 2\), at step 1, evaluation 1; parameters are unchanged",
    ),
]


@pytest.mark.parametrize("provoke, error, message", BATCHES)
def test_what_cannot_be_evaluated_is_refused(
    provoke: Callable[[], object], error: type[Exception], message: str, started: list[BaseProcess]
) -> None:
    check_refused(provoke, error, message, started)


def test_a_daemonic_process_is_told_to_use_one_worker() -> None:
    """As a worker of a `multiprocessing.Pool` is, and of a `DataLoader`."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with ours, theirs:
        process = context.Process(target=as_a_daemon, args=(theirs,), daemon=True)
        process.start()
        found, loss, automatic = ours.recv()
        process.join()
        process.close()
    assert "this is a daemonic process" in found and "use parallelize=1 here" in found
    assert math.isfinite(loss) and math.isfinite(automatic)


def as_a_daemon(parent: Any) -> None:
    try:
        build()
    except BatchoptError as error:
        parent.send((str(error), step(), step(parallelize="auto")))


def test_auto_is_as_many_workers_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_room", lambda: (10**12, 3 * startup.WORKER_DESCRIPTORS + 1))
    monkeypatch.setattr(arguments, "usable_cores", lambda: 200)
    assert ProcessBackend.read_workers("auto") == 3
    with pytest.raises(ValueError, match=r"use at most 3$"):
        ProcessBackend.read_workers(200)
    monkeypatch.setattr(startup, "_room", lambda: (10**12, 4))
    assert ProcessBackend.read_workers("auto") == 1
    assert math.isfinite(step(parallelize="auto"))


BEFORE_ANYTHING = """
import psutil
from batchopt.backends.process import forkserver
from tests.test_bad_inputs import ARGUMENTS, MODULES, build
tried = [(lambda make=make: build(make()), error) for make, error, _ in MODULES]
for options, error, message in ARGUMENTS:
    by_pickling = "lock" in message or "sent" in message or "torch" in message
    if not by_pickling and isinstance(options.get("optimizer", 0), (str, int, type)):  # no code of the user's
        tried.append((lambda options=options: build(**options), error))
assert len(tried) > 80
for provoke, error in tried:
    try:
        provoke()
    except error:
        pass
    assert forkserver._latest is None and not psutil.Process().children(), error
print("done")
"""


@pytest.mark.slow
def test_all_checks_come_before_a_process() -> None:
    """Not even the process that workers are forked from is started."""
    ended = subprocess.run([sys.executable, "-c", BEFORE_ANYTHING], capture_output=True, text=True, timeout=100)
    assert ended.stdout.endswith("done\n"), ended.stderr


WITHOUT_A_CLUSTER = """
import torch, batchopt, ray
from torch import nn
for given in (
    {"criterion": nn.MSELoss},
    {"criterion": nn.MSELoss(), "prehook": "look"},
    {"terms": {}},
    {"criterion": nn.MSELoss(), "ray_options": {"num_cpus": -1}},
    {"criterion": nn.MSELoss(), "optimizer": "newton"},
    {"criterion": nn.MSELoss(), "module": nn.Linear(2, 1).requires_grad_(False)},
):
    try:
        batchopt.BatchOptimizer(**{"module": nn.Linear(2, 1), "backend": "ray", "parallelize": "auto", **given})
    except (TypeError, ValueError):
        assert not ray.is_initialized(), given
    else:
        raise AssertionError(given)
print("done")
"""


@pytest.mark.slow
def test_all_checks_come_before_a_cluster_is_joined_or_started() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_A_CLUSTER], capture_output=True, text=True, timeout=100)
    assert ended.stdout.endswith("done\n"), ended.stderr


WITHOUT_PROC = """
import torch
from batchopt import BatchOptimizer, BatchoptError
x, y = torch.ones(8, 3), torch.zeros(8, 1)
try:
    BatchOptimizer(torch.nn.Linear(3, 1), torch.nn.MSELoss(), parallelize=2)
except BatchoptError as error:
    print(error)
with BatchOptimizer(torch.nn.Linear(3, 1), torch.nn.MSELoss(), parallelize=1) as opt:
    print(opt.step(x, y) >= 0)
"""


@pytest.mark.slow
def test_a_machine_without_proc_is_told_to_use_one_worker() -> None:
    apart = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mounts of one's own")
    hidden = [*apart, "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh", sys.executable, "-c", WITHOUT_PROC]
    ended = subprocess.run(hidden, capture_output=True, text=True, timeout=60, check=True)
    assert "/proc is not mounted here" in ended.stdout and "use parallelize=1" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "True"


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        BatchoptError, match=r"working directory cannot be used .*No such file.*: it was deleted, perhaps"
    ):
        build()
    assert math.isfinite(step())


def explode() -> None:
    raise ValueError("boom")


class Explosive:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return explode, ()


def test_what_cannot_be_unpickled_here_is_told() -> None:
    message = r"^ValueError in worker \d.*: boom \(raised here, where what .* returned is unpickled: return tensors"
    with build(optimizer=None, posthook=lambda worker, sample: Explosive()) as opt:
        opt.load(X, Y)
        with pytest.raises(WorkerError, match=message):
            opt.evaluate()
        with pytest.raises(WorkerError, match=message):
            opt.run_on_workers(lambda worker: Explosive())
        opt.posthook = None
        opt.load(X, Y)
        assert math.isfinite(opt.evaluate().item())


def test_a_solver_with_processes_of_its_own_is_told_to_use_none() -> None:
    with build(parallelize=1, optimizer=None) as opt:
        opt.load(X, Y)
        objective = opt.objective()
        bounds = [(-1.0, 1.0)] * len(objective.x0)

        def elsewhere(function: Callable[[Any], float], points: Any) -> list[float]:
            """As `multiprocessing.Pool.map`, without the processes, some of which SciPy leaves behind."""
            return [pickle.loads(pickle.dumps(function))(point) for point in points]

        with pytest.raises(BatchoptError, match=r"have the solver call it in this process .*workers=1\)"):
            scipy.optimize.differential_evolution(
                objective, bounds, workers=elsewhere, maxiter=1, popsize=1, updating="deferred"
            )
