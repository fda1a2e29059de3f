"""
Reading a timeline
==================

``opt.timeline()`` records what the parent and each worker do. It shows whether workers compute or wait, and for what.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
from matplotlib import pyplot

import batchopt

cores = max(2, len(os.sched_getaffinity(0)))
torch.manual_seed(0)
x = torch.randn(6000, 64)
y = x.square().sum(1, keepdim=True).sqrt()


def network():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh()
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 1))


def optimizer(parallelize=cores, **options):
    return batchopt.BatchOptimizer(
        network(), torch.nn.MSELoss(), parallelize=parallelize, threads_per_worker=1, **options
    )


def show(timeline):
    timeline.draw(path)
    pyplot.figure().figimage(pyplot.imread(path), resize=True)


path = Path(tempfile.mkdtemp()) / "timeline.png"

# %%
# A step of L-BFGS
# ----------------
#
# A green bar is a worker that computes its share of the batch. The gaps between two evaluations are spent in the
# parent: it sums the gradients, computes a direction and a step length. The first evaluation also places the batch.


def lbfgs(iterations):
    return lambda parameters: batchopt.LBFGS(parameters, max_iter=iterations)


with optimizer(optimizer=lbfgs(6)) as opt, opt.timeline() as timeline:
    opt.step(x, y)
print(timeline)
show(timeline)

# %%
# Chunks
# ------
#
# With ``chunk_size`` a share consists of chunks. A worker that is done takes over chunks of another, which are the
# narrow bars at the end of an evaluation; so a worker that is slowed down by other programs does not delay the others.
# Results have the same bits for any number of workers; small chunks take more time in total.

with optimizer(chunk_size=500, optimizer=lbfgs(2)) as opt, opt.timeline() as timeline:
    opt.step(x, y)
print(timeline)
show(timeline)

# %%
# A worker that is slow
# ---------------------
#
# Here one worker sleeps in each forward pass, as if its core were slow. In the first evaluation all shares are equal,
# and the others wait. Then shares follow the measured speeds: the slow worker gets less to do, and the gaps become
# narrower. Gaps that remain at the end of each evaluation would call for a ``chunk_size``.


def slow(worker, sample):
    if worker.rank == 0:
        time.sleep(1e-4 * len(sample.indices))


with optimizer(prehook=slow, optimizer=lbfgs(8)) as opt, opt.timeline() as timeline:
    opt.step(x, y)
    print([f"worker {worker.rank}: {worker.samples:,} samples" for worker in opt.workers])
print(timeline)
show(timeline)

# %%
# To look closer, ``timeline.save("trace.json")`` writes a file that https://ui.perfetto.dev opens.
#
# Time
# ----

for parallelize in (1, cores):
    with optimizer(parallelize) as opt:
        opt.load(x, y)
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for _ in range(20):
            opt.evaluate()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 20:.1f} ms per evaluation")
pyplot.show()
