"""The optimizers, slow and readable: what the real ones are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

Function = Callable[[torch.Tensor], torch.Tensor]


def value_and_gradient(function: Function, x: torch.Tensor) -> tuple[float, torch.Tensor]:
    """f and its gradient at x."""
    x = x.clone().requires_grad_()
    f = function(x)
    (gradient,) = torch.autograd.grad(f, x)
    return f.item(), gradient


def two_loops(pairs: list[tuple[torch.Tensor, torch.Tensor]], gradient: torch.Tensor) -> torch.Tensor:
    """The L-BFGS direction by the recursion of Nocedal, "Updating quasi-Newton matrices with limited storage", 1980."""
    q, alphas = -gradient.double(), []
    doubles = [(s.double(), y.double()) for s, y in pairs]
    for s, y in reversed(doubles):
        alphas.append((s @ q) / (s @ y))
        q = q - alphas[-1] * y
    if doubles:
        s, y = doubles[-1]
        q = q * (s @ y) / (y @ y)
    for (s, y), alpha in zip(doubles, reversed(alphas), strict=True):
        q = q + (alpha - (y @ q) / (s @ y)) * s
    return q


def wolfe_step(function: Function, x: torch.Tensor, direction: torch.Tensor) -> float:
    """A step that satisfies the weak Wolfe conditions, by doubling and bisection."""
    f, gradient = value_and_gradient(function, x)
    slope = (gradient @ direction).item()
    low, high, step = 0.0, float("inf"), 1.0
    for _ in range(200):
        value, there = value_and_gradient(function, x + step * direction)
        if not value <= f + 1e-4 * step * slope:
            high = step
        elif (there @ direction).item() < 0.9 * slope:
            low = step
        else:
            break
        step = 2 * low if high == float("inf") else 0.5 * (low + high)
    return step


def lbfgs(function: Function, x: torch.Tensor, iterations: int, most: int = 10) -> torch.Tensor:
    """The minimum by the two loops and bisection."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    _, gradient = value_and_gradient(function, x)
    for _ in range(iterations):
        if gradient.abs().max() < 1e-10:
            break
        direction = two_loops(pairs, gradient)
        after = x + wolfe_step(function, x, direction) * direction
        _, new = value_and_gradient(function, after)
        if (after - x) @ (new - gradient) > 0:
            pairs = [*pairs, (after - x, new - gradient)][-most:]
        x, gradient = after, new
    return x


def conjugate_gradients(matrix: torch.Tensor, right: torch.Tensor, x: torch.Tensor, iterations: int) -> torch.Tensor:
    """Linear conjugate gradients (Hestenes and Stiefel 1952) for `matrix @ x = right`."""
    residual = right - matrix @ x
    direction = residual
    for _ in range(iterations):
        product = matrix @ direction
        step = (residual @ residual) / (direction @ product)
        x = x + step * direction
        new = residual - step * product
        direction = new + (new @ new) / (residual @ residual) * direction
        residual = new
    return x


def proximal_gradient(function: Function, x: torch.Tensor, l1: float, rate: float, iterations: int) -> torch.Tensor:
    """The minimum of f plus an L1 penalty, by soft thresholding (ISTA)."""
    for _ in range(iterations):
        _, gradient = value_and_gradient(function, x)
        x = x - rate * gradient
        x = x.sign() * (x.abs() - rate * l1).clamp_min(0.0)
    return x


