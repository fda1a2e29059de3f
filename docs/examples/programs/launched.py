"""
One program for a laptop, torchrun and SLURM
============================================

With ``backend="ranks"`` a launcher starts the same script several times, on one or several machines. All ranks call the
same functions on the same data, evaluate their shares, and get the same bits. This file is such a script: started by
hand it launches itself by torchrun, with one and with two ranks.
"""

import json
import os
import subprocess
import sys
import time

import torch
from matplotlib import pyplot

import batchopt


def main():
    """What each rank runs. Only rank 0 prints."""
    torch.manual_seed(0)  # the same on all ranks
    x = torch.linspace(-3, 3, 20_000)[:, None]
    y = torch.sin(2 * x) + 0.1 * torch.randn(20_000, 1)
    layers = torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    model = torch.nn.Sequential(*layers)
    with batchopt.BatchOptimizer(
        model, torch.nn.MSELoss(), backend="ranks", parallelize=1, threads_per_worker=1, chunk_size=2000
    ) as opt:
        losses, began = [opt.step(x, y)], time.perf_counter()
        losses += [opt.step(x, y) for _ in range(3)]
        seconds = (time.perf_counter() - began) / 3
        if opt.is_main:
            ranks = [f"{worker.rank}: {worker.samples:,} samples" for worker in opt.workers]
            print(json.dumps({"losses": losses, "seconds": seconds, "bits": opt.fingerprint(), "shares": ranks}))


def launch(ranks):
    """Run this file by torchrun; returns what rank 0 printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), sys.argv[0]]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return json.loads(ended.stdout)


# %%
# By torchrun
# -----------
#
# ``torchrun --nproc-per-node 2 launched.py`` sets ``RANK``, and ``srun`` sets ``SLURM_PROCID``: then this is a rank,
# and only ``main`` is to run. Losses and fingerprints do not depend on the number of ranks: ``chunk_size`` fixes the
# bits.

if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
    main()
    sys.exit()

runs = {ranks: launch(ranks) for ranks in (1, 2)}
for ranks, run in runs.items():
    print(f"{ranks} rank(s): loss {run['losses'][-1]:.6f}, fingerprint {run['bits'][:16]}; {'; '.join(run['shares'])}")
assert runs[1]["bits"] == runs[2]["bits"]

# %%
# By SLURM
# --------
#
# The same file on four nodes of 32 cores, where each rank has 32 workers (``parallelize=32`` in place of 1). Save this
# as ``job.sh`` and call ``sbatch job.sh``:
#
# .. code-block:: sh
#
#     #!/bin/bash
#     #SBATCH --job-name=batchopt
#     #SBATCH --nodes=4
#     #SBATCH --ntasks-per-node=1
#     #SBATCH --cpus-per-task=32
#     #SBATCH --time=00:30:00
#     srun --cpus-per-task=32 python launched.py
#
# With torchrun instead of ``srun python``, the last line is
#
# .. code-block:: sh
#
#     srun torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d \
#         --rdzv-endpoint "$(scontrol show hostnames | head -n 1):29500" launched.py
#
# :doc:`/cluster` has more, for example what happens if a rank ends.
#
# The picture
# -----------
#
# The curve of two ranks lies on that of one, bit for bit.

figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
for (ranks, run), style in zip(runs.items(), ({"marker": "o", "linewidth": 4}, {"marker": "."}), strict=True):
    axes.semilogy(range(1, 5), run["losses"], label=f"{ranks} rank(s)", **style)
axes.set(xlabel="step of 20 iterations", ylabel="mean square error", xticks=range(1, 5))
axes.legend()

# %%
# Time
# ----

for ranks, run in runs.items():
    print(f"{ranks} rank(s) of parallelize=1: {run['seconds']:.2f} s per step")
pyplot.show()
