"""What a task does with a module leaves the module as it was; derivatives of a piece are those of plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchopt_workers.data.batch import Batch, Columns, Part, Piece
from batchopt_workers.data.layout import Layout, Slot
from batchopt_workers.map.derivatives import AtPoints, HessianProducts, InputGradients
from batchopt_workers.map.evaluate import Evaluator
from batchopt_workers.map.module_state import ModuleState
from batchopt_workers.map.program import Program
from batchopt_workers.map.watch import ParameterWatch
from batchopt_workers.map.weighting import Weighting
from batchopt_workers.process.messages import Cut, Kind, Order
from batchopt_workers.tasks.forms import MemoryOutput, sums_layout
from batchopt_workers.tasks.task import Applied, Modes, PieceContext, Predicted, PrivateTotals, Task
from batchopt_workers.worker import Worker
from tests.workloads import Mlp, no_residuals

X = torch.linspace(-1.0, 2.0, 30).view(5, 6).sin()
CUT = Cut((0, 5))


def piece(inputs: Any = X) -> Piece:
    return Piece(inputs, None, None, range(5), 1.0)


def around(module: nn.Module, inputs: Any = X, weight: float = 1.0) -> PieceContext:
    """Of a loss that is the sum of the squared outputs; an evaluation returns the parameters as its gradient."""

    def loss() -> torch.Tensor:
        found: torch.Tensor = module(inputs).square().sum()
        return found

    def evaluate(cut: Cut, gradient: bool) -> tuple[tuple[float, ...], torch.Tensor]:
        return (loss().item(),), torch.cat([p.detach().flatten() for p in module.parameters()])

    worker = Worker(0, 1, torch.device("cpu"), module)
    return PieceContext(
        worker, module, list(module.parameters()), loss, no_residuals, weight, lambda: Batch(()), evaluate
    )


class Careful(nn.Dropout):
    """Wants to know what is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training":
            self.heard = value


@pytest.mark.parametrize("train", [True, False, None])
def test_each_part_is_put_back_into_its_own_mode(train: bool | None) -> None:
    norm = nn.BatchNorm1d(2).eval()
    module = nn.Sequential(nn.Dropout(), nn.Sequential(norm), Careful())
    parts, modes = Modes(module, train), [part.training for part in module.modules()]
    for _ in range(3):
        with pytest.raises(ArithmeticError), parts:
            inside = [part.training for part in module.modules()]
            module.train(not module.training)
            raise ArithmeticError
        assert inside == (modes if train is None else [train] * len(modes))
        assert [part.training for part in module.modules()] == modes
        assert module[2].heard == modes[-1]
        norm.train(not norm.training)  # another one to come back to
        modes = [part.training for part in module.modules()]


