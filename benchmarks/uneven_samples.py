"""How well are workers used when samples cost differently?

Samples that cost 1 to 10, sorted; `chunk_size` is set. The makespan of two workers against the ideal, half of what one
takes for all; and what a split into two halves of equal size would take, as DistributedDataParallel does.

    python -m benchmarks.uneven_samples [--repeats 15]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import batchopt
from benchmarks.findings import Finding, publish

SAMPLES, CHUNK = 640, 10


def costly(module: torch.nn.Module, inputs: torch.Tensor, targets: None) -> torch.Tensor:
    """Compute in proportion to the sum of the samples."""
    state = torch.full((128, 128), 0.01)
    with torch.no_grad():
        for _ in range(round(inputs.sum().item())):
            state = torch.tanh(state @ state)
    loss: torch.Tensor = (module(inputs) + state.sum()).mean()
    return loss


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    costs = torch.linspace(1, 10, SAMPLES).unsqueeze(1)
    times: dict[str, list[float]] = {"one": [], "second half": [], "two": []}
    module = torch.nn.Linear(1, 1)

    def start(parallelize: int) -> batchopt.BatchOptimizer:
        return batchopt.BatchOptimizer(
            module, loss_fn=costly, optimizer=None, chunk_size=CHUNK, reduction="mean", parallelize=parallelize
        )

    with start(1) as one, start(2) as two:
        two.load(costs)
        for turn in range(given.repeats + 3):
            for name, opt, data in (
                ("one", one, costs),
                ("second half", one, costs[SAMPLES // 2 :]),
                ("two", two, None),
            ):
                if data is not None:
                    opt.load(data)
                started = time.perf_counter()
                opt.evaluate()
                if turn >= 3:
                    times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(some) for name, some in times.items()}
    ideal = medians["one"] / 2
    findings = [
        Finding("uneven samples: makespan / ideal", medians["two"] / ideal, most=1.1),
        Finding("the same, two equal halves", medians["second half"] / ideal),
    ]
    publish("uneven_samples", findings, {"seconds": medians})


if __name__ == "__main__":
    main()
