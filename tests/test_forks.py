"""A forked process has parameters of its own, and so has this one once its optimizer is closed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Worker
from tests.building import Child

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    # Python 3.12 warns of forks in a process that has threads, as torch's have.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

X = torch.linspace(-1, 1, 30).view(10, 3)
Y = torch.linspace(0, 1, 20).view(10, 2)
STATES = ["open", "closed", "dropped"]


class Net(nn.Module):
    """With a frozen parameter and a buffer beside those that are trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("offset", torch.full((2,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) + self.offset + self.frozen.sum()
        return found


def build(module: nn.Module, workers: int) -> BatchOptimizer:
    return BatchOptimizer(module, nn.MSELoss(), optimizer="sgd", parallelize=workers, chunk_size=5)


def prepared(module: nn.Module, workers: int, state: str) -> BatchOptimizer | None:
    """The module after a step; its optimizer is open, closed, or forgotten without that."""
    opt = build(module, workers)
    opt.step(X, Y)
    if state == "closed":
        opt.close()
    if state == "dropped":
        del opt
        gc.collect()
        return None
    return opt


def values(module: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in module.state_dict().items()}


def overwrite(module: nn.Module) -> None:
    """Write every tensor of the module in place."""
    for tensor in module.state_dict().values():
        tensor.fill_(7.0)


each_workers = pytest.mark.parametrize("workers", [1, 2])
each_state = pytest.mark.parametrize("state", STATES)


@pytest.mark.rows
@each_workers
@each_state
def test_what_a_child_writes_is_its_own_and_it_keeps_the_values_of_its_beginning(workers: int, state: str) -> None:
    module = Net()
    opt = prepared(module, workers, state)
    before = values(module)

    def train() -> object:
        overwrite(module)
        return values(module)

    assert Child(train).said().count("7.0") == 6 + 2 + 5 + 2
    assert values(module) == before
    reader, writer = os.pipe()

    def look() -> object:
        os.close(writer)
        os.read(reader, 1)  # until this process has written, and closed its end
        return values(module)

    child = Child(look)
    if opt is not None and state == "open":
        opt.step(X, Y)
        assert values(module)["layer.weight"] != before["layer.weight"]
    else:
        overwrite(module)
    module.get_buffer("offset").fill_(3.0)
    os.close(writer)
    assert child.said() == repr(before)
    os.close(reader)
    assert values(module) != before
    if opt is not None:
        opt.close()


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize(
    "state, workers",
    [("open", 1), ("closed", 2), ("open", 2), ("closed", 1), ("dropped", 1), ("dropped", 2)],
)
def test_a_child_may_train_with_workers_of_its_own(workers: int, state: str) -> None:
    module = Net()
    opt = prepared(module, workers, state)
    before = values(module)

    def train() -> object:
        with build(module, 2) as mine:
            mine.step(X, Y)
            mine.step(X, Y)
        return values(module)

    said = Child(train).said()
    assert values(module) == before
    if opt is not None:
        opt.close()
    with build(module, 1) as again:
        again.step(X, Y)
        again.step(X, Y)
    assert said == repr(values(module))


@each_workers
def test_workers_of_multiprocessing_and_of_a_loader_are_such_children(workers: int) -> None:
    module = Net()

    class Samples(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            found = module.get_parameter("layer.weight").detach().clone()
            overwrite(module)
            return found

    with build(module, workers) as opt:
        opt.step(X, Y)
        before = values(module)
        loader = torch.utils.data.DataLoader(Samples(), num_workers=2, multiprocessing_context="fork", batch_size=1)
        found = [batch.flatten().tolist() for batch in loader]
        assert found[:2] == [before["layer.weight"]] * 2  # the first that each of the two reads
        process = multiprocessing.get_context("fork").Process(target=overwrite, args=(module,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert values(module) == before


# ---- after close


def shared_mapping(tensor: torch.Tensor) -> bool:
    """Whether its memory is a part of a file that others may map."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ...(.)", line)
        assert found is not None
        if int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16):
            return found[3] == "s"
    raise AssertionError("no memory at all")


@each_workers
def test_close_gives_the_module_ordinary_memory(workers: int) -> None:
    module = Net()
    opt = build(module, workers)
    opt.step(X, Y)
    aliases: dict[str, Any] = {name: tensor.view(-1) for name, tensor in module.state_dict().items()}
    before = values(module)
    assert shared_mapping(module.get_parameter("layer.weight")) == (workers > 1)
    opt.close()
    for tensor in module.state_dict().values():
        assert not shared_mapping(tensor)
    assert values(module) == before
    overwrite(module)
    assert all(alias.eq(7.0).all() for alias in aliases.values())
    assert opt.parameters.eq(7.0).all()
    opt.parameters.fill_(2.0)
    assert values(module)["layer.bias"] == [2.0, 2.0]


class ForkingOnce:
    """As a hook, a function of workers, of a chunk, or of the module's output: forks at its first call in each worker,
    and comes back twice."""

    def __call__(self, *given: Any) -> Any:
        state = vars(torch)  # of the process, and of its copy
        if "forked" not in state:
            state["forked"] = os.fork()
        return given[-1] if len(given) == 3 else 1


def end_of_copy(worker: Worker) -> int:
    """Wait for the copy; the status that it ended with."""
    return os.waitstatus_to_exitcode(os.waitpid(vars(torch).pop("forked"), 0)[1])


def run(fork: Any, where: str) -> tuple[list[float], list[int]]:
    """Losses of steps and a result of `collect`, all in two workers; and how the copies have ended."""
    net = Net()
    if where == "forward":
        net.register_forward_hook(fork)
    with build(net, 2) as opt:
        opt.prehook = fork if where == "prehook" else None
        if where == "run_on_workers":
            assert opt.run_on_workers(fork) == [1, 1]
        found = [opt.step(X, Y), opt.step(X, Y)]
        if where == "collect":
            assert opt.collect(lambda module, inputs, targets: fork(module, targets, inputs)).equal(X)
        found.append(opt.step(X, Y))
        return found, opt.run_on_workers(end_of_copy) if fork is not no_fork else []


def no_fork(*given: Any) -> Any:
    return given[-1] if len(given) == 3 else 1


@pytest.mark.rows
@pytest.mark.parametrize("where", ["prehook", "forward", "run_on_workers", "collect"])
def test_a_copy_of_a_worker_that_comes_back_from_the_users_code_ends(where: str) -> None:
    expected, _ = run(no_fork, where)
    assert run(ForkingOnce(), where) == (expected, [1, 1])
