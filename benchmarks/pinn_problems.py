"""Differential equations that papers on physics-informed networks are judged by, with solutions to judge by.

Each is learned by three hidden layers of 20, the last by four, tanh, in float64, from residuals: terms of drawn points,
which add up as mean squares times their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

WIDTHS = 20, 20, 20
NU = 0.01 / math.pi
DIFFUSION = 1e-4
BETA = 40.0
WAVES = 1.0, 4.0

Array = npt.NDArray[np.float64]
Residual = Callable[[Any, Tensor, Any], Tensor]


@dataclass(frozen=True)
class Part:
    """A term: its residual, its weight, and `draw(count, seed)`, points with their targets, if any. `fixed`: so many
    points are all there are, as measurements are."""

    residual: Residual
    draw: Callable[[int, int], Any]
    points: int = 500
    weight: float = 1.0
    fixed: bool = False


@dataclass(frozen=True)
class Problem:
    """`network(seed)` is to minimise the parts; `error` judges it."""

    name: str
    network: Callable[[int], Network]
    parts: Mapping[str, Part]
    error: Callable[[Network], float]


class Network(nn.Module):
    """u of points, shape `(samples, 2)` to `(samples, 1)`. `features` of points are what the first layer is given;
    `unknowns` are numbers to be found beside the layers' parameters."""

    def __init__(
        self,
        features: Callable[[Tensor], Tensor],
        seed: int,
        unknowns: Mapping[str, float] | None = None,
        widths: Sequence[int] = WIDTHS,
    ) -> None:
        super().__init__()
        self.features = features
        generator = torch.Generator().manual_seed(seed)
        first = features(torch.zeros(1, 2)).shape[1]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((first, *widths, 1)):
            linear = nn.Linear(inputs, outputs, dtype=torch.float64)
            nn.init.xavier_normal_(linear.weight, generator=generator)
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])
        for name, value in (unknowns or {}).items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value, dtype=torch.float64)))

    def forward(self, at: Tensor) -> Tensor:
        """u."""
        u: Tensor = self.layers(self.features(at))
        return u


# ---- points and derivatives