class FrozenNorm(nn.Sequential):
    """Keeps its second part in evaluation mode, and cannot be made to evaluate."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self[1].eval()
        self.calls = getattr(self, "calls", 0) + 1
        if not mode:
            raise ArithmeticError
        return self


def test_a_module_with_a_train_of_its_own_is_asked_each_time() -> None:
    module = FrozenNorm(nn.Dropout(), nn.BatchNorm1d(2))
    nn.Module.train(module, False)
    parts = Modes(module, True)
    for _ in range(3):
        with parts:
            assert [part.training for part in module.modules()] == [True, True, False]
            assert module.calls == 1
        assert not hasattr(module, "calls")
        assert not any(part.training for part in module.modules())
    module.train()
    with pytest.raises(ArithmeticError), Modes(module, False):
        pass
    assert [part.training for part in module.modules()] == [True, True, False]


def test_graphs_are_recorded_if_they_are_asked_for() -> None:
    module = Mlp()
    with torch.no_grad():
        assert Applied(None, grad=True)(piece(), around(module)).requires_grad
    assert not Applied(None)(piece(), around(module)).requires_grad
    assert not Predicted()(piece(), around(module)).requires_grad
    assert torch.is_grad_enabled()
    with pytest.raises(ValueError, match="the items have no targets"):
        Predicted(targets=True)(piece(), around(module))


@pytest.mark.parametrize("protected", [False, True])
def test_a_parameter_that_was_changed_is_named_and_put_back(protected: bool) -> None:
    module = Mlp()
    parameters = list(module.parameters())
    before, memory = [p.detach().clone() for p in parameters], [p.data_ptr() for p in parameters]
    watch = ParameterWatch(module, parameters, protected)
    watch.check()
    module.second.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"changes the parameter 'second\.weight'"):
        watch.check()
    module.first.bias.data = torch.ones(9)
    with pytest.raises(ValueError, match=r"changes the parameter 'first\.bias'"):
        watch.check()
    if not protected:
        with torch.no_grad():
            module.first.weight.add_(1)
        with pytest.raises(ValueError, match=r"changes the parameter 'first\.weight'"):
            watch.check()
    assert all(map(torch.equal, parameters, before)) and [p.data_ptr() for p in parameters] == memory
    assert all(p.requires_grad for p in parameters)
    watch.check()


def test_parameters_that_are_nan_have_not_changed() -> None:
    module = Mlp()
    with torch.no_grad():
        module.first.weight[0, 0] = torch.nan
    ParameterWatch(module, list(module.parameters()), False).check()


def test_rows_for_sums_keep_what_they_have_while_their_layout_is_the_same() -> None:
    totals = PrivateTotals()
    layout = Layout((Slot("", (3,), 0),), torch.float32)
    totals.rows(layout, 1)[0].gradient.fill_(5)
    rows = totals.rows(layout, 3)
    assert len(rows) == 3 and rows[0].gradient.tolist() == [5] * 3
    assert totals.rows(layout, 2) is rows
    assert len(totals.rows(Layout((Slot("", (2,), 0),), torch.float32), 1)) == 1


# ---- derivatives


def test_gradients_with_respect_to_inputs_keep_their_structure() -> None:
    module, x = Mlp().double(), X.double()
    given = {"x": x, "index": torch.arange(5), "unused": torch.ones(5)}
    of_all = piece(given)
    surroundings = around(module, weight=0.5)._replace(loss=lambda: module(of_all.inputs["x"]).square().sum())
    found = InputGradients()(of_all, surroundings)
    assert of_all.inputs is given and not x.requires_grad and all(p.grad is None for p in module.parameters())
    inputs = x.clone().requires_grad_()
    (0.5 * module(inputs).square().sum()).backward()
    torch.testing.assert_close(found["x"], inputs.grad)
    assert found["index"] is None and not found["unused"].any()
    whole = piece(torch.arange(5))
    with pytest.raises(TypeError, match="nothing to differentiate by"):
        InputGradients()(whole, around(module))
    assert not whole.inputs.requires_grad


@pytest.mark.parametrize("frozen", [False, True])
def test_products_with_several_directions(frozen: bool) -> None:
    module = Mlp().double()
    module.second.requires_grad_(not frozen)
    surroundings = around(module, X.double(), 2.0)
    size = sum(p.numel() for p in module.parameters())
    directions = torch.linspace(-1, 1, 2 * size, dtype=torch.float64).view(2, size)
    module.first.weight.grad = torch.ones_like(module.first.weight)
    found = HessianProducts(directions)(piece(), surroundings)
    assert module.first.weight.grad.eq(1).all() and module.first.bias.grad is None
    trained = [p for p in module.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    gradients = torch.autograd.grad(surroundings.loss(), trained, create_graph=True)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    for direction, product in zip(directions, found, strict=True):
        expected = torch.autograd.grad(2.0 * flat @ direction[:count], trained, retain_graph=True)
        torch.testing.assert_close(product[:count], torch.cat([part.flatten() for part in expected]))
        assert not product[count:].any()
    assert not HessianProducts(directions)(piece(), surroundings._replace(weight=0.0)).any()


def test_parameters_are_back_in_their_memory_after_points_whatever_happens() -> None:
    module = Mlp()
    memory = [p.data_ptr() for p in module.parameters()]
    points = torch.zeros(3, sum(p.numel() for p in module.parameters()))
    points[1] = 1.0
    found = AtPoints(CUT, True)(piece(points), around(module))
    assert torch.equal(found["gradients"], points) and found["losses"][0] == 0 != found["losses"][1]
    assert list(AtPoints(CUT, False)(piece(points), around(module))) == ["losses"]
    assert [p.data_ptr() for p in module.parameters()] == memory

    def fails(cut: Cut, gradient: bool) -> tuple[tuple[float, ...], torch.Tensor]:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        AtPoints(CUT, True)(piece(points), around(module)._replace(evaluate=fails))
    assert [p.data_ptr() for p in module.parameters()] == memory


# ---- orders of tasks, carried out chunk by chunk


SIZE = 12
ROWS = torch.linspace(-1, 2, SIZE * 3).sin().view(SIZE, 3)


def carried_out(bounds: tuple[int, ...], kind: Kind, function: Any, runs: Sequence[tuple[int, int]]) -> Any:
    """What is collected, or summed, if these runs of chunks are ordered one after the other."""
    module = nn.Linear(3, 2)
    program, worker = Program(module, None, (None,), 0), Worker(0, 1, torch.device("cpu"), module, None)
    state = ModuleState(module)
    state.watch((), module.parameters())
    evaluator = Evaluator(program, worker, list(module.parameters()), state)
    tasks, output = evaluator.tasks, MemoryOutput()
    part = Part(Columns(ROWS), None, None, Weighting("mean", SIZE))
    tasks.begin(Task(Applied(function), aside=True), Batch((part,)))
    tasks.output, tasks.cut = output, Cut(bounds)
    for first, last in runs:
        for done in tasks.evaluate(Order(1, 0, first, last, kind), evaluator):
            report, form = done.report(), done.form
    rows = tasks.totals.rows(sums_layout(form.columns), 1) if kind is Kind.TOTAL and form else None
    tasks.end()
    with pytest.raises(RuntimeError, match="no task was begun"):
        _ = tasks.loaded
    if kind is Kind.COLLECT:
        assert form is not None
        return form.filled(output.tensors)
    ((_, partial),) = report.partials
    assert rows is not None
    return rows[partial.row].views


def sums(module: nn.Module, inputs: torch.Tensor, targets: None) -> Any:
    return inputs.sum(0), inputs[0, 0] > 0


@given(st.sets(st.integers(1, SIZE - 1), max_size=6), st.randoms())
def test_runs_in_any_order_make_the_same_rows_and_the_same_sum(cuts: set[int], random: Any) -> None:
    bounds = (0, *sorted(cuts), SIZE)
    runs = [(chunk, chunk + 1) for chunk in range(len(bounds) - 1)]
    in_order = carried_out(bounds, Kind.TOTAL, sums, [(0, len(runs))])
    random.shuffle(runs)
    assert torch.equal(carried_out(bounds, Kind.COLLECT, lambda m, inputs, targets: inputs * 2, runs), 2 * ROWS)
    assert all(map(torch.equal, in_order, carried_out(bounds, Kind.TOTAL, sums, runs)))
    # chunks are summed in their own dtype
    torch.testing.assert_close(in_order[0], ROWS.double().sum(0), rtol=1e-5, atol=1e-5)
