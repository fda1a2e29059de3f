"""A worker process: it maps the parent's memory, obeys its messages one after the other, and ends with it."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from typing import Any

import cloudpickle
import torch

from batchopt_workers.buffers import StepBuffers
from batchopt_workers.evaluate import Evaluator, Program
from batchopt_workers.layout import Layout
from batchopt_workers.memory import SharedBlock
from batchopt_workers.messages import HEAD, Cut, Done, Failure, Kind, Order
from batchopt_workers.packing import Placement, unpack
from batchopt_workers.rows import Rows
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.worker import Hook, Worker


class Session:
    """What a worker process holds. The methods are what the parent's `CALL`s name; `install` comes before those below
    it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.worker = Worker(rank, world_size, torch.device("cpu"))
        self._blocks: dict[str, SharedBlock] = {}
        self._layout: Layout
        self._module: torch.nn.Module
        self._parameters: list[torch.nn.Parameter] = []
        self._buffers: StepBuffers
        self._rows: Rows
        self._evaluator: Evaluator | None = None

    @property
    def evaluator(self) -> Evaluator:
        """The map function on this worker's module."""
        if self._evaluator is None:
            raise RuntimeError("no module was installed in this worker")
        return self._evaluator

    @property
    def at_hand(self) -> range:
        """The samples in the forward that ran last, if an evaluation was cut short."""
        return self._evaluator.at_hand if self._evaluator is not None else range(0)

    def attach(self, name: str, fd: int) -> None:
        """Map the shared memory behind `fd` as `name`, in place of what had that name."""
        block = SharedBlock(fd)
        block.release()
        self._blocks[name] = block

    def settle(self) -> None:
        """Nothing: once this is answered, whatever was asked before is over."""

    def set_torch(self, settings: TorchSettings) -> None:
        """Compute as the parent does."""
        settings.apply()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the user's `function(worker, *arguments)`: precode, and what `run_on_workers` is given."""
        return function(self.worker, *arguments)

    def install(self, layout: Layout, data: bytes, placements: Sequence[Placement]) -> None:
        """Build the module around X (block "parameters") and its constants and buffers (block "program")."""
        x = self._blocks["parameters"].tensor(layout.dtype, (layout.size,))
        self._layout = layout
        self._parameters = [torch.nn.Parameter(view) for view in layout.views(x)]
        program: Program = unpack(data, placements, self._blocks["program"], self._parameters)
        self._module = self.worker.module = program.module
        self.worker.criterion = program.criterion
        self._buffers = StepBuffers(program.module, shared=True)
        self._evaluator = Evaluator(program, self.worker, self._parameters, self._buffers)

    def set_flags(self, training: Sequence[bool], requires_grad: Sequence[bool]) -> None:
        """Follow the parent's module: training mode of each submodule, `requires_grad` of each parameter of X."""
        for module, flag in zip(self._module.modules(), training, strict=True):
            module.training = flag
        for parameter, flag in zip(self._parameters, requires_grad, strict=True):
            parameter.requires_grad_(flag)

    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        """Replace the hooks."""
        self.evaluator.prehook, self.evaluator.posthook = prehook, posthook

    def load(self, data: bytes, placements: Sequence[Placement]) -> None:
        """Take the batch whose tensors are in block "batch", and begin a step."""
        self.evaluator.batch = unpack(data, placements, self._blocks["batch"])
        self._buffers.begin_step()

    def set_cut(self, cut: Cut) -> None:
        """Cut the batch so."""
        self.evaluator.cut = cut

    def set_rows(self, count: int) -> None:
        """Sum in the `count` rows of block "rows"."""
        self._rows = Rows(self._layout, self._buffers.size, count, self._blocks["rows"], self.worker.device)

    def evaluate(self, order: Order) -> tuple[Done, list[Any]]:
        """Evaluate the chunks of `order`."""
        return self.evaluator.evaluate(order, self._rows)


def serve(connection: Connection, session: Session) -> None:
    """Obey until the parent hangs up; whatever the user's code raises is reported and survived."""
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        number, kind = HEAD.unpack_from(message)
        try:
            replies = _obey(connection, session, kind, message[HEAD.size :])
        except BaseException as error:
            samples = session.at_hand if kind == Kind.EVALUATE else range(0)
            replies = [(Kind.FAILED, describe(error, samples).encode())]
        for answer, body in replies:
            connection.send_bytes(HEAD.pack(number, answer) + body)


def _obey(connection: Connection, session: Session, kind: int, body: bytes) -> list[tuple[Kind, bytes]]:
    if kind == Kind.EVALUATE:
        done, results = session.evaluate(Order.decode(body))
        hooked = [(Kind.HOOKED, cloudpickle.dumps(results))] if results else []
        return [*hooked, (Kind.DONE, done.encode())]
    name, arguments = pickle.loads(body)
    if name == "attach":
        arguments = (*arguments, recv_handle(connection))
    return [(Kind.RESULT, cloudpickle.dumps(getattr(session, name)(*arguments)))]


def describe(error: BaseException, samples: range) -> Failure:
    """The exception as text, whatever its own methods do."""
    try:
        message = str(error)
    except BaseException as inner:
        message = f"<its __str__ raised {type(inner).__name__}>"
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:
        trace = "".join(traceback.format_tb(error.__traceback__))
    return Failure(type(error).__name__, message, trace, samples)


def _end(code: int) -> None:
    """End this process and whatever it started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def _end_with_parent() -> None:
    """Wait for the parent's death, and do not outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    _end(1)


def main(connection: Connection, rank: int, world_size: int, threads: int) -> None:
    """The life of a worker process, from its first message to the parent's last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone decides about Ctrl-C
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, name="batchopt-parent-watch", daemon=True).start()
    torch.set_num_threads(threads)
    connection.send_bytes(HEAD.pack(0, Kind.READY))
    serve(connection, Session(rank, world_size))
    atexit._run_exitfuncs()  # the user's code may have registered some
    sys.stdout.flush()
    sys.stderr.flush()
    _end(0)
