"""The doctor is silent on right models of many kinds, whatever their precision: each is written small here as its kind
is in the libraries that have it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchopt import LBFGS, BatchOptimizer


@dataclass
class Case:
    """A right model, its loss and a batch."""

    module: nn.Module
    criterion: Any
    inputs: Any
    targets: Any
    options: dict[str, Any] = field(default_factory=dict)


class Flow(nn.Module):
    """An ordinary differential equation, solved by the adaptive pair of Bogacki and Shampine: the error of all samples
    together says how long the next step is."""

    def __init__(self, tolerance: float) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.tolerance = tolerance

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        t, step = 0.0, 0.1
        while t < 1:
            step = min(step, 1 - t)
            one = self.field(y)
            two = self.field(y + step / 2 * one)
            three = self.field(y + step * 3 / 4 * two)
            new = y + step / 9 * (2 * one + 3 * two + 4 * three)
            with torch.no_grad():
                off = step * (-5 / 72 * one + two / 12 + three / 9 - self.field(new) / 8)
                error = off.square().mean().sqrt().item() / self.tolerance
            if error <= 1:
                t, y = t + step, new
            step *= min(max(0.9 * max(error, 1e-10) ** (-1 / 3), 0.2), 5.0)
        return y


class RmsNorm(nn.Module):
    """Normalises in single precision, as language models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        single = x.float()
        return self.weight * (single * torch.rsqrt(single.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """Causal attention, whose softmax is in single precision, and two layers; it keeps its attention to look at."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.other = RmsNorm(width), RmsNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.attention: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        self.attention = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + self.out(self.attention.to(v.dtype) @ v)
        y: torch.Tensor = x + self.down(functional.silu(self.up(self.other(x))))
        return y


class Gpt(nn.Module):
    """A small language model, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.norm, self.head = RmsNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.norm(x)).transpose(1, 2)
        return y


class Gnn(nn.Module):
    """Passes messages along edges and sums the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.read = nn.Linear(6, 5), nn.Linear(8, 3), nn.Linear(3, 1)

    def forward(self, graphs: dict[str, torch.Tensor]) -> torch.Tensor:
        x, (source, target) = graphs["nodes"], graphs["edges"]
        for _ in range(2):
            messages = functional.silu(self.message(torch.cat([x[source], x[target]], 1)))
            sums = messages.new_zeros(len(x), 5).index_add(0, target, messages)
            x = x + torch.tanh(self.update(torch.cat([x, sums], 1)))
        read = self.read(x)
        energies: torch.Tensor = read.new_zeros(int(graphs["of"][-1]) + 1, 1).index_add(0, graphs["of"], read)[:, 0]
        return energies


def collate(pairs: list[Any]) -> Any:
    """One large graph of many."""
    at, nodes, edges, of = 0, [], [], []
    for i, (graph, _) in enumerate(pairs):
        nodes.append(graph["nodes"])
        edges.append(graph["edges"] + at)
        of.append(torch.full((len(graph["nodes"]),), i))
        at += len(graph["nodes"])
    graphs = {"nodes": torch.cat(nodes), "edges": torch.cat(edges, 1), "of": torch.cat(of)}
    return graphs, torch.stack([energy for _, energy in pairs])


class Mixture(nn.Module):
    """The negative log likelihood of a mixture of Gaussians: the module is its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.means, self.scales = (nn.Parameter(torch.randn(*shape)) for shape in ((4,), (4, 2), (4, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = ((x[:, None] - self.means) * torch.exp(-self.scales)).square().sum(-1)
        logs = self.logits.log_softmax(0) - squares / 2 - self.scales.sum(-1)
        return -logs.logsumexp(1).mean()


class Coarse(nn.Module):
    """Computes in half precision, and sums in single."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = self.net(x.float())
        return y.float()


def ode(tolerance: float) -> Case:
    """Data of a flow."""
    return Case(Flow(tolerance), nn.MSELoss(), torch.randn(23, 3), torch.randn(23, 3))


def gpt() -> Case:
    """Sentences, with padding at their ends."""
    tokens = torch.randint(0, 11, (13, 6))
    targets = torch.where(torch.arange(6) < torch.randint(2, 7, (13, 1)), tokens.roll(-1, 1), -100)
    return Case(Gpt(), nn.CrossEntropyLoss(), tokens, targets)


def gnn() -> Case:
    """Graphs of different sizes."""
    graphs = [{"nodes": torch.randn(n, 3), "edges": torch.randint(0, n, (2, 3 * n))} for n in (2, 5, 3, 4, 6, 2, 7, 3)]
    return Case(Gnn(), nn.MSELoss(), graphs, list(torch.randn(8)), {"collate_fn": collate})


def spectral_norm() -> Case:
    """In eval, where its vectors are constants."""
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
    module = nn.Sequential(normed, nn.Tanh(), nn.Linear(6, 2))
    module(torch.randn(3, 4))
    return Case(module.eval(), nn.SmoothL1Loss(), torch.randn(21, 4), torch.randn(21, 2))


def batch_norm() -> Case:
    """With running statistics."""
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    module(torch.randn(50, 4))
    return Case(module.eval(), nn.CrossEntropyLoss(torch.rand(3)), torch.randn(31, 4), torch.randint(0, 3, (31,)))


def transformer() -> Case:
    """Torch's own, with dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return Case(nn.Sequential(layer, nn.Linear(8, 3)), nn.MSELoss(), torch.randn(12, 5, 8), torch.randn(12, 5, 3))


CASES: dict[str, Callable[[], Case]] = {
    "adaptive ode, 1e-4": lambda: ode(1e-4),
    "adaptive ode, 1e-6": lambda: ode(1e-6),
    "language model": gpt,
    "graph network": gnn,
    "spectral norm": spectral_norm,
    "mixture": lambda: Case(Mixture(), None, torch.randn(41, 2), None),
    "batch norm in eval": batch_norm,
    "transformer with dropout": transformer,
    "half precision": lambda: Case(Coarse(), nn.MSELoss(), torch.randn(27, 4), torch.randn(27, 2)),
    "relu": lambda: Case(
        nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)),
        nn.L1Loss(),
        torch.randn(64, 4),
        torch.randn(64, 1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "adaptive ode, 1e-6" else n for n in CASES]
)
def test_the_doctor_is_silent_on_right_models(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    case = CASES[name]()
    optimizer = functools.partial(LBFGS, max_iter=4, line_search_fn=None)
    with BatchOptimizer(case.module, case.criterion, optimizer=optimizer, **case.options) as opt:
        found = opt.check(case.inputs, case.targets)
        assert found.healthy, str(found)
        opt.step(case.inputs, case.targets)  # nearer to a minimum the slope is less of f
        found = opt.check(case.inputs, case.targets)
        assert found.healthy, str(found)


@pytest.mark.rows
@pytest.mark.parametrize("captured", ["by a closure", "by a partial", "by a method"])
def test_the_doctor_copies_a_module_that_the_loss_captured(captured: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def misfit(net: nn.Module, _: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = (net(x) - y).square().mean()
        return value

    class Problem:
        def __init__(self) -> None:
            self.net = module

        def loss(self, _: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return misfit(self.net, _, x, y)

    def inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return misfit(module, module, x, y)

    loss_fns: dict[str, Any] = {
        "by a closure": lambda _, x, y: inner(x, y),
        "by a partial": functools.partial(misfit, module),
        "by a method": Problem().loss,
    }
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    with BatchOptimizer(module, loss_fn=loss_fns[captured]) as opt:
        found = opt.check(x, y)
        assert found.healthy, str(found)
        assert opt.step(x, y) == pytest.approx(inner(x, y).item(), rel=1e-5)
