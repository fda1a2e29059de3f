"""Evaluations that repeat on a card are recorded, and replayed as long as nothing has changed that f depends on.

Where there is no card, this machine is one: its recordings know operations and memory alone, as a CUDA graph does, and
whatever Python would do differently the second time is wrong in a replay. So each case is compared with the same one
evaluated eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Penalty, Term
from tests.card.conftest import CARDS
from tests.card.programs import data, residual, short, square, there

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*normalises by the statistics", "ignore:.*BatchNorm"),
]

# Whether torch can be told to add gradients up in the stream that is recorded.
CAN_ADD_THERE = hasattr(torch.autograd.graph, "set_override_stale_capture_stream")
HIDDEN = {"factor": 1.0}  # which nobody can know of who looks at the program


class Net(nn.Module):
    """Statistics, a constant, draws, and numbers in Python: all that a replay might have wrong."""

    constant: torch.Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 1)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(dropout)
        self.register_buffer("constant", torch.full((8,), 1.5))
        self.factor = 1.0
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) * self.constant * self.factor
        found: torch.Tensor = self.second(self.drop(self.norm(hidden)))
        return found


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


class Loss(nn.Module):
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([2.0]))
        self.power = 2.0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ((output - target).abs() ** self.power * self.weight).mean()
        return found


def built(device: torch.device, graph: bool, module: Any = Net, **options: Any) -> BatchOptimizer:
    torch.manual_seed(0)
    module = (module if isinstance(module, nn.Module) else module()).double().to(device)
    if not options.keys() & {"loss_fn", "residual", "terms", "criterion"}:
        options["criterion"] = Loss().double().to(device)
    given: dict[str, Any] = {"optimizer": None, "compile": None if graph else False, "threads_per_worker": 1}
    return BatchOptimizer(module, **{**given, **options})


def status(opt: BatchOptimizer) -> str:
    found = opt.workers[0].graph
    assert found is not None
    return found


Change = Callable[[Any, Any], Any]
Do = Callable[[BatchOptimizer, torch.Tensor, torch.Tensor], list[Any]]


def alike(recorded: list[Any], device: torch.device, do: Do, module: Any = Net, **options: Any) -> str:
    """The same is found eagerly and recorded, and the module's state is the same; what is said of the latter."""
    found, says = [], ""
    for graph in (False, True):
        torch.use_deterministic_algorithms(False)
        with built(device, graph, module, **options) as opt:
            x, y = there(device)
            values = do(opt, x, y)
            says = status(opt) if graph else ""
            if "terms" not in options:
                opt.load(x, y)  # ends the step
            found.append([torch.as_tensor(value).clone() for value in (*values, *opt.module.buffers())])
        assert graph or not recorded
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))
    return says


