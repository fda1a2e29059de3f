"""Compressed gradients and what they leave: the same, wherever cells are evaluated and whatever becomes of evaluations;
with nodes that are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from batchopt._mapreduce.answers import Answer, Partial
from batchopt._mapreduce.compression import Compression, DoesNotFit, Rounded, TwoBit, compress
from batchopt._mapreduce.reduce import merge_answers, reduce_answers
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.ray.alignment import aligned, whole_cells
from batchopt.backends.ray.cells import CellReduce
from batchopt.backends.ray.gather import NodeGather
from batchopt.backends.ray.messages import AssignmentResult, NodeReply, NodeTask, ResidualName, WorkerTimes
from batchopt.backends.ray.node import PendingRequest
from batchopt.backends.ray.residuals import ResidualStore
from batchopt_workers.layout import Layout, Slot
from batchopt_workers.messages import ORDERS, Cut, Order
from batchopt_workers.numbering import Numbering
from batchopt_workers.tree import Node

SIZE = 11
LAYOUT = Layout((Slot("p", (SIZE,), 0),), torch.float32)


class SimulatedNode:
    """A node that answers at once."""

    def __init__(self, number: int) -> None:
        self.number, self.name, self.ranks = number, f"node {number}", (number,)
        self.residuals = ResidualStore()
        self.asked: list[list[ResidualName]] = []

    def ask_for_residuals(self, names: Sequence[ResidualName]) -> None:
        self.asked.append(list(names))


class SimulatedNodes:
    """The nodes of a cluster; `die`: the next one that is asked for residuals is lost instead of answering."""

    def __init__(self, count: int) -> None:
        self.by_number = {number: SimulatedNode(number) for number in range(count)}
        self.die = False

    @property
    def ready(self) -> list[SimulatedNode]:
        return list(self.by_number.values())

    def replace(self, number: int) -> None:
        """Another node takes the place of this one."""
        node = SimulatedNode(max(self.by_number) + 1)
        node.ranks = self.by_number.pop(number).ranks
        self.by_number[node.number] = node

    def pump(self, listener: Any, until: float) -> None:
        for node in self.ready:
            for names in node.asked:
                if self.die:
                    self.replace(node.number)
                    listener.lost(node, "died")
                else:
                    listener.heard(node, None, node.residuals.of(names))
            node.asked.clear()


class Simulation:
    """Evaluations of a batch on simulated nodes."""

    def __init__(self, compression: Compression, nodes: int) -> None:
        self.compression, self.nodes = compression, SimulatedNodes(nodes)
        self.cells = self.another()
        self.numbers = 0
        self.compressed = 0  # cells that came compressed, in the last evaluation

    def another(self) -> CellReduce:
        """The parent's part, as it begins."""
        return CellReduce(self.compression, self.nodes, LAYOUT, True)  # type: ignore[arg-type]

    def evaluate(
        self, chunks: Sequence[torch.Tensor], shares: Sequence[Sequence[ChunkRun]], taken: int, kept: int
    ) -> tuple[torch.Tensor, int]:
        """df/dX where node `i` evaluates these runs, and the number of the evaluation."""
        self.numbers += 1
        cut = Cut(tuple(range(len(chunks) + 1)))
        cells = self.cells.begin(self.numbers, len(chunks), taken, kept)
        orders = [Order(self.numbers, 1, 0, len(chunks)), *[None] * (len(self.nodes.ready) - 1)]
        gather = NodeGather(
            self.nodes.ready,  # type: ignore[arg-type]
            cut,
            orders,
            Numbering((None,), (len(chunks),)),
            {kind: {} for kind in ORDERS},
            torch.float32,
            0.0,
            cells,
        )
        for attempt, (node, runs) in enumerate(zip(self.nodes.ready, shares, strict=True)):
            if runs:
                residuals = self.cells.residuals_for(node, runs, cells)  # type: ignore[arg-type]
                node.residuals.begin(cells, residuals, torch.float32)
                partials = [
                    (Node(0, i), Partial((1.0,), chunks[i].clone(), torch.zeros(0), b"\1"))
                    for run in runs
                    for i in range(*run)
                ]
                merged = merge_answers([Answer(0, 1, 1.0, partials)], len(chunks), cells.level)
                sums = [node.residuals.message(*found, cells) for found in merged]
                times = [WorkerTimes(0, 1, 0.1, [], b"", False)]
                reply = NodeReply(AssignmentResult(attempt, sums, times, 0.1), None, [])
                pending = PendingRequest(NodeTask.EVALUATE, self.numbers, attempt)
                gather.heard(node, pending, reply)  # type: ignore[arg-type]
        answers = self.cells.finish(gather, cells, cut)
        self.compressed = len(gather.compressed)
        gradient = torch.empty(SIZE)
        assert reduce_answers(answers, len(chunks), gradient).losses == (float(len(chunks)),)
        return gradient, self.numbers


