"""
What is wrong? Ask the doctor
=============================

An optimizer that makes no progress often minimises a function whose gradient is that of another one. Line searches then
find no lower point, and nothing says why. ``print(opt.check(x, y))`` examines f and its gradient on a batch, and names
the first problem that it finds.
"""

import os
import time

import torch
from matplotlib import pyplot

import batchopt

torch.manual_seed(0)
x = 2 * torch.rand(4000, 3) - 1
y = torch.sin(3 * x.sum(1, keepdim=True))


def network(*layers):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 32), *layers, torch.nn.Tanh(), torch.nn.Linear(32, 1))


def diagnose(module, **options):
    with batchopt.BatchOptimizer(module, optimizer=None, parallelize=cores, threads_per_worker=1, **options) as opt:
        diagnosis = opt.check(x, y)
        print(diagnosis)
        return diagnosis


cores = len(os.sched_getaffinity(0))

# %%
# A healthy function
# ------------------

assert diagnose(network(), criterion=torch.nn.MSELoss()).healthy

# %%
# A gradient that is cut off
# --------------------------
#
# The loss weighs large errors more, by a weight that was meant to be differentiated, but goes through ``detach``. The
# value is right, its gradient is not: the slope differs from the differences of f.


def weighed(module, inputs, targets):
    error = module(inputs) - targets
    return (error.detach().abs() * error.square()).mean()


assert not diagnose(network(), loss_fn=weighed).healthy

# %%
# A sum that is taken for a mean
# ------------------------------
#
# Workers evaluate parts of the batch, and the mean over parts is not the mean over the batch if the loss is a sum:
# ``reduction="sum"`` has to say so.


def summed(module, inputs, targets):
    return (module(inputs) - targets).square().sum()


assert not diagnose(network(), loss_fn=summed, check_cut=False).healthy
assert diagnose(network(), loss_fn=summed, reduction="sum").healthy

# %%
# A layer that sees the batch
# ---------------------------
#
# BatchNorm in training mode normalises by the samples of the forward pass, which are those of a chunk.

assert not diagnose(network(torch.nn.BatchNorm1d(32)), criterion=torch.nn.MSELoss(), check_cut=False).healthy

# %%
# What the doctor compares
# ------------------------
#
# f along the direction of steepest descent, and the line whose slope the gradient gives. Left: it is the tangent, so a
# short step lowers f as expected. Right, with ``detach``: f is steeper than the gradient says, by a half.


def mended(module, inputs, targets):
    return (module(inputs) - targets).abs().pow(3).mean()


figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
lengths = torch.linspace(-0.3, 0.4, 36)
for panel, (title, loss) in zip(axes, {"mended": mended, "with detach": weighed}.items(), strict=True):
    with batchopt.BatchOptimizer(network(), loss_fn=loss, optimizer=None, parallelize=cores) as opt:
        opt.load(x, y)
        f, start, gradient = opt.evaluate().item(), opt.parameters.clone(), opt.grad_parameters.clone()
        values = opt.evaluate_many(start - lengths[:, None] * gradient)
        panel.plot(lengths, values, label="f")
        panel.plot(lengths, f - lengths * gradient.square().sum(), linestyle="--", label="by the gradient")
        panel.plot(0, f, "ko")
        panel.set(title=title, xlabel="step length")
axes[0].set_ylabel("f")
axes[0].legend()

# %%
# Time
# ----
#
# Of a complete check of the healthy function, which includes starting the workers.

for parallelize in (1, cores):
    began = time.perf_counter()
    with batchopt.BatchOptimizer(
        network(), torch.nn.MSELoss(), optimizer=None, parallelize=parallelize, threads_per_worker=1
    ) as opt:
        opt.check(x, y)
    print(f"parallelize={parallelize}: {time.perf_counter() - began:.2f} s per check")
pyplot.show()
