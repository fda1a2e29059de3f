"""Standard problems of unconstrained minimisation, with their published starts and minimal values.

Two sources, which the docstrings cite as:

- MGH: J. J. Moré, B. S. Garbow and K. E. Hillstrom, "Testing unconstrained optimization software", ACM TOMS 7(1), 1981,
  pp. 17-41, problems 1 to 35. With a variable number of variables, `n`, that of `start` is one of those in use.
- CUTEst: N. I. M. Gould, D. Orban and Ph. L. Toint, "CUTEst: a constrained and unconstrained testing environment with
  safe threads", Computational Optimization and Applications 60, 2015, pp. 545-557. The sums are over all i for which
  the variables exist.

One more is in M. Jamil and X.-S. Yang, "A literature survey of benchmark functions for global optimisation problems",
Int. J. Mathematical Modelling and Numerical Optimisation 4(2), 2013, pp. 150-194; its far start is in the tests of JAX.

The minimal values that are not exact agree with those published, and have more digits: those that a minimisation
reaches where float64 ends. Some local ones are approached only at infinity: those of MGH 8 and 15 are given there,
those of MGH 6, 18 and 19 in the tests of A. Kuntsevich and F. Kappel, "SolvOpt", University of Graz, 1997.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Minimise `function`, of a vector, from `start`; `minima` are its known minimal values, the global one first."""

    name: str
    function: Callable[[Tensor], Tensor]
    start: tuple[float, ...]
    minima: tuple[float, ...]


# What MGH fits.
DATA: dict[str, list[float]] = json.loads(Path(__file__).with_name("mgh.json").read_text())


def _squares(*residuals: Tensor) -> Tensor:
    """The sum of the squares of all residuals, each argument a number or a vector of them."""
    return torch.stack([residual.square().sum() for residual in residuals]).sum()


def _count(like: Tensor, last: int, first: int = 1) -> Tensor:
    """`first`, ..., `last`, of the dtype of `like`."""
    return torch.arange(first, last + 1, dtype=like.dtype, device=like.device)


def _data(like: Tensor, name: str) -> Tensor:
    """The data of that name, of the dtype of `like`."""
    return like.new_tensor(DATA[name])


def _neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The variables before and after each, 0 beyond the ends."""
    padded = torch.nn.functional.pad(x, (1, 1))
    return padded[:-2], padded[2:]


def _apart(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The function of a vector, given that of its elements."""
    return lambda x: function(*x.unbind())


def rosenbrock(x: Tensor) -> Tensor:
    """MGH 1; of more pairs, MGH 21."""
    odd, even = x[::2], x[1::2]
    return _squares(10 * (even - odd**2), 1 - odd)


def freudenstein_roth(x: Tensor) -> Tensor:
    """MGH 2; of more variables, the sum over all neighbours, FREUROTH of CUTEst."""
    x1, x2 = x[:-1], x[1:]
    return _squares(-13 + x1 + ((5 - x2) * x2 - 2) * x2, -29 + x1 + ((x2 + 1) * x2 - 14) * x2)


def powell_badly_scaled(x: Tensor) -> Tensor:
    """MGH 3."""
    return _squares(1e4 * x[0] * x[1] - 1, (-x).exp().sum() - 1.0001)


def brown_badly_scaled(x1: Tensor, x2: Tensor) -> Tensor:
    """MGH 4."""
    return _squares(x1 - 1e6, x2 - 2e-6, x1 * x2 - 2)


def beale(x1: Tensor, x2: Tensor) -> Tensor:
    """MGH 5."""
    return _squares(x1.new_tensor((1.5, 2.25, 2.625)) - x1 * (1 - x2 ** _count(x1, 3)))


def jennrich_sampson(x: Tensor) -> Tensor:
    """MGH 6, m = 10."""
    i = _count(x, 10)
    return _squares(2 + 2 * i - (i * x[0]).exp() - (i * x[1]).exp())


