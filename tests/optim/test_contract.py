"""What a BatchOptimizer promises with any optimizer, of ours or of torch."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchopt
from batchopt import BatchOptimizer, NonFiniteError, WorkerError
from tests.workloads import Mlp, mlp


def two_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """With learning rates of their own."""
    return [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.01}]


def narrow(parameters: list[nn.Parameter]) -> list[tuple[float, float] | None]:
    """Bounds that hold many of the weights."""
    return [(-0.2, 0.2) if parameter.dim() > 1 else None for parameter in parameters]


NO_END: dict[str, Any] = {"tolerance_grad": 0.0, "tolerance_change": 0.0, "max_iter": 2}
OURS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lambda p: batchopt.LBFGS(p, **NO_END, history_size=3),
    "lbfgs with a long history": lambda p: batchopt.LBFGS(p, **NO_END),
    "lbfgs with l1": lambda p: batchopt.LBFGS(p, **NO_END, history_size=3, l1=0.01),
    "lbfgs with bounds": lambda p: batchopt.LBFGS(p, **NO_END, history_size=3, bounds=narrow(p)),
    "cg": lambda p: batchopt.CG(p, **NO_END),
    "ssbroyden": lambda p: batchopt.SSBroyden(p, **NO_END),
    "levenberg-marquardt": lambda p: batchopt.LevenbergMarquardt(p, **NO_END),
    "levenberg-marquardt with bounds": lambda p: batchopt.LevenbergMarquardt(p, **NO_END, bounds=narrow(p)),
    "svrg": lambda p: batchopt.SVRG(torch.optim.SGD(p, lr=0.02, momentum=0.9), update_freq=3),
}
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **OURS,
    "sgd in two groups": lambda p: torch.optim.SGD(two_groups(p), lr=0.02, momentum=0.9, nesterov=True),
    "adam with a tensor as lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), amsgrad=True),
    "adam, all at once": lambda p: torch.optim.Adam(p, lr=0.05, foreach=True),
    "torch's lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
    "torch's lbfgs with a search": lambda p: torch.optim.LBFGS(p, max_iter=2, line_search_fn="strong_wolfe"),
}
# Without those for sparse gradients, and those that take only matrices.
TORCHS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: functools.partial(vars(torch.optim)[name], lr=0.01)
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    if name not in ("SparseAdam", "Muon", "LBFGS")
}
# The rest is slow, and torch's others of the night.
QUICK = "lbfgs", "levenberg-marquardt", "Adam"


def each(kinds: Iterable[str]) -> list[Any]:
    """Their names, as parameters of a test."""
    late = {name: pytest.mark.nightly if name in TORCHS else pytest.mark.slow for name in kinds if name not in QUICK}
    return [pytest.param(name, marks=late.get(name, ())) for name in kinds]


CASE = mlp(samples=12)
DATA = CASE.inputs, CASE.targets


def made(kind: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """The same each time."""
    torch.manual_seed(0)
    return BatchOptimizer(Mlp().to(dtype), nn.MSELoss(), optimizer=kind, chunk_size=5, **options)


def step(opt: BatchOptimizer, dtype: torch.dtype = torch.float64) -> float:
    x, y = (part.to(dtype) for part in DATA)
    if isinstance(opt.optimizer, batchopt.SVRG):
        opt.optimizer.begin_pass(lambda: opt.full_gradient([(x, y)]))
    return opt.step(x, y)


@pytest.mark.parametrize("name", each(KINDS | TORCHS))
def test_it_descends_and_resumes_to_the_bit_with_another_number_of_workers(name: str, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64):
        kind = (KINDS | TORCHS)[name]
        with made(kind, dtype) as whole, made(kind, dtype, parallelize=2) as part:
            first = step(whole, dtype)
            for _ in range(3):
                whole.save(tmp_path / "state")
                part.load_checkpoint(tmp_path / "state")
                for _ in range(2):
                    last = step(whole, dtype)
                    assert step(part, dtype) == last
                assert torch.equal(part.parameters, whole.parameters)
            assert last < first


@pytest.mark.parametrize("name", each(KINDS))
def test_after_steps_that_failed_everything_runs_on_as_without_them(name: str, tmp_path: Path) -> None:
    """They fail in an evaluation, by a number that is not finite, and once all is done, with learning rates and X
    changed, too. What `LBFGS` had learned it begins to learn anew."""

    def forget(opt: BatchOptimizer) -> None:
        assert opt.optimizer is not None
        state = opt.optimizer.state_dict()
        if state["state"].get(0, {}).pop("curvature", None) is not None:
            opt.optimizer.load_state_dict(state)

    def present(opt: BatchOptimizer) -> bytes:
        opt.save(tmp_path / "present")
        return (tmp_path / "present").read_bytes()

    def run(detours: list[int], forgets: bool) -> bytes:
        with made(KINDS[name], speeds=[1.0]) as opt:
            evaluations: list[int] = []
            least = 3 if "max_iter" in opt.optimizer.param_groups[0] else 0  # chunks; the others evaluate once a step

            def fail(worker: Any, sample: Any) -> None:
                evaluations.append(sample.indices.start)
                if len(evaluations) > least:
                    raise ArithmeticError

            def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                for group in optimizer.param_groups:
                    if isinstance(group.get("lr"), torch.Tensor):
                        group["lr"].fill_(7.0)
                    else:
                        group.update({key: 7.0 for key in ("lr", "damping") if key in group})
                opt.parameters.mul_(3.0)
                raise KeyboardInterrupt

            if isinstance(opt.optimizer, batchopt.SVRG):
                opt.optimizer.begin_pass(lambda: opt.full_gradient([DATA]))
            for count in detours:
                if count:
                    forget(opt)
                for _ in range(0 if forgets else count):
                    before = present(opt)
                    handle = opt.optimizer.register_step_post_hook(spoil)
                    with pytest.raises(KeyboardInterrupt):
                        opt.step(*DATA)
                    handle.remove()
                    assert present(opt) == before
                    opt.prehook = fail
                    evaluations.clear()
                    with pytest.raises(WorkerError, match="ArithmeticError"):
                        opt.step(*DATA)
                    opt.prehook = None
                    assert present(opt) == before
                    with pytest.raises(NonFiniteError, match=r"loss is nan in chunk 0 \(sample 0\)"):
                        opt.step(DATA[0], DATA[1] * torch.nan)
                    assert present(opt) == before
                opt.step(*DATA)
            return present(opt)

    assert run([1, 0, 2, 1], forgets=True) == run([1, 0, 2, 1], forgets=False)


@pytest.mark.parametrize("name", each(OURS))
def test_what_is_frozen_stays_and_what_was_moved_is_seen(name: str) -> None:
    with made(OURS[name]) as opt:
        step(opt)
        frozen = opt.module.first.weight.requires_grad_(False)
        before = frozen.clone()
        for _ in range(2):
            step(opt)
            assert torch.equal(frozen, before)
        frozen.requires_grad_()
        with torch.no_grad():
            opt.module.second.bias.add_(1.0)
        expected = nn.functional.mse_loss(opt.module(DATA[0]), DATA[1]).item()
        opt.load(*DATA)
        assert opt.evaluate().item() == pytest.approx(expected, rel=1e-12)
        assert step(opt) <= expected * (1 + 1e-12) and not torch.equal(frozen, before)


# ---- they are copied and pickled as torch's are, and taken over by schedulers


def alone(module: nn.Module, optimizer: Any) -> float:
    """A step without a BatchOptimizer."""

    def closure() -> Any:
        optimizer.zero_grad()
        residuals = module(DATA[0]) - DATA[1]
        if isinstance(optimizer, batchopt.LevenbergMarquardt):
            return residuals
        loss = residuals.square().sum()
        loss.backward()
        return loss

    if isinstance(optimizer, batchopt.SVRG):
        optimizer.begin_pass(closure)
    return torch.as_tensor(optimizer.step(closure)).item()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("kind", each(OURS))
def test_a_copy_goes_on_by_itself(kind: str, duplicate: Callable[[Any], Any]) -> None:
    module = Mlp().double()
    optimizer = OURS[kind](list(module.parameters()))
    alone(module, optimizer)
    other, its_own = duplicate((module, optimizer))
    assert type(its_own) is type(optimizer)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    found = [alone(other, its_own) for _ in range(3)]
    assert all(map(torch.equal, before, module.parameters()))
    assert found == [alone(module, optimizer) for _ in range(3)]
    assert all(map(torch.equal, other.parameters(), module.parameters()))


@pytest.mark.parametrize("kind", [kind for kind in OURS if "levenberg" not in kind])
def test_a_scheduler_sets_the_rate(kind: str) -> None:
    module = Mlp().double()
    optimizer = OURS[kind](list(module.parameters()))
    rate = optimizer.param_groups[0]["lr"]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    alone(module, optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == rate / 2
