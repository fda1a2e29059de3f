"""The workers of one machine among several: what an actor there does.

    driver                                  ║ network     this machine
    Machine.evaluate(X, orders, samples)  ──╫──►  Host ── Crew, a process backend ── worker processes
                                            ║            X, batch and partials in shared memory
    merged partials  ◄──────────────────────╫───  Host ◄─┘

X arrives once, whatever the number of workers, and their partials leave merged. Nothing here knows what carries the
messages: an object with methods, whose arguments and results are numbers, bytes and arrays.
"""

from __future__ import annotations

import concurrent.futures
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

import torch

from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.reduce import merge_answers
from batchopt._program.flatten import Flat
from batchopt.backends.base import Setup, WorkerInfo
from batchopt.backends.ledger import Run
from batchopt.backends.ray.editions import Delivery, made, received
from batchopt.backends.ray.messages import (
    Condition,
    Contract,
    Envelope,
    Failed,
    OutOfStep,
    Question,
    Reply,
    Request,
    Share,
    Sum,
    Work,
    Yield,
)
from batchopt.backends.ray.node_workers import Crew
from batchopt.backends.ray.transfer import Bytes, Fragment, Freight, Hold, Skeleton, from_bytes, to_bytes
from batchopt.errors import BatchoptError
from batchopt_workers.buffers import StepBuffers
from batchopt_workers.evaluate import Program
from batchopt_workers.memory import SharedBlock
from batchopt_workers.messages import Cut, Kind, Order
from batchopt_workers.packing import assemble, dumps
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.versions import versions

P = ParamSpec("P")


