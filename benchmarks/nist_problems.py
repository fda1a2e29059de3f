"""The nonlinear regression problems of NIST's Statistical Reference Datasets, with certified solutions.

`nist.json` has the published data, starts and certified values of the 27 problems; their models are here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

# `model(x, *b)`: the response to `x`, shape `(samples,)` or `(samples, predictors)`.
Model = Callable[..., torch.Tensor]
Tensor = torch.Tensor


def _saturation(x: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    return b1 * (1 - torch.exp(-b2 * x))


def _misra1b(x: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    return b1 * (1 - (1 + b2 * x / 2) ** -2)


def _misra1c(x: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    return b1 * (1 - (1 + 2 * b2 * x) ** -0.5)


def _misra1d(x: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    return b1 * b2 * x / (1 + b2 * x)


def _chwirut(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
    return torch.exp(-b1 * x) / (b2 + b3 * x)


def _decays(x: Tensor, *b: Tensor) -> Tensor:
    pairs = zip(b[::2], b[1::2], strict=True)
    return torch.stack([height * torch.exp(-rate * x) for height, rate in pairs]).sum(0)


def _two_decays(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor, b4: Tensor, b5: Tensor) -> Tensor:
    return b1 + _decays(x, b2, b4, b3, b5)


def _peak(x: Tensor, height: Tensor, middle: Tensor, width: Tensor) -> Tensor:
    return height * torch.exp(-(((x - middle) / width) ** 2))


def _peaks(x: Tensor, *b: Tensor) -> Tensor:
    return _decays(x, *b[:2]) + _peak(x, *b[2:5]) + _peak(x, *b[5:])


def _eckerle(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
    return b1 / b2 * torch.exp(-(((x - b3) / b2) ** 2) / 2)


def _danwood(x: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    return b1 * x**b2


def _kirby(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor, b4: Tensor, b5: Tensor) -> Tensor:
    return (b1 + b2 * x + b3 * x**2) / (1 + b4 * x + b5 * x**2)


def _cubics(x: Tensor, *b: Tensor) -> Tensor:
    return (b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3) / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def _nelson(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
    return b1 - b2 * x[..., 0] * torch.exp(-b3 * x[..., 1])


def _roszman(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor, b4: Tensor) -> Tensor:
    return b1 - b2 * x - torch.atan(b3 / (x - b4)) / math.pi


def _wave(x: Tensor, period: Tensor | float, of_cosine: Tensor, of_sine: Tensor) -> Tensor:
    angle = 2 * math.pi * x / period
    return of_cosine * torch.cos(angle) + of_sine * torch.sin(angle)


def _enso(x: Tensor, *b: Tensor) -> Tensor:
    return b[0] + _wave(x, 12.0, *b[1:3]) + _wave(x, *b[3:6]) + _wave(x, *b[6:])


def _mgh09(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor, b4: Tensor) -> Tensor:
    return b1 * (x**2 + b2 * x) / (x**2 + b3 * x + b4)


def _mgh10(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
    return b1 * torch.exp(b2 / (x + b3))


def _growth(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
    return b1 / (1 + torch.exp(b2 - b3 * x))


def _growth_by_power(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor, b4: Tensor) -> Tensor:
    return b1 * (1 + torch.exp(b2 - b3 * x)) ** (-1 / b4)


def _bennett(x: Tensor, b1: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
    return b1 * (b2 + x) ** (-1 / b3)


MODELS: dict[str, Model] = {
    "Bennett5": _bennett,
    "BoxBOD": _saturation,
    "Chwirut1": _chwirut,
    "Chwirut2": _chwirut,
    "DanWood": _danwood,
    "ENSO": _enso,
    "Eckerle4": _eckerle,
    "Gauss1": _peaks,
    "Gauss2": _peaks,
    "Gauss3": _peaks,
    "Hahn1": _cubics,
    "Kirby2": _kirby,
    "Lanczos1": _decays,
    "Lanczos2": _decays,
    "Lanczos3": _decays,
    "MGH09": _mgh09,
    "MGH10": _mgh10,
    "MGH17": _two_decays,
    "Misra1a": _saturation,
    "Misra1b": _misra1b,
    "Misra1c": _misra1c,
    "Misra1d": _misra1d,
    "Nelson": _nelson,
    "Rat42": _growth,
    "Rat43": _growth_by_power,
    "Roszman1": _roszman,
    "Thurber": _cubics,
}


@dataclass(frozen=True)
class Regression:
    """A problem: `x` and `y` (float64, a row for each observation), two starts, and the certified parameters, their
    standard deviations and the sum of squares."""

    name: str
    difficulty: str
    x: Tensor
    y: Tensor
    starts: tuple[Tensor, Tensor]
    certified: Tensor
    deviations: Tensor
    squares: float

    def predict(self, b: Tensor, x: Tensor) -> Tensor:
        """The model's response to `x` with the parameters `b`."""
        return MODELS[self.name](x, *b.unbind())

    def residuals(self, b: Tensor) -> Tensor:
        """Of all observations."""
        return self.predict(b, self.x) - self.y

    def jacobian(self, b: Tensor) -> Tensor:
        """Of the residuals, a row for each observation."""
        found: Tensor = torch.autograd.functional.jacobian(self.residuals, b)  # type: ignore[no-untyped-call]
        return found

    def digits(self, b: Tensor) -> float:
        """The log relative error: the certified digits of the worst parameter, of which there are 11 at most."""
        worst = float(((b - self.certified).abs() / self.certified.abs()).max())
        if math.isnan(worst):
            return 0.0
        return 11.0 if worst == 0.0 else min(max(-math.log10(worst), 0.0), 11.0)


def read_problems() -> list[Regression]:
    """All of them, by name."""
    published = json.loads(Path(__file__).with_name("nist.json").read_text())["problems"]

    def tensor(numbers: object) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    return [
        Regression(
            entry["name"],
            entry["difficulty"],
            tensor(entry["x"]),
            tensor(entry["y"]).log() if entry["name"] == "Nelson" else tensor(entry["y"]),
            (tensor(entry["starts"][0]), tensor(entry["starts"][1])),
            tensor(entry["certified"]),
            tensor(entry["deviations"]),
            entry["rss"],
        )
        for entry in published
    ]
