"""
An interatomic potential: MACE with energies and forces
=======================================================

`MACE <https://github.com/ACEsuit/mace>`_ is an equivariant network over the neighbourhoods of atoms: its energy is
invariant under rotations, and its forces are the derivatives of the energy. A small one learns clusters of copper with
the energies and forces of ASE's effective medium theory, a fast classical model in the place of quantum chemistry.
"""

import os
import time
import warnings

import numpy as np
import torch
from ase.calculators.emt import EMT
from ase.cluster import Icosahedron
from matplotlib import pyplot

import batchopt

warnings.simplefilter("ignore")  # MACE and e3nn warn of what they use of torch

from mace import data, modules, tools  # noqa: E402, I001  (before e3nn, for which it prepares torch)
from mace.tools.torch_geometric import Batch  # noqa: E402
from e3nn import o3  # noqa: E402

# %%
# Made-up data
# ------------
#
# Icosahedra of 13 atoms, whose atoms are moved at random: 30 to learn from, 15 to test.

CUTOFF, ATOMS = 4.0, 13
random, numbers = np.random.default_rng(0), tools.AtomicNumberTable([29])


def cluster():
    atoms = Icosahedron("Cu", 2)
    atoms.positions += random.uniform(0.02, 0.15) * random.standard_normal(atoms.positions.shape)
    atoms.calc = EMT()
    configuration = data.Configuration(
        atomic_numbers=atoms.numbers,
        positions=atoms.positions,
        properties={"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()},
        property_weights={"energy": 1.0, "forces": 1.0},
    )
    return data.AtomicData.from_config(configuration, z_table=numbers, cutoff=CUTOFF)


torch.set_default_dtype(torch.float64)  # MACE creates its tensors by it
clusters = [cluster() for _ in range(45)]
train, test = clusters[:30], clusters[30:]
mean = torch.stack([each.energy for each in train]).mean().item() / ATOMS  # energy of an atom


# %%
# Model and loss
# --------------
#
# Each sample is a graph. ``collate_fn`` makes one graph of the clusters of a chunk, as MACE's own loader does. The loss
# is a mean over clusters of the same size, so nothing has to be said about its divisor.


def potential():
    torch.manual_seed(0)
    interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    return modules.MACE(
        r_max=CUTOFF,
        num_bessel=6,
        num_polynomial_cutoff=5,
        max_ell=1,
        interaction_cls=interaction,
        interaction_cls_first=interaction,
        num_interactions=2,
        num_elements=1,
        hidden_irreps=o3.Irreps("8x0e"),
        MLP_irreps=o3.Irreps("8x0e"),
        gate=torch.nn.functional.silu,
        atomic_energies=np.array([mean]),
        avg_num_neighbors=10.0,
        atomic_numbers=numbers.zs,
        correlation=2,
        radial_type="bessel",
    )


def loss(module, batch, _):
    found = module(batch.to_dict(), training=True)
    energies = ((found["energy"] - batch.energy) / ATOMS).square().mean()
    forces = (found["forces"] - batch.forces).square().mean()
    return 10 * energies + forces


curve = []


def lbfgs(parameters):
    return batchopt.LBFGS(parameters, max_iter=60, callback=lambda iteration: curve.append(iteration.f))


def optimizer(parallelize, factory=None):
    return batchopt.BatchOptimizer(
        potential(),
        loss_fn=loss,
        optimizer=factory,
        collate_fn=Batch.from_data_list,
        parallelize=parallelize,
        threads_per_worker=1,
    )


cores = len(os.sched_getaffinity(0))
with optimizer(cores, lbfgs) as opt:
    opt.step(train)
    model = opt.module
    print(f"{opt.parameters.numel():,} parameters, {opt.eval_counter} evaluations")
    print(f"loss {curve[0]:.3f} to {opt.output:.5f}")

# %%
# Clusters that were not seen
# ---------------------------
#
# Left: the loss. Middle and right: energies and forces of the test clusters lie on the diagonal, forces somewhat less
# closely, the largest of which come from atoms that nearly touch.

batch = Batch.from_data_list(test)
found = model(batch.to_dict())
energies, forces = found["energy"].detach() / ATOMS, found["forces"].detach()
figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
left.semilogy(curve)
left.set(xlabel="iteration of L-BFGS", ylabel="loss")
for axes, true, learned, name in (
    (middle, batch.energy / ATOMS, energies, "energy per atom, eV"),
    (right, batch.forces.ravel(), forces.ravel(), "force, eV / Å"),
):
    axes.plot(true, learned, ".", markersize=4)
    axes.axline((true.mean(), true.mean()), slope=1, color="grey", linestyle=":")
    axes.set(xlabel=f"{name}: EMT", ylabel="MACE")
    print(f"{name}: error {(learned - true).square().mean().sqrt():.3f}, spread {true.std():.3f}")

# %%
# Time
# ----

for parallelize in (1, cores):
    with optimizer(parallelize) as opt:
        opt.load(train)
        for _ in range(3):
            opt.evaluate()  # starts the workers, and compiles the parts of MACE that are TorchScript
        began = time.perf_counter()
        for _ in range(3):
            opt.evaluate()
        print(f"parallelize={parallelize}: {(time.perf_counter() - began) / 3:.2f} s per evaluation")
torch.set_default_dtype(torch.float32)
pyplot.show()
