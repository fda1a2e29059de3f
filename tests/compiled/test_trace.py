"""What can be traced is, with all that it reads as inputs; what cannot is refused, each with its reason."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchopt._program import compiler
from batchopt_workers.batch.batch import Piece
from batchopt_workers.evaluate.program import Program
from batchopt_workers.life.torch_settings import TorchSettings
from batchopt_workers.shortcuts.compiler import traced
from batchopt_workers.shortcuts.form import PackedPiece, Request, form_of
from batchopt_workers.shortcuts.shortcuts import Differs, Outcome, compare
from batchopt_workers.shortcuts.trace import Traced
from batchopt_workers.wire.packing import pack

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own, as in the process that compiles

Loss = Callable[[nn.Module, Any, Any], torch.Tensor]


def net(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), *extra, nn.Tanh(), nn.Linear(8, 1))


def plain(module: nn.Module, x: torch.Tensor, y: Any) -> torch.Tensor:
    loss: torch.Tensor = module(x).square().sum()
    return loss


def request(module: nn.Module, loss: Loss, inputs: torch.Tensor, targets: Any = None) -> Request:
    """What the parent requests for a batch."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    program = pack(Program(module, None, (loss,), 0), parameters, expanded=True)
    piece = Piece(inputs, targets, None, range(len(inputs)), 1.0)
    own, form = pack((inputs, targets, {})), form_of(piece)
    assert form is not None
    return Request(
        program.data,
        program.placements,
        pack(parameters).placements,
        (PackedPiece(form, own.data, own.placements, len(inputs), 64),),
        TorchSettings.current(),
        1,
        "",
    )


def trace_of(module: nn.Module, loss: Loss, inputs: torch.Tensor | None = None) -> Traced:
    asked = request(module, loss, torch.randn(16, 3) if inputs is None else inputs)
    return traced(asked, asked.pieces[0])


