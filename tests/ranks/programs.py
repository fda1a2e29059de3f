"""What the tests have ranks do, each of which prints a line; `python -m tests.ranks.programs` is `trained`."""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchopt import Batches, BatchoptError, BatchOptimizer, Sample, Worker, extending

RANK = int(os.environ.get("RANK", "0"))


class Net(nn.Module):
    """With random draws, running statistics and a frozen scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))
        self.norm = nn.BatchNorm1d(1)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.body(x)) * self.scale
        return found


def parts(seed: int = 0, samples: int = 210, width: int = 20) -> tuple[Net, torch.Tensor, torch.Tensor]:
    """A module and its data."""
    torch.manual_seed(seed)
    module, inputs = Net(width).double(), torch.randn(samples, 6).double()
    return module, inputs, inputs.sum(1, keepdim=True).sin()


def optimizer_of(module: nn.Module, workers: int = 1, **options: Any) -> BatchOptimizer:
    """With fixed chunks."""
    given: dict[str, Any] = {"optimizer": lambda p: torch.optim.LBFGS(p, max_iter=4), "chunk_size": 10}
    if "loss_fn" not in options:
        given["criterion"] = nn.MSELoss()
    return BatchOptimizer(module, **{"parallelize": workers, "backend": "ranks", **given, **options})


def bits(workers: str = "1", backend: str = "ranks", size: str = "20", compile: str = "") -> None:
    """The bits of some steps, a product and predictions; `workers` of each rank."""
    numbers = [int(number) for number in workers.split(",")]
    module, inputs, targets = parts(width=int(size))
    with optimizer_of(module, numbers[RANK % len(numbers)], backend=backend, compile=bool(compile)) as opt:
        for _ in range(3):
            opt.step(inputs, targets)
        found = [opt.collect(lambda module, x, y: module(x)).sum().item()]
        product = opt.hvp(torch.ones_like(opt.parameters)).sum().item()
        assert extending.once(opt, lambda: opt.is_main) and extending.arguments(opt)["seed"] == 0  # rank 0 is asked
        print("bits", opt.fingerprint(), found, product)


def differ(how: str) -> None:
    """Ranks that do not do the same."""
    module, inputs, targets = parts(seed=RANK if how == "seed" else 0)
    if how == "batch" and RANK == 1:
        inputs[7, 3] += 1e-9
    batch: Any = inputs, targets
    if how == "lists":
        shuffled = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(RANK)).tolist()
        batch = [inputs[i] for i in shuffled], [targets[i] for i in shuffled]
    if how == "frozen" and RANK == 1:
        module.scale.data.fill_(0.25)
    criterion: Any = nn.SmoothL1Loss(beta=2.0 + RANK * (how == "beta"))
    scale = torch.tensor(2.0 + RANK * (how == "captured"))

    def loss_fn(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return nn.functional.mse_loss(scale * net(x), y)

    options: dict[str, Any] = {"criterion": criterion}
    if how == "captured":
        options = {"loss_fn": loss_fn}
    try:
        with optimizer_of(module, seed=RANK if how == "draws" else 0, **options) as opt:
            opt.load(*batch)
            opt.evaluate()
            if how == "calls" and RANK == 1:
                opt.run_on_workers(lambda worker: None)
            opt.evaluate()
            if how == "attribute" and RANK == 1:
                setattr(module.body[2], "p", 0.2)  # noqa: B010
            opt.step(*batch)
            print("no error")
    except BatchoptError as error:
        print(type(error).__name__, error)


class Counting(Net):
    """With attributes that forwards write, each rank its own, others that differ without a difference in f, and a
    sparse buffer."""

    def __init__(self, rank: int) -> None:
        super().__init__(8)
        self.calls, self.lengths, self.last = 0, {0: 0}, None
        self.register_buffer("mix", torch.eye(2).to_sparse())
        self.device, self.names = f"cuda:{rank}", {"a", "b"} if rank else {"b", "a"}
        for _ in range(rank):
            self.register_forward_hook(lambda *_: None).remove()
        self.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += len(x)
        self.lengths[len(x)] = self.calls
        found = super().forward(x)
        self.last = found.detach()  # type: ignore[assignment]
        return found


def alike(workers: str) -> None:
    """Equal programs, though not in all that Python can see; `workers` of each rank."""
    torch.manual_seed(0)
    module, inputs, targets = Counting(RANK).double(), *parts()[1:]
    numbers = [int(number) for number in workers.split(",")]
    speeds = [1.0] * sum(numbers)  # a late worker would be left with a single sample, of which there is no batch norm
    with optimizer_of(module, numbers[RANK], chunk_size=None, speeds=speeds) as opt:
        for count in (205, 150, 95, 94, 1):  # rank 1 has no share of the last one
            opt.step(inputs[:count], targets[:count])
            module.train(count not in (150, 94))
        print(opt.fingerprint())


def raises(what: str) -> None:
    """The user's code raises on one rank."""

    def hook(worker: Worker, sample: Sample) -> None:
        if worker.rank == 1 and armed:
            raise ZeroDivisionError("on purpose") if what == "error" else SystemExit("leaving")

    armed: list[int] = []
    module, inputs, targets = parts()
    with optimizer_of(module, prehook=hook) as opt:
        opt.step(inputs, targets)
        armed.append(1)
        try:
            opt.step(inputs, targets)
        except BaseException as error:
            print(type(error).__name__, error, end=" ")
        armed.clear()
        opt.step(inputs, targets)
        print(opt.fingerprint()[:16])


