"""A worker process: it maps the parent's memory, processes its messages one by one, and ends with it."""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import io
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch

from batchopt_workers.data.memory import octets
from batchopt_workers.map.repeat import Failed, Repeater
from batchopt_workers.process import faults
from batchopt_workers.process.failures import describe, tell_parent
from batchopt_workers.process.messages import CHUNK, HEAD, ORDERS, Kind, Order, versions
from batchopt_workers.process.session import WITH_DESCRIPTOR, Session
from batchopt_workers.tasks.task_runner import ChunkDone

_F_SETSIG = 10  # Linux; Python does not name it
# Largest message in bytes: its length is sent as a signed 4-byte number.
LARGEST = 2**31 - 1
# Bytes that a pipe accepts when it reports room: at most a quarter of it is in use then.
_LITTLE = 2**15
# Seconds of the longest order after which a worker stays awake for the next one, if there are enough cores: waking up
# takes a tenth of a millisecond.
_SHORT = 0.01
_NOTHING: bytes = cloudpickle.dumps(None)


class _Mailbox:
    """The worker's end of the pipe. Between two chunks it checks whether the parent has shortened the order; other
    messages that arrive then are kept for later.

    While it is `quiet` the parent does not wait for this pipe: it reads what is there whenever it is awake, and is
    woken up through `wake` if there is no more room, and at the end.
    """

    def __init__(self, connection: Connection, wake: Callable[[], None]) -> None:
        self.quiet = False
        self._bell = -1
        self.wake = wake
        self._connection = connection
        self._kept: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self._room = select.poll()
        self._room.register(connection.fileno(), select.POLLOUT)

        self._any = select.poll()  # a message, or the bell
        self._any.register(connection.fileno(), select.POLLIN)

    def listen(self, bell: int) -> None:
        """Also wait for this bell from now on."""
        if bell != self._bell:
            if self._bell >= 0:
                self._any.unregister(self._bell)
            self._any.register(bell, select.POLLIN)
            self._bell = bell

    def take(self, awake: float) -> bytes | None:
        """Return the next message, or None if there is none and the bell has rung; stay awake for `awake` seconds.
        Raise `EOFError` or `OSError` once the parent has hung up."""
        if self._kept:
            return self._kept.popleft()
        if awake:
            until = time.perf_counter() + awake
            while not self._any.poll(0) and time.perf_counter() < until:
                os.sched_yield()
        self._any.poll()
        if self._bell >= 0 and not self._poll.poll(0):  # messages sent before it rang come first
            os.eventfd_read(self._bell)
            return None
        return self._connection.recv_bytes()

    def limit(self, number: int, last: int) -> int:
        """Return the current end of order `number`, which was `last`, after the parent's latest messages."""
        while not self._kept and self._poll.poll(0):
            message = self._connection.recv_bytes()
            if HEAD.unpack_from(message) == (number, Kind.LIMIT):
                last = min(last, *CHUNK.unpack_from(message, HEAD.size))
            else:
                self._kept.append(message)
        return last

    def take_descriptor(self) -> int:
        """Return the descriptor that follows a message."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            _, fds, _, _ = socket.recv_fds(end, 1, 1)
        if not fds:
            raise EOFError
        return fds[0]

    def send(self, number: int, kind: Kind, body: bytes, chunk: int = -1) -> None:
        """Send a reply to message `number`. Raise `ValueError` if it is too large."""
        if len(body) + HEAD.size > LARGEST:
            raise ValueError(
                f"the pickled result has {len(body) / 1e9:.1f} GB; the limit is {LARGEST / 1e9:.1f} GB: return less "
                "at a time, or write it to a file and return its path"
            )
        frame = HEAD.pack(number, kind) + body
        faults.point("worker.send", chunk)
        if self.quiet and (len(frame) > _LITTLE or not self._room.poll(0)):
            self.wake()
        self._connection.send_bytes(frame)
        faults.point("worker.sent", chunk)


def serve(connection: Connection, session: Session) -> None:
    """Process messages until the parent hangs up; exceptions of the user's code are reported, and do not end it."""
    mailbox = _Mailbox(connection, session.wake_parent)
    awake = 0.0
    while True:
        try:
            message = mailbox.take(awake)
            awake = 0.0
            if message is None:
                assert session.repeat is not None
                _repeat(session, session.repeat)
                awake = session.awake if session.seconds < _SHORT else 0.0
                continue
            number, kind = HEAD.unpack_from(message)
            if kind == Kind.LIMIT:  # of an order that has ended
                continue
            try:
                if kind in ORDERS:
                    order = Order.decode(message[HEAD.size :], Kind(kind))
                    mailbox.quiet = order.is_quiet
                    seconds = _evaluate(mailbox, session, number, order)
                    awake = session.awake if seconds < _SHORT else 0.0
                else:
                    if session.repeat is not None:
                        session.repeat.forget()
                    mailbox.send(number, Kind.RESULT, _call(mailbox, session, message[HEAD.size :]))
                    if session.repeat is not None:
                        mailbox.listen(session.repeat.bell)
            except Failed as failed:
                mailbox.send(number, Kind.FAILED, describe(failed.error, failed.samples).encode())
            except BaseException as error:  # of the pipe too: then sending this one fails as well
                samples = session.current if kind in ORDERS else range(0)
                mailbox.send(number, Kind.FAILED, describe(error, samples).encode())
            if mailbox.quiet:
                mailbox.quiet = False
                mailbox.wake()
        except (EOFError, OSError):
            return


