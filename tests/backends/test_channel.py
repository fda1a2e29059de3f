"""The channel files every reply once, however it is cut up and however often one looks."""

from __future__ import annotations

import os
import selectors
import signal
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from batchopt.backends.channel import Channel
from batchopt_workers.messages import HEAD, Kind

Ends = tuple[Channel, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a pipe, in this process."""
    ours, theirs = Pipe(duplex=True)
    channel = Channel(ours)
    with theirs:
        yield channel, theirs
    channel.close()


@pytest.mark.parametrize("size", [0, 1, 1000, 2**15 - 14, 2**15, 2**22])
def test_a_reply_of_any_size_arrives_whole(ends: Ends, size: int) -> None:
    channel, theirs = ends
    body = os.urandom(size)
    channel.send(Kind.CALL, b"question")
    assert theirs.recv_bytes() == HEAD.pack(1, Kind.CALL) + b"question"
    assert not channel.answered
    writer = threading.Thread(target=theirs.send_bytes, args=(HEAD.pack(1, Kind.RESULT) + body,))
    writer.start()
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while not channel.answered:
            selector.select()
            channel.receive()
    writer.join()
    assert channel.replies == {(1, Kind.RESULT): body}


def test_the_results_of_hooks_come_before_the_answer(ends: Ends) -> None:
    channel, theirs = ends
    channel.send(Kind.EVALUATE, b"")
    for kind, body in ((Kind.HOOKED, b"hooked"), (Kind.DONE, b"done")):
        theirs.send_bytes(HEAD.pack(1, kind) + body)
        assert not channel.answered
        channel.receive()
    assert channel.answered
    assert channel.replies == {(1, Kind.HOOKED): b"hooked", (1, Kind.DONE): b"done"}


def test_an_end_of_file_is_an_error(ends: Ends) -> None:
    channel, theirs = ends
    theirs.close()
    with pytest.raises(EOFError):
        channel.receive()
    with pytest.raises(OSError):
        channel.send(Kind.CALL, b"")
        channel.send(Kind.CALL, b"")


def test_interrupts_at_any_moment_lose_and_double_nothing(ends: Ends) -> None:
    """A timer interrupts as often as it can while replies come; each is filed under its number, with its own body."""

    class Interrupt(Exception):
        pass

    armed = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupt

    channel, theirs = ends
    rounds, interrupts = 3000, 0

    def answer() -> None:
        for number in range(1, rounds + 1):
            theirs.send_bytes(HEAD.pack(number, Kind.RESULT) + str(number).encode())

    writer = threading.Thread(target=answer)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        writer.start()
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        while True:
            try:
                armed = True
                while (rounds, Kind.RESULT) not in channel.replies:
                    channel.receive()
                armed = False
                break
            except Interrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    writer.join()
    assert channel.replies == {(n, Kind.RESULT): str(n).encode() for n in range(1, rounds + 1)}
    assert interrupts > 0 and not channel.broken
