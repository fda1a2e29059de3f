"""Ways to do the same thing, each in a process of its own, timed in turn: so that what one leaves behind (threads that
spin, memory, settings) is not in the way of another, and what the machine does meanwhile meets them all."""

from __future__ import annotations

import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import batchopt
from benchmarks.workloads import Workload, build

# Evaluations in a row, of which the first does not count: it finds cold caches, as no optimizer's second one does.
BURST = 4
ROUNDS = 8
# Evaluations after which "auto" must have chosen.
MOST = 3000

# Made in the process of the arm; returns what is timed.
Make = Callable[..., Callable[[], object]]


class Arm:
    """One way: `make(*arguments)` in `processes` new processes, which are timed together."""

    def __init__(
        self, make: Make, *arguments: Any, processes: int = 1, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        with patch.dict(os.environ, environment):
            self._start(make, arguments, processes)
        self._answers()

    def _start(self, make: Make, arguments: Sequence[Any], processes: int) -> None:
        context = mp.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        port = free_port()
        for rank in range(processes):
            ours, theirs = context.Pipe()
            ranked = (rank, processes, port) if processes > 1 else ()
            process = context.Process(target=_serve, args=(theirs, make, (*arguments, *ranked)))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def _answers(self) -> list[Any]:
        return [end.recv() for end in self._ends]

    def burst(self, count: int) -> list[float]:
        """The seconds of each of `count` runs in a row: of its slowest process."""
        for end in self._ends:
            end.send(count)
        return [max(seconds) for seconds in zip(*self._answers(), strict=True)]

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


def free_port() -> int:
    """A port where nobody listens now."""
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port: int = some.getsockname()[1]
        return port


def _serve(end: Connection, make: Make, arguments: Sequence[Any]) -> None:
    with ExitStack() as stack:
        run = make(*arguments)
        stack.callback(getattr(run, "close", lambda: None))
        for _ in range(3):
            run()
        end.send(None)
        while (count := end.recv()) is not None:
            seconds = []
            for _ in range(count):
                started = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - started)
            end.send(seconds)


def take_turns(arms: Mapping[str, Arm], burst: int = BURST, rounds: int = ROUNDS) -> dict[str, float]:
    """The median seconds of a run of each arm, all of which end: `rounds` times, in turn, `burst` runs in a row less
    the first. The order changes from round to round, since an arm that follows one with idle cores finds them
    asleep."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    order = random.Random(0)
    try:
        for _ in range(rounds):
            for name in order.sample([*arms], len(arms)):
                seconds[name] += arms[name].burst(burst)[1:]
    finally:
        for arm in arms.values():
            arm.close()
    return {name: statistics.median(some) for name, some in seconds.items()}


class Plain:
    """One evaluation by torch alone."""

    def __init__(self, workload: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._case = build(workload)
        self.module = self._case.module

    def __call__(self) -> float:
        for parameter in self.module.parameters():
            parameter.grad = None
        loss = self._case.loss(self.module, self._case.inputs, self._case.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()


class Apart:
    """The limit: an equal part of the batch on one thread in each process, and nothing in common; with the allocator
    settings of our workers."""

    def __init__(self, workload: str, rank: int, ranks: int, port: int) -> None:
        torch.set_num_threads(1)
        self._case = share(build(workload), rank, ranks)
        self._parameters = list(self._case.module.parameters())

    def __call__(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._case.loss(self._case.module, self._case.inputs, self._case.targets).backward()  # type: ignore[no-untyped-call]


class Ours:
    """One evaluation by workers; those of `"auto"`: once it has chosen."""

    def __init__(
        self, workload: str, parallelize: int | Literal["auto"], options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        case = build(workload)
        self._opt = opt = batchopt.BatchOptimizer(
            case.module, loss_fn=case.loss, optimizer=None, parallelize=parallelize, **options
        )
        opt.load(case.inputs, case.targets)
        self.module, self.close = case.module, opt.close
        while parallelize == "auto" and "parallelize" not in opt.state_dict() and opt.eval_counter < MOST:
            opt.evaluate()

    def __call__(self) -> float:
        return self._opt.evaluate().item()


class Moving(Ours):
    """The same at another X each time, as an optimizer has it: it has to be sent where workers do not share memory."""

    def __call__(self) -> float:
        with torch.no_grad():
            self._opt.parameters[0] += 1e-6
        return super().__call__()


def share(case: Workload, rank: int, ranks: int) -> Workload:
    """The part of the batch that one of several equal ranks has."""
    targets = None if case.targets is None else case.targets.tensor_split(ranks)[rank].clone()
    return Workload(case.module, case.loss, case.inputs.tensor_split(ranks)[rank].clone(), targets)


class Distributed:
    """One evaluation by torch's `DistributedDataParallel` over gloo, one thread a rank. The loss is averaged as well:
    who minimises needs f as much as its gradient."""

    def __init__(self, workload: str, rank: int, ranks: int, port: int) -> None:
        torch.set_num_threads(1)
        store = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{port}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        self._case = share(build(workload), rank, ranks)
        self.module = self._case.module
        self._module = DistributedDataParallel(self.module)
        self._ranks = ranks

    def __call__(self) -> float:
        self._module.zero_grad()
        loss = self._case.loss(self._module, self._case.inputs, self._case.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        mean = loss.detach()
        torch.distributed.all_reduce(mean)
        return mean.item() / self._ranks

    def close(self) -> None:
        """Leave the group."""
        torch.distributed.destroy_process_group()
