"""The channel hands out every reply, however it is cut up and whenever one is interrupted, and never blocks."""

from __future__ import annotations

import gc
import os
import selectors
import signal
import struct
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt.backends.process.channel import Channel, ProtocolError, WorkerReply
from batchopt_workers.process.messages import HEAD, Message

Ends = tuple[Channel, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a pipe, in this process."""
    ours, theirs = Pipe(duplex=True)
    channel = Channel(ours)
    with theirs:
        yield channel, theirs
    channel.close()


def wait(channel: Channel) -> None:
    """Until something can be read."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.select()


def send(channel: Channel, body: bytes) -> int:
    """Queue a call; returns its number."""
    number = channel.number()
    channel.queue(number, body)
    channel.flush()
    return number


@pytest.mark.parametrize("size", [0, 1, 1000, 2**15, 2**22])
def test_a_reply_of_any_size_arrives_whole(ends: Ends, size: int) -> None:
    channel, theirs = ends
    body = os.urandom(size)
    assert send(channel, b"question") == 1
    assert theirs.recv_bytes() == HEAD.pack(1, Message.CALL) + b"question"
    assert not channel.idle
    writer = threading.Thread(target=theirs.send_bytes, args=(HEAD.pack(1, Message.RESULT) + body,))
    writer.start()
    found: list[WorkerReply] = []
    while not channel.idle:
        wait(channel)
        channel.receive()
        found += channel.replies()
    writer.join()
    assert found == [WorkerReply(1, Message.RESULT, body)]


def test_a_large_message_waits_for_room_without_blocking(ends: Ends) -> None:
    channel, theirs = ends
    body = os.urandom(2**23)
    send(channel, body)
    send(channel, b"next")
    assert channel.pending
    taken: list[bytes] = []
    reader = threading.Thread(target=lambda: taken.extend((theirs.recv_bytes(), theirs.recv_bytes())))
    reader.start()
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_WRITE)
        while not channel.flush():
            selector.select()
    reader.join()
    assert taken == [HEAD.pack(1, Message.CALL) + body, HEAD.pack(2, Message.CALL) + b"next"]
    assert not channel.pending and channel.sent == 2


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!i", -1) + bytes(20),
        struct.pack("!i", 3) + bytes(20),
        struct.pack("!i", 9) + HEAD.pack(0, 99),
        struct.pack("!i", 9) + HEAD.pack(1, Message.RESULT),
        struct.pack("!i", 9) + HEAD.pack(2**60, Message.REFUSED),
    ],
)
def test_what_is_no_message_is_an_error(ends: Ends, frame: bytes) -> None:
    channel, theirs = ends
    os.write(theirs.fileno(), frame)
    channel.receive()
    with pytest.raises(ProtocolError):
        list(channel.replies())


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=64), st.integers(0, 64))
def test_any_bytes_are_messages_or_an_error(data: bytes, cut: int) -> None:
    """Nothing is unpickled, nothing hangs, nothing is given memory for what was only announced."""
    ours, theirs = Pipe(duplex=True)
    channel = Channel(ours)
    with theirs:
        found: list[WorkerReply] = []
        try:
            for part in (data[:cut], data[cut:]):
                if part:
                    os.write(theirs.fileno(), part)
                    channel.receive()
                    found += channel.replies()
        except ProtocolError:
            pass
        assert sum(4 + HEAD.size + len(reply.body) for reply in found) <= len(data)
    channel.close()


class Interrupt(Exception):
    """As Ctrl-C raises it: between any two instructions."""


@pytest.fixture
def interrupts() -> Iterator[list[bool]]:
    """A timer raises `Interrupt` while the first item is True, as often as it can; the others count."""
    state: list[bool] = [False]

    def interrupt(number: int, frame: object) -> None:
        if state[0]:
            state[0] = False
            state.append(True)
            raise Interrupt

    gc.disable()  # else callbacks of the collector are interrupted, which nobody can catch
    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, 1e-4, 1e-4)
    yield state
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    gc.enable()


def test_interrupts_at_any_moment_lose_no_reply(ends: Ends, interrupts: list[bool]) -> None:
    for _ in range(20):  # on a busy machine the timer may not come in time
        exchange(ends, interrupts)
        if len(interrupts) > 1:
            break
    assert len(interrupts) > 1


def exchange(ends: Ends, interrupts: list[bool]) -> None:
    """Three thousand replies, and none is lost."""
    channel, theirs = ends
    first = channel.number()
    for _ in range(2999):
        channel.number()
    send(channel, b"")  # so that all numbers are known
    numbers = range(first, first + 3001)

    def answer() -> None:
        for number in numbers:
            theirs.send_bytes(HEAD.pack(number, Message.RESULT) + str(number).encode() * (number % 7))

    writer = threading.Thread(target=answer)
    writer.start()
    found: dict[int, bytes] = {}
    while len(found) < len(numbers):
        try:
            interrupts[0] = True
            for reply in channel.replies():  # first: what an interrupt left here wakes nobody up
                found[reply.number] = reply.body
            wait(channel)
            channel.receive()
        except Interrupt:
            pass
        finally:
            interrupts[0] = False
            found.update((reply.number, reply.body) for reply in channel.replies())
    writer.join()
    assert found == {n: str(n).encode() * (n % 7) for n in numbers}
