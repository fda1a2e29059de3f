"""What code of the user leaves behind in module, batch, random state and mode: it is put back, or refused by name, and
f is what it was, for any number of workers."""

from __future__ import annotations

import copy
import math
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from batchopt import BatchoptError, BatchOptimizer, Sample, Worker, WorkerError
from tests.building import loaded
from tests.changes import Net

EACH = pytest.mark.parametrize("parallelize", [1, 2])


def each_for_some(names: Iterable[str]) -> pytest.MarkDecorator:
    """Each name with one of the numbers of workers in turn; with the other one in the nightly run."""
    rows = [(name, n, (i + n) % 2) for i, name in enumerate(names) for n in (1, 2)]
    marked = [pytest.param(n, name, marks=[pytest.mark.nightly] * odd) for name, n, odd in rows]
    return pytest.mark.parametrize("parallelize, name", marked)


X = torch.linspace(-2.0, 2.0, 24 * 3).reshape(24, 3).sin()
Y = torch.linspace(-1.0, 3.0, 24 * 4).reshape(24, 4).cos()
TARGETS = Y.double()  # of the dtype of `Net`'s outputs: torch 2.6 cannot differentiate a loss of two

Change = Callable[[Any, torch.Tensor, torch.Tensor], object]


def _fill(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[:] = 7.0


class Doubled(nn.Linear):
    """A linear layer that is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


# What the model of `test_model.py` does not do to a module.
IN_MODULE: dict[str, Change] = {
    "another attribute": lambda m, x, y: m.__dict__.update(kept=m, beta=m.__dict__.pop("beta") + 1),
    "one more": lambda m, x, y: m.add_module("extra", nn.Linear(2, 2)),
    "parameter": lambda m, x, y: setattr(m.first, "weight", nn.Parameter(torch.ones(5, 3))),
    "requires_grad": lambda m, x, y: m.gain.requires_grad_(),
    "mode": lambda m, x, y: m.eval(),
    "class": lambda m, x, y: setattr(m.second, "__class__", Doubled),
    "parameter, rebound": lambda m, x, y: setattr(m.second.weight, "data", m.second.weight.data.clamp(max=0.0)),
}
WRITES: dict[str, Change] = {
    "attribute": lambda m, x, y: setattr(m, "beta", 3.0),
    "item": lambda m, x, y: m.settings.steps.__setitem__(1, 4.0),
    "statistics, by data": lambda m, x, y: m.norm.running_var.data.mul_(4.0),
    "frozen, by data": lambda m, x, y: m.gain.data.mul_(2.0),
    "frozen, by NumPy": lambda m, x, y: _fill(m.gain),
    "buffer, by data": lambda m, x, y: m.spectrum.data.add_(1.0),
    "attribute tensor, by data": lambda m, x, y: m.table.data.add_(1.0),
    "attribute tensor, in place": lambda m, x, y: m.table.add_(1.0),
}
IN_BATCH: dict[str, Change] = {
    "inputs, by data": lambda m, x, y: x.data.mul_(2.0),
    "inputs": lambda m, x, y: x.mul_(2.0),
    "inputs, by NumPy": lambda m, x, y: _fill(x),
    "targets, by NumPy": lambda m, x, y: _fill(y),
}
ELSEWHERE: dict[str, Change] = {
    "torch's draws": lambda m, x, y: torch.manual_seed(3),
    "Python's draws": lambda m, x, y: random.seed(4),
    "NumPy's draws": lambda m, x, y: np.random.standard_normal(5),
    "grad mode": lambda m, x, y: torch.set_grad_enabled(False),
    "autocast": lambda m, x, y: torch.autocast("cpu", torch.bfloat16).__enter__(),  # type: ignore[no-untyped-call]
    "default dtype": lambda m, x, y: torch.set_default_dtype(torch.float64),
    "hook of all modules": lambda m, x, y: register_module_forward_hook(lambda *found: found[2] * 2.0),
}
ELEMENTS = IN_BATCH.keys() | {name for name in WRITES if "by" in name}
OF_FUNCTIONS = {**IN_MODULE, **WRITES, **IN_BATCH, **ELSEWHERE}


def program() -> Net:
    """With dense buffers alone."""
    module = Net()
    del module.mix
    module.register_buffer("mix", torch.eye(4))
    return module


@contextmanager
def opened(parallelize: int, **options: Any) -> Iterator[BatchOptimizer]:
    torch.manual_seed(0)
    module = program()
    module.drop.p = 0.25
    with loaded(
        module, nn.MSELoss(), X.clone(), TARGETS.clone(), parallelize=parallelize, chunk_size=4, **options
    ) as opt:
        yield opt


def _end_a_worker(opt: BatchOptimizer) -> None:
    """Kill the first worker, if there are several: its chunks go to others, and a new one begins."""
    if len(opt.workers) > 1:
        os.kill(opt.workers[0].pid, signal.SIGKILL)


@pytest.mark.sampled
@each_for_some(OF_FUNCTIONS)
def test_what_a_function_changes_is_put_back(parallelize: int, name: str) -> None:
    """f is what it was, or an error says what is wrong."""

    def function(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        OF_FUNCTIONS[name](module, inputs, targets)
        return torch.ones(len(inputs))

    with opened(parallelize) as opt:
        before, gradient = opt.evaluate().item(), opt.grad_parameters.clone()
        parts = [*opt.module.modules()]
        for _ in range(3):
            try:
                assert opt.collect(function, grad=True).sum() == len(X)
            except (BatchoptError, ValueError) as error:
                words = ("writes", "both write", "write the tensor", "changes the parameter")
                assert any(word in str(error) for word in words), error
        assert opt.evaluate().item() == before and torch.equal(opt.grad_parameters, gradient)
        assert [*opt.module.modules()] == parts and torch.is_grad_enabled()


@pytest.mark.sampled
@settings(max_examples=3, deadline=None, derandomize=True)
@given(names=st.lists(st.sampled_from(sorted(ELEMENTS)), min_size=1, max_size=3, unique=True))
def test_a_loss_that_writes_elements_is_one_function_or_refused(names: list[str]) -> None:
    """What it writes of the module is state, with which each chunk begins anew; of its samples, an error."""

    def loss(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = nn.functional.mse_loss(module(inputs), targets)
        for name in names:
            OF_FUNCTIONS[name](module, inputs, targets)
        return found

    def values(parallelize: int) -> set[float | str]:
        torch.manual_seed(0)
        found: set[float | str] = set()
        options: dict[str, Any] = {"loss_fn": loss, "parallelize": parallelize, "chunk_size": 4}
        with BatchOptimizer(program(), optimizer=None, check_cut=False, **options) as opt:
            opt.load(X.clone(), TARGETS.clone())
            for time in range(3):
                if time == 1:
                    _end_a_worker(opt)
                try:
                    found.add(opt.evaluate().item())
                except WorkerError as error:
                    assert "writes its `" in str(error), error
                    found.add("refused")
                    opt.load(X.clone(), TARGETS.clone())
        return found

    alone = values(1)
    assert len(alone) == 1 and alone == values(2) == values(3)


@pytest.mark.sampled
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("deaths", [0, 1], ids=["moved", "killed"])
def test_what_a_prehook_changes_for_some_samples_is_theirs_wherever_they_are_evaluated(name: str, deaths: int) -> None:
    """Only the last chunk is changed, which the first worker gets later, by other speeds or after a death."""

    def prehook(worker: Worker, sample: Sample) -> None:
        if sample.indices.start == 20 and "before" not in worker.state:
            WRITES[name](worker.module, sample.inputs, sample.targets)

    def values(parallelize: int) -> tuple[list[float], list[Any]]:
        with opened(parallelize, prehook=prehook, speeds=[1.0] * parallelize) as opt:
            found = [opt.evaluate().item() for _ in range(2)]
            if deaths and parallelize == 2:
                os.kill(opt.workers[1].pid, signal.SIGKILL)
            elif not deaths:
                opt.resize(parallelize, speeds=[20.0, 1.0][:parallelize])
                opt.load(X.clone(), TARGETS.clone())
            found += [opt.evaluate().item() for _ in range(3)]
            assert len({*found[2:]}) == 1
            opt.prehook = None
            found.append(opt.evaluate().item())
            assert found[-1] != found[-2]
            return found, [buffer.tolist() for buffer in opt.module.buffers()]

    assert values(2) == values(1)


@EACH
@pytest.mark.filterwarnings("ignore:.*statistics of a chunk")
def test_a_hook_and_a_forward_that_write_one_buffer_are_refused(parallelize: int) -> None:
    def hook(worker: Worker, sample: Sample) -> None:
        assert worker.module is not None
        worker.module.norm.running_mean.add_(1.0)  # type: ignore[union-attr, operator]

    with opened(parallelize, prehook=hook) as opt:
        opt.module.norm.train()  # type: ignore[union-attr]
        opt.load(X.clone(), TARGETS.clone())
        with pytest.raises(WorkerError, match="a hook and forward both write a tensor"):
            opt.evaluate()
        opt.prehook = None
        opt.load(X.clone(), TARGETS.clone())
        assert math.isfinite(opt.evaluate().item())


@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_hook_that_writes_a_tensor_of_the_criterion_changes_nothing(parallelize: int) -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    labels = torch.arange(24) % 2

    def hook(worker: Worker, sample: Sample) -> None:
        worker.criterion.weight.data.mul_(torch.tensor([2.0, 3.0]))  # type: ignore[union-attr]

    with loaded(nn.Linear(3, 2), criterion, X, labels, parallelize=parallelize, chunk_size=4) as opt:
        before = opt.evaluate().item()
        opt.posthook = hook
        assert [opt.evaluate().item() for _ in range(4)] == [before] * 4
        weight = criterion.weight
        assert weight is not None and weight.tolist() == [1.0, 2.0]
        weight.data.copy_(torch.tensor([3.0, 1.0]))  # it is followed where a hook has written it
        opt.load(X, labels)
        expected = nn.functional.cross_entropy(opt.module(X), labels, torch.tensor([3.0, 1.0])).item()
        assert [opt.evaluate().item() for _ in range(2)] == [pytest.approx(expected)] * 2


@pytest.mark.sampled
@EACH
@pytest.mark.parametrize("name", IN_BATCH)
def test_what_a_collate_function_writes_is_refused(parallelize: int, name: str) -> None:
    def collate(pairs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        for x, y in pairs:
            IN_BATCH[name](None, x, y)
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    rows, targets = [*X.clone()], [*TARGETS.clone()]
    with opened(parallelize, collate_fn=collate) as opt:
        with pytest.raises(WorkerError, match=r"`collate_fn` writes its `(inputs|targets)` in place"):
            opt.load(rows, targets)
            opt.evaluate()
    if "by" in name:  # else it is torch that has written it
        assert torch.equal(torch.stack(rows), X) and torch.equal(torch.stack(targets), TARGETS)


@EACH
def test_a_hook_that_writes_an_object_of_the_batch_is_refused(parallelize: int) -> None:
    class Graph:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.seen = x, 0

    def stack(pairs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        for graph, _ in pairs:
            graph.seen += 1
        return torch.stack([graph.x for graph, _ in pairs]), torch.stack([y for _, y in pairs])

    graphs = [Graph(x) for x in X]
    with opened(parallelize, collate_fn=stack) as opt:
        with pytest.raises(WorkerError, match=r"writes its `inputs` in place \(an object in there\)"):
            opt.load(graphs, [*TARGETS])
            opt.evaluate()
    assert not any(graph.seen for graph in graphs)


# ---- modes


class Merging(nn.Linear):
    """Its `train` does more than to set the mode."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.scale, self.low = 2.0, nn.Parameter(torch.full((4, 3), 0.5), requires_grad=False)

    def train(self, mode: bool = True) -> Merging:
        if self.training and not mode:
            self.scale = 1.0
            self.low.data.mul_(3.0)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + x @ self.low.T


@EACH
def test_what_a_train_of_its_own_does_is_undone(parallelize: int) -> None:
    module = Merging()
    with loaded(module, nn.MSELoss(), X, Y, parallelize=parallelize, chunk_size=4) as opt:
        before = opt.evaluate()
        expected = nn.functional.linear(X, module.weight, module.bias) + X @ module.low.T * 3.0
        for _ in range(2):
            assert torch.allclose(opt.predict(X), expected)
            assert opt.evaluate() == before and module.scale == 2.0 and module.low.eq(0.5).all()
        opt.score((X, Y), nn.MSELoss())
        opt.load(X, Y)
        assert opt.evaluate() == before


# ---- the module's state


@EACH
def test_state_that_is_written_between_evaluations_counts_from_the_next_batch_on(parallelize: int) -> None:
    with opened(parallelize) as opt, torch.no_grad():
        norm: Any = opt.module.norm
        before = opt.evaluate()
        norm.running_var.fill_(0.25)
        assert opt.evaluate() == before == opt.evaluate()
        assert norm.running_var.eq(0.25).all()
        norm.running_mean = torch.ones(5)
        assert opt.evaluate() == before
        assert norm.running_mean.eq(1.0).all()
        opt.collect(lambda m, x, y: m(x))
        assert opt.evaluate() == before
        opt.load(X, TARGETS)
        assert norm.running_var.eq(0.25).all()
        after = opt.evaluate()
        assert after != before and after == opt.evaluate()


# ---- what later operations write


@EACH
def test_outputs_are_what_they_were_before_later_operations_wrote_them(parallelize: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    squared: Any = lambda output, target: output.sub_(target).square().mean()  # noqa: E731
    with loaded(module, squared, X, TARGETS, parallelize=parallelize) as opt:
        found = opt.collect(layers=["0"])["0"]
        assert torch.allclose(found, module[0](X)) and found.lt(0.0).any()
        opt.keep_outputs = True
        opt.evaluate()
        assert torch.allclose(opt.outputs(), module(X))


@EACH
def test_totals_keep_the_precision_of_what_they_sum(parallelize: int) -> None:
    with opened(parallelize) as opt:
        assert opt.total(lambda m, x, y: 2.0**-30 + 1.0).item() == 6 * (2.0**-30 + 1.0)
        half = opt.total(lambda m, x, y: torch.full((2,), 60000.0, dtype=torch.float16))
        assert half.dtype == torch.float32 and half.tolist() == [360000.0, 360000.0]


# ---- parameters


@EACH
def test_an_attribute_over_the_memory_of_a_parameter_is_refused(parallelize: int) -> None:
    module = nn.Sequential(nn.Linear(3, 4))
    module.alias = module[0].weight.data
    with pytest.raises(ValueError, match=r"'0.weight' and 'alias' are different tensors over one storage"):
        BatchOptimizer(module, nn.MSELoss(), parallelize=parallelize)
    del module.alias
    with loaded(module, nn.MSELoss(), X, Y, parallelize=parallelize) as opt:
        opt.evaluate()
        module.alias = module[0].weight.data.T
        if parallelize == 1:
            opt.load(X, Y)
        else:
            with pytest.raises(ValueError, match=r"'module.alias' is a tensor over the memory of a parameter"):
                opt.load(X, Y)


@EACH
def test_an_attribute_that_is_computed_before_each_forward_may_begin_as_the_parameter(parallelize: int) -> None:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)))
    assert module[0].weight.data_ptr() == module[0].weight_orig.data_ptr()  # until the first forward
    plain = copy.deepcopy(module)
    x, y = X, Y
    with loaded(module, nn.MSELoss(), x, y, parallelize=parallelize) as opt:
        expected = nn.functional.mse_loss(plain(x), y)
        expected.backward()  # type: ignore[no-untyped-call]
        assert torch.allclose(opt.evaluate().float(), expected)
        assert torch.allclose(module[0].weight_orig.grad, plain[0].weight_orig.grad)
