"""Programs of their own that use a cluster: that of the docs, one that starts a cluster, one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.test_docs import ROOT, blocks

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.nightly

ALONE = """
import os, signal, sys, threading
import torch, batchopt

def fingerprint(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), chunk_size=4, **options) as opt:
        opt.step(x, y)
        return opt.fingerprint()

expected = fingerprint()
handler, hook, environment = signal.getsignal(signal.SIGTERM), sys.breakpointhook, dict(os.environ)
assert fingerprint(backend="ray", parallelize=2) == expected
assert signal.getsignal(signal.SIGTERM) is handler and sys.breakpointhook is hook
own = [{k: v for k, v in e.items() if not k.startswith("RAY_")} for e in (os.environ, environment)]
assert own[0] == own[1]
import ray
assert not ray._private.worker._global_node.webui_url
print("done")
"""

ENDLESS = """
import torch, batchopt
opt = batchopt.BatchOptimizer(torch.nn.Linear(3, 1), torch.nn.MSELoss(), backend="ray", parallelize=4)
print(*[worker.pid for worker in opt.workers], flush=True)
x, y = torch.randn(40, 3), torch.randn(40, 1)
while True:
    opt.step(x, y)
"""


@pytest.mark.parametrize("block, printed", [(0, 10), (1, 0)])
def test_the_program_of_the_page_about_clusters(two_nodes: Cluster, block: int, printed: int, tmp_path: Path) -> None:
    programs = blocks(ROOT / "docs" / "cluster.md")
    assert len(programs) == 2
    program = tmp_path / "train.py"
    program.write_text(programs[block])
    environment = os.environ | {"RAY_ADDRESS": two_nodes.address, "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 0, ended.stderr
    losses = [float(line.split()[-1]) for line in ended.stdout.splitlines()]
    assert len(losses) == printed and (not losses or losses[-1] < losses[0] / 100)


def test_without_a_cluster_one_is_started_with_a_token_and_without_a_dashboard() -> None:
    warnings = ["-W", "error:this Ray cluster asks:UserWarning"]
    with TemporaryDirectory(dir="/tmp") as folder:  # the name of a socket there may not be long
        environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "7" * 64,
            "RAY_TMPDIR": folder,
            "HOME": folder,
        }
        environment.pop("RAY_ADDRESS", None)
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")  # left by one that has ended
        ended = subprocess.run(
            [sys.executable, *warnings, "-c", ALONE], capture_output=True, text=True, timeout=280, env=environment
        )
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1] == "done", ended.stderr


def test_a_killed_driver_leaves_no_worker(two_nodes: Cluster) -> None:
    environment = os.environ | {"RAY_ADDRESS": two_nodes.address, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
        assert len(workers) == 4
        program.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(workers, timeout=20)
    assert not left