def lost(how: str, when: str, timeout: str = "4") -> None:
    """One rank is killed or stopped, before, in or after its share."""

    def hook(worker: Worker, sample: Sample) -> None:
        if RANK == 1 and armed and when == "in":
            go()

    def go() -> None:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    armed: list[int] = []
    module, inputs, targets = parts()
    opt = optimizer_of(module, prehook=hook, timeout=float(timeout))
    opt.step(inputs, targets)
    armed.append(1)
    if RANK == 1 and when == "before":
        go()
    try:
        opt.step(inputs, targets)
        if RANK == 1 and when == "after":
            go()
        opt.step(inputs, targets)
        print("no error")
    except BatchoptError as error:
        print(type(error).__name__, error)


def trained(folder: str, killed: str = "") -> None:
    """A training that goes on from its checkpoints; rank 1 is killed in mid-step once, if that is asked."""
    from batchopt.training import Checkpoint, fit

    mark = Path(folder) / "killed"

    def hook(worker: Worker, sample: Sample) -> None:
        worker.state["count"] = worker.state.get("count", 0) + 1
        if killed and RANK == 1 and worker.state["count"] == 60 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    module, inputs, targets = parts()
    with optimizer_of(module, prehook=hook, verbose=2) as opt:
        checkpoint = Checkpoint(Path(folder) / "checkpoints", every=2)
        data = Batches((inputs, targets), 70, shuffle=True)
        fit(opt, data, epochs=4, checkpoint=checkpoint, resume="auto", log=str(Path(folder) / "log.jsonl"))
        print("bits", opt.fingerprint())


def compressed(compress: str) -> None:
    """Steps with compressed gradients, a checkpoint in between."""
    module, inputs, targets = parts()
    optimizer: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)}
    given: Any = {"type": "2bit", "threshold": 0.05} if compress == "2bit" else compress
    with optimizer_of(module, compress=given, **optimizer) as opt:
        first = opt.step(inputs, targets)
        for _ in range(10):
            opt.step(inputs, targets)
        state = copy.deepcopy(opt.state_dict())
        one = [opt.step(inputs, targets) for _ in range(4)]
        opt.load_state_dict(state)
        again = [opt.step(inputs, targets) for _ in range(4)]
        assert torch.allclose(torch.tensor(one), torch.tensor(again), rtol=2e-2), (one, again)
        print("bits", opt.fingerprint(), one[-1] < first)


def grouped() -> None:
    """The user has made a group of torch.distributed."""
    torch.distributed.init_process_group("gloo")
    bits()
    torch.distributed.destroy_process_group()


def resized() -> None:
    """Other numbers of workers while it runs, and two optimizers."""
    module, inputs, targets = parts()
    with optimizer_of(module) as opt, optimizer_of(parts()[0]) as other:
        opt.step(inputs, targets)
        opt.resize(2)
        opt.step(inputs, targets)
        other.step(inputs, targets)
        opt.resize(1 + RANK)
        opt.step(inputs, targets)
        print("bits", opt.fingerprint(), len(opt.workers), other.fingerprint())


def large() -> None:
    """Each rank has an object for the others that does not fit in an inbox."""
    with optimizer_of(parts()[0]) as opt:
        print(sum(map(len, opt.run_on_workers(lambda worker: bytes(2**20)))))


def nothing() -> None:
    """Just come and go."""
    print("nothing")


if __name__ == "__main__":
    trained(*sys.argv[1:])
