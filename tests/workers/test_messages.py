from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchopt.backends.process.channel import Channel, ProtocolError
from batchopt_workers.evaluate.sums import PartialSum, Report, Rows, rows_nbytes
from batchopt_workers.evaluate.tree import Node
from batchopt_workers.wire.failures import Failure
from batchopt_workers.wire.layout import Layout, Slot
from batchopt_workers.wire.memory import GrowingFile, SharedBlock
from batchopt_workers.wire.orders import Message
from batchopt_workers.wire.packets import HEAD, Received, packet
from batchopt_workers.wire.page import PAGE, Board

U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)  # what UTF-8 can say
FAILURES = st.builds(Failure, TEXT, TEXT, TEXT, st.builds(range, U64, U64))


@given(FAILURES, st.binary(min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_a_failure_comes_back_as_it_was_or_is_a_value_error(failure: Failure, more: bytes) -> None:
    frame = failure.encode()
    assert Failure.decode(frame) == failure
    for wrong in (*(frame[:length] for length in range(len(frame))), frame + more):
        with pytest.raises(ValueError, match="frame"):
            Failure.decode(wrong)


@given(st.binary(max_size=80))
@settings(deadline=None, max_examples=200)
def test_any_bytes_are_a_failure_or_a_value_error(frame: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(Failure.decode(frame), Failure)


# ---- what comes through the pipe: nothing is unpickled, nothing is given memory for what is announced


@pytest.fixture
def pipe() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    with theirs:
        yield channel, theirs
    channel.close()


def arrived(channel: Channel) -> list[Received]:
    channel.receive()
    return [*channel.packets()]


@given(st.binary(min_size=1, max_size=64))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_packet_or_an_error(pipe: tuple[Channel, socket.socket], data: bytes) -> None:
    channel, theirs = pipe
    theirs.send(data)
    try:
        (found,) = arrived(channel)
        assert HEAD.pack(found.number, found.kind, False) + found.body == data[:9] + b"\0" + data[10:]
        assert found.kind in set(Message) and not data[9]
    except ProtocolError:
        channel._incoming.clear()  # such a worker is replaced
        assert len(data) < HEAD.size or data[8] not in set(Message) or data[9]


@pytest.mark.parametrize("nbytes", [0, 2**14, 2**14 + 1])
def test_packets_of_any_length_arrive_with_their_descriptors(pipe: tuple[Channel, socket.socket], nbytes: int) -> None:
    (channel, theirs), body, file = pipe, os.urandom(nbytes), GrowingFile()
    before = len(os.listdir("/proc/self/fd"))
    file.write(memoryview(b"also"), 0)
    for files in ((), (file,)):
        sent = packet(7, Message.RESULT, body, *files)
        theirs.sendmsg((sent.data,), sent.rights)
        (found,) = arrived(channel)
        assert (found.number, found.kind, found.body) == (7, Message.RESULT, body)
        assert len(found.others) == len(files)
        for descriptor in found.others:
            assert os.pread(descriptor, 9, 0) == b"also"
            os.close(descriptor)
    del sent
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_packet_whose_handling_was_interrupted_is_handled_again(pipe: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pipe
    sent = packet(7, Message.RESULT, bytes(100_000))
    for _ in range(2):
        theirs.sendmsg((sent.data,), sent.rights)
    channel.receive()
    packets = channel.packets()
    first = next(packets)
    packets.close()
    assert channel.unread
    assert [first, first] == [found._replace(file=first.file) for found in channel.packets()] and not channel.unread


def test_without_a_free_descriptor_a_large_packet_is_an_error(pipe: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pipe
    sent = packet(7, Message.RESULT, bytes(100_000))
    theirs.sendmsg((sent.data,), sent.rights)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        fill = []
        with suppress(OSError):
            while True:
                fill.append(os.dup(0))
        channel.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in fill:
            os.close(descriptor)
    with pytest.raises(ProtocolError, match="may open no more files"):
        next(channel.packets())


# ---- the page of a worker: what each side writes, the other one reads, whenever it looks


LAYOUT = Layout((Slot("a", (2,), 0), Slot("b", (1,), 2)), torch.float32)
TERMS, ROWS = 2, 5


def rows() -> Rows:
    return Rows(LAYOUT, 0, ROWS, SharedBlock.create(rows_nbytes(LAYOUT, 0, ROWS, TERMS)), terms=TERMS)


def report(chunk: int, row: int = 0) -> Report:
    return Report(chunk, 1.0, 2.0, False, [(Node(0, chunk), PartialSum(row, (float(chunk),) * TERMS, b"\1\1"))])


def test_a_death_in_the_middle_of_a_report_leaves_the_one_before() -> None:
    board, memory = Board.create(1), rows()
    page = board.page(0)
    page.report(report(1), 0, False, memory)
    before = bytes(board.block.memory.data)
    page.report(report(2, row=1), 0, False, memory)
    after = bytes(board.block.memory.data)
    changed = [i for i in range(0, 8 * 2 * PAGE, 8) if before[i : i + 8] != after[i : i + 8]]
    board.block.memory.data[:] = before
    for i in changed[1:]:  # the number of reports, which is the first on the page, is written last
        board.block.memory.data[i : i + 8] = after[i : i + 8]
        assert page.read(memory)[0] == report(1)


def test_a_reader_that_is_overtaken_reads_again() -> None:
    board, memory = Board.create(1), rows()
    page, over = board.page(0), threading.Event()

    def write() -> None:
        chunk = 0
        while not over.is_set():
            chunk += 1
            page.report(report(chunk, row=chunk % ROWS), 0, False, memory)

    page.report(report(0), 0, False, memory)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2000):
            found, _ = board.page(0).read(None)
            ((node, partial),) = found.partials
            assert node == (0, found.next) and partial.row == found.next % ROWS
    finally:
        over.set()
        writer.join()


@given(st.lists(st.tuples(st.integers(0, PAGE - 1), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=200)
def test_a_damaged_page_is_a_report_or_a_value_error(changes: list[tuple[int, int]]) -> None:
    board, memory = Board.create(1), rows()
    page = board.page(0)
    page.report(report(1), 0, False, memory)
    for at, number in changes:
        page.ints[at] = number
    with suppress(ValueError):
        found, _ = page.read(memory)
        assert all(0 <= partial.row < ROWS for _, partial in found.partials)
