"""The ranks backend: every rank runs the script, with the same batches and optimizers, and has workers of its own.

    this rank                               ║ network     every other rank
    CallComparison: what it does         ◄───────────╫───────────► the same of theirs: equal, or all raise
    its share, by its workers               ║             theirs
    losses, times, partials     ◄───────────╫───────────► the sum, with the same bits on each rank (nodes.team)

What must hold:

- All ranks make the same calls in the same order. X is never sent: from the same bits all of them make the same step.
- Whatever one rank raises in a call that all of them make, all raise.
- A rank has the workers behind those of the ranks before it. If their numbers change, its workers have other ranks.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import Any, TypeVar

import torch

from batchopt._data.arguments import read_parallelize
from batchopt._machine.cores import usable_cores
from batchopt._mapreduce.answers import Answer
from batchopt.backends.base import Backend, Meanwhile, Mode, Prepared, Run, Setup, WorkerInfo
from batchopt.backends.nodes.group import Group, address_towards
from batchopt.backends.nodes.team import Evaluation, Team, TeamBackend
from batchopt.backends.nodes.wire import wire_of
from batchopt.backends.process.backend import ProcessBackend
from batchopt.backends.ranks.comparison import CallComparison
from batchopt.backends.ranks.launch import meet, ranks_here
from batchopt.backends.serial import SerialBackend
from batchopt_workers.batch.batch import Batch
from batchopt_workers.functions.forms import Column
from batchopt_workers.functions.task import Task
from batchopt_workers.wire.orders import Cut, Order
from batchopt_workers.wire.packing import dumps

# Default seconds for which another rank may not respond.
PATIENCE = 1800.0

T = TypeVar("T")
_numbers = count()  # of the backends of this process, which all ranks create in the same order


class RanksBackend(TeamBackend):
    """`setup.workers` workers of this rank, and those of the others. They end with this object, with this process, or
    at `close`."""

    compiles = has_peers = True

    @classmethod
    def read_workers(cls, parallelize: Any) -> int | None:
        if parallelize == "auto":
            return max(1, usable_cores() // ranks_here())
        return read_parallelize(parallelize)

    @classmethod
    def check(cls, setup: Setup) -> None:
        if setup.workers != 1:
            ProcessBackend.check(setup)

    def __init__(self, setup: Setup) -> None:
        assert setup.workers is not None
        self._setup = setup
        self._local: SerialBackend | ProcessBackend | None = None
        self._loaded: tuple[Batch, tuple[float, ...]] | None = None
        launch, store = meet(setup.timeout or PATIENCE)
        self._ranks_here, self.is_main = launch.local, launch.rank == 0
        host = address_towards(launch.address or socket.gethostname())
        # A restarted job must not find the group of the previous attempt in the store.
        name = f"batchopt/{launch.attempt}/{next(_numbers)}"
        self._group = Group(store, name, launch.rank, launch.size, setup.timeout or PATIENCE, host)
        self._group.names = [f"rank {rank}" for rank in range(launch.size)]
        self._comparison, self._wire = CallComparison(setup, self._group), wire_of(setup)
        self._team = self._new_team()
        try:
            self.resize(setup.workers)
        except BaseException:
            self.close()
            raise

    # ---- workers

    def _new_team(self) -> Team:
        """Return a team of ranks that have no workers yet."""
        size = self._group.size
        team = Team(self._group, [range(0)] * size, range(size), self._setup.fixed_bits, self._wire)
        team.differences = self._comparison.differences
        return team

    def resize(self, workers: int) -> None:
        """Have `workers` workers on this rank, and on each other one its own number; raise on all ranks what starting
        them raises on any."""
        first, team = self._team.ranks[self._group.place].start, self._new_team()
        numbers = team.exchange(self._comparison.start(), workers)
        ends = list(accumulate(numbers))
        team.ranks = [range(end - number, end) for end, number in zip(ends, numbers, strict=True)]
        team.infos.expect(ends[-1])
        self._team, failure = team, None
        try:
            self._start(team.ranks[self._group.place], ends[-1], first)
            team.local = self._local
        except Exception as error:
            failure = error
        team.exchange(self._comparison.call("starting"), failed=failure)

    def _start(self, ranks: range, world: int, first: int) -> None:
        """Start the workers of these ranks; those that are there are kept, if the `first` one had the same rank."""
        if isinstance(self._local, ProcessBackend) and ranks.start == first:
            self._local.resize(len(ranks), tuple(ranks), world)
            return
        if self._local is not None:
            self._local.close()
        threads = self._setup.threads
        if threads is None and self._ranks_here > 1:
            threads = max(1, usable_cores() // (self._ranks_here * len(ranks)))
        setup = replace(self._setup, workers=len(ranks), ranks=tuple(ranks), world=world, threads=threads)
        self._local = (SerialBackend if len(ranks) == 1 else ProcessBackend)(setup)
        if self._loaded is not None:
            self._local.load(self._local.prepare(self._loaded[0]), self._loaded[1])

    @property
    def _mine(self) -> Backend:
        assert self._local is not None
        return self._local

    @property
    def workers(self) -> list[WorkerInfo]:
        return list(self._team.infos)

    # ---- calls, which all ranks make alike

    @property
    def version(self) -> object:
        return self._mine.version

    def set_mode(self, mode: Mode) -> None:
        self._mine.set_mode(mode)
        program = self._setup.program
        if not mode.is_of(program):
            program = replace(program, prehook=mode.prehook, posthook=mode.posthook)
            self._setup = replace(self._setup, program=program)

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        return self._mine.prepare(batch, ahead)

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        self._mine.load(prepared, weights)
        self._loaded = prepared.batch, weights
        self._comparison.load(prepared.batch, weights)

    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        self._comparison.begin_task(batch)
        return self._mine.begin_task(task, batch, follow)

    def end_task(self) -> None:
        self._mine.end_task()

    def _evaluate(
        self, cut: Cut, order: Order, runs: Sequence[Run], meanwhile: Meanwhile | None, compressed: int | None = None
    ) -> list[Answer]:
        call = self._comparison.evaluation(cut, order, runs)
        evaluation = Evaluation(order, self._team.shares(runs, cut, compressed is None), compressed)
        return self._team.evaluate(cut, evaluation, call, meanwhile)

    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        return self._team.take_rows()

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        found: list[bytes] = []
        failure: BaseException | None = None
        try:
            found = [dumps(value) for value in self._mine.run(function, arguments)]
        except KeyboardInterrupt:
            self._group.close()
            raise
        except BaseException as error:
            failure = error
        of_all = self._team.exchange(self._comparison.call("run_on_workers"), found, failure)
        return [pickle.loads(value) for of_rank in of_all for value in of_rank]

    def once(self, function: Callable[[], T]) -> T:
        value, failure = None, None
        if self.is_main:
            try:
                value = function()
            except Exception as error:
                failure = error
        found: T = self._team.exchange(self._comparison.call("what rank 0 does for all"), value, failure)[0]
        return found

    def first(self, value: T | None) -> T | None:
        values = self._team.exchange(self._comparison.call("whether to stop"), value)
        return next((found for found in values if found is not None), None)

    # ---- the end

    def stop(self) -> None:
        self._mine.stop()
        self._group.stop()

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
        for info in self._team.infos:
            info.alive = False
        self._group.close()
