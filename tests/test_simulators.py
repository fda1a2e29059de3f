"""Modules whose results have no graph: derivatives by finite differences, and f alone without them."""

from __future__ import annotations

import collections
import math
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import _numdiff

import batchopt

TIMES = torch.linspace(0, 3, 7, dtype=torch.float64)
CALLS: list[int] = []


def called() -> None:
    """Count it."""
    CALLS.append(1)


def waves(x: Any, times: Any) -> Any:
    """Of NumPy, for real and complex parameters."""
    return x[0] * np.exp(-x[1] * times) + np.sin(x[2] * times) * x[3] ** 2


class Waves(torch.nn.Module):
    """`waves` of two parameters, the second with three elements."""

    def __init__(self, values: Any = (1.5, 0.7, -2.0, 0.3), dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(values[:1], dtype=dtype))
        self.rest = torch.nn.Parameter(torch.tensor(values[1:], dtype=dtype))

    @batchopt.finite_differences
    def forward(self, times: torch.Tensor) -> torch.Tensor:
        called()
        return torch.as_tensor(waves(torch.cat([self.scale, self.rest]).numpy(), times.numpy()))


class Plain(Waves):
    """The same with torch's functions, and a graph."""

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.scale, self.rest])
        return x[0] * torch.exp(-x[1] * times) + torch.sin(x[2] * times) * x[3] ** 2


def slopes(function: Callable[..., Any], model: Waves) -> torch.Tensor:
    """The Jacobian of a decorated function of the model, by a backward for each row."""
    rows = [torch.autograd.grad(value, [*model.parameters()], retain_graph=True) for value in function(model, TIMES)]
    return torch.stack([torch.cat(row) for row in rows])


@pytest.mark.parametrize("method", ["2-point", "3-point", "cs"])
@pytest.mark.parametrize("bound", [None, 0.0, 1e-7], ids=["free", "at the bound", "near it"])
def test_derivatives_are_those_of_scipy(method: Any, bound: float | None) -> None:
    model = Waves()
    low, high = -np.inf, np.inf
    if bound is not None:
        high = model.rest.max().item() + bound
    decorated = batchopt.finite_differences(method=method, bounds={"rest": (low, high)})(undecorated)
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    bounds = ([-np.inf] * 4, [np.inf, high, high, high])
    expected = _numdiff.approx_derivative(lambda x: waves(x, TIMES.numpy()), start, method, bounds=bounds)
    exact = slopes(lambda model, times: Plain.forward(model, times), model)
    found = slopes(decorated, model)
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6 if method == "2-point" else 1e-8)


def undecorated(model: Waves, times: torch.Tensor) -> torch.Tensor:
    """What `Waves` does, without a graph; never outside the bound."""
    return torch.as_tensor(waves(torch.cat([model.scale, model.rest]).numpy(), times.numpy()))


def test_it_is_never_called_outside_the_bounds() -> None:
    seen = []

    @batchopt.finite_differences(method="3-point", bounds={"rest": (-2.0, torch.tensor([0.7, 1.0, 0.3 + 1e-9]))})
    def function(model: Waves, times: torch.Tensor) -> torch.Tensor:
        seen.append(model.rest.tolist())
        return undecorated(model, times)

    slopes(function, Waves())
    assert (np.array(seen).max(0) <= [0.7, 1.0, 0.3 + 1e-9]).all() and np.min(seen) >= -2.0 and len(seen) >= 9


