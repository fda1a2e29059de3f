"""A worker process: it maps the parent's memory, obeys its messages one after the other, and ends with it."""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch

from batchopt_workers import faults
from batchopt_workers.buffers import StepBuffers
from batchopt_workers.device import HOST, Mirror, pin
from batchopt_workers.evaluate import Evaluator, Program
from batchopt_workers.layout import Layout
from batchopt_workers.memory import SharedBlock
from batchopt_workers.messages import CHUNK, HEAD, ORDERS, Cut, Failure, Kind, Order, Report, message_of
from batchopt_workers.module_hooks import set_module_hooks
from batchopt_workers.packing import Placement, assemble, unpack, views
from batchopt_workers.rows import Rows
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.versions import versions
from batchopt_workers.watch import StateWritten, Watch
from batchopt_workers.worker import Worker

_F_SETSIG = 10  # Linux; Python does not name it
# Bytes of a message: its length is sent as 4 bytes, with a sign.
LARGEST = 2**31 - 1
# What the names of blocks begin with that belong to a part of a batch.
PIECE = "piece "
# Seconds of the longest order after which a worker stays awake for the next one, if there are cores enough: to wake up
# takes a tenth of a millisecond.
_SHORT = 0.01


class Session:
    """What a worker process holds. The methods are what the parent's `CALL`s name; `use_parameters` and `install` come
    before those below them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.worker = Worker(rank, world_size, HOST)
        self._mirror: Mirror | None = None  # where this worker computes on another device
        self.awake = 0.0
        self._blocks: dict[str, SharedBlock] = {}
        self._private: dict[str, SharedBlock] = {}
        self._layout: Layout
        self._torch: TorchSettings | None = None
        self._hooks = 0  # of the module and its parts, as they arrived
        self._parameters: list[torch.nn.Parameter] = []
        self._buffers: StepBuffers
        self._rows: Rows | None = None
        self._evaluator: Evaluator | None = None

    @property
    def evaluator(self) -> Evaluator:
        """The map function on this worker's module."""
        if self._evaluator is None:
            raise RuntimeError("no module was installed in this worker")
        return self._evaluator

    @property
    def at_hand(self) -> range:
        """The samples in the forward that ran last, numbered through all terms, if an evaluation was cut short."""
        return self._evaluator.at_hand if self._evaluator is not None else range(0)

    def attach(self, name: str, fd: int) -> None:
        """Map the shared memory behind `fd` as `name`, in place of what had that name."""
        self._private.pop(name, None)
        block = SharedBlock(fd)
        block.release()
        self._blocks[name] = block

    def attach_copy(self, name: str, fd: int) -> None:
        """The same; and once more, so that what the user's code writes there stays in this process."""
        private = SharedBlock(os.dup(fd), private=True)
        private.release()
        self.attach(name, fd)
        self._private[name] = private

    def prepare(self, environment: dict[str, str], preparation: dict[str, Any]) -> None:
        """Be the process that the parent would have started: its environment, path, arguments, working directory."""
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        spawn.prepare(preparation)

    def set_torch(self, settings: TorchSettings) -> None:
        """Compute as the parent does, and in the contexts that it is in."""
        settings.apply()
        self._torch = settings

    def use(self, devices: Mapping[int, torch.device]) -> None:
        """Compute on the device of this worker's rank."""
        self.worker.device = devices[self.worker.rank]
        if self.worker.device.type == "cuda":
            torch.cuda.set_device(self.worker.device)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the user's `function(worker, *arguments)`: precode, and what `run_on_workers` is given."""
        return function(self.worker, *arguments)

    def use_parameters(self, layout: Layout) -> None:
        """Take X from block "parameters".

        X is the parent's: writing it here is a fault of memory access, which ends the process.
        """
        parameters, device = self._blocks["parameters"], self.worker.device
        pin(parameters, device)
        parameters.protect()
        x = parameters.tensor(layout.dtype, (layout.size,))
        self._layout = layout
        if device == HOST:
            self._parameters = [torch.nn.Parameter(view) for view in layout.views(x)]
        else:
            self._mirror = Mirror(layout, x, device)
            self._parameters = self._mirror.parameters

    def install(
        self, data: bytes, placements: Sequence[Placement], read_only: Mapping[int, str], examine: bool
    ) -> None:
        """Build the module around X and its constants and state (block "program"), in place of the one before; what
        concerns evaluations has to be told anew. `read_only`: names of tensors that no chunk may write; `examine`:
        whether the first one does.

        Raises `RuntimeError` where the module before was given hooks in this worker: they would be lost.
        """
        if self._evaluator is not None and self.worker.module is not None and _hooks(self.worker.module) != self._hooks:
            raise RuntimeError(
                "the program was changed in the parent, and workers are given it anew; but hooks were registered on "
                "`worker.module` in this worker, which would be lost: register them on the module in the parent, with "
                "which they are sent"
            )
        self._private["program"].discard()
        tensors = views(placements, self._private["program"])
        shared = views(placements, self._blocks["program"])
        program: Program = assemble(data, tensors, self._parameters)
        set_module_hooks(program.module_hooks)
        originals = {id(tensor): twin for tensor, twin in zip(tensors, shared, strict=True)}
        if self._mirror is not None:
            self._mirror.adopt((program.module, program.criterion, *program.loss_fns), originals)
        self.worker.module, self.worker.criterion = program.module, program.criterion
        self._hooks = _hooks(program.module)
        self._buffers = StepBuffers(program.module, self._mirror is None, program.state, originals)
        if self._rows is not None and self._rows.changes != self._buffers.size:
            self._rows = None
        watch = Watch(
            program.module,
            [(name, tensors[i]) for i, name in read_only.items()],
            (*self._parameters, *self._buffers.tensors),
        )
        if examine and self._mirror is None:
            watch.compare(originals)
        self._evaluator = Evaluator(program, self.worker, self._parameters, self._buffers, watch)
        if self._mirror is not None:
            self._evaluator.place = self._mirror.place

    def use_hooks(self, hooked: bool) -> None:
        """Whether prehook and posthook run."""
        self.evaluator.hooked = hooked

    def load(self, name: str, data: bytes, placements: Sequence[Placement]) -> None:
        """Take the batch whose tensors are in block `name`, and begin a step."""
        for blocks in (self._blocks, self._private):
            for known in [known for known in blocks if known.startswith(PIECE)]:
                del blocks[known]
        self.evaluator.batch = unpack(data, placements, self._private[name])
        if self._mirror is not None:
            self._mirror.begin_step()
        self._buffers.begin_step()

    def fill(self, name: str, term: int, start: int, data: bytes, placements: Sequence[Placement]) -> None:
        """Put samples of a term, from `start` on, into the lists of the batch; their tensors are in block `name`."""
        inputs, targets, options = unpack(data, placements, self._private[name])
        assert self.evaluator.batch is not None
        self.evaluator.batch.parts[term].fill(start, inputs, targets, options)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Weigh the terms so in f."""
        self.evaluator.weights = weights

    def set_direction(self) -> None:
        """Multiply Hessians with what the parent has in block "direction", which is read-only here as X is."""
        block, layout = self._blocks["direction"], self._layout
        block.protect()
        direction = block.tensor(layout.dtype, (layout.size,))
        if self._mirror is not None:
            pin(block, self.worker.device)
            direction = self._mirror.direct(direction)
        self.evaluator.direction = layout.views(direction)

    def set_cut(self, cut: Cut) -> None:
        """Cut the batch so."""
        self.evaluator.cut = cut
        if self._mirror is not None:
            self._mirror.forget_pieces()

    def add_rows(self, count: int) -> None:
        """Sum in the `count` rows of block "rows" too."""
        pin(self._blocks["rows"], self.worker.device)
        if self._rows is None:
            self._rows = Rows(self._layout, self._buffers.size, count, self._blocks["rows"], HOST)
        else:
            self._rows.grow(count, self._blocks["rows"])
        if self._mirror is not None:
            self._mirror.add_rows(count, self._buffers.size)

    def set_world(self, size: int, threads: Mapping[int, int], awake: float) -> None:
        """There are `size` workers now; compute with the threads of this worker's rank, and stay awake for `awake`
        seconds after a short order."""
        self.awake = awake
        self.worker.world_size = size
        torch.set_num_threads(threads[self.worker.rank])

    def evaluate(self, order: Order) -> Iterator[tuple[Report, list[Any]]]:
        """Evaluate the chunks of `order`."""
        assert self._rows is not None
        with nullcontext() if self._torch is None else self._torch.contexts():
            try:
                if self._mirror is not None:
                    yield from self._mirror.evaluate(self.evaluator, order, self._rows)
                else:
                    yield from self.evaluator.evaluate(order, self._rows)
            except Exception:  # what it wrote before
                for block in self._private.values():
                    block.discard()
                raise


def _hooks(module: torch.nn.Module) -> int:
    """How many hooks a module and its parts have."""
    found = 0
    for part in module.modules():
        for name, value in vars(part).items():
            if name.endswith("_hooks") and name.startswith(("_forward", "_backward")):
                found += len(value)
    return found


class _Mailbox:
    """The worker's end of the pipe. Between two chunks it sees whether the parent wants less; what else comes then is
    kept for later."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._kept: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def take(self, awake: float) -> bytes:
        """The next message; stays awake for so many seconds. Raises `EOFError` or `OSError` once the parent has hung
        up."""
        if self._kept:
            return self._kept.popleft()
        if awake:
            until = time.perf_counter() + awake
            while not self._poll.poll(0) and time.perf_counter() < until:
                os.sched_yield()
        return self._connection.recv_bytes()

    def limit(self, number: int, last: int) -> int:
        """The end of order `number`, whose end was `last`, by what the parent says now."""
        while not self._kept and self._poll.poll(0):
            message = self._connection.recv_bytes()
            if HEAD.unpack_from(message) == (number, Kind.LIMIT):
                last = min(last, *CHUNK.unpack_from(message, HEAD.size))
            else:
                self._kept.append(message)
        return last

    def take_descriptor(self) -> int:
        """The descriptor that follows a message."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            _, fds, _, _ = socket.recv_fds(end, 1, 1)
        if not fds:
            raise EOFError
        return fds[0]

    def send(self, number: int, kind: Kind, body: bytes, chunk: int = -1) -> None:
        """Say something about message `number`."""
        if len(body) + HEAD.size > LARGEST:
            raise ValueError(
                f"a result of {len(body) / 1e9:.1f} GB, pickled, and {LARGEST / 1e9:.1f} GB are the most: return less "
                "at a time, or write it to a file and return its path"
            )
        frame = HEAD.pack(number, kind) + body
        faults.point("worker.send", chunk)
        self._connection.send_bytes(frame)
        faults.point("worker.sent", chunk)


def serve(connection: Connection, session: Session) -> None:
    """Obey until the parent hangs up; whatever the user's code raises is reported and survived."""
    mailbox = _Mailbox(connection)
    awake = 0.0
    while True:
        try:
            message = mailbox.take(awake)
            awake = 0.0
            number, kind = HEAD.unpack_from(message)
            if kind == Kind.LIMIT:  # of an order that is over
                continue
            try:
                if kind in ORDERS:
                    seconds = _evaluate(mailbox, session, number, Order.decode(message[HEAD.size :], Kind(kind)))
                    awake = session.awake if seconds < _SHORT else 0.0
                else:
                    mailbox.send(number, Kind.RESULT, _call(mailbox, session, message[HEAD.size :]))
            except BaseException as error:  # of the pipe too: then this message does not get out either
                samples = session.at_hand if kind in ORDERS else range(0)
                mailbox.send(number, Kind.FAILED, describe(error, samples).encode())
        except (EOFError, OSError):
            return


