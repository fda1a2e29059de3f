"""Evaluations that repeat on a card are recorded, and replayed as long as nothing has changed that f depends on.

The recordings of the simulated card know operations and memory alone, as a CUDA graph does: whatever Python would do
differently the second time is wrong in a replay. So each case is compared with the same one evaluated eagerly.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, NonFiniteError, Term
from tests.card.test_card import data, residual, short, square

pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")

HIDDEN = {"factor": 1.0}  # which nobody can know of who looks at the program


class Net(nn.Module):
    """Statistics, a constant, draws, and numbers in Python: all that a replay might have wrong."""

    constant: torch.Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 1)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(dropout)
        self.register_buffer("constant", torch.full((8,), 1.5))
        self.large = nn.Parameter(torch.rand(8), requires_grad=False)
        self.factor = 1.0
        self.calls = 0
        self.settings = {"power": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) * self.constant * self.factor + self.large
        found: torch.Tensor = self.second(self.drop(self.norm(hidden))) ** self.settings["power"]
        return found


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def line() -> nn.Module:
    return nn.Linear(2, 1)


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
    return BatchOptimizer(module, **{"optimizer": None, "graph": graph, **options})


def there(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data()
    return x.to(device), y.to(device)


def status(opt: BatchOptimizer) -> str:
    found = opt.workers[0].graph
    assert found is not None
    return found


Change = Callable[[Any, Any], Any]


def history(device: torch.device, graph: bool, change: Change, module: Callable[[], nn.Module], **options: Any) -> Any:
    """f, df/dX and the module's state in evaluations before and after a change; and what is said in the end."""
    found: list[torch.Tensor] = []
    with built(device, graph, module, **options) as opt:
        x, y = there(device)

        def note() -> None:
            found.append(opt.evaluate())
            found.append(opt.grad_parameters.clone())

        opt.load(x, y)
        for _ in range(5):
            note()
            with torch.no_grad():
                opt.parameters.mul_(1.01)
        change(opt.module, opt.criterion)
        opt.load(x, y)
        for _ in range(5):
            note()
        says = status(opt) if graph else ""
        opt.load(x, y)  # ends the step
        found += [tensor.clone() for tensor in opt.module.buffers()]
        return found, says


def halved(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.5)


CHANGES: dict[str, Change] = {
    "nothing": lambda net, loss: None,
    "X": lambda net, loss: halved(net.first.weight),
    "X by .data": lambda net, loss: net.first.weight.data.mul_(0.5),
    "a constant": lambda net, loss: halved(net.constant),
    "a constant by .data": lambda net, loss: net.constant.data.mul_(0.5),
    "a constant that is replaced": lambda net, loss: setattr(net, "constant", net.constant * 0.5),
    "the memory of a constant": lambda net, loss: setattr(net.constant, "data", net.constant * 0.5),
    "a frozen parameter": lambda net, loss: halved(net.large),
    "a statistic": lambda net, loss: halved(net.norm.running_mean),
    "a number": lambda net, loss: setattr(net, "factor", 0.5),
    "a number in a dict": lambda net, loss: net.settings.update(power=2),
    "the mode": lambda net, loss: net.eval(),
    "the mode of a part": lambda net, loss: net.norm.eval(),
    "a part": lambda net, loss: setattr(net, "norm", nn.Identity()),
    "a tensor of the loss": lambda net, loss: halved(loss.weight),
    "a number of the loss": lambda net, loss: setattr(loss, "power", 1.0),
    "the probability of draws": lambda net, loss: setattr(net.drop, "p", 0.5),
    "a setting of torch": lambda net, loss: torch.use_deterministic_algorithms(True),
}


@pytest.fixture(autouse=True)
def settings_kept() -> Any:
    yield
    torch.use_deterministic_algorithms(False)
    HIDDEN["factor"] = 1.0


