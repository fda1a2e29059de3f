"""What a task does with a module leaves the module as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchopt_workers.data.batch import Piece
from batchopt_workers.data.layout import Layout, Slot
from batchopt_workers.tasks.task import Applied, Modes, ParameterWatch, Predicted, PrivateTotals, Surroundings
from batchopt_workers.worker import Worker
from tests.workloads import Mlp, no_residuals

X = torch.linspace(-1.0, 1.0, 30).view(5, 6)


def around(module: nn.Module) -> Surroundings:
    worker, parameters = Worker(0, 1, torch.device("cpu"), module), list(module.parameters())
    return Surroundings(
        worker, module, parameters, lambda: torch.zeros(()), no_residuals, 1.0, lambda cut, gradient: ((), X)
    )


def piece(targets: torch.Tensor | None = None) -> Piece:
    return Piece(X, targets, None, range(5), 1.0)


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


def test_hooks_on_layers_are_gone_whatever_happens() -> None:
    module = Mlp()
    assert list(Applied(None, layers=("first",))(piece(), around(module))) == ["first"]
    for function in (lambda m, inputs, targets: 1 / 0, lambda m, inputs, targets: m.first(inputs) + m.first(inputs)):
        with pytest.raises((ArithmeticError, ValueError)):
            Applied(function, layers=("first",))(piece(), around(module))
    with pytest.raises(ValueError, match="layer 'second' was not called"):
        Applied(lambda m, inputs, targets: inputs, layers=("second",))(piece(), around(module))
    assert not any(part._forward_hooks for part in module.modules())


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
