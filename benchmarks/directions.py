"""What a direction of L-BFGS costs: ours in compact form, and torch's recursion.

Two sizes: 10,000 parameters with a history of 100, float32 and float64, where Python and caches count; and 8.4 million
with 50, where memory does: beside the time to read the history twice, by all threads, measured in the same run.

    python -m benchmarks.directions
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from threading import Thread

import torch

from batchopt._machine.cores import torch_threads
from batchopt.optim.curvature import Curvature
from benchmarks.findings import Finding, publish

REPEATS = 15


class Recursion:
    """The two loops, as torch.optim.LBFGS does them: lists of vectors."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._steps = [s for s, _ in pairs]
        self._changes = [y for _, y in pairs]
        self._inverse = [1.0 / y.dot(s) for s, y in pairs]
        self._scale = 1.0 / (self._inverse[-1] * self._changes[-1].dot(self._changes[-1]))

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        """The direction."""
        count = len(self._steps)
        alphas = [torch.empty(0)] * count
        q = gradient.neg()
        for i in range(count - 1, -1, -1):
            alphas[i] = self._steps[i].dot(q) * self._inverse[i]
            q.add_(self._changes[i], alpha=-alphas[i])  # type: ignore[arg-type]  # as torch does it
        d = torch.mul(q, self._scale)
        for i in range(count):
            beta = self._changes[i].dot(d) * self._inverse[i]
            d.add_(self._steps[i], alpha=alphas[i] - beta)  # type: ignore[arg-type]
        return d


def milliseconds(arms: dict[str, Callable[[], object]], burst: int) -> dict[str, float]:
    """The median of each arm, in turn, `burst` times in a row: then what fits the caches is there."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(REPEATS):
        for name, arm in arms.items():
            for _ in range(burst):
                began = time.perf_counter()
                arm()
                times[name].append(time.perf_counter() - began)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def read(memory: torch.Tensor) -> int:
    """All of it, once, with all threads: half each for two; returns its bytes."""
    parts = torch.chunk(memory.view(-1), torch.get_num_threads())
    with torch_threads(1):
        helpers = [Thread(target=part.sum) for part in parts]
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()
    return memory.nbytes


def measure(size: int, history: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of one direction."""
    torch.manual_seed(0)
    diagonal = torch.rand(size, dtype=dtype) + 0.1
    curvature = Curvature(size, history, dtype, torch.device("cpu"))
    x = torch.randn(size, dtype=dtype)
    pairs = []
    for _ in range(history):
        after = x + torch.randn(size, dtype=dtype)
        curvature.add(after - x, diagonal * x, diagonal * after)
        pairs.append((after - x, diagonal * (after - x)))
        x = after
    gradient, out = diagonal * x, torch.empty_like(x)
    ours, theirs = curvature.times(gradient, out), (recursion := Recursion(pairs))(gradient)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3 * theirs.abs().max().item())
    memory = torch.stack([vector for pair in pairs for vector in pair])
    return milliseconds(
        {
            "ours": lambda: curvature.times(gradient, out),
            "recursion": lambda: recursion(gradient),
            "read twice": lambda: [read(part) for part in (memory, memory)],
        },
        burst=10 if size < 100_000 else 1,
    )


def main() -> None:
    """Measure and publish."""
    details = {}
    findings = []
    for dtype in (torch.float32, torch.float64):
        name = f"10,000 parameters, history 100, {str(dtype).removeprefix('torch.')}"
        details[name] = found = measure(10_000, 100, dtype)
        findings.append(Finding(f"{name}: ours", found["ours"], "ms"))
        findings.append(Finding(f"{name}: torch's recursion / ours", found["recursion"] / found["ours"], least=5))
    name = "8.4 million parameters, history 50, float32"
    details[name] = found = measure(8_400_000, 50, torch.float32)
    findings.append(Finding(f"{name}: ours", found["ours"], "ms"))
    findings.append(Finding(f"{name}: torch's recursion / ours", found["recursion"] / found["ours"]))
    findings.append(Finding(f"{name}: ours / reading the history twice", found["ours"] / found["read twice"], most=1.2))
    publish("directions", findings, details)


if __name__ == "__main__":
    main()
