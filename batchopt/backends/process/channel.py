"""The parent's end of a worker's pipe, read and written so that Ctrl-C leaves it consistent at any time.

Python runs signal handlers only between two of its own instructions. So operations that must be atomic (the kernel took
a packet, and we know it; it gave us one, and we have it) happen within one call of C code here:
`extend(map(sendmsg, ...))`, `extend(map(recvmsg, ...))`. Nothing blocks: what the pipe does not take now waits.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Generator

from batchopt_workers.wire.packets import RECEIVING, Packet, RawPacket, Received, read


class ProtocolError(Exception):
    """Raised for a packet from a worker that cannot be right."""


class Channel:
    """Sends packets, and yields those that arrived."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end, self.wake = end, end.send
        self._incoming: deque[RawPacket] = deque()

    def fileno(self) -> int:
        """For polls."""
        return self._end.fileno()

    def send(self, packet: Packet, sent: list[int]) -> bool:
        """Send a packet, and note that in `sent`; return whether there was room. Raises `OSError` if the worker is
        gone."""
        try:
            sent.extend(map(self._end.sendmsg, ((packet.data,),), (packet.rights,)))
        except BlockingIOError:
            return False
        return True

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
                packet = read(self._incoming[0])
            except ValueError as error:
                raise ProtocolError(str(error)) from error
            yield packet
            self._incoming.popleft()
            if packet.file >= 0:
                os.close(packet.file)

    @property
    def unread(self) -> bool:
        """Tell whether there is a packet that was not handled."""
        return bool(self._incoming)

    def close(self) -> None:
        """Close the pipe."""
        self._end.close()