def _call(mailbox: _Mailbox, session: Session, body: bytes) -> bytes:
    name, arguments = pickle.loads(body)
    if name.startswith("attach"):
        arguments = (*arguments, mailbox.take_descriptor())
    faults.point(f"worker.{name}")
    result: bytes = cloudpickle.dumps(getattr(session, name)(*arguments))
    return result


def _evaluate(mailbox: _Mailbox, session: Session, number: int, order: Order) -> float:
    """Returns the seconds that it took."""
    faults.point("worker.order", order.first)
    last, report = order.last, None
    for report, results in session.evaluate(order):
        chunk = report.next - 1
        if results:
            mailbox.send(number, Kind.HOOKED, CHUNK.pack(chunk) + cloudpickle.dumps(results), chunk)
        if report.next < last:
            mailbox.send(number, Kind.REPORT, report.encode(), chunk)
            last = mailbox.limit(number, last)
        if report.next >= last:
            break
    assert report is not None
    mailbox.send(number, Kind.DONE, report.encode(), report.next - 1)
    return report.seconds


def describe(error: BaseException, samples: range) -> Failure:
    """The exception as text, whatever its own methods do."""
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:
        trace = "".join(traceback.format_tb(error.__traceback__))
    written = error.names if isinstance(error, StateWritten) else ()
    return Failure(type(error).__name__, message_of(error), trace, samples, written)