def draw(low: tuple[float, float], high: tuple[float, float], count: int, seed: int) -> Tensor:
    """Points of a rectangle, of a scrambled Sobol sequence: shape `(count, 2)`."""
    sequence: Any = torch.quasirandom.SobolEngine
    unit: Tensor = sequence(2, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    below = torch.tensor(low, dtype=torch.float64)
    return below + unit * (torch.tensor(high, dtype=torch.float64) - below)


def derivatives(module: Any, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u, shape `(samples,)`; its two first derivatives, and the two of each of these: `(samples, 2)`,
    `(samples, 2, 2)`; with what they were computed from."""
    at = at.detach().requires_grad_()
    u = module(at)[:, 0]
    (first,) = torch.autograd.grad(u.sum(), at, create_graph=True)
    second = [torch.autograd.grad(first[:, i].sum(), at, create_graph=True)[0] for i in range(2)]
    return u, first, torch.stack(second, 1)


def along_second(module: Any, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u, its first derivatives, and the second one along the second coordinate, which costs half of `derivatives`."""
    at = at.detach().requires_grad_()
    u = module(at)[:, 0]
    (first,) = torch.autograd.grad(u.sum(), at, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), at, create_graph=True)
    return u, first, second[:, 1]


def misfit(module: Any, at: Tensor, values: Tensor) -> Tensor:
    """What the network is from known values."""
    found: Tensor = module(at)[:, 0] - values
    return found


def relative(found: Tensor, solution: Array) -> float:
    """The error in the L2 norm over a grid, relative."""
    exact = torch.from_numpy(solution)
    return float((found - exact).norm() / exact.norm())


def on_grid(solution: Callable[[], tuple[Array, Array, Array]], module: Network) -> float:
    """The relative error on the grid that comes with the solution."""
    one, other, values = solution()
    with torch.no_grad():
        return relative(module(torch.from_numpy(np.stack((one, other), -1)))[..., 0], values)


def grid(low: tuple[float, float], high: tuple[float, float]) -> tuple[Array, Array]:
    """101 x 257 points of a rectangle."""
    axes = np.linspace(low[0], high[0], 101), np.linspace(low[1], high[1], 257)
    one, other = np.meshgrid(*axes, indexing="ij")
    return one, other


# ---- Burgers: u_t + u u_x = nu u_xx, u(0, x) = -sin(pi x), u(t, -1) = u(t, 1) = 0


@cache
def burgers_solution(nu: float = NU) -> tuple[Array, Array, Array]:
    """By Gauss-Hermite quadrature of the formula of Cole and Hopf (Basdevant and others, "Spectral and finite
    difference solutions of the Burgers equation", Computers and Fluids 14, 1986); 100 and 300 nodes agree to 1e-15."""
    t, x = grid((0, -1), (1, 1))
    return t, x, burgers(t, x, nu)


def burgers(t: Array, x: Array, nu: float = NU) -> Array:
    """The solution."""
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    y = x[..., None] - np.sqrt(4 * nu * t)[..., None] * nodes
    exponent = -np.cos(np.pi * y) / (2 * np.pi * nu)
    kernel = weights * np.exp(exponent - exponent.max(-1, keepdims=True))
    u: Array = -(np.sin(np.pi * y) * kernel).sum(-1) / kernel.sum(-1)
    return u


def plain(at: Tensor) -> Tensor:
    """t of 0 to 1, and x of -1 to 1, both from -1 to 1."""
    return torch.stack((2 * at[..., 0] - 1, at[..., 1]), -1)


def burgers_residual(module: Any, at: Tensor, _: None) -> Tensor:
    """What the equation leaves."""
    u, first, second = along_second(module, at)
    return first[:, 0] + u * first[:, 1] - NU * second


def burgers_start(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points at t = 0."""
    at = draw((0, -1), (0, 1), count, seed)
    return at, -torch.sin(math.pi * at[:, 1])


def sides(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points at x = -1 and x = 1, where u is 0."""
    at = draw((0, -1), (1, 1), count, seed)
    at[:, 1] = torch.copysign(torch.ones(count, dtype=torch.float64), at[:, 1])
    return at, torch.zeros(count, dtype=torch.float64)


# Raissi, Perdikaris and Karniadakis, arXiv:1711.10561, 2017.
BURGERS = Problem(
    "Burgers",
    partial(Network, plain),
    {
        "residual": Part(burgers_residual, partial(draw, (0, -1), (1, 1)), 0),
        "initial": Part(misfit, burgers_start),
        "boundary": Part(misfit, sides, 200),
    },
    partial(on_grid, burgers_solution),
)


# ---- Burgers with more diffusion, periodic: u_t + u u_x = 0.01 u_xx


MORE_NU = 0.01


def around(at: Tensor) -> Tensor:
    """t, and x as it comes round every 2."""
    angle = math.pi * (at[..., 1] + 1)
    return torch.stack((angle.cos(), angle.sin(), at[..., 0]), -1)


def diffusing_residual(module: Any, at: Tensor, _: None) -> Tensor:
    """What the equation leaves."""
    u, first, second = along_second(module, at)
    return first[:, 0] + u * first[:, 1] - MORE_NU * second


def even_start(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points at t = 0, at equal distances."""
    x = torch.linspace(-1, 1, count, dtype=torch.float64)
    return torch.stack((torch.zeros_like(x), x), 1), -torch.sin(math.pi * x)


# Webb, Jerad and Cartis, arXiv:2607.02194, 2026.
DIFFUSING = Problem(
    "Burgers, 0.01",
    partial(Network, around, widths=(20,) * 4),
    {
        "residual": Part(diffusing_residual, partial(draw, (0, -1), (1, 1)), 3000, 0.01, fixed=True),
        "initial": Part(misfit, even_start, 1000, fixed=True),
    },
    partial(on_grid, partial(burgers_solution, MORE_NU)),
)


# ---- Burgers, inverse: u_t + a u u_x = b u_xx, a = 1 and b = 0.01 / pi unknown, u known at 2,000 points


def inverse_residual(module: Any, at: Tensor, _: None) -> Tensor:
    """What the equation leaves, a column: so that a and b may be those of each sample."""
    u, first, second = along_second(module, at)
    left: Tensor = first[:, :1] + module.a * u[:, None] * first[:, 1:] - module.log_b.exp() * second[:, None]
    return left


def measured(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The solution at drawn points, without noise."""
    at = draw((0, -1), (1, 1), count, seed)
    return at, torch.from_numpy(burgers(at[:, 0].numpy(), at[:, 1].numpy()))


def coefficients(module: Network) -> float:
    """The larger of the relative errors of a and b."""
    found = dict(module.named_parameters())
    return max(abs(found["a"].item() - 1), abs(found["log_b"].exp().item() / NU - 1))


# Raissi, Perdikaris and Karniadakis, arXiv:1711.10566, 2017.
INVERSE = Problem(
    "Burgers, inverse",
    partial(Network, plain, unknowns={"a": 0.0, "log_b": -6.0}),
    {
        "residual": Part(inverse_residual, partial(draw, (0, -1), (1, 1)), 0),
        "data": Part(misfit, measured, 2000, fixed=True),
    },
    coefficients,
)


# ---- Allen-Cahn: u_t = 1e-4 u_xx + 5 u - 5 u^3, u(0, x) = x^2 cos(pi x), periodic over -1 <= x <= 1


@cache
def allen_cahn_solution() -> tuple[Array, Array, Array]:
    """By Fourier's series of 4,096 points and Dormand and Prince's method of order 8. Between this many points and half
    as many the relative difference is 8e-7, and it falls with the square: at x = 1 the initial slope jumps."""
    count = 4096
    x = -1 + 2 * np.arange(count) / count
    squares = (np.pi * np.fft.rfftfreq(count, 1 / count)) ** 2

    def slope(_: float, u: Array) -> Array:
        diffused: Array = np.fft.irfft(-DIFFUSION * squares * np.fft.rfft(u), count)
        return diffused + 5 * u - 5 * u**3

    t, at = grid((0, -1), (1, 1))
    first = x**2 * np.cos(np.pi * x)
    found = solve_ivp(slope, (0, 1), first, "DOP853", t[:, 0], rtol=1e-10, atol=1e-12, max_step=1e-3).y.T
    every = found[:, :: count // 256]
    return t, at, np.concatenate((every, every[:, :1]), 1)


def periodic(at: Tensor) -> Tensor:
    """t, and x as it comes round every 2."""
    angle = math.pi * at[..., 1]
    return torch.stack((2 * at[..., 0] - 1, angle.cos(), angle.sin()), -1)


def allen_cahn_residual(module: Any, at: Tensor, _: None) -> Tensor:
    """What the equation leaves."""
    u, first, second = along_second(module, at)
    return first[:, 0] - DIFFUSION * second - 5 * u + 5 * u**3


def allen_cahn_start(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points at t = 0."""
    at = draw((0, -1), (0, 1), count, seed)
    return at, at[:, 1] ** 2 * torch.cos(math.pi * at[:, 1])


# Raissi, Perdikaris and Karniadakis, arXiv:1711.10561, 2017; its coefficient 1e-4.
ALLEN_CAHN = Problem(
    "Allen-Cahn",
    partial(Network, periodic),
    {
        "residual": Part(allen_cahn_residual, partial(draw, (0, -1), (1, 1)), 0),
        "initial": Part(misfit, allen_cahn_start, weight=100.0),
    },
    partial(on_grid, allen_cahn_solution),
)


# ---- Convection: u_t + 40 u_x = 0, u(0, x) = sin(x), periodic over 0 <= x <= 2 pi


def convection_solution() -> tuple[Array, Array, Array]:
    """The wave that moves."""
    t, x = grid((0, 0), (1, 2 * math.pi))
    return t, x, np.sin(x - BETA * t)


def scaled(at: Tensor) -> Tensor:
    """t of 0 to 1, and x of 0 to 2 pi, both from -1 to 1."""
    return torch.stack((2 * at[..., 0] - 1, at[..., 1] / math.pi - 1), -1)


def convection_residual(module: Any, at: Tensor, _: None) -> Tensor:
    """What the equation leaves."""
    at = at.detach().requires_grad_()
    (first,) = torch.autograd.grad(module(at).sum(), at, create_graph=True)
    left: Tensor = first[:, 0] + BETA * first[:, 1]
    return left


def convection_start(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points at t = 0."""
    at = draw((0, 0), (0, 2 * math.pi), count, seed)
    return at, torch.sin(at[:, 1])


def jump(module: Any, at: Tensor, _: None) -> Tensor:
    """u at one side less u at the other."""
    over = torch.tensor([0.0, 2 * math.pi], dtype=at.dtype)
    difference: Tensor = module(at + over)[:, 0] - module(at)[:, 0]
    return difference


# Krishnapriyan, Gholami, Zhe, Kirby and Mahoney, NeurIPS 2021.
CONVECTION = Problem(
    "convection, 40",
    partial(Network, scaled),
    {
        "residual": Part(convection_residual, partial(draw, (0, 0), (1, 2 * math.pi)), 0),
        "initial": Part(misfit, convection_start, weight=100.0),
        "periodic": Part(jump, partial(draw, (0, 0), (1, 0)), 200, weight=100.0),
    },
    partial(on_grid, convection_solution),
)


# ---- Helmholtz: u_xx + u_yy + u = q on a square, u = 0 on its edges, u = sin(pi x) sin(4 pi y)


def helmholtz_solution() -> tuple[Array, Array, Array]:
    """What q was made for."""
    x, y = grid((-1, -1), (1, 1))
    return x, y, np.sin(WAVES[0] * np.pi * x) * np.sin(WAVES[1] * np.pi * y)


def as_they_are(at: Tensor) -> Tensor:
    """The coordinates."""
    return at


def helmholtz_residual(module: Any, at: Tensor, _: None) -> Tensor:
    """What the equation leaves."""
    u, _first, second = derivatives(module, at)
    exact = torch.sin(WAVES[0] * math.pi * at[:, 0]) * torch.sin(WAVES[1] * math.pi * at[:, 1])
    source = (1 - (WAVES[0] ** 2 + WAVES[1] ** 2) * math.pi**2) * exact
    return second[:, 0, 0] + second[:, 1, 1] + u - source


def edges(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of the four edges, where u is 0."""
    which, along = draw((0, -1), (4, 1), count, seed).T
    side = torch.where(which.long() % 2 == 0, -1.0, 1.0).double()
    at = torch.where((which < 2)[:, None], torch.stack((side, along), 1), torch.stack((along, side), 1))
    return at, torch.zeros(count, dtype=torch.float64)


# Wang, Teng and Perdikaris, SIAM Journal on Scientific Computing 43, 2021.
HELMHOLTZ = Problem(
    "Helmholtz",
    partial(Network, as_they_are),
    {
        "residual": Part(helmholtz_residual, partial(draw, (-1, -1), (1, 1)), 0),
        "boundary": Part(misfit, edges, weight=100.0),
    },
    partial(on_grid, helmholtz_solution),
)

PROBLEMS = {problem.name: problem for problem in (BURGERS, ALLEN_CAHN, CONVECTION, HELMHOLTZ, INVERSE, DIFFUSING)}
