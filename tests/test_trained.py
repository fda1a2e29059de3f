"""What requires grad and is not in X would never be trained: it is refused by name, before a process starts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Term

NOISE = nn.Parameter(torch.zeros(()))
WORKERS = pytest.mark.parametrize("parallelize", [1, 2])


class Likelihood(nn.Module):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.zeros(1))


variable = torch.tensor(1.0, requires_grad=True)
weight = nn.Parameter(torch.ones(()))


class Hidden(nn.Module):
    """With a module in a list, which torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.others = nn.Linear(2, 2), [nn.Linear(2, 2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.others[0](self.first(x))
        return y


def scaled(scale: torch.Tensor, m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (m(x) * scale).square().mean()
    return found


def captures() -> Any:
    found = Likelihood()
    return lambda m, x, y: (m(x) * found.noise.exp()).mean()


def learned() -> Any:
    found = weight
    return {"one": Term(lambda m, x, y: m(x).mean()), "two": Term(lambda m, x, y: m(x).mean() * found)}


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a captured parameter": (
        nn.Linear(2, 1),
        {"loss_fn": captures()},
        r"'loss_fn\.found\.noise' is a parameter of shape \(1,\)",
    ),
    "a variable": (
        nn.Linear(2, 1),
        {"loss_fn": partial(scaled, variable)},
        r"'loss_fn\.args\[0\]' is a tensor of shape \(\) that requires grad",
    ),
    "a computed variable": (nn.Linear(2, 1), {"loss_fn": partial(scaled, variable.exp())}, "requires grad"),
    "a learned weight": (nn.Linear(2, 1), {"terms": learned()}, r"'loss_fn\[1\]\.found'"),
    "a module in a list": (
        Hidden(),
        {"criterion": nn.MSELoss()},
        r"'module\.others\[0\]\.(weight|bias)' is a parameter",
    ),
    "a global": (
        nn.Linear(2, 1),
        {"criterion": eval("lambda y, t: y.mean() * NOISE", {"NOISE": NOISE})},
        r"'criterion\.NOISE'",
    ),
}


@WORKERS
@pytest.mark.parametrize("case", REFUSED)
def test_what_requires_grad_and_is_not_in_x_is_refused_by_name(case: str, parallelize: int) -> None:
    module, options, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        BatchOptimizer(module, **options, parallelize=parallelize)


def test_what_is_in_x_or_requires_no_grad_is_not_refused() -> None:
    both = nn.ModuleDict({"net": nn.Linear(2, 1), "likelihood": Likelihood()})
    together: Any = lambda m, x, y: (m["net"](x) * m["likelihood"].noise.exp()).mean()  # noqa: E731
    BatchOptimizer(both, loss_fn=together).close()
    hidden = Hidden()
    hidden.others[0].requires_grad_(False)
    BatchOptimizer(hidden, nn.MSELoss()).close()
    with BatchOptimizer(nn.Linear(2, 1), loss_fn=partial(scaled, torch.tensor(1.0)), optimizer=None) as opt:
        opt.load(torch.ones(4, 2))
        opt.evaluate()