class Counting(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.layer = 0, nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.layer(x)
        return found * self.calls


class Writing(nn.Module):
    """Writes a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.memory = nn.Linear(3, 1), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory += 1
        found: torch.Tensor = self.layer(x)
        return found


def moved(module: Any, x: torch.Tensor, y: Any) -> torch.Tensor:
    module[1].running_mean.data = torch.ones(8)
    return plain(module, x, y)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Loss, str]] = {
    "a branch": (net, lambda m, x, y: plain(m, x, y) * (2 if x.mean() > 0 else 1), "data-dependent"),
    "NumPy of the batch": (net, lambda m, x, y: plain(m, x, y) * float(x.detach().numpy().sum()), "numpy"),
    "a counter": (Counting, plain, "Python objects"),
    "draws of NumPy": (net, lambda m, x, y: plain(m, x, y) * np.random.rand(), "random numbers in Python"),
    "draws of random": (net, lambda m, x, y: plain(m, x, y) * random.random(), "random numbers in Python"),
    "samples are written": (net, lambda m, x, y: plain(m, x.mul_(2), y), "writes the samples"),
    "a constant is written": (Writing, plain, "writes a constant"),
    "memory of a buffer is replaced": (lambda: net(nn.BatchNorm1d(8)), moved, "other memory"),
    "complex numbers": (net, lambda m, x, y: torch.complex(m(x)[:, 0], m(x)[:, 0]).abs().sum(), "complex"),
    "a parameter that is scaled": (
        lambda: nn.Sequential(nn.Embedding(4, 3, max_norm=1.0), nn.Linear(3, 1)),
        lambda m, x, y: m(x.long()[:, 0].abs() % 4).square().sum(),
        "writes a parameter",
    ),
}


@pytest.mark.rows
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_trace_would_not_see_is_refused(case: str) -> None:
    make, loss, reason = REFUSED[case]
    with pytest.raises(Exception) as caught:
        trace_of(make(), loss)
    assert reason in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("loss", "serves"),
    [
        (plain, {2: True, 16: True, 64: True}),
        (lambda m, x, y: m(x).square().mean(), {2: True, 16: True, 64: True}),
        (lambda m, x, y: plain(m, x, y) if x.shape[0] > 10 else 2 * plain(m, x, y), {10: False, 11: True, 16: True}),
        (lambda m, x, y: plain(m, x.reshape(16, 3), y), {16: True, 17: False}),
    ],
)
def test_one_graph_serves_the_numbers_of_samples_for_which_the_code_is_the_same(
    loss: Loss, serves: dict[int, bool]
) -> None:
    found = trace_of(net(), loss)
    assert {samples: found.serves(samples) for samples in serves} == serves


@pytest.mark.slow
def test_equal_computations_have_equal_digests() -> None:
    """Whatever made them; a Python number, a mode, and a literal are part of what is computed."""

    def digest(factor: float = 2.0, literal: float = 1.0, module: nn.Module | None = None) -> bytes:
        def loss(m: nn.Module, x: torch.Tensor, y: Any) -> torch.Tensor:
            return factor * plain(m, x * torch.tensor([1.0, literal, 3.0]), y)

        return trace_of(module or net(), loss).digest()

    assert digest() == digest()
    others = digest(factor=3.0), digest(literal=2.0), digest(module=net(nn.Dropout(0.5)))
    assert len({digest(), *others}) == 4


def test_derivatives_by_forward_mode_have_memory() -> None:
    """Their zeros have none, and compiled code would read it."""

    def loss(m: nn.Module, x: torch.Tensor, y: Any) -> torch.Tensor:
        along = torch.zeros_like(x)
        along[:, 0] = 1.0
        value, slope = torch.func.jvp(m, (x,), (along,))  # type: ignore[misc]
        found: torch.Tensor = (value * slope).square().sum()
        return found

    found = trace_of(net(), loss)
    assert torch.ops.aten._efficientzerotensor.default not in {node.target for node in found.graph.graph.nodes}


# ---- the comparison with eager evaluations: rounding passes, anything else does not


D = torch.float64


def outcome(loss: float, *gradient: float) -> Outcome:
    return Outcome(torch.tensor(loss, dtype=D), [torch.tensor(gradient, dtype=D), None], [], [])


NAN, INF = float("nan"), float("inf")


def test_rounding_passes_and_what_is_not_finite_in_both() -> None:
    for found, expected in (((1 + 1e-12, 1e-14, 1.0), (1.0, 0.0, 1.0)), ((NAN, INF, 1.0), (NAN, INF, 1.0))):
        compare(outcome(*found), outcome(*expected), outcome(*expected))


def test_of_residuals_that_cancel_rounding_is_that_of_their_terms() -> None:
    """At the minimum of a sum of squares f is nothing but rounding."""
    expected, nearby = outcome(1e-28, 1e-14), outcome(3e-28, 3e-14)
    compare(outcome(2e-28, 2e-14), expected, nearby)
    with pytest.raises(Differs, match="the loss differs by 1e-28 of 1e-28"):
        compare(outcome(2e-28, 1e-14), expected, expected)
    with pytest.raises(Differs, match="the loss differs by 1e-12 of 1e-28"):
        compare(outcome(1e-12, 1e-14), expected, nearby)
    with pytest.raises(Differs, match="a gradient differs"):
        compare(outcome(1e-28, 1e-8), expected, nearby)


@pytest.mark.parametrize("found, words", [(1.001, ""), (NAN, " by nan")])
def test_nothing_else_passes(found: float, words: str) -> None:
    with pytest.raises(Differs, match=f"the loss differs{words}"):
        compare(outcome(found), outcome(1.0), outcome(1.0))
    with pytest.raises(Differs, match=f"a gradient differs{words}"):
        compare(outcome(1.0, found), outcome(1.0, 1.0), outcome(1.0, NAN))
    with pytest.raises(Differs, match="other parameters"):
        compare(outcome(1.0), outcome(1.0)._replace(gradients=[None, None]), outcome(1.0))


# ---- the process that compiles


def test_what_was_closed_does_not_answer_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    is_next = threading.Event()
    monkeypatch.setattr(compiler, "_last_line", lambda stderr: str(is_next.wait(60)))
    nothing = Request(b"no program", (), (), (), TorchSettings.current(), 1)
    found = compiler.Compiler()
    try:
        found.request(nothing)
        first = found._thread
        assert first is not None
        found.close()
        found.request(nothing._replace(program=b"another one"))
        is_next.set()
        first.join(60)
        assert "has ended" not in str(found.reply(waits=False))
    finally:
        found.close()
