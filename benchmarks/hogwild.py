"""How fast do workers step without waiting for each other, and how far do they get?

An embedding of 100,000 words with sparse gradients, which is to predict neighbours of words: skip-gram with 5 negative
samples a pair, mini-batches of 256 pairs. One epoch of 102,400 pairs each, in turn: SGD by torch in one process, one
and two workers of `hogwild`, and synchronous steps (`steps`, each mini-batch over two workers). The loss over all
pairs before and after says that steps are not lost. Apart: the first call of new workers, in which torch imports what
its optimizers need, a second or so; here it has 16 mini-batches and moves nothing.

    python -m benchmarks.hogwild [--pairs 102400] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from batchopt import BatchOptimizer, hogwild
from benchmarks.findings import Finding, publish

WORDS, WIDTH, NEGATIVES, SIZE, RATE = 100_000, 64, 5, 256, 20.0


class SkipGram(nn.Module):
    """The scores of a word with its neighbour and with some others."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.contexts = nn.Embedding(WORDS, WIDTH, sparse=True)
        nn.init.normal_(self.words.weight, std=0.1)
        nn.init.normal_(self.contexts.weight, std=0.1)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """`pairs`: shape (samples, 2 + negatives)."""
        scores: torch.Tensor = (self.words(pairs[:, :1]) * self.contexts(pairs[:, 1:])).sum(-1)
        return scores


def criterion(scores: torch.Tensor) -> torch.Tensor:
    """The neighbour is to score high, the others low."""
    signs = torch.tensor([-1.0] + [1.0] * NEGATIVES)
    return nn.functional.softplus(signs * scores).mean()


def sgd(parameters: object) -> torch.optim.Optimizer:
    """Each step moves the rows that were looked up."""
    return torch.optim.SGD(parameters, lr=RATE)  # type: ignore[arg-type]


def data(pairs: int) -> torch.Tensor:
    """Words by their frequency, each beside a neighbour that depends on it."""
    words = (torch.rand(pairs).pow(3) * WORDS).long()
    neighbours = (words + torch.randint(1, 4, (pairs,))) % WORDS
    return torch.cat([torch.stack([words, neighbours], 1), torch.randint(0, WORDS, (pairs, NEGATIVES))], 1)


def plain(module: nn.Module, pairs: torch.Tensor) -> None:
    """By torch alone."""
    torch.set_num_threads(1)  # for so small steps the fastest
    optimizer = sgd(module.parameters())
    for batch in pairs.split(SIZE):  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        criterion(module(batch)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def wild(workers: int) -> Callable[[nn.Module, torch.Tensor], None]:
    """By so many workers that do not wait."""

    def run(module: nn.Module, pairs: torch.Tensor) -> None:
        with BatchOptimizer(module, criterion, optimizer=None, parallelize=workers, backend="process") as opt:
            opt.run_on_workers(repr)
            started = time.perf_counter()
            hogwild(opt, pairs[: 16 * SIZE], lambda p: torch.optim.SGD(p, lr=0.0), batch_size=SIZE)  # makes optimizers
            began = time.perf_counter()
            hogwild(opt, pairs, sgd, batch_size=SIZE, shuffle=False)
            run.seconds = time.perf_counter() - began  # type: ignore[attr-defined]
            run.first = began - started  # type: ignore[attr-defined]

    return run


def synchronous(module: nn.Module, pairs: torch.Tensor) -> None:
    """Each mini-batch over two workers; dense gradients, for sums have every element."""
    with BatchOptimizer(module, criterion, optimizer=sgd, parallelize=2) as opt:
        opt.run_on_workers(repr)
        began = time.perf_counter()
        for _ in opt.steps(pairs[: 20 * SIZE].split(SIZE)):  # type: ignore[no-untyped-call]
            pass
        synchronous.seconds = (time.perf_counter() - began) * len(pairs) / (20 * SIZE)  # type: ignore[attr-defined]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=409_600)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.manual_seed(0)
    pairs = data(given.pairs)
    ways: dict[str, Callable[[nn.Module, torch.Tensor], None]] = {
        "torch, one process": plain,
        "hogwild, 1 worker": wild(1),
        "hogwild, 2 workers": wild(2),
        "steps, 2 workers": synchronous,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for _ in range(given.rounds):
        for name, way in ways.items():
            torch.manual_seed(1)
            module = SkipGram()
            with torch.no_grad():
                losses["before"] = criterion(module(pairs)).item()
            began = time.perf_counter()
            way(module, pairs)
            seconds[name].append(getattr(way, "seconds", time.perf_counter() - began))
            with torch.no_grad():
                losses[name] = criterion(module(pairs)).item()
    rate = {name: given.pairs / statistics.median(found) for name, found in seconds.items()}
    findings = [Finding(f"{name}: pairs a second", found) for name, found in rate.items()]
    findings += [Finding(f"loss, {name}", loss) for name, loss in losses.items() if "steps" not in name]
    first = getattr(ways["hogwild, 2 workers"], "first", 0.0)
    findings.append(Finding("hogwild, 2 workers: the first call", first, "s"))
    gain = rate["hogwild, 2 workers"] / rate["torch, one process"]
    findings.append(Finding("hogwild, 2 workers / torch", gain, least=1.5))
    publish("hogwild", findings, {"seconds": seconds})


if __name__ == "__main__":
    main()
