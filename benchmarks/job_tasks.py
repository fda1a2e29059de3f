"""What whole jobs minimise: models and data of the kinds that full batches are used for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.pinn_problems import BURGERS

Loss = Callable[[Any, Any, Any], Tensor]


@dataclass
class Task:
    """f is `loss(module, inputs, targets)` over the whole batch. `whole`: the batch for one forward, where `inputs` is
    a list of samples. `options`: what `BatchOptimizer` needs beside."""

    module: nn.Module
    loss: Loss
    inputs: Any
    targets: Any = None
    whole: Callable[[], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


# ---- digits


@cache
def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8, from 0 to 1."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images / 16).float(), torch.from_numpy(labels)


def cross_entropy(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes."""
    return nn.functional.cross_entropy(module(inputs), targets)


def convolutions() -> Task:
    """Two 3 x 3 convolutions, 16 and 32 channels, over the digits."""
    torch.manual_seed(0)
    images, labels = digits()
    module = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )
    return Task(module, cross_entropy, images.view(-1, 1, 8, 8), labels)


# ---- multinomial logistic regression, as scikit-learn has it: C = 1


class Regression:
    """The mean cross-entropy, and the squares of the weights as scikit-learn weighs them."""

    def __init__(self, samples: int) -> None:
        self.factor = 0.5 / samples

    def __call__(self, module: nn.Linear, inputs: Tensor, targets: Tensor) -> Tensor:
        penalty: Tensor = self.factor * module.weight.square().sum()
        return nn.functional.cross_entropy(module(inputs), targets) + penalty