def helical_valley(x1: Tensor, x2: Tensor, x3: Tensor) -> Tensor:
    """MGH 7, whose angle jumps where x1 = 0 and x2 < 0."""
    theta = 0.25 + torch.atan2(-x1, x2) / (2 * math.pi)
    return _squares(10 * (x3 - 10 * theta), 10 * ((x1**2 + x2**2).sqrt() - 1), x3)


def bard(x1: Tensor, x2: Tensor, x3: Tensor) -> Tensor:
    """MGH 8."""
    u = _count(x1, 15)
    v = 16 - u
    return _squares(_data(x1, "bard") - (x1 + u / (v * x2 + torch.minimum(u, v) * x3)))


def gaussian(x1: Tensor, x2: Tensor, x3: Tensor) -> Tensor:
    """MGH 9."""
    t = (8 - _count(x1, 15)) / 2
    return _squares(x1 * (-x2 * (t - x3) ** 2 / 2).exp() - _data(x1, "gaussian"))


def meyer(x1: Tensor, x2: Tensor, x3: Tensor) -> Tensor:
    """MGH 10."""
    t = 45 + 5 * _count(x1, 16)
    return _squares(x1 * (x2 / (t + x3)).exp() - _data(x1, "meyer"))


def gulf(x1: Tensor, x2: Tensor, x3: Tensor) -> Tensor:
    """MGH 11, m = 99, with |y - x2| in place of the misprint |y m i x2|, as in CUTEst."""
    t = _count(x1, 99) / 100
    y = 25 + (-50 * t.log()) ** (2 / 3)
    return _squares((-((y - x2).abs() ** x3) / x1).exp() - t)


def box(x1: Tensor, x2: Tensor, x3: Tensor) -> Tensor:
    """MGH 12, m = 10."""
    t = _count(x1, 10) / 10
    return _squares((-t * x1).exp() - (-t * x2).exp() - x3 * ((-t).exp() - (-10 * t).exp()))


def powell_singular(x: Tensor) -> Tensor:
    """MGH 13; of more quadruples, MGH 22."""
    x1, x2, x3, x4 = x.reshape(-1, 4).unbind(1)
    return _squares(x1 + 10 * x2, 5**0.5 * (x3 - x4), (x2 - 2 * x3) ** 2, 10**0.5 * (x1 - x4) ** 2)


def wood(x: Tensor) -> Tensor:
    """MGH 14; of more quadruples, WOODS of CUTEst."""
    x1, x2, x3, x4 = x.reshape(-1, 4).unbind(1)
    coupled = _squares(10**0.5 * (x2 + x4 - 2), (x2 - x4) / 10**0.5)
    return _squares(10 * (x2 - x1**2), 1 - x1, 90**0.5 * (x4 - x3**2), 1 - x3) + coupled


def kowalik_osborne(x1: Tensor, x2: Tensor, x3: Tensor, x4: Tensor) -> Tensor:
    """MGH 15."""
    u = _data(x1, "kowalik_u")
    return _squares(_data(x1, "kowalik_y") - x1 * (u**2 + u * x2) / (u**2 + u * x3 + x4))


def brown_dennis(x1: Tensor, x2: Tensor, x3: Tensor, x4: Tensor) -> Tensor:
    """MGH 16, m = 20."""
    t = _count(x1, 20) / 5
    return _squares((x1 + t * x2 - t.exp()) ** 2 + (x3 + x4 * t.sin() - t.cos()) ** 2)


def osborne_1(x1: Tensor, x2: Tensor, x3: Tensor, x4: Tensor, x5: Tensor) -> Tensor:
    """MGH 17."""
    t = 10 * _count(x1, 32, first=0)
    return _squares(_data(x1, "osborne_1") - (x1 + x2 * (-t * x4).exp() + x3 * (-t * x5).exp()))


def biggs(x1: Tensor, x2: Tensor, x3: Tensor, x4: Tensor, x5: Tensor, x6: Tensor) -> Tensor:
    """MGH 18, m = 13."""
    t = _count(x1, 13) / 10
    y = (-t).exp() - 5 * (-10 * t).exp() + 3 * (-4 * t).exp()
    return _squares(x3 * (-t * x1).exp() - x4 * (-t * x2).exp() + x6 * (-t * x5).exp() - y)


