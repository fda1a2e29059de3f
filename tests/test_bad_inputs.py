"""What the user may do wrong, and what the error says: what was given, what is needed, how to mend it.

The numbers are those of the table of bad inputs that this library was designed with. Left out are those about other
machines, those that a test needs running workers for (beside the backends' contract), and those that are no errors.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import scipy.optimize
import torch
from torch import nn

from batchopt import BatchOptimizer, NonFiniteError, WorkerError
from batchopt.backends.process import forkserver
from batchopt.backends.process.backend import ProcessBackend
from batchopt.errors import BatchoptError
from batchopt_workers.data import memory
from tests.workloads import Mlp

X, Y = torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(0, 1, 16).view(4, 4)
LOCK = threading.Lock()


class Case(NamedTuple):
    """What is done, and the error that it must be."""

    provoke: Callable[[], object]
    error: type[Exception]
    message: str


def build(module: Any = None, criterion: Any = None, **options: Any) -> BatchOptimizer:
    """With two workers, unless told otherwise."""
    if criterion is None and "loss_fn" not in options:
        criterion = nn.MSELoss()
    return BatchOptimizer(Mlp() if module is None else module, criterion, **{"parallelize": 2, **options})


def step(inputs: Any = X, targets: Any = Y, sample_options: Any = None, **options: Any) -> float:
    """In this process: a batch is read the same way for any number of workers."""
    with build(**{"parallelize": 1, **options}) as opt:
        return opt.step(inputs, targets, sample_options)


# ---- modules


def module_of(*tensors: torch.Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        return torch.jit.script(nn.Linear(2, 2))


def hooked() -> nn.Module:
    module = Mlp()
    module.first.weight.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    return module


def holding_a_lock() -> nn.Module:
    module = nn.Sequential(Mlp())
    vars(module[0])["lock"] = LOCK
    return module


def on_an_accelerator() -> None:
    """As far as the backend can tell: nothing shared, and not on the cpu."""
    setup: Any = SimpleNamespace(flat=SimpleNamespace(block=None, vector=torch.empty(3, device="meta")))
    ProcessBackend.check(setup)


STORAGE = torch.zeros(6)
MODULES = {
    "4 a class": Case(lambda: build(Mlp), TypeError, r"`module` must be .* instance; got the class Mlp - did you mean"),
    "4 a function": Case(lambda: build(torch.relu), TypeError, r"`module` must be .* instance; got builtin_function"),
    "5 nothing to train": Case(
        lambda: build(Mlp().requires_grad_(False)), ValueError, r"no parameter with requires_grad=True \(4 frozen\)"
    ),
    "6 lazy": Case(
        lambda: build(nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(4))),
        ValueError,
        r"parameter '1\.weight' is uninitialised \(a lazy module\): run one forward pass first",
    ),
    "8 on an accelerator": Case(on_an_accelerator, ValueError, r"parameters are on meta; workers run on cpu: call"),
    "9 two devices": Case(
        lambda: build(module_of(torch.zeros(1), torch.zeros(1, device="meta"))),
        ValueError,
        r"are on 2 devices \{'cpu': 1, 'meta': 1\}: move the module to one",
    ),
    "9 without memory": Case(lambda: build(Mlp().to("meta")), ValueError, r"on the meta device: .* module\.to_empty"),
    "10 two dtypes": Case(
        lambda: build(module_of(torch.zeros(1), torch.zeros(1), torch.zeros(1).double())),
        ValueError,
        r"have dtypes \{'float32': 2, 'float64': 1\} \('2' is float64\): cast the module with",
    ),
    "10 complex beside real": Case(
        lambda: build(module_of(torch.zeros(1), torch.zeros(1, dtype=torch.complex128))),
        ValueError,
        r"have dtypes .* \('1' is complex\): .* beside complex128 float64; cast the real ones with module\.float",
    ),
    "10 scripted": Case(
        lambda: build(nn.Sequential(Mlp(), scripted())),
        TypeError,
        r"'1' was made by torch\.jit \(RecursiveScriptModule\).*: pass the module .* or use parallelize=1",
    ),
    "11 one storage": Case(
        lambda: build(module_of(STORAGE, STORAGE[2:])),
        ValueError,
        r"'0' and '1' are different tensors over one storage",
    ),
    "12 a hook on a parameter": Case(
        lambda: build(hooked()), ValueError, r"'first\.weight' has a hook; hooks on tensors do not travel to workers"
    ),
    "12 a forward that writes its parameter": Case(
        lambda: build(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))),
        ValueError,
        r"'0' has max_norm: it writes its weight",
    ),
    "22 a lock in the module": Case(
        lambda: build(holding_a_lock()), TypeError, r"cannot be sent to worker processes: .*0\.lock' \(.*lock\)"
    ),
}

# ---- the other arguments


def optimizer_with(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory whose product has these options, which torch would have refused or not."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        kind = torch.optim.LBFGS if "max_iter" in options else torch.optim.SGD
        optimizer = kind(parameters)
        optimizer.param_groups[0].update(options)
        return optimizer

    return make


def groups(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([{"params": parameters[:1]}, {"params": parameters[1:]}])


def foreign() -> BatchOptimizer:
    return build(optimizer=torch.optim.SGD([*nn.Linear(4, 10).parameters()]))


def writes_a_log() -> Callable[..., Any]:
    with open(os.devnull, "w") as log:
        return lambda worker, sample=None: log.write("x")


ARGUMENTS = {
    "1 no workers": Case(lambda: build(parallelize=0), ValueError, r"`parallelize` must be >= 1, got 0"),
    "1 fewer than none": Case(lambda: build(parallelize=-1), ValueError, r"`parallelize` must be >= 1, got -1"),
    "2 a float": Case(lambda: build(parallelize=2.5), TypeError, r"`parallelize` must be an int, got float 2\.5"),
    "2 a string": Case(lambda: build(parallelize="4"), TypeError, r"`parallelize` must be an int, got str '4'"),
    "2 a bool": Case(lambda: build(parallelize=True), TypeError, r"`parallelize` must be an int, got bool True"),
    "3 ten thousand workers": Case(
        lambda: build(parallelize=10_000),
        ValueError,
        r"`parallelize` 10000 needs about 2200\.0 GB of memory and 70000 open files; this machine has .* GB, and",
    ),
    "14 a loss that is not reduced": Case(
        lambda: build(criterion=nn.MSELoss(reduction="none")), ValueError, r"has reduction='none': use reduction='mean'"
    ),
    "21 a hook that is a string": Case(
        lambda: build(prehook="look"), TypeError, r"must be callable as prehook\(worker, sample\); got str 'look'"
    ),
    "21 a hook of one argument": Case(
        lambda: build(posthook=lambda worker: None),
        TypeError,
        r"must be callable as posthook\(worker, sample\); got a function of \(worker\) \(.*test_bad_inputs\.py:\d+\)",
    ),
    "22 precode captures a lock": Case(
        lambda: build(precode=lambda worker, lock=LOCK: None),
        TypeError,
        r"`precode` cannot be sent to worker processes: it captures 'lock' \(.*lock\)",
    ),
    "22 precode captures a file": Case(
        lambda: build(precode=writes_a_log()),
        TypeError,
        r"`precode` cannot be sent to worker processes: it captures 'log' \(_io\.TextIOWrapper\)",
    ),
    "22 a criterion captures a lock": Case(
        lambda: build(criterion=lambda output, targets, lock=LOCK: output.sum()), TypeError, r"lock' \(.*lock\)"
    ),
    "22 a loss_fn captures a lock": Case(
        lambda: build(loss_fn=lambda module, inputs, targets, lock=LOCK: None), TypeError, r"lock' \(.*lock\)"
    ),
    "22 a prehook captures a generator": Case(
        lambda: build(prehook=lambda worker, sample, numbers=(n for n in X): None),
        TypeError,
        r"`prehook`.* cannot be sent to worker processes: it captures 'numbers' \(generator\)",
    ),
    "27 an unknown name": Case(lambda: build(optimizer="newton"), ValueError, r"must be one of \[.*got 'newton'"),
    "27 a class": Case(
        lambda: build(optimizer=nn.Linear),
        TypeError,
        r"a class of optimizers, a factory, an instance or None; got <class .*Linear",
    ),
    "27 groups that L-BFGS does not take": Case(lambda: build(optimizer=groups), ValueError, r"parameter groups"),
    "28 foreign parameters": Case(
        foreign, ValueError, r"2 parameters of `optimizer` are not .* of the module \(first: shape \(10, 4\)\)"
    ),
    "29 lr is no number": Case(
        lambda: build(optimizer=optimizer_with(lr=math.nan)), ValueError, r"has lr nan: it must be finite and >= 0"
    ),
    "29 lr is negative": Case(
        lambda: build(optimizer=optimizer_with(lr=-0.1)), ValueError, r"has lr -0\.1: it must be"
    ),
    "29 no iterations": Case(
        lambda: build(optimizer=optimizer_with(max_iter=0)), ValueError, r"has max_iter 0: it must be >= 1"
    ),
    "30 speeds of too many": Case(lambda: build(speeds=[1, 2, 3]), ValueError, r"`speeds` has 3 entries for 2 workers"),
    "30 a negative speed": Case(lambda: build(speeds=[1, -1]), ValueError, r"`speeds` must be finite and >= 0"),
    "30 no speed": Case(lambda: build(speeds=[0, 0]), ValueError, r"`speeds` must be finite and >= 0, and not all 0"),
    "31 a timeout with a unit": Case(
        lambda: build(timeout="5s"), TypeError, r"`timeout` must be a positive number of seconds or None, got '5s'"
    ),
    "31 no time": Case(lambda: build(timeout=0), ValueError, r"`timeout` must be a positive number .*, got 0"),
    "31 fewer restarts than none": Case(
        lambda: build(max_restarts=-1), ValueError, r"`max_restarts` must be >= 0, got -1"
    ),
}


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


def check_before_start(case: Case, started: list[BaseProcess]) -> None:
    """The error comes, and no process was to be started until then."""
    children = psutil.Process().children(recursive=True)
    with pytest.raises(case.error, match=case.message) as caught:
        case.provoke()
    assert type(caught.value) is case.error
    assert started == []
    assert psutil.Process().children(recursive=True) == children


@pytest.mark.parametrize("case", [*MODULES.values(), *ARGUMENTS.values()], ids=[*MODULES, *ARGUMENTS])
def test_what_cannot_work_is_refused_before_a_process_starts(case: Case, started: list[BaseProcess]) -> None:
    check_before_start(case, started)


def test_37_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch, started: list[BaseProcess]) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    message = r"^0\.\d MB of shared memory are needed and 0\.0 MB are free: use a smaller batch, fewer workers, or give"
    check_before_start(Case(build, MemoryError, message), started)


# ---- batches, and what shows only when the loss is evaluated


def graph() -> torch.Tensor:
    return X.clone().requires_grad_() * 2


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


BATCHES = {
    "16 targets too few": Case(lambda: step(X, Y[:3]), ValueError, r"`inputs` has 4 samples but `targets` has 3"),
    "16 columns of two lengths": Case(
        lambda: step((X, Y[:3])), ValueError, r"`inputs\[0\]` has 4 samples but `inputs\[1\]` has 3"
    ),
    "17 no samples": Case(lambda: step(X[:0], Y[:0]), ValueError, r"the batch has 0 samples"),
    "19 no tensor": Case(
        lambda: step(X.numpy().astype(object), Y), TypeError, r"`inputs` must be a tensor \(torch\.as_tensor makes"
    ),
    "19 a data loader": Case(
        lambda: step(torch.utils.data.DataLoader(LOADED)),
        TypeError,
        r"got DataLoader: `for loss in opt\.steps\(loader\)` steps on each .* opt\.full_gradient\(loader\) sums",
    ),
    "19 a data set without a length": Case(
        lambda: step(torch.utils.data.Dataset(), None), TypeError, r"must be map-style, .*; Dataset has no `__len__`"
    ),
    "19 a data set as targets": Case(lambda: step(X, LOADED), TypeError, r"got TensorDataset: a dataset takes the pla"),
    "19 graphs that were put together": Case(
        lambda: step(SimpleNamespace(to_data_list=None)), TypeError, r"pass the list of graphs, .*from_data_list"
    ),
    "19 lists of samples from a loader": Case(
        lambda: full([LOADED[i] for i in range(4)]),
        ValueError,
        r"got 4 items\. Lists of samples are inputs .* collate_fn=lambda pairs: tuple\(map\(list, zip\(\*pairs\)\)\)",
    ),
    "19 no dimension": Case(
        lambda: step((X, torch.tensor(1.0)), Y), TypeError, r"`inputs\[1\]` is a 0-dim tensor: there is no dimension"
    ),
    "20 a result of autograd": Case(
        lambda: step(graph()), ValueError, r"`inputs` requires grad and is not a leaf: call \.detach\(\) on it"
    ),
    "20 sparse": Case(lambda: step(X.to_sparse()), ValueError, r"`inputs` is sparse .*: call \.to_dense\(\) on it"),
    "20 nested": Case(
        lambda: step(ragged()),
        ValueError,
        r"`inputs` is a nested tensor: pass the list of its samples, list\(inputs\.unbind\(\)\)",
    ),
    "20 contains itself": Case(lambda: step(itself()), ValueError, r"nested too deeply to be read, or contains itself"),
    "20 too deep": Case(lambda: step(deep()), ValueError, r"nested too deeply to be read, or contains itself"),
    "14 a loss of many numbers": Case(
        lambda: step(criterion=lambda output, targets: output),
        WorkerError,
        r"ValueError in worker 0, .*`criterion` must return a scalar; got shape \(4, 4\): use reduction=",
    ),
    "15 a loss without a gradient": Case(
        lambda: step(criterion=lambda output, targets: (output - targets).detach().square().mean()),
        WorkerError,
        r"ValueError in worker 0, .*does not depend on any trainable parameter \(it has no grad_fn\): look for",
    ),
    "32 a loss that is not finite": Case(
        lambda: step(targets=Y.masked_fill(Y > 0.7, math.nan), optimizer="sgd"),
        NonFiniteError,
        r"loss is nan in chunk 0 \(sample 2\), at step 1, evaluation 1; parameters are unchanged",
    ),
}


@pytest.mark.parametrize("case", BATCHES.values(), ids=BATCHES)
def test_what_cannot_be_evaluated_is_refused(case: Case, started: list[BaseProcess]) -> None:
    check_before_start(case, started)


def replaced(module: nn.Module) -> None:
    module.get_parameter("first.weight").data = torch.zeros(8, 6)


def other_parameter(module: nn.Module) -> None:
    module.first.bias = nn.Parameter(torch.zeros_like(module.get_parameter("first.bias")))  # type: ignore[union-attr]


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "34 cast": (
        lambda module: module.double(),
        r"'first\.weight' was .*float32 .* is now .*float64 .*: give it values",
    ),
    "34 another shape": (replaced, r"'first\.weight' was \(9, 6\) .* is now \(8, 6\)"),
    "34 another parameter": (other_parameter, r"'first\.bias' was replaced, or taken out .*: keep the Parameter"),
}


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_a_module_that_changed_under_the_optimizer_is_refused(
    change: Callable[[nn.Module], object], message: str
) -> None:
    module = Mlp()
    with build(module, parallelize=1) as opt:
        opt.step(X, Y)
        change(module)
        with pytest.raises(BatchoptError, match=message):
            opt.step(X, Y)


def test_26_use_after_close_is_refused() -> None:
    opt = build(parallelize=1)
    opt.close()
    with pytest.raises(BatchoptError, match=r"this BatchOptimizer was closed: build a new one"):
        opt.step(X, Y)


def test_a_daemonic_process_is_told_to_use_one_worker() -> None:
    """As a worker of a `multiprocessing.Pool` is, and of a `DataLoader`."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with ours, theirs:
        process = context.Process(target=as_a_daemon, args=(theirs,), daemon=True)
        process.start()
        found, loss = ours.recv()
        process.join()
        process.close()
    assert "this is a daemonic process" in found and "use parallelize=1 here" in found
    assert math.isfinite(loss)


def as_a_daemon(parent: Any) -> None:
    try:
        build()
    except BatchoptError as error:
        parent.send((str(error), step()))


BEFORE_ANYTHING = """
import psutil
from batchopt.backends.process import forkserver
from tests.test_bad_inputs import ARGUMENTS, MODULES
for name, case in {**MODULES, **ARGUMENTS}.items():
    if name.startswith(("22", "27 groups", "29")):  # found by pickling, or by the user's own factory
        continue
    try:
        case.provoke()
    except case.error:
        pass
    assert forkserver._latest is None and not psutil.Process().children(), name
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