def broyden(inverse: torch.Tensor, s: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The self-scaled Broyden update of an inverse Hessian, from the formulas for the Hessian: both are inverted."""
    hessian = torch.linalg.inv(inverse)
    n = len(s)
    bs, sy = hessian @ s, s @ y
    b, h = (s @ bs) / sy, (y @ inverse @ y) / sy
    a = b * h - 1
    least = min(torch.tensor(1.0), h * (1 - (a / (a + 1)).sqrt()))
    theta = max((least - 1) / a, min(1 / least, (1 - b) / b))
    sigma = (1 + a * theta) ** (-1.0 / (n - 1))
    scale = min(torch.tensor(1.0), 1 / b)
    tau = scale * min(sigma, 1 / theta) if theta > 0 else min(scale * sigma, 1 + a * theta)
    w = (s @ bs).sqrt() * (y / sy - bs / (s @ bs))
    updated = tau * (hessian - bs.outer(bs) / (s @ bs) + theta * w.outer(w)) + y.outer(y) / sy
    result: torch.Tensor = torch.linalg.inv(updated)
    return result


def levenberg_marquardt(
    residuals: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, damping: float, iterations: int
) -> list[torch.Tensor]:
    """The accepted points of Levenberg-Marquardt with the damping of Nielsen, 1999, scaled by the largest diagonals so
    far; f is the mean of the squares."""
    growth, scale = 2.0, torch.zeros_like(x)
    points: list[torch.Tensor] = []
    for _ in range(iterations):
        r = residuals(x)
        j = torch.func.jacrev(residuals)(x)
        h, v, f = j.T @ j / len(r), j.T @ r / len(r), (r @ r / len(r)).item()
        scale = torch.maximum(scale, h.diagonal())
        while True:
            step = torch.linalg.solve(h + damping * torch.diag(scale), -v)
            tried = residuals(x + step)
            lower = (tried @ tried / len(r)).item()
            if lower < f:
                break
            damping, growth = damping * growth, growth * 2
            if damping > 1e16:  # f has no more digits to lose
                return points
        gain = (f - lower) / -(2 * step @ v + step @ h @ step).item()
        damping, growth = damping * (0.1 if abs(gain - 1) < 0.1 else max(1 / 3, 1 - (2 * gain - 1) ** 3)), 2.0
        x = x + step
        points.append(x)
    return points


def box_quadratic(
    matrix: torch.Tensor, gradient: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor
) -> torch.Tensor:
    """The minimum of x'Ax / 2 + g'x over a box: the best of all points that have each element free or at a bound."""
    best, lowest = lower, torch.inf
    for sides in itertools.product((-1, 0, 1), repeat=len(gradient)):
        side = torch.tensor(sides)
        free = side == 0
        x = torch.where(side < 0, lower, upper)
        if bool(free.any()):
            right = -gradient[free] - matrix[free][:, ~free] @ x[~free]
            x[free] = torch.linalg.solve(matrix[free][:, free], right)
        f = float(x @ (matrix @ x) / 2 + gradient @ x)
        if f < lowest and bool((lower <= x).all() and (x <= upper).all()):
            best, lowest = x, f
    return best


def longest_step(
    residuals: Function, x: torch.Tensor, scale: torch.Tensor, length: float, bend: bool
) -> tuple[torch.Tensor, float]:
    """The end of a Gauss-Newton step whose lengths are measured by `scale`, the longest of several around `length`
    whose decrease is a tenth of the predicted one; and its length."""
    r, jacobian = residuals(x), torch.func.jacrev(residuals)(x)
    matrix, vector = jacobian.T @ jacobian, jacobian.T @ r

    def size(step: torch.Tensor) -> float:
        return float((scale * step**2).sum().sqrt())

    def damped(right: torch.Tensor, damping: float) -> torch.Tensor:
        return torch.as_tensor(torch.linalg.solve(matrix + damping * scale.diag(), right))

    def of_length(length: float) -> tuple[torch.Tensor, float, float]:
        """The step, by how much it lowers f, and how much that was predicted to be."""
        low, high = -100.0, 100.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if size(damped(-vector, 10.0**middle)) > length else (low, middle)
        step = damped(-vector, 10.0**high)
        predicted = -float(2 * step @ vector + step @ matrix @ step)
        if bend:
            second = (r - 2 * residuals(x + 0.1 * step) + residuals(x + 0.2 * step)) / 0.01
            more = damped(-(jacobian.T @ second), 10.0**high)
            step = step + more / 2 if size(more) <= 0.75 * size(step) else step
        return step, float(r.square().sum() - residuals(x + step).square().sum()), predicted

    def longest(lengths: list[float]) -> int:
        falls = [of_length(length)[1:] for length in lengths]
        return len(list(itertools.takewhile(lambda one: one[0] >= 0.1 * one[1], falls))) - 1

    lengths = [length * 3.0**power for power in (-1, -1 / 3, 1 / 3, 1)]
    while (best := longest(lengths)) < 0:
        lengths = [length / 9 for length in lengths]
    if best + 1 < len(lengths):
        low, high = lengths[best : best + 2]
        lengths = [low, low * (high / low) ** (1 / 3), low * (high / low) ** (2 / 3)]
        best = longest(lengths)
    return x + of_length(lengths[best])[0], lengths[best]
