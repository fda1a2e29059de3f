"""A worker process: it maps the parent's memory, processes its messages one by one, and ends with it."""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import pickle
import select
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch

from batchopt_workers.evaluate.work import ChunkDone
from batchopt_workers.functions.forms import Form
from batchopt_workers.life import faults
from batchopt_workers.life.session import Session
from batchopt_workers.wire.failures import describe, tell_parent
from batchopt_workers.wire.memory import octets
from batchopt_workers.wire.orders import CHUNK, NONES, TASKS, Message, versions
from batchopt_workers.wire.packets import RECEIVING, Received, packet, read

# Seconds of the longest order after which a worker stays awake for the next one, if there are enough cores: waking up
# takes a tenth of a millisecond.
_SHORT = 0.01
_NOTHING: bytes = cloudpickle.dumps(None)


class _Mailbox:
    """The worker's end of the pipe."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._poll = select.poll()
        self._poll.register(end.fileno(), select.POLLIN)

    def take(self, awake: float) -> Received:
        """Return the next packet; stay awake for `awake` seconds. Raise `EOFError` or `OSError` once the parent has
        hung up."""
        if awake:
            until = time.perf_counter() + awake
            while not self._poll.poll(0) and time.perf_counter() < until:
                os.sched_yield()
        taken = read(self._end.recvmsg(*RECEIVING))
        if taken.file >= 0:
            os.close(taken.file)
        return taken

    def send(self, number: int, kind: Message, body: bytes, chunk: int = -1) -> None:
        """Send a packet about call or order `number`. Raise `MemoryError` or `OSError` if it is large, and there is no
        room for it."""
        reply = packet(number, kind, body)
        faults.point("worker.send", chunk)
        self._end.sendmsg((reply.data,), reply.rights)
        faults.point("worker.sent", chunk)


def serve(end: socket.socket, session: Session) -> None:
    """Process packets until the parent hangs up; exceptions of the user's code are reported, and do not end it."""
    mailbox, told, awake, made = _Mailbox(end), SentForms(), 0.0, 0
    while True:
        try:
            taken = mailbox.take(awake)
            if taken.kind == Message.RING:
                seconds = _carry_out(mailbox, session, told, made)
                awake = session.awake if seconds < _SHORT else 0.0
                continue
            awake, made = 0.0, taken.number
            try:
                mailbox.send(made, Message.RESULT, _call(session, taken))
            except BaseException as error:  # of the pipe too: then sending this one fails as well
                mailbox.send(made, Message.REFUSED, describe(error, range(0)).encode())
        except (EOFError, OSError):
            return


def _call(session: Session, taken: Received) -> bytes:
    name, arguments = pickle.loads(taken.body)
    method = getattr(Session, name)
    arguments = (*arguments, *taken.others)
    faults.point(f"worker.{name}")
    result = method(session, *arguments)
    if result is None:
        return _NOTHING
    try:
        return cloudpickle.dumps(result)  # type: ignore[no-any-return]
    except Exception as error:  # whatever the user's classes raise
        raise _unsendable(error) from error


class SentForms:
    """Results besides numbers that the parent was told of, so that it need not be told again: how often the posthook
    returned None for each chunk, and the form of results, until another call is made."""

    def __init__(self) -> None:
        self._nones: dict[int, int] = {}  # by chunk
        self._made = -1
        self._form: Form | None = None
        self._pickled = b""

    def news(self, made: int, chunk: int, done: ChunkDone) -> Iterator[tuple[Message, bytes]]:
        """Yield the messages about a chunk, after `made` calls."""
        if done.results is not None:
            if not done.says_nothing:
                yield Message.HOOKED, CHUNK.pack(chunk) + cloudpickle.dumps(done.results)
            elif self._nones.get(chunk) != len(done.results):
                self._nones[chunk] = len(done.results)
                yield Message.SILENT, NONES.pack(chunk, len(done.results))
        if done.form is not None:
            if made != self._made or not done.form.is_as(self._form):
                self._made, self._form, self._pickled = made, done.form, dumps(done.form)
                yield Message.FORM, CHUNK.pack(chunk) + self._pickled


def _carry_out(mailbox: _Mailbox, session: Session, told: SentForms, made: int) -> float:
    """Carry out the order on the page, if there is one after `made` calls, and return the seconds that it took."""
    page = session.page
    found = None if page is None else page.order(made)
    if page is None or found is None:  # called off before it was begun, or rung for twice
        return 0.0
    number, order, start = found
    faults.point("worker.order", order.first)
    report, said, rows = None, 0, None if order.kind in TASKS else session.rows
    try:
        for done in session.evaluate(order, start):
            chunk, report = done.next - 1, done.report()
            if done.results is not None or done.form is not None:
                for kind, body in told.news(made, chunk, done):
                    mailbox.send(number, kind, body, chunk)
                    said += 1
            if faults.hook is not None:
                faults.point("worker.report", chunk)
            goes_on = page.report(report, said, done.results is not None, rows)
            if faults.hook is not None:
                faults.point("worker.reported", chunk)
            if not goes_on:
                break
    except BaseException as error:
        report = None
        mailbox.send(number, Message.FAILED, describe(error, session.current).encode())
    if faults.hook is not None:
        faults.point("worker.done", order.last - 1)
    if page.finish(number, report):
        session.wake_parent()
    return 0.0 if report is None else report.seconds


def main(pipe: socket.socket, rank: int, world_size: int, threads: int) -> None:
    """Run a worker process, from its first message to the parent's last."""
    faulthandler.enable(all_threads=False)  # the other threads are internal, and of no interest
    torch.set_num_threads(threads)
    faults.end_copies()
    tell_parent()
    faults.point("worker.greet")
    pipe.send(packet(0, Message.READY, versions().encode()).data)
    faults.point("worker.greeted")
    serve(pipe, Session(rank, world_size))
    atexit._run_exitfuncs()  # the user's code may have registered some
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle's class is untyped
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            return _tensor, (bytearray(octets(obj).numpy()), obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor consists of its elements only, and is alone in its memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).view(shape)


def dumps(result: Any) -> bytes:
    """Return the pickled result. Raise `TypeError` for an object that cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
    except Exception as error:  # whatever the user's classes raise
        raise _unsendable(error) from error
    return file.getvalue()


def _unsendable(error: Exception) -> TypeError:
    return TypeError(
        f"the function returned an object that cannot be sent ({type(error).__name__}: {error}): return tensors, "
        "numbers and text"
    )
