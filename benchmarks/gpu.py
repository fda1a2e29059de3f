"""One GPU: an evaluation of f and its gradient by plain torch, eagerly by this library, and recorded as a graph; a step
of L-BFGS and of SGD; and a batch that is too large for the memory, in chunks.

    python -m benchmarks.gpu [--only evaluations lbfgs memory sgd] [--device cuda:0]

Medians of ways that take turns in one process. Aims: an evaluation of L-BFGS at least 6 times as fast as that of
`torch.optim.LBFGS`; chunks of 100,000 of 2,000,000 points in at most 1.15 of the time and 0.08 of the memory of the
whole; a step of SGD twice as fast. Without a GPU it says so, and runs tiny cases on the CPU, which show only that it
runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import batchopt
from batchopt import BatchOptimizer
from benchmarks.compiled import CASES, Case, burgers, layers
from benchmarks.findings import Finding, publish, table

WITH_AIM = "burgers, 20,000, f32", "burgers, 20,000, f64", "potential, f64"
EVALUATIONS, POINTS = 200, 2_000_000
CHUNKS: tuple[int, ...] = 500_000, 100_000, 20_000


def waited(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(
    ways: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 7, seconds: float = 0.1
) -> dict[str, float]:
    """Return the median of the seconds that a call of each way takes."""
    counts, times = {}, {name: list[float]() for name in ways}
    for name, way in ways.items():
        for _ in range(9):  # until comparisons with eager evaluations are rare
            way()
        waited(device)
        began = time.perf_counter()
        way()
        waited(device)
        counts[name] = max(1, int(seconds / (time.perf_counter() - began)))
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            for _ in range(counts[name]):
                way()
            waited(device)
            times[name].append((time.perf_counter() - began) / counts[name])
    return {name: statistics.median(found) for name, found in times.items()}


def on(device: torch.device, data: Any) -> Any:
    """The same data there."""
    if isinstance(data, tuple):
        return tuple(on(device, part) for part in data)
    return data.to(device) if isinstance(data, torch.Tensor) else data


def prepared(name: str, device: torch.device) -> Case:
    """A case on the device, always the same."""
    torch.manual_seed(0)
    case = CASES[name]()
    return case._replace(
        module=case.module.to(device), inputs=on(device, case.inputs), targets=on(device, case.targets)
    )


def plain(case: Case) -> torch.Tensor:
    """f and the gradient by torch alone."""
    for parameter in case.module.parameters():
        parameter.grad = None
    loss = case.loss(case.module, case.inputs.detach(), case.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def ours(case: Case, **options: Any) -> BatchOptimizer:
    """The case in this library, loaded."""
    given: dict[str, Any] = {"loss_fn": case.loss, "reduction": "sum", "optimizer": None, "check_cut": False}
    found = BatchOptimizer(case.module, **{**given, **options})
    found.load(case.inputs, case.targets)
    return found


def evaluations(device: torch.device) -> list[Finding]:
    """Evaluations one after the other."""
    found = []
    for name in CASES:
        cases = [prepared(name, device) for _ in range(3)]
        with ours(cases[1], compile=False) as eager, ours(cases[2]) as recorded:
            ways: dict[str, Callable[[], object]] = {
                "torch": partial(plain, cases[0]),
                "eager": eager.evaluate,
                "graph": recorded.evaluate,
            }
            times = take_turns(ways, device)
            same = eager.evaluate().item() == recorded.evaluate().item()
            same = same and torch.equal(eager.grad_parameters, recorded.grad_parameters)
            said = recorded.workers[0].graph
        found.append(Finding(f"{name}: torch", times["torch"] * 1e3, "ms"))
        found.append(Finding(f"{name}: torch / eager", times["torch"] / times["eager"]))
        found.append(Finding(f"{name}: torch / {said}", times["torch"] / times["graph"]))
        found.append(Finding(f"{name}: bits of eager and recorded are equal", float(same), least=1))
    return found


def lbfgs(device: torch.device) -> list[Finding]:
    """One of 200 evaluations of L-BFGS, by torch and by this library."""
    found = []
    for name in WITH_AIM:
        seconds = by_torch(averaged(prepared(name, device)), device)
        found.append(Finding(f"{name}: an evaluation of torch.optim.LBFGS", seconds * 1e3, "ms"))
        for way, compiled, least in (("eager", False, None), ("recorded", None, 6.0)):
            case = averaged(prepared(name, device))
            own = {"compile": compiled, "reduction": "mean", "optimizer": partial(batchopt.LBFGS, **limits())}
            with ours(case, **own) as opt:
                for _ in range(9):
                    opt.evaluate()
                waited(device)
                before, began = opt.eval_counter, time.perf_counter()
                opt.optimize()
                waited(device)
                taken = (time.perf_counter() - began) / (opt.eval_counter - before)
            found.append(Finding(f"{name}: torch / ours, {way}", seconds / taken, least=least))
    return found


def limits() -> dict[str, Any]:
    """So many evaluations, and no tolerance."""
    none = {"tolerance_grad": 0, "tolerance_change": 0}
    return {"max_iter": EVALUATIONS, "max_eval": EVALUATIONS, "history_size": 50, **none}


def averaged(case: Case) -> Case:
    """The case whose loss is a mean."""
    scale = 1.0 / len(case.inputs)
    return case._replace(loss=lambda module, x, y: case.loss(module, x, y) * scale)


def by_torch(case: Case, device: torch.device) -> float:
    """The seconds of one of the evaluations of torch's L-BFGS."""
    optimizer = torch.optim.LBFGS(case.module.parameters(), line_search_fn="strong_wolfe", **limits())
    count = 0

    def closure() -> torch.Tensor:
        nonlocal count
        count += 1
        return plain(case)

    closure()
    waited(device)
    began, count = time.perf_counter(), 0
    optimizer.step(closure)  # type: ignore[no-untyped-call]
    waited(device)
    return (time.perf_counter() - began) / count


