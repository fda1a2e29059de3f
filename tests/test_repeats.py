"""An evaluation that repeats goes a short way, here and with workers, and finds what an ordinary one does."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Sample, Worker
from tests.building import loaded

N = 24
X = torch.linspace(-2.0, 2.0, N * 3).reshape(N, 3).sin()
Y = torch.linspace(-1.0, 3.0, N * 2).reshape(N, 2).cos()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch, nobody_late: None) -> None:
    """An evaluation is a repetition also on a machine that is busy."""
    monkeypatch.setattr("batchopt.backends.process.repeat.GRACE", 5.0)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def move(opt: BatchOptimizer) -> None:
    """A step that any optimizer could have made."""
    opt.parameters.sub_(opt.grad_parameters, alpha=0.1)


class Counts:
    """A posthook that counts, and returns something now and then."""

    def __init__(self, returns: int) -> None:
        self.returns = returns

    def __call__(self, worker: Worker, sample: Sample) -> int | None:
        worker.state["calls"] = calls = worker.state.get("calls", 0) + 1
        return calls if calls % self.returns == 0 else None


@pytest.mark.parametrize("parallelize, chunk_size", [(1, None), (1, 5), (2, None)])
def test_a_posthook_that_returns_something_now_and_then(
    parallelize: int, chunk_size: int | None, nobody_late: None
) -> None:
    found: list[list[int | None]] = []
    options: dict[str, Any] = {"parallelize": parallelize, "speeds": [1] * parallelize, "chunk_size": chunk_size}
    with loaded(plain(), nn.MSELoss(), X, Y, posthook=Counts(7), **options) as opt:
        for _ in range(9):
            opt.evaluate()
            found.append(opt.hook_results)
            move(opt)
        calls = opt.run_on_workers(lambda worker: worker.state["calls"])
        chunks = parallelize if chunk_size is None else 5
    assert [len(results) for results in found] == [chunks] * 9
    assert sum(calls) == 9 * chunks  # each once
    said = [result for results in found for result in results if result is not None]
    assert sorted(said) == sorted(n for number in calls for n in range(7, number + 1, 7))


class Sometimes(nn.Module):
    """Uses its second layer, or draws a random number, depending on the sign of a parameter."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.draws = nn.Linear(3, 2), nn.Linear(2, 2), draws
        self.sign = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x) * self.sign.square()
        if self.sign > 0:
            return y
        return y + 1e-9 * torch.rand(()) if self.draws else self.second(y)


@pytest.mark.slow
@pytest.mark.parametrize("draws", [False, True])
def test_gradients_of_a_function_that_takes_another_path_now_and_then(draws: bool) -> None:
    module = Sometimes(draws)
    with loaded(module, nn.MSELoss(), X, Y) as opt:
        kept = opt.grad_parameters.clone()
        for i in range(12):
            with torch.no_grad():
                module.sign.fill_(-1.0 - i if i % 4 == 3 else 1.0 + i)
            opt.evaluate()
            found = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            kept.copy_(opt.grad_parameters)
            parameters = [*module.parameters()]
            expected = torch.autograd.grad(nn.functional.mse_loss(module(X), Y), parameters, allow_unused=True)
            for gradient, by_torch in zip(found, expected, strict=True):
                assert (by_torch is None) == (gradient is None)
                if gradient is not None:
                    torch.testing.assert_close(gradient, by_torch, rtol=1e-5, atol=1e-7)
            opt.hvp(torch.ones_like(kept))
            opt.predict()


def test_an_overridden_map_is_not_repeated() -> None:
    class Clipped(BatchOptimizer):
        def map(self) -> Any:
            answers = super().map()
            return [replace(answer, partials=[*map(self.clip, answer.partials)]) for answer in answers]

        @staticmethod
        def clip(found: Any) -> Any:
            node, partial = found
            return node, partial._replace(gradient=partial.gradient.clone().zero_())

    with Clipped(plain(), nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        opt.load(X, Y)
        for _ in range(3):
            opt.evaluate()
            assert not opt.grad_parameters.any()
        for _ in range(3):
            opt._engine.evaluate()
            assert opt.grad_parameters.any()
            move(opt)


def test_frames_of_a_product_that_repeats() -> None:
    with loaded(nn.Linear(1, 1), nn.MSELoss(), ONES, TARGETS, parallelize=2, speeds=[1, 1]) as opt:
        assert least(lambda: opt.hvp(torch.ones(2))) <= 280


def test_frames_of_evaluations_and_products_in_turn() -> None:
    """As of Levenberg-Marquardt: orders of one kind do not keep those of another from being repeated."""
    with loaded(nn.Linear(1, 1), nn.MSELoss(), ONES, TARGETS, parallelize=2, speeds=[1, 1]) as opt:
        assert least(lambda: (opt.evaluate(), opt.normal())) <= 333


# ---- a budget of frames


def frames(call: Callable[[], object]) -> int:
    """How many Python frames a call enters, torch's own aside."""
    found = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call" and "/torch/" not in frame.f_code.co_filename

    gc.disable()  # at a collection hypothesis has a function called
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def least(call: Callable[[], object]) -> int:
    """Of some calls that repeat, the one that enters the fewest: now and then an evaluation looks at everything."""
    for _ in range(8):
        call()
    return min(frames(call) for _ in range(40))


ONES, TARGETS = torch.ones(64, 1), torch.ones(64, 1)


def of_evaluation(parallelize: int, chunk_size: int | None = None) -> int:
    with loaded(nn.Linear(1, 1), nn.MSELoss(), ONES, TARGETS, parallelize=parallelize, chunk_size=chunk_size) as opt:
        return least(opt.evaluate)


def of_minibatch(parallelize: int) -> int:
    with BatchOptimizer(nn.Linear(1, 1), nn.MSELoss(), optimizer="sgd", parallelize=parallelize) as opt:
        return least(lambda: opt.step(ONES, TARGETS))


def test_frames_of_evaluations_and_minibatches_that_repeat() -> None:
    alone, two, four, chunks = of_evaluation(1), of_evaluation(2), of_evaluation(4), of_evaluation(1, 16)
    assert alone <= 51
    assert two <= 39
    assert (four - two) / 2 <= 1
    assert (chunks - alone) / 3 <= 24
    assert of_minibatch(1) <= 149
    assert of_minibatch(2) <= 150
