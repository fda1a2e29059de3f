"""The parent's end of a worker's pipe, read and written so that Ctrl-C leaves it consistent at any time.

Python runs signal handlers only between two of its own instructions. So operations that must be atomic (the kernel took
a packet, and we know it; it gave us one, and we have it) happen within one call of C code here:
`extend(map(sendmsg, ...))`, `extend(map(recvmsg, ...))`. Nothing blocks: what the pipe does not take now waits.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from batchopt.backends.process.wanted import Activity, Field, SessionCall
from batchopt_workers.wire.orders import ANSWERS, Message
from batchopt_workers.wire.packets import RECEIVING, Packet, RawPacket, Received, packet, read


class ProtocolError(Exception):
    """Raised for a packet from a worker that cannot be right."""


class PendingCall(NamedTuple):
    """A call without an answer so far; once it has left, `sent` has the number of its bytes. It may be part of the
    `field` of that `name`, of all that a worker must have."""

    number: int
    activity: Activity
    packet: Packet
    sent: list[int]
    name: str = ""
    field: Field | None = None


# The packet that says that there is an order on the page.
RING = packet(0, Message.RING, b"")


class Channel:
    """A worker's pipe. The calls that it was asked to make and has not answered are in `todo`, and `answered` is the
    number of the last one that was; its greeting is the answer to call 0. `rings`: it is to be rung for, after these.
    Both leave at the next `flush` that finds room."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end, self.wake = end, end.send
        self._incoming: deque[RawPacket] = deque()
        self._numbers = count(1)  # of calls
        self.todo: deque[PendingCall] = deque([PendingCall(0, Activity.STARTING, RING, [0])])
        self.answered, self.rings = -1, False

    def fileno(self) -> int:
        """For polls."""
        return self._end.fileno()

    def ask(self, message: SessionCall, name: str = "", field: Field | None = None) -> None:
        """Queue a call."""
        number, files = next(self._numbers), () if message.block is None else (message.block,)
        body = packet(number, Message.CALL, message.body, *files)
        self.todo.append(PendingCall(number, message.activity, body, [], name, field))

    def find(self, number: int) -> PendingCall | None:
        """Return the call of that number, if it was not answered before."""
        return next((asked for asked in self.todo if asked.number == number), None)

    def forget_answered(self) -> None:
        """Drop answered calls: further replies about them are ignored."""
        while self.todo and self.todo[0].number <= self.answered:
            self.todo.popleft()

    def flush(self) -> None:
        """Send what has not left, as far as there is room; if the worker is gone, that is noticed elsewhere."""
        with suppress(OSError):
            for asked in [*self.todo]:
                if not asked.sent:
                    data, rights = asked.packet.data, asked.packet.rights
                    asked.sent.extend(map(self._end.sendmsg, ((data,),), (rights,)))
            if self.rings:
                self.wake(RING.data)
                self.rings = False  # after an interrupt before this it is rung for twice, which changes nothing

    @property
    def has_unsent(self) -> bool:
        """Tell whether something waits for room in the pipe."""
        return self.rings or bool(self.todo and not self.todo[-1].sent)

    def replies(self) -> Iterator[Received]:
        """Yield what it has said, oldest first. Raises `ProtocolError` for what cannot be right."""
        for reply in self.packets():
            if reply.kind in ANSWERS:
                if reply.number > self.answered and self.find(reply.number) is None:
                    raise ProtocolError(f"an answer to call {reply.number}, which is none")
                self.answered = max(self.answered, reply.number)
            yield reply

    def receive(self) -> None:
        """Take what has arrived. Raises `EOFError` or `OSError` if the worker is gone, once all of it was taken."""
        try:
            while True:
                self._incoming.extend(map(self._end.recvmsg, *([value] for value in RECEIVING)))
                if not self._incoming[-1][0]:
                    self._incoming.pop()
                    raise EOFError
        except BlockingIOError:
            return

    def packets(self) -> Generator[Received, None, None]:
        """Yield the packets, oldest first; one whose handling was interrupted is yielded again. Raises `ProtocolError`
        for one that cannot be right."""
        while self._incoming:
            try:
                found = read(self._incoming[0])
            except ValueError as error:
                raise ProtocolError(str(error)) from error
            yield found
            self._incoming.popleft()
            if found.file >= 0:
                os.close(found.file)

    @property
    def unread(self) -> bool:
        """Tell whether there is a packet that was not handled."""
        return bool(self._incoming)

    def close(self) -> None:
        """Close the pipe."""
        self._end.close()
