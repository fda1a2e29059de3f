"""How long does a whole L-BFGS run take?

Thirty iterations from the same start: our L-BFGS, and torch's (strong Wolfe), over `parallelize=N`; torch's over plain
torch on all cores, and over DistributedDataParallel with one rank a core, which works as long as all ranks see the same
bits; and SciPy's L-BFGS-B around plain torch on all cores, with OpenBLAS as it is and on one thread, since its threads
slow short vectors down: the faster one counts. In turn, each in a process of its own.

And an iteration of `wide` with 50 pairs, where memory counts: ours over workers, torch's on all cores.

    python -m benchmarks.runs [--workloads mlp pinn] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.optimize
import torch

import batchopt
from benchmarks.arms import Arm, Distributed, Make, Ours, Plain, take_turns
from benchmarks.findings import Finding, publish
from benchmarks.workloads import WORKLOADS, build

ITERATIONS = 30


OPTIONS = {"max_iter": ITERATIONS, "max_eval": 10**6, "tolerance_grad": 0.0, "tolerance_change": 0.0}
KINDS: dict[str, Any] = {"ours": batchopt.LBFGS, "torch's": torch.optim.LBFGS}


def by_lbfgs(kind: str, make: Make, workload: str, *arguments: object) -> Callable[[], object]:
    """A run over the function that `make` makes."""
    evaluate = make(workload, *arguments)
    module = evaluate.module  # type: ignore[attr-defined]
    parameters = list(module.parameters())
    start = [parameter.detach().clone() for parameter in parameters]

    def run() -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
        KINDS[kind](parameters, line_search_fn="strong_wolfe", **OPTIONS).step(evaluate)

    run.close = getattr(evaluate, "close", lambda: None)  # type: ignore[attr-defined]
    return run


def by_scipy(workload: str, threads: int) -> Callable[[], object]:
    """A run by SciPy."""
    evaluate = Plain(workload, threads)
    parameters = list(evaluate.module.parameters())
    start = torch.nn.utils.parameters_to_vector(parameters).detach().double().numpy()

    def function(x: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(x).to(parameters[0].dtype), parameters)
        loss = evaluate()
        gradients = [p.grad for p in parameters if p.grad is not None]
        return loss, torch.nn.utils.parameters_to_vector(gradients).double().numpy()

    def run() -> None:
        options = {"maxiter": ITERATIONS, "ftol": 0.0, "gtol": 0.0}
        scipy.optimize.minimize(function, start, jac=True, method="L-BFGS-B", options=options)

    return run


LONG, PAIRS = 18, 50


class Penalised:
    """The loss of a workload and the squares of the parameters, without which f would soon be 0."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __call__(self, module: torch.nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        penalty: Any = sum(parameter.square().sum() for parameter in module.parameters())
        found: torch.Tensor = self._loss(module, inputs, targets) + 1e-4 * penalty
        return found


def iterations(kind: str, cores: int) -> Callable[[], object]:
    """Iterations of `wide` in a row, each run where the last one ended: from the fourth one on with all pairs."""
    case = build("wide")
    loss = Penalised(case.loss)
    options: dict[str, Any] = {**OPTIONS, "max_iter": LONG, "history_size": PAIRS}
    parameters = list(case.module.parameters())
    if kind == "ours":
        opt = batchopt.BatchOptimizer(
            case.module, loss_fn=loss, optimizer=lambda p: batchopt.LBFGS(p, **options), parallelize=cores
        )
        return lambda: opt.step(case.inputs, case.targets)
    torch.set_num_threads(cores)
    optimizer = torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe", **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(case.module, case.inputs, case.targets)
        found.backward()  # type: ignore[no-untyped-call]
        return found

    return lambda: optimizer.step(closure)  # type: ignore[no-untyped-call]


def measure_iterations(rounds: int) -> list[Finding]:
    """The time of an iteration, ours beside torch's."""
    cores = torch.get_num_threads()
    arms = {kind: Arm(iterations, kind, cores) for kind in KINDS}
    try:
        seconds = take_turns(arms, burst=2, rounds=rounds)
    finally:
        for arm in arms.values():
            arm.close()
    gain = seconds["torch's"] / seconds["ours"]
    return [
        Finding(f"wide: an iteration with {PAIRS} pairs, ours", 1e3 * seconds["ours"] / LONG, "ms"),
        Finding("  times as fast as torch's on all cores", gain, least=1.3),
    ]


SCIPY, SCIPY_ALONE = "SciPy's L-BFGS-B", "SciPy's L-BFGS-B, OpenBLAS on one thread"


def measure(workload: str, rounds: int) -> dict[str, float]:
    """Median seconds of a run."""
    cores = torch.get_num_threads()
    arms = {
        "torch's L-BFGS on all cores": Arm(by_lbfgs, "torch's", Plain, workload, cores),
        SCIPY: Arm(by_scipy, workload, cores),
        SCIPY_ALONE: Arm(by_scipy, workload, cores, environment={"OPENBLAS_NUM_THREADS": "1"}),
        "torch's L-BFGS over DistributedDataParallel": Arm(by_lbfgs, "torch's", Distributed, workload, processes=cores),
        "torch's L-BFGS over workers": Arm(by_lbfgs, "torch's", Ours, workload, cores),
        "ours": Arm(by_lbfgs, "ours", Ours, workload, cores),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    try:
        for _ in range(rounds):
            for name, arm in arms.items():
                seconds[name] += arm.burst(1)
    finally:
        for arm in arms.values():
            arm.close()
    return {name: statistics.median(some) for name, some in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["mlp", "pinn"])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    findings, details = [], {}
    for workload in given.workloads:
        assert build(workload)
        times = measure(workload, given.rounds)
        details[workload] = dict(times)
        times[SCIPY] = min(times[SCIPY], times.pop(SCIPY_ALONE))
        findings.append(Finding(f"{workload}: {ITERATIONS} iterations of our L-BFGS by workers", times["ours"], "s"))
        for peer, seconds in times.items():
            if peer != "ours":
                findings.append(Finding(f"  times as fast as {peer}", seconds / times["ours"]))
    findings += measure_iterations(2)
    publish("runs", findings, {"seconds": details})


if __name__ == "__main__":
    main()
