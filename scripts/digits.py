"""The main job on real data: a small network learns 1,797 handwritten digits by L-BFGS, in this process and on two
workers.

Prints the accuracy on digits that were held out, how long each way took, and whether both reached the same loss;
saves the loss curves, and what the workers did during one step, as pictures.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import torch
from sklearn.datasets import load_digits

import batchopt

TRAIN = 1297  # of 1,797; the other 500 are held out


@dataclass
class Fit:
    """One way of doing the job, and what came of it."""

    parallelize: int
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    evaluations: int = 0
    accuracy: float = 0.0


def network() -> torch.nn.Module:
    """A small convolutional network for 8x8 images, the same each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    ).double()


def fit(images: torch.Tensor, digits: torch.Tensor, parallelize: int, steps: int) -> Fit:
    """Run `steps` L-BFGS steps of up to 20 iterations each over all training images; time them without the start-up."""
    result, model = Fit(parallelize), network()
    with batchopt.BatchOptimizer(
        model, torch.nn.CrossEntropyLoss(), parallelize=parallelize, chunk_size=64, verbose=1
    ) as opt:
        opt.load(images[:TRAIN], digits[:TRAIN])
        opt.evaluate()
        started = time.perf_counter()
        for _ in range(steps):
            result.losses.append(opt.step(images[:TRAIN], digits[:TRAIN]))
        result.seconds = time.perf_counter() - started
        result.evaluations = opt.eval_counter - 1
    with torch.no_grad():
        right = model(images[TRAIN:]).argmax(1) == digits[TRAIN:]
    result.accuracy = right.double().mean().item()
    return result


def look(images: torch.Tensor, digits: torch.Tensor, parallelize: int, path: Path) -> None:
    """Record one step; save it as a picture, and for a trace viewer; print it in numbers."""
    with batchopt.BatchOptimizer(network(), torch.nn.CrossEntropyLoss(), parallelize=parallelize, chunk_size=64) as opt:
        opt.step(images[:TRAIN], digits[:TRAIN])
        with opt.timeline() as timeline:
            opt.step(images[:TRAIN], digits[:TRAIN])
    timeline.draw(path)
    timeline.save(path.with_suffix(".json"))
    print(f"\none step in {path}, and for https://ui.perfetto.dev in {path.with_suffix('.json')}:\n{timeline}")


def draw(fits: list[Fit], path: Path) -> None:
    """Save the loss curves of all fits."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for one, style in zip(fits, ("-", "o"), strict=False):
        axes.semilogy(one.losses, style, fillstyle="none", label=f"parallelize={one.parallelize}")
    axes.set(xlabel="step", ylabel="training loss", title="Handwritten digits, L-BFGS")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the job both ways and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="L-BFGS steps, of 20 iterations each (default 4)")
    parser.add_argument("--parallelize", type=int, default=2, help="number of workers (default 2)")
    parser.add_argument("--png", type=Path, default=Path("digits-loss.png"), help="where to save the loss curves")
    parser.add_argument("--timeline", type=Path, default=Path("digits-timeline.png"), help="where to save who did what")
    arguments = parser.parse_args()

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(data.images).unsqueeze(1)[order] / 16
    digits = torch.from_numpy(data.target)[order].long()

    serial, parallel = (fit(images, digits, n, arguments.steps) for n in (1, arguments.parallelize))
    draw([serial, parallel], arguments.png)
    if arguments.parallelize > 1:
        look(images, digits, arguments.parallelize, arguments.timeline)

    print(f"\n{'':14}{'seconds':>9}{'evaluations':>13}{'ms each':>9}  {'final loss':<24}{'held-out accuracy':>18}")
    for one in (serial, parallel):
        each = one.seconds / one.evaluations * 1e3
        name = f"parallelize={one.parallelize}"
        print(
            f"{name:14}{one.seconds:9.2f}{one.evaluations:13d}{each:9.2f}  {one.losses[-1]:<24.17g}{one.accuracy:18.3f}"
        )
    print(f"\nspeed-up {serial.seconds / parallel.seconds:.2f}; loss curves in {arguments.png}")
    difference = max(abs(a - b) / abs(a) for a, b in zip(serial.losses, parallel.losses, strict=True))
    print(f"largest relative difference between the two loss curves: {difference:.1e}")
    if difference > 1e-12 or parallel.accuracy < 0.95:
        raise SystemExit("the demo did not reach what it promises: equal losses, and an accuracy of at least 0.95")


if __name__ == "__main__":
    main()
