"""With fixed chunks the result has the same bits whoever evaluates what: parameters, losses, the optimizer's state, and
all else that is asked."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchopt import LBFGS, BatchOptimizer, LevenbergMarquardt, Weighted, resample
from tests.backends.least_squares_contract import DATA, flow, terms
from tests.backends.task_contract import ASKED, X, Y, moments, noisy, outputs_and_errors
from tests.test_complex import Operator
from tests.test_simulators import Series
from tests.test_uncertainty import CLICKED, Regression
from tests.test_uncertainty import X as CLICKS
from tests.workloads import WORKLOADS, Workload, mlp

Ask = Callable[[BatchOptimizer], Any]
ITERATIONS = 30
NIGHTLY = pytest.mark.nightly


def plain(data: Any) -> Any:
    """Nested data with nothing in it but numbers, and the sha256 of tensors."""
    if isinstance(data, torch.Tensor):
        return hashlib.sha256(data.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(data, Mapping):
        return [(str(key), plain(data[key])) for key in sorted(data, key=str)]
    if isinstance(data, (list, tuple)):
        return [plain(part) for part in data]
    return data


# ---- whatever is asked


def evaluated(opt: BatchOptimizer) -> Any:
    return opt.evaluate(), opt.grad_parameters


def differentiated(opt: BatchOptimizer) -> Any:
    """What a backward through f adds up to."""
    opt.module.zero_grad()
    (2 * opt.loss()).backward()  # type: ignore[no-untyped-call]
    return opt.grad_parameters


def stepped(opt: BatchOptimizer, *batch: Any) -> Any:
    return [opt.step(*batch) for _ in range(2)], opt.fingerprint(), list(opt.module.buffers()), opt.hook_results


def started(opt: BatchOptimizer) -> Any:
    """Runs from several starts, which end at the lowest."""
    found = opt.multistart(torch.stack([opt.parameters * i for i in (0.5, 1.0, -2.0)]))
    return found.points, [run.f for run in found.runs], opt.fingerprint(), opt.eval_counter, opt.output


def whole(opt: BatchOptimizer) -> Any:
    return [opt.full_gradient([(X[i : i + 8], Y[i : i + 8]) for i in range(0, 37, 8)]) for _ in range(2)]


def drawn(opt: BatchOptimizer) -> Any:
    """Points where residuals are large."""
    points = resample(opt, "data", (DATA["pde"], DATA["pde"][:, :1]), samples=9, k=2.0, c=0.0)
    return points, resample(opt, "pde", DATA["pde"], samples=9)


def errors(kind: str | None) -> Ask:
    def ask(opt: BatchOptimizer) -> Any:
        found = opt.covariance(kind, tolerance=1e-6)
        return found.matrix, found.distance, found.variance

    return ask


SQUARES: dict[str, Ask] = {
    "residuals": lambda opt: opt.residuals(),
    "normal": lambda opt: tuple(opt.normal()),
    "gauss_newton": lambda opt: opt.gauss_newton(torch.ones_like(opt.parameters)),
    "jvp": lambda opt: opt.jvp(torch.ones_like(opt.parameters)),
    "vjp": lambda opt: opt.vjp(opt.residuals()),
    "gram": lambda opt: opt.gram(),
}
EVALUATED: dict[str, Ask] = {
    "evaluate": evaluated,
    "hvp": lambda opt: opt.hvp(torch.ones_like(opt.parameters)),
    "input_gradients": lambda opt: opt.input_gradients(),
    "evaluate_many": lambda opt: opt.evaluate_many(torch.stack([opt.parameters * 2] * 2), gradients=True),
}
LM = functools.partial(LevenbergMarquardt, max_iter=2)
# By name: a module and what else the optimizer is given, the batch, and what is asked.
Objective = tuple[Callable[[], nn.Module], dict[str, Any], tuple[Any, ...], dict[str, Ask]]
OBJECTIVES: dict[str, Objective] = {
    "draws, statistics and hooks": (
        noisy,
        {"criterion": nn.MSELoss(), "optimizer": "sgd", "posthook": lambda worker, sample: sample.loss},
        (X, Y),
        {"total": lambda opt: opt.total(moments), "collect": lambda opt: opt.collect(outputs_and_errors)}
        | {**EVALUATED, "predict": lambda opt: opt.predict(), "step": lambda opt: stepped(opt, X, Y)},
    ),
    "targets": (
        lambda: mlp().module,
        {"criterion": nn.MSELoss(), "optimizer": functools.partial(LBFGS, max_iter=5)},
        (X, Y),
        {**ASKED, **EVALUATED, **SQUARES, "loss": differentiated, "full_gradient": whole, "multistart": started}
        | {"covariance": errors(None), "step": lambda opt: stepped(opt, X, Y)},
    ),
    "weights": (
        lambda: mlp().module,
        {"criterion": nn.SmoothL1Loss(), "optimizer": "adam"},
        (Weighted(X, X[:, 0].square()), Y),
        {**EVALUATED, "step": lambda opt: stepped(opt, Weighted(X, Y[:, 0].square()), Y)},
    ),
    "terms": (
        flow,
        {"terms": terms(), "optimizer": LM},
        (DATA,),
        {**EVALUATED, **SQUARES, "resample": drawn, "losses": lambda opt: (opt.evaluate(), opt.losses)}
        | {"step": lambda opt: stepped(opt, DATA)},
    ),
    "complex": (
        lambda: Operator(False),
        {"criterion": nn.MSELoss(), "optimizer": functools.partial(LM, geodesic=True)},
        (torch.cat([X, X[:, :2]], 1), Y[:, :2]),
        {**EVALUATED, **SQUARES, "step": lambda opt: stepped(opt, torch.cat([X, X[:, :2]], 1), Y[:, :2])},
    ),
    "clicks": (
        lambda: Regression(3),
        {"criterion": nn.BCEWithLogitsLoss(), "optimizer": None},
        (CLICKS[:50], CLICKED[:50]),
        {"likelihood": errors("likelihood"), "sandwich": errors("sandwich")},
    ),
    "a simulator of few samples": (
        lambda: Series("/dev/null"),
        {"criterion": nn.MSELoss(), "optimizer": functools.partial(LM, dense=0), "chunk_size": 1},
        (X[:2, :1], Y[:2, :1].expand(2, 20)),
        {"evaluate": evaluated, **SQUARES, "step": lambda opt: stepped(opt, X[:2, :1], Y[:2, :1].expand(2, 20))},
    ),
}


# Of each kind of work one; the others are of the night.
EACH_CHANGE = "draws, statistics and hooks", "targets", "terms"


def asked(name: str, **way: Any) -> dict[str, Any]:
    """What is found, by what is asked of the objective."""
    make, given, batch, questions = OBJECTIVES[name]
    torch.manual_seed(0)
    found = {}
    with BatchOptimizer(make(), **{"chunk_size": 5, **given, **way}) as opt:
        opt.keep_outputs = name == "targets"
        for what, ask in questions.items():
            opt.load(*batch)
            found[what] = plain(ask(opt))
    return found


def differing(name: str, **way: Any) -> list[str]:
    """What has other bits than in one process."""
    found, expected = asked(name, **way), asked(name, backend="serial", parallelize=1)
    return [what for what in expected if found[what] != expected[what]]


@pytest.mark.rows
@pytest.mark.filterwarnings("ignore:.* for . workers", "ignore:.*it normalises by the statistics of a chunk")
@pytest.mark.filterwarnings("ignore:.*rows of the Jacobian took a backward each")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(pytest.param(name, {"parallelize": 3}, marks=[NIGHTLY] * (name not in EACH_CHANGE)) for name in OBJECTIVES),
        pytest.param("targets", {"devices": ["cpu:0", "cpu:0", "cpu"]}, marks=NIGHTLY),
    ],
)
def test_whatever_is_asked_of_workers_has_the_bits_of_one_process(name: str, way: dict[str, Any]) -> None:
    """Of three; of two and of other backends in their contract."""
    assert not differing(name, **way)


# ---- long runs


def run(case: Workload, **options: Any) -> tuple[str, Any]:
    """The fingerprint, and the optimizer's state, after one step of thirty iterations."""
    lbfgs = functools.partial(LBFGS, max_iter=ITERATIONS, tolerance_grad=0.0, tolerance_change=0.0)
    with BatchOptimizer(case.module, case.criterion, optimizer=lbfgs, **options) as opt:
        opt.step(case.inputs, case.targets)
        assert opt.optimizer is not None and opt.eval_counter > ITERATIONS / 2
        return opt.fingerprint(), plain(opt.optimizer.state_dict()["state"])


