"""The process backend: worker processes on this machine, over shared memory.

    parent (this file)                      ║ process     worker (batchopt_workers.loop)
                                            ║ boundary
    CALL load(...), set_cut(...)  ── pipe ──╫──────────►  maps the blocks, cuts the batch
    EVALUATE order, 37 bytes      ── pipe ──╫──────────►  forward/backward at X
    X           block "parameters" ═════════╬═══════════  the module's parameters are views of it
    partials    block "rows", one a worker ═╬═══════════  gradients are summed there
    answers     ◄── pipe ───────────────────╫───────────  DONE order, seconds, loss sums; or FAILED, as text

Each worker has one private socket pair, and nobody else holds its ends: a worker that dies is an end of file at once.
Descriptors of later blocks travel over the same pair, so nothing ever listens. A pipe message orders memory: a row is
read only after its DONE.
"""

from __future__ import annotations

import pickle
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util
from typing import Any

import cloudpickle
import torch.multiprocessing as mp

from batchopt.backends import Answer, Backend, Partial, Setup, WorkerInfo
from batchopt.backends.channel import Channel
from batchopt.backends.constants import Constants
from batchopt.backends.launch import WorkerProcess, worker_environment
from batchopt.cores import usable_cores
from batchopt.errors import RemoteTraceback, WorkerError, WorkerLostError
from batchopt_workers import loop
from batchopt_workers.batch import Batch
from batchopt_workers.memory import SharedBlock
from batchopt_workers.messages import Cut, Done, Failure, Kind, Order
from batchopt_workers.packing import pack
from batchopt_workers.rows import Rows, rows_nbytes
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.tree import most_held
from batchopt_workers.worker import Hook

# Seconds that a worker has to end by itself once the parent has hung up.
GRACE = 1.0


class _Child:
    """One worker process, the parent's end of its pipe, and its gradient rows."""

    def __init__(self, rank: int, setup: Setup, threads: int) -> None:
        ours, theirs = mp.get_context("spawn").Pipe(duplex=True)
        self.channel = Channel(ours)
        self.rows: Rows | None = None
        self.process = WorkerProcess(
            worker_environment(threads),
            target=loop.main,
            args=(theirs, rank, setup.workers, threads),
            name=f"batchopt-worker-{rank}",
        )
        with theirs:
            self.process.start()


def _call(method: str, *arguments: Any) -> bytes:
    """The body of a `CALL` of the worker's `Session.method`. Raises what pickling the arguments raises."""
    pickled: bytes = cloudpickle.dumps((method, arguments))
    return pickled


@contextmanager
def _sending(what: str) -> Iterator[None]:
    """Name `what` if it cannot be pickled."""
    try:
        yield
    except Exception as error:
        raise TypeError(f"{what} cannot be sent to worker processes: {error}") from error


