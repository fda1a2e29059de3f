"""The packets of the pipe between parent and worker: each arrives whole, with its descriptors, or not at all."""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from batchopt_workers.wire.memory import GrowingFile
from batchopt_workers.wire.orders import Message

# Each begins with its number (a reply with that of the call or order that it is about), its kind, and whether its body
# is in a file.
HEAD = struct.Struct("!QB?")
# Most bytes of a body that travel in the packet itself, so that some packets find room in the pipe; a longer one is
# written to a file, whose descriptor travels.
_LONGEST = 2**14
# Most bytes of a file that are read at a time.
_MOST = 2**30
# A descriptor or two: that of such a file, and one that a call is about.
_RIGHTS = socket.CMSG_SPACE(2 * array("i").itemsize)


class HasDescriptor(Protocol):
    """Anything that travels as a file descriptor: shared memory, a file, a pipe."""

    @property
    def fd(self) -> int:
        """The descriptor."""


class Packet(NamedTuple):
    """The bytes of a packet, and the files whose descriptors travel with them."""

    data: bytes
    files: Sequence[HasDescriptor] = ()

    @property
    def rights(self) -> list[tuple[int, int, array[int]]]:
        """The second argument of `socket.sendmsg`."""
        if not self.files:
            return []
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [file.fd for file in self.files]))]


class Received(NamedTuple):
    """The content of a packet that has arrived. Whoever takes it owns its descriptors: that of the `file` of its body,
    which was read (-1: there is none), and `others`."""

    number: int
    kind: Message
    body: bytes
    file: int = -1
    others: tuple[int, ...] = ()


# As `socket.recvmsg` returns it.
RawPacket = tuple[bytes, list[tuple[int, int, bytes]], int, object]
# The arguments of `socket.recvmsg` for one packet.
RECEIVING = HEAD.size + _LONGEST, _RIGHTS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # only Linux has it


def packet(number: int, kind: Message, body: bytes, *files: HasDescriptor) -> Packet:
    """Return a packet. Raise `MemoryError` or `OSError` if its body needs a file, and there can be none."""
    if len(body) <= _LONGEST:
        return Packet(HEAD.pack(number, kind, False) + body, files)
    file = GrowingFile()
    file.write(memoryview(body), 0)
    return Packet(HEAD.pack(number, kind, True), (file, *files))


def read(raw: RawPacket) -> Received:
    """Return the content of a packet; again, if it is read again. Raise `EOFError` for none at all, at the end of the
    pipe, and `ValueError` for one that cannot be right."""
    data, ancillary, flags, _ = raw
    if not data:
        raise EOFError
    descriptors = array("i")
    for _, _, rights in ancillary:
        descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
    try:
        if flags & socket.MSG_CTRUNC:
            raise ValueError("a packet whose descriptors found no place: this process may open no more files")
        if len(data) < HEAD.size or flags & socket.MSG_TRUNC:
            raise ValueError(f"a packet of {len(data)} bytes")
        number, code, is_in_file = HEAD.unpack_from(data)
        kind = Message(code)
        if not is_in_file:
            return Received(number, kind, data[HEAD.size :], -1, tuple(descriptors))
        if not descriptors:
            raise ValueError("a packet without the file of its body")
        file, *others = descriptors
        return Received(number, kind, _content(file), file, tuple(others))
    except ValueError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _content(file: int) -> bytes:
    content, at = memoryview(bytearray(os.fstat(file).st_size)), 0
    while at < len(content):
        at += os.preadv(file, [content[at : at + _MOST]], at)
    return bytes(content)
