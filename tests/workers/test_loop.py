from __future__ import annotations

import os
import socket
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
from batchopt_workers.map.evaluate import Program
from batchopt_workers.map.seeding import draws_kept
from batchopt_workers.map.sums import Rows, rows_nbytes
from batchopt_workers.map.weighting import Weighting
from batchopt_workers.process import loop
from batchopt_workers.process.failures import Failure, describe
from batchopt_workers.process.loop import serve
from batchopt_workers.process.messages import HEAD, Cut, Kind, Order, Report
from batchopt_workers.process.session import Session
from batchopt_workers.worker import Sample, Worker

INPUTS = torch.linspace(-1, 2, 18).sin().view(6, 3)
TARGETS = torch.linspace(0, 3, 6).cos().view(6, 1)
MEAN = Weighting("mean", 6)
CHANGES = 2 * (3 + 3 + 1)  # values and flags of the statistics of `BatchNorm1d(3)`


class Silent(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise KeyError("no text")


class Parent:
    """The parent's side of a session: a module, and the shared memory around it."""

    def __init__(self) -> None:
        self.evaluations = 0
        self.session = Session(1, 2)
        self.module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        parameters = list(self.module.parameters())
        self.layout = Layout.of(self.module.named_parameters(), torch.float32)
        x = self.share("parameters", self.layout.size * 4).tensor(torch.float32, (self.layout.size,))
        self.views = self.layout.views(x)
        with torch.no_grad():
            for view, parameter in zip(self.views, parameters, strict=True):
                view.copy_(parameter)
        self.parameters = parameters
        self.session.use_parameters(self.layout)
        self.install()

    def install(self, prehook: Any = None, posthook: Any = None) -> None:
        packed = pack(Program(self.module, nn.MSELoss(), (None,), 0, prehook, posthook), self.parameters)
        self.buffers = packed.place(self.share_copy("program", packed.nbytes))
        self.session.install(packed.data, packed.placements, {}, True)

    def share(self, name: str, nbytes: int) -> SharedBlock:
        block = SharedBlock.create(nbytes)
        self.session.attach(name, os.dup(block.fd))
        return block

    def share_copy(self, name: str, nbytes: int) -> SharedBlock:
        block = SharedBlock.create(nbytes)
        self.session.attach_copy(name, os.dup(block.fd))
        return block

    def load(self) -> None:
        packed = pack(Batch((Part(Columns(INPUTS), Columns(TARGETS), None, MEAN),)))
        self.batch = self.share_copy("batch", packed.nbytes)
        packed.place(self.batch)
        self.session.load("batch", packed.data, packed.placements)
        self.session.set_cut(Cut((0, 6)))
        block = self.share("rows", rows_nbytes(self.layout, CHANGES, 1))
        self.session.add_rows(0, 1)
        self.rows = Rows(self.layout, CHANGES, 1, block, torch.device("cpu"))

    def evaluate(self) -> Report:
        self.evaluations += 1
        with draws_kept():
            (done,) = self.session.evaluate(Order(self.evaluations, 0, 0, 1))
        return done.report()

    def plain(self) -> tuple[float, torch.Tensor]:
        """What one process computes at the shared X."""
        with torch.no_grad():
            for view, parameter in zip(self.views, self.module.parameters(), strict=True):
                parameter.copy_(view)
        loss = nn.functional.mse_loss(self.module(INPUTS), TARGETS)
        gradients = torch.autograd.grad(loss, list(self.module.parameters()))
        return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def call(name: str, *arguments: Any) -> bytes:
    pickled: bytes = cloudpickle.dumps((name, arguments))
    return HEAD.pack(5, Kind.CALL) + pickled


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


def test_an_exception_is_told_by_its_type_message_traceback_and_samples() -> None:
    failure = describe(raised(ValueError("bad sample")), range(3, 5))
    assert (failure.type_name, failure.message, failure.samples) == ("ValueError", "bad sample", range(3, 5))
    assert failure.traceback.startswith("Traceback")
    assert "in raised" in failure.traceback
    assert failure.traceback.endswith("ValueError: bad sample\n")
    assert Failure.decode(failure.encode()) == failure


def test_the_cause_of_an_exception_is_in_its_traceback() -> None:
    error = ValueError("outer")
    error.__cause__ = raised(KeyError("inner"))
    assert "KeyError: 'inner'" in describe(raised(error), range(0)).traceback


def test_an_exception_that_cannot_be_shown_is_told_all_the_same() -> None:
    failure = describe(raised(Silent()), range(0))
    assert failure.type_name == "Silent"
    assert failure.message == "<its __str__ raised KeyError>"
    assert "in raised" in failure.traceback


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_exceptions_that_end_a_program_are_told_as_well(error: BaseException) -> None:
    assert describe(raised(error), range(0)).type_name == type(error).__name__


def test_before_a_module_is_installed_there_is_none_to_evaluate() -> None:
    session = Session(0, 1)
    assert session.current == range(0)
    with pytest.raises(RuntimeError, match="no module was installed"):
        session.use_hooks(False)


def test_functions_run_with_the_worker_and_their_arguments() -> None:
    session = Session(1, 3)
    found = session.run(lambda worker, *arguments: (worker.rank, worker.world_size, worker.module, arguments), "a", 2)
    assert found == (1, 3, None, ("a", 2))


def test_a_result_that_is_larger_than_a_message_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LARGEST", 10_000)
    (reply,) = replies(Session(0, 1), call("run", lambda worker: bytes(20_000)))
    assert HEAD.unpack_from(reply) == (5, Kind.FAILED)
    failure = Failure.decode(reply[HEAD.size :])
    assert failure.type_name == "ValueError" and "are the most: return less at a time, or" in failure.message
    (reply,) = replies(Session(0, 1), call("run", lambda worker: bytes(2_000)))
    assert HEAD.unpack_from(reply) == (5, Kind.RESULT)


def test_what_precode_keeps_is_there_after_the_module_arrived() -> None:
    parent = Parent()
    worker = parent.session.worker
    assert worker.module is not parent.module
    assert isinstance(worker.module, nn.Sequential)
    assert isinstance(worker.criterion, nn.MSELoss)
    parent.session.run(lambda worker: worker.state.update(seen=worker.module))
    assert worker.state["seen"] is worker.module


def test_a_session_owns_the_descriptors_that_it_attaches() -> None:
    block = SharedBlock.create(1)
    fd = os.dup(block.fd)
    session = Session(0, 1)
    session.attach("batch", fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_the_module_is_built_around_the_shared_parameters() -> None:
    parent = Parent()
    assert parent.session.worker.module is not None
    parameters = list(parent.session.worker.module.parameters())
    for view in parent.views:
        view.fill_(7.0)
    assert all(bool((parameter == 7.0).all()) for parameter in parameters)


def test_modes_and_frozen_parameters_arrive_with_the_program() -> None:
    parent = Parent()
    first = parent.session.worker.module
    parent.module[0].eval()
    parent.module[0].bias.requires_grad_(False)
    parent.install()
    module = parent.session.worker.module
    assert module is not None and module is not first
    assert [part.training for part in module.modules()] == [True, False, True]
    assert [parameter.requires_grad for parameter in module.parameters()] == [True, False, True, True]


def test_a_program_that_comes_again_does_not_lose_hooks_that_a_worker_gave_its_module() -> None:
    parent = Parent()
    assert parent.session.worker.module is not None
    parent.session.worker.module.register_forward_hook(lambda *arguments: None)
    with pytest.raises(RuntimeError, match=r"registered on `worker\.module` in this worker"):
        parent.install()


def test_what_a_worker_writes_to_constants_and_batch_stays_in_the_worker() -> None:
    parent = Parent()
    parent.load()
    assert parent.session.evaluator.batch is not None
    (part,) = parent.session.evaluator.batch.parts
    block = parent.batch
    before = block.tensor(torch.uint8, (block.nbytes,)).clone()
    assert isinstance(part.inputs, Columns)
    part.inputs.data.fill_(7.0)
    assert torch.equal(block.tensor(torch.uint8, (block.nbytes,)), before)


def test_an_evaluation_is_that_of_one_process_and_follows_the_shared_parameters() -> None:
    parent = Parent()
    parent.load()
    for _ in range(2):
        loss, gradient = parent.plain()
        done = parent.evaluate()
        assert done.summaries[0].losses[0] == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(parent.rows[0].gradient, gradient)
        for view in parent.views:
            view.mul_(1.5)


def test_evaluations_leave_the_shared_buffers_and_a_step_starts_from_them() -> None:
    parent = Parent()
    parent.load()
    before = [buffer.clone() for buffer in parent.buffers]
    parent.evaluate()
    assert all(torch.equal(buffer, old) for buffer, old in zip(parent.buffers, before, strict=True))
    module = parent.session.worker.module
    assert module is not None
    for buffer in parent.buffers:
        buffer.fill_(5)
    assert not any(bool((buffer == 5).any()) for buffer in module.buffers())
    parent.load()
    assert all(bool((buffer == 5).all()) for buffer in module.buffers())


def test_another_batch_takes_the_place_of_the_first() -> None:
    parent = Parent()
    parent.load()
    first = parent.evaluate().summaries[0].losses[0]
    packed = pack(Batch((Part(Columns(INPUTS), Columns(TARGETS + 1), None, MEAN),)))
    packed.place(parent.share_copy("batch", packed.nbytes))
    parent.session.load("batch", packed.data, packed.placements)
    assert parent.evaluate().summaries[0].losses[0] != first


def before(worker: Worker, sample: Sample) -> None:
    worker.state.setdefault("seen", []).append("before")


def after(worker: Worker, sample: Sample) -> None:
    worker.state["seen"].append("after")


def test_hooks_arrive_with_the_program_and_run_unless_they_are_not_to() -> None:
    parent = Parent()
    parent.install(before, after)
    parent.load()
    parent.evaluate()
    parent.session.use_hooks(False)
    parent.evaluate()
    assert parent.session.worker.state["seen"] == ["before", "after"]


def refuse(worker: Worker, sample: Sample) -> None:
    raise ArithmeticError("too large")


def test_the_samples_of_a_failed_forward_are_at_hand() -> None:
    parent = Parent()
    parent.install(refuse)
    parent.load()
    with pytest.raises(ArithmeticError):
        parent.evaluate()
    assert parent.session.current == range(6)


def test_the_samples_at_hand_are_told_of_a_failed_evaluation_and_of_no_other_failure() -> None:
    parent = Parent()
    parent.install(refuse)
    parent.load()
    evaluate = HEAD.pack(7, Kind.EVALUATE) + Order(0, 0, 0, 1).encode()
    frames = replies(parent.session, evaluate, call("run", lambda worker: worker.absent), evaluate)
    assert [HEAD.unpack_from(frame) for frame in frames] == [(7, Kind.FAILED), (5, Kind.FAILED), (7, Kind.FAILED)]
    failures = [Failure.decode(frame[HEAD.size :]) for frame in frames]
    assert [failure.type_name for failure in failures] == ["ArithmeticError", "AttributeError", "ArithmeticError"]
    assert [failure.samples for failure in failures] == [range(6), range(0), range(6)]


def test_a_failure_is_survived_and_the_next_evaluation_is_answered() -> None:
    parent = Parent()
    parent.load()
    loss, _ = parent.plain()
    evaluate = HEAD.pack(9, Kind.EVALUATE) + Order(3, 0, 0, 1).encode()
    failed, done = replies(parent.session, call("no such method"), evaluate)
    assert HEAD.unpack_from(failed) == (5, Kind.FAILED)
    assert HEAD.unpack_from(done) == (9, Kind.DONE)
    assert Report.decode(done[HEAD.size :]).evaluation == 3
    assert Report.decode(done[HEAD.size :]).summaries[0].losses[0] == pytest.approx(loss, rel=1e-6)
