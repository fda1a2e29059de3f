"""
Variational Monte Carlo: the ground state of helium
===================================================

The energy of a wave function is the mean of its local energy over points drawn from its square, and that of the ground
state is the lowest. A small network corrects a wave function of helium that has the right cusps, where particles meet:
the inputs of the network are even in each distance, so it leaves these alone.

Its parameters move as in imaginary time, along the solution of :math:`S \\delta = -\\eta g`, where :math:`g` is the
covariance of the local energy with the derivatives of :math:`\\log \\psi` and :math:`S` the covariance of these: S.
Sorella, "Green function Monte Carlo with stochastic reconfiguration", *Physical Review Letters* 80 (1998), 4558-4561.
Both are sums over walkers, which ``opt.total`` takes on the workers. Units are those of Hartree.
"""

import os

import torch
from matplotlib import pyplot

import batchopt

PUBLISHED = -2.903724  # C. L. Pekeris, "1 1S and 2 3S states of helium", Physical Review 115 (1959), 1216-1221
WALKERS, MOVES = 1000, 10


class Helium(torch.nn.Module):
    """The logarithm of the wave function at the positions of two electrons, rows of six numbers."""

    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(3, 12), torch.nn.Tanh(), torch.nn.Linear(12, 12), torch.nn.Tanh()
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(12, 1, bias=False)).double()
        self.tail = torch.nn.Linear(3, 1, bias=False).double()
        for last in (self.net[-1], self.tail):
            torch.nn.init.zeros_(last.weight)

    def forward(self, electrons):
        first, second, apart = distances(electrons)
        a, b, c = ((1 + r**2).sqrt() - 1 for r in (first, second, apart))
        symmetric = torch.stack([a + b, a * b, c], -1)
        cusps = -2 * (first + second) + apart / (2 + 2 * apart)
        return cusps + (self.net(symmetric) + self.tail(symmetric))[..., 0]


def distances(electrons):
    """Of both electrons from the nucleus and from one another."""
    first, second = electrons[..., :3], electrons[..., 3:]
    return [each.square().sum(-1).sqrt() for each in (first, second, first - second)]


# %%
# Sums over walkers
# -----------------
#
# Each sample is a walker. With the products of all pairs of columns the workers return means and covariances.


def sums(helium, electrons, _):
    """Of products of 1, the local energy and the derivatives of log psi by the parameters, each with each."""
    parameters = {name: each.detach() for name, each in helium.named_parameters()}

    def log(parameters, electron):
        return torch.func.functional_call(helium, parameters, (electron,))

    slopes, by_parameter = torch.func.vmap(torch.func.grad(log, (1, 0)), (None, 0))(parameters, electrons)
    curvature = torch.func.vmap(torch.func.jacrev(torch.func.grad(log, 1), 1), (None, 0))(parameters, electrons)
    kinetic = -(curvature.diagonal(dim1=1, dim2=2).sum(1) + slopes.square().sum(1)) / 2
    first, second, apart = distances(electrons)
    energy = kinetic - 2 / first - 2 / second + 1 / apart
    derivatives = torch.cat([each.flatten(1) for each in by_parameter.values()], 1)
    rows = torch.cat([torch.ones_like(energy)[:, None], energy[:, None], derivatives], 1)
    return rows.T @ rows


def moved(helium, electrons, draws):
    """Walkers after some moves of Metropolis."""
    with torch.no_grad():
        log = helium(electrons)
        for _ in range(MOVES):
            tried = electrons + 0.35 * torch.randn(electrons.shape, generator=draws, dtype=electrons.dtype)
            at = helium(tried)
            accepted = torch.rand(len(at), generator=draws, dtype=at.dtype) < (2 * (at - log)).exp()
            electrons = torch.where(accepted[:, None], tried, electrons)
            log = torch.where(accepted, at, log)
    return electrons


# %%
# Imaginary time
# --------------
#
# After each step the walkers move, by Metropolis. At the end parameters are kept, and the energy of that wave function
# is measured. A walker's path depends on each bit of the parameters: with ``chunk_size`` these are the same for any
# number of workers.

torch.manual_seed(0)
helium, draws = Helium(), torch.Generator().manual_seed(0)
electrons = torch.randn(WALKERS, 6, dtype=torch.float64)


def run(rounds, rate):
    """Mean local energies, one a round."""
    global electrons
    energies = []
    for _ in range(rounds):
        electrons = moved(helium, electrons, draws)
        products = opt.total(sums, electrons) / WALKERS
        mean = products[0, 1:]
        covariance = products[1:, 1:] - mean.outer(mean)
        gradient, metric = covariance[0, 1:], covariance[1:, 1:]
        if rate:
            opt.parameters.sub_(rate * torch.linalg.solve(metric + 1e-3 * torch.eye(len(metric)), gradient))
        energies.append(mean[0])
    return torch.stack(energies)


with batchopt.BatchOptimizer(
    helium, optimizer=None, parallelize=len(os.sched_getaffinity(0)), threads_per_worker=1, chunk_size=500
) as opt:
    run(20, rate=0)  # until the walkers are distributed as the square of the wave function
    before, course, after = run(20, rate=0), run(80, rate=0.2), run(100, rate=0)

print(f"error of the start {before.mean() - PUBLISHED:.4f}")
deviation = after.view(10, 10).mean(1).std() / 10**0.5  # of blocks, as rounds depend on one another
print(f"energy {after.mean():.4f} +- {deviation:.4f}: error {abs(after.mean() - PUBLISHED):.4f}")

# %%
# Energies and distances
# ----------------------
#
# Right: the electrons avoid one another, and are further from one another than from the nucleus.

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
left.plot(torch.cat([before, course, after]).numpy())
left.axhline(PUBLISHED, color="black", linestyle="--", linewidth=1, label="published")
left.axvspan(len(before), len(before) + len(course), color="0.9", label="parameters move")
left.set(xlabel="round", ylabel="mean local energy in hartree")
left.legend()
first, second, apart = distances(electrons)
right.hist(torch.cat([first, second]).numpy(), 40, density=True, alpha=0.6, label="from the nucleus")
right.hist(apart.numpy(), 40, density=True, alpha=0.6, label="between electrons")
right.set(xlabel="distance in bohr")
right.legend()
pyplot.show()