def memory(device: torch.device) -> list[Finding]:
    """Time and memory of 2,000,000 points, whole and in chunks."""
    found: list[Finding] = []
    whole = 0.0, 0.0
    for size in (None, *CHUNKS, "auto"):
        torch.manual_seed(0)
        case = burgers(POINTS, torch.float32, 0.0)
        case = case._replace(module=layers(2, 64, 64, 64, 64, 1).to(device), inputs=case.inputs.to(device))
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        with ours(case, chunk_size=size) as opt:
            seconds = take_turns({"": opt.evaluate}, device, rounds=3)[""]
            peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        whole = (seconds, peak) if size is None else whole
        aims = (1.15, 0.08) if size == 100_000 else (None, None)
        what = f"chunks of {size}" if size else "whole"
        found.append(Finding(f"{POINTS} points, {what}", seconds * 1e3, "ms"))
        found.append(Finding(f"{POINTS} points, {what}: memory", peak, "GiB"))
        found.append(Finding(f"{POINTS} points, {what}: time / whole", seconds / whole[0], most=aims[0]))
        found.append(Finding(f"{POINTS} points, {what}: memory / whole", peak / (whole[1] or 1.0), most=aims[1]))
    return found


def sgd(device: torch.device) -> list[Finding]:
    """A step of SGD on mini-batches."""
    found = []
    torch.manual_seed(0)
    x, y = torch.randn(8192, 784, device=device), torch.randint(0, 10, (8192,), device=device)
    criterion = nn.CrossEntropyLoss()
    for size in (64, 8192):
        nets = [layers(784, 256, 10).to(device) for _ in range(3)]
        plain_sgd = torch.optim.SGD(nets[0].parameters(), lr=0.01)

        def step(size: int = size, net: nn.Module = nets[0], optimizer: Any = plain_sgd) -> None:
            optimizer.zero_grad()
            criterion(net(x[:size]), y[:size]).backward()
            optimizer.step()

        options: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.01)}
        with (
            BatchOptimizer(nets[1], criterion, **options, compile=False) as eager,
            BatchOptimizer(nets[2], criterion, **options) as recorded,
        ):
            ways: dict[str, Callable[[], object]] = {
                "torch": step,
                "eager": partial(eager.step, x[:size], y[:size]),
                "graph": partial(recorded.step, x[:size], y[:size]),
            }
            times = take_turns(ways, device)
        found.append(Finding(f"SGD, {size} samples: torch", times["torch"] * 1e3, "ms"))
        found.append(Finding(f"SGD, {size} samples: torch / eager", times["torch"] / times["eager"]))
        found.append(Finding(f"SGD, {size} samples: torch / recorded", times["torch"] / times["graph"], least=2.0))
    return found


PARTS = {"evaluations": evaluations, "lbfgs": lbfgs, "memory": memory, "sgd": sgd}


def main() -> None:
    """Measure and print; publish what a GPU has shown."""
    global EVALUATIONS, POINTS, CHUNKS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cpu":
        print("no GPU here: what follows shows only that it runs")
        EVALUATIONS, POINTS, CHUNKS = 20, 2_000, (500,)
    else:
        print(torch.cuda.get_device_name(device))
    findings = []
    for name in given.only:
        found = PARTS[name](device)
        print(table(found), flush=True)
        findings += found
    if device.type != "cpu":
        publish("gpu", findings, {"device": torch.cuda.get_device_name(device)})


if __name__ == "__main__":
    main()
