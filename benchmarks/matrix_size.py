"""Up to how many parameters Levenberg and Marquardt's method should make its matrix: Burgers' equation by networks of
several sizes, in the same time with the matrix and with conjugate gradients, which go by its products.

A matrix of n parameters takes n² numbers and some n² (points) of work, its factors n³ / 3; a product takes about three
evaluations, and a step takes up to a hundred of them. Points are as in `pinn.py`, and stay the same, so that losses
can be compared.

    python -m benchmarks.matrix_size [--seconds 120] [--widths 31 48 70]
"""

from __future__ import annotations

import argparse
import math

import batchopt
from batchopt._machine.cores import usable_cores
from benchmarks import pinn
from benchmarks.curves import Curve
from benchmarks.findings import Finding, publish
from benchmarks.pinn_problems import BURGERS, Network, plain

DENSE, PRODUCTS = 10**9, 0


def run(width: int, dense: int, seconds: float, seed: int = 100) -> tuple[int, Curve]:
    """The number of parameters, and what it came to."""
    module = Network(plain, seed, widths=(width,) * 3)
    terms = {name: batchopt.Term(residual=part.residual, weight=part.weight) for name, part in BURGERS.parts.items()}

    def optimizer(params: object) -> batchopt.LevenbergMarquardt:
        return pinn.levenberg_marquardt(  # type: ignore[return-value]
            params, dense=dense, max_iter=1, max_eval=None, tolerance_grad=0.0, tolerance_change=0.0
        )

    with batchopt.BatchOptimizer(
        module, terms=terms, optimizer=optimizer, parallelize=usable_cores(), chunk_size=925
    ) as opt:
        points = pinn.points_of(BURGERS, pinn.DRAWN, seed)
        opt.load(points)
        opt.evaluate()
        curve = Curve(lambda: BURGERS.error(module), seconds)
        while not curve.over:
            opt.step(points)
            curve.look(opt.eval_counter, opt.result.f)
        return len(opt.parameters), curve


def main() -> None:
    """Run and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--widths", type=int, nargs="+", default=[31, 48, 70])
    given = parser.parse_args()
    findings, curves = [], {}
    for width in given.widths:
        for way, dense in (("matrix", DENSE), ("products", PRODUCTS)):
            size, curve = run(width, dense, given.seconds)
            _, evaluations, loss, error = curve.rows[-1]
            assert math.isfinite(error)
            curves[f"{size:,} parameters, {way}"] = curve.rows
            findings += [
                Finding(f"{size:,} parameters, {way}: loss after {given.seconds:g} s", loss),
                Finding("  error", error),
                Finding("  evaluations", evaluations),
            ]
    publish("matrix_size", findings, curves)


if __name__ == "__main__":
    main()
