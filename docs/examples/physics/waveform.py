"""
Full waveform inversion: low frequencies first
==============================================

Sources around a region send waves, and receivers record what arrives: how fast are waves at each place? Each parameter
is the velocity in a cell, between known bounds. Records are simulated by the acoustic wave equation

.. math:: u_{tt} = v^2 (u_{xx} + u_{yy}) + s(t) \\, \\delta(x - x_s)

in finite differences, which torch differentiates, as in A. Tarantola, "Inversion of seismic reflection data in the
acoustic approximation", *Geophysics* 49 (1984), 1259-1266. Each sample is a shot, so workers share the shots.
"""

import os

import torch
from matplotlib import pyplot

import batchopt

CELLS, MARGIN = 24, 8  # along a side; around it waves are damped, as if the region went on
CELL, STEP, STEPS = 0.025, 0.005, 160  # km, s
LOW, HIGH = 1.5, 3.0  # km/s; above CELL / STEP / sqrt(2) the differences would be unstable
PEAK, ALL = 12.0, 50.0  # Hz


class Waves(torch.nn.Module):
    """From numbers of shots to records, of shape (shots, receivers, times). Each source is also a receiver."""

    def __init__(self):
        super().__init__()
        self.velocity = torch.nn.Parameter(torch.full((CELLS, CELLS), 2.3))
        self.highest = ALL  # frequency of the records that are fitted
        inside = torch.arange(0, CELLS, 4)
        ends = torch.tensor([0, CELLS - 1])
        places = torch.cat([torch.cartesian_prod(inside, ends), torch.cartesian_prod(ends, inside)]).unique(dim=0)
        self.register_buffer("places", places.T + MARGIN)
        outside = (torch.arange(CELLS + 2 * MARGIN) - MARGIN - (CELLS - 1) / 2).abs() - CELLS / 2
        depth = torch.maximum(outside[:, None], outside).clamp(min=0) / MARGIN
        self.register_buffer("damping", 0.3 * depth**2)
        phase = (torch.pi * PEAK * (STEP * torch.arange(STEPS) - 1.2 / PEAK)) ** 2
        self.register_buffer("wavelet", (1 - 2 * phase) * torch.exp(-phase))  # of Ricker

    def forward(self, shots):
        velocity = torch.nn.functional.pad(self.velocity[None], [MARGIN] * 4, mode="replicate")[0]
        ratio = (velocity * STEP / CELL) ** 2
        row, column = self.places
        source = torch.zeros(len(shots), *velocity.shape)
        source[torch.arange(len(shots)), row[shots], column[shots]] = 1.0
        before = now = torch.zeros_like(source)
        records = []
        for amplitude in self.wavelet:
            u = torch.nn.functional.pad(now, [1] * 4)
            curvature = u[:, 2:, 1:-1] + u[:, :-2, 1:-1] + u[:, 1:-1, 2:] + u[:, 1:-1, :-2] - 4 * now
            before, now = now, now + (1 - self.damping) * (now - before) + ratio * curvature + amplitude * source
            records.append(now[:, row, column])
        return torch.stack(records, 2)


def low(records, highest):
    """The records without higher frequencies."""
    frequency = torch.fft.rfftfreq(2 * STEPS, STEP)
    spectrum = torch.fft.rfft(records, 2 * STEPS) * torch.exp(-((frequency / highest) ** 2))
    return torch.fft.irfft(spectrum)[..., :STEPS]


def misfit(waves, shots, recorded):
    return low(waves(shots) - recorded, waves.highest).square().mean()


true, shots = Waves(), torch.arange(0, 23, 2)
with torch.no_grad():
    true.velocity[:] = 1.9
    true.velocity[4:13, 5:14] = LOW
    true.velocity[14:20, 12:21] = HIGH
    recorded = true(shots)

# %%
# All frequencies at once, and low ones first
# -------------------------------------------
#
# A wave that comes more than half a period too late is fitted to the wrong crest: f has many minima. At low frequencies
# a period is long. So these are fitted first, and the next ones begin there: C. Bunks, F. M. Saleck, S. Zaleski and
# G. Chavent, "Multiscale seismic waveform inversion", *Geophysics* 60 (1995), 1457-1473. An attribute of the module
# says which, and the workers have it from the next step on.


def inverted(*frequencies):
    waves = Waves()
    optimizer = batchopt.LBFGS(
        waves.parameters(), max_iter=40, bounds=[(LOW, HIGH)], tolerance_grad=0, tolerance_change=0
    )
    with batchopt.BatchOptimizer(
        waves, loss_fn=misfit, optimizer=optimizer, parallelize=len(os.sched_getaffinity(0)), threads_per_worker=1
    ) as opt:
        for waves.highest in frequencies:  # a step for each
            opt.step(shots, recorded)
    return waves.velocity.detach()


def error(velocity):
    return (velocity - true.velocity).square().mean().sqrt().item()


found = {"all at once": inverted(ALL, ALL), "low ones first": inverted(4.0, ALL)}
for name, velocity in {"start": Waves().velocity, **found}.items():
    print(f"{name}: error {error(velocity):.3f} km/s")

# %%
# Velocities
# ----------

figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
for axis, (name, velocity) in zip(axes, {"true": true.velocity.detach(), **found}.items(), strict=True):
    shown = axis.imshow(velocity.numpy(), vmin=LOW, vmax=HIGH)
    axis.set(title=name, xticks=[], yticks=[])
axes[0].plot(*(true.places.flip(0) - MARGIN).numpy(), "w.", clip_on=False)  # sources and receivers
figure.colorbar(shown, ax=axes, label="velocity in km/s")
pyplot.show()