def osborne_2(x: Tensor) -> Tensor:
    """MGH 19."""
    heights, decays, centres = x[:4], x[4:8], x[8:]
    t = _count(x, 64, first=0)[:, None] / 10
    shapes = torch.cat([t, (t - centres) ** 2], dim=1)
    return _squares(_data(x, "osborne_2") - (-shapes * decays).exp() @ heights)


def watson(x: Tensor) -> Tensor:
    """MGH 20."""
    t = _count(x, 29)[:, None] / 29
    power = _count(x, len(x) - 1, first=0)
    slope, value = (power * t ** (power - 1)) @ x, t**power @ x
    return _squares(slope - value**2 - 1, x[0], x[1] - x[0] ** 2 - 1)


def penalty_1(x: Tensor) -> Tensor:
    """MGH 23."""
    return _squares(1e-5**0.5 * (x - 1), x.square().sum() - 0.25)


def penalty_2(x: Tensor) -> Tensor:
    """MGH 24."""
    n = len(x)
    grown, powers = (x / 10).exp(), (_count(x, n) / 10).exp()
    pairs = grown[1:] + grown[:-1] - (powers[1:] + powers[:-1])
    weighted = (_count(x, n).flip(0) * x**2).sum()
    return _squares(x[0] - 0.2, 1e-5**0.5 * pairs, 1e-5**0.5 * (grown[1:] - math.exp(-0.1)), weighted - 1)


def variably_dimensioned(x: Tensor) -> Tensor:
    """MGH 25."""
    weighted = (_count(x, len(x)) * (x - 1)).sum()
    return _squares(x - 1, weighted, weighted**2)


def trigonometric(x: Tensor) -> Tensor:
    """MGH 26."""
    n = len(x)
    return _squares(n - x.cos().sum() + _count(x, n) * (1 - x.cos()) - x.sin())


def brown_almost_linear(x: Tensor) -> Tensor:
    """MGH 27."""
    return _squares(x[:-1] + x.sum() - (len(x) + 1), x.prod() - 1)


def discrete_boundary_value(x: Tensor) -> Tensor:
    """MGH 28."""
    h = 1 / (len(x) + 1)
    t = h * _count(x, len(x))
    before, after = _neighbours(x)
    return _squares(2 * x - before - after + h**2 * (x + t + 1) ** 3 / 2)


def discrete_integral_equation(x: Tensor) -> Tensor:
    """MGH 29."""
    h = 1 / (len(x) + 1)
    t = h * _count(x, len(x))
    cubes = (x + t + 1) ** 3
    below = (t * cubes).cumsum(0)
    rest = (1 - t) * cubes
    above = rest.sum() - rest.cumsum(0)
    return _squares(x + h * ((1 - t) * below + t * above) / 2)


def broyden_tridiagonal(x: Tensor) -> Tensor:
    """MGH 30."""
    before, after = _neighbours(x)
    return _squares((3 - 2 * x) * x - before - 2 * after + 1)


def broyden_banded(x: Tensor) -> Tensor:
    """MGH 31: each of 7 neighbours, 5 before and 1 after, itself left out."""
    terms = x * (1 + x)
    windows = torch.nn.functional.pad(terms, (5, 1)).unfold(0, 7, 1)
    return _squares(x * (2 + 5 * x**2) + 1 - (windows.sum(1) - terms))


def linear_full_rank(x: Tensor) -> Tensor:
    """MGH 32, m = 2n."""
    shift = x.sum() / len(x) + 1
    return _squares(x - shift, shift.expand(len(x)))


def linear_rank_1(x: Tensor) -> Tensor:
    """MGH 33, m = 2n."""
    n = len(x)
    return _squares(_count(x, 2 * n) * (_count(x, n) * x).sum() - 1)


