"""The three laws of docs/bits.md: what code of the user leaves behind is thrown away, harmless, or refused by name;
f is one number for all evaluations of a step, whoever evaluates it."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from batchopt import BatchOptimizer, Sample, Term, Worker, WorkerError
from tests.building import loaded

EACH = pytest.mark.parametrize("parallelize", [1, 2])
X = torch.linspace(-2.0, 2.0, 64 * 6).reshape(64, 6).sin()
Y = torch.linspace(-1.0, 3.0, 64 * 4).reshape(64, 4).cos()


class Net(nn.Module):
    """Does something in each forward, and multiplies by all that it keeps."""

    frozen: torch.Tensor
    b: torch.Tensor
    mask: torch.Tensor | None
    large: torch.Tensor

    def __init__(self, act: Callable[[Any, torch.Tensor], object] = lambda m, x: None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.act = nn.Linear(6, 4), act
        self.k, self.calls, self.seen = 1.0, 0, list[int]()
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.t, self.g, self.array = torch.ones(1), torch.Generator(), np.ones(1)
        self.register_buffer("b", torch.ones(1))
        self.register_buffer("mask", None)
        self.register_buffer("large", torch.ones(2**20 + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act(self, x)
        kept = self.k * self.frozen * self.t * self.b * torch.from_numpy(self.array).float() * self.large[-1]
        found: torch.Tensor = self.linear(x) * kept
        return found


def plain(module: nn.Module) -> float:
    """f by torch, on a copy."""
    return nn.functional.mse_loss(copy.deepcopy(module)(X.clone()), Y).item()


def grow(m: Any, x: torch.Tensor) -> None:
    m.calls += 1
    m.k = 1 + m.calls / 10


def late(m: Any, x: torch.Tensor) -> None:
    m.calls += 1
    m.frozen.data.mul_(1.1 if m.calls > 5 else 1.0)


def lazy(m: Any, x: torch.Tensor) -> None:
    m.mask = torch.ones(4) if m.mask is None else m.mask
    m.seen.append(len(x))
    m.calls += 1


class Noisy(torch.utils.data.Dataset[Any]):
    """Its items differ when they are read again."""

    def __init__(self) -> None:
        self.draws = torch.Generator()

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return X[i] + torch.rand((), generator=self.draws), Y[i]


def noisy(pairs: Any) -> Any:
    """A collate function that draws."""
    noise = torch.rand(()) + float(np.random.random()) + random.random()
    return torch.stack([x for x, _ in pairs]) + noise, torch.stack([y for _, y in pairs])


def some(worker: Any, sample: Sample) -> None:
    """A prehook for some samples."""
    if sample.indices.start == 0:
        worker.module[0].k = 3.0


OTHER = "this worker would find another f than one that begins here: its copy of "
WRITES = "forward, loss or a hook writes "
FINE = ""
PROGRAMS: dict[str, tuple[dict[str, Any], str]] = {
    "attribute grows": ({"act": grow}, OTHER + "'k', 'calls'"),
    "frozen, in place": ({"act": lambda m, x: m.frozen.mul_(1.1)}, WRITES + "'module.frozen' in place"),
    "frozen, by data": ({"act": lambda m, x: m.frozen.data.mul_(1.1)}, OTHER + ".*'frozen'"),
    "large, in place": ({"act": lambda m, x: m.large.mul_(1.1)}, WRITES + "'module.large' in place"),
    "attribute tensor": ({"act": lambda m, x: m.t.mul_(1.1)}, WRITES + "'module.t' in place"),
    "array": ({"act": lambda m, x: m.array.__imul__(1.1)}, OTHER + ".*'array'"),
    "late, by data": ({"act": late, "at": 2}, OTHER + ".*'frozen'"),
    "own generator": ({"act": lambda m, x: setattr(m, "k", float(torch.rand((), generator=m.g)))}, OTHER + "'k'"),
    "NumPy's draws": ({"act": lambda m, x: setattr(m, "k", np.random.random())}, OTHER + "'k'.*torch's own"),
    "inputs, in place": ({"act": lambda m, x: x.mul_(0.9)}, WRITES + "its `inputs` in place"),
    "inputs, by data": ({"act": lambda m, x: x.data.mul_(0.9)}, OTHER + ".* or of the samples"),
    "inputs, by NumPy": ({"act": lambda m, x: x.numpy().__imul__(0.9)}, OTHER + ".* or of the samples"),
    "lazy mask and a log": ({"act": lazy}, FINE),
    "prehook for some": ({"prehook": some}, FINE),
    "posthook, buffer": (
        {"posthook": lambda w, s: w.module[0].b.mul_(1.1)},
        "`posthook` writes a buffer of the module",
    ),
    "posthook, by data": ({"posthook": lambda w, s: w.module[0].frozen.data.mul_(1.1)}, OTHER + ".*'frozen'"),
    "collate draws": ({"collate_fn": noisy}, FINE),
    "dataset reread": ({"data": Noisy}, OTHER),
}


@EACH
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_one_function_or_refused_by_name(name: str, parallelize: int) -> None:
    given, words = PROGRAMS[name]
    options = {**given}
    act, data, at = options.pop("act", None), options.pop("data", None), options.pop("at", 1)
    module = nn.Sequential(Net(act) if act else Net(), nn.Dropout(0.2))
    found: list[float] = []
    batch = (data(),) if data else ([*X], [*Y]) if "collate_fn" in options else (X.clone(), Y.clone())
    with torch.no_grad():
        opt = loaded(module, nn.MSELoss(), *batch, parallelize=parallelize, chunk_size=16, check_cut=False, **options)
    with opt, torch.no_grad():
        try:
            for _ in range(9):
                found.append(opt.evaluate().item())
        except WorkerError as error:
            text = str(error).replace("'0.", "'").replace("module.0.", "module.")
            assert words and re.search(words, text), text
            assert len(found) == at - 1 and ", samples " in text
        else:
            assert words == FINE
    assert len({*found}) <= 1


def penalty(net: nn.Module) -> Any:
    return sum(parameter.square().sum() for parameter in net.parameters())


def with_a_lambda(net: nn.Module) -> dict[str, Any]:
    return {"criterion": lambda o, t: nn.functional.mse_loss(o, t) + 0.1 * penalty(net)}


def with_a_class(net: nn.Module) -> dict[str, Any]:
    class Regularised(nn.Module):
        def forward(self, o: torch.Tensor, t: torch.Tensor) -> Any:
            return nn.functional.mse_loss(o, t) + 0.1 * penalty(net)

    return {"criterion": Regularised()}


def with_features(net: Any) -> dict[str, Any]:
    found: dict[str, torch.Tensor] = {}
    net[0].register_forward_hook(lambda part, inputs, output: found.__setitem__("a", output))
    return {"loss_fn": lambda m, x, t: nn.functional.mse_loss(m(x), t) + found["a"].square().mean()}


def with_a_function_of_its_own(net: Any) -> dict[str, Any]:
    before = net.forward
    net.forward = lambda x: 2 * before(x) + net[0].bias.sum()
    return {"criterion": nn.MSELoss()}


ONES_OWN = [with_a_lambda, with_a_class, with_features, with_a_function_of_its_own]


@EACH
@pytest.mark.parametrize("make", ONES_OWN)
def test_functions_and_classes_that_refer_to_the_module_are_copied_with_it(
    make: Callable[[Any], dict[str, Any]], parallelize: int
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    options = make(net)
    criterion, loss_fn = options.pop("criterion", None), options.get("loss_fn")
    expected = loss_fn(net, X, Y) if loss_fn else criterion(net(X), Y)
    gradients = torch.autograd.grad(expected, [*net.parameters()])
    expected, loss_fn = expected.item(), None
    if "loss_fn" in options:
        cells = [cell.cell_contents for cell in options["loss_fn"].__closure__]
        for found in cells:
            if isinstance(found, dict):
                found.clear()  # of tensors with a graph
    given: dict[str, Any] = {"parallelize": parallelize, "chunk_size": 16, "check_cut": False, **options}
    with BatchOptimizer(net, criterion, optimizer=None, reduction="mean", **given) as opt:
        opt.load(X, Y)
        for _ in range(5):
            assert opt.evaluate().item() == pytest.approx(expected, rel=1e-5)
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            torch.testing.assert_close(opt.grad_parameters, flat, rtol=1e-4, atol=1e-5)
        with torch.inference_mode():
            opt.load(X.clone(), Y.clone()) if parallelize > 1 else None
            assert opt.evaluate().item() == pytest.approx(expected, rel=1e-5)


@EACH
def test_a_class_of_ones_own_that_is_changed_each_step_has_one_gradient(parallelize: int) -> None:
    """cloudpickle has one definition of a class in a process, and would rebind its methods to the copy made last."""
    torch.manual_seed(0)
    net = nn.Linear(6, 4)

    class Growing:
        weight = 0.0

        def __call__(self, o: torch.Tensor, t: torch.Tensor) -> Any:
            return nn.functional.mse_loss(o, t) + self.weight * penalty(net)

    criterion = Growing()
    options: dict[str, Any] = {"parallelize": parallelize, "chunk_size": 16, "check_cut": False, "reduction": "mean"}
    with BatchOptimizer(net, criterion, optimizer=None, **options) as opt:
        for step in range(12):
            criterion.weight = 0.01 * step
            opt.load(X, Y)
            found = []
            for _ in range(3):
                opt.evaluate()
                found.append(opt.grad_parameters.clone())
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), step


def test_an_audit_runs_on_copies_with_one_worker_too() -> None:
    """Counters and logs of the user's module are those of its own evaluations."""
    seen: list[int] = []
    module = Net(lambda m, x: m.__dict__.__setitem__("calls", m.calls + 1))
    module.register_forward_hook(lambda part, inputs, output: seen.append(len(output)))
    with loaded(module, nn.MSELoss(), X, Y, chunk_size=16, check_cut=False) as opt:
        for number in range(1, 6):
            opt.evaluate()
            assert module.calls == 4 * number and seen == [16] * 4 * number


