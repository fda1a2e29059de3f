"""Whatever is done in whatever order, on any number of workers, and whoever dies or is interrupted meanwhile: what is
found is what plain torch computes in one process, and has the bits of one worker where chunks are fixed."""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from batchopt import BatchOptimizer, Sample, Worker, WorkerError
from tests.building import handling
from tests.changes import CHANGES, PUT_BACK, World
from tests.signals import SignalAt, Stop, stop
from tests.workloads import Pairs

CHUNK = 5
NUMBERS = st.floats(0.5, 2.0)
FORMS: dict[str, Callable[[World], tuple[Any, ...]]] = {
    "all": lambda world: (world.inputs, world.targets),
    "a few": lambda world: (world.inputs[:7], world.targets[:7]),
    "one": lambda world: (world.inputs[5:6], world.targets[5:6]),
    "a dataset": lambda world: (Pairs(world.inputs, world.targets),),
}
SGD = 0.125  # the rate


def outputs(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module(x)
    return found


def sums(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return outputs(module, x, y).sum(0)


def indices(worker: Worker, sample: Sample) -> tuple[list[int], float]:
    """The samples of a chunk, and a random number."""
    return list(sample.indices), torch.rand(1).item()


def refuse(worker: Worker, sample: Sample) -> None:
    raise ArithmeticError("refused")


class One:
    """The program on so many workers, beside plain torch."""

    def __init__(self, workers: int, fixed: bool, with_loss_fn: bool, optimizer: str, weighted: bool = True) -> None:
        self.world, self.with_loss_fn, self.fixed = World(weighted or with_loss_fn), with_loss_fn, fixed
        del self.world.module.mix  # sparse, it would be sent each time: it has no memory of one kind
        self.world.module.register_buffer("mix", torch.eye(4).double())
        if with_loss_fn:
            self.world.criterion.get_buffer("weight").fill_(1.0)
        what = {"loss_fn": self.world.loss} if with_loss_fn else {"criterion": self.world.criterion}
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=SGD)  # noqa: E731
        self.opt = BatchOptimizer(
            self.world.module,
            **what,
            optimizer=sgd if optimizer == "sgd" else "lbfgs",
            parallelize=workers,
            chunk_size=CHUNK if fixed else None,
            check_cut=False,
            max_restarts=1000,
            posthook=indices,
        )
        self.x, self.y = self.world.inputs, self.world.targets

    def load(self, form: str) -> None:
        if form == "one" and (self.world.module.norm.training or self.world.targets[5] == self.ignored):
            form = "a few"  # of one there are no statistics, and of none there is no mean
        given = FORMS[form](self.world)
        self.x, self.y = (given[0].inputs, given[0].targets) if form == "a dataset" else given
        self.given = given
        self.opt.load(*given)

    def f(self) -> torch.Tensor:
        """By plain torch, in one process: all at once, or chunk after chunk where each has statistics of its own."""
        return self.f_of(self.x, self.y) if not self.world.module.norm.training else self.by_chunks()[0]

    def f_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.with_loss_fn:
            return self.world.loss(self.world.module, x, y)
        found: torch.Tensor = self.world.criterion(self.world.module(x), y)
        return found

    def weight_of(self, y: torch.Tensor) -> float:
        """What the mean over these samples divides by; 1 for a sum."""
        criterion: nn.CrossEntropyLoss = self.world.criterion
        if criterion.reduction == "sum":
            return 1.0
        if self.with_loss_fn:
            return float(len(y))
        counted = y[y != self.ignored]
        return float(len(counted) if criterion.weight is None else criterion.weight[counted].sum())

    def by_chunks(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """f, and the running statistics after it: each chunk begins with those of the start, and their values are
        averaged by the number of samples."""
        norm, parts, whole = self.world.module.norm, torch.zeros(()).double(), self.weight_of(self.y)
        starts = dict(norm.named_buffers())
        mean = [torch.zeros_like(starts[name]) for name in ("running_mean", "running_var")]
        try:
            for x, y in zip(torch.split(self.x, CHUNK), torch.split(self.y, CHUNK), strict=True):
                for name, start in starts.items():
                    setattr(norm, name, start.clone())
                share = self.weight_of(y) / whole if self.world.criterion.reduction == "mean" else 1.0
                if share:  # of what is ignored there is no mean
                    parts = parts + share * self.f_of(x, y)
                else:
                    self.world.module(x)
                for total, name in zip(mean, ("running_mean", "running_var"), strict=True):
                    total += norm.get_buffer(name) * len(x) / len(self.x)
        finally:
            for name, start in starts.items():
                setattr(norm, name, start)
        return parts, mean

    def trained(self) -> list[torch.Tensor]:
        """Those of X, also if they are frozen for a while."""
        return [parameter for parameter in self.world.module.parameters() if parameter is not self.world.module.gain]

    def gradient(self, of: torch.Tensor, graph: bool = False) -> torch.Tensor:
        """By plain torch; zeros for what is frozen."""
        live = [parameter for parameter in self.trained() if parameter.requires_grad]
        found = dict(zip(live, torch.autograd.grad(of, live, create_graph=graph, allow_unused=True), strict=True))
        parts = [found.get(parameter) for parameter in self.trained()]
        return torch.cat(
            [
                torch.zeros(p.numel()).double() if g is None else g.flatten()
                for p, g in zip(self.trained(), parts, strict=True)
            ]
        )

    @property
    def ignored(self) -> int:
        return self.world.criterion.ignore_index

    def weighs_alike(self) -> bool:
        """Whether the mean of a loss function is over samples: else it may not be cut."""
        weight = self.world.criterion.weight
        alike = weight is None or bool((weight == weight[0]).all())
        alike = alike and self.ignored not in self.world.targets
        return alike and self.world.criterion.reduction == "mean"

    def is_plain(self) -> bool:
        """Whether plain torch computes the same: no chunk has draws of its own, and where it has statistics of its own
        it is known which samples are a chunk."""
        drop, norm = self.world.module.drop, self.world.module.norm
        draws = drop.training and 0.0 < drop.p < 1.0
        known = self.fixed or not norm.training
        return not draws and known and (not self.with_loss_fn or self.weighs_alike())


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        found.detach().double(), expected.detach().double(), rtol=1e-7, atol=1e-9, equal_nan=True
    )


class Model(RuleBasedStateMachine):
    """The same calls for two: one worker, and as many as there are at the time."""

    @initialize(
        workers=st.integers(1, 3),
        fixed=st.sampled_from([True, True, False]),
        loss_fn=st.booleans(),
        lbfgs=st.booleans(),
        weighted=st.booleans(),
        ignores=st.booleans(),
        statistics=st.booleans(),
        looks=st.sampled_from([True, True, False]),
    )
    def begin(
        self,
        workers: int,
        fixed: bool,
        loss_fn: bool,
        lbfgs: bool,
        weighted: bool,
        ignores: bool,
        statistics: bool,
        looks: bool,
    ) -> None:
        """`looks`: f is asked for after each thing that is done, else now and then."""
        self.fixed, self.optimizer, self.fresh, self.looks = fixed, "lbfgs" if lbfgs else "sgd", False, looks
        self.both = [One(number, fixed, loss_fn, self.optimizer, weighted) for number in (1, workers)]
        for one in self.both:
            one.world.criterion.ignore_index = 1 if ignores else -100
            one.world.module.norm.train(statistics and fixed)
        self.load("all")

    @property
    def is_sparse(self) -> bool:
        """Whether the program counts as another one at each call."""
        return self.both[0].world.module.mix.is_sparse

    def each(self, do: Callable[[One], Any]) -> list[Any]:
        """What is found by both, which is the same."""
        found = [do(one) for one in self.both]
        if self.fixed and isinstance(found[0], torch.Tensor):
            assert torch.equal(*found), (found[0] - found[1]).abs().max()
        return found

    # ---- what is asked

    @rule(form=st.sampled_from([*FORMS]))
    def load(self, form: str) -> None:
        self.each(lambda one: one.load(form))
        self.fresh, self.form = True, form

    @invariant()
    def f_is_right(self) -> None:
        if getattr(self, "looks", False):
            self.evaluate(1)

    @rule(times=st.integers(1, 3))
    def again(self, times: int) -> None:
        self.evaluate(times)

    def evaluate(self, times: int) -> None:
        """Again and again the same f; hooks see each sample once, in order, and each chunk draws numbers of its own."""
        if not self.fresh:
            self.load(self.form)
        for _ in range(times):
            self.each(lambda one: one.opt.evaluate())
            self.each(lambda one: one.opt.grad_parameters.clone())
            for one in self.both:
                samples, draws = zip(*one.opt.hook_results, strict=True)
                assert [i for chunk in samples for i in chunk] == [*range(len(one.x))]
                assert len({*draws}) == len(draws)
            if self.fixed:
                assert self.both[0].opt.hook_results == self.both[1].opt.hook_results
            for one in self.both:
                if one.is_plain():
                    close(torch.tensor(one.opt.output), expected := one.f())
                    used = [parameter for parameter in one.trained() if parameter.grad is not None]
                    close(one.opt.grad_parameters, one.gradient(expected))
                    live = [parameter for parameter in one.trained() if parameter.requires_grad]
                    found = torch.autograd.grad(one.f(), live, allow_unused=True)
                    for parameter, gradient in zip(live, found, strict=True):
                        assert (gradient is None) == all(parameter is not other for other in used)

    @precondition(lambda self: self.fresh)
    @rule(number=NUMBERS)
    def multiply(self, number: float) -> None:
        def product(one: One) -> torch.Tensor:
            v = torch.linspace(-number, number, one.opt.parameters.numel(), dtype=torch.float64)
            found = one.opt.hvp(v)
            if one.is_plain():
                close(found, one.gradient(one.gradient(one.f(), graph=True) @ v))
            return found

        self.each(product)

    @precondition(lambda self: self.fresh)
    @rule(what=st.sampled_from(["collect", "total", "predict"]))
    def ask(self, what: str) -> None:
        def answer(one: One) -> torch.Tensor:
            module, plain = one.world.module, one.is_plain()
            if what == "predict":
                modes = {part: part.training for part in module.modules()}
                expected = module.eval()(one.x)
                for part, mode in modes.items():
                    part.training = mode
                found: torch.Tensor = one.opt.predict(one.x)
                plain = True
            elif what == "collect":
                expected, found = outputs(module, one.x, one.y) if plain else None, one.opt.collect(outputs)
            else:
                expected, found = sums(module, one.x, one.y) if plain else None, one.opt.total(sums)
            if plain:
                close(found, expected)
            return found

        self.each(answer)
        self.fresh = not self.is_sparse

    @rule(form=st.sampled_from([*FORMS]))
    def step(self, form: str) -> None:
        """From the module as it is: what was changed since the last one is seen."""
        self.load(form)

        def moved(one: One) -> torch.Tensor:
            before = one.opt.parameters.clone()
            plain, norm = one.is_plain() and self.optimizer == "sgd", one.world.module.norm
            expected = before - SGD * one.gradient(one.f()) if plain else before
            statistics = one.by_chunks()[1] if plain and norm.training else []
            one.opt.step(*one.given)
            if plain:
                close(one.opt.parameters, expected)
            for name, mean in zip(("running_mean", "running_var"), statistics, strict=False):
                close(norm.get_buffer(name), mean)
            return one.opt.parameters.clone()

        self.each(moved)
        self.fresh = False

    # ---- what is changed

    @rule(name=st.sampled_from(sorted(CHANGES)), number=NUMBERS)
    def change(self, name: str, number: float) -> None:
        """Something of the program; of what concerns all modules, or torch, once."""
        if name == "sparse buffer in place" and not self.is_sparse:
            return
        for one in self.both:
            CHANGES[name](one.world, number)
            if name in ("hook of all modules", "default dtype"):
                break
        self.fresh = False

    @rule(p=st.sampled_from([0.0, 0.3]), statistics=st.booleans())
    def be_random(self, p: float, statistics: bool) -> None:
        """Draws and statistics, of which plain torch has others: they are the same for any number of workers. Of one
        sample there are no statistics, and a shard may have one."""
        for one in self.both:
            one.world.module.drop.p, one.world.module.drop.training = p, True
            one.world.module.norm.train(statistics and self.fixed)
        self.fresh = False

    @rule(number=NUMBERS, how=st.sampled_from(["in place", "X", "data"]))
    def move(self, number: float, how: str) -> None:
        """Parameters, with which every evaluation begins."""
        for one in self.both:
            if how == "X":
                one.opt.parameters.mul_(number)
            for parameter in one.trained():
                if how == "data":
                    parameter.data = parameter.data * number
                elif how == "in place":
                    parameter.data.mul_(number)

    @rule(workers=st.integers(1, 3))
    def resize(self, workers: int) -> None:
        self.both[0].opt.resize(1)  # which ends its step, too: statistics are set
        self.both[1].opt.resize(workers)
        self.fresh = False

    # ---- what goes wrong

    @precondition(lambda self: len(self.both[1].opt.workers) > 1)
    @rule(rank=st.integers(0, 2))
    def kill(self, rank: int) -> None:
        """A worker, of which the next call learns."""
        workers = self.both[1].opt.workers
        worker = workers[rank % len(workers)]
        if worker.alive:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    @precondition(lambda self: self.fresh)
    @rule(number=st.integers(1, 400), what=st.sampled_from(["evaluate", "step", "predict", "load"]))
    def interrupt(self, number: int, what: str) -> None:
        """At a call in the library, if it comes so far: X is where it was, and the next call begins anew."""
        one = self.both[1]
        calls: dict[str, Callable[[], object]] = {
            "evaluate": one.opt.evaluate,
            "step": lambda: one.opt.step(one.x, one.y),
            "predict": lambda: one.opt.predict(one.x),
            "load": lambda: one.opt.load(one.x, one.y),
        }
        before, counters = one.opt.parameters.clone(), (one.opt.batch_counter, one.opt.sample_counter)
        state = copy.deepcopy(one.opt.state_dict())
        with handling(stop), suppress(Stop):
            SignalAt(number).amid(calls[what])
            if what == "step":
                one.opt.load_state_dict(state)
        if what == "load":  # which has begun a step, or has not: random numbers of the next one are its own
            one.opt.load_state_dict(state)
        assert torch.equal(one.opt.parameters, before)
        assert counters == (one.opt.batch_counter, one.opt.sample_counter)
        self.fresh = False

    @precondition(lambda self: self.fresh)
    @rule(what=st.sampled_from(["evaluate", "step", "a step that was made"]))
    def fail(self, what: str) -> None:
        """In the user's code, in an evaluation or once X has moved: then everything is as before the call."""

        def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            raise ArithmeticError("refused")

        def failing(one: One) -> torch.Tensor:
            before, counters = one.opt.parameters.clone(), (one.opt.batch_counter, one.opt.sample_counter)
            state = {name: tensor.clone() for name, tensor in one.world.module.state_dict().items()}
            assert one.opt.optimizer is not None
            handles = []
            if what == "a step that was made":
                handles.append(one.opt.optimizer.register_step_post_hook(spoil))
            else:
                one.opt.prehook = refuse
            with pytest.raises((WorkerError, ArithmeticError), match="refused"):
                one.opt.evaluate() if what == "evaluate" else one.opt.step(one.x, one.y)
            for handle in handles:
                handle.remove()
            one.opt.prehook = None
            assert torch.equal(one.opt.parameters, before)
            for name, tensor in one.world.module.state_dict().items():
                assert torch.equal(tensor.to_dense(), state[name].to_dense()), name
            assert counters == (one.opt.batch_counter, one.opt.sample_counter)
            return before

        self.each(failing)
        self.fresh = False

    @precondition(lambda self: self.fresh)
    @rule(
        name=st.sampled_from(sorted(PUT_BACK)),
        number=NUMBERS,
        place=st.sampled_from(["collect", "total", "prehook", "posthook"]),
    )
    def meddle(self, name: str, number: float, place: str) -> None:
        """A function or a hook of the user's changes the module: it is put back, or refused by name."""

        if self.is_sparse:
            return

        def function(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            CHANGES[name](SimpleNamespace(module=module, handles=[]), number)  # type: ignore[arg-type]
            return torch.ones(len(x)) if place == "collect" else torch.ones(())

        def hook(worker: Worker, sample: Sample) -> tuple[list[int], float]:
            function(worker.module, sample.inputs, sample.targets)  # type: ignore[arg-type]
            return indices(worker, sample)

        def done(one: One) -> torch.Tensor:
            before, gradient = one.opt.evaluate(), one.opt.grad_parameters.clone()
            try:
                if place.endswith("hook"):
                    setattr(one.opt, place, hook)
                    one.opt.evaluate()
                elif place == "collect":
                    assert one.opt.collect(function).sum() == len(one.x)
                else:
                    one.opt.total(function)
            except (WorkerError, ValueError) as error:
                assert re.search("writes|changes the|would find another f", str(error)), error
            one.opt.prehook, one.opt.posthook = None, indices
            after = one.opt.evaluate()
            if self.fixed or one.is_plain():  # else it depends on chunks, which are as large as workers have been fast
                close(after, before)
                close(one.opt.grad_parameters, gradient)
            return after

        self.each(done)

    @precondition(lambda self: self.both[0].world.module.wide.stride() != (0,))  # which torch does not load
    @rule()
    def go_back(self) -> None:
        """To a state that was saved: the same step has the same bits."""

        def again(one: One) -> torch.Tensor:
            if len(one.x) == 1:  # of which there are no statistics
                one.load("a few")
            state = copy.deepcopy(one.opt.state_dict())
            found = []
            for _ in range(2):
                one.opt.step(one.x, one.y)
                found.append(one.opt.parameters.clone())
                one.opt.load_state_dict(state)
            if self.fixed:
                assert torch.equal(*found)
            elif one.is_plain() and self.optimizer == "sgd":  # L-BFGS lets rounding grow
                close(*found)
            return found[0]

        self.each(again)
        self.fresh = False

    # ---- what holds at any time

    @invariant()
    def states_are_the_same(self) -> None:
        if hasattr(self, "both") and self.fixed:
            states = [one.world.module.state_dict() for one in self.both]
            for name, tensor in states[0].items():
                assert torch.equal(tensor.to_dense(), states[1][name].to_dense()), name

    @invariant()
    def parameters_are_views_of_x(self) -> None:
        for one in getattr(self, "both", []):
            assert torch.equal(
                torch.cat([parameter.detach().flatten() for parameter in one.trained()]), one.opt.parameters
            )

    def teardown(self) -> None:
        for one in getattr(self, "both", []):
            one.world.undo_ambient()
            one.opt.close()


def test_a_buffer_that_came_before_this_process_became_the_worker_has_its_place() -> None:
    """Found by the model: there was room for the buffers of before."""
    one = One(2, fixed=False, with_loss_fn=False, optimizer="sgd")
    with one.opt as opt:
        opt.step(one.x, one.y)
        one.world.module.late = torch.full((4,), 1.5).double()
        opt.resize(1)
        expected = opt.parameters - SGD * one.gradient(one.f())
        opt.step(one.x, one.y)
        close(opt.parameters, expected)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations are repeated also on a machine that is busy."""
    monkeypatch.setattr("batchopt.backends.process.repeat.GRACE", 5.0)


def cases(name: str, *marks: pytest.MarkDecorator, **limits: Any) -> Any:
    """A test of the model. It does not shrink: what failed is printed as it was, and each try would take a minute."""
    machine: Any = type(name, (Model,), {})
    case = machine.TestCase
    case.settings = settings(
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
        report_multiple_bugs=False,
        print_blob=True,
        **limits,
    )
    for mark in (
        pytest.mark.filterwarnings("ignore:.*idle:UserWarning", "ignore:.*statistics of a chunk:UserWarning"),
        pytest.mark.usefixtures("patient", "nobody_late"),
        *marks,
    ):
        case = mark(case)
    return case


TestSome = cases("Some", max_examples=3, stateful_step_count=15, derandomize=True)
TestMany = cases(
    "Many", pytest.mark.slow, pytest.mark.timeout(900), max_examples=2, stateful_step_count=25, derandomize=True
)
TestOthersEachNight = cases(
    "Others", pytest.mark.nightly, pytest.mark.timeout(7200), max_examples=200, stateful_step_count=30
)
