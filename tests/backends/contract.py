"""The contract of every backend: one suite, run by a small class for each backend in the test files beside this one."""

from __future__ import annotations

import random
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import batchopt
from batchopt import BatchOptimizer, Sample, Worker, WorkerError
from tests.backends.task_contract import TaskContract
from tests.changes import CHANGES, World
from tests.test_bits import differing
from tests.test_forms import FORMS, asked, network
from tests.workloads import Broken, Mlp, Noisy, Pairs, Workload, cnn, difference, mlp, reference

Make = Callable[..., BatchOptimizer]


class Tied(nn.Module):
    """An encoder and a decoder that share their weight, a frozen scale, and a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6, bias=False)
        self.decoder = nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.encoder.weight
        self.scale = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.mix = nn.Parameter(torch.arange(12.0).view(3, 4).t() / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = (self.decoder(torch.tanh(self.encoder(x))) * self.scale)[:, :4] @ self.mix
        return y


def torchs_lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=5, line_search_fn="strong_wolfe")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


# Of what users change: what the loss is made of, and all else.
OF_LOSS = [name for name in CHANGES if "captured" in name or name == "global"]
OF_PROGRAM = [name for name in CHANGES if name not in OF_LOSS and name != "dropout"]  # which may leave nothing
# Of forms some, and of these what has the bits of tensors.
ALIKE = ["tensors", "a dataset", "a dataset read each time"]
SOME_FORMS = [*ALIKE, "values beside tensors", "a list of many lengths", "weights of a dataset", "terms and a dataset"]
SOME_FORMS += ["CrossEntropyLoss() 1"]  # some of whose targets do not count


def agree(opt: BatchOptimizer, loss: float, gradient: torch.Tensor, tolerance: float = 1e-12) -> None:
    """An evaluation finds these."""
    assert opt.evaluate().item() == pytest.approx(loss, rel=tolerance)
    torch.testing.assert_close(opt.grad_parameters, gradient, rtol=tolerance, atol=tolerance / 100)


def tied(samples: int = 9) -> Workload:
    torch.manual_seed(0)
    x, y = torch.randn(samples, 6).double(), torch.randn(samples, 3).double()
    return Workload(Tied().double(), nn.MSELoss(), x, y)


class Contract(TaskContract):
    """What holds for any backend. A subclass gives `backend` and `parallelize`."""

    backend: str
    parallelize: int

    @pytest.fixture
    def make(self) -> Any:
        """Builds BatchOptimizers that are closed at the test's end."""
        made: list[BatchOptimizer] = []

        def build(*args: Any, **options: Any) -> BatchOptimizer:
            opt = BatchOptimizer(*args, **{"backend": self.backend, "parallelize": self.asked, **options})
            made.append(opt)
            return opt

        yield build
        for opt in made:
            opt.close()

    def check(self, opt: BatchOptimizer, case: Workload, *batch: Any) -> None:
        """One evaluation on the batch, which is the case's or says the same, equals plain torch."""
        opt.load(*(batch or (case.inputs, case.targets)))
        agree(opt, *case.reference())

    # ---- vectors

    def test_tied_frozen_and_transposed_parameters(self, make: Make) -> None:
        case = tied(15)
        module: Any = case.module
        module.mix.data = module.mix.data.t().contiguous().t()
        assert not module.mix.is_contiguous()
        before = module.mix.detach().clone()
        opt = make(module, case.criterion, optimizer=None)
        assert opt.parameters.numel() == 36 + 12
        assert torch.equal(module.mix, before)
        self.check(opt, case)
        with torch.no_grad():
            opt.parameters.add_(0.1)
        self.check(opt, case)
        found = opt.run_on_workers(lambda worker: worker.module.encoder.weight is worker.module.decoder.weight)
        assert found == [True] * self.parallelize

    @pytest.mark.parametrize("with_loss_fn", [True, False])
    def test_what_the_user_changes_between_steps_reaches_the_workers(self, make: Make, with_loss_fn: bool) -> None:
        """One change after the other: parts of the module, what is frozen, modes, hooks, the loss, torch's settings."""
        world = World()
        world.criterion.get_buffer("weight").fill_(1.0)
        what = {"loss_fn": world.loss} if with_loss_fn else {"criterion": world.criterion}
        opt = make(world.module, **what, optimizer=None, check_cut=False)
        try:
            for name in OF_LOSS if with_loss_fn else OF_PROGRAM:
                CHANGES[name](world, 1.75)
                opt.load(world.inputs, world.targets)
                agree(opt, *world.reference(with_loss_fn), tolerance=1e-9)
        finally:
            world.undo_ambient()

    def test_a_second_optimizer_over_the_same_module_shares_its_vector(self, make: Make) -> None:
        case = mlp()
        one = make(case.module, case.criterion, optimizer="sgd")
        two = make(case.module, case.criterion, optimizer="lbfgs")
        assert one.parameters.data_ptr() == two.parameters.data_ptr()
        for opt in (one, two, one):
            self.check(opt, case)
            before = opt.output
            opt.step(case.inputs, case.targets)
            self.check(opt, case)
            assert opt.output < before

    # ---- batches

    @pytest.mark.filterwarnings("ignore:.* for . workers")
    def test_every_form_of_batch(self, make: Make) -> None:
        """With the numbers of plain torch, and in fixed chunks with the bits of one process."""
        found: dict[str, list[Any]] = {}
        way: dict[str, Any] = {"backend": self.backend, "parallelize": self.asked}
        for name in SOME_FORMS:
            found[name] = asked(*FORMS[name], network(), **way, chunk_size=4)
            alone = asked(*FORMS[name], network(), backend="serial", parallelize=1, chunk_size=4)
            assert found[name][0] == alone[0] and all(map(torch.equal, found[name][1:], alone[1:])), name
        first, *others = (found[name] for name in ALIKE)
        for other in others:
            assert first[0] == other[0] and all(map(torch.equal, first[1:], other[1:]))
        asked(*FORMS["terms and a dataset"], network(), **way)

    # ---- datasets

    def test_a_sample_that_cannot_be_read_is_named_and_the_optimizer_lives_on(self, make: Make) -> None:
        case = mlp()
        opt = make(case.module, case.criterion, optimizer="sgd", chunk_size=5)
        before = opt.parameters.clone()
        with pytest.raises(WorkerError, match=r"FileNotFoundError in worker \d, sample 7: no such picture") as caught:
            opt.step(Broken(case.inputs, case.targets))
        assert caught.value.samples == range(7, 8)
        assert "in __getitem__" in "".join(traceback.format_exception(caught.value))
        assert torch.equal(opt.parameters, before) and opt.batch_counter == 0
        with pytest.raises(WorkerError, match=r"FileNotFoundError in worker \d, sample 7: no such picture"):
            opt.collect(difference, Broken(case.inputs, case.targets))
        self.check(opt, case)
        found = opt.collect(difference, Pairs(case.inputs, case.targets))
        assert torch.equal(found, opt.collect(difference, case.inputs, case.targets))

    @pytest.mark.parametrize("chunk_size", [7, None])
    def test_noise_is_the_same_within_a_step_and_new_in_the_next(self, make: Make, chunk_size: int | None) -> None:
        """Whether a forward draws it or who reads the samples."""

        def losses(build: Make, **options: Any) -> list[float]:
            case = mlp()
            module = nn.Sequential(case.module, nn.Dropout(0.2))
            opt = build(module, case.criterion, optimizer=None, chunk_size=chunk_size, **options)
            found = []
            for _ in range(2):
                opt.load(Noisy(case.inputs, case.targets))
                found += [opt.evaluate().item() for _ in range(3)]
            return found

        mine = losses(make)
        assert mine[0] == mine[1] == mine[2] != mine[3] == mine[4] == mine[5]
        assert chunk_size is None or mine == losses(make, backend="serial", parallelize=1)

    # ---- hooks

    def test_hooks_see_their_samples_and_options_and_their_results_come_in_order(self, make: Make) -> None:
        case = mlp(samples=10)
        options = [None if i % 3 == 0 else {"id": i} for i in range(10)]

        def prehook(worker: Worker, sample: Sample) -> None:
            worker.state["seen"] = list(sample.indices)

        def posthook(worker: Worker, sample: Sample) -> Any:
            assert type(worker.module).__name__ == "Mlp" and type(worker.criterion).__name__ == "MSELoss"
            assert worker.world_size >= 1
            seen = sample.output.detach(), sample.targets, sample.loss
            return worker.state["seen"], sample.options, sample.inputs[:, 0].tolist(), seen

        opt = make(case.module, case.criterion, optimizer=None, prehook=prehook, posthook=posthook, chunk_size=3)
        opt.load(case.inputs, case.targets, options)
        opt.evaluate()
        assert [indices for indices, *_ in opt.hook_results] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert [option for _, some, *_ in opt.hook_results for option in some] == options
        assert [value for *_, some, _ in opt.hook_results for value in some] == case.inputs[:, 0].tolist()
        outputs = torch.cat([outputs for *_, (outputs, _, _) in opt.hook_results])
        torch.testing.assert_close(outputs, case.module(case.inputs).detach(), rtol=1e-12, atol=1e-14)
        for *_, (outputs, targets, loss) in opt.hook_results:
            assert loss == pytest.approx(case.criterion(outputs, targets).item(), rel=1e-12)

    def test_hooks_can_be_replaced_between_steps_and_change_samples_and_gradients(self, make: Make) -> None:
        case = mlp(samples=6)
        x, y, factor = case.inputs, case.targets, 3.0

        def prehook(worker: Worker, sample: Sample) -> None:
            assert sample.output is None and sample.loss is None
            sample.inputs, sample.targets = sample.inputs * factor, sample.targets + 1

        def posthook(worker: Worker, sample: Sample) -> Any:
            assert worker.module is not None
            for parameter in worker.module.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            return list(sample.indices)

        opt = make(case.module, case.criterion, optimizer=None)
        for pre, post in ((None, None), (prehook, posthook), (None, None)):
            opt.prehook, opt.posthook = pre, post
            opt.step(x, y)
            loss, gradient = reference(case.module, case.criterion, x * factor, y + 1) if pre else case.reference()
            assert [i for of_chunk in opt.hook_results for i in of_chunk] == list(range(6 if post else 0))
            assert opt.output == pytest.approx(loss, rel=1e-12)
            torch.testing.assert_close(opt.grad_parameters, gradient / (2 if post else 1), rtol=1e-12, atol=1e-14)

    def test_precode_runs_before_the_module_arrives_and_state_is_kept(self, make: Make) -> None:
        def precode(worker: Worker) -> None:
            worker.state["module at precode"] = worker.module

        opt = make(Mlp(), nn.MSELoss(), precode=precode)
        assert opt.run_on_workers(lambda worker: worker.state) == [{"module at precode": None}] * self.parallelize
        assert opt.run_on_workers(lambda worker, a, b: (worker.rank, a + b), 1, 2) == [
            (rank, 3) for rank in range(self.parallelize)
        ]

    # ---- optimizers

    @pytest.mark.parametrize("given", ["a factory", "an instance"])
    def test_any_torch_optimizer_goes_the_way_it_goes_alone(self, make: Make, given: str) -> None:
        ours, plain = mlp(), mlp()
        kind = adam if given == "an instance" else torchs_lbfgs
        opt = make(ours.module, ours.criterion, optimizer=kind(ours.module.parameters()) if kind is adam else kind)
        alone = kind(plain.module.parameters())

        def closure() -> torch.Tensor:
            alone.zero_grad()
            loss: torch.Tensor = plain.criterion(plain.module(plain.inputs), plain.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(3):
            opt.step(ours.inputs, ours.targets)
            assert opt.optimizer is not None
            opt.optimizer.zero_grad(set_to_none=True)
            alone.step(closure)  # type: ignore[arg-type]
        for mine, theirs in zip(ours.module.parameters(), plain.module.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)

    def test_evaluate_is_the_closure_of_an_optimizer_of_the_users_own(self, make: Make) -> None:
        case = mlp()
        before, _ = case.reference()
        opt = make(case.module, case.criterion, optimizer=None)
        opt.load(case.inputs, case.targets)
        torch.optim.LBFGS(case.module.parameters(), line_search_fn="strong_wolfe").step(opt.evaluate)  # type: ignore[no-untyped-call]
        assert opt.output < before / 2
        assert (opt.batch_counter, opt.sample_counter) == (0, 0) and opt.eval_counter > 10

    def test_optimize_map_and_reduce_can_be_overridden(self, make: Make) -> None:
        case = mlp()

        class Descent(BatchOptimizer):
            def optimize(self) -> None:
                for _ in range(3):
                    self.evaluate()
                    with torch.no_grad():
                        self.parameters.add_(self.grad_parameters, alpha=-0.1)

            def reduce(self, answers: Any) -> torch.Tensor:
                loss = super().reduce(answers)
                self.grad_parameters.mul_(2.0)
                return loss

        start, expected = case.reference()
        with Descent(case.module, case.criterion, backend=self.backend, parallelize=self.asked) as opt:
            opt.load(case.inputs, case.targets)
            answers = opt.map()
            assert [answer.rank for answer in answers] == sorted(answer.rank for answer in answers)
            assert opt.reduce(answers).item() == pytest.approx(start, rel=1e-12)
            torch.testing.assert_close(opt.grad_parameters, expected * 2, rtol=1e-12, atol=1e-14)
            assert opt.step(case.inputs, case.targets) < start
            assert opt.eval_counter == 3

    def test_counters_and_output(self, make: Make, nobody_late: None) -> None:
        case = mlp(samples=10)
        opt = make(case.module, case.criterion, optimizer="sgd")
        assert (opt.eval_counter, opt.batch_counter, opt.sample_counter, opt.output) == (0, 0, 0, 0.0)
        first, _ = case.reference()
        assert opt.step(case.inputs, case.targets) == pytest.approx(first, rel=1e-12) == opt.output
        opt.step(case.inputs[:4], case.targets[:4])
        assert (opt.eval_counter, opt.batch_counter, opt.sample_counter) == (2, 2, 14)
        opt.load(case.inputs, case.targets)
        assert (opt.eval_counter, opt.batch_counter, opt.sample_counter) == (2, 2, 14)
        assert opt.evaluate().item() == opt.output != first
        assert (opt.eval_counter, opt.batch_counter, opt.sample_counter) == (3, 2, 14)
        assert sum(worker.samples for worker in opt.workers) == 24

    # ---- one function within a step

    def test_the_callers_random_state_threads_and_grad_mode_are_untouched(self, make: Make) -> None:
        case = mlp()
        opt = make(case.module, case.criterion, threads_per_worker=1)

        def seed() -> None:
            torch.manual_seed(5)
            np.random.seed(5)
            random.seed(5)

        seed()
        expected = torch.rand(3), np.random.rand(), random.random()
        seed()
        threads = torch.get_num_threads()
        with torch.no_grad():
            opt.step(case.inputs, case.targets)
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled() and torch.get_num_threads() == threads
        assert torch.equal(torch.rand(3), expected[0])
        assert (np.random.rand(), random.random()) == expected[1:]

    def test_half_precision_is_summed_in_single(self, make: Make) -> None:
        torch.manual_seed(0)
        module = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
        x, y = torch.randn(300, 4).bfloat16(), torch.randn(300, 1).bfloat16()
        opt = make(module, nn.MSELoss(reduction="sum"), optimizer=None, chunk_size=1)
        opt.load(x, y)
        loss = opt.evaluate().item()
        exact = sum(nn.functional.mse_loss(module(x[i : i + 1]), y[i : i + 1]).item() for i in range(300))
        assert loss == pytest.approx(exact, rel=1e-14)
        _, gradient = reference(module.float(), nn.MSELoss(reduction="sum"), x.float(), y.float())
        assert opt.grad_parameters.dtype == torch.bfloat16
        torch.testing.assert_close(opt.grad_parameters.float(), gradient, rtol=2e-2, atol=0.5)

    # ---- errors

    def test_an_exception_in_the_users_code_is_one_error_and_the_optimizer_lives_on(self, make: Make) -> None:
        case = mlp(samples=10)

        class Stubborn(ValueError):
            def __reduce__(self) -> Any:
                raise RuntimeError("cannot be pickled")

        def refuse(worker: Worker, sample: Sample) -> None:
            if 7 in sample.indices:
                raise Stubborn("sample 7 is bad")

        opt = make(case.module, case.criterion, optimizer="sgd", prehook=refuse, chunk_size=2)
        before = opt.parameters.clone()
        with pytest.raises(WorkerError, match=r"Stubborn in worker \d, samples 6\.\.7: sample 7 is bad") as caught:
            opt.step(case.inputs, case.targets)
        assert caught.value.samples == range(6, 8) and caught.value.type_name == "Stubborn"
        assert "in refuse" in "".join(traceback.format_exception(caught.value))
        assert torch.equal(opt.parameters, before)
        assert (opt.eval_counter, opt.batch_counter, opt.sample_counter) == (0, 0, 0)
        opt.prehook = None
        self.check(opt, case)

    def test_an_exit_in_a_function_does_not_end_a_worker(self, make: Make) -> None:
        opt = make(Mlp(), nn.MSELoss())
        with pytest.raises((WorkerError, SystemExit), match="leaving"):
            opt.run_on_workers(lambda worker: sys.exit("leaving"))
        assert opt.run_on_workers(lambda worker: worker.rank) == list(range(self.parallelize))

    def test_use_before_a_batch_and_after_close(self, make: Make) -> None:
        opt = make(Mlp(), nn.MSELoss())
        with pytest.raises(batchopt.BatchoptError, match="no batch was loaded"):
            opt.evaluate()
        opt.close()
        opt.close()
        for use in (opt.evaluate, opt.calibrate, lambda: opt.step(torch.ones(2, 6)), opt.__enter__):
            with pytest.raises(batchopt.BatchoptError, match="was closed"):
                use()
        assert not any(worker.alive for worker in opt.workers)

    def test_a_loss_or_gradient_that_is_not_finite_names_its_sample(self, make: Make) -> None:
        case = mlp(samples=20)
        opt = make(case.module, case.criterion, chunk_size=4, posthook=lambda worker, sample: 1)
        opt.step(case.inputs, case.targets)
        before, fingerprint = opt.parameters.clone(), opt.fingerprint()
        case.inputs[13, 2] = torch.nan
        with pytest.raises(
            batchopt.NonFiniteError,
            match=r"loss is nan in chunk 3 \(sample 13\), at step 2, evaluation \d+; param",
        ) as caught:
            opt.step(case.inputs, case.targets)
        assert caught.value.samples == range(13, 14)
        assert torch.equal(opt.parameters, before) and opt.fingerprint() == fingerprint
        case.inputs[13, 2] = 0.0
        opt.step(case.inputs, case.targets)
        assert len(opt.hook_results) == 5

        def spoil(worker: Worker, sample: Sample) -> None:
            assert worker.module is not None
            next(worker.module.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]

        opt.posthook = spoil
        with pytest.raises(batchopt.NonFiniteError, match="a hook made it so"):
            opt.step(case.inputs, case.targets)

    # ---- the rest of the contract

    @pytest.fixture
    def shared(self, tmp_path: Path) -> Path:
        """A folder that all processes see which run the test."""
        return tmp_path

    def test_a_checkpoint_goes_on_in_one_process_with_the_same_bits(self, make: Make, shared: Path) -> None:
        options: dict[str, Any] = {"optimizer": adam, "chunk_size": 8}
        case, twin, path = cnn(), cnn(), shared / "checkpoint"
        for module in (case.module, twin.module):
            module.append(nn.BatchNorm1d(10, dtype=torch.float64))  # type: ignore[operator]  # for its buffers
            module.eval()
        opt = make(case.module, case.criterion, **options)
        opt.step(case.inputs, case.targets)
        opt.save(path)
        expected = [opt.step(case.inputs, case.targets) for _ in range(2)]
        with BatchOptimizer(twin.module, twin.criterion, **options) as other:
            other.load_checkpoint(path)
            assert [other.step(case.inputs, case.targets) for _ in range(2)] == expected
            assert other.fingerprint() == opt.fingerprint()
        opt.load_checkpoint(path)
        assert (opt.eval_counter, opt.batch_counter, opt.sample_counter) == (1, 1, 41)
        assert [opt.step(case.inputs, case.targets) for _ in range(2)] == expected
        assert other.fingerprint() == opt.fingerprint()

    def test_a_failed_step_is_undone(self, make: Make) -> None:
        """Parameters, buffers, counters, draws and the optimizer's state: then the same step has the bits of a
        first."""

        def fail_after_a_while(worker: Worker, sample: Sample) -> None:
            worker.state["chunks"] = worker.state.get("chunks", 0) + 1
            if worker.state["chunks"] > 4:
                raise ZeroDivisionError

        def run(failing: bool) -> tuple[str, torch.Tensor]:
            torch.manual_seed(3)
            case = mlp()
            module = nn.Sequential(case.module, nn.Dropout(0.2), nn.BatchNorm1d(4, dtype=torch.float64))
            opt = make(module, case.criterion, chunk_size=10, optimizer=lambda p: torch.optim.LBFGS(p, max_iter=3))
            opt.step(case.inputs, case.targets)
            if failing:
                state = opt.state_dict()
                opt.posthook = fail_after_a_while
                with pytest.raises(WorkerError, match="ZeroDivisionError"):
                    opt.step(case.inputs, case.targets)
                opt.posthook = None
                assert (opt.eval_counter, opt.output) == (state["history"]["evaluations"], state["history"]["loss"])
                with pytest.raises(batchopt.BatchoptError, match="no batch"):
                    opt.evaluate()
            opt.step(case.inputs, case.targets)
            return opt.fingerprint(), torch.cat([buffer.double().flatten() for buffer in module.buffers()])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # BatchNorm sees a chunk
            (one, buffers), (other, other_buffers) = run(failing=True), run(failing=False)
        assert one == other and torch.equal(buffers, other_buffers)

    def test_calibration_measures_every_worker(self, make: Make) -> None:
        case = mlp(samples=200)
        opt = make(case.module, case.criterion, prehook=lambda worker, sample: worker.state.update(hooked=True))
        opt.load(case.inputs, case.targets)
        speeds = opt.calibrate()
        assert opt.run_on_workers(lambda worker: worker.state) == [{}] * self.parallelize
        assert len(speeds) == self.parallelize and all(speed > 0 for speed in speeds)
        assert [worker.speed for worker in opt.workers] == pytest.approx(speeds, rel=1e3)
        assert (opt.eval_counter, opt.sample_counter) == (0, 0)

    @pytest.mark.rows
    @pytest.mark.filterwarnings("ignore:.* for . workers", "ignore:.*it normalises by the statistics of a chunk")
    @pytest.mark.parametrize("name", ["draws, statistics and hooks", "targets", "terms"])
    def test_the_bits_do_not_depend_on_the_workers_when_chunks_are_fixed(self, name: str) -> None:
        assert self.backend == "serial" or not differing(name, backend=self.backend, parallelize=self.asked)
