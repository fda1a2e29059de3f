"""A separable natural evolution strategy (Schaul, Glasmachers and Schmidhuber, 2011): minimises f without gradients.

Each generation is one call of `evaluate_many`: workers evaluate whole points.
"""

import math

import torch

import batchopt


def snes(opt: batchopt.BatchOptimizer, generations: int, population: int, sigma: float, seed: int = 0) -> float:
    """Leave the best point found in `opt.parameters`, and return f there."""
    mean, draws = opt.parameters.clone(), torch.Generator().manual_seed(seed)
    spread, rate = torch.full_like(mean, sigma), (3 + math.log(len(mean))) / (5 * math.sqrt(len(mean)))
    weights = (math.log(population / 2 + 1) - torch.arange(1, population + 1, dtype=mean.dtype).log()).clamp(min=0)
    utilities = weights / weights.sum() - 1 / population
    best, best_f = mean.clone(), opt.evaluate_many(mean[None])[0]
    for _ in range(generations):
        noise = torch.randn(population, len(mean), generator=draws, dtype=mean.dtype)
        f, order = opt.evaluate_many(mean + spread * noise).sort()
        noise = noise[order]
        if f[0] < best_f:
            best, best_f = mean + spread * noise[0], f[0]
        mean = mean + spread * (utilities @ noise)
        spread = spread * torch.exp(rate / 2 * (utilities @ (noise.square() - 1)))
    opt.parameters.copy_(best)
    return best_f.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 500).unsqueeze(1)
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    with batchopt.BatchOptimizer(net, torch.nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        opt.load(x, x.sin())
        print(f"f falls from {opt.evaluate().item():.4f} to {snes(opt, 150, 24, 0.5):.4f}")
