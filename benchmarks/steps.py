"""What does a step on a mini-batch take, beside torch alone and DistributedDataParallel?

SGD and Adam on mini-batches of `mlp` and `cnn`, a batch of other samples each time: torch on all cores and on one
thread, DistributedDataParallel with two ranks, this library in this process and with two workers; in turn.

    python -m benchmarks.steps [--rounds 8]
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import batchopt
from benchmarks.arms import ROUNDS, Arm, take_turns
from benchmarks.findings import Finding, publish
from benchmarks.workloads import Workload, build

BURST = 20
SIZES = {"mlp": (64, 256, 2048), "cnn": (32, 128, 512)}
Batch = tuple[torch.Tensor, torch.Tensor]


def optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Plain SGD, or Adam with its defaults."""
    return partial(torch.optim.SGD, lr=0.01) if name == "sgd" else torch.optim.Adam


def batches(case: Workload, size: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """Mini-batches, again and again; of one of several equal ranks its part."""
    assert case.targets is not None
    found = list(zip(case.inputs.split(size), case.targets.split(size), strict=True))  # type: ignore[no-untyped-call]
    return itertools.cycle([(part(x, rank, ranks), part(y, rank, ranks)) for x, y in found])


def part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """That of one rank."""
    return tensor.tensor_split(ranks)[rank].clone()


class Plain:
    """A step by torch alone."""

    def __init__(self, workload: str, size: int, kind: str, threads: int) -> None:
        torch.set_num_threads(threads)
        case = build(workload)
        self._case, self._batches = case, batches(case, size)
        self._optimizer = optimizer(kind)(case.module.parameters())

    def __call__(self) -> float:
        inputs, targets = next(self._batches)
        self._optimizer.zero_grad()
        loss = self._case.loss(self._case.module, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()


class Distributed:
    """A step by DistributedDataParallel over gloo, one thread a rank; the loss is averaged, too."""

    def __init__(self, workload: str, size: int, kind: str, rank: int, ranks: int, port: int) -> None:
        torch.set_num_threads(1)
        address = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
        self._case, self._ranks = build(workload), ranks
        self._batches = batches(self._case, size, rank, ranks)
        self._module = DistributedDataParallel(self._case.module)
        self._optimizer = optimizer(kind)(self._case.module.parameters())

    def __call__(self) -> float:
        inputs, targets = next(self._batches)
        self._optimizer.zero_grad()
        loss = self._case.loss(self._module, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        mean = loss.detach()
        torch.distributed.all_reduce(mean)
        self._optimizer.step()
        return mean.item() / self._ranks

    def close(self) -> None:
        """Leave the group."""
        torch.distributed.destroy_process_group()


class Ours:
    """A step by workers, or in this process."""

    def __init__(self, workload: str, size: int, kind: str, parallelize: int) -> None:
        case = build(workload)
        self._batches = batches(case, size)
        threads = 1 if parallelize == 1 else None
        self._opt = batchopt.BatchOptimizer(
            case.module,
            loss_fn=case.loss,
            optimizer=optimizer(kind),
            parallelize=parallelize,
            threads_per_worker=threads,
            check_cut=False,
        )
        self.close = self._opt.close

    def __call__(self) -> float:
        return self._opt.step(*next(self._batches))


def measure(workload: str, size: int, kind: str, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each."""
    given = (workload, size, kind)
    arms = {
        "torch, all cores": Arm(Plain, *given, os.cpu_count() or 1),
        "torch, one thread": Arm(Plain, *given, 1),
        "ddp": Arm(Distributed, *given, processes=2),
        "here": Arm(Ours, *given, 1),
        "two workers": Arm(Ours, *given, 2),
    }
    try:
        return take_turns(arms, BURST, rounds)
    finally:
        for arm in arms.values():
            arm.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    findings, seconds = [], {}
    for kind, workload in itertools.product(("sgd", "adam"), SIZES):
        for size in SIZES[workload]:
            name = f"{workload}, {size} samples, {kind}"
            times = seconds[name] = measure(workload, size, kind, given.rounds)
            findings += [Finding(f"{name}: {way}", took * 1e3, "ms") for way, took in times.items()]
            if (workload, size) in (("mlp", 2048), ("cnn", 128), ("cnn", 512)):
                gains = {way: times[way] / times["two workers"] for way in ("torch, all cores", "ddp")}
                findings += [Finding(f"{name}: {way} / two workers", gain, least=1.1) for way, gain in gains.items()]
            if (workload, size) == ("mlp", 64):
                more = {way: (times[way] - times["torch, one thread"]) * 1e3 for way in ("here", "two workers")}
                findings.append(Finding(f"{name}: here, over torch on one thread", more["here"], "ms", most=0.15))
                findings.append(Finding(f"{name}: two workers, over it", more["two workers"], "ms", most=0.5))
    publish("steps", findings, {"seconds": seconds})


if __name__ == "__main__":
    main()
