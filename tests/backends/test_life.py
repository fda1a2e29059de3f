"""The life of worker processes: how they start, what they may see, and that they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import batchopt
from batchopt import BatchOptimizer, Worker
from tests.backends.scripts import SCRIPT, assert_gone, pids, printed, python
from tests.conftest import is_fork_server, listening
from tests.workloads import Mlp, mlp


@pytest.mark.rows
@pytest.mark.slow
@pytest.mark.parametrize("way", ["stdin", "file", "-m"])
def test_a_program_without_a_main_guard_works_and_leaves_nothing(tmp_path: Path, way: str) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    arguments = {"file": ["program.py"], "stdin": ["-"], "-m": ["-m", "program"]}[way]
    ended = python(*arguments, script=SCRIPT if way == "stdin" else None, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert_gone(pids(ended.stdout))


@pytest.mark.rows
@pytest.mark.nightly
@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_a_program_works_in_processes_that_it_has_started(tmp_path: Path, how: str) -> None:
    """Which have run its text as a module of another name, that workers do not have."""
    parts, work = SCRIPT.split("torch.manual_seed")[0], "torch.manual_seed" + SCRIPT.split("torch.manual_seed")[1]
    guarded = "import multiprocessing\nif __name__ == '__main__':\n"
    start = f"child = multiprocessing.get_context({how!r}).Process(target=run)\nchild.start()\nchild.join()\n"
    run = "def run():\n" + textwrap.indent(work + "opt.close()", "    ")
    end = "raise SystemExit(child.exitcode)"
    (tmp_path / "program.py").write_text("\n".join((parts, run, guarded + textwrap.indent(start + end, "    "))))
    ended = python("program.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert_gone(pids(ended.stdout))


@pytest.mark.nightly
def test_a_notebook_works(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    cells = [nbformat.v4.new_code_cell(part) for part in SCRIPT.split("torch.manual_seed")]
    cells[1].source = "torch.manual_seed" + cells[1].source
    book = nbformat.v4.new_notebook(cells=[*cells, nbformat.v4.new_code_cell("opt.close()")])
    ran = tmp_path / "ran.ipynb"
    program = f"""
    import nbclient, nbformat
    book = nbformat.reads({nbformat.writes(book)!r}, 4)
    nbclient.NotebookClient(book, timeout=280, kernel_name="python3").execute()
    nbformat.write(book, {str(ran)!r})
    """
    # In a process of its own: the client's event loop and threads stay out of the other tests.
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    outputs = [output for cell in nbformat.read(ran, 4).cells for output in cell.get("outputs", [])]
    assert_gone(pids("".join(output.get("text", "") for output in outputs)))


RESULTS = [
    torch.arange(6.0).view(2, 3).t(),
    torch.ones(3, dtype=torch.bfloat16),
    torch.zeros(0, 3, dtype=torch.int16),
    torch.arange(8.0)[::2],
    torch.arange(3.0).expand(2, 3),
    torch.arange(3.0).to_sparse(),
    nn.Parameter(torch.ones(2)),
]


def test_results_of_functions_have_tensors_of_any_kind_or_it_is_said_why_not() -> None:
    with BatchOptimizer(Mlp(), nn.MSELoss(), parallelize=2) as opt:
        for found in opt.run_on_workers(lambda worker: {"all": RESULTS}):
            for one, other in zip(found["all"], RESULTS, strict=True):
                assert type(one) is type(other) and (one.dtype, one.layout) == (other.dtype, other.layout)
                assert torch.equal(one.to_dense(), other.to_dense()) and one.requires_grad == other.requires_grad
        with pytest.raises(batchopt.WorkerError, match=r"TypeError in worker 0, running a function: .*lock"):
            opt.run_on_workers(lambda worker: [__import__("threading").Lock()])
        assert opt.run_on_workers(lambda worker: worker.rank) == [0, 1]


@pytest.mark.rows
@pytest.mark.parametrize("size", [2**14, 2**20])
def test_results_of_hooks_of_any_size_arrive_whole(size: int) -> None:
    """Though nobody wakes the parent up for the report of a chunk: full pipes are emptied."""
    case = mlp(samples=96)
    hook = lambda worker, sample: bytes([sample.indices[0]]) * size  # noqa: E731
    options: dict[str, Any] = {"optimizer": None, "parallelize": 2, "chunk_size": 2, "posthook": hook, "timeout": 1e3}
    with BatchOptimizer(case.module, case.criterion, **options) as opt:
        opt.load(case.inputs, case.targets)
        for _ in range(2):
            opt.evaluate()
            assert opt.hook_results == [bytes([2 * chunk]) * size for chunk in range(48)]


def test_a_failing_precode_is_the_error_and_leaves_nothing() -> None:
    def precode(worker: Worker) -> None:
        raise OSError(f"no such device on worker {worker.rank}")

    with pytest.raises(batchopt.WorkerError, match="OSError in worker 0, running precode: no such device on worker 0"):
        BatchOptimizer(Mlp(), nn.MSELoss(), parallelize=2, precode=precode)


@pytest.mark.slow
def test_a_worker_has_a_group_threads_and_the_callers_recursion_limit_and_none_of_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(worker: Worker) -> tuple[bool, int, str, int, bool, int]:
        return (
            "batchopt" in sys.modules,
            torch.get_num_threads(),
            os.environ["OMP_NUM_THREADS"],
            os.getpgrp() - os.getpid(),
            signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            sys.getrecursionlimit(),
        )

    monkeypatch.setenv("BATCHOPT_TEST_BARE", "1")
    # By value: by name, a worker would import this test, and with it the package.
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    before, limit = dict(os.environ), sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(limit + 500)
        with BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), parallelize=2, threads_per_worker=3) as opt:
            assert opt.run_on_workers(look) == [(False, 3, "3", 0, True, limit + 500)] * 2
        assert dict(os.environ) == before
    finally:
        sys.setrecursionlimit(limit)
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
def test_nothing_listens_and_no_start_method_is_settled() -> None:
    script = """