def around(change: Change) -> Do:
    """f and df/dX in evaluations before and after a change."""

    def do(opt: BatchOptimizer, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        found = []
        for begin in (lambda: None, lambda: change(opt.module, opt.criterion)):
            begin()
            opt.load(x, y)
            for _ in range(5):
                found += [opt.evaluate(), opt.grad_parameters.clone()]
                with torch.no_grad():
                    opt.parameters.mul_(1.01)
        return found

    return do


def halved(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.5)


CHANGES: dict[str, Change] = {
    "nothing": lambda net, loss: None,
    "X": lambda net, loss: halved(net.first.weight),
    "the memory of a constant": lambda net, loss: setattr(net.constant, "data", net.constant * 0.5),
    "a statistic": lambda net, loss: halved(net.norm.running_mean),
    "a number": lambda net, loss: setattr(net, "factor", 0.5),
    "a part": lambda net, loss: setattr(net, "norm", nn.Identity()),
    "a tensor of the loss": lambda net, loss: halved(loss.weight),
    "a number of the loss": lambda net, loss: setattr(loss, "power", 1.0),
    "a setting of torch": lambda net, loss: torch.use_deterministic_algorithms(True),
}
READ = "nothing", "X", "a statistic", "a tensor of the loss"


@pytest.fixture(params=["cpu", *CARDS])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def settings_kept() -> Any:
    yield
    torch.use_deterministic_algorithms(False)
    HIDDEN["factor"] = 1.0


@pytest.mark.parametrize(
    ("change", "chunk_size", "dropout"), [*((name, None, 0.3) for name in CHANGES), ("nothing", 16, 0.0)]
)
def test_bits_are_those_of_eager_evaluations(
    recorded: list[Any], device: torch.device, change: str, chunk_size: int | None, dropout: float
) -> None:
    says = alike(recorded, device, around(CHANGES[change]), lambda: Net(dropout), chunk_size=chunk_size)
    assert "recorded" in says and sum(recording.replays for recording in recorded) >= 7
    assert len(recorded) == (1 if change in READ and chunk_size is None else 2)  # elements are read where they are


class Obstacle(Net):
    """Does something with its output."""

    def __init__(self, does: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.does(self, super().forward(x))


def counted(net: Any, y: torch.Tensor) -> torch.Tensor:
    net.calls += 1
    found: torch.Tensor = y * (1 + 0 * net.calls)
    return found


def touchy(net: Any, y: torch.Tensor) -> torch.Tensor:
    factor = 1.0 + 0.0 * float(np.random.rand())
    if torch._C._len_torch_dispatch_stack():
        raise RuntimeError("somebody is looking")
    return y * factor


# What a forward does with its output, and why it is not recorded then.
OBSTACLES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "waits": (lambda net, y: y * net.constant[0].item(), "waits for elements"),
    "masks": (lambda net, y: y + y[y > 0.5].sum(), "waits for elements"),
    "counts": (counted, "change attributes"),
    "draws in NumPy": (lambda net, y: y + 0 * float(np.random.rand()), "generators of NumPy or Python"),
    "draws and will not be looked at": (touchy, "cannot be looked at"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_be_recorded_is_evaluated_eagerly_and_says_why(
    recorded: list[Any], device: torch.device, name: str
) -> None:
    does, words = OBSTACLES[name]
    says = alike(recorded, device, around(CHANGES["nothing"]), lambda: Obstacle(does))
    assert says.startswith("eager (") and words in says
    assert not any(recording.replays for recording in recorded)


def hidden(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = ((module(x) - y) ** 2).mean() * HIDDEN["factor"]
    return found


def test_what_nobody_knows_of_is_found_by_comparison_and_the_step_made_anew(
    recorded: list[Any], device: torch.device
) -> None:
    class Half(torch.optim.SGD):
        """Evaluates five times; the third time f is another one."""

        def step(self, closure: Any = None) -> Any:
            for k in range(5):
                if k == 3:
                    HIDDEN["factor"] = 3.0
                loss = closure()
            super().step()
            return loss

    found = []
    for graph in (False, True):
        HIDDEN["factor"] = 3.0
        with built(device, graph, loss_fn=hidden, optimizer=lambda params: Half(params, lr=0.1)) as opt:
            x, y = there(device)
            opt.load(x, y)
            if graph:
                HIDDEN["factor"] = 1.0
                for _ in range(3):
                    opt.evaluate()
                with pytest.warns(UserWarning, match="a recorded evaluation found something else"):
                    loss = opt.step(x, y)
                assert status(opt).startswith("eager (it found something else")
            else:
                loss = opt.step(x, y)
            found.append((loss, opt.parameters.clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("optimizer", ["lbfgs", "sgd"])
def test_steps_and_products_go_the_same_way(recorded: list[Any], device: torch.device, optimizer: str) -> None:
    def do(opt: BatchOptimizer, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        found: list[Any] = [opt.step(x[k:], y[k:]) for k in (0, 0, 8, 8, 8)]
        return [*found, opt.hvp(torch.ones_like(opt.parameters)), opt.residuals(), opt.predict(x), opt.parameters]

    alike(recorded, device, do, small, residual=residual, optimizer=short(optimizer))
    assert any(recording.replays for recording in recorded)


def test_minibatches_of_one_form_share_a_graph(recorded: list[Any], device: torch.device) -> None:
    """Batches of too many forms are not all recorded."""
    x, y = data()
    with built(device, True, optimizer="sgd", module=lambda: nn.Linear(2, 1)) as opt:
        for k in range(0, 40, 5):
            opt.step(x[k : k + 5], y[k : k + 5])  # from the CPU
        assert status(opt) == "1 recorded" and [recording.replays for recording in recorded] == [7]
        for k in (*range(20, 40), *range(20, 40)):
            opt.step(x[:k], y[:k])
        assert status(opt) == "8 recorded"


def test_terms_and_their_weights(recorded: list[Any], device: torch.device) -> None:
    def do(opt: BatchOptimizer, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        found: list[Any] = []
        for weight in (3.0, 3.0, 5.0, 0.0):
            opt.weights = {"a": 1.0, "b": weight}
            opt.load({"a": (x, y), "b": (x[:8], y[:8])})
            for _ in range(3):
                found += [opt.evaluate(), *opt.losses.values(), opt.grad_parameters.clone()]
        return found

    alike(recorded, device, do, small, terms={"a": Term(square), "b": Term(square, weight=3.0)})
    assert len(recorded) == 2


def test_penalties(recorded: list[Any], device: torch.device) -> None:
    def do(opt: BatchOptimizer, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        opt.load({"a": (x, y)})
        return [found for _ in range(3) for found in (opt.evaluate(), opt.grad_parameters.clone())]

    ridge = Penalty(lambda module: module[0].weight.square().sum() + module[2].weight.square().sum())
    alike(recorded, device, do, small, terms={"a": Term(square), "ridge": ridge})
    assert len(recorded) == 2


def test_a_program_that_changes_all_the_time_is_recorded_more_and_more_rarely(
    recorded: list[Any], device: torch.device
) -> None:
    net = Net()
    with built(device, True, net) as opt:
        for step in range(24):
            net.factor = 1.0 + step / 100
            opt.load(*there(device))
            for _ in range(4):
                opt.evaluate()
    assert 1 <= len(recorded) <= 2


def test_indices_are_recorded(recorded: list[Any], device: torch.device) -> None:
    """Unlike masks, of which nobody knows how many elements they pick."""
    one, two = torch.triu_indices(3, 3, 1, device=device)

    def pairs(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = net.first(x)
        found: torch.Tensor = (hidden[:, one] - hidden[:, two] - y[:, :1]).square().mean()
        return found

    says = alike(recorded, device, around(CHANGES["nothing"]), loss_fn=pairs)
    assert says == "1 recorded"


def test_casts_of_autocast_are_recorded(recorded: list[Any], device: torch.device) -> None:
    """They are kept within the context, so the recorded evaluation would find those of one before."""
    x, y = (tensor.float() for tensor in there(device))
    found = []
    for graph in (False, True):
        torch.manual_seed(0)
        net = small().to(device)
        with (
            torch.autocast(device.type, torch.bfloat16),
            BatchOptimizer(net, nn.MSELoss(), optimizer=None, compile=None if graph else False) as opt,
        ):
            opt.load(x, y)
            for _ in range(5):
                found.append((opt.evaluate().item(), opt.grad_parameters.tolist()))
                with torch.no_grad():
                    opt.parameters.mul_(1.5)
            assert not graph or status(opt) == "1 recorded"
    assert found[:5] == found[5:]


def test_a_kept_output_puts_recording_off_in_older_torch(
    recorded: list[Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of its autograd graph belong to a stream that is not recorded."""
    monkeypatch.setattr("batchopt_workers.shortcuts.graphs.can_add_there", lambda: False)
    with built(device, True) as opt:
        x, y = there(device)
        output = opt.module(x)
        opt.load(x, y)
        for said in ("is kept with its autograd graph", "1 recorded"):
            for _ in range(3):
                opt.evaluate()
            assert said in status(opt)
            output = None
        assert output is None


@pytest.mark.skipif(not CAN_ADD_THERE, reason="in this torch the last loss ends a recording")
def test_losses_with_a_backward_of_their_own_are_recorded(recorded: list[Any], device: torch.device) -> None:
    """Though the last one, and its autograd graph, is there when the next one is made."""
    with built(device, True, small) as opt:
        x, y = there(device)
        opt.load(x, y)
        for _ in range(4):
            loss = opt.loss()
            loss.backward()  # type: ignore[no-untyped-call]
        assert status(opt) == "1 recorded"


def test_check_compares_what_is_recorded(recorded: list[Any], device: torch.device) -> None:
    with built(device, True, small, loss_fn=square, optimizer="lbfgs") as opt:
        found = str(opt.check(*there(device)))
        assert "recorded evaluations are the eager ones" in found and "1 recorded" in found
    with built(device, False, small, loss_fn=square, optimizer="lbfgs") as opt:
        assert "recorded" not in str(opt.check(*there(device)))
        assert opt.workers[0].graph is None
