"""A call that is cut short at the worst place: what it left half done is done again, not taken for done."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer
from tests.building import handling
from tests.signals import SignalAt, Stop, stop
from tests.workloads import Mlp

X = torch.linspace(-2.0, 2.0, 40 * 6, dtype=torch.float64).reshape(40, 6).sin()
Y = torch.linspace(-1.0, 3.0, 40 * 4, dtype=torch.float64).reshape(40, 4).cos()


class Scaled(Mlp):
    """With a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.get_buffer("scale")


def make(module: nn.Module, **options: Any) -> BatchOptimizer:
    """Two workers."""
    return BatchOptimizer(module, nn.MSELoss(), **{"optimizer": None, "parallelize": 2, **options})


def check(opt: BatchOptimizer) -> None:
    """f and df/dX of the whole batch are those of one process."""
    module = opt.module
    opt.load(X, Y)
    found = opt.evaluate().item()
    gradient = torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])
    loss = nn.functional.mse_loss(module(X), Y)
    expected = torch.autograd.grad(loss, [*module.parameters()])
    assert found == pytest.approx(loss.item())
    torch.testing.assert_close(gradient, torch.cat([part.flatten() for part in expected]))


# ---- out of a signal handler


@pytest.mark.slow
def test_an_optimizer_can_be_used_after_a_signal_wherever_its_owner_is_told() -> None:
    """Of the calls that say who is at work, each is interrupted once."""
    with handling(stop), make(Scaled(), parallelize=1) as opt:
        for number in range(1, 40):
            with suppress(Stop):
                SignalAt(number, "batchopt._machine.ownership").amid(lambda: check(opt))
            check(opt)


class Gated(Scaled):
    """Says in eval mode that it has begun, and then waits for a file."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            (self.directory / f"begun-{os.getpid()}").touch()
            while not (self.directory / "gate").exists():
                time.sleep(0.001)
        return super().forward(x)


def test_a_late_report_of_an_abandoned_call_is_not_taken_for_one_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to light between a look at the page and the next order."""

    def interrupt() -> None:
        while len([*tmp_path.glob("begun-*")]) < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGUSR1)

    module = Gated(tmp_path)
    with handling(stop), make(module) as opt:
        opt.load(X, Y)
        opt.evaluate()
        thread = Thread(target=interrupt)
        thread.start()
        with pytest.raises(Stop):
            opt.predict(X)
        thread.join()
        with torch.no_grad():
            module.second.bias.add_(1.0)
        pool = opt._engine.workers.backend._pool  # type: ignore[attr-defined]
        real = pool.look

        def look(listener: Any) -> None:
            real(listener)
            (tmp_path / "gate").touch()
            while any(worker.evaluates for worker in pool.workers.values()):
                time.sleep(0.001)

        with monkeypatch.context() as patch:
            patch.setattr(pool, "look", look)
            found = opt.evaluate().item()
        assert found == pytest.approx(nn.functional.mse_loss(module(X), Y).item())
        assert [worker.restarts for worker in opt.workers] == [0, 0]


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("minibatches", [False, True])
def test_between_any_two_lines_of_an_evaluation_that_repeats(minibatches: bool) -> None:
    """Workers may have been rung for or not, be at it or done: the next evaluation finds what it would have found."""
    module = Mlp().double()
    with make(module, speeds=[1, 1]) as opt:
        other = Y + 1.0

        def evaluate(y: torch.Tensor) -> tuple[float, torch.Tensor]:
            if minibatches:
                opt.load(X, y)
            return opt.evaluate().item(), opt.grad_parameters.clone()

        opt.load(X, Y)
        expected = evaluate(Y)
        at, is_over = 0, False
        while not is_over:
            for _ in range(2):  # so that the next one repeats
                found = evaluate(Y)
            assert found[0] == expected[0] and torch.equal(found[1], expected[1]), at
            at, is_over = at + 1, not interrupted_at(lambda: evaluate(other), at)
        assert at > 100


def interrupted_at(call: Callable[[], object], line: int) -> bool:
    """Interrupt a call before it runs the line of our code that comes at that place; False if there is none."""
    seen = 0

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == line + 1:
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, _event: str, _: Any) -> Any:
        return on_line if "/batchopt/" in frame.f_code.co_filename else None

    sys.settrace(on_call)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        # what is raised on the line of a `with` at its end does not leave its context
        torch.set_grad_enabled(True)
        np.seterr(divide="warn", over="warn", under="ignore", invalid="warn")
    return False
