"""The ranks backend: every rank runs the script, with the same batches and optimizers, and has workers of its own.

X is never sent: all ranks make the same steps on the same bits. Each evaluation exchanges a digest of X, the batch and
the call, so that ranks that have diverged all raise the same error, which names the difference.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import Any, TypeVar

import torch

from batchopt._data.arguments import read_parallelize
from batchopt._machine.cores import usable_cores
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.plan import runs as runs_of
from batchopt._mapreduce.reduce import Answers, Pattern
from batchopt._program.description import ComparedProgram, checksum
from batchopt._program.flat_module import Gradient
from batchopt.backends.base import Backend, CompressingBackend, Meanwhile, Mode, Prepared, Run, Setup, WorkerInfo
from batchopt.backends.nodes.contribution import Call, GradientResiduals, Round
from batchopt.backends.nodes.group import Group, address_towards
from batchopt.backends.nodes.placing import aligned
from batchopt.backends.nodes.team import Team
from batchopt.backends.process.backend import ProcessBackend
from batchopt.backends.ranks.launch import meet, ranks_here
from batchopt.backends.serial import SerialBackend
from batchopt_workers.data.batch import Batch
from batchopt_workers.data.items import Items
from batchopt_workers.data.packing import dumps
from batchopt_workers.data.structures import tensors_in
from batchopt_workers.process.messages import Cut, Order, versions
from batchopt_workers.tasks.forms import Column
from batchopt_workers.tasks.task import Task


def of_batch(batch: Batch) -> str:
    """Describe a batch: the number of samples, and a checksum of all tensors; of a dataset the name of its class."""
    tensors: list[torch.Tensor] = []
    names = []
    for part in batch.parts:
        tensors += part.criterion_rows.values()
        for data in (part.inputs, part.targets):
            if isinstance(data, Items):
                names.append(type(data.data).__name__)
            elif data is not None:
                tensors += tensors_in(data.data)
    return f"of {batch.size} samples ({' '.join([*names, checksum(tensors)])})"


# Default seconds for which another rank may not respond.
PATIENCE = 1800.0

T = TypeVar("T")
_numbers = count()  # of the backends of this process, which all ranks create in the same order


class RanksBackend(CompressingBackend):
    """`setup.workers` workers of this rank, and those of the others. They end with this object, with this process, or
    at `close`."""

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
        self._setup, self._calls = setup, count(1)
        self._local: SerialBackend | ProcessBackend | None = None
        self._first = -1  # the rank of its first worker
        self._residuals: GradientResiduals | None
        self._loaded: tuple[Batch, tuple[float, ...]] | None = None
        self._digests: dict[str, Any] = {}
        self._state: tuple[Any, str] | None = None
        self._compared, self._looks = ComparedProgram(setup.program), False
        launch, store = meet(setup.timeout or PATIENCE)
        self._launch, self.is_main = launch, launch.rank == 0
        host = address_towards(launch.address or socket.gethostname())
        # A restarted job must not find the group of the previous attempt in the store.
        name = f"batchopt/{launch.attempt}/{next(_numbers)}"
        self._group = Group(store, name, launch.rank, launch.size, setup.timeout or PATIENCE, host)
        self._group.names = [f"rank {rank}" for rank in range(launch.size)]
        layout, self._residuals = setup.flat.layout, None
        if setup.compression is not None:
            self._residuals = GradientResiduals(setup.compression, layout.size, layout.sum_dtype)
        self._team = self._gather(setup.workers)
        try:
            self._begin(setup.workers)
        except BaseException:
            self.close()
            raise

    # ---- workers

    def _gather(self, workers: int) -> Team:
        """Return a team in which this rank has `workers` workers, and each other rank its own number."""
        size = self._group.size
        team = Team(self._group, None, [range(0)] * size, range(size), self._setup.fixed_bits, self._residuals)
        team.in_full = self._in_full
        layout = self._setup.flat.layout
        same: dict[str, Any] = {"versions": versions(), "parameters": (layout.size, str(layout.dtype))}
        same |= {"seed": self._setup.program.seed, "fixed chunks": self._setup.fixed_bits}
        numbers = team.exchange(self._call("BatchOptimizer(...) or resize()") | same, workers)
        ends = list(accumulate(numbers))
        team.ranks = [range(end - number, end) for end, number in zip(ends, numbers, strict=True)]
        team.infos.expect(range(ends[-1]))
        return team

    def _begin(self, workers: int) -> None:
        """Start this rank's workers; raise on all ranks what starting them raises on any."""
        team, failure = self._team, None
        try:
            self._start(workers)
            team.local = self._local
        except Exception as error:
            failure = error
        team.exchange(self._call("starting"), failure=failure)

    def _start(self, workers: int) -> None:
        ranks, world = self._team.ranks[self._group.place], self._team.ranks[-1].stop
        threads = self._setup.threads
        if threads is None and self._launch.local > 1:
            threads = max(1, usable_cores() // (self._launch.local * workers))
        setup = replace(self._setup, workers=workers, ranks=tuple(ranks), world=world, threads=threads)
        before, self._first = self._first, ranks.start
        if isinstance(self._local, ProcessBackend) and ranks.start == before:
            self._local.resize(workers, tuple(ranks), world)
            return
        if self._local is not None:
            self._local.close()
        self._local = (SerialBackend if workers == 1 else ProcessBackend)(setup)
        if self._loaded is not None:
            self._local.load(self._local.prepare(self._loaded[0]), self._loaded[1])

    @property
    def _mine(self) -> Backend:
        assert self._local is not None
        return self._local

    @property
    def workers(self) -> list[WorkerInfo]:
        return list(self._team.infos)

    def resize(self, workers: int) -> None:
        self._team = self._gather(workers)
        self._begin(workers)

    # ---- calls, which all ranks make alike

    def _call(self, name: str, **others: Any) -> dict[str, Any]:
        """Describe this call, for the other ranks to compare."""
        return {"call": name, "which is its number": next(self._calls), **others}

    def set_mode(self, mode: Mode) -> None:
        self._mine.set_mode(mode)
        program = self._setup.program
        if not mode.is_of(program):
            program = replace(program, prehook=mode.prehook, posthook=mode.posthook, state=mode.state)
            self._setup = replace(self._setup, program=program)

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        return self._mine.prepare(batch, ahead)

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        self._mine.load(prepared, weights)
        self._loaded = prepared.batch, weights
        self._digests = {"batch": of_batch(prepared.batch), "frozen parameters and buffers": self._state_digest()}
        self._follow()
        self._digests |= {"weights of terms": weights}

    def _follow(self) -> None:
        self._compared.resync()
        self._looks = True

    def _in_full(self, calls: list[Call]) -> list[Call]:
        """Return calls that differ with the parts in which the programs do, in place of their digests."""
        if all(call.get("program") == calls[0].get("program") for call in calls):
            return calls
        differing = self._compared.differing(self._group.exchange(self._compared.in_full))
        return [{**call, "program": None, **parts} for call, parts in zip(calls, differing, strict=True)]

    def _state_digest(self) -> str:
        """Return a checksum of the tensors outside X; computed again after they were written."""
        tensors = self._compared.tensors(self._setup.parameters)
        marks = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
        if self._state is None or self._state[0] != marks:
            self._state = marks, checksum(tensors)
        return self._state[1]

    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        self._digests["batch of the task"] = None if batch is None else of_batch(batch)
        if follow:
            self._follow()
        return self._mine.begin_task(task, batch, follow)

    def end_task(self) -> None:
        self._mine.end_task()

    # ---- evaluating

    def evaluate(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        meanwhile: Meanwhile | None = None,
        into: Gradient | None = None,
    ) -> Answers:
        call = self._evaluation(cut, order, runs)
        return self._learn(self._team.evaluate(cut, order, self._aligned(cut, runs), call, meanwhile), cut)

    def _learn(self, answers: Sequence[Answer], cut: Cut) -> Answers:
        """Learn what forwards write in the user's own module, if this process is the worker; once a step."""
        if self._looks and isinstance(self._local, SerialBackend):
            self._compared.learn()
        self._looks = False
        return Answers(Pattern(answers, cut.chunks))

    def evaluate_compressed(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        taken: int,
        kept: int,
        meanwhile: Meanwhile | None = None,
    ) -> Answers:
        call, of = self._evaluation(cut, order, runs), Round(order.evaluation, taken, kept)
        return self._learn(self._team.evaluate(cut, order, runs, call, meanwhile, of), cut)

    def residuals(self, evaluation: int) -> dict[int, torch.Tensor]:
        return self._team.residuals_after(self._call("state_dict"), evaluation)

    def restore_residuals(self, evaluation: int, residuals: Mapping[int, torch.Tensor]) -> None:
        self._team.restore_residuals(evaluation, residuals)

    def _aligned(self, cut: Cut, runs: Sequence[Run]) -> Sequence[Run]:
        """Return runs of few subtrees if chunks are fixed and all of them are evaluated."""
        shares = _shares(runs)
        if not self._setup.fixed_bits or sum(shares) != cut.chunks:
            return runs
        return runs_of(aligned(shares, self._team.ranks))

    def _evaluation(self, cut: Cut, order: Order, runs: Sequence[Run]) -> Call:
        return self._call(
            order.kind.name.lower(),
            evaluation=order.evaluation,
            step=order.step,
            X=checksum([self._setup.flat.vector]),
            chunks=tuple(cut.bounds) if cut.chunks < 8 else f"{cut.chunks} ({hash(tuple(cut.bounds)) % 2**32:08x})",
            shares=_shares(runs),
            program=self._compared.digest,
            **self._digests,
        )

    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        found, self._team.rows = self._team.rows, []
        return found

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
        of_all = self._team.exchange(self._call("run_on_workers"), found, failure)
        return [pickle.loads(value) for of_rank in of_all for value in of_rank]

    def once(self, function: Callable[[], T]) -> T:
        value, failure = None, None
        if self.is_main:
            try:
                value = function()
            except Exception as error:
                failure = error
        found: T = self._team.exchange(self._call("what rank 0 does for all"), value, failure)[0]
        return found

    def stop(self) -> None:
        self._mine.stop()
        self._group.stop()

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
        for info in self._team.infos:
            info.alive = False
        self._group.close()


def _shares(runs: Sequence[Run]) -> list[int]:
    return [last - first for first, last in runs]