def chebyquad(x: Tensor) -> Tensor:
    """MGH 35, m = n: the mean of each shifted Chebyshev polynomial, less its integral."""
    y = 2 * x - 1
    polynomials = [torch.ones_like(y), y]
    for _ in x[1:]:
        polynomials.append(2 * y * polynomials[-1] - polynomials[-2])
    means = torch.stack(polynomials[1:]).mean(1)
    integrals = [-1 / (i * i - 1) if i % 2 == 0 else 0.0 for i in range(1, len(x) + 1)]
    return _squares(means - x.new_tensor(integrals))


def arwhead(x: Tensor) -> Tensor:
    """ARWHEAD of CUTEst: sum of (x_i² + x_n²)² - 4 x_i + 3."""
    return ((x[:-1] ** 2 + x[-1] ** 2) ** 2 - 4 * x[:-1] + 3).sum()


def bdqrtic(x: Tensor) -> Tensor:
    """BDQRTIC of CUTEst: sum of (3 - 4 x_i)² + (x_i² + 2 x_{i+1}² + 3 x_{i+2}² + 4 x_{i+3}² + 5 x_n²)², i <= n - 4."""
    s = x**2
    return _squares(3 - 4 * x[:-4], s[:-4] + 2 * s[1:-3] + 3 * s[2:-2] + 4 * s[3:-1] + 5 * s[-1])


def cosine(x: Tensor) -> Tensor:
    """COSINE of CUTEst: sum of cos(x_i² - x_{i+1} / 2)."""
    return (x[:-1] ** 2 - x[1:] / 2).cos().sum()


def cragg_levy(x: Tensor) -> Tensor:
    """CRAGGLVY of CUTEst: Cragg and Levy's function of each four neighbours that start at an odd index."""
    x1, x2, x3, x4 = x.unfold(0, 4, 2).unbind(1)
    fourth = _squares((x1.exp() - x2) ** 2, ((x3 - x4).tan() + x3 - x4) ** 2)
    return fourth + _squares(10 * (x2 - x3) ** 3, x1**4, x4 - 1)


def dixon(x: Tensor) -> Tensor:
    """DIXON3DQ of CUTEst: (x_1 - 1)² + sum of (x_i - x_{i+1})², 2 <= i < n, + (x_n - 1)²."""
    return _squares(x[0] - 1, x[1:-1] - x[2:], x[-1] - 1)


def dqdrtic(x: Tensor) -> Tensor:
    """DQDRTIC of CUTEst: sum of x_i² + 100 x_{i+1}² + 100 x_{i+2}²."""
    return _squares(x[:-2], 10 * x[1:-1], 10 * x[2:])


def dqrtic(x: Tensor) -> Tensor:
    """DQRTIC of CUTEst: sum of (x_i - i)⁴."""
    return _squares((x - _count(x, len(x))) ** 2)


def edensch(x: Tensor) -> Tensor:
    """EDENSCH of CUTEst: 16 + sum of (x_i - 2)⁴ + (x_i x_{i+1} - 2 x_{i+1})² + (x_{i+1} + 1)²."""
    x1, x2 = x[:-1], x[1:]
    return 16 + _squares((x1 - 2) ** 2, (x1 - 2) * x2, x2 + 1)


def engval(x: Tensor) -> Tensor:
    """ENGVAL1 of CUTEst: sum of (x_i² + x_{i+1}²)² - 4 x_i + 3."""
    return ((x[:-1] ** 2 + x[1:] ** 2) ** 2 - 4 * x[:-1] + 3).sum()


def fletcher(x: Tensor) -> Tensor:
    """FLETCHCR of CUTEst, the chained Rosenbrock function: sum of 100 (x_{i+1} - x_i²)² + (1 - x_i)²."""
    return _squares(10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1])


def genrose(x: Tensor) -> Tensor:
    """GENROSE of CUTEst: 1 + sum of 100 (x_{i+1} - x_i²)² + (x_{i+1} - 1)²."""
    return 1 + _squares(10 * (x[1:] - x[:-1] ** 2), x[1:] - 1)


def liarwhd(x: Tensor) -> Tensor:
    """LIARWHD of CUTEst: sum of 4 (x_i² - x_1)² + (x_i - 1)²."""
    return _squares(2 * (x**2 - x[0]), x - 1)


