"""The rank of this process and the meeting place of all, as the launcher of the script states them."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from batchopt.backends.nodes.group import dist
from batchopt.errors import BatchoptError


class Launch(NamedTuple):
    """This process is `rank` of `size`, of which `local` run on this machine; they meet at `address` and `port`.

    `attempt` tells several starts of one job apart.
    """

    rank: int
    size: int
    local: int
    address: str
    port: int
    attempt: str = "0"


# The variables of torchrun, srun, Open MPI and MPICH with the rank, the number of ranks, and the number on this
# machine.
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHERS = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_HERE = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the variables that torchrun, srun or mpirun sets. Raises `BatchoptError` if there are none."""
    local = ranks_here(environment)
    if all(name in environment for name in _TORCHRUN):
        rank, size, address, port = (environment[name] for name in _TORCHRUN)
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Launch(int(rank), int(size), local, address, int(port), attempt)
    for names in _OTHERS:
        if all(name in environment for name in names):
            rank, size = (environment[name] for name in names)
            job = environment.get("SLURM_JOB_ID", "") + environment.get("SLURM_STEP_ID", "")
            job = job or environment.get("PMIX_NAMESPACE", "") or environment.get("OMPI_MCA_ess_base_jobid", "")
            number = int(environment.get("MASTER_PORT", 0)) or 20000 + zlib.crc32(job.encode()) % 20000
            address = environment.get("MASTER_ADDR") or _first_host(environment, int(size) == local)
            attempt = environment.get("SLURM_RESTART_COUNT", "0")
            return Launch(int(rank), int(size), local, address, number, attempt)
    raise BatchoptError(
        "backend='ranks' needs a script that torchrun, srun or mpirun started: torchrun --nproc-per-node 2 train.py; "
        "without them use backend='process'"
    )


def ranks_here(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks on this machine, as the launcher states it; 1 by default."""
    return next((_count(environment[name]) for name in _HERE if name in environment), 1)


def _count(text: str) -> int:
    """Return the number at its beginning, as in `2(x3)`; 1 if there is none."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 1


def _first_host(environment: Mapping[str, str], all_are_here: bool) -> str:
    """Return the machine of rank 0. Raises `BatchoptError` if it is not stated."""
    found = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    if match := re.match(r"([^\[,]+)(?:\[(\d+))?", found):  # node[07-12,15],other
        return match[1] + (match[2] or "")
    if all_are_here:
        return "127.0.0.1"
    raise BatchoptError(
        "MASTER_ADDR is not set, and no other variable names the machine of rank 0: set it to that machine's name, as "
        "in mpirun -x MASTER_ADDR=node1 python train.py"
    )


def meet(timeout: float) -> tuple[Launch, Any]:
    """Return the launch, and a store shared by all ranks: that of a group created by the user, else the launcher's.
    Raises `BatchoptError`."""
    if dist.is_available() and dist.is_initialized():
        store: Any = dist.distributed_c10d._get_default_store()  # there is no public way
        address = os.environ.get("MASTER_ADDR", "")
        return Launch(dist.get_rank(), dist.get_world_size(), ranks_here(), address, 0, "user"), store
    launch = read_launch()
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun has the store
    key = launch.address, launch.port, launch.rank
    if key not in _stores:  # one for all optimizers of this process
        try:
            _stores[key] = dist.TCPStore(
                launch.address,
                launch.port,
                is_master=launch.rank == 0 and not hosted,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except (RuntimeError, TimeoutError) as error:  # torch raises both
            raise BatchoptError(
                f"rank {launch.rank} of {launch.size} cannot reach rank 0 at {launch.address}:{launch.port}: {error}; "
                "MASTER_ADDR and MASTER_PORT say where it is"
            ) from None
    return launch, _stores[key]


_stores: dict[tuple[str, int, int], Any] = {}
