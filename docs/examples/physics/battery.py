"""
A battery's circuit, from curves of different lengths
=====================================================

The voltage of a lithium-ion cell under a current is that of a small circuit: a voltage that depends on the charge, a
resistance, and a resistance beside a capacitor. Its eight parameters are fitted to five curves, of constant currents
and of pulses. Curves have as many points as were measured, so a batch is a list of samples.
"""

import os
import time

import numpy as np
import torch
from matplotlib import pyplot
from scipy import optimize, signal
from torch.nn.utils.parametrize import register_parametrization

import batchopt

NAMES = ["q (Ah)", "r0 (ohm)", "r1 (ohm)", "c1 (F)", "e0 (V)", "e1 (V)", "e2 (V)", "e3 (V)"]
TRUE = [2.35, 0.021, 0.014, 2400.0, 3.55, 0.42, 0.055, -0.03]
START = [2.0, 0.05, 0.05, 1000.0, 3.3, 0.2, 0.02, -0.01]
NOISE, cores = 0.003, len(os.sched_getaffinity(0))  # V
torch.set_default_dtype(torch.float64)

# %%
# The circuit
# -----------
#
# The current is constant within each step, for which the voltage across the capacitor is exact. What must be positive
# is the exponential of what is fitted.


class Positive(torch.nn.Module):
    def forward(self, fitted):
        return fitted.exp()

    def right_inverse(self, value):
        return value.log()


class Cell(torch.nn.Module):
    """The voltage over time from the current (A, of a discharge positive), the time step (s) and the first charge."""

    def __init__(self, values):
        super().__init__()
        self.parts = torch.nn.Parameter(torch.tensor(values[:4]))
        self.open = torch.nn.Parameter(torch.tensor(values[4:]))  # of the voltage without a current
        register_parametrization(self, "parts", Positive())

    def forward(self, current, dt, charge):
        q, r0, r1, c1 = self.parts
        charge = charge - current.cumsum(0) * dt / (3600 * q)
        across, decay = [torch.zeros_like(q)], torch.exp(-dt / (r1 * c1))
        for ampere in current:
            across.append(decay * across[-1] + (1 - decay) * r1 * ampere)
        terms = torch.stack([torch.ones_like(charge), charge, charge.log(), (1 - charge).log()])
        return self.open @ terms - r0 * current - torch.stack(across[1:])


# %%
# Curves
# ------
#
# Each is a tuple, an element of the list of inputs, and its voltages are an element of the list of targets.

rest = [0.0] * 60
profiles = {  # the current, the time step in s, the charge at first
    "1.15 A": ([1.15] * 300 + rest, 20.0, 0.97),
    "2.3 A": ([2.3] * 300 + rest, 10.0, 0.97),
    "4.6 A": ([4.6] * 144 + rest, 10.0, 0.97),
    "charge by 1.15 A": ([-1.15] * 270 + rest, 20.0, 0.08),
    "pulses of 4.6 A": (([4.6] * 6 + [0.0] * 14) * 12, 5.0, 0.9),
}
curves = [tuple(map(torch.tensor, one)) for one in profiles.values()]
torch.manual_seed(0)
with torch.no_grad():
    volts = [volt + NOISE * torch.randn_like(volt) for volt in (Cell(TRUE)(*one) for one in curves)]
print("points:", *map(len, volts))

# %%
# Fit
# ---
#
# ``residual`` gets one curve at a time. With ``reduction="sum"`` all points count alike, on a long curve or a short
# one. ``of`` has the values and errors of the positive parameters themselves, in place of their logarithms.


def misfit(cell, one, volts):
    return cell(*one) - volts


def optimizer(parallelize):
    settings = {"reduction": "sum", "optimizer": "lm", "parallelize": parallelize, "threads_per_worker": 1}
    return batchopt.BatchOptimizer(Cell(START), residual=misfit, **settings)


with optimizer(cores) as opt:
    opt.step(curves, volts)
    print(f"{opt.result.status.value}, {opt.result.iterations} iterations")
    covariance, residuals = opt.covariance(), opt.residuals()
print("\n".join(str(covariance.summary()).splitlines()[:4]))
found = covariance.of(lambda cell: torch.cat([cell.parts, cell.open]))

# %%
# SciPy
# -----
#
# The same by NumPy and ``least_squares``, in the parameters themselves.


def by_numpy(x):
    q, r0, r1, c1, e0, e1, e2, e3 = x
    apart = []
    for one, volt in zip(curves, volts, strict=True):
        current, dt, charge = (part.numpy() for part in one)
        decay = np.exp(-dt / (r1 * c1))
        across = signal.lfilter([(1 - decay) * r1], [1, -decay], current)
        charge = charge - np.cumsum(current) * dt / (3600 * q)
        voltage = e0 + e1 * charge + e2 * np.log(charge) + e3 * np.log(1 - charge) - r0 * current - across
        apart.append(voltage - volt.numpy())
    return np.concatenate(apart)


low = [1.9, 0, 1e-6, 1, *[-np.inf] * 4]  # more charge than 1.9 Ah is drawn
settings = {"bounds": (low, np.inf), "x_scale": "jac", "jac": "3-point", "xtol": 1e-12, "ftol": 1e-14, "gtol": 1e-14}
scipy = optimize.least_squares(by_numpy, START, **settings)
errors = np.linalg.inv(scipy.jac.T @ scipy.jac).diagonal() * 2 * scipy.cost / (len(scipy.fun) - len(START))
value, error = found.value.numpy(), found.error.numpy()
for row in zip(NAMES, value, error, scipy.x, TRUE, strict=True):
    print("{}: {:.6g} +- {:.2g}, SciPy {:.6g}, true {:g}".format(*row))
apart = abs(value / scipy.x - 1).max(), abs(error / errors**0.5 - 1).max()
print(f"SciPy's values differ by {apart[0]:.1e}, its standard errors by {apart[1]:.1e}")

# %%
# Curves, and what is left
# ------------------------

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
for one, volt, (residual,), name in zip(curves, volts, residuals, profiles, strict=True):
    hours = one[1] / 3600 * torch.arange(1, len(volt) + 1)
    (line,) = left.plot(hours, volt, ".", markersize=2, label=name)
    left.plot(hours, volt + residual, color=line.get_color(), linewidth=1)
    right.plot(hours, 1e3 * residual, ".", markersize=2)
left.set(xlabel="time in hours", ylabel="voltage in V", title="measured (points), and the circuit")
left.legend(markerscale=5)
right.set(xlabel="time in hours", ylabel="circuit minus measured, in mV")

# %%
# Time
# ----

for parallelize in (1, cores):
    with optimizer(parallelize) as opt:
        opt.load(curves, volts)
        opt.normal()  # starts the workers
        began = time.perf_counter()
        for _ in range(5):
            opt.normal()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 5:.0f} ms per Jacobian")
pyplot.show()
