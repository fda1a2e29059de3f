"""
Mini-batches with ``fit``: validation, early stopping, TensorBoard
==================================================================

``batchopt.training.fit`` trains a small convolutional network on scikit-learn's handwritten digits by Adam, validates
after each epoch, writes logs and checkpoints, and stops when the validation loss no longer falls.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy

import batchopt
from batchopt.training import Record, fit

images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = (images / 16).float()[:, None].unflatten(2, (8, 8))
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, held_out = order[:1400], order[1400:]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(512, 10),
    )


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def optimizer(parallelize):
    return batchopt.BatchOptimizer(
        network(),
        torch.nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
        parallelize=parallelize,
        threads_per_worker=1,
    )


# %%
# Train
# -----
#
# ``log`` takes a file of JSON lines and a folder for TensorBoard, here both. A run that is killed continues from its
# last checkpoint, at the exact sample, if the same program is started again (``resume="auto"``).

cores = len(os.sched_getaffinity(0))
folder = Path(tempfile.mkdtemp())
record = Record(folder / "log.jsonl")
with optimizer(cores) as opt:
    state = fit(
        opt,
        batchopt.Batches((images[train], labels[train]), 175, shuffle=True),
        epochs=20,
        eval_data=(images[held_out], labels[held_out]),
        metrics={"loss": cross_entropy, "accuracy": accuracy},
        patience=3,
        checkpoint=folder / "checkpoints",
        resume="auto",
        log=[record, folder / "runs"],
    )
    missed = opt.predict(images[held_out]).argmax(1) != labels[held_out]
print(f"{state.epoch} epochs; accuracy on held-out digits {state.metrics['eval_accuracy']:.3f}")
print(record.table(["epoch", "loss", "eval_loss", "eval_accuracy"]))

# %%
# TensorBoard
# -----------
#
# ``tensorboard --logdir runs`` shows the same values in a browser. Its files can also be read:

events = EventAccumulator(str(folder / "runs"))
events.Reload()
for tag in sorted(events.Tags()["scalars"]):
    values = events.Scalars(tag)
    print(f"{tag:20} {len(values):3} values, the last {values[-1].value:.4f}")

# %%
# Curves
# ------
#
# Left: the training loss is above that of held-out digits at first, since dropout is active in training and since it is
# a mean over an epoch in which the network improves; later it falls below. Right: some held-out digits that are still
# read wrongly.

lines = record.lines()
figure = pyplot.figure(figsize=(11, 4), layout="constrained")
left, right = figure.subfigures(1, 2)
axes = left.subplots()
for key in ("loss", "eval_loss"):
    shown = [(line["epoch"], line[key]) for line in lines if key in line]
    axes.semilogy(*zip(*shown, strict=True), marker=".", label=key)
axes.set(xlabel="epoch", ylabel="cross entropy")
axes.legend()
for axes, image, label in zip(
    right.subplots(2, 4).flat, images[held_out][missed], labels[held_out][missed], strict=False
):
    axes.imshow(image[0], cmap="gray_r")
    axes.set_title(f"a {label}", fontsize="small")
for axes in right.axes:
    axes.axis("off")

# %%
# Time
# ----
#
# A step on 175 digits takes a few milliseconds, which leaves workers little to gain.

for parallelize in (1, cores):
    with optimizer(parallelize) as opt:
        batches = batchopt.Batches((images[train], labels[train]), 175)
        list(opt.steps(batches))  # starts the workers
        began = time.perf_counter()
        for _ in range(5):
            list(opt.steps(batches))
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 5:.0f} ms per epoch")
pyplot.show()