def _end(code: int) -> None:
    """End this process and whatever it started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def _end_with_parent() -> None:
    """Wait for the parent's death, and do not outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    watched = [parent.sentinel]
    if hasattr(os, "pidfd_open"):  # for somebody else may hold the other end of the sentinel
        try:
            watched.append(os.pidfd_open(parent.pid))
        except ProcessLookupError:
            _end(1)
        except OSError:  # not allowed in this container
            pass
    wait(watched)
    _end(1)


def _killed_with_parent(sentinel: int) -> None:
    """Have the kernel kill this process's group when the parent's end of `sentinel` closes: then nobody needs Python's
    lock, which the user's code may hold."""
    if sys.platform == "linux":
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(sentinel, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def main(connection: Connection, rank: int, world_size: int, threads: int) -> None:
    """The life of a worker process, from its first message to the parent's last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone decides about Ctrl-C
    faulthandler.enable(all_threads=False)  # the others are ours, and say nothing
    os.set_inheritable(connection.fileno(), False)
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.set_inheritable(parent.sentinel, False)
    if os.getpgrp() == os.getpid():
        _killed_with_parent(parent.sentinel)
    threading.Thread(target=_end_with_parent, name="batchopt-parent-watch", daemon=True).start()
    torch.set_num_threads(threads)
    faults.rank = rank
    faults.point("worker.greet")
    connection.send_bytes(HEAD.pack(0, Kind.READY) + versions().encode())
    faults.point("worker.greeted")
    serve(connection, Session(rank, world_size))
    atexit._run_exitfuncs()  # the user's code may have registered some
    sys.stdout.flush()
    sys.stderr.flush()
    _end(0)