def _call(mailbox: _Mailbox, session: Session, body: bytes) -> bytes:
    name, arguments = pickle.loads(body)
    method = getattr(Session, name)
    if method in WITH_DESCRIPTOR:
        arguments = (*arguments, mailbox.take_descriptor())
    faults.point(f"worker.{name}")
    result = method(session, *arguments)
    return _NOTHING if result is None else cloudpickle.dumps(result)


def _repeat(session: Session, repeat: Repeater) -> None:
    """Evaluate what the board asks for."""
    asked = repeat.asked()
    if asked is None:
        return
    order, found, failed = asked.order, list[ChunkDone](), None
    try:
        if faults.hook is not None:
            faults.point("worker.rung", order.first)
        if asked.batch is not None:
            repeat.begins(-1)
            session.begin_again(asked.batch)
            repeat.begins(order.step)
        for done in session.evaluate(order):
            if repeat.is_abandoned(asked.number):
                return
            found.append(done)
        if faults.hook is not None:
            faults.point("worker.again", order.last - 1)
    except BaseException as error:
        failed = Failed(asked.number, error, session.current)
    if repeat.finish(asked, found, failed):
        session.wake_parent()


def _answer(session: Session, order: Order) -> list[ChunkDone]:
    """Return the results of an order whose evaluation was repeated before it came; otherwise nothing."""
    found = [] if session.repeat is None else session.repeat.answer(order)
    drew = bool(found) and session.look(order.step)
    return [done._replace(drew=drew) for done in found]


def _evaluate(mailbox: _Mailbox, session: Session, number: int, order: Order) -> float:
    """Evaluate an order, and return the seconds that it took."""
    faults.point("worker.order", order.first)
    last, report, repeat, form, pickled = order.last, None, session.repeat, None, b""
    for done in _answer(session, order) or session.evaluate(order):
        report, chunk = done.report(), done.next - 1
        if done.results:
            mailbox.send(number, Kind.HOOKED, CHUNK.pack(chunk) + cloudpickle.dumps(done.results), chunk)
        if done.form is not None:
            if not done.form.is_as(form):
                form, pickled = done.form, dumps(done.form)
            mailbox.send(number, Kind.FORM, CHUNK.pack(chunk) + pickled, chunk)
        if report.next < last:
            mailbox.send(number, Kind.REPORT, report.encode(), chunk)
            last = mailbox.limit(number, last)
        if report.next >= last:
            break
    assert report is not None
    if repeat is not None:
        repeat.ordered(report, order.step)
    mailbox.send(number, Kind.DONE, report.encode(), report.next - 1)
    return report.seconds


def _end(code: int) -> None:
    """End this process and everything that it started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def _end_with_parent() -> None:
    """Wait for the parent's death, and end this process then."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    watched = [parent.sentinel]
    if hasattr(os, "pidfd_open"):  # another process may hold the other end of the sentinel
        try:
            watched.append(os.pidfd_open(parent.pid))
        except ProcessLookupError:
            _end(1)
        except OSError:  # not allowed in this container
            pass
    wait(watched)
    _end(1)


def _killed_with_parent(sentinel: int) -> None:
    """Have the kernel kill this process's group when the parent's end of `sentinel` closes: this does not need the GIL,
    which the user's code may hold."""
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(sentinel, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def main(connection: Connection, rank: int, world_size: int, threads: int) -> None:
    """Run a worker process, from its first message to the parent's last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent only
    faulthandler.enable(all_threads=False)  # the other threads are internal, and of no interest
    os.set_inheritable(connection.fileno(), False)
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.set_inheritable(parent.sentinel, False)
    if os.getpgrp() == os.getpid():
        _killed_with_parent(parent.sentinel)
    threading.Thread(target=_end_with_parent, name="batchopt-parent-watch", daemon=True).start()
    torch.set_num_threads(threads)
    faults.rank = rank
    faults.end_copies()
    tell_parent()
    faults.point("worker.greet")
    connection.send_bytes(HEAD.pack(0, Kind.READY) + versions().encode())
    faults.point("worker.greeted")
    serve(connection, Session(rank, world_size))
    atexit._run_exitfuncs()  # the user's code may have registered some
    sys.stdout.flush()
    sys.stderr.flush()
    _end(0)


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
        raise TypeError(
            f"the function returned an object that cannot be sent ({type(error).__name__}: {error}): return tensors, "
            "numbers and text"
        ) from error
    return file.getvalue()