def same(one: Any, other: Any) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:.*normalises by the statistics", "ignore:.*BatchNorm")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("change", CHANGES)
def test_bits_are_those_of_eager_evaluations(
    recorded: list[Any], device: torch.device, change: str, chunk_size: int | None, dropout: float
) -> None:
    def run(graph: bool) -> Any:
        torch.use_deterministic_algorithms(False)
        return history(device, graph, CHANGES[change], lambda: Net(dropout), chunk_size=chunk_size)

    expected, _ = run(False)
    assert not recorded
    found, says = run(True)
    same(found, expected)
    assert sum(recording.replays for recording in recorded) >= 7
    assert "recorded" in says


def _counted(net: Any, y: torch.Tensor) -> torch.Tensor:
    net.calls += 1
    found: torch.Tensor = y * (1 + 0 * net.calls)
    return found


def _kept(net: Any, y: torch.Tensor) -> torch.Tensor:
    net.last = y
    return y


# What a forward does with its output, or is hooked for, and why it is not recorded then.
OBSTACLES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "waits": (lambda net, y: y * net.constant[0].item(), "waits for elements"),
    "branches": (lambda net, y: y if net.constant[0] > 1 else -y, "waits for elements"),
    "masks": (lambda net, y: y + y[y > 0.5].sum(), "waits for elements"),
    "counts": (_counted, "change attributes"),
    "keeps": (_kept, "change attributes"),
    "uses the CPU": (lambda net, y: y * torch.tensor(1.5), "not on the card"),
    "draws in NumPy": (lambda net, y: y * float(np.random.rand()), "generators of NumPy or Python"),
    "draws in Python": (lambda net, y: y * random.random(), "generators of NumPy or Python"),
    "hooked": (lambda net, y: y, "'first' has hooks"),
}


