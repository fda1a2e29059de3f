"""The contract of every backend, for functions of the batch other than f: collect, total, and what stands on them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchopt
from batchopt import BatchOptimizer, Term, WorkerError, extending
from tests.backends.least_squares_contract import LeastSquaresContract
from tests.workloads import Mlp, mlp, once

Make = Callable[..., BatchOptimizer]
X = torch.linspace(-2.0, 2.0, 37 * 6, dtype=torch.float64).reshape(37, 6).sin()
Y = torch.linspace(-1.0, 3.0, 37 * 4, dtype=torch.float64).reshape(37, 4).cos()


class Noisy(nn.Module):
    """Draws random numbers, keeps running statistics, and has a layer that is told from training by its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return y


def first(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of the first layer alone."""
    outputs: torch.Tensor = module.get_submodule("first")(inputs)
    return outputs


def outputs_and_errors(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    outputs = module(inputs)
    return {"outputs": outputs, "more": (outputs - targets, [inputs[:, 0] > 0])}


def backwards(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = module(inputs).square().sum(1)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    return losses.detach()


def moments(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    outputs = module(inputs)
    return outputs.T @ outputs, {"count": len(inputs), "positive": (inputs > 0).sum(0)}


def evaluated(opt: BatchOptimizer) -> Any:
    opt.evaluate()
    return opt.outputs()


ASKED: dict[str, Callable[[BatchOptimizer], Any]] = {
    "collect": lambda opt: opt.collect(lambda m, inputs, targets: m(inputs)),
    "collect these": lambda opt: opt.collect(outputs_and_errors, X[:9], Y[:9], train=True),
    "total": lambda opt: opt.total(lambda m, inputs, targets: m(inputs).sum(0)),
    "predict": lambda opt: opt.predict(X),
    "score": lambda opt: opt.score((X, Y), nn.functional.mse_loss),
    "evaluate_many": lambda opt: opt.evaluate_many(torch.stack([opt.parameters * i for i in range(4)])),
    "hvp": lambda opt: opt.hvp(torch.ones(len(opt.parameters), 2, dtype=torch.float64)),
    "outputs": evaluated,
}


def counted(opt: BatchOptimizer) -> tuple[float, ...]:
    return opt.eval_counter, opt.batch_counter, opt.sample_counter, extending.product_counter(opt), opt.output


def noisy() -> Noisy:
    torch.manual_seed(0)
    return Noisy().double()


class TaskContract(LeastSquaresContract):
    """What holds for any backend. A subclass gives `backend`, `parallelize`, and whether workers are `processes`."""

    backend: str
    parallelize: int
    processes = True

    def loaded(self, make: Make, module: nn.Module | None = None, **options: Any) -> tuple[BatchOptimizer, Any]:
        """With X and Y, in fixed chunks; and its module."""
        module = Mlp().double() if module is None else module
        opt = make(module, nn.MSELoss(), **{"optimizer": None, "chunk_size": 5, **options})
        opt.load(X, Y)
        return opt, module

    # ---- collect

    @pytest.mark.parametrize("chunk_size", [None, 5])
    def test_what_a_function_returns_comes_back_in_the_order_of_samples(
        self, make: Make, chunk_size: int | None
    ) -> None:
        opt, module = self.loaded(make, chunk_size=chunk_size)
        for found, inputs, targets in (
            (opt.collect(outputs_and_errors), X, Y),
            (opt.collect(outputs_and_errors, X[5:29], Y[5:29]), X[5:29], Y[5:29]),
        ):
            expected = module(inputs).detach()
            torch.testing.assert_close(found["outputs"], expected, rtol=1e-13, atol=1e-14)
            torch.testing.assert_close(found["more"][0], expected - targets, rtol=1e-13, atol=1e-14)
            assert isinstance(found["more"], tuple) and isinstance(found["more"][1], list)
            assert torch.equal(found["more"][1][0], inputs[:, 0] > 0)
            assert not found["outputs"].requires_grad

    def test_results_can_be_of_any_dtype_of_no_width_or_one_object_a_sample(self, make: Make) -> None:
        opt = make(Mlp().double(), nn.MSELoss(), optimizer=None, chunk_size=5)

        def several(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[Any, ...]:
            numbers = torch.view_as_complex(inputs[:, :2].contiguous()).conj(), (10 * inputs[:, 1]).to(torch.int16)
            return inputs.bfloat16(), *numbers, inputs[:, :0], inputs[:, 0], inputs[:, :3].numpy()

        found = opt.collect(several, X, Y)
        for got, expected in zip(found, several(nn.Identity(), X, Y), strict=True):
            assert torch.equal(got, torch.as_tensor(expected))
        found = opt.collect(lambda module, inputs, targets: [{"row": row, "n": len(inputs)} for row in inputs], X, Y)
        assert [entry["n"] for entry in found] == [5] * 35 + [2, 2]
        assert torch.equal(torch.stack([entry["row"] for entry in found]), X)
        ragged = opt.collect(lambda module, inputs, targets: [row[: 1 + i] for i, row in enumerate(inputs)], X, Y)
        assert [len(row) for row in ragged[:6]] == [1, 2, 3, 4, 5, 1] and len(ragged) == len(X)
        columns = opt.collect(lambda module, inputs, targets: [inputs[:, i] for i in range(5)], X, Y)
        assert torch.equal(torch.stack(columns, 1), X[:, :5])

    def test_outputs_of_layers(self, make: Make) -> None:
        opt, module = self.loaded(make)
        found = opt.collect(layers=["first", "second"])
        assert list(found) == ["first", "second"]
        opt.collect(backwards, grad=True)
        assert all(parameter.grad is None for parameter in module.parameters())
        assert opt.collect(layers=["first", "first"])["first"].equal(found["first"])
        torch.testing.assert_close(found["first"], module.first(X).detach())
        result, layers = opt.collect(lambda m, inputs, targets: m(inputs).sum(1), X, layers=["first"])
        torch.testing.assert_close(result, module(X).sum(1).detach())
        torch.testing.assert_close(layers["first"], module.first(X).detach())
        with pytest.raises(ValueError, match="has 'third', and the module has no part of that name: it has 'first'"):
            opt.collect(layers=["third"])
        with pytest.raises(WorkerError, match="layer 'second' was not called"):
            opt.collect(first, layers=["second"])
        with pytest.raises(WorkerError, match="layer 'first' is called more than once"):
            opt.collect(lambda *given: first(*given) + first(*given), layers=["first"])
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            opt.collect(lambda *given: 1 / 0, layers=["first"])
        assert not any(part._forward_hooks for part in module.modules())

    # ---- total

    @pytest.mark.parametrize("chunk_size", [None, 5])
    def test_sums_over_the_samples(self, make: Make, chunk_size: int | None) -> None:
        opt, module = self.loaded(make, chunk_size=chunk_size)
        for _ in range(2):  # the second time in the same memory
            matrix, counts = opt.total(moments)
            outputs = module(X).detach()
            torch.testing.assert_close(matrix, outputs.T @ outputs, rtol=1e-12, atol=1e-13)
            assert counts["count"].item() == 37 and counts["count"].dtype == torch.int64
            assert torch.equal(counts["positive"], (X > 0).sum(0))
        single = opt.total(lambda m, inputs, targets: inputs.float().sum(0), X)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single, X.float().sum(0), rtol=1e-5, atol=1e-5)
        complex_ = opt.total(lambda m, inputs, targets: torch.complex(inputs, -inputs).sum(0), X)
        torch.testing.assert_close(complex_, torch.complex(X, -X).sum(0))

    def test_integers_are_summed_exactly_or_refused(self, make: Make) -> None:
        opt = make(Mlp().double(), nn.MSELoss(), optimizer=None, chunk_size=5)
        large = 2**53 - 8
        assert opt.total(lambda m, inputs, targets: large if inputs[0, 0] == X[0, 0] else 1, X).item() == large + 7
        with pytest.raises(WorkerError, match="integers above"):
            opt.total(lambda m, inputs, targets: 2**54, X)
        with pytest.raises(ValueError, match=r"above 2\*\*53"):
            opt.total(lambda m, inputs, targets: large, X)

    # ---- what stays as it is

    @pytest.mark.filterwarnings("ignore:.*it normalises by the statistics of a chunk")
    def test_the_step_goes_on_as_if_nothing_had_happened(self, make: Make) -> None:
        opt, module = self.loaded(make, noisy(), posthook=lambda worker, sample: sample.loss)
        loss = opt.evaluate()
        gradient, hooked = opt.grad_parameters.clone(), opt.hook_results
        opt.hvp(torch.ones_like(opt.parameters))
        counters = counted(opt)
        draws, parameters = torch.get_rng_state(), opt.parameters.clone()
        opt.collect(outputs_and_errors)
        opt.total(moments)
        opt.collect(backwards, grad=True)
        opt.input_gradients()
        opt.evaluate_many(opt.parameters[None])
        assert torch.equal(torch.get_rng_state(), draws) and torch.equal(opt.parameters, parameters)
        assert torch.equal(opt.grad_parameters, gradient) and opt.hook_results == hooked
        assert all(p.grad is not None for p in module.parameters()) and all(m.training for m in module.modules())
        assert counters == counted(opt)
        assert opt.evaluate() == loss and torch.equal(opt.grad_parameters, gradient)

    @pytest.mark.filterwarnings("ignore:.*it normalises by the statistics of a chunk")
    def test_draws_and_modes(self, make: Make) -> None:
        opt, module = self.loaded(make, noisy())
        loss = opt.evaluate().item()
        drawn = opt.collect(lambda m, inputs, targets: m(inputs))
        assert nn.functional.mse_loss(drawn, Y).item() == pytest.approx(loss, rel=1e-12)
        steady = opt.collect(lambda m, inputs, targets: m(inputs), train=False)
        assert torch.equal(opt.predict(), steady)
        assert not torch.equal(steady, drawn)
        modes = opt.collect(lambda m, inputs, targets: [m.training] * len(inputs), train=False)
        assert modes == [False] * len(X)
        module.drop.eval()
        opt.load(X, Y)
        modes = opt.collect(lambda m, inputs, targets: [(m.training, m.get_submodule("drop").training)] * len(inputs))
        assert modes == [(True, False)] * len(X)
        assert opt.collect(lambda m, inputs, targets: m.eval()(inputs)).shape == Y.shape
        assert opt.collect(lambda m, inputs, targets: [m.training] * len(inputs)) == [True] * len(X)

    @pytest.mark.rows
    @pytest.mark.filterwarnings("ignore:.*it normalises by the statistics of a chunk")
    @pytest.mark.parametrize("what", ["collect these", "total", "evaluate_many", "hvp"])
    def test_running_statistics_are_those_of_a_run_in_which_nothing_is_asked(self, make: Make, what: str) -> None:
        def run(asks: bool, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            module = noisy()
            opt = make(module, nn.MSELoss(), optimizer="sgd", chunk_size=5, **options)
            losses = []
            for number in (1.0, 2.0):
                opt.load(number * X, Y)
                losses.append(opt.evaluate())
                if asks:
                    ASKED[what](opt)
                losses += [opt.evaluate(), torch.tensor(opt.step(X, number * Y)), opt.evaluate()]
                if asks:
                    ASKED[what](opt)
                losses.append(opt.evaluate())
            opt.close()
            return losses, [buffer.clone() for buffer in module.buffers()]

        losses, statistics = run(True)
        expected_losses, expected = run(False, backend="serial", parallelize=1)
        assert losses == expected_losses
        assert all(map(torch.equal, statistics, expected)) and statistics[-1] == 4

    # ---- what stands on them

    def test_scores_are_the_serial_numbers(self, make: Make) -> None:
        module = Mlp().double()
        opt = make(module, nn.MSELoss(), optimizer=None, chunk_size=7)
        expected = nn.functional.mse_loss(module(X), Y).item()
        loader = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 37, 8)]
        for data in ((X, Y), iter(loader)):
            assert opt.score(data, nn.functional.mse_loss) == pytest.approx(expected, rel=1e-12)
        outputs, inputs = zip(
            *[(outputs, inputs) for outputs, (inputs, _) in opt.iter_predict(iter(loader))], strict=True
        )
        torch.testing.assert_close(torch.cat(outputs), module(X).detach())
        assert torch.equal(torch.cat(inputs), X)

    def test_gradients_of_f_with_respect_to_the_inputs(self, make: Make) -> None:
        module = Mlp().double()
        opt = make(module, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]).double()), chunk_size=5)
        targets = torch.arange(37) % 4
        inputs = X.clone().requires_grad_()
        assert isinstance(opt.criterion, nn.Module)
        opt.criterion(module(inputs), targets).backward()
        opt.load(X, targets)
        torch.testing.assert_close(opt.input_gradients(), inputs.grad, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(opt.input_gradients(X, targets), inputs.grad, rtol=1e-12, atol=1e-14)
        with pytest.raises(WorkerError, match="nothing to differentiate by"):
            make(nn.Embedding(9, 4), nn.CrossEntropyLoss()).input_gradients(targets, targets)

    def test_f_at_many_points_is_what_evaluations_there_find(self, make: Make) -> None:
        module = noisy()
        module.norm.eval()
        opt = make(module, nn.MSELoss(), optimizer=None, chunk_size=5)
        opt.load(X, Y)
        start = opt.parameters.clone()
        points = torch.stack([start * scale for scale in (1.0, 0.5, -1.0, 2.0, 1.0)])
        points[3, 0] = torch.nan
        f, gradients = opt.evaluate_many(points, gradients=True)
        assert torch.equal(opt.evaluate_many([*points]), f)
        assert torch.equal(opt.parameters, start) and f[3] == torch.inf
        for i in (0, 1, 2, 4):
            opt.parameters.copy_(points[i])
            assert opt.evaluate() == f[i] and torch.equal(opt.grad_parameters, gradients[i])

    def test_products_with_a_block_are_those_with_its_columns(self, make: Make) -> None:
        opt, _ = self.loaded(make)
        block = torch.randn(len(opt.parameters), 3, dtype=torch.float64)
        block[0, 1] = torch.inf
        found = opt.hvp(block)
        assert found.shape == block.shape and found[:, 1].isnan().all() and extending.product_counter(opt) == 2
        for i in (0, 2):
            torch.testing.assert_close(found[:, i], opt.hvp(block[:, i]), rtol=1e-12, atol=1e-15)

    def test_outputs_of_the_last_evaluation(self, make: Make) -> None:
        module = Mlp().double()
        opt = make(module, nn.MSELoss(), optimizer=None, chunk_size=5)
        with pytest.raises(batchopt.BatchoptError, match="there are no outputs: set"):
            opt.outputs()
        opt.keep_outputs = True
        opt.load(X, Y)
        opt.evaluate()
        before, expected = opt.outputs(), module(X).detach()
        opt.parameters.mul_(2.0)
        opt.evaluate()
        torch.testing.assert_close(before, expected)
        torch.testing.assert_close(opt.outputs(), module(X).detach())
        opt.calibrate()
        opt.predict(X[:5])
        torch.testing.assert_close(opt.outputs(), module(X).detach())
        opt.keep_outputs = False
        opt.evaluate()
        with pytest.raises(batchopt.BatchoptError, match="there are no outputs"):
            opt.outputs()

    def test_terms_have_results_of_their_own(self, make: Make) -> None:
        module = Mlp().double()
        terms = {
            "one": Term(lambda m, inputs, targets: m(inputs).square().mean()),
            "two": Term(lambda m, inputs, targets: (m(inputs) - targets).square().mean(), weight=3.0),
        }
        opt = make(module, terms=terms, optimizer=None, chunk_size=5)
        opt.load({"one": X[:11], "two": (X, Y)})
        loss = opt.evaluate()
        rows = opt.collect(lambda m, inputs, targets: inputs)
        assert torch.equal(rows["one"], X[:11]) and torch.equal(rows["two"], X)
        assert list(opt.total({"two": lambda m, inputs, targets: len(targets)})) == ["two"]
        other = opt.collect({"one": lambda m, inputs, targets: m(inputs)}, {"one": X[3:20], "two": (X, Y)})
        torch.testing.assert_close(other["one"], module(X[3:20]).detach())
        inputs = X.clone().requires_grad_()
        (3 * (module(inputs) - Y).square().mean()).backward()
        torch.testing.assert_close(opt.input_gradients()["two"], inputs.grad)
        torch.testing.assert_close(opt.predict(X), module(X).detach())
        torch.testing.assert_close(opt.predict()["one"], module(X[:11]).detach())
        assert opt.evaluate_many(opt.parameters[None]) == loss
        block = torch.randn(len(opt.parameters), 2, dtype=torch.float64)
        torch.testing.assert_close(opt.hvp(block)[:, 1], opt.hvp(block[:, 1]), rtol=1e-12, atol=1e-14)
        with pytest.raises(ValueError, match="there is no such term: there are"):
            opt.collect({"three": lambda m, inputs, targets: inputs})
        with pytest.raises(ValueError, match="outputs are seen only where a criterion is given them"):
            opt.keep_outputs = True

    # ---- what cannot be

    def test_errors_name_the_samples_and_nothing_is_lost(self, make: Make) -> None:
        opt, _ = self.loaded(make)
        loss = opt.evaluate()

        def raises(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if (inputs == X[12]).all(1).any():
                raise ArithmeticError("what a row")
            return inputs

        refused: list[tuple[Any, type[Exception], str]] = [
            (raises, WorkerError, r"ArithmeticError in worker \d, samples 10..14: what a row"),
            (
                lambda m, x, y: x.T,
                WorkerError,
                r"`result` of shape \(6, \d\).* the first dimension has to be the sampl",
            ),
            (lambda m, x, y: None, WorkerError, r"returned NoneType|returned `result` of length"),
            (lambda m, x, y: {"x": x, "name": "x"}, WorkerError, r"returned str as `result\['name'\]`"),
            (lambda m, x, y: x[:, : len(x)], ValueError, r"chunk 7 \(samples 35..36\), and .* for chunk 0"),
        ]
        for function, error, words in refused:
            with pytest.raises(error, match=words):
                opt.collect(function)
        with pytest.raises((WorkerError, ValueError), match=r"for chunk 0|for other samples"):
            opt.total(lambda m, inputs, targets: inputs[:, 0])
        if self.processes:
            lock = threading.Lock()
            with pytest.raises(TypeError, match=r"the function cannot be sent to worker processes: it captures .*lock"):
                opt.collect(lambda m, inputs, targets: inputs if lock else targets)
        with pytest.raises(TypeError, match="`function` must be callable"):
            opt.total(3)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="`targets` were given without `inputs`"):
            opt.collect(raises, None, Y)
        assert opt.evaluate() == loss

    # ---- recovery

    def test_a_worker_that_is_killed_in_the_middle_changes_no_bit(self, make: Make, tmp_path: Path) -> None:
        if not self.processes:
            pytest.skip("its workers cannot be killed")
        maker, found = os.getpid(), []

        def deadly(*_: Any) -> None:
            if os.getpid() != maker and (tmp_path / "armed").exists() and once(tmp_path / "fired"):
                os.kill(os.getpid(), signal.SIGKILL)

        for name in ("unarmed", "armed"):
            module: Any = mlp().module
            module.first.register_forward_pre_hook(deadly)
            opt, _ = self.loaded(make, module, chunk_size=3)
            opt.evaluate()
            (tmp_path / name).touch()
            found.append(ASKED["hvp"](opt))
        assert torch.equal(*found) and (tmp_path / "fired").exists()
