"""SGD whose rate, decay and momentum are bred: settings step from one point, and the best of them have children."""

import torch

import batchopt

LOW, HIGH = torch.tensor([-4.0, -8.0, 0.0]), torch.tensor([1.0, -2.0, 0.99])  # log10 rate, log10 decay, momentum


class GeneticSGD:
    """Each step is a gradient, and f at the points to which all settings lead."""

    def __init__(self, opt: batchopt.BatchOptimizer, population: int = 12, seed: int = 0) -> None:
        self.opt, self.draws = opt, torch.Generator().manual_seed(seed)
        self.genes = LOW + torch.rand(population, 3, generator=self.draws) * (HIGH - LOW)
        self.momentum = torch.zeros_like(opt.parameters)

    def step(self) -> float:
        """Move to the best of the points, if it is better than this one; returns f."""
        f, gradient, x = self.opt.evaluate().item(), self.opt.grad_parameters, self.opt.parameters
        rates, decays, kept = 10 ** self.genes[:, :1], 10 ** self.genes[:, 1:2], self.genes[:, 2:]
        moves = kept * self.momentum - rates * (gradient + decays * x)
        found, order = self.opt.evaluate_many(x + moves).sort()
        self.momentum = moves[order[0]] if found[0] < f else torch.zeros_like(x)
        x.add_(self.momentum)
        half = len(order) // 2  # the other half becomes mixtures of the best
        parents = self.genes[order[torch.randint(half, (len(order) - half, 2), generator=self.draws)]]
        noise = torch.randn(len(parents), 3, generator=self.draws) * (HIGH - LOW) / 20
        self.genes[order[half:]] = torch.clamp(parents.mean(1) + noise, LOW, HIGH)
        return min(found[0].item(), f)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 500).unsqueeze(1)
    net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    with batchopt.BatchOptimizer(net, torch.nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        opt.load(x, x.sin())
        search = GeneticSGD(opt)
        print(f"f falls from {search.step():.4f} to {min(search.step() for _ in range(60)):.6f}")