@pytest.mark.rows
@pytest.mark.filterwarnings("ignore:5 chunks for 8 workers")
@pytest.mark.parametrize(
    ("workload", "parallelize"),
    [("mlp", 3), ("rnn", 8), *(pytest.param(name, 3, marks=NIGHTLY) for name in ("cnn", "burgers", "logistic"))],
)
def test_any_number_of_workers_gives_the_same_bits(workload: str, parallelize: int) -> None:
    case = WORKLOADS[workload]
    alone = run(case(torch.float32), chunk_size=5)
    assert run(case(torch.float32), chunk_size=5, parallelize=parallelize) == alone


@pytest.mark.slow
def test_data_that_starts_anywhere_in_memory_gives_the_same_bits() -> None:
    """Matrix kernels differ with the alignment of their data."""

    def shifted(offset: int) -> Workload:
        case = mlp(torch.float32, samples=64)
        memory = np.empty(case.inputs.nbytes + 128, dtype=np.uint8)
        start = -memory.ctypes.data % 64 + offset
        view = torch.from_numpy(memory[start : start + case.inputs.nbytes]).view(torch.float32)
        case.inputs = view.view(case.inputs.shape).copy_(case.inputs)
        return case

    expected = run(shifted(0), chunk_size=16)
    for parallelize in (1, 2):
        for offset in (4, 8, 32):
            assert run(shifted(offset), chunk_size=16, parallelize=parallelize) == expected


def test_the_fingerprint_tells_runs_apart() -> None:
    def fingerprint(scale: float = 1.0, steps: int = 1) -> str:
        case = mlp()
        with torch.no_grad():
            next(case.module.parameters()).mul_(scale)
        with BatchOptimizer(case.module, case.criterion, optimizer="sgd") as opt:
            for _ in range(steps):
                opt.step(case.inputs, case.targets)
            return opt.fingerprint()

    assert fingerprint() == fingerprint() != fingerprint(scale=1 + 1e-15)
    assert len({fingerprint(), fingerprint(steps=2), fingerprint(steps=0)}) == 3
