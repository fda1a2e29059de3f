"""A worker's side of the pipe: a session, and what it says to the messages of a parent."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import threading
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from batchopt_workers.data.batch import Batch, Columns, Part
from batchopt_workers.data.layout import Layout
from batchopt_workers.data.memory import SharedBlock
from batchopt_workers.data.packing import pack
from batchopt_workers.map.program import Program
from batchopt_workers.map.seeding import draws_kept
from batchopt_workers.map.sums import rows_nbytes
from batchopt_workers.map.weighting import Weighting
from batchopt_workers.process import loop
from batchopt_workers.process.failures import Failure, describe
from batchopt_workers.process.loop import dumps, serve
from batchopt_workers.process.messages import HEAD, Cut, Message, Order, Start
from batchopt_workers.process.page import DONE, Board
from batchopt_workers.process.session import Session
from batchopt_workers.worker import Sample, Worker

CHANGES = 2 * (3 + 3 + 1)  # values and flags of the statistics of `BatchNorm1d(3)`


def shared(nbytes: int) -> int:
    """A descriptor of so much memory."""
    block = SharedBlock.create(nbytes)
    return os.dup(block.fd)


class Parent:
    """The parent's side of a session: a module, and the shared memory around it."""

    def __init__(self, prehook: Any = None) -> None:
        self.session, self.prehook = Session(1, 2), prehook
        self.module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.layout = Layout.of(self.module.named_parameters(), torch.float32)
        self.session.attach("parameters", shared(self.layout.size * 4))
        self.session.use_parameters(self.layout)
        self.install()

    def install(self) -> None:
        program = Program(self.module, nn.MSELoss(), (None,), 0, self.prehook)
        packed = pack(program, list(self.module.parameters()))
        packed.place(self.share_copy("program", packed.nbytes))
        self.session.install(packed.data, packed.placements, {}, True)

    def share_copy(self, name: str, nbytes: int) -> SharedBlock:
        block = SharedBlock.create(nbytes)
        self.session.attach_copy(name, os.dup(block.fd))
        return block

    def load(self) -> SharedBlock:
        part = Part(Columns(torch.ones(6, 3)), Columns(torch.ones(6, 1)), None, Weighting("mean", 6))
        packed = pack(Batch((part,)))
        block = self.share_copy("batch_0", packed.nbytes)
        packed.place(block)
        self.session.load("batch_0", packed.data, packed.placements)
        self.session.set_cut(Cut((0, 6)))
        self.session.attach("rows", shared(rows_nbytes(self.layout, CHANGES, 1, 1)))
        self.session.add_rows(0, 1, 1)
        return block


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def call(name: str, *arguments: Any) -> bytes:
    pickled: bytes = cloudpickle.dumps((name, arguments))
    return HEAD.pack(5, Message.CALL) + pickled


def replies(session: Session, *messages: bytes) -> list[bytes]:
    """What `serve` answers to the messages of a parent that then hangs up."""
    ours, theirs = Pipe()
    with ours, theirs, draws_kept():
        for message in messages:
            ours.send_bytes(message)
        with socket.socket(fileno=os.dup(ours.fileno())) as end:
            end.shutdown(socket.SHUT_WR)
        serve(theirs, session)
        theirs.close()
        found = []
        with suppress(EOFError):
            while True:
                found.append(ours.recv_bytes())
        return found


def test_an_exception_is_told_by_its_type_message_traceback_cause_and_samples() -> None:
    error = ValueError("bad sample")
    error.__cause__ = raised(KeyError("inner"))
    failure = describe(raised(error), range(3, 5))
    assert (failure.type_name, failure.message, failure.samples) == ("ValueError", "bad sample", range(3, 5))
    assert failure.traceback.startswith("Traceback")
    assert "in raised" in failure.traceback and "KeyError: 'inner'" in failure.traceback
    assert failure.traceback.endswith("ValueError: bad sample\n")
    assert Failure.decode(failure.encode()) == failure


