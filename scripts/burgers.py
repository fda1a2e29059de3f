"""A physics-informed network learns the solution of Burgers' equation, u_t + u u_x = (0.01 / pi) u_xx for -1 <= x <= 1
and 0 <= t <= 1, u(0, x) = -sin(pi x), u(t, -1) = u(t, 1) = 0, from the equation and 100 initial and boundary values.

The problem, the network and the points are those of Raissi, Perdikaris and Karniadakis, "Physics informed deep learning
(part I)", arXiv:1711.10561, 2017: 10,000 residual points by Latin hypercube sampling, 9 layers of 20, 3,021 parameters.
The error is relative to the solution by Cole and Hopf, in the L2 norm on a grid of 100 x 256.

Each run's curve and network go to a folder; what is there already is not run again. Then prints a table of all runs
there, up to so many evaluations, and how long each took to the loss that torch's came to; and draws the solution of the
best one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import batchopt

NU = 0.01 / math.pi
PAPER = 6.7e-4  # the relative L2 error that the paper reports, of one run

Array = npt.NDArray[np.float64]
Data = dict[str, Any]


def exact(t: Array, x: Array) -> Array:
    """The solution, by Gauss-Hermite quadrature of the formula of Cole and Hopf (Basdevant and others, "Spectral and
    finite difference solutions of the Burgers equation", Computers and Fluids 14, 1986)."""
    nodes, weights = np.polynomial.hermite.hermgauss(200)
    y = x[..., None] - np.sqrt(4 * NU * t)[..., None] * nodes
    exponent = -np.cos(np.pi * y) / (2 * np.pi * NU)
    kernel = weights * np.exp(exponent - exponent.max(-1, keepdims=True))
    u: Array = -(np.sin(np.pi * y) * kernel).sum(-1) / kernel.sum(-1)
    return u


GRID_T, GRID_X = np.meshgrid(np.linspace(0, 1, 100), np.linspace(-1, 1, 256), indexing="ij")
GRID = torch.from_numpy(np.stack((GRID_T, GRID_X), -1))
SOLUTION = torch.from_numpy(exact(GRID_T, GRID_X))


def network(seed: int) -> torch.nn.Module:
    """8 hidden layers of 20, tanh, Glorot's initial weights; float64."""
    torch.manual_seed(seed)
    widths = [2, *[20] * 8, 1]
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = torch.nn.Linear(inputs, outputs)
        torch.nn.init.xavier_normal_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
        layers += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).double()


def points(seed: int) -> Data:
    """100 of the 456 initial and boundary points of the grid with their values; these, and 10,000 more, for the
    residual."""
    random = np.random.default_rng(seed)
    known = torch.cat((GRID[0], GRID[:, 0], GRID[:, -1]))
    values = torch.cat((SOLUTION[0], torch.zeros(200, dtype=torch.float64)))
    chosen = torch.from_numpy(random.choice(len(known), 100, replace=False))
    strata = np.stack([(random.permutation(10_000) + random.random(10_000)) / 10_000 for _ in "tx"], 1)
    inside = torch.from_numpy(strata * [1, 2] - [0, 1])
    return {"residual": torch.cat((inside, known[chosen])), "data": (known[chosen], values[chosen])}


def residual(module: torch.nn.Module, at: torch.Tensor, _: None) -> torch.Tensor:
    """The mean square of what the equation leaves."""
    at = at.detach().requires_grad_()
    u = module(at)[:, 0]
    (first,) = torch.autograd.grad(u.sum(), at, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), at, create_graph=True)
    mean: torch.Tensor = (first[:, 0] + u * first[:, 1] - NU * second[:, 1]).square().mean()
    return mean