# ---- functions and hooks: what they leave is thrown away with the copy


def _fill(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[:] = 7.0


class Doubled(nn.Linear):
    """A linear layer that is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


Change = Callable[[Any, torch.Tensor, torch.Tensor], object]
IN_COPY: dict[str, Change] = {
    "attribute": lambda m, x, y: setattr(m, "k", 3.0),
    "one more": lambda m, x, y: m.add_module("extra", nn.Linear(2, 2)),
    "parameter": lambda m, x, y: setattr(m.linear, "weight", nn.Parameter(torch.ones(4, 6))),
    "parameter, rebound": lambda m, x, y: setattr(m.linear.weight, "data", m.linear.weight.data.clamp(max=0.0)),
    "requires_grad": lambda m, x, y: m.frozen.requires_grad_(),
    "mode": lambda m, x, y: m.eval(),
    "class": lambda m, x, y: setattr(m.linear, "__class__", Doubled),
    "buffer, by data": lambda m, x, y: m.b.data.mul_(4.0),
    "frozen, by NumPy": lambda m, x, y: _fill(m.frozen),
    "attribute tensor": lambda m, x, y: m.t.data.add_(1.0),
    "inputs": lambda m, x, y: x.mul_(2.0),
    "targets, by NumPy": lambda m, x, y: _fill(y),
    "autocast": lambda m, x, y: torch.autocast("cpu", torch.bfloat16).__enter__(),  # type: ignore[no-untyped-call]
    "default dtype": lambda m, x, y: torch.set_default_dtype(torch.float64),
    "hook of all modules": lambda m, x, y: register_module_forward_hook(lambda *found: found[2] * 2.0),
}
IN_PROCESS: dict[str, Change] = {
    "torch's draws": lambda m, x, y: torch.manual_seed(3),
    "Python's draws": lambda m, x, y: random.seed(4),
    "NumPy's draws": lambda m, x, y: np.random.standard_normal(5),
    "grad mode": lambda m, x, y: torch.set_grad_enabled(False),
}


def leaving(change: Change) -> Callable[..., Any]:
    """A function of the batch that leaves something behind."""

    def function(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        change(module, inputs, targets)
        return torch.ones(len(inputs))

    return function


def test_what_functions_leave_in_workers_is_thrown_away() -> None:
    module = nn.Sequential(Net(), nn.Dropout(0.25))
    with loaded(module, nn.MSELoss(), X, Y, parallelize=2, chunk_size=16) as opt:
        before, gradient = opt.evaluate().item(), opt.grad_parameters.clone()
        parts = [*module.modules()]
        for name, change in (IN_COPY | IN_PROCESS).items():
            one: Change = lambda m, x, y, change=change: change(m[0], x, y)  # type: ignore[misc]  # noqa: E731
            assert opt.collect(leaving(one), grad=True).sum() == len(X), name
            assert opt.evaluate().item() == before and torch.equal(opt.grad_parameters, gradient), name
        assert [*module.modules()] == parts and vars(module[0])["k"] == 1.0


@pytest.mark.parametrize("name", IN_PROCESS)
def test_what_functions_change_in_this_process_is_put_back(name: str) -> None:
    """Draws and the grad mode are the caller's; so is the module, and what a function writes there stays."""
    module = Net()
    with loaded(module, nn.MSELoss(), X, Y, chunk_size=16) as opt:
        before = opt.evaluate()
        np.random.standard_normal()  # the second of the pair is kept for the next call
        states: Any = torch.get_rng_state(), random.getstate(), np.random.get_state()
        opt.collect(leaving(IN_PROCESS[name]))
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
        after: Any = np.random.get_state()
        assert np.array_equal(after[1], states[2][1]) and after[2:] == states[2][2:] and torch.is_grad_enabled()
        assert opt.evaluate() == before
        opt.collect(leaving(IN_COPY["attribute"]))
        opt.collect(leaving(IN_COPY["frozen, by NumPy"]))
        assert module.k == 1.0 and module.frozen.item() == 7.0  # attributes are put back


def test_a_fresh_copy_goes_on_with_everything_that_the_one_before_was_told() -> None:
    """Weights of terms, hooks, outputs, the cut."""
    terms = {"a": nn.MSELoss(), "b": nn.L1Loss()}

    def of(name: str) -> Callable[..., torch.Tensor]:
        return lambda module, x, y: terms[name](module(x), y)

    given = {name: Term(of(name), weight=weight) for name, weight in (("a", 2.0), ("b", 0.5))}
    data = {"a": (X, Y), "b": (X[:40], Y[:40])}
    hook: Any = lambda worker, sample: len(sample.indices)  # noqa: E731
    with BatchOptimizer(Net(), terms=given, optimizer=None, parallelize=2, chunk_size=16, posthook=hook) as opt:
        opt.load(data)
        before, gradient, said = opt.evaluate(), opt.grad_parameters.clone(), opt.hook_results
        opt.collect({"a": leaving(IN_COPY["attribute"]), "b": leaving(IN_COPY["mode"])})
        assert opt.evaluate() == before and torch.equal(opt.grad_parameters, gradient) and opt.hook_results == said
        opt.posthook = None
        opt.evaluate()
        opt.collect({"a": leaving(IN_COPY["attribute"])})
        assert opt.evaluate() == before and opt.hook_results == []


def test_what_run_on_workers_changes_is_refused_at_the_next_evaluation() -> None:
    def change(worker: Worker) -> None:
        vars(worker.module)["k"] = 3.0

    with loaded(Net(), nn.MSELoss(), X, Y, parallelize=2, chunk_size=16) as opt:
        before = opt.evaluate()
        assert all(opt.evaluate() == before for _ in range(4))  # the next one would not be compared
        opt.run_on_workers(change)
        with pytest.raises(WorkerError, match=f"{OTHER}'k'"):
            opt.evaluate()
        assert opt.evaluate() == before


@pytest.mark.parametrize("name", ["autocast", "hook of all modules"])
def test_modes_that_a_hook_leaves_in_a_worker_are_refused(name: str) -> None:
    """Where they would change f; in this process they are the user's."""

    def hook(worker: Worker, sample: Sample) -> None:
        IN_COPY[name](worker.module, sample.inputs, sample.targets)

    module: nn.Module = nn.Sequential(Net(), nn.Linear(4, 4))
    with loaded(module, nn.MSELoss(), X, Y, parallelize=2, chunk_size=8, check_cut=False) as opt:
        before = opt.evaluate()
        opt.prehook = hook
        opt.load(X, Y)
        with pytest.raises(WorkerError, match=OTHER):
            for _ in range(3):
                opt.evaluate()
        opt.prehook = None
        opt.load(X, Y)
        assert opt.evaluate() == before


# ---- buffers come back, as the mean over chunks


@EACH
@pytest.mark.parametrize("name", ["spectrum", "wide"])
def test_complex_and_expanded_buffers_are_frozen_in_a_step_and_taken_over_at_its_end(
    name: str, parallelize: int
) -> None:
    """Others are in `workers/test_module_state.py`."""

    def write(m: Any, x: torch.Tensor) -> None:
        m.spectrum.add_(1j) if name == "spectrum" else m.wide[0].add_(1)

    module = Net(write)
    module.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))
    module.register_buffer("wide", torch.zeros(1).expand(3))
    with torch.no_grad(), loaded(module, nn.MSELoss(), X, Y, parallelize=parallelize, chunk_size=16) as opt:
        for step in range(1, 4):
            assert len({opt.evaluate().item() for _ in range(3)}) == 1
            opt.load(X, Y)
            assert torch.view_as_real(module.get_buffer("spectrum")).sum() + module.get_buffer("wide").sum() == (
                2 * step if name == "spectrum" else 3 * step
            )