def test_single_precision_moves_by_what_it_can_represent() -> None:
    model = Waves(dtype=torch.float32)
    expected = slopes(lambda model, times: Plain.forward(model, times), Plain())
    found = slopes(lambda model, times: Waves.forward(model, times.float()), model)
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.rows
@pytest.mark.parametrize("kind", ["lm", "lbfgs", "products"])
def test_optimizers_find_what_they_find_with_a_graph(kind: str) -> None:
    targets = torch.as_tensor(waves([1.0, 0.5, -1.5, 0.5], TIMES.numpy()))
    factory: Any = {
        "lm": batchopt.LevenbergMarquardt,
        "products": partial(batchopt.LevenbergMarquardt, dense=0, geodesic=True),
        "lbfgs": partial(batchopt.LBFGS, max_iter=200, bounds=[None, (-2.5, 0.6)]),
    }[kind]
    found = []
    for model in (Waves(), Plain()):
        with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), optimizer=factory, chunk_size=3) as opt:
            opt.step(TIMES, targets)
            found.append(opt.parameters.clone())
            assert opt.output < 1e-9
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_point_takes_a_call_for_each_parameter_and_one_more() -> None:
    with batchopt.BatchOptimizer(Waves(), torch.nn.MSELoss()) as opt:
        opt.load(TIMES, torch.zeros_like(TIMES))
        opt.evaluate()
        opt.evaluate()  # an audit takes two calls more; the next one is due at the fourth
        CALLS.clear()
        opt.parameters.mul_(1.1)
        opt.evaluate()
        assert len(CALLS) == 5
        normal = opt.normal()
        assert len(CALLS) == 10  # nothing is kept
        torch.testing.assert_close(2 * normal.vector, opt.grad_parameters)
        opt.predict()
        opt.evaluate_many(opt.parameters[None])
        opt.residuals()
        assert len(CALLS) == 13


def test_a_function_may_return_memory_that_it_writes_again() -> None:
    memory = torch.empty_like(TIMES)

    @batchopt.finite_differences
    def reused(model: Waves, times: torch.Tensor) -> torch.Tensor:
        return memory.copy_(undecorated(model, times))

    model = Waves()
    torch.testing.assert_close(slopes(reused, model), slopes(Waves.forward, model))


def test_draws_are_the_same_in_each_call() -> None:
    @batchopt.finite_differences
    def noisy(model: Waves, times: torch.Tensor) -> torch.Tensor:
        return undecorated(model, times) + torch.randn(()) + np.random.rand()

    model = Waves()
    torch.testing.assert_close(slopes(noisy, model), slopes(Waves.forward, model))
    assert not torch.equal(noisy(model, TIMES), noisy(model, TIMES))  # of the next call, as without