def test_a_result_that_is_larger_than_a_message_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LARGEST", 10_000)
    (reply,) = replies(Session(0, 1), call("run", lambda worker: bytes(20_000)))
    assert HEAD.unpack_from(reply) == (5, Message.REFUSED)
    failure = Failure.decode(reply[HEAD.size :])
    assert failure.type_name == "ValueError" and "the limit is 0.0 GB: return less at a time, or" in failure.message
    (reply,) = replies(Session(0, 1), call("run", lambda worker: bytes(2_000)))
    assert HEAD.unpack_from(reply) == (5, Message.RESULT)


def test_a_session_owns_the_descriptors_that_it_attaches_and_has_no_module_at_first() -> None:
    fd = shared(1)
    session = Session(0, 1)
    session.attach("batch", fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert session.current == range(0)
    with pytest.raises(RuntimeError, match="no module was installed"):
        session.use_hooks(False)


def test_what_a_worker_writes_to_constants_and_batch_stays_in_the_worker() -> None:
    parent = Parent()
    block = parent.load()
    (_,) = parent.session.evaluate(Order(0, 0, 0, 1), Start(0, 1))
    (part,) = parent.session.evaluator.loaded.batch.parts
    before = block.tensor(torch.uint8, (block.nbytes,)).clone()
    assert isinstance(part.inputs, Columns)
    part.inputs.data.fill_(7.0)
    assert torch.equal(block.tensor(torch.uint8, (block.nbytes,)), before)


def refuse(worker: Worker, sample: Sample) -> None:
    raise ArithmeticError("too large")


def test_the_samples_at_hand_are_told_of_a_failed_evaluation_and_of_no_other_failure() -> None:
    parent = Parent(refuse)
    parent.load()
    board = Board.create(2)
    parent.session.attach("board", os.dup(board.block.fd))
    parent.session.take_page(1, 2, os.eventfd(0))
    page, ring = board.page(1), HEAD.pack(0, Message.RING)
    page.write(7, Order(0, 0, 0, 1), Start(0, 1))
    frames = replies(parent.session, ring, ring, call("no such method"))
    assert page.ints[DONE] == 7
    assert [HEAD.unpack_from(frame) for frame in frames] == [(7, Message.FAILED), (5, Message.REFUSED)]
    failures = [Failure.decode(frame[HEAD.size :]) for frame in frames]
    assert [failure.type_name for failure in failures] == ["ArithmeticError", "AttributeError"]
    assert [failure.samples for failure in failures] == [range(6), range(0)]


# ---- what functions return is pickled with its tensors as bytes, and comes back as it was


def back(result: Any) -> Any:
    return pickle.loads(dumps(result))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(0, 3, dtype=torch.int16),
        torch.tensor(True),
        torch.arange(8.0)[::2],
        torch.arange(3.0).expand(2, 3),
        torch.arange(3.0).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.ones(2, device="meta"),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype} {tensor.layout}",
)
def test_results_are_pickled_with_tensors_of_any_kind(tensor: torch.Tensor) -> None:
    found = back({"it": tensor, "again": tensor})
    assert found["it"] is found["again"]
    assert type(found["it"]) is type(tensor) and found["it"].requires_grad == tensor.requires_grad
    assert found["it"].dtype == tensor.dtype and found["it"].shape == tensor.shape
    if tensor.device.type != "meta":
        assert torch.equal(found["it"].detach().to_dense(), tensor.detach().to_dense())
        if tensor.is_contiguous():
            found["it"].detach().fill_(True)  # its own memory, to be written


def test_results_leave_nothing_for_the_collector() -> None:
    gc.collect()
    gc.disable()
    for _ in range(10):
        back([torch.zeros(3) for _ in range(10)])
    left = gc.collect()
    gc.enable()
    assert left == 0


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TypeError, match=r"returned an object that cannot be sent \(TypeError: cannot pickle .*lock"):
        dumps([threading.Lock()])
