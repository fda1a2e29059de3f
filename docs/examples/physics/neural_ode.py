"""
A neural ordinary differential equation
=======================================

A network learns the law of motion of a pendulum with friction from 600 paths: it gives the velocity of a point in the
plane of angle and angular velocity, and the method of Runge and Kutta makes paths of it. The loss compares the paths,
so that its gradient is that of all their steps.
"""

import os
import time

import torch
from matplotlib import pyplot

import batchopt


def pendulum(state):
    angle, velocity = state[:, 0], state[:, 1]
    return torch.stack((velocity, -4 * torch.sin(angle) - 0.3 * velocity), 1)


def paths(field, starts, steps, dt=0.1):
    """Points of each path after each step, by the classical method of Runge and Kutta: (samples, steps + 1, 2)."""
    states = [starts]
    for _ in range(steps):
        state = states[-1]
        first = field(state)
        second = field(state + dt / 2 * first)
        third = field(state + dt / 2 * second)
        fourth = field(state + dt * third)
        states.append(state + dt / 6 * (first + 2 * second + 2 * third + fourth))
    return torch.stack(states, 1)


class NeuralODE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh()
        self.field = torch.nn.Sequential(*layers, torch.nn.Linear(32, 2))

    def forward(self, starts):
        return paths(self.field, starts, steps=15)


torch.manual_seed(0)
starts = (2 * torch.rand(600, 2) - 1) * torch.tensor([1.5, 2.0])
seen = paths(pendulum, starts, steps=15)
seen[:, 1:] += 0.02 * torch.randn(600, 15, 2)

# %%
# Fit
# ---
#
# Each sample is a path, so the workers share the paths. A forward pass is a chain of 60 small calls of the network:
# torch's own threads have little to share in each.

cores = len(os.sched_getaffinity(0))
losses = []


def lbfgs(parameters):
    return batchopt.LBFGS(parameters, max_iter=200, callback=lambda iteration: losses.append(iteration.f))


model = NeuralODE()
with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), optimizer=lbfgs, parallelize=cores) as opt:
    opt.step(starts, seen)
    print(opt.result.status.value)
    print(f"loss {opt.output:.2e} after {opt.eval_counter} evaluations; variance of the noise {0.02**2:.1e}")

# %%
# A path that is longer than those seen
# -------------------------------------
#
# Left: the loss comes down to the variance of the noise. Right: paths of 12 s from two starts that were not seen, eight
# times as long as those of the data. The learned field (dashed) follows the true one round and round; small errors of
# the field add up to a lag.

new = torch.tensor([[1.4, 0.0], [-0.5, 1.0]])
with torch.no_grad():
    true, learned = paths(pendulum, new, 120), paths(model.field, new, 120)
    at = torch.cartesian_prod(torch.linspace(-2, 2, 17), torch.linspace(-4, 4, 13))
    arrows = model.field(at)

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
left.semilogy(losses)
left.axhline(0.02**2, color="grey", linestyle=":", label="noise")
left.set(xlabel="iteration of L-BFGS", ylabel="mean square error")
left.legend()
right.quiver(*at.T, *arrows.T, color="0.8", angles="xy")
for path, (theirs, ours) in enumerate(zip(true, learned, strict=True)):
    right.plot(*theirs.T, color=f"C{path}", label="true" if path == 0 else None)
    right.plot(*ours.T, color="black", linestyle="--", linewidth=1, label="learned" if path == 0 else None)
right.set(xlabel="angle", ylabel="angular velocity", title="the learned field, and two paths")
right.legend(loc="upper right")
print(f"largest distance after 12 s: {(true - learned)[:, -1].norm(dim=1).max():.3f}")

# %%
# Time
# ----

for parallelize in (1, cores):
    with batchopt.BatchOptimizer(
        NeuralODE(), torch.nn.MSELoss(), optimizer=None, parallelize=parallelize, threads_per_worker=1
    ) as opt:
        opt.load(starts, seen)
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for _ in range(20):
            opt.evaluate()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 20:.1f} ms per evaluation")
pyplot.show()