def test_f_alone_needs_no_gradient() -> None:
    points = torch.stack([torch.tensor([1.5, 0.7, -2.0, 0.3]), torch.ones(4)]).double()

    def loss(model: Waves, times: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (undecorated(model, times) - targets).square().mean()

    def without(model: Any, times: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return loss(model, times, targets)

    with batchopt.BatchOptimizer(Waves(), loss_fn=without, parallelize=2) as opt:
        opt.load(TIMES, torch.zeros_like(TIMES))
        expected = [np.square(waves(point.numpy(), TIMES.numpy())).mean() for point in points]
        found = opt.evaluate_many(points)
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
        with pytest.raises(batchopt.WorkerError, match="finite_differences"):
            opt.evaluate()
        with pytest.raises(batchopt.WorkerError, match="no grad_fn"):
            opt.evaluate_many(points, gradients=True)


def test_products_of_the_hessian_are_refused() -> None:
    with batchopt.BatchOptimizer(Waves(), torch.nn.MSELoss()) as opt:
        opt.load(TIMES, torch.zeros_like(TIMES))
        with pytest.raises(ValueError, match="finite differences"):
            opt.hvp(torch.ones_like(opt.parameters))
    model = Waves()
    gradients = torch.autograd.grad(model(TIMES).square().sum(), [*model.parameters()], create_graph=True)
    again = torch.autograd.grad(gradients[1].sum(), model.rest)[0]
    assert all(map(math.isnan, again.tolist()))  # by hand: no number, rather than half of one


COUNT = [0]


def counts(model: Waves, times: torch.Tensor) -> torch.Tensor:
    """Returns something else in each call."""
    COUNT[0] += 1
    return undecorated(model, times) + COUNT[0]


def rounds(model: Waves, times: torch.Tensor) -> torch.Tensor:
    """No analytic function."""
    return model.scale.abs() * times


def grows(model: Waves, times: torch.Tensor) -> torch.Tensor:
    """Its results have a shape that depends on the parameters."""
    return times if model.scale == 1.5 else times[:3]


@pytest.mark.parametrize(
    ("function", "options", "error", "words"),
    [
        (counts, {}, ValueError, "has to be deterministic"),
        (rounds, {"method": "cs"}, TypeError, "3-point"),
        (grows, {}, ValueError, r"shapes \[\(3,\)\] with another 'scale'"),
        (lambda model, times: times * 1j, {}, TypeError, "view_as_real"),
        (undecorated, {"bounds": {"rate": (0, 1)}}, ValueError, r"no parameter's name in \['rate'\]"),
        (undecorated, {"method": "4-point"}, ValueError, "2-point"),
        (undecorated, {"step": 2.0}, ValueError, "fraction"),
        (undecorated, {"bounds": {"rest": 1.0}}, TypeError, "pairs"),
    ],
)
def test_functions_that_have_no_such_derivatives_are_refused(
    function: Any, options: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        slopes(batchopt.finite_differences(**options)(function), Waves())


def test_it_decorates_functions_of_real_parameters_alone() -> None:
    with pytest.raises(TypeError, match="decorates a function"):
        batchopt.finite_differences(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="two real ones"):
        batchopt.finite_differences(lambda module, x: x)(torch.nn.Linear(1, 1, dtype=torch.complex64), TIMES)
    with pytest.raises(TypeError, match=r"inputs\[0\] requires a gradient"):
        Waves()(TIMES.clone().requires_grad_())


# ---- what a call leaves, and what it begins with


class Simulated(torch.nn.Module):
    """Calls `function(self, x)`, decorated; has a parameter `weight` of shape `(2,)`."""

    def __init__(self, function: Callable[..., Any], dtype: torch.dtype = torch.float64, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.5, -0.5], dtype=dtype))
        self.function = batchopt.finite_differences(**options)(function)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


X = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.5, -1.0], [2.0, 2.0]], dtype=torch.float64)


