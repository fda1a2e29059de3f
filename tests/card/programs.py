"""What is evaluated on cards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchopt import CG, LBFGS, LevenbergMarquardt, SSBroyden


def residual(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of u_x + u u_y = y: derivatives of derivatives are taken."""
    x = x.requires_grad_()
    u = module(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    found: torch.Tensor = slope[:, :1] + u * slope[:, 1:] - y
    return found


def square(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = residual(module, x, y).square().mean()
    return found


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.rand(40, k, dtype=torch.float64, generator=generator) for k in (2, 1))  # type: ignore[return-value]


def there(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data()
    return x.to(device), y.to(device)


def short(optimizer: str) -> Any:
    """The optimizer of that name, with few iterations in a step."""
    ours = {"cg": CG, "lbfgs": LBFGS, "ssbroyden": SSBroyden, "lm": LevenbergMarquardt}
    if optimizer == "torch's lbfgs":
        return lambda params: torch.optim.LBFGS(params, max_iter=3, line_search_fn="strong_wolfe")
    kind: Any = ours.get(optimizer)
    return optimizer if kind is None else lambda params: kind(params, max_iter=8)