import multiprocessing, torch, batchopt
opt = batchopt.BatchOptimizer(torch.nn.Linear(2, 1), torch.nn.MSELoss(), parallelize=2)
opt.step(torch.ones(4, 2), torch.ones(4, 1))
print(multiprocessing.get_start_method(allow_none=True))
multiprocessing.set_start_method("spawn")
"""
    assert printed(script) == "None\n"
    case = mlp()
    with BatchOptimizer(case.module, case.criterion, parallelize=2) as opt:
        opt.step(case.inputs, case.targets)
        # a larger block is sent to living workers
        opt.step(torch.cat([case.inputs] * 9), torch.cat([case.targets] * 9))
        everyone = [os.getpid(), *(worker.pid for worker in opt.workers)]
        children = psutil.Process().children(recursive=True)
        assert {child.pid for child in children if not is_fork_server(child.pid)} == set(everyone[1:])
        assert not listening([os.getpid(), *(child.pid for child in children)])


@pytest.mark.slow
def test_a_frozen_tensor_is_mapped_not_copied_by_every_worker() -> None:
    class WithTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(2**23), requires_grad=False)  # 32 MB
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table[x] * self.scale

    def private_bytes(worker: Worker) -> int:
        return int(psutil.Process().memory_full_info().uss)

    module = WithTable()
    with BatchOptimizer(module, nn.MSELoss(), parallelize=2, optimizer="sgd") as opt:
        before = opt.run_on_workers(private_bytes)
        opt.step(torch.arange(2**23), torch.zeros(2**23))
        module.table.data.fill_(3.0)
        assert opt.step(torch.arange(10), torch.zeros(10)) == pytest.approx(9 * module.scale.item() ** 2, rel=0.5)
        assert max(opt.run_on_workers(private_bytes)) < max(before) + 2**28


@pytest.mark.usefixtures("nobody_late")
def test_speeds_that_are_given_fix_the_shares() -> None:
    case = mlp(samples=40)
    with BatchOptimizer(
        case.module, case.criterion, parallelize=3, speeds=[3, 0, 1], posthook=lambda w, s: (w.rank, len(s.indices))
    ) as opt:
        opt.step(case.inputs, case.targets)
        assert opt.hook_results == [(0, 30), (2, 10)]


@pytest.mark.nightly
def test_what_was_closed_holds_no_memory_and_no_descriptor() -> None:
    """Whether or not Python's collector runs: it runs when many objects were made, and these are few and large."""
    script = """
import gc, os, signal, torch, batchopt
gc.disable()

def use():
    x, y = torch.zeros(1000, 100), torch.zeros(1000, 1)
    with batchopt.BatchOptimizer(torch.nn.Linear(100, 1), torch.nn.MSELoss(), optimizer="sgd", parallelize=2) as opt:
        opt.step(x, y)
        list(opt.steps([(x, y)] * 3))
        opt.load(x, y)
        opt.hvp(torch.ones(101))
    return opt

def held():
    with open("/proc/self/maps") as maps:
        return sum("memfd:batchopt" in line for line in maps), len(os.listdir("/proc/self/fd"))

kept = [use(), use()]
mappings, _ = held()
assert mappings == 0, mappings
del kept
use()
before = held()
for _ in range(3):
    use()
assert held() == before, (held(), before)

# nor where a worker was late
x, y = torch.zeros(64, 4), torch.zeros(64, 1)
options = dict(optimizer=None, parallelize=2, chunk_size=8)
with batchopt.BatchOptimizer(torch.nn.Linear(4, 1), torch.nn.MSELoss(), **options) as opt:
    opt.load(x, y)
    opt.evaluate()
    os.kill(opt.workers[0].pid, signal.SIGSTOP)
    opt.evaluate()
mappings, _ = held()
assert mappings == 0, mappings
"""
    printed(script)


@pytest.mark.slow
def test_a_chunk_that_takes_longer_than_any_before_is_given_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as much each time that it seems to hang: three workers that die of that are no reason to give it up."""
    monkeypatch.setattr("batchopt.backends.process.paces.FLOOR", 0.5)

    def slowly(worker: Worker, sample: batchopt.Sample) -> None:
        if sample.indices.start == 0:
            time.sleep(1.5)

    case = mlp(samples=16)
    options: dict[str, Any] = {"parallelize": 3, "chunk_size": 4, "max_restarts": 100, "optimizer": None}
    with BatchOptimizer(case.module, case.criterion, **options) as opt:
        opt.load(case.inputs, case.targets)
        opt.evaluate()
        opt.prehook = slowly
        assert opt.evaluate().item() == pytest.approx(case.reference()[0], rel=1e-12)
        assert sum(worker.restarts for worker in opt.workers) >= 2


@pytest.mark.slow
def test_workers_start_where_no_affinity_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sandbox, which has no /dev/fd either."""
    real: Callable[..., int] = os.open

    def forbidden(*_: object) -> None:
        raise PermissionError("not in this sandbox")

    def opened(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).startswith("/dev/fd"):
            raise FileNotFoundError(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "sched_getaffinity", forbidden, raising=False)
    monkeypatch.setattr(os, "open", opened)
    with BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), parallelize=2) as opt:
        assert len(opt.run_on_workers(lambda worker: worker.rank)) == 2
