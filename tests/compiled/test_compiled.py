"""Compiled evaluations through the public door: the same function, bits that workers do not change, no silent error."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, CompileError, WorkerError
from tests.compiled import ambient

X = torch.linspace(-2.0, 2.0, 20 * 3, dtype=torch.float64).reshape(20, 3).sin()
Y = torch.linspace(-1.0, 3.0, 20, dtype=torch.float64).reshape(20, 1).cos()


def net(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), *extra, nn.Tanh(), nn.Linear(8, 1)).double()


def slopes(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Has a derivative of a derivative."""
    x.requires_grad_()
    u = module(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    loss: torch.Tensor = ((u - y).square() + first[:, :1].square()).mean()
    return loss


def make(module: nn.Module, **options: Any) -> BatchOptimizer:
    return BatchOptimizer(module, **{"optimizer": None, "loss_fn": slopes, "compile": True, **options})


def is_compiled(opt: BatchOptimizer) -> bool:
    return "compiled (inductor" in repr(opt)


def gradient(opt: BatchOptimizer) -> torch.Tensor:
    trained = [parameter for parameter in opt.module.parameters() if parameter.requires_grad]
    return torch.cat([parameter.grad.flatten() for parameter in trained if parameter.grad is not None])


def assert_is_plain(opt: BatchOptimizer, loss: Callable[..., torch.Tensor] = slopes, samples: int = 20) -> None:
    """f and df/dX of the loaded batch are those of torch in one process."""
    found = opt.evaluate().item()
    mine = gradient(opt).clone()
    parameters = [parameter for parameter in opt.module.parameters() if parameter.requires_grad]
    value = loss(opt.module, X[:samples].clone(), Y[:samples])
    expected = torch.autograd.grad(value, parameters)
    assert found == pytest.approx(value.item(), rel=1e-12)
    torch.testing.assert_close(mine, torch.cat([part.flatten() for part in expected]), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_bits_depend_on_no_worker(tmp_path: Path) -> None:
    """Nor on a death, nor on where a run was interrupted; and they are others than those of eager evaluations."""
    found, eager = set(), ""

    def prints(parallelize: int, ends: Callable[[BatchOptimizer], None] = lambda opt: None, **options: Any) -> str:
        options = {"optimizer": "lbfgs", "parallelize": parallelize, "chunk_size": 8, **options}
        with make(net(), **options) as opt:
            opt.step(X, Y)
            ends(opt)
            opt.step(X, Y)
            assert is_compiled(opt) == options.get("compile", True)
            return opt.fingerprint()

    def kills(opt: BatchOptimizer) -> None:
        os.kill(opt.workers[0].pid, signal.SIGKILL)

    found = {prints(1), prints(2), prints(3), prints(2, kills)}
    path = tmp_path / "run.batchopt"
    prints(2, lambda opt: opt.save(path))
    with make(net(), optimizer="lbfgs", parallelize=3, chunk_size=8) as opt, warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.load_checkpoint(path)
        opt.step(X, Y)
        found.add(opt.fingerprint())
    assert len(found) == 1
    eager = prints(1, compile=False)
    assert eager not in found
    with make(net(), optimizer="lbfgs", chunk_size=8, compile=False) as opt:
        with pytest.warns(RuntimeWarning, match="bits differ from here"):
            opt.load_checkpoint(path)


class Scaled:
    """A loss with a number, a tensor, and a module that it holds."""

    def __init__(self) -> None:
        self.factor, self.scale = 2.0, torch.tensor(2.0, dtype=torch.float64)

    def __call__(self, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.factor * self.scale * slopes(module, x, y)


CHANGES: list[Callable[[nn.Module, Scaled], object]] = [
    lambda module, loss: None,
    lambda module, loss: loss.scale.mul_(3.0),
    lambda module, loss: setattr(loss, "factor", 3.0),
    lambda module, loss: setattr(loss, "scale", torch.tensor(5.0, dtype=torch.float64)),
    lambda module, loss: module.eval(),
]


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("parallelize", [2, 1])
def test_what_the_user_changes_is_seen(parallelize: int) -> None:
    loss, module = Scaled(), net(nn.Dropout(0.0))
    with make(module, loss_fn=loss, parallelize=parallelize) as opt:
        for change in CHANGES:
            change(module, loss)
            opt.load(X, Y)
            assert_is_plain(opt, loss)
            assert is_compiled(opt)


@pytest.mark.nightly
def test_a_tensor_of_another_shape_is_not_read_as_before() -> None:
    scale = torch.ones(3, dtype=torch.float64)

    def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return slopes(module, x * scale.sum(), y)

    with make(net(), loss_fn=loss) as opt:
        opt.load(X, Y)
        for _ in range(4):
            opt.evaluate()
        scale.data = torch.ones(2, dtype=torch.float64)
        with pytest.warns(UserWarning, match="was given another shape"):
            assert_is_plain(opt, loss)


def of_the_surroundings(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ambient.FACTOR * slopes(module, x, y)


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize(
    ("optimizer", "warm", "words"),
    [
        ("sgd", 3, "found something else than an eager one"),  # compared at the first, second and fourth step
        ("lbfgs", 0, "the step is made anew"),  # with evaluations that were not compared
    ],
)
def test_a_difference_is_found_and_told(monkeypatch: pytest.MonkeyPatch, optimizer: str, warm: int, words: str) -> None:
    """At the latest at the next comparison, and then the step is made anew."""

    def run(compile: bool) -> tuple[list[float], torch.Tensor, int]:
        with make(net(), loss_fn=of_the_surroundings, optimizer=optimizer, compile=compile) as opt:
            losses = [opt.step(X, Y) for _ in range(warm)]
            for _ in range(0 if warm else 5):
                opt.load(X, Y)
                opt.evaluate()
            with monkeypatch.context() as patch:
                patch.setattr(ambient, "FACTOR", 2.0)
                losses += [opt.step(X, Y) for _ in range(2 if warm else 1)]
            return losses, opt.parameters.clone(), opt.eval_counter

    expected, x, evaluations = run(False)
    with pytest.warns(UserWarning, match=words):
        found, y, mine = run(True)
    assert found == pytest.approx(expected, rel=1e-9) and mine == evaluations
    torch.testing.assert_close(y, x)


def branches(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """On an element of a parameter, which is another one in the next evaluation."""
    loss: torch.Tensor = (module(x) - y).square().mean()
    return 2 * loss if next(module.parameters())[0, 0] > 0 else loss


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("parallelize", [1, 2])
def test_what_cannot_be_compiled_is_eager_or_an_error(parallelize: int) -> None:
    with make(net(), loss_fn=branches, parallelize=parallelize) as opt:
        opt.load(X, Y)
        with pytest.raises(CompileError, match="data-dependent"):
            opt.evaluate()
    with make(net(), loss_fn=branches, compile="auto", parallelize=parallelize) as opt:  # it is known by now
        opt.load(X, Y)
        assert_is_plain(opt, branches)
        assert "eager (GuardOnDataDependent" in repr(opt)


def test_hooks_and_autocast_are_eager() -> None:
    seen = []
    with make(net(), compile="auto", posthook=lambda worker, sample: seen.append(sample.loss)) as opt:
        opt.load(X, Y)
        opt.evaluate()
        assert "eager (there are hooks" in repr(opt) and len(seen) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16), make(net(), compile="auto") as opt:
        opt.load(X, Y)
        opt.evaluate()
        assert "eager (autocast rounds" in repr(opt)
    module = net()
    next(module.children()).register_forward_hook(lambda layer, inputs, output: None)
    with make(module) as opt:
        opt.load(X, Y)
        with pytest.raises(CompileError, match="'0' has hooks"):
            opt.evaluate()


def test_each_reason_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(net()) as opt:
        opt.load([*X], [*Y])
        with pytest.raises(CompileError, match="each sample takes a forward of its own"):
            opt.evaluate()
    monkeypatch.setattr("batchopt._program.compiler.compiler", lambda: None)
    with make(net()) as opt:
        opt.load(X, Y)
        with pytest.raises(CompileError, match=r"no C\+\+ compiler .*install one, or name it in CXX"):
            opt.evaluate()
    with pytest.raises(ValueError, match="`compile` must be None, False, True or 'auto', got 2"):
        make(net(), compile=2)


@pytest.mark.nightly
def test_the_directory_must_be_ours_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHOPT_CACHE_DIR", str(tmp_path))
    made = tmp_path / "compiled"
    for mode, words in ((0o700, "data-dependent"), (0o777, "others than this user may write it: chmod 700 it")):
        if made.exists():
            made.chmod(mode)
        with make(net(), loss_fn=branches) as opt:
            opt.load(X, Y)
            with pytest.raises(CompileError, match=words):
                opt.evaluate()
        assert made.stat().st_mode & 0o777 == mode


class Averages(nn.Module):
    """Moving averages, each written in another way."""

    means: torch.Tensor
    listed: torch.Tensor
    parted: torch.Tensor
    apart: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.25)
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 1))
        for name in ("means", "listed", "parted", "apart"):
            self.register_buffer(name, torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.drop(self.norm(x)))
        with torch.no_grad():
            mean = found.mean()
            torch.add(0.9 * self.means, 0.1 * mean, out=self.means)
            torch._foreach_mul_([self.listed, self.parted], 0.9)
            for part in self.parted.chunk(2):
                part.add_(mean)
            first, *_, last = self.listed
            first.add_(mean)
            last.sub_(mean)
            self.apart.data.lerp_(mean, 0.1)
        return found


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*normalises by the statistics of a chunk")
@pytest.mark.parametrize("parallelize", [1, 2])
def test_statistics_draws_and_buffers_are_those_of_eager_evaluations(parallelize: int) -> None:
    """Also in evaluations that are compared, and however buffers are written."""

    def run(compile: bool) -> tuple[float, dict[str, torch.Tensor]]:
        module, options = Averages().double(), {"parallelize": parallelize, "chunk_size": 10, "compile": compile}
        with make(module, optimizer="sgd", loss_fn=None, criterion=nn.MSELoss(), **options) as opt:
            losses = [opt.step(X, Y) for _ in range(5)]
            assert is_compiled(opt) == compile
        return losses[-1], {name: value.clone() for name, value in module.state_dict().items()}

    (loss, state), (expected, expected_state) = run(True), run(False)
    assert loss == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=1e-10, atol=1e-12)


