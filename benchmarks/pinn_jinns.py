"""Burgers' equation by jinns (JAX), beside batchopt, in the same time of one core.

Both begin at the same weights of the same network, with the same fixed points and the same loss, in float64, on one
thread each. Seconds are those of the process, so that other users of the machine take none; jinns' begin after its loop
was compiled, and batchopt's after its first evaluation. jinns has the line search, regularisation and scale of the
first step that are its defaults.

    pip install jinns "jax[cpu]"; python -m benchmarks.pinn_jinns [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import equinox
import jax
import jinns
import numpy as np
import torch
from jax.experimental import io_callback
from jinns.solver import GetJinnsVariableName
from jinns.validation import AbstractValidationModule

from benchmarks.curves import Curve
from benchmarks.findings import Finding, publish
from benchmarks.pinn import POINTS, points_of, run_ours
from benchmarks.pinn_problems import BURGERS, NU, WIDTHS, Part, misfit, sides

OURS = {"batchopt SSBroyden": "SSBroyden", "batchopt LevenbergMarquardt": "LM"}
# How many iterations pass between two looks at the clock.
EVERY = {"jinns SSBroyden": 5, "jinns natural gradient": 1}
METHODS = (*OURS, *EVERY)
SEEDS = range(3)


def both_sides(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points at x = -1 and x = 1, at the same times, as jinns has them."""
    at, values = sides(count, seed)
    half = at[: count // 2, :1]
    ends = [torch.cat((half, torch.full_like(half, x)), 1) for x in (-1.0, 1.0)]
    return torch.cat(ends), values


PROBLEM = replace(BURGERS, parts={**BURGERS.parts, "boundary": Part(misfit, both_sides, 200)})


def first_loss(seed: int) -> float:
    """The loss at the start, by torch."""
    module, points, total = PROBLEM.network(seed), points_of(PROBLEM, POINTS, seed), 0.0
    for name, part in PROBLEM.parts.items():
        entry = points[name]
        at = entry if isinstance(entry, tuple) else (entry, None)
        total += part.residual(module, *at).square().mean().item()
    return total


def callback_value(params: Any, loss: Any, batch: Any) -> Any:
    """For jinns, which knows this function by its name: the loss."""
    return loss(params, batch)[0]


def callback_gradient(params: Any, loss: Any, batch: Any) -> Any:
    """For jinns: the gradient of the loss."""
    return jax.grad(lambda there: loss(there, batch)[0])(params)


def optimizer_of(method: str) -> dict[str, Any]:
    """What `jinns.solve` is given for a method."""
    if method == "jinns natural gradient":
        return {"optimizer": jinns.optimizers.vanilla_ngd()}
    names = {"value": "train_loss_value", "grad_pt": "grads", "loss": "loss", "batch": "batch"}
    more = {"value_fn": callback_value, "grad_fn": callback_gradient}
    return {
        "optimizer": jinns.optimizers.scale_by_SSBroyden_family(),
        "extra_optax_args_and_kwargs": {key: GetJinnsVariableName(name) for key, name in names.items()} | more,
    }


def data_of(seed: int) -> Any:
    """The points, in a generator of jinns, which returns all of them each time."""
    points = points_of(PROBLEM, POINTS, seed)
    boundary, initial = points["boundary"][0], points["initial"][0]
    box = {"dim": 1, "min_pts": (-1.0,), "max_pts": (1.0,), "tmin": 0.0, "tmax": 1.0}
    sizes = {"n": POINTS, "nb": len(boundary), "ni": len(initial)}
    drawn = jinns.data.CubicMeshPDENonStatio(key=jax.random.PRNGKey(0), **sizes, **box)
    found = torch.stack(boundary.chunk(2), 2), initial[:, 1:]  # (times, t and x, sides), (points, x)
    arrays = [jax.numpy.asarray(part.numpy()) for part in (points["residual"], *found)]
    assert [part.shape for part in arrays] == [drawn.domain.shape, drawn.border.shape, drawn.initial.shape]
    return equinox.tree_at(lambda data: (data.domain, data.border, data.initial), drawn, arrays)


def network_of(module: Any) -> tuple[Any, Any]:
    """jinns' network of the same layers, and its parameters with the same numbers."""
    layers: list[tuple[Any, ...]] = []
    for inputs, outputs in zip((2, *WIDTHS), (*WIDTHS, 1), strict=True):
        layers += [(equinox.nn.Linear, inputs, outputs), (jax.nn.tanh,)]
    u, start = jinns.nn.PINN_MLP.create(
        key=jax.random.PRNGKey(0),
        eqx_list=tuple(layers[:-1]),
        eq_type="PDENonStatio",
        input_transform=lambda at, _: jax.numpy.stack((2 * at[0] - 1, at[1])),
    )
    leaves, tree = jax.tree.flatten(start)
    numbers = [jax.numpy.asarray(p.detach().numpy()) for p in module.parameters()]
    assert [leaf.shape for leaf in leaves] == [number.shape for number in numbers]
    return u, jax.tree.unflatten(tree, numbers)


def run_jinns(method: str, seed: int, seconds: float) -> Curve:
    """A method of jinns, which is looked at between iterations."""
    jax.config.update("jax_enable_x64", True)
    module = PROBLEM.network(seed)
    u, start = network_of(module)
    params = jinns.parameters.Params(nn_params=start, eq_params={"nu": jax.numpy.asarray(NU)})
    loss = jinns.loss.LossPDENonStatio(
        u=u,
        dynamic_loss=jinns.loss.BurgersEquation(),
        boundary_condition=jinns.loss.Dirichlet(),
        initial_condition_fun=lambda x: -jax.numpy.sin(math.pi * x),
        loss_weights=jinns.loss.LossWeightsPDENonStatio(dyn_loss=1.0, initial_condition=1.0, boundary_loss=0.5),
        params=params,
    )
    data = data_of(seed)
    found = float(loss(params, data.get_batch()[1])[0])
    assert math.isclose(found, first_loss(seed), rel_tol=1e-9), (found, first_loss(seed))
    curves: list[Curve] = []

    def look(leaves: Any) -> Any:
        with torch.no_grad():
            for parameter, leaf in zip(module.parameters(), leaves, strict=True):
                parameter.copy_(torch.from_numpy(np.array(leaf)))
        if not curves:
            curves.append(Curve(lambda: PROBLEM.error(module), seconds, time.process_time))
        look.count += EVERY[method]  # type: ignore[attr-defined]
        curves[0].look(look.count, math.nan)  # type: ignore[attr-defined]
        return np.asarray(curves[0].over)

    look.count = 1 - EVERY[method]  # type: ignore[attr-defined]

    class Look(AbstractValidationModule):  # type: ignore[misc]
        """Stops when the time is over."""

        call_every: int = EVERY[method]

        def __call__(self, params: Any) -> Any:
            shape = jax.ShapeDtypeStruct((), bool)
            over = io_callback(look, shape, jax.tree.leaves(params.nn_params))
            return self, over, jax.numpy.zeros(()), False

    jinns.solve(
        n_iter=100_000,
        init_params=params,
        data=data,
        loss=loss,
        validation=Look(),
        verbose=False,
        **optimizer_of(method),
    )
    return curves[0]


def run(method: str, seed: int, seconds: float) -> dict[str, Any]:
    """One run, in this process."""
    torch.set_num_threads(1)
    if method in OURS:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        curve = run_ours(PROBLEM, OURS[method], seed, seconds, time.process_time)
    else:
        curve = run_jinns(method, seed, seconds)
    return {"method": method, "seed": seed, "seconds": seconds, "curve": [(*row[:2], row[3]) for row in curve.rows]}


def judge(runs: list[dict[str, Any]]) -> list[Finding]:
    """The errors at the end of each method."""
    findings = []
    for method in METHODS:
        errors = [run["curve"][-1][2] for run in runs if run["method"] == method]
        title = f"{method}, {runs[0]['seconds']:g} s, {len(errors)} seeds"
        findings += [
            Finding(f"{title}: {name} error", by(errors))
            for name, by in (("lowest", min), ("median", statistics.median), ("highest", max))
        ]
        counts = [run["curve"][-1][1] for run in runs if run["method"] == method]
        unit = "evaluations" if method in OURS else "iterations"
        findings.append(Finding(f"{title}: median {unit}", statistics.median(counts)))
    return findings


def main() -> None:
    """Run all, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(*json.loads(given.one))))
        return
    runs, environment = [], {**os.environ, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    for seed in SEEDS:
        for method in METHODS:
            order = json.dumps([method, seed, given.seconds])
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.pinn_jinns", "--one", order]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            print(method, seed, runs[-1]["curve"][-1], flush=True)
    publish("pinn_jinns", judge(runs), {"runs": runs})


if __name__ == "__main__":
    main()
