"""The parent's end of a worker's pipe, read and written so that Ctrl-C leaves it consistent at any time.

Python runs signal handlers only between two of its own instructions. So operations that must be atomic (the kernel took
some bytes, and we know how many; it gave us some, and we have them) happen within one call of C code here:
`extend(map(send, ...))`, `writelines(map(recv, ...))`. Nothing blocks: what the pipe does not take now waits in a
queue.
"""

from __future__ import annotations

import io
import itertools
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from batchopt_workers.wire.orders import ANSWERS, HEAD, Message

_LENGTH = struct.Struct("!i")  # of what follows, as multiprocessing's connections write it
_READ = 2**18  # bytes asked for at a time
_LARGEST = 2**31 - 1
_TOGETHER = 2**14  # bytes up to which queued messages are sent together


class ProtocolError(Exception):
    """Raised for bytes from a worker that are not a message, or a message that cannot be right."""


class WorkerReply(NamedTuple):
    """A worker's reply to the call, or message about the order, of that number."""

    number: int
    kind: Message
    body: bytes


class HasDescriptor(Protocol):
    """Anything that travels to a worker as a file descriptor: shared memory, a file, a pipe."""

    @property
    def fd(self) -> int:
        """The descriptor."""


@dataclass
class _Frame:
    """Queued bytes, and the descriptor that follows them; how many the kernel took, call by call. `sent` is the
    number of the last call once this frame is queued."""

    sent: int
    data: memoryview
    block: HasDescriptor | None
    taken: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)


# The message that there is an order on the page.
_RING = _LENGTH.pack(HEAD.size) + HEAD.pack(0, Message.RING)


class Channel:
    """Queues messages, and yields replies. The worker's greeting is the answer to call 0."""

    def __init__(self, connection: Connection) -> None:
        """Takes over the descriptor of `connection`."""
        self._socket = socket.socket(fileno=connection.fileno())
        connection._handle = None  # type: ignore[attr-defined]  # ours now
        self._socket.setblocking(False)
        self._numbers = itertools.count(1)
        self._outgoing: deque[_Frame] = deque()
        self._incoming = (io.BytesIO(), 0)  # received bytes, and how many of them were yielded as replies
        self._gone = 0  # `sent` of the last frame that left
        self.answered = -1  # the number of the last call that was

    @property
    def sent(self) -> int:
        """The number of the last call."""
        return self._outgoing[-1].sent if self._outgoing else self._gone

    def fileno(self) -> int:
        """For polls."""
        return self._socket.fileno()

    def number(self) -> int:
        """A number for the next call."""
        return next(self._numbers)

    def queue(self, number: int, body: bytes, block: HasDescriptor | None = None) -> None:
        """Queue call `number`, and the descriptor of a block after it; they leave at the next `flush`."""
        length = HEAD.size + len(body)
        if length > _LARGEST:
            raise ValueError(f"a message of {length / 1e9:.1f} GB beside its tensors is too large for a worker's pipe")
        self._queue(number, _LENGTH.pack(length) + HEAD.pack(number, Message.CALL) + body, block)

    def ring(self) -> None:
        """Queue the message that there is an order on the page."""
        self._queue(self.sent, _RING)

    def send_ring(self) -> None:
        """Send it at once; nothing else may be queued. Raises `OSError` if there is no room, or the worker is gone."""
        taken = self._socket.send(_RING)
        if taken < len(_RING):
            self._queue(self.sent, _RING[taken:])

    def _queue(self, sent: int, data: bytes, block: HasDescriptor | None = None) -> None:
        last = self._outgoing[-1] if self._outgoing else None
        if last is None or last.block is not None or last.taken or len(last.data) + len(data) > _TOGETHER:
            self._outgoing.append(_Frame(sent, memoryview(data), block))
        else:
            self._outgoing[-1] = _Frame(sent, memoryview(b"".join((last.data, data))), block)

    def flush(self) -> bool:
        """Send as much as the pipe takes; return whether that was all. Raises `OSError` if the worker is gone."""
        try:
            while self._outgoing:
                frame = self._outgoing[0]
                while (at := sum(frame.taken)) < len(frame.data):
                    frame.taken.extend(map(self._socket.send, (frame.data[at:],)))
                if frame.block is not None and not frame.passed:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [frame.block.fd]))]
                    frame.passed.extend(map(self._socket.sendmsg, ([b"\1"],), (rights,)))
                self._gone = frame.sent
                if self._outgoing and self._outgoing[0] is frame:
                    self._outgoing.popleft()
        except BlockingIOError:
            return False
        return True

    def receive(self) -> None:
        """Read what is available. Raises `EOFError` or `OSError` if the worker is gone and everything was read."""
        stream, _ = self._incoming
        before = stream.tell()
        try:
            stream.writelines(map(self._socket.recv, (_READ,)))
        except BlockingIOError:
            return
        if stream.tell() == before:
            raise EOFError

    def drain(self) -> None:
        """Read all that is available; nothing if the worker is gone."""
        try:
            before = -1
            while self._incoming[0].tell() != before:
                before = self._incoming[0].tell()
                self.receive()
        except (EOFError, OSError):
            pass

    def replies(self) -> Iterator[WorkerReply]:
        """Yield the replies, oldest first; one whose handling was interrupted is yielded again.

        Raises `ProtocolError` for bytes that are not a message.
        """
        while True:
            stream, at = self._incoming
            end = stream.tell()
            if at == end:
                if end:
                    self._incoming = (io.BytesIO(), 0)
                return
            view = stream.getbuffer()
            try:
                if end - at < _LENGTH.size:
                    return
                (length,) = _LENGTH.unpack_from(view, at)
                if length < HEAD.size:
                    raise ProtocolError(f"a message of {length} bytes")
                if end - at - _LENGTH.size < length:
                    return
                start, at = at + _LENGTH.size, at + _LENGTH.size + length
                number, code = HEAD.unpack_from(view, start)
                body = bytes(view[start + HEAD.size : at])
            finally:
                view.release()
            try:
                kind = Message(code)
            except ValueError:
                raise ProtocolError(f"a message of kind {code}") from None
            if kind in ANSWERS:
                if number > self.sent:
                    raise ProtocolError(f"an answer to call {number} of {self.sent}")
                self.answered = max(self.answered, number)
            yield WorkerReply(number, kind, body)
            self._incoming = (stream, at)

    @property
    def unread(self) -> bool:
        """Tell whether there is a reply that was not yielded."""
        stream, at = self._incoming
        return stream.tell() > at

    @property
    def pending(self) -> bool:
        """Tell whether something remains to be sent."""
        return bool(self._outgoing)

    @property
    def idle(self) -> bool:
        """Tell whether the last call was answered."""
        return self.answered >= self.sent

    def close(self) -> None:
        """Close the connection."""
        self._outgoing.clear()
        self._socket.close()