@EACH
def test_a_buffer_that_is_written_in_mid_step_counts_from_there(parallelize: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4).eval())
    norm: Any = module[1]
    with loaded(module, nn.MSELoss(), X, Y, parallelize=parallelize, chunk_size=16) as opt, torch.no_grad():
        before = opt.evaluate().item()
        norm.running_var.fill_(0.25)
        after = opt.evaluate().item()
        assert before != after == pytest.approx(plain(module), rel=1e-6)
        norm.running_mean = torch.ones(4)  # another one, which other processes have from the next step on
        assert parallelize == 2 or opt.evaluate().item() == pytest.approx(plain(module), rel=1e-6)
        opt.collect(lambda m, x, y: m(x))
        opt.load(X, Y)
        assert opt.evaluate().item() == pytest.approx(plain(module), rel=1e-6)
        assert norm.running_var.eq(0.25).all() and norm.running_mean.eq(1.0).all()


# ---- what later operations write


@EACH
def test_outputs_are_what_they_were_before_later_operations_wrote_them(parallelize: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    squared: Any = lambda output, target: output.sub_(target).square().mean()  # noqa: E731
    with loaded(module, squared, X, Y, parallelize=parallelize) as opt:
        found = opt.collect(layers=["0"])["0"]
        assert torch.allclose(found, module[0](X)) and found.lt(0.0).any()
        opt.keep_outputs = True
        opt.evaluate()
        assert torch.allclose(opt.outputs(), module(X))


@EACH
def test_totals_keep_the_precision_of_what_they_sum(parallelize: int) -> None:
    with loaded(Net(), nn.MSELoss(), X, Y, parallelize=parallelize, chunk_size=16) as opt:
        assert opt.total(lambda m, x, y: 2.0**-30 + 1.0).item() == 4 * (2.0**-30 + 1.0)
        half = opt.total(lambda m, x, y: torch.full((2,), 60000.0, dtype=torch.float16))
        assert half.dtype == torch.float32 and half.tolist() == [240000.0, 240000.0]


@EACH
def test_a_forward_may_write_what_a_collate_function_makes(parallelize: int) -> None:
    def collate(pairs: list[Any]) -> Any:
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    module = Net(lambda m, x: x.div_(2))
    options: dict[str, Any] = {"parallelize": parallelize, "collate_fn": collate}
    with loaded(module, nn.MSELoss(), [*X], [*Y], **options) as opt:
        for _ in range(4):
            assert opt.evaluate().item() == pytest.approx(plain(module), rel=1e-6)


# ---- parameters


@EACH
def test_an_attribute_over_the_memory_of_a_parameter_is_refused(parallelize: int) -> None:
    module = nn.Sequential(nn.Linear(6, 4))
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
    module: Any = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 4)))
    assert module[0].weight.data_ptr() == module[0].weight_orig.data_ptr()  # until the first forward
    alone = copy.deepcopy(module)
    with loaded(module, nn.MSELoss(), X, Y, parallelize=parallelize) as opt:
        expected = nn.functional.mse_loss(alone(X), Y)
        expected.backward()  # type: ignore[no-untyped-call]
        assert torch.allclose(opt.evaluate().float(), expected)
        assert torch.allclose(module[0].weight_orig.grad, alone[0].weight_orig.grad)