def nondia(x: Tensor) -> Tensor:
    """NONDIA of CUTEst: (x_1 - 1)² + sum of 100 (x_1 - x_i²)², i < n."""
    return _squares(x[0] - 1, 10 * (x[0] - x[:-1] ** 2))


def nondquar(x: Tensor) -> Tensor:
    """NONDQUAR of CUTEst: (x_1 - x_2)² + (x_{n-1} - x_n)² + sum of (x_i + x_{i+1} + x_n)⁴, i <= n - 2."""
    return _squares(x[0] - x[1], x[-2] - x[-1], (x[:-2] + x[1:-1] + x[-1]) ** 2)


def power(x: Tensor) -> Tensor:
    """POWER of CUTEst: (sum of i x_i²)²."""
    return (_count(x, len(x)) * x**2).sum() ** 2


def tridia(x: Tensor) -> Tensor:
    """TRIDIA of CUTEst: (x_1 - 1)² + sum of i (2 x_i - x_{i-1})²."""
    return _squares(x[0] - 1, _count(x, len(x), first=2).sqrt() * (2 * x[1:] - x[:-1]))


def zakharov(x: Tensor) -> Tensor:
    """Zakharov's of Jamil and Yang: sum of x_i² + s² + s⁴, where s = sum of i x_i / 2."""
    s = (_count(x, len(x)) * x).sum() / 2
    return _squares(x, s, s**2)


def _boundary(n: int) -> tuple[float, ...]:
    """The start of MGH 28 and 29: t (t - 1), t = i / (n + 1)."""
    return tuple(t * (t - 1) for t in _ramp(n))


def _ramp(n: int) -> tuple[float, ...]:
    """i / (n + 1)."""
    return tuple(i / (n + 1) for i in range(1, n + 1))


