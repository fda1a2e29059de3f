"""What PyTorch's first releases promised for several processes; docs/ancestors.md has the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, WorkerError
from tests.building import loaded, on
from tests.workloads import mlp, reference

each_number = pytest.mark.parametrize("parallelize", [1, 2])


@each_number
def test_a_module_that_is_shared_already(parallelize: int) -> None:
    case = mlp()
    case.module.share_memory()
    with on(case, parallelize=parallelize) as opt:
        f, gradient = case.reference()
        assert opt.evaluate().item() == pytest.approx(f, rel=1e-12)
        torch.testing.assert_close(opt.grad_parameters, gradient, rtol=1e-12, atol=1e-14)


class Deepening(nn.Module):
    """Its graph is another one for each sample: as many layers as the sample says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + int(x[0].abs() * 3)):
            x = torch.tanh(self.layer(x))
        return x


@each_number
def test_a_graph_that_depends_on_the_data(parallelize: int) -> None:
    torch.manual_seed(0)
    net = Deepening().double()
    samples = list(torch.randn(11, 4).double())
    targets = [torch.zeros(4).double()] * 11
    f, gradient = reference(net, nn.MSELoss(), samples, targets)
    with loaded(net, nn.MSELoss(), samples, targets, parallelize=parallelize) as opt:
        assert opt.evaluate().item() == pytest.approx(f, rel=1e-12)
        torch.testing.assert_close(opt.grad_parameters, gradient, rtol=1e-12, atol=1e-14)


class Tripled(nn.Module):
    """A hook on a tensor of its forward makes the gradient of the first layer three times as large."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.net.get_submodule("first")(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        found: torch.Tensor = self.net.get_submodule("second")(torch.tanh(hidden))
        return found


def halved(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return (inputs[0] / 2,)


@each_number
def test_hooks_on_tensors_of_a_forward_fire_and_inner_outputs_are_collected(parallelize: int) -> None:
    case = mlp()
    module = Tripled(case.module)
    handle = case.module.get_submodule("second").register_full_backward_hook(halved)
    f, gradient = reference(module, case.criterion, case.inputs, case.targets)
    with loaded(module, case.criterion, case.inputs, case.targets, parallelize=parallelize) as opt:
        assert opt.evaluate().item() == pytest.approx(f, rel=1e-12)
        torch.testing.assert_close(opt.grad_parameters, gradient, rtol=1e-12, atol=1e-14)
        hidden = opt.collect(layers=["net.first"])["net.first"]
        torch.testing.assert_close(hidden, case.module.get_submodule("first")(case.inputs).detach())
    handle.remove()
    assert not torch.equal(case.reference()[1], gradient)


def doubled_too_late(module: nn.Module, x: torch.Tensor, operation: str) -> torch.Tensor:
    """The mean of an operation on the output; then the output, or the result, is written to."""
    output: torch.Tensor = module(x)
    result: torch.Tensor = getattr(torch, operation)(output)
    mean = result.mean()
    (result if operation == "exp" else output).mul_(2)
    return mean


@each_number
def test_what_backward_needs_may_not_be_written_to(parallelize: int) -> None:
    """The slope of a negation needs nothing, that of a square its argument, that of the exponential its result."""
    torch.manual_seed(0)
    x = torch.randn(8, 3)
    given = {"operation": "neg"}
    with BatchOptimizer(
        nn.Linear(3, 2),
        loss_fn=lambda module, inputs, targets: doubled_too_late(module, inputs, given["operation"]),
        optimizer="sgd",
        parallelize=parallelize,
    ) as opt:
        opt.step(x)
        for operation in ("square", "exp"):
            given["operation"] = operation
            before = opt.parameters.clone()
            with pytest.raises(WorkerError, match="modified by an inplace operation") as raised:
                opt.step(x)
            assert 0 in raised.value.samples or 4 in raised.value.samples
            assert torch.equal(opt.parameters, before)
        given["operation"] = "neg"
        opt.step(x)
        assert opt.batch_counter == 2