def test_state_is_that_after_one_call() -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(2, dtype=torch.float64)
            self.calls, self.seen = 0, [0.0]
            self.sums = np.zeros(2)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.sums += x.numpy().sum(0)
            self.seen.append(float(x.sum()))
            return self.norm(x) * (self.calls + len(self.seen) + self.sums.sum())  # type: ignore[no-any-return]

    class Decorated(Normed):
        @batchopt.finite_differences(method="3-point")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    class Graph(Normed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    models, gradients = (Decorated(), Graph()), []
    for model in models:
        first, second = model(X), model(2 * X)
        gradients.append(torch.autograd.grad((first + second).square().sum(), [*model.parameters()]))
        assert model.calls == 2 and model.seen == [0.0, X.sum().item(), 2 * X.sum().item()]
        assert model.sums.tolist() == (3 * X.sum(0)).tolist()
    for one, two in zip(*(model.buffers() for model in models), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-6)


def test_results_are_the_callers() -> None:
    def masked(model: Any, x: torch.Tensor) -> Any:
        return {"values": x @ model.weight, "mask": torch.ones(4, dtype=torch.bool)}

    def loss(model: Any, x: torch.Tensor, targets: Any) -> Any:
        found = model(x)
        f = (3 * found["values"])[found["mask"].clone()].sum()
        found["mask"][:2] = False
        found["values"].detach().zero_()
        return f

    with batchopt.BatchOptimizer(Simulated(masked), loss_fn=loss, reduction="sum") as opt:
        opt.load(X)
        found = [(opt.evaluate().item(), opt.grad_parameters.tolist()) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0][0] == (3 * X @ torch.tensor([1.5, -0.5]).double()).sum().item()
    assert found[0][1] == pytest.approx((3 * X).sum(0).tolist())


def test_inputs_may_be_written_before_the_gradient() -> None:
    model, x = Simulated(lambda model, x: x["of"][0] @ model.weight), {"of": [X.clone()]}
    found = model(x)
    x["of"][0].zero_()
    found.sum().backward()
    torch.testing.assert_close(model.weight.grad, X.sum(0), rtol=1e-6, atol=1e-6)
    assert not x["of"][0].any()


@pytest.mark.parametrize("method", ["2-point", "3-point", "cs"])
def test_a_part_of_two_names_moves_everywhere(method: Any) -> None:
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(2, 2, dtype=torch.float64)
            self.two, self.three = self.one, torch.nn.Linear(2, 2, dtype=torch.float64)
            self.three.weight = self.one.weight
            self.by_closure: Any = lambda x: x @ self.one.weight.T + self.three.bias
            with torch.no_grad():
                self.one.weight.copy_(torch.tensor([[0.5, -1.0], [2.0, 0.3]]))

        def body(self, x: torch.Tensor) -> Any:
            x = x.to(self.one.weight.dtype)
            return (
                (x @ self.one.weight.T + self.one.bias) @ self.two.weight.T
                + (x * x) @ self.three.weight.T
                + self.by_closure(x)
            )

    model = Pair()
    parts = {name: id(part) for name, part in model.named_parameters(remove_duplicate=False)}
    decorated = batchopt.finite_differences(method=method, bounds={"three.weight": (None, 10.0)})(Pair.body)
    found = torch.autograd.grad(decorated(model, X).square().sum(), [*model.parameters()])
    expected = torch.autograd.grad(model.body(X).square().sum(), [*model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert parts == {name: id(part) for name, part in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("kind", ["sparse", "meta", "expanded", "cyclic", "lock"])
def test_attributes_may_be_of_any_kind(kind: str) -> None:
    model: Any = Simulated(lambda model, x: x @ model.weight)
    loop: list[Any] = [X]
    loop.append(loop)
    own = {
        "sparse": X.to_sparse(),
        "meta": X.to("meta"),
        "expanded": X[:1].expand(4, 2),
        "cyclic": loop,
        "lock": threading.Lock(),
    }
    model.attribute = own[kind]
    model(X).sum().backward()
    torch.testing.assert_close(model.weight.grad, X.sum(0), rtol=1e-6, atol=1e-6)


def with_graph(model: Any) -> None:
    """Something that normalised weights have."""
    model.scaled = [model.weight * 2]


def outside(model: Any) -> None:
    """A parameter that is no part of the module."""
    model.others = {"one": torch.nn.Parameter(torch.ones(2, dtype=torch.float64))}


def sparse(model: Any) -> None:
    """A weight that is mostly 0."""
    model.weight = torch.nn.Parameter(torch.eye(2, dtype=torch.float64).to_sparse())


def single(model: Any) -> None:
    """A weight of single precision."""
    model.float()


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (with_graph, {}, TypeError, r"module\.scaled\[0\] requires a gradient"),
        (outside, {}, TypeError, r"module\.others\['one'\] requires a gradient"),
        (sparse, {}, TypeError, "'weight' is torch.float64, torch.sparse_coo"),
        (single, {"step": 1e-8}, ValueError, "'weight' cannot be moved in torch.float32"),
    ],
)
def test_gradients_that_would_be_lost_are_refused(
    change: Callable[[Any], None], options: Any, error: type[Exception], words: str
) -> None:
    model = Simulated(lambda model, x: x @ model.weight, **options)
    change(model)
    with pytest.raises(error, match=words):
        model(X)


def test_a_parameter_that_is_moved_by_more_than_its_size_is_warned_of() -> None:
    given: tuple[dict[str, Any], ...] = ({}, {"step": 1e-4})
    for options in given:
        model = Simulated(lambda model, x: x @ model.weight, **options)
        torch.nn.init.constant_(model.weight, 3e-14)
        with nullcontext() if options else pytest.warns(UserWarning, match="'weight' has an element 3e-14.*step=1e-4"):
            model(X).sum().backward()
        torch.testing.assert_close(model.weight.grad, X.sum(0), rtol=1e-6, atol=1e-6)


def test_near_bounds_and_0_the_least_moves_are_made() -> None:
    for low, high in ((1.5, math.nextafter(1.5, 2.0)), (1.5, 1.5), (5e-324, None), (-0.0, None)):
        for method in ("2-point", "3-point"):

            def held(model: Any, x: torch.Tensor, low: Any = low, high: Any = high) -> Any:
                return model.weight.clamp(low, high) * x[0]

            model = Simulated(held, method=method, bounds={"weight": (low, high)}, step=0.5)
            torch.nn.init.constant_(model.weight, low)
            model(X).sum().backward()
            assert model.weight.grad is not None
            torch.testing.assert_close(model.weight.grad, X[0] if high != low else torch.zeros_like(X[0]))


# ---- fewer samples than workers


class Series(torch.nn.Module):
    """A simulator of many parameters, between layers that have a graph; a sample is a run. Its calls are in a file."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.path = str(path)
        self.simulator = Steps(self.path)
        self.last = torch.nn.Linear(20, 6, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        found = self.simulator(x)
        scores = torch.tanh(self.last(found))
        self.mean.lerp_(scores.detach().mean(0), 0.1)  # type: ignore[operator]
        return found * scores.sum(1, keepdim=True) * self.simulator.rates.mean()


class Steps(torch.nn.Module):
    """Twelve parameters; writes a line for each call."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.rates = torch.nn.Parameter(torch.linspace(0.2, 1.3, 12, dtype=torch.float64))
        self.register_buffer("times", torch.linspace(0.1, 2, 20, dtype=torch.float64))

    @batchopt.finite_differences(method="3-point")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")
        rates, times = self.rates.numpy(), self.get_buffer("times").numpy()
        curve = (np.exp(-np.outer(times, rates)) * np.arange(1, 13)).sum(1)
        return torch.from_numpy(x.numpy()[:, :1] * curve + torch.rand(()).item())


def test_columns_are_dealt_to_workers(tmp_path: Any, nobody_late: None) -> None:
    x, y, path = torch.ones(1, 1).double(), torch.full((1, 20), 3.0).double(), tmp_path / "calls"
    with batchopt.BatchOptimizer(Steps(str(path)), torch.nn.MSELoss(), parallelize=3, chunk_size=1) as opt:
        opt.load(x, y)
        opt.evaluate()
        for evaluate in (opt.evaluate, opt.normal):
            path.unlink()
            evaluate()
            calls = collections.Counter(path.read_text().split())
            assert [*calls.values()] == [1 + 2 * 4] * 3  # 25 in one worker


def test_errors_among_dealt_columns_name_samples(tmp_path: Any) -> None:
    class Failing(Steps):
        def __init__(self) -> None:
            super().__init__(str(tmp_path / "calls"))
            self.kind = "none"

        @batchopt.finite_differences
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kind == "raises" and self.rates[7] != 1.0:
                raise ArithmeticError("no solution")
            return x * (self.rates.sum() if self.kind == "none" else math.inf)

    for kind, error in (("raises", batchopt.WorkerError), ("infinite", batchopt.NonFiniteError)):
        model = Failing()
        with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), parallelize=2) as opt:
            opt.load(torch.ones(1, 1).double(), torch.ones(1, 1).double())
            f = opt.evaluate()
            assert f.item() == pytest.approx((model.rates.sum().item() - 1) ** 2)
            model.kind = kind
            opt.load(torch.ones(1, 1).double(), torch.ones(1, 1).double())
            with pytest.raises(error, match="sample"):
                opt.evaluate()