class ProcessBackend(Backend):
    """`setup.workers` processes. They end with this object, with this process, or at `close`."""

    def __init__(self, setup: Setup) -> None:
        self._device = setup.flat.vector.device
        if setup.flat.block is None:
            raise ValueError(
                f"parameters are on {self._device}; workers run on cpu: call module.cpu(), or use parallelize=1"
            )
        with _sending("`precode`"):
            precode = _call("run", setup.precode)
        with _sending("the module, the criterion or `loss_fn`"):
            packed = pack(setup.program, setup.parameters)
        program = SharedBlock.create(packed.nbytes)
        self._constants = Constants(setup.program.module, packed, program)
        self._setup = setup
        self._flags = self._constants.flags(setup.parameters)
        self._batch_block: SharedBlock | None = None
        self._cut: Cut | None = None
        self._interrupted = False
        self._selector = selectors.DefaultSelector()
        self._children: list[_Child] = []
        self._shut_down = util.Finalize(self, _shut_down, (self._children, self._selector), exitpriority=100)
        self.workers = []
        try:
            self._start(usable_cores())
            self._send_all(_call("set_torch", TorchSettings.current()))
            if setup.precode is not None:
                self._send_all(precode)
            for child in self._children:
                self._send(child, Kind.CALL, _call("attach", "parameters"), setup.flat.block.fd)
                self._send(child, Kind.CALL, _call("attach", "program"), program.fd)
            self._send_all(_call("install", setup.flat.layout, packed.data, packed.placements))
            self._send_all(_call("set_flags", *self._flags))
            self._gather()
        except BaseException:
            self.close()
            raise

    def _start(self, cores: int) -> None:
        threads = self._setup.threads or max(1, cores // self._setup.workers)
        for rank in range(self._setup.workers):
            child = _Child(rank, self._setup, threads)
            self._children.append(child)
            self._selector.register(child.channel, selectors.EVENT_READ, rank)
            self.workers.append(WorkerInfo(rank, child.process.pid or 0, socket.gethostname(), self._device))

    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        with _sending("`prehook` or `posthook`"):
            message = _call("set_hooks", prehook, posthook)
        self._settle()
        self._send_all(message)

    def load(self, batch: Batch) -> None:
        with _sending("the batch"):
            packed = pack(batch)
        self._settle()
        self._constants.refresh()
        flags = self._constants.flags(self._setup.parameters)
        if flags != self._flags:
            self._send_all(_call("set_flags", *flags))
            self._flags = flags
        if self._batch_block is None or packed.nbytes > self._batch_block.nbytes:
            self._batch_block = SharedBlock.create(packed.nbytes)
            self._send_all(_call("attach", "batch"), self._batch_block.fd)
        packed.place(self._batch_block)
        self._send_all(_call("load", packed.data, packed.placements))

    def evaluate(self, cut: Cut, orders: Sequence[Order | None]) -> list[Answer]:
        self._settle()
        if cut is not self._cut:
            self._send_all(_call("set_cut", cut))
            self._cut = cut
        for child, order in zip(self._children, orders, strict=True):
            if order is not None:
                self._make_room(child, most_held(order.first, order.last, cut.chunks))
        for child, order in zip(self._children, orders, strict=True):
            if order is not None:
                self._send(child, Kind.EVALUATE, order.encode())
        self._gather()
        return [self._answer(rank, order) for rank, order in enumerate(orders) if order is not None]

    def _make_room(self, child: _Child, rows: int) -> None:
        if child.rows is None or len(child.rows) < rows:
            layout, changes = self._setup.flat.layout, self._setup.buffers.size
            block = SharedBlock.create(rows_nbytes(layout, changes, rows))
            self._send(child, Kind.CALL, _call("attach", "rows"), block.fd)
            self._send(child, Kind.CALL, _call("set_rows", rows))
            child.rows = Rows(layout, changes, rows, block, self._device)

    def _answer(self, rank: int, order: Order) -> Answer:
        """What the worker's reply to its last message, an order, says."""
        child = self._children[rank]
        assert child.rows is not None
        number, replies = child.channel.sent, child.channel.replies
        done = Done.decode(replies[number, Kind.DONE])
        partials = []
        for summary in done.summaries:
            row = child.rows[summary.row]
            partials.append((summary.node, Partial(summary.loss, row.gradient, row.changes, summary.used)))
        hooked = replies.get((number, Kind.HOOKED))
        return Answer(rank, order, done.seconds, partials, [] if hooked is None else pickle.loads(hooked))

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        with _sending("the function or an argument"):
            message = _call("run", function, *arguments)
        self._settle()
        self._send_all(message)
        self._gather()
        return [pickle.loads(child.channel.replies[child.channel.sent, Kind.RESULT]) for child in self._children]

    def _send(self, child: _Child, kind: Kind, body: bytes, fd: int | None = None) -> None:
        try:
            child.channel.send(kind, body, fd)
        except OSError:
            raise self._lost(child) from None
        except BaseException:
            self._interrupted = True
            raise

    def _send_all(self, body: bytes, fd: int | None = None) -> None:
        for child in self._children:
            self._send(child, Kind.CALL, body, fd)

    def _wait(self) -> None:
        """Until each worker has answered the last message."""
        try:
            while not all(child.channel.answered for child in self._children):
                for key, _ in self._selector.select():
                    child = self._children[key.data]
                    try:
                        child.channel.receive()
                    except (EOFError, OSError):
                        raise self._lost(child) from None
        except BaseException:
            self._interrupted = True
            raise

    def _settle(self) -> None:
        """Wait until the workers are idle, and raise what failed of that which nobody waited for.

        What was interrupted is of no interest: then only the reply to one more message counts.
        """
        if not self._children:
            raise WorkerLostError("the workers of this optimizer are gone: build a new BatchOptimizer")
        if self._interrupted:
            for child in self._children:
                if child.channel.broken:
                    raise self._lost(child)
            self._send_all(_call("settle"))
            self._wait()
            self._interrupted = False
            self._forget()
        self._gather()
        self._forget()

    def _forget(self) -> None:
        for child in self._children:
            child.channel.replies.clear()

    def _gather(self) -> None:
        """Wait for the replies to all that was sent. Raises the first worker's failure if any failed."""
        self._wait()
        for rank, child in enumerate(self._children):
            for (_, kind), body in sorted(child.channel.replies.items()):
                if kind == Kind.FAILED:
                    self._forget()
                    raise _error(rank, Failure.decode(body))

    def _lost(self, child: _Child) -> WorkerLostError:
        """Close everything; says how the worker ended."""
        process = child.process
        if child.channel.broken:
            ended = "was interrupted in the middle of a large message"
        else:
            process.join(GRACE)
            code = process.exitcode
            ended = "hung up" if code is None else f"exited with {code}"
            if code is not None and code < 0:
                ended = f"ended by {signal.Signals(-code).name}"
        name, pid = process.name, process.pid
        self.close()
        return WorkerLostError(f"{name} (pid {pid}) {ended}; the workers were closed: build a new BatchOptimizer")

    def close(self) -> None:
        self._shut_down()
        for worker in self.workers:
            worker.alive = False


def _error(rank: int, failure: Failure) -> WorkerError:
    error = WorkerError(rank, failure.type_name, failure.message, failure.samples)
    error.__cause__ = RemoteTraceback(failure.traceback)
    return error


def _shut_down(children: list[_Child], selector: selectors.BaseSelector) -> None:
    """Hang up; workers that are busy, or do not end within the grace, are killed with all that they started."""
    for child in children:
        busy = not child.channel.answered
        child.channel.close()
        if busy:
            child.process.kill_group()
    deadline = time.monotonic() + GRACE
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
        child.process.kill_group()
        child.process.join(GRACE)
    children.clear()
    selector.close()
