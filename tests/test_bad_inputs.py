"""All that the user may do wrong: the tables of `refusals.py`, and what needs surroundings of its own.

Left out are those about other machines, and those that a test needs running workers for: see the backends' contract.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from batchopt import Term, WorkerError
from batchopt.errors import BatchoptError
from tests.refusals import ARGUMENTS, BATCHES, LOCK, MODULES, OTHERS, Refusal, X, Y, build, rows, step
from tests.workloads import misfit


@pytest.fixture(scope="module")
def fork_server() -> None:
    """It is there: it may start before all is checked, and is none that works."""
    with build():
        pass


@pytest.fixture
def started(fork_server: None, monkeypatch: pytest.MonkeyPatch) -> list[BaseProcess]:
    """The processes that the library tries to start: it fails."""
    tried: list[BaseProcess] = []

    def start(process: BaseProcess) -> None:
        tried.append(process)
        raise AssertionError("a process was started")

    monkeypatch.setattr(BaseProcess, "start", start)
    return tried


def check_refused(provoke: Callable[[], object], error: type[Exception], words: str, started: list[Any]) -> None:
    """The error comes, and no process was to be started until then."""
    children = {*psutil.Process().children(recursive=True)}  # some of which may just be ending
    with pytest.raises(error, match=f"(?s){words}") as caught:
        provoke()
    assert type(caught.value) is error
    new = {*psutil.Process().children(recursive=True)} - children
    assert started == [] and not psutil.wait_procs(new, timeout=30)[1]  # workers of this call are reaped by another


def memory_of(module: Any) -> list[tuple[object, ...]]:
    """Which parameters it has, where they are, and how often they were written."""
    if not isinstance(module, nn.Module):
        return []
    known = [p for p in module.parameters() if not isinstance(p, nn.UninitializedParameter)]
    strided = {p: (p.data_ptr(), p.stride()) for p in known if p.layout is torch.strided}
    return [(id(p), strided.get(p), p._version) for p in known]


@pytest.mark.rows
@pytest.mark.parametrize("row", rows(MODULES), ids=lambda row: row.call)
def test_a_module_that_cannot_be_optimized_is_refused_untouched_before_a_process_starts(
    row: Refusal, started: list[BaseProcess]
) -> None:
    module = row.provoke()
    before = memory_of(module)
    check_refused(lambda: build(module), row.error, row.words, started)
    assert memory_of(module) == before


@pytest.mark.parametrize("row", rows(ARGUMENTS), ids=lambda row: row.call)
def test_arguments_that_cannot_work_are_refused_before_a_process_starts(
    row: Refusal, started: list[BaseProcess]
) -> None:
    check_refused(row.provoke, row.error, row.words, started)


@pytest.mark.rows
@pytest.mark.parametrize("row", [*rows(BATCHES), *rows(OTHERS)], ids=lambda row: row.call)
def test_what_cannot_be_read_or_evaluated_is_refused(row: Refusal) -> None:
    check_refused(row.provoke, row.error, row.words, [])


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch, started: list[BaseProcess]) -> None:
    monkeypatch.setattr("batchopt_workers.wire.memory.free_memory", lambda: 1000)
    message = r"^0\.\d MB of shared memory are needed and 0\.0 MB are free: use a smaller batch, fewer workers, or give"
    check_refused(build, MemoryError, message, started)


class Curious(torch.optim.SGD):
    """Differentiates the gradient, as AdaHessian and SophiaH do."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = self.param_groups[0]["params"]
        torch.autograd.grad([p.grad for p in parameters], parameters, [torch.ones_like(p) for p in parameters])
        return loss


def test_an_optimizer_that_differentiates_the_gradient_is_told_of_products() -> None:
    with pytest.raises(BatchoptError, match=r"^Curious differentiates the gradient, .*: use opt\.hvp\(v\)"):
        step(optimizer=lambda p: Curious(p, lr=0.1))


def test_auto_is_one_worker_where_there_is_no_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchopt.backends.process.startup._room", lambda: (10**12, 4))
    with pytest.raises(ValueError, match=r"use at most 1$"):
        build(parallelize=200)
    assert math.isfinite(step(parallelize="auto"))


BEFORE_ANYTHING = """
import psutil
from tests.refusals import ARGUMENTS, MODULES, build, rows
by_code = "lock", "log", "generator", "scripted", "FOREIGN", "made", "lambda"  # what is pickled, or code of the user's
tried = [(lambda row=row: build(row.provoke()), row) for row in rows(MODULES)]
tried += [(row.provoke, row) for row in rows(ARGUMENTS) if not any(word in row.call for word in by_code)]
assert len(tried) > 80
for provoke, row in tried:
    try:
        provoke()
    except row.error:
        pass
    assert not psutil.Process().children(), row
print("done")
"""


@pytest.mark.slow
def test_all_checks_come_before_anything_is_started_even_what_workers_are_forked_from() -> None:
    ended = subprocess.run([sys.executable, "-c", BEFORE_ANYTHING], capture_output=True, text=True, timeout=280)
    assert ended.stdout.endswith("done\n"), ended.stderr


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(BatchoptError, match=r"working directory cannot be used .*No such file.*: it was deleted, perh"):
        build()
    assert math.isfinite(step())


def explode() -> None:
    raise ValueError("boom")


class Explosive:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return explode, ()


@pytest.mark.slow
def test_what_cannot_be_sent_or_unpickled_here_is_told() -> None:
    locked = {"a": Term(misfit), "bad": Term(lambda module, x, y: misfit(module, x, y) if LOCK else x)}
    with pytest.raises(TypeError, match=r"a `loss_fn` cannot be sent .* it captures 'loss_fns\[1\]\.LOCK'"):
        build(terms=locked)
    message = r"^ValueError in worker \d.*: boom \(raised here, where what .* returned is unpickled: return tensors"
    with build(optimizer=None, posthook=lambda worker, sample: Explosive()) as opt:
        with pytest.raises(TypeError, match=r"the batch cannot be sent .* it captures '.*options\[0\]'"):
            opt.load(X, Y, [LOCK] * 4)
        opt.load(X, Y)
        with pytest.raises(WorkerError, match=message):
            opt.evaluate()
        with pytest.raises(WorkerError, match=message):
            opt.run_on_workers(lambda worker: Explosive())
        opt.posthook = None
        opt.load(X, Y)
        assert math.isfinite(opt.evaluate().item())
