"""A module on a card: all that is done with one on the CPU, with the same results, and nothing waits without need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Term, WorkerError
from tests import card
from tests.card.programs import data, residual, short, square, there
from tests.workloads import Pairs

# the kernels of the simulated card give the CPU's no memory for their results
pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")

CPU = torch.device("cpu")


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(device)


def made(device: torch.device, **options: Any) -> BatchOptimizer:
    if not options.keys() & {"residual", "terms"}:
        options.setdefault("loss_fn", square)
    return BatchOptimizer(net(device), **{"optimizer": None, **options})


def both(do: Callable[[BatchOptimizer, torch.Tensor, torch.Tensor], Any], device: torch.device, **options: Any) -> None:
    """The same is found on the CPU and on the card."""
    found = []
    for place in (CPU, device):
        with made(place, **options) as opt:
            x, y = (tensor.to(place) for tensor in data())
            if "terms" not in options:
                opt.load(x, y)
            results = do(opt, x, y)
            found.append([torch.as_tensor(result, dtype=torch.float64).cpu() for result in results])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def ones(opt: BatchOptimizer, *shape: int) -> torch.Tensor:
    return torch.ones_like(opt.parameters).repeat(*shape, 1).squeeze(0)


ASKED: list[Callable[[BatchOptimizer, torch.Tensor, torch.Tensor], Any]] = [
    lambda opt, x, y: [opt.hvp(ones(opt, 1))],
    lambda opt, x, y: [opt.hvp(ones(opt, 3).T)],
    lambda opt, x, y: [opt.predict(x), opt.predict(x.cpu())],
    lambda opt, x, y: [opt.collect(lambda m, x, y: m(x) * y)],
    lambda opt, x, y: [opt.total(lambda m, x, y: (m(x) * y).sum())],
    lambda opt, x, y: opt.evaluate_many(torch.stack([opt.parameters.detach(), 2 * opt.parameters.detach()])),
    lambda opt, x, y: [opt.residuals(), opt.gram(), *(part for part in opt.normal() if part is not None)],
]


def test_products_and_tasks(device: torch.device) -> None:
    for ask in ASKED:
        both(ask, device, residual=residual)


@pytest.mark.parametrize("optimizer", ["cg", "lm", "torch's lbfgs"])
def test_steps(device: torch.device, optimizer: str) -> None:
    both(lambda opt, x, y: [opt.step(x, y) for _ in range(3)], device, optimizer=short(optimizer), residual=residual)


def test_numbers_of_the_cpu_are_not_recorded(recorded: list[Any], device: torch.device) -> None:
    def scaled(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return square(module, x, y) * torch.tensor(1.5)

    with made(device, loss_fn=scaled) as opt:
        opt.load(*there(device))
        for _ in range(3):
            opt.evaluate()
        assert "not on the card" in str(opt.workers[0].graph)


# ---- a batch that is elsewhere


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda x, y, there: (x, y), id="tensors"),
        pytest.param(lambda x, y, there: (x, y.to(there)), id="targets there"),
        pytest.param(lambda x, y, there: (Pairs(x, y), None), id="dataset"),
        pytest.param(lambda x, y, there: ([*x[:, None]], [*y[:, None]]), id="list"),
    ],
)
def test_a_batch_of_the_cpu_is_brought_to_the_module(device: torch.device, form: Any) -> None:
    x, y = data()
    with made(CPU, chunk_size=7, optimizer="lbfgs") as other, made(device, chunk_size=7, optimizer="lbfgs") as opt:
        other.load(x, y)
        expected = other.evaluate().item()
        opt.load(*form(x, y, device))
        for _ in range(3):
            assert opt.evaluate().item() == pytest.approx(expected, rel=1e-12)
            torch.testing.assert_close(opt.grad_parameters.cpu(), other.grad_parameters)
        opt.step(*form(2 * x, y, device))
        other.step(2 * x, y)
        torch.testing.assert_close(opt.parameters.cpu(), other.parameters, rtol=1e-6, atol=1e-9)


def test_a_batch_is_brought_once(simulated: None, device: torch.device) -> None:
    x, y = data()
    with made(device, compile=False) as opt:
        opt.load(x.repeat(1000, 1), y.repeat(1000, 1))
        opt.evaluate()
        before = card.counts()
        opt.evaluate()
        assert card.counts().allocated == before.allocated


def test_terms_on_both_sides(device: torch.device) -> None:
    def do(opt: BatchOptimizer, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        opt.load({"a": (x, y.cpu()), "b": (x.cpu()[:8], y[:8])})
        return [opt.evaluate()]

    both(do, device, terms={"a": Term(square), "b": Term(square, weight=3.0)})


# ---- devices


def test_workers_for_a_module_on_a_card_are_refused_with_what_to_write(device: torch.device) -> None:
    with pytest.raises(ValueError, match=rf"parameters are on {device}; .* module.cpu\(\), .* parallelize=1"):
        made(device, parallelize=2)


def test_auto_is_the_card(device: torch.device) -> None:
    x, y = data()
    with made(device, parallelize="auto", optimizer="lbfgs") as opt:
        for _ in range(3):
            opt.step(x, y)
        assert [worker.device for worker in opt.workers] == [device]


# ---- waiting


def reads_of(call: Callable[[], Any]) -> int:
    before = card.counts().reads
    call()
    return card.counts().reads - before


@pytest.mark.parametrize("chunk_size", [None, 10])
def test_an_evaluation_waits_once(simulated: None, device: torch.device, chunk_size: int | None) -> None:
    with made(device, chunk_size=chunk_size) as opt:
        opt.load(*there(device))
        for _ in range(3):
            opt.evaluate()
        assert min(reads_of(opt.evaluate) for _ in range(3)) <= (1 if chunk_size is None else 2)


@pytest.mark.parametrize(("optimizer", "most"), [("sgd", 1), ("adam", 1), ("cg", 5), ("lbfgs", 7), ("ssbroyden", 6)])
def test_steps_wait_for_what_decides(simulated: None, device: torch.device, optimizer: str, most: int) -> None:
    x, y = there(device)
    with made(device, optimizer=short(optimizer)) as opt:
        for _ in range(4):  # the audits of these evaluations read
            opt.step(x, y)
        before = opt.eval_counter
        assert reads_of(lambda: [opt.step(x, y) for _ in range(3)]) <= most * (opt.eval_counter - before)


# ---- memory


def wide(device: torch.device, **options: Any) -> BatchOptimizer:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)).double().to(device)
    return BatchOptimizer(net, **{"criterion": nn.MSELoss(), "optimizer": None, **options})


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.rand(20_000, 4, dtype=torch.float64), torch.rand(20_000, 1, dtype=torch.float64)


@pytest.mark.parametrize("room", [8_000_000, None])
def test_chunks_fit_into_what_there_is(simulated: None, device: torch.device, batch: Any, room: int | None) -> None:
    with wide(CPU) as opt:
        opt.load(*batch)
        expected, gradient = opt.evaluate().item(), opt.grad_parameters
    x, y = (tensor.to(device) for tensor in batch)
    with wide(device) as opt:
        opt.load(x, y)
        card.limit(None if room is None else card.counts().allocated + room)
        with nullcontext() if room is None else pytest.raises(WorkerError, match="chunk_size='auto' finds chunks that"):
            opt.evaluate()
        card.limit(None)
    with wide(device, chunk_size="auto") as opt:
        opt.load(x, y)
        before = card.counts().allocated
        card.limit(None if room is None else before + room)
        for _ in range(3):
            assert opt.evaluate().item() == pytest.approx(expected, rel=1e-12)
            torch.testing.assert_close(opt.grad_parameters.cpu(), gradient)
        assert opt.predict(x).shape == y.shape
        card.forget_most()
        opt.evaluate()
        taken = card.counts().most - before
        chunks = len(opt._engine.loaded().plan.cut.bounds) - 1
        assert chunks == 1 if room is None else chunks > 1 and room / 16 < taken < room


def test_a_task_that_runs_out_of_memory_before_any_evaluation_did_is_cut(
    simulated: None, device: torch.device, batch: Any
) -> None:
    with wide(device, chunk_size="auto") as opt:
        x, y = batch[0].to(device), batch[1].to(device)
        opt.load(x[:50], y[:50])
        opt.evaluate()
        card.limit(card.counts().allocated + 8_000_000)
        assert opt.predict(x).shape == y.shape
        card.limit(None)
        opt.load(x, y)
        whole = opt.evaluate().item()
        card.limit(card.counts().allocated + 8_000_000)  # somebody else needs it now
        assert opt.evaluate().item() == pytest.approx(whole, rel=1e-12)


def test_a_loss_that_depends_on_the_cut_is_not_cut(simulated: None, device: torch.device, batch: Any) -> None:
    def spread(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module(x).std()
        return found

    with wide(device, criterion=None, loss_fn=spread, chunk_size="auto") as opt:
        x, y = batch[0].to(device), batch[1].to(device)
        opt.load(x, y)
        whole = opt.evaluate().item()
        card.limit(card.counts().allocated + 8_000_000)
        with pytest.raises(WorkerError, match="OutOfMemory"):
            opt.evaluate()
        with pytest.raises(WorkerError, match="OutOfMemory"):
            opt.predict(x)  # nor does lack of memory there cut the loss of a later batch
        card.limit(None)
        opt.load(x, y)
        assert opt.evaluate().item() == whole