def of_float32(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ambient.FACTOR * slopes(module, x.float(), y.float())


@pytest.mark.nightly
def test_differences_are_measured_by_the_present_f(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after it has fallen: 3 % are no rounding."""
    with make(net().float(), loss_fn=of_float32) as opt:
        opt.load(X, Y)
        start = opt.parameters.clone()
        opt.parameters[-9:] *= 1e3
        assert opt.evaluate().item() > 1e4
        opt.parameters.copy_(start)
        for _ in range(2):
            assert opt.evaluate().item() < 2
        monkeypatch.setattr(ambient, "FACTOR", 1.03)
        with pytest.warns(UserWarning, match="the loss differs by 0.0"):
            opt.evaluate()


def factorized(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    u = module(x)
    found: torch.Tensor = torch.linalg.cholesky(u @ u.T + torch.eye(len(u), dtype=u.dtype)).diagonal().log().sum()
    return found


@pytest.mark.nightly
def test_operations_that_only_python_can_call_stay_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is known before the C++ compiler is called."""
    monkeypatch.setenv("BATCHOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "true")
    with make(net(), loss_fn=factorized, reduction="sum", chunk_size=20) as opt:
        opt.load(X, Y)
        with pytest.raises(CompileError, match=r"compiled code cannot call aten\._?linalg"):
            opt.evaluate()


@pytest.mark.nightly
def test_an_index_out_of_range_is_an_index_error() -> None:
    """In an evaluation that is not compared, too, and with threads, which an exception must not leave."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    rows, targets = torch.arange(50_000) % 5, Y.repeat(2500, 1)
    with make(module, threads_per_worker=2, loss_fn=lambda m, x, y: (m(x) - y).square().mean()) as opt:
        for bad in (0, 0, 5):
            opt.load(rows + bad, targets)
            if bad:
                with pytest.raises(WorkerError, match=r"IndexError .* out of range"):
                    opt.evaluate()
            else:
                opt.evaluate()
                assert is_compiled(opt)


def run(path: Path, program: str) -> subprocess.Popen[str]:
    path.write_text(program)
    return subprocess.Popen([sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


FOR_EVER = """
import os, torch, batchopt
from torch._subclasses.fake_tensor import FakeTensor

def loss(net, x, y):
    if isinstance(x, FakeTensor):
        open({mark!r}, "w").close()
        sum(range(10**12))  # in C, with the GIL
    return net(x).square().mean()

with batchopt.BatchOptimizer(torch.nn.Linear(3, 1), loss_fn=loss, optimizer=None, compile="auto") as opt:
    opt.load(torch.ones(20, 3))
    opt.evaluate()
    print(opt._engine.policies.compilation._compiler._process.pid, flush=True)
    while not os.path.exists({mark!r}):
        pass
    print("traced", flush=True)
    input()
"""


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no descriptors of processes")
def test_the_process_that_compiles_ends_with_its_parent(tmp_path: Path) -> None:
    """Even while the user's code holds the GIL there."""
    with run(tmp_path / "script.py", FOR_EVER.format(mark=str(tmp_path / "mark"))) as done:
        try:
            assert done.stdout is not None
            compiler = os.pidfd_open(int(done.stdout.readline()))
            assert done.stdout.readline() == "traced\n"
            done.kill()
            assert select.select([compiler], [], [], 10)[0]
            os.close(compiler)
        finally:
            done.kill()