OSBORNE_2 = 1.3, 0.65, 0.65, 0.7, 0.6, 3.0, 5.0, 7.0, 2.0, 4.5, 5.5
PROBLEMS: tuple[Problem, ...] = (
    Problem("Rosenbrock", rosenbrock, (-1.2, 1.0), (0.0,)),
    Problem("Freudenstein-Roth", freudenstein_roth, (0.5, -2.0), (0.0, 48.98425367924)),
    Problem("Powell badly scaled", powell_badly_scaled, (0.0, 1.0), (0.0,)),
    Problem("Brown badly scaled", _apart(brown_badly_scaled), (1.0, 1.0), (0.0,)),
    Problem("Beale", _apart(beale), (1.0, 1.0), (0.0,)),
    Problem("Jennrich-Sampson", jennrich_sampson, (0.3, 0.4), (124.3621823556, 259.5801901343)),
    Problem("Helical valley", _apart(helical_valley), (-1.0, 0.0, 0.0), (0.0,)),
    Problem("Bard", _apart(bard), (1.0, 1.0, 1.0), (8.214877306579e-3, 17.42869333333)),
    Problem("Gaussian", _apart(gaussian), (0.4, 1.0, 0.0), (1.12793276962e-8,)),
    Problem("Meyer", _apart(meyer), (0.02, 4000.0, 250.0), (87.9458551703,)),
    Problem("Gulf", _apart(gulf), (5.0, 2.5, 0.15), (0.0,)),
    Problem("Box 3D", _apart(box), (0.0, 10.0, 20.0), (0.0,)),
    Problem("Powell singular", powell_singular, (3.0, -1.0, 0.0, 1.0), (0.0,)),
    Problem("Wood", wood, (-3.0, -1.0, -3.0, -1.0), (0.0,)),
    Problem(
        "Kowalik-Osborne", _apart(kowalik_osborne), (0.25, 0.39, 0.415, 0.39), (3.075056038492e-4, 1.027343048695e-3)
    ),
    Problem("Brown-Dennis", _apart(brown_dennis), (25.0, 5.0, -5.0, -1.0), (85822.20162636,)),
    Problem("Osborne 1", _apart(osborne_1), (0.5, 1.5, -1.0, 0.01, 0.02), (5.464894697483e-5,)),
    Problem("Biggs EXP6", _apart(biggs), (1.0, 2.0, 1.0, 1.0, 1.0, 1.0), (0.0, 5.6556499255e-3, 0.3063667726248)),
    Problem("Osborne 2", osborne_2, OSBORNE_2, (4.013773629355e-2, 1.789813586881)),
    Problem("Watson 6", watson, (0.0,) * 6, (2.287670053552e-3,)),
    Problem("Watson 9", watson, (0.0,) * 9, (1.399760138e-6,)),
    Problem("Watson 12", watson, (0.0,) * 12, (4.7223811e-10,)),
    Problem("Extended Rosenbrock", rosenbrock, (-1.2, 1.0) * 50, (0.0,)),
    Problem("Extended Powell singular", powell_singular, (3.0, -1.0, 0.0, 1.0) * 25, (0.0,)),
    Problem("Penalty I", penalty_1, tuple(float(i) for i in range(1, 11)), (7.08765146709e-5,)),
    Problem("Penalty II", penalty_2, (0.5,) * 10, (2.936605374567e-4,)),
    Problem("Variably dimensioned", variably_dimensioned, tuple(1 - i / 10 for i in range(1, 11)), (0.0,)),
    Problem("Trigonometric", trigonometric, (0.1,) * 10, (0.0, 2.795056121878e-5)),
    Problem("Brown almost-linear", brown_almost_linear, (0.5,) * 10, (0.0, 1.0)),
    Problem("Discrete boundary value", discrete_boundary_value, _boundary(10), (0.0,)),
    Problem("Discrete integral equation", discrete_integral_equation, _boundary(10), (0.0,)),
    Problem("Broyden tridiagonal", broyden_tridiagonal, (-1.0,) * 100, (0.0,)),
    Problem("Broyden banded", broyden_banded, (-1.0,) * 100, (0.0,)),
    Problem("Linear, full rank", linear_full_rank, (1.0,) * 10, (10.0,)),
    Problem("Linear, rank 1", linear_rank_1, (1.0,) * 10, (190 / 41,)),
    Problem("Chebyquad", chebyquad, _ramp(8), (3.516873725678e-3,)),
    Problem("ARWHEAD", arwhead, (1.0,) * 1000, (0.0,)),
    Problem("BDQRTIC", bdqrtic, (1.0,) * 1000, (3983.817950577,)),
    Problem("COSINE", cosine, (1.0,) * 1000, (-999.0,)),
    Problem("CRAGGLVY", cragg_levy, (1.0, *(2.0,) * 999), (336.4231478729,)),
    Problem("DIXON3DQ", dixon, (-1.0,) * 100, (0.0,)),
    Problem("DQDRTIC", dqdrtic, (3.0,) * 1000, (0.0,)),
    Problem("DQRTIC", dqrtic, (2.0,) * 500, (0.0,)),
    Problem("EDENSCH", edensch, (8.0,) * 2000, (12003.28459202,)),
    Problem("ENGVAL1", engval, (2.0,) * 1000, (1108.194718785,)),
    Problem("FLETCHCR", fletcher, (0.0,) * 100, (0.0,)),
    Problem("FREUROTH", freudenstein_roth, (0.5, -2.0, *(0.0,) * 998), (121469.7101095,)),
    Problem("GENROSE", genrose, _ramp(100), (1.0,)),
    Problem("LIARWHD", liarwhd, (4.0,) * 1000, (0.0,)),
    Problem("NONDIA", nondia, (-1.0,) * 1000, (0.0,)),
    Problem("NONDQUAR", nondquar, (1.0, -1.0) * 50, (0.0,)),
    Problem("POWER", power, (1.0,) * 100, (0.0,)),
    Problem("TRIDIA", tridia, (1.0,) * 100, (0.0,)),
    Problem("WOODS", wood, (-3.0, -1.0, -3.0, -1.0) * 250, (0.0,)),
    Problem("Zakharov", zakharov, (100.0,) * 10, (0.0,)),
    Problem("Zakharov, far", zakharov, (600.0, 700.0, 200.0, 100.0, 90.0, 1e4), (0.0,)),
)
