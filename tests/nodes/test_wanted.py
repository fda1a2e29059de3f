"""What a node is sent: what it lacks, in order, and again what depends on it; and the states of a node."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from batchopt.backends.nodes.placing import Placed
from batchopt.backends.nodes.roster import TRANSITIONS, Member, State
from batchopt.backends.nodes.transfer import ProgramVersion, SentRows
from batchopt.backends.nodes.wanted import NodeMode, NodeSetup, StepStart, TaskStart, Wanted, World, lacking
from batchopt_workers.data.packing import pack
from batchopt_workers.process.messages import Cut
from batchopt_workers.process.torch_settings import TorchSettings
from tests.nodes.test_transfer import batch_of


def version(*values: float, data: bytes = b"program") -> ProgramVersion:
    """A program with a tensor for each value."""
    tensors = tuple(torch.tensor([value]) for value in values)
    return ProgramVersion(data, (), tuple(str(value).encode() for value in values), tensors)


BATCH = batch_of(torch.randn(1000, 3))
DATA = b"program"
START = TaskStart(pack("task"), False)
WANT = Wanted(
    NodeSetup(cast(object, None), b"", False, None, 4, 1, None, None),  # type: ignore[arg-type]
    World(range(2), 4),
    TorchSettings.current(),
    version(1.0, 2.0, data=DATA),
    (),
    NodeMode(),
    SentRows.of(BATCH, range(10)),
    StepStart((1.0,)),
    Cut((0, 100)),
    None,
    START,
    Cut((0, 100)),
)


def sent(have: Wanted, want: Wanted) -> list[str]:
    return [name for name, _ in lacking(have, want)]


def test_a_new_node_is_sent_everything_in_order_and_then_nothing() -> None:
    assert sent(Wanted(), WANT) == [name for name in Wanted._fields if name != "task_rows"]
    assert sent(WANT, WANT) == []


def test_of_a_program_and_of_rows_only_what_is_new_is_sent_and_what_depends_on_it_again() -> None:
    changed = WANT._replace(program=version(1.0, 3.0, data=DATA))
    assert sent(WANT, changed) == ["program", "step", "task"]
    update = dict(lacking(WANT, changed))["program"]
    assert update.data is None and list(update.elements) == [1]
    assert dict(lacking(WANT, WANT._replace(program=version(1.0, data=b"other"))))["program"].data == b"other"
    more = WANT._replace(rows=SentRows.of(BATCH, range(5, 400), WANT.rows))
    assert sent(WANT, more) == ["rows", "step", "task"] and dict(lacking(WANT, more))["rows"].is_more
    assert sent(WANT, WANT._replace(step=StepStart((1.0,)))) == ["step", "task"]
    assert sent(WANT, WANT._replace(task=None)) == ["task"]
    assert sent(WANT._replace(task=None), WANT._replace(task=None, step=StepStart((1.0,)))) == ["step"]


def test_what_a_node_has_is_forgotten_but_for_workers_that_work() -> None:
    member = Member(0, cast(Placed, None), range(2))
    for event, state in (("reports", State.REPORTED), ("joins", State.JOINED), ("has started", State.WORKING)):
        member.on(event)
        member.have = WANT
        member.forget()
        assert member.state is state and member.have == Wanted(setup=WANT.setup if state is State.WORKING else None)
    with pytest.raises(KeyError):
        member.on("joins")
    member.on("ends")
    assert not any((State.ENDED, event) in TRANSITIONS for _, event in TRANSITIONS)
