"""The parent's end of a worker's pipe, read and written so that Ctrl-C, whenever it comes, leaves it in order.

Messages are numbered, and a reply has its message's number. A reply is looked at before it is taken from the socket,
and is filed under its number: an interrupt between the two files it twice in the same place. An interrupt while
sending may lose a message; its number is then never answered, so after an interrupt one sends another, and waits for
that one's reply.
"""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection
from multiprocessing.reduction import sendfds

from batchopt_workers.messages import Kind

_HEAD = struct.Struct("!iQB")  # length of what follows the first field, number, kind
# Bytes of a frame that the kernel holds in one piece, to be looked at; a larger one has to be read bit by bit.
_WHOLE = 2**15


class Channel:
    """Sends messages and files replies. `sent` is the number of the last message; 0 is the worker's greeting."""

    def __init__(self, connection: Connection) -> None:
        """Takes over the descriptor of `connection`."""
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        self.sent = 0
        self._answered = -1
        self.replies: dict[tuple[int, Kind], bytes] = {}
        self.broken = False  # an interrupt came where the stream cannot be mended

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, kind: Kind, body: bytes, fd: int | None = None) -> None:
        """Send a message, and a descriptor after it. Raises `OSError` if the worker is gone."""
        self.sent += 1
        frame = _HEAD.pack(_HEAD.size - 4 + len(body), self.sent, kind) + body
        self.broken = self.broken or len(frame) > _WHOLE or fd is not None
        self._socket.sendall(frame)
        if fd is not None:
            sendfds(self._socket, [fd])
        self.broken = False

    def receive(self) -> None:
        """File the next reply, if it is there. Raises `EOFError` or `OSError` if the worker is gone."""
        head = self._socket.recv(_HEAD.size, socket.MSG_PEEK)
        if not head:
            raise EOFError
        if len(head) < _HEAD.size:
            return
        length, number, kind = _HEAD.unpack(head)
        if length + 4 > _WHOLE:
            self.broken = True
            frame = self._exactly(length + 4)
            self._file(number, Kind(kind), frame[_HEAD.size :])
            self.broken = False
            return
        frame = self._socket.recv(length + 4, socket.MSG_PEEK)
        if len(frame) == length + 4:
            self._file(number, Kind(kind), frame[_HEAD.size :])
            self._socket.recv(length + 4)

    def _file(self, number: int, kind: Kind, body: bytes) -> None:
        self.replies[number, kind] = body
        if kind != Kind.HOOKED:  # which comes before the answer proper
            self._answered = number

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self._socket.recv(min(count, 2**20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    @property
    def answered(self) -> bool:
        """Whether the reply to the last message is filed."""
        return self._answered == self.sent

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
