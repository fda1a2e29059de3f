"""
Tomography with bounds and a total variation
============================================

X-rays cross a body on straight lines, and each is weakened by what lies on its way: what does an image within look
like? Each sample is a ray, each parameter a pixel. 24 directions are few, and the measurements have noise, so many
images fit them. Two things are known beside: values lie between 0 and 1, and most neighbours are equal, for which the
total variation is a penalty: L. I. Rudin, S. Osher and E. Fatemi, "Nonlinear total variation based noise removal
algorithms", *Physica D* 60 (1992), 259-268.
"""

import os

import torch
from matplotlib import pyplot

import batchopt

PIXELS, DIRECTIONS, NOISE = 48, 24, 0.003


class Body(torch.nn.Module):
    """From rays, rows of an angle and the distance from the centre, to the mean of the image along a length of 2."""

    def __init__(self):
        super().__init__()
        self.image = torch.nn.Parameter(torch.zeros(PIXELS, PIXELS))  # of the square from -1 to 1

    def forward(self, rays):
        angle, distance = rays.T[..., None]
        along = torch.linspace(-1, 1, 2 * PIXELS)
        x = distance * torch.cos(angle) - along * torch.sin(angle)
        y = distance * torch.sin(angle) + along * torch.cos(angle)
        points = torch.stack([x, y], 2)[None]
        return torch.nn.functional.grid_sample(self.image[None, None], points, align_corners=False)[0, 0].mean(1)


def misfit(body, rays, measured):
    return ((body(rays) - measured) / NOISE).square().mean()


def variation(body):
    down, right = body.image.diff(dim=0)[:, 1:], body.image.diff(dim=1)[1:]
    return (down**2 + right**2 + 1e-6).sqrt().sum()  # differentiable where neighbours are equal


torch.manual_seed(0)
true, side = Body(), torch.linspace(-1, 1, PIXELS)
y, x = side[:, None], side
with torch.no_grad():
    true.image[(x / 0.7) ** 2 + (y / 0.9) ** 2 < 1] = 0.4
    true.image[(x + 0.25) ** 2 + (y - 0.3) ** 2 < 0.06] = 1.0
    true.image[((x - 0.25).abs() < 0.18) & ((y - 0.1).abs() < 0.3)] = 0.0
    true.image[(x / 0.4) ** 2 + ((y + 0.5) / 0.15) ** 2 < 1] = 0.8
    angles = torch.arange(DIRECTIONS) * torch.pi / DIRECTIONS
    rays = torch.cartesian_prod(angles, torch.linspace(-0.95, 0.95, PIXELS))
    measured = true(rays)
    measured += NOISE * torch.randn_like(measured)

# %%
# What is known, in the optimizer and in a penalty
# ------------------------------------------------
#
# A ``Penalty`` is a term without samples: it needs no entry in the batch, and one worker evaluates it.


def reconstructed(bounds=None, **penalty):
    body = Body()
    terms = {"rays": batchopt.Term(misfit), **penalty}
    optimizer = batchopt.LBFGS(body.parameters(), max_iter=300, bounds=bounds, tolerance_change=0)
    with batchopt.BatchOptimizer(
        body, terms=terms, optimizer=optimizer, parallelize=len(os.sched_getaffinity(0)), threads_per_worker=1
    ) as opt:
        opt.step({"rays": (rays, measured)})
    return body.image.detach()


def error(image):
    return ((image - true.image).norm() / true.image.norm()).item()


penalty = batchopt.Penalty(variation, weight=0.03)
found = {
    "rays alone": reconstructed(),
    "with bounds": reconstructed(bounds=[(0, 1)]),
    "with bounds and variation": reconstructed(bounds=[(0, 1)], variation=penalty),
}
for name, image in found.items():
    print(f"{name}: relative error {error(image):.3f}")

# %%
# Images
# ------
#
# Rays alone fit the noise. Bounds remove some of it, most where the true image is at a bound; the total variation
# removes nearly all.

figure, axes = pyplot.subplots(1, 4, figsize=(11, 3), layout="constrained")
for axis, (name, image) in zip(axes, {"true": true.image.detach(), **found}.items(), strict=True):
    shown = axis.imshow(image.numpy(), vmin=0, vmax=1, cmap="gray")
    axis.set(title=name, xticks=[], yticks=[])
figure.colorbar(shown, ax=axes)
pyplot.show()
