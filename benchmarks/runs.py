"""How long does a whole L-BFGS run take?

Thirty iterations from the same start: torch's L-BFGS (strong Wolfe) over `parallelize=N`; over plain torch on all cores;
over DistributedDataParallel with one rank a core, which works as long as all ranks see the same bits; and SciPy's
L-BFGS-B around plain torch on all cores. In turn, each in a process of its own.

    python -m benchmarks.runs [--workloads mlp pinn] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import scipy.optimize
import torch

from benchmarks.arms import Arm, Distributed, Make, Ours, Plain
from benchmarks.findings import Finding, publish
from benchmarks.workloads import WORKLOADS, build

ITERATIONS = 30


def lbfgs(closure: Callable[[], float], parameters: list[torch.nn.Parameter], start: list[torch.Tensor]) -> None:
    """One run by torch's L-BFGS."""
    with torch.no_grad():
        for parameter, value in zip(parameters, start, strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=ITERATIONS,
        max_eval=10**6,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)  # type: ignore[no-untyped-call]


def by_torch(make: Make, workload: str, *arguments: object) -> Callable[[], object]:
    """A run over the function that `make` makes."""
    evaluate = make(workload, *arguments)
    module = evaluate.module  # type: ignore[attr-defined]
    parameters = list(module.parameters())
    start = [parameter.detach().clone() for parameter in parameters]

    def run() -> None:
        lbfgs(evaluate, parameters, start)  # type: ignore[arg-type]

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


def measure(workload: str, rounds: int) -> dict[str, float]:
    """Median seconds of a run."""
    cores = torch.get_num_threads()
    arms = {
        "all cores": Arm(by_torch, Plain, workload, cores),
        "scipy": Arm(by_scipy, workload, cores),
        "ddp": Arm(by_torch, Distributed, workload, processes=cores),
        "ours": Arm(by_torch, Ours, workload, cores),
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
        details[workload] = times = measure(workload, given.rounds)
        findings.append(Finding(f"{workload}: {ITERATIONS} iterations of L-BFGS by workers", times["ours"], "s"))
        for peer in ("all cores", "ddp", "scipy"):
            findings.append(Finding(f"  times as fast as {peer}", times[peer] / times["ours"]))
    publish("runs", findings, {"seconds": details})


if __name__ == "__main__":
    main()
