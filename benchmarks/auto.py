"""Is `parallelize="auto"` ever slower than what one could have chosen by hand?

For fifteen functions of one to some hundreds of milliseconds, in turn, each in a process of its own: plain torch on all
cores and on one thread, `parallelize=1`, the same with one thread, `parallelize=N`, and `"auto"`, once it has chosen.
`chosen / best` compares it with the fastest of our own ways, `chosen / torch` with torch on all cores: smaller is
better.

    python -m benchmarks.auto [--workloads "GRU, 256 of 30" ...] [--rounds 6]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

import batchopt
from benchmarks.arms import Arm, take_turns
from benchmarks.findings import Finding, publish
from benchmarks.workloads import Recurrent, Supervised, Workload, burgers

ROUNDS = 6
# Evaluations after which "auto" must have chosen.
MOST = 3000


def dense(layers: list[int], samples: int) -> Callable[[], Workload]:
    """A regression by a network with tanh."""

    def make() -> Workload:
        parts: list[nn.Module] = []
        for inputs, outputs in pairwise(layers):
            parts += [nn.Linear(inputs, outputs), nn.Tanh()]
        data = torch.randn(samples, layers[0]), torch.randn(samples, layers[-1])
        return Workload(nn.Sequential(*parts[:-1]), Supervised(nn.MSELoss()), *data)

    return make


def physics(samples: int) -> Callable[[], Workload]:
    """Burgers' equation, with second derivatives."""

    def make() -> Workload:
        module = dense([2, *[20] * 8, 1], 1)().module
        return Workload(module, burgers, torch.rand(samples, 2), None)

    return make


def convolutional(samples: int) -> Callable[[], Workload]:
    """Two convolutions on images of 28x28."""

    def make() -> Workload:
        body = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten())
        module = nn.Sequential(*body, nn.LazyLinear(10))
        images = torch.randn(samples, 1, 28, 28)
        module(images[:1])
        return Workload(module, Supervised(nn.CrossEntropyLoss()), images, torch.randint(0, 10, (samples,)))

    return make


def recurrent() -> Workload:
    """Sequences of 30."""
    return Workload(Recurrent(), Supervised(nn.MSELoss()), torch.randn(256, 30, 16), torch.randn(256, 1))


def attention() -> Workload:
    """Two layers of a transformer on sequences of 32."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    module = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32 * 64, 1))
    return Workload(module, Supervised(nn.MSELoss()), torch.randn(128, 32, 64), torch.randn(128, 1))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "20-20, 10,000": dense([2, 20, 20, 1], 10_000),
    "20-20, 20,000": dense([2, 20, 20, 1], 20_000),
    "20 layers of 64, 1,000": dense([16, *[64] * 20, 1], 1000),
    "20 layers of 64, 20,000": dense([16, *[64] * 20, 1], 20_000),
    "784-256-10, 512": dense([784, 256, 10], 512),
    "784-256-10, 8,192": dense([784, 256, 10], 8192),
    "1024-1024-1024-10, 256": dense([1024, 1024, 1024, 10], 256),
    "Burgers, 300": physics(300),
    "Burgers, 3,000": physics(3000),
    "Burgers, 30,000": physics(30_000),
    "Burgers, 100,000": physics(100_000),
    "convolutions, 64": convolutional(64),
    "convolutions, 1,024": convolutional(1024),
    "GRU, 256 of 30": recurrent,
    "transformer, 128 of 32": attention,
}


def build(name: str) -> Workload:
    """The workload, the same each time."""
    torch.manual_seed(0)
    return WORKLOADS[name]()


class Torch:
    """One evaluation by torch alone."""

    def __init__(self, name: str, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._case = build(name)

    def __call__(self) -> float:
        case = self._case
        for parameter in case.module.parameters():
            parameter.grad = None
        loss = case.loss(case.module, case.inputs, case.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()


class Ours:
    """One evaluation by so many workers and threads; `"auto"`: until it has chosen, which `name` tells."""

    def __init__(self, name: str, parallelize: int | Literal["auto"], threads: int | None) -> None:
        case = build(name)
        self._opt = batchopt.BatchOptimizer(
            case.module, loss_fn=case.loss, parallelize=parallelize, threads_per_worker=threads, optimizer=None
        )
        self._opt.load(case.inputs, case.targets)
        self.evaluations = 0
        while parallelize == "auto" and "parallelize" not in self._opt.state_dict() and self.evaluations < MOST:
            self._opt.evaluate()
            self.evaluations += 1

    def __call__(self) -> None:
        self._opt.evaluate()

    def close(self) -> None:
        """End the workers."""
        self._opt.close()


def measure(name: str, cores: int, rounds: int) -> dict[str, float]:
    """The median seconds of each way."""
    arms = {
        "torch": Arm(Torch, name, None),
        "torch, 1 thread": Arm(Torch, name, 1),
        "1": Arm(Ours, name, 1, None),
        "1, 1 thread": Arm(Ours, name, 1, 1),
        str(cores): Arm(Ours, name, cores, None),
        "auto": Arm(Ours, name, "auto", None),
    }
    try:
        short = take_turns({"1": arms["1"]}, 4, 2)["1"] < 0.02
        return take_turns(arms, 30 if short else 5, rounds)
    finally:
        for arm in arms.values():
            arm.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    cores, results = torch.get_num_threads(), {}
    for name in given.workloads:
        results[name] = times = measure(name, cores, given.rounds)
        best, chosen = min(seconds for way, seconds in times.items() if way[0].isdigit()), times["auto"]
        row = "".join(f"{way:>16} {seconds * 1e3:9.3f}" for way, seconds in times.items())
        print(
            f"{name:24}{row}   chosen/best {chosen / best:.3f}  chosen/torch {chosen / times['torch']:.3f}", flush=True
        )
    chosen_by_best = [
        times["auto"] / min(seconds for way, seconds in times.items() if way[0].isdigit()) for times in results.values()
    ]
    chosen_by_torch = [times["auto"] / times["torch"] for times in results.values()]
    mean = statistics.geometric_mean
    findings = [
        Finding("auto / the best of our own ways, geometric mean", mean(chosen_by_best), most=1.03),
        Finding("auto / the best of our own ways, highest", max(chosen_by_best), most=1.1),
        Finding("auto / torch on all cores, geometric mean", mean(chosen_by_torch)),
        Finding("auto / torch on all cores, highest", max(chosen_by_torch), most=1.03),
    ]
    publish("auto", findings, {"seconds": results})


if __name__ == "__main__":
    main()