def _regression(inputs: Tensor, labels: Tensor) -> Task:
    module = nn.Linear(inputs.shape[1], 10, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return Task(module, Regression(len(inputs)), inputs, labels)


def digits_regression() -> Task:
    """The digits, 650 parameters."""
    images, labels = digits()
    return _regression(images.double(), labels)


def large_regression() -> Task:
    """100,000 samples of 50 features, 510 parameters; labels that a random model with noise gives."""
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((100_000, 50))
    scores = inputs @ generator.standard_normal((50, 10)) + 3 * generator.gumbel(size=(100_000, 10))
    return _regression(torch.from_numpy(inputs), torch.from_numpy(scores.argmax(1)))


# ---- Burgers' equation


def burgers(module: nn.Module, points: Tensor, targets: Tensor) -> Tensor:
    """The mean square of what points leave: of the equation, where `targets` is NaN, else of a known value. The 700 of
    these weigh as much as the 3,000 of the equation."""
    inside = targets.isnan()
    residual = BURGERS.parts["residual"].residual(module, points[inside], None)
    known = module(points[~inside])[:, 0] - targets[~inside]
    found: Tensor = (residual.square().sum() + (3000 / 700) * known.square().sum()) / len(points)
    return found


def burgers_task() -> Task:
    """Three layers of 20, 3,000 points of the equation and 700 at the edges, evenly mixed."""
    parts = BURGERS.parts
    inside = parts["residual"].draw(3000, 0)
    edges = [parts["initial"].draw(500, 1), parts["boundary"].draw(200, 2)]
    points = torch.cat((inside, *(at for at, _ in edges)))
    targets = torch.cat((torch.full((3000,), math.nan, dtype=torch.float64), *(value for _, value in edges)))
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
    return Task(BURGERS.network(0), burgers, points[order], targets[order])


# ---- molecules


class Molecules:
    """The mean square of forces, and of energies by atom; all molecules have as many atoms."""

    def __call__(self, module: nn.Module, batch: Any, _: None) -> Tensor:
        found = module(batch.to_dict(), training=True)
        atoms = batch.ptr.diff()
        energies: Tensor = ((found["energy"] - batch.energy) / atoms).square().mean()
        forces: Tensor = (found["forces"] - batch.forces).square().mean()
        return energies + forces


def molecules(hidden: str = "16x0e") -> Task:
    """MACE, 28,368 parameters: energies and forces of 60 distorted molecules of ethanol. `hidden`: its features; with
    vectors among them (`1o`) it holds TorchScript with constants."""
    torch.set_default_dtype(torch.float64)
    import mace  # noqa: F401  # first: it has e3nn's files read, which torch 2.6 and later would refuse
    from ase.build import molecule
    from ase.calculators.emt import EMT
    from e3nn import o3
    from mace import data, modules, tools
    from mace.tools.torch_geometric import Batch

    generator, numbers = np.random.default_rng(0), tools.AtomicNumberTable([1, 6, 8])
    samples = []
    for _ in range(60):
        atoms = molecule("CH3CH2OH")
        atoms.positions += 0.1 * generator.standard_normal(atoms.positions.shape)
        atoms.calc = EMT()
        known = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        configuration = data.Configuration(
            atomic_numbers=atoms.numbers,
            positions=atoms.positions,
            properties=known,
            property_weights={"energy": 1.0, "forces": 1.0},
        )
        samples.append(data.AtomicData.from_config(configuration, z_table=numbers, cutoff=4.5))
    torch.manual_seed(0)
    interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    module = modules.MACE(
        r_max=4.5,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=interaction,
        interaction_cls_first=interaction,
        num_interactions=2,
        num_elements=3,
        hidden_irreps=o3.Irreps(hidden),
        MLP_irreps=o3.Irreps("16x0e"),
        gate=nn.functional.silu,
        atomic_energies=np.zeros(3),
        avg_num_neighbors=8.0,
        atomic_numbers=numbers.zs,
        correlation=2,
        radial_type="bessel",
    )
    collate = Batch.from_data_list
    return Task(module, Molecules(), samples, None, lambda: collate(samples), {"collate_fn": collate})


# ---- graphs


class GraphNetwork(nn.Module):
    """Three graph convolutions of 64 channels, the mean over nodes, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        widths = 16, 64, 64, 64
        self.convolutions = nn.ModuleList(GCNConv(*ends) for ends in pairwise(widths))
        self.head = nn.Linear(64, 1)

    def forward(self, batch: Any) -> Tensor:
        """A number for each graph."""
        from torch_geometric.nn import global_mean_pool

        x = batch.x
        for convolution in self.convolutions:
            x = torch.tanh(convolution(x, batch.edge_index))
        found: Tensor = self.head(global_mean_pool(x, batch.batch, size=batch.num_graphs))[:, 0]
        return found


def graph_error(module: nn.Module, batch: Any, _: None) -> Tensor:
    """The mean square."""
    found: Tensor = (module(batch) - batch.y).square().mean()
    return found


def graphs() -> Task:
    """400 random graphs of 20 to 60 nodes with 16 features; the share of edges between like nodes is to be found."""
    from torch_geometric.data import Batch, Data

    generator, samples = torch.Generator().manual_seed(0), []
    for _ in range(400):
        nodes = int(torch.randint(20, 61, (), generator=generator))
        edges = torch.randint(0, nodes, (2, 4 * nodes), generator=generator)
        features = torch.randn(nodes, 16, generator=generator)
        y = (features[edges[0], 0] * features[edges[1], 0]).mean().reshape(1)
        samples.append(Data(x=features, edge_index=edges, y=y))
    torch.manual_seed(0)
    collate = Batch.from_data_list
    return Task(GraphNetwork(), graph_error, samples, None, lambda: collate(samples), {"collate_fn": collate})


# ---- a neural differential equation


class Trajectories(nn.Module):
    """From starts in the plane, shape `(samples, 2)`, to 20 points of each path: `(20, samples, 2)`."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, starts: Tensor) -> Tensor:
        """By Runge and Kutta's method."""
        from torchdiffeq import odeint

        times = torch.linspace(0, 2, 20)
        found: Tensor = odeint(lambda _, x: self.field(x), starts, times, method="rk4")
        return found


def path_error(module: nn.Module, starts: Tensor, paths: Tensor) -> Tensor:
    """The mean square."""
    found: Tensor = (module(starts).transpose(0, 1) - paths).square().mean()
    return found


def neural_ode() -> Task:
    """2,000 paths of a pendulum with friction."""
    from torchdiffeq import odeint

    generator = torch.Generator().manual_seed(0)
    starts = 2 * torch.rand(2000, 2, generator=generator) - 1

    def pendulum(_: Tensor, x: Tensor) -> Tensor:
        return torch.stack((x[:, 1], -2 * torch.sin(2 * x[:, 0]) - 0.2 * x[:, 1]), 1)

    paths = odeint(pendulum, starts, torch.linspace(0, 2, 20), method="rk4").transpose(0, 1).contiguous()
    torch.manual_seed(0)
    return Task(Trajectories(), path_error, starts, paths)


# ---- an inverse problem: a conductivity between bounds


class Rod(nn.Module):
    """From sources of heat along a rod, shape `(samples, 201)`, to steady temperatures; both ends are kept at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.conductivity = nn.Parameter(torch.ones(202, dtype=torch.float64))

    def forward(self, sources: Tensor) -> Tensor:
        """Of the finite-volume equations."""
        k = self.conductivity
        matrix = torch.diag(k[:-1] + k[1:]) - torch.diag(k[1:-1], 1) - torch.diag(k[1:-1], -1)
        found: Tensor = torch.linalg.solve(matrix, sources.T / 202**2).T
        return found


def temperature_error(module: nn.Module, sources: Tensor, seen: Tensor) -> Tensor:
    """The mean square relative to what is seen, and how rough the conductivity is."""
    k = next(module.parameters())
    misfit: Tensor = (module(sources) - seen).square().mean() / SEEN
    return misfit + 1e-7 * k.diff().square().sum()


SEEN = 1e-2  # about the mean square of the temperatures
BOUNDS = 0.2, 5.0


def rod() -> Task:
    """20,000 experiments with random sources, temperatures with noise."""
    generator = torch.Generator().manual_seed(0)
    at = torch.linspace(0, 1, 201, dtype=torch.float64)
    places = torch.rand(20_000, 3, 1, generator=generator, dtype=torch.float64)
    sources = torch.exp(-(((at - places) / 0.05) ** 2)).sum(1) * 10
    true = Rod()
    with torch.no_grad():
        x = torch.linspace(0, 1, 202, dtype=torch.float64)
        true.conductivity.copy_(1 + 3.5 * ((x > 0.3) & (x < 0.5)) - 0.7 * ((x > 0.7) & (x < 0.8)))
        seen = true(sources)
    seen += 1e-3 * torch.randn(seen.shape, generator=generator, dtype=torch.float64)
    return Task(Rod(), temperature_error, sources, seen)


# ---- Gaussian processes


class Evidence:
    """The mean over tasks of the negative log marginal likelihood, per point."""

    def __call__(self, module: Any, tasks: Tensor, _: None) -> Tensor:
        return torch.stack([-module(task)[1] for task in tasks.tolist()]).mean()


class Processes(nn.Module):
    """An exact Gaussian process for each task, with a squared exponential kernel with a length for each input."""

    def __init__(self, inputs: list[Tensor], values: list[Tensor]) -> None:
        super().__init__()
        from gpytorch import kernels, likelihoods, means, mlls, models
        from gpytorch.distributions import MultivariateNormal

        class Process(models.ExactGP):  # type: ignore[misc]
            def __init__(self, x: Tensor, y: Tensor) -> None:
                super().__init__(x, y, likelihoods.GaussianLikelihood())
                self.mean, kernel = means.ConstantMean(), kernels.RBFKernel(ard_num_dims=x.shape[1])
                self.kernel = kernels.ScaleKernel(kernel)

            def forward(self, x: Tensor) -> Any:
                return MultivariateNormal(self.mean(x), self.kernel(x))

        self.processes = nn.ModuleList(map(Process, inputs, values))
        self._evidence = mlls.ExactMarginalLogLikelihood

    def forward(self, task: int) -> Any:
        """The number of points, and the log marginal likelihood per point."""
        process: Any = self.processes[task]
        (x,), y = process.train_inputs, process.train_targets
        return len(y), self._evidence(process.likelihood, process)(process(x), y)


def processes() -> Task:
    """24 tasks of 400 points in four dimensions: 168 parameters."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.rand(400, 4, generator=generator, dtype=torch.float64) for _ in range(24)]
    ways = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    y = [
        torch.sin(4 * points @ way) + 0.1 * torch.randn(400, generator=generator)
        for points, way in zip(x, ways, strict=True)
    ]
    return Task(Processes(x, y).double(), Evidence(), torch.arange(24))


# ---- poses of scans


class Poses(nn.Module):
    """A rotation vector and a shift for each scan, shape `(scans, 6)`."""

    def __init__(self, scans: int) -> None:
        super().__init__()
        self.poses = nn.Parameter(torch.zeros(scans, 6, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Where points are, shape `(samples, 3)`; of the inputs the first column is the scan. By Rodrigues' formula."""
        pose, points = self.poses[inputs[:, 0].long()], inputs[:, 1:]
        angle = (pose[:, :3].square().sum(1, keepdim=True) + 1e-24).sqrt()
        axis = pose[:, :3] / angle
        along, across = (axis * points).sum(1, keepdim=True), torch.linalg.cross(axis, points)
        turned = points * angle.cos() + across * angle.sin() + axis * along * (1 - angle.cos())
        found: Tensor = turned + pose[:, 3:]
        return found


def square_error(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean square."""
    return nn.functional.mse_loss(module(inputs), targets)


def scans() -> Task:
    """20 scans of 100 points, turned by up to two radians, with noise of 0.01: 120 parameters, 6,000 residuals (of
    which PyPose makes a square matrix)."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(20, 100, 3, generator=generator, dtype=torch.float64)
    inputs = torch.cat((torch.arange(20.0).repeat_interleave(100)[:, None].double(), points.view(-1, 3)), 1)
    true = Poses(20)
    with torch.no_grad():
        turns = torch.randn(20, 6, generator=generator, dtype=torch.float64)
        true.poses.copy_(turns / turns[:, :3].norm(dim=1, keepdim=True) * torch.linspace(0.5, 2.0, 20)[:, None])
        targets = true(inputs)
    targets += 0.01 * torch.randn(targets.shape, generator=generator, dtype=torch.float64)
    return Task(Poses(20), square_error, inputs, targets)