class Obstacle(Net):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        if name == "hooked":
            self.first.register_forward_hook(lambda module, inputs, output: output * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = OBSTACLES[self.name][0](self, super().forward(x))
        return found


@pytest.mark.filterwarnings("ignore:.*normalises by the statistics", "ignore:.*BatchNorm")
@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_be_recorded_is_evaluated_eagerly_and_says_why(
    recorded: list[Any], device: torch.device, name: str
) -> None:
    expected, _ = history(device, False, CHANGES["nothing"], lambda: Obstacle(name))
    found, says = history(device, True, CHANGES["nothing"], lambda: Obstacle(name))
    same(found, expected)
    assert says.startswith("eager (")
    assert OBSTACLES[name][1] in says
    assert not any(recording.replays for recording in recorded)


@pytest.mark.filterwarnings("ignore:.*normalises by the statistics", "ignore:.*BatchNorm")
def test_hooks_that_are_registered_later_run(recorded: list[Any], device: torch.device) -> None:
    def change(net: Net, loss: Any) -> None:
        net.first.register_forward_hook(lambda module, inputs, output: output * 2)

    expected, _ = history(device, False, change, Net)
    found, says = history(device, True, change, Net)
    same(found, expected)
    assert "has hooks" in says


def hidden(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = ((module(x) - y) ** 2).mean() * HIDDEN["factor"]
    return found


@pytest.mark.filterwarnings("ignore:.*normalises by the statistics", "ignore:.*BatchNorm")
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


@pytest.mark.parametrize("optimizer", ["lbfgs", "ssbroyden", "cg", "sgd", "adam"])
def test_steps_go_the_same_way(recorded: list[Any], device: torch.device, optimizer: str) -> None:
    found = []
    for graph in (False, True):
        with built(device, graph, small, loss_fn=square, optimizer=short(optimizer)) as opt:
            x, y = there(device)
            found.append([opt.step(x[k:], y[k:]) for k in (0, 0, 8, 8, 8)] + [*opt.parameters.tolist()])
    assert found[0] == found[1]
    assert any(recording.replays for recording in recorded)


def test_minibatches_of_one_form_share_a_graph(recorded: list[Any], device: torch.device) -> None:
    x, y = data()
    with built(device, True, optimizer="sgd", module=line) as opt:
        for k in range(0, 40, 5):
            opt.step(x[k : k + 5], y[k : k + 5])  # from the CPU
        assert status(opt) == "1 recorded"
    assert [recording.replays for recording in recorded] == [7]


def test_terms_and_their_weights(recorded: list[Any], device: torch.device) -> None:
    found = []
    for graph in (False, True):
        terms = {"a": Term(square), "b": Term(square, weight=3.0)}
        with built(device, graph, small, terms=terms) as opt:
            x, y = there(device)
            values = []
            for weight in (3.0, 3.0, 5.0, 0.0):
                opt.weights = {"a": 1.0, "b": weight}
                opt.load({"a": (x, y), "b": (x[:8], y[:8])})
                for _ in range(3):
                    values.append((opt.evaluate().item(), opt.losses, opt.grad_parameters.tolist()))
            found.append(values)
    assert found[0] == found[1]
    assert len(recorded) == 2


def test_losses_that_are_not_finite_are_found(recorded: list[Any], device: torch.device) -> None:
    x, y = there(device)
    with built(device, True, line, criterion=nn.MSELoss()) as opt:
        opt.load(x, y)
        for _ in range(3):
            opt.evaluate()
        bad = y.clone()
        bad[17] = float("nan")
        opt.load(x, bad)
        with pytest.raises(NonFiniteError, match="17"):
            opt.evaluate()
        opt.load(x, y)
        assert opt.evaluate().item() > 0
        assert "recorded" in status(opt)


class Touchy(Net):
    """Draws in NumPy, and will not be looked at."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = float(np.random.rand())
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("somebody is looking")
        return super().forward(x) * factor


@pytest.mark.filterwarnings("ignore:.*normalises by the statistics", "ignore:.*BatchNorm")
def test_what_will_not_be_looked_at_goes_on_as_if_nobody_had_tried(recorded: list[Any], device: torch.device) -> None:
    expected, _ = history(device, False, CHANGES["nothing"], Touchy)
    found, says = history(device, True, CHANGES["nothing"], Touchy)
    same(found, expected)
    assert "cannot be looked at" in says


def test_batches_of_many_sizes_are_not_all_recorded(recorded: list[Any], device: torch.device) -> None:
    x, y = data()
    found = []
    for graph in (False, True):
        with built(device, graph, line, criterion=nn.MSELoss(), optimizer="sgd") as opt:
            found.append([opt.step(x[:k], y[:k]) for k in (*range(20, 40), *range(20, 40))])
            if graph:
                assert "more than 8 forms" in opt._function.workers.backend._evaluator.graphs.reason  # type: ignore
    assert found[0] == found[1]
    assert len(recorded) <= 8


def test_a_program_that_changes_all_the_time_is_recorded_more_and_more_rarely(
    recorded: list[Any], device: torch.device
) -> None:
    x, y = there(device)
    net = Net()
    with built(device, True, net, optimizer="sgd") as opt:
        for step in range(40):
            net.factor = 1.0 + step / 100
            opt.step(x, y)
        assert len(recorded) <= 1


def test_so_is_one_that_changes_between_steps_of_many_evaluations(recorded: list[Any], device: torch.device) -> None:
    x, y = there(device)
    with built(device, True, Net) as opt:
        for step in range(24):
            opt.module.factor = 1.0 + step / 100  # type: ignore[assignment]
            opt.load(x, y)
            for _ in range(4):
                opt.evaluate()
    assert len(recorded) <= 2


def test_graphs_can_be_left_out(recorded: list[Any], device: torch.device) -> None:
    with built(device, False) as opt:
        opt.load(*there(device))
        for _ in range(4):
            opt.evaluate()
        assert opt.workers[0].graph is None
    assert not recorded
    with pytest.raises(TypeError, match="`graph` must be True or False"):
        BatchOptimizer(nn.Linear(1, 1), graph="no")  # type: ignore[arg-type]


def test_products_and_tasks_go_on_beside_graphs(recorded: list[Any], device: torch.device) -> None:
    found = []
    for graph in (False, True):
        with built(device, graph, small, residual=residual) as opt:
            x, y = there(device)
            opt.load(x, y)
            values: list[Any] = []
            for _ in range(4):
                values += [opt.evaluate().item(), opt.hvp(torch.ones_like(opt.parameters)).tolist()]
                values += [opt.residuals().tolist(), opt.predict(x).tolist()]
            found.append(values)
    assert found[0] == found[1]
    assert any(recording.replays for recording in recorded)