class Host:
    """A machine's workers, as the driver asks for them. One thread makes requests (`work`, and what it names), another one
    may interrupt it (`ask`)."""

    def __init__(self) -> None:
        self._crew: Crew | None = None
        self._place = 0, 0  # of the next request
        self._vector: torch.Tensor
        self._tensors: list[torch.Tensor] = []  # of the program
        self._digests: tuple[bytes, ...] = ()
        self._parameters: list[torch.nn.Parameter] = []
        self._cut = Cut((0,))
        self._hold: Hold | None = None

    def greet(self) -> tuple[str, str]:
        """What has to be as it is with the driver, and this machine's name."""
        return versions(), socket.gethostname()

    def work(self, envelope: Envelope, *arguments: Any) -> Reply:
        """Take in the updates, then do the task with these arguments: what is large comes by reference, which only an
        argument of the call itself may be. Never raises."""
        value, failed = None, None
        try:
            self._keep_step(envelope.epoch, envelope.position)
            for method, values in envelope.updates:
                getattr(Host, method)(self, *values)
            value = getattr(Host, envelope.method)(self, *arguments)
        except BaseException as error:
            failed = Failed.of(error)
        return Reply(value, failed, [] if self._crew is None else [_condition(info) for info in self._crew.workers])

    def _keep_step(self, epoch: int, position: int) -> None:
        """Raise `OutOfStep` unless the request before this one has come."""
        begins = epoch > self._place[0] and position == 0
        if not begins and (epoch, position) != self._place:
            raise OutOfStep(f"request {epoch}.{position} came where {self._place[0]}.{self._place[1]} was to come")
        self._place = epoch, position + 1

    def ask(self, question: Question, attempt: int, seconds: float) -> list[Run] | None:
        """As `Crew.ask`; None if there was no answer in time."""
        try:
            return [] if self._crew is None else self._crew.ask(question, attempt, seconds)
        except concurrent.futures.TimeoutError:  # another class than Python's own before 3.11
            return None

    # ---- what a request names

    @property
    def crew(self) -> Crew:
        """The workers."""
        if self._crew is None:
            raise BatchoptError("the workers of this machine were not started")
        return self._crew

    def start(self, contract: Contract, program: Freight) -> None:
        """Start the workers of a packed program."""
        contract.torch.apply()
        layout = contract.layout
        block = SharedBlock.create(layout.size * layout.dtype.itemsize)
        self._vector = block.tensor(layout.dtype, (layout.size,))
        self._parameters = [torch.nn.Parameter(view) for view in layout.views(self._vector)]
        self._digests = contract.digests
        self._tensors = [made(*place) for place in zip(program.placements, program.tensors, strict=True)]
        loaded = assemble(program.data, self._tensors, self._parameters)
        setup = Setup(
            workers=len(contract.ranks),
            fixed_bits=contract.fixed_bits,
            timeout=contract.timeout,
            restarts=contract.restarts,
            threads=contract.threads,
            devices=contract.devices,
            precode=pickle.loads(contract.precode),
            program=loaded,
            flat=Flat(layout, self._vector, block),
            parameters=self._parameters,
            buffers=StepBuffers(loaded.module, state=loaded.state),
            ranks=contract.ranks,
            world=contract.world,
        )
        self._crew = Crew(setup, contract.torch)

    def use_hooks(self, hooked: bool) -> None:
        """Whether hooks run from now on."""
        self.crew.use_hooks(hooked)

    def set_torch(self, settings: TorchSettings) -> None:
        """Compute with these settings of torch."""
        settings.apply()
        self.crew.torch = settings

    def update(self, found: Delivery) -> None:
        """Have another edition of the program, for the step that begins next or goes on."""
        tensors = received(found, self._tensors, self._digests)
        if found.data is not None:
            loaded: Program = assemble(found.data, tensors, self._parameters)
            self.crew.replace_program(loaded, StepBuffers(loaded.module, state=loaded.state))
        self._tensors, self._digests = tensors, found.digests

    def load(self, skeleton: Skeleton | None, weights: tuple[float, ...]) -> None:
        """Begin a step on a batch whose samples come with `fill`; None for the batch of the step before, with its samples."""
        if skeleton is None:
            self.crew.reopen(weights)
        else:
            self._hold = Hold(skeleton, self._hold if self.crew.calm else None)
            self.crew.open(self._hold, weights)

    def fill(self, fragments: Sequence[Fragment]) -> None:
        """Have these samples too."""
        assert self._hold is not None
        for fragment in fragments:
            self._hold.fill(fragment)
            self.crew.fill(fragment)

    def set_cut(self, bounds: Sequence[int]) -> None:
        """Cut the batch so."""
        self._cut = Cut(tuple(bounds))

    def resize(self, workers: int, world: int) -> None:
        """Keep so many workers, of `world` on all machines."""
        self.crew.keep(workers, world)

    def evaluate(self, share: Share, x: Bytes | None, direction: Bytes | None) -> Yield:
        """Evaluate a share, with another X and direction if these are given; its partials, merged."""
        began = time.perf_counter()
        self._set(x, direction)
        head = share.attempt, share.step
        orders = [None if run is None else Order(*head, *run, Kind(share.kind)) for run in share.runs]
        self.crew.begin(share.attempt)
        try:
            answers = self.crew.evaluate(self._cut, orders)
        finally:
            self.crew.end()
        sums = [
            Sum(*node, p.losses, to_bytes(p.gradient), to_bytes(p.changes), p.used)
            for node, p in merge_answers(answers, self._cut.chunks)
        ]
        return Yield(share.attempt, sums, [_work(a, began) for a in answers], time.perf_counter() - began)

    def _set(self, x: Bytes | None, direction: Bytes | None) -> None:
        vector = self._vector
        if x is not None:
            with torch.no_grad():
                vector.copy_(from_bytes(x, vector.dtype, vector.shape))
        if direction is not None:
            self.crew.set_direction(from_bytes(direction, vector.dtype, vector.shape))

    def probe(self, share: Share, x: Bytes | None, direction: Bytes | None) -> dict[int, float]:
        """The seconds that each worker needs for the first run of a share."""
        self._set(x, direction)
        run = share.runs[0]
        assert run is not None
        order = Order(share.attempt, share.step, *run, Kind(share.kind))
        self.crew.begin(share.attempt)
        try:
            return self.crew.probe(self._cut, order)
        finally:
            self.crew.end()

    def run(self, function: bytes) -> list[bytes]:
        """Call a pickled function with pickled arguments in each worker; the results pickled."""
        called, arguments = pickle.loads(function)
        return [dumps(value) for value in self.crew.run(called, arguments)]

    def close(self) -> None:
        """End the workers."""
        if self._crew is not None:
            self._crew.close()


def _condition(info: WorkerInfo) -> Condition:
    return Condition(info.pid, str(info.device), info.restarts, info.alive, info.lost)


def _work(answer: Answer, began: float) -> Work:
    spans = [(span.began - began, *span[1:]) for span in answer.spans]
    return Work(answer.rank, answer.samples, answer.seconds, spans, dumps(answer.results) if answer.results else b"")


def request(method: Callable[Concatenate[Host, P], Any], *arguments: P.args, **keywords: P.kwargs) -> Request:
    """A call of a method of `Host`. An argument of a task may be a reference to it."""
    assert not keywords  # which the message has no place for
    return Request(method.__name__, arguments)
