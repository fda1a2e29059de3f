"""`parallelize="auto"`: f, df/dX and bits while the number of workers changes; tests/test_choice.py: what is chosen."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, hogwild
from tests.workloads import Mlp, mlp, reference


class Slow(nn.Module):
    """Takes so long for each sample, whatever else the machine does."""

    def __init__(self, seconds: float = 3e-3) -> None:
        super().__init__()
        self.body = Mlp().double()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x))
        found: torch.Tensor = self.body(x)
        return found


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two cores, and workers start as soon as they are expected to be faster."""
    monkeypatch.setattr("batchopt._engine.tuning.usable_cores", lambda: 2)
    monkeypatch.setattr("batchopt._engine.search.START", 1e-9)


@pytest.fixture
def two_are_faster(monkeypatch: pytest.MonkeyPatch, two_cores: None) -> None:
    """Evaluations take twice as long in one process as in two, however busy the machine is."""
    with BatchOptimizer(**parts(Slow())) as opt:
        kind = type(choice_of(opt))
    took, share_took = kind.took, kind.share_took
    monkeypatch.setattr(kind, "took", lambda self, _: took(self, 0.1 / self.present.workers))
    monkeypatch.setattr(kind, "share_took", lambda self, way, _: share_took(self, way, 0.05))


def choice_of(opt: BatchOptimizer) -> Any:
    """How far the choice has come."""
    assert opt._engine.policies.tuner is not None
    return opt._engine.policies.tuner.search


def has_chosen(opt: BatchOptimizer) -> bool:
    """Tell whether the choice was made."""
    return bool(choice_of(opt).is_over)


def parts(module: nn.Module) -> dict[str, Any]:
    """The arguments of an optimizer that only evaluates."""
    return {"module": module, "criterion": nn.MSELoss(), "optimizer": None, "parallelize": "auto"}


# ---- f, while that changes