def data(module: torch.nn.Module, at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The mean square of the error where the solution is known."""
    mean: torch.Tensor = (module(at)[:, 0] - values).square().mean()
    return mean


def solution(module: torch.nn.Module) -> torch.Tensor:
    """The network's, on the grid."""
    with torch.no_grad():
        u: torch.Tensor = module(GRID)[..., 0]
    return u


def error(module: torch.nn.Module) -> float:
    """Of the network's solution, relative, L2."""
    return float((solution(module) - SOLUTION).norm() / SOLUTION.norm())


class Curve:
    """What a run came to, now and then: evaluations, loss, error, seconds without those for looking."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.rows: list[tuple[int, float, float, float]] = []
        self._module = module
        self._began = time.perf_counter()

    def add(self, evaluations: int, loss: float) -> None:
        """One row more."""
        now = time.perf_counter()
        self.rows.append((evaluations, loss, error(self._module), now - self._began))
        self._began += time.perf_counter() - now


NO_LIMIT: dict[str, Any] = {"max_iter": None, "tolerance_grad": 0.0, "tolerance_change": 0.0}
OURS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "LBFGS": lambda params, **options: batchopt.LBFGS(params, **NO_LIMIT, **options),
    "SSBroyden": lambda params, **options: batchopt.SSBroyden(params, **NO_LIMIT, **options),
}


def run_ours(name: str, seed: int, evaluations: int, parallelize: int) -> tuple[torch.nn.Module, Curve]:
    """One run of one of our optimizers, on workers."""
    module = network(seed)
    terms = {"residual": batchopt.Term(residual), "data": batchopt.Term(data)}

    def optimizer(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return OURS[name](params, max_eval=evaluations, callback=look)

    def look(iteration: batchopt.Iteration) -> None:
        if iteration.number % 50 == 0:
            curve.add(iteration.evaluations, iteration.f)

    with batchopt.BatchOptimizer(
        module, terms=terms, optimizer=optimizer, parallelize=parallelize, chunk_size=1275
    ) as opt:
        opt.load(points(seed))
        opt.evaluate()
        curve = Curve(module)
        opt.step(points(seed))
        result = opt.optimizer.result  # type: ignore[union-attr]
        curve.add(result.evaluations, result.f)
        print(result)
    return module, curve


def run_torch(seed: int, evaluations: int) -> tuple[torch.nn.Module, Curve]:
    """The same by `torch.optim.LBFGS` in one process, with all its threads."""
    module, batch = network(seed), points(seed)
    optimizer = torch.optim.LBFGS(
        module.parameters(),
        max_iter=50,
        max_eval=10**9,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    count, losses = 0, [math.inf]

    def closure() -> torch.Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        loss = residual(module, batch["residual"], None) + data(module, *batch["data"])
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        return loss

    curve = Curve(module)
    while (count < evaluations and math.isfinite(losses[-1])) or count == 0:
        before = count
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        curve.add(count, losses[-1])
        if count == before + 1:  # it has stopped
            break
    return module, curve


def run(name: str, seed: int, evaluations: int, parallelize: int, folder: Path) -> None:
    """One run, unless the folder has it."""
    path = folder / f"{name}-{seed}.json"
    if path.exists():
        return
    if name == "torch":
        module, curve = run_torch(seed, evaluations)
    else:
        module, curve = run_ours(name, seed, evaluations, parallelize)
    torch.save(module.state_dict(), path.with_suffix(".pt"))
    path.write_text(json.dumps({"name": name, "seed": seed, "parallelize": parallelize, "curve": curve.rows}) + "\n")
    print(
        f"{name} {seed}: loss {curve.rows[-1][1]:.2e}, error {curve.rows[-1][2]:.2e}, {curve.rows[-1][3]:.0f} s",
        flush=True,
    )


def table(runs: list[dict[str, Any]], most: int) -> str:
    """One line an optimizer: medians over its seeds, the lowest and the highest error, after `most` evaluations at
    most."""
    lines = [f"{'':12}{'seeds':>6}{'evaluations':>12}{'loss':>10}{'error':>10}{'lowest':>10}{'highest':>10}"]
    for name in sorted({run["name"] for run in runs}):
        ends = [[row for row in run["curve"] if row[0] <= most][-1] for run in runs if run["name"] == name]
        evaluations, losses, errors, _ = zip(*ends, strict=True)
        middle = [statistics.median(numbers) for numbers in (losses, errors)]
        numbers = "".join(f"{number:10.2e}" for number in (*middle, min(errors), max(errors)))
        lines.append(f"{name:12}{len(ends):6}{statistics.median(evaluations):12.0f}{numbers}")
    return "\n".join([*lines, f"{'the paper':12}{1:6}{'':22}{PAPER:10.2e}"])


def seconds_to(curve: list[tuple[int, float, float, float]], loss: float) -> float:
    """When a curve first came down to a loss; infinity if it did not."""
    return next((row[3] for row in curve if row[1] <= loss), math.inf)


def against_torch(runs: list[dict[str, Any]]) -> str:
    """For each run of torch's: its loss and seconds, and the seconds of the others with that seed to that loss."""
    lines = []
    for theirs in (run for run in runs if run["name"] == "torch"):
        _, loss, _, seconds = theirs["curve"][-1]
        lines.append(f"seed {theirs['seed']}: torch came to {loss:.2e} in {seconds:.0f} s")
        for run in runs:
            if run["name"] != "torch" and run["seed"] == theirs["seed"]:
                ours = seconds_to(run["curve"], loss)
                lines.append(f"  {run['name']}: {ours:.0f} s, {seconds / ours:.1f} times as fast")
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], folder: Path) -> None:
    """The solution and the error of the best run, and the curves of all of them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    best = min(runs, key=lambda run: run["curve"][-1][2])
    module = network(0)
    module.load_state_dict(torch.load(folder / f"{best['name']}-{best['seed']}.pt", weights_only=True))
    u = solution(module)
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    extent = (0.0, 1.0, -1.0, 1.0)
    image = left.imshow(u.T, origin="lower", aspect="auto", extent=extent, cmap="RdBu_r")
    left.set(title="u(t, x), learned", xlabel="t", ylabel="x")
    figure.colorbar(image, ax=left)
    image = middle.imshow((u - SOLUTION).abs().T, origin="lower", aspect="auto", extent=extent, cmap="magma")
    middle.set(title=f"error of {best['name']}, {best['curve'][-1][2]:.1e} in all", xlabel="t")
    figure.colorbar(image, ax=middle)
    colors = {name: f"C{i}" for i, name in enumerate(sorted({run["name"] for run in runs}))}
    for run in runs:
        evaluations, _, errors, _ = zip(*run["curve"], strict=True)
        label = run["name"] if run["name"] in colors else None
        right.semilogy(evaluations, errors, color=colors[run["name"]], label=label, alpha=0.7)
    right.axhline(PAPER, color="grey", linestyle=":", label="the paper")
    right.set(title="relative L2 error", xlabel="evaluations")
    handles = dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    right.legend(handles.values(), handles.keys())
    figure.savefig(folder / "burgers.png", dpi=100)


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="*", default=["LBFGS", "SSBroyden"], choices=[*OURS, "torch"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--evaluations", type=int, default=4000, help="of each run, at most")
    parser.add_argument(
        "--parallelize", type=int, default=2, help="workers; the result has the same bits for any number"
    )
    parser.add_argument("--folder", type=Path, default=Path("burgers"), help="of the runs, and of the picture")
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True, parents=True)
    for seed in given.seeds:
        for name in given.optimizers:
            run(name, seed, given.evaluations, given.parallelize, given.folder)
    runs = [json.loads(path.read_text()) for path in sorted(given.folder.glob("*-*.json"))]
    if runs:
        print(table(runs, given.evaluations), against_torch(runs), sep="\n")
        (given.folder / "burgers.json").write_text(json.dumps(runs) + "\n")
        draw(runs, given.folder)


if __name__ == "__main__":
    main()
