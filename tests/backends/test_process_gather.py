"""One evaluation by processes, as far as it has come."""

from __future__ import annotations

from batchopt._mapreduce.reduce import merge_answers
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.process.gather import ProcessGather
from batchopt_workers.messages import Cut, Kind, Order
from batchopt_workers.numbering import Numbering


def test_an_evaluation_of_which_all_was_given_up_has_no_answers() -> None:
    """As where all workers have died, and another machine has taken their last chunks."""
    gather = ProcessGather(
        Cut((0, 4, 8)), Numbering((None,), (8,)), [Order(1, 1, 0, 1), Order(1, 1, 1, 2)], {Kind.EVALUATE: {}}
    )
    assert gather.scheduler.release() == ([ChunkRun(0, 1), ChunkRun(1, 2)], [])
    assert not gather.scheduler.missing
    assert gather.answers() == []
    assert merge_answers(gather.answers(), 2) == []