def expected(
    compression: Compression, chunks: Sequence[torch.Tensor], residuals: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The gradient of one process that holds all residuals, and what they are then."""
    cells, size = compression.cells(len(chunks)), 2 ** compression.top(len(chunks))
    left, values = dict(residuals), []
    for cell in range(cells):
        gradient = torch.stack(list(chunks[cell * size : (cell + 1) * size])).sum(0)  # exactly
        found = compress(compression, gradient, residuals.get(cell), cells)
        assert found is not None
        values.append(compression.decode(found.code, cells, SIZE, torch.float32))
        if found.residual is not None:
            left[cell] = found.residual
    partials = [(Node(0, i), Partial((1.0,), value, torch.zeros(0), b"\1")) for i, value in enumerate(values)]
    gradient = torch.empty(SIZE)
    reduce_answers([Answer(0, 1, 1.0, partials)], cells, gradient)
    return gradient, left


def some_chunks(draw: random.Random, count: int) -> list[torch.Tensor]:
    return [torch.tensor([draw.randint(-32, 32) / 64 for _ in range(SIZE)]) for _ in range(count)]


def some_shares(draw: random.Random, chunks: int, nodes: int) -> list[list[ChunkRun]]:
    """All chunks among the nodes, in few pieces; sometimes a node does some again."""
    ends = sorted(draw.choice([draw.randrange(chunks + 1), 4 * draw.randrange(chunks // 4 + 1)]) for _ in range(4))
    shares: list[list[ChunkRun]] = [[] for _ in range(nodes)]
    for first, last in zip([0, *ends], [*ends, chunks], strict=True):
        if first < last:
            shares[draw.randrange(nodes)].append(ChunkRun(first, last))
    if draw.random() < 0.3:
        first = draw.randrange(chunks)
        node = draw.randrange(nodes)
        taken = {chunk for run in shares[node] for chunk in range(*run)}
        shares[node] += [ChunkRun(i, i + 1) for i in range(first, chunks) if i not in taken]
    return shares


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("compression", [TwoBit(4, 0.5), TwoBit(8, 2.0), Rounded(3, torch.bfloat16)])
def test_bits_do_not_depend_on_who_evaluates_what(compression: Compression, seed: int) -> None:
    draw = random.Random(seed)
    simulation = Simulation(compression, 3)
    residuals: dict[int, dict[int, torch.Tensor]] = {0: {}}  # by evaluation
    taken = kept = 0
    for _ in range(40):
        chunks = some_chunks(draw, draw.choice([3, 16, 16, 16, 21]))
        gradient, number = simulation.evaluate(chunks, some_shares(draw, len(chunks), 3), taken, kept)
        wanted, residuals[number] = expected(compression, chunks, residuals[taken])
        assert torch.equal(gradient, wanted)
        what = draw.random()
        if what < 0.6:
            taken = number
        elif what < 0.7:  # a step has failed
            taken = kept
        if draw.random() < 0.5:  # a step begins
            kept = taken
        if draw.random() < 0.1:  # the workers of a node are given to another one
            simulation.cells.fetch_all()
            simulation.nodes.replace(draw.choice(list(simulation.nodes.by_number)))
        if draw.random() < 0.1:  # a checkpoint
            saved = simulation.cells.residuals_after(taken)
            assert saved.keys() == residuals[taken].keys()
            assert all(torch.equal(residual, residuals[taken][cell]) for cell, residual in saved.items())
            simulation.nodes = SimulatedNodes(3)
            simulation.cells = simulation.another()
            simulation.numbers += 1
            simulation.cells.restore(simulation.numbers, saved)
            residuals[simulation.numbers] = residuals[taken]
            taken = kept = simulation.numbers


def test_a_cell_that_moves_comes_uncompressed_once() -> None:
    simulation, draw = Simulation(TwoBit(4, 0.5), 2), random.Random(1)
    chunks = some_chunks(draw, 8)
    at_first = [[ChunkRun(0, 4)], [ChunkRun(4, 8)]]
    moved = [[ChunkRun(0, 6)], [ChunkRun(6, 8)]]
    split = [[ChunkRun(0, 5)], [ChunkRun(5, 8)]]
    taken, found = 0, []
    for shares in (at_first, at_first, moved, moved, split, split, at_first, at_first):
        _, taken = simulation.evaluate(chunks, shares, taken, taken)
        found.append(simulation.compressed)
    assert found == [4, 4, 3, 4, 3, 3, 4, 4]


def test_nodes_hold_what_is_left_of_two_evaluations_at_most() -> None:
    simulation, draw = Simulation(TwoBit(4, 0.5), 2), random.Random(1)
    taken = 0
    for _ in range(5):
        _, taken = simulation.evaluate(some_chunks(draw, 8), [[ChunkRun(0, 4)], [ChunkRun(4, 8)]], taken, taken)
    assert [len(node.residuals._held) for node in simulation.nodes.ready] == [4, 4]


def lose_between(simulation: Simulation) -> None:
    simulation.nodes.replace(1)


def lose_in_the_middle(simulation: Simulation) -> None:
    simulation.nodes.die = True


@pytest.mark.parametrize("lose", [lose_between, lose_in_the_middle])
def test_what_was_left_on_a_node_that_is_lost_counts_as_nothing(lose: Callable[[Simulation], None]) -> None:
    compression, draw = TwoBit(4, 0.5), random.Random(1)
    simulation, chunks = Simulation(compression, 2), some_chunks(draw, 8)
    _, taken = simulation.evaluate(chunks, [[ChunkRun(0, 4)], [ChunkRun(4, 8)]], 0, 0)
    _, residuals = expected(compression, chunks, {})
    lose(simulation)
    with pytest.warns(RuntimeWarning, match="with what compression had left of 2 of the cells"):
        gradient, taken = simulation.evaluate(chunks, [[ChunkRun(0, 8)], []], taken, taken)
    wanted, residuals = expected(compression, chunks, {cell: residuals[cell] for cell in (0, 1)})
    assert torch.equal(gradient, wanted)
    gradient, _ = simulation.evaluate(chunks, [[ChunkRun(0, 8)], []], taken, taken)
    assert torch.equal(gradient, expected(compression, chunks, residuals)[0])


def test_a_gradient_that_is_not_finite_leaves_what_was_left() -> None:
    compression, draw = TwoBit(4, 0.5), random.Random(1)
    simulation, chunks = Simulation(compression, 2), some_chunks(draw, 8)
    shares = [[ChunkRun(0, 4)], [ChunkRun(4, 8)]]
    _, taken = simulation.evaluate(chunks, shares, 0, 0)
    bad = [*chunks[:7], torch.full((SIZE,), torch.inf)]
    gradient, after = simulation.evaluate(bad, shares, taken, taken)
    assert gradient.isinf().all()
    assert torch.equal(simulation.cells.residuals_after(after)[3], simulation.cells.residuals_after(taken)[3])


def test_a_gradient_that_does_not_fit_names_its_samples() -> None:
    simulation = Simulation(Rounded(4, torch.float16), 2)
    chunks = [torch.zeros(SIZE) for _ in range(8)]
    chunks[5][3] = 1e6
    with pytest.raises(DoesNotFit, match=r"a gradient of 1e\+06 does not fit in fp16") as raised:
        simulation.evaluate(chunks, [[ChunkRun(0, 4)], [ChunkRun(4, 8)]], 0, 0)
    assert raised.value.samples == range(4, 6)


def test_more_nodes_than_cells_are_warned_of_once() -> None:
    simulation, draw = Simulation(Rounded(2, torch.float16), 3), random.Random(1)
    shares = [[ChunkRun(0, 3)], [ChunkRun(3, 6)], [ChunkRun(6, 8)]]
    with pytest.warns(RuntimeWarning, match=r"2 cells at most, and there are 3 nodes, .* 'parts': 3}") as found:
        for _ in range(2):
            simulation.evaluate(some_chunks(draw, 8), shares, 0, 0)
    assert len(found) == 1


# ---- whole cells for nodes


@pytest.mark.parametrize(
    ("shares", "nodes", "size", "found"),
    [
        ([13, 11], [0, 1], 4, [12, 12]),
        ([14, 10], [0, 1], 4, [16, 8]),
        ([7, 6, 6, 5], [0, 0, 1, 1], 4, [6, 6, 7, 5]),
        ([5, 6], [0, 1], 4, [4, 7]),
        ([2, 20], [0, 1], 8, [2, 20]),  # nothing would be left for the first
        ([0, 9, 3], [0, 1, 1], 4, [0, 9, 3]),
        ([12, 4], [0, 1], 8, [12, 4]),  # the second would get twice as much
        ([3, 3, 3, 3], [0, None, 0, 1], 2, [4, 4, 2, 2]),
        ([5], [0], 4, [5]),
    ],
)
def test_shares_are_moved_to_the_next_cell(
    shares: list[int], nodes: list[int | None], size: int, found: list[int]
) -> None:
    assert aligned(shares, nodes, size) == found


def test_cells_that_lie_in_several_runs() -> None:
    assert whole_cells([(0, 3), (3, 9), (12, 13)], 4, 13) == [0, 1, 3]