@pytest.mark.slow
@pytest.mark.usefixtures("two_are_faster")
@pytest.mark.rows
@pytest.mark.parametrize("chunk_size", [5, None])
def test_f_and_its_gradient_are_those_of_one_process_whoever_evaluates(chunk_size: int | None) -> None:
    case = mlp()
    module = Slow()
    expected, gradient = reference(module, case.criterion, case.inputs, case.targets)
    with BatchOptimizer(**parts(module), chunk_size=chunk_size) as opt:
        opt.load(case.inputs, case.targets)
        assert len(opt.workers) == 1
        bits = set()
        for _ in range(200):
            loss = opt.evaluate()
            bits.add((loss.item(), opt.grad_parameters.sum().item()))
            torch.testing.assert_close(loss.item(), expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(opt.grad_parameters, gradient, rtol=1e-10, atol=1e-12)
            if has_chosen(opt):
                break
        loss = opt.evaluate()
        assert len(opt.workers) == 2, choice_of(opt)
        assert chunk_size is None or len(bits) == 1
        state = opt.state_dict()
        assert state["parallelize"] == {"workers": 2, "threads": 1, "devices": [], "samples": 37}
        opt.load(case.inputs[:9], case.targets[:9])  # the choice is for batches of about that size
        torch.testing.assert_close(
            opt.evaluate().item(), reference(module, case.criterion, case.inputs[:9], case.targets[:9])[0]
        )
    with BatchOptimizer(**parts(module), chunk_size=chunk_size) as opt:
        opt.load_state_dict(state)
        opt.load(case.inputs, case.targets)
        found = opt.evaluate()
        assert len(opt.workers) == 2 and (chunk_size is None or torch.equal(found, loss))


@pytest.mark.nightly  # workers of two threads have a process of their own to be forked from
def test_four_workers_are_tried_then_two_with_two_threads_each(
    monkeypatch: pytest.MonkeyPatch, two_cores: None
) -> None:
    for place in ("_engine.tuning", "_data.arguments"):
        monkeypatch.setattr(f"batchopt.{place}.usable_cores", lambda: 4)
    case, module = mlp(), Slow(0.0)
    expected, gradient = reference(module, case.criterion, case.inputs, case.targets)
    with BatchOptimizer(**parts(module)) as opt:
        kind = type(choice_of(opt))
        took, share_took, times = kind.took, kind.share_took, {(1, None): 0.1, (4, 1): 0.09, (2, 2): 0.05}
        monkeypatch.setattr(kind, "took", lambda self, _: took(self, times.get(self.present[:2], 0.2)))
        monkeypatch.setattr(kind, "share_took", lambda self, way, _: share_took(self, way, 0.06 / way.workers**0.5))
        opt.load(case.inputs, case.targets)
        seen = set()
        while not has_chosen(opt):
            torch.testing.assert_close(opt.evaluate().item(), expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(opt.grad_parameters, gradient, rtol=1e-10, atol=1e-12)
            seen.add(len(opt.workers))
        opt.evaluate()
        assert seen == {1, 4, 2} and len(opt.workers) == 2, choice_of(opt)
        assert opt.run_on_workers(lambda worker: torch.get_num_threads()) == [2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_a_batch_is_not_cut_where_that_would_change_f() -> None:
    case = mlp()
    normalised = nn.Sequential(Slow(), nn.BatchNorm1d(4).double())
    with BatchOptimizer(**parts(normalised)) as opt:
        expected, _ = reference(normalised, case.criterion, case.inputs, case.targets)
        opt.load(case.inputs, case.targets)
        for _ in range(12):
            torch.testing.assert_close(opt.evaluate().item(), expected)
        assert len(opt.workers) == 1 and "how the batch is cut" in choice_of(opt).reason
    with BatchOptimizer(**{**parts(Slow()), "criterion": lambda y, t: (y - t).square().mean().sqrt()}) as opt:
        opt.load(case.inputs, case.targets)
        for _ in range(12):
            opt.evaluate()
        assert len(opt.workers) == 1 and "how the batch is cut" in choice_of(opt).reason
    with BatchOptimizer(**parts(nn.Sequential(Slow(), nn.Dropout()))) as opt:
        opt.load(case.inputs, case.targets)
        found = set()
        while not has_chosen(opt):
            found.add(opt.evaluate().item())
        assert len(found) == 1 and len(opt.workers) == 1 and "draw random numbers" in choice_of(opt).reason


# ---- devices: "cpu:0" stands for one, as its worker has copies of X and the module


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch, two_cores: None) -> Callable[[dict[tuple[int, int], float]], None]:
    """Devices, too, start as soon as they are expected to be faster; evaluations take these seconds, by the number of
    workers and of devices."""
    monkeypatch.setattr("batchopt._engine.search.DEVICE", 1e-9)
    with BatchOptimizer(**parts(Mlp().double())) as opt:
        kind = type(choice_of(opt))
    took, share_took = kind.took, kind.share_took

    def take(seconds: dict[tuple[int, int], float]) -> None:
        def of(found: Any) -> float:
            return seconds[found.present.workers, len(found.present.devices)]

        monkeypatch.setattr(kind, "took", lambda self, _: took(self, of(self)))
        monkeypatch.setattr(kind, "share_took", lambda self, way, _: share_took(self, way, 0.05))

    return take


def chosen(opt: BatchOptimizer) -> tuple[set[float], list[str]]:
    """The values of f until it has chosen; where the workers are then, `here` for this process."""
    case, found = mlp(), set()
    opt.load(case.inputs, case.targets)
    while not has_chosen(opt):
        found.add(round(opt.evaluate().item(), 12))
    found.add(round(opt.evaluate().item(), 12))
    return found, ["here" if worker.pid == os.getpid() else str(worker.device) for worker in opt.workers]


@pytest.mark.slow
def test_a_device_is_used_where_it_is_faster(at_once: Any) -> None:
    case, module = mlp(), Slow(0.0)
    expected, gradient = reference(module, case.criterion, case.inputs, case.targets)
    given: dict[str, Any] = {**parts(module), "devices": ["cpu:0", "cpu:0"]}
    at_once({(1, 0): 0.1, (1, 1): 0.03, (2, 2): 0.04, (2, 0): 0.1})
    with BatchOptimizer(**given) as opt:
        opt.load(case.inputs, case.targets)
        while not has_chosen(opt):
            torch.testing.assert_close(opt.evaluate().item(), expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(opt.grad_parameters, gradient, rtol=1e-10, atol=1e-12)
        state = opt.state_dict()
        assert state["parallelize"]["devices"] == ["cpu:0"]
        opt.evaluate()
        assert [(worker.pid == os.getpid(), str(worker.device)) for worker in opt.workers] == [(False, "cpu:0")]
        tried = set(choice_of(opt).times)
        assert {len(one.devices) for one in tried} == {0, 1, 2} and "a worker on cpu:0" in str(choice_of(opt))
        with pytest.raises(ValueError, match="share memory"):
            hogwild(opt, (case.inputs, case.targets), lambda p: torch.optim.SGD(p, lr=1e-3), batch_size=8)
        opt.resize(2)  # on the cores
        assert opt.run_on_workers(lambda worker: str(worker.device)) == ["cpu", "cpu"]
        opt.resize("auto")
        assert opt.workers[0].pid == os.getpid()
    for devices, where in ((["cpu:0", "cpu:0"], "cpu:0"), (["cpu:1"], "cpu")):
        with BatchOptimizer(**{**given, "devices": devices}) as opt:
            opt.load_state_dict(state)
            opt.load(case.inputs, case.targets)
            torch.testing.assert_close(opt.evaluate().item(), expected, rtol=1e-12, atol=0)
            assert [str(worker.device) for worker in opt.workers] == [where]
            for wrong in (None, "cpu:0", ["gpu:0"]):
                with pytest.raises((TypeError, RuntimeError)):  # by torch, and nothing is changed
                    opt.load_state_dict({**state, "parallelize": {**state["parallelize"], "devices": wrong}})


class Elsewhere(nn.Module):
    """Does something in other processes, where it sees all samples."""

    def __init__(self, does: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.does, self.here = Mlp().double(), does, os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return self.does(found) if len(x) == 37 and os.getpid() != self.here else found


def fails(y: torch.Tensor) -> torch.Tensor:
    """A device that is broken."""
    raise RuntimeError("CUDA error")


def other(y: torch.Tensor) -> torch.Tensor:
    """Another f."""
    return 1.01 * y


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("does", [other, fails])
def test_where_a_device_fails_or_finds_another_f_the_choice_goes_on_without_it(at_once: Any, does: Any) -> None:
    at_once({(1, 0): 0.1, (1, 1): 0.01, (2, 0): 0.05})
    with BatchOptimizer(**parts(Elsewhere(does)), devices=["cpu:0"]) as opt:
        found, where = chosen(opt)
        assert len(found) == 1 and where == ["cpu", "cpu"] and "a worker on cpu:0 failed" in str(choice_of(opt))


# ---- where the number of workers stays


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_with_state_in_workers_their_number_is_one_per_core_and_stays() -> None:
    case = mlp()
    hooked: dict[str, Any] = {"prehook": lambda worker, sample: None}
    with BatchOptimizer(**parts(Mlp().double()), **hooked) as opt:
        assert opt._engine.policies.tuner is None
    with BatchOptimizer(**parts(Mlp().double())) as opt:
        opt.load(case.inputs, case.targets)
        expected = opt.evaluate()
        assert opt.run_on_workers(lambda worker: worker.rank) == [0, 1]
        torch.testing.assert_close(opt.evaluate(), expected)
        opt.resize(1)
        assert len(opt.workers) == 1 and has_chosen(opt)
        opt.resize("auto")
        assert not has_chosen(opt)
        opt.prehook = hooked["prehook"]
        assert len(opt.workers) == 2
        opt.resize("auto")
        hogwild(opt, (case.inputs, case.targets), lambda p: torch.optim.SGD(p, lr=1e-3), batch_size=8)
        assert len(opt.workers) == 2
        assert opt.check(case.inputs, case.targets).healthy


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_mini_batches_and_functions_of_the_batch_go_on_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    case = mlp()
    batches = [(case.inputs[i : i + 12], case.targets[i : i + 12]) for i in (0, 12, 24)]
    found: list[Any] = []
    workers: list[int] = []
    rounds = 0
    for parallelize in ("auto", 1):
        torch.manual_seed(1)
        options: dict[str, Any] = {"optimizer": "sgd", "parallelize": parallelize, "chunk_size": 3, "verbose": 1}
        with BatchOptimizer(Slow(5e-3), nn.MSELoss(), **options) as opt:
            losses: list[float] = []
            # workers come when they are ready: on a busy machine after more rounds
            while len(losses) < 3 * rounds or (not found and len(losses) < 600 and not has_chosen(opt)):
                losses += opt.steps(batches)
            rounds = len(losses) // 3
            outputs = opt.predict(case.inputs)
            found.append((losses, outputs, opt.hvp(torch.ones_like(opt.parameters)), opt.fingerprint()))
            workers.append(len(opt.workers))
    assert workers == [2, 1]
    assert found[0][0] == found[1][0] and found[0][3] == found[1][3]
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][2], found[1][2])
    assert capsys.readouterr().err.count("evaluations are by 2 workers, threads=1: measured") == 1


FACTOR = [1.0]  # which the module of this name in a worker has as in the file


def scaled(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean square, by a global of this file."""
    return FACTOR[0] * (output - targets).square().mean()


def only_here(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Fails in every other process."""
    assert os.getpid() == int(os.environ["BATCHOPT_TEST_HERE"])
    return nn.functional.mse_loss(output, targets)


def locked(lock: Any, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Holds what no other process can have."""
    return nn.functional.mse_loss(output, targets)


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("criterion", "reason"),
    [
        (scaled, "f or df/dX is another one there"),
        (only_here, "it cannot be evaluated there"),
        (functools.partial(locked, threading.Lock()), "cannot be sent"),
    ],
)
def test_workers_are_not_used_where_they_find_another_f_or_none(
    criterion: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = mlp()
    monkeypatch.setattr("tests.test_auto.FACTOR", [2.0])
    monkeypatch.setenv("BATCHOPT_TEST_HERE", str(os.getpid()))
    with BatchOptimizer(**{**parts(Slow()), "criterion": criterion, "reduction": "mean"}, check_cut=False) as opt:
        opt.load(case.inputs, case.targets)
        expected = opt.evaluate()
        for _ in range(400):
            assert torch.equal(opt.evaluate(), expected)
            if has_chosen(opt):
                break
        assert len(opt.workers) == 1 and reason in choice_of(opt).reason
        assert torch.equal(opt.evaluate(), expected) and opt.eval_counter > 2
