"""Orders of tasks, carried out chunk by chunk in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchopt_workers.data.batch import Batch, Columns, Part, Samples
from batchopt_workers.map.buffers import StepBuffers
from batchopt_workers.map.evaluate import Evaluator, Program
from batchopt_workers.map.weighting import Weighting
from batchopt_workers.process.messages import Cut, Kind, Order
from batchopt_workers.tasks.forms import MemoryOutput
from batchopt_workers.tasks.task import Applied, Task
from batchopt_workers.worker import Worker

SIZE = 12
X = torch.linspace(-1, 2, SIZE * 3).sin().view(SIZE, 3)


class Bench:
    """A runner, with a module that has running statistics."""

    def __init__(self, bounds: tuple[int, ...] = (0, SIZE), data: Any = None) -> None:
        self.module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        program, worker = Program(self.module, None, (None,), 0), Worker(0, 1, torch.device("cpu"), self.module, None)
        evaluator = Evaluator(program, worker, list(self.module.parameters()), StepBuffers(self.module))
        self.evaluator, self.bounds, self.evaluations = evaluator, bounds, 0
        self.tasks = evaluator.tasks
        part = Part(Columns(X) if data is None else Samples(data), None, None, Weighting("mean", SIZE))
        self.batch = Batch((part,))

    def run(self, kind: Kind, function: Any, *runs: tuple[int, int], **options: Any) -> Any:
        """What is collected, or summed, if these runs of chunks are ordered one after the other."""
        self.tasks.begin(Task(Applied(function), aside=True, **options), self.batch)
        self.tasks.output = output = MemoryOutput()
        self.tasks.loaded.cut = Cut(self.bounds)
        self.evaluations += 1
        for first, last in runs or [(0, len(self.bounds) - 1)]:
            for done in self.tasks.evaluate(Order(self.evaluations, 0, first, last, kind), self.evaluator):
                report, form = done.report(), done.form
        if kind is Kind.COLLECT:
            assert form is not None
            return form.filled(output.tensors)
        (summary,) = report.summaries
        assert self.tasks._rows is not None
        return self.tasks._rows[summary.row].views


def plain(module: nn.Module, inputs: torch.Tensor, targets: None) -> torch.Tensor:
    return inputs * 2


@given(st.sets(st.integers(1, SIZE - 1), max_size=6), st.randoms())
def test_runs_in_any_order_make_the_same_rows_and_the_same_sum(cuts: set[int], random: Any) -> None:
    bounds = (0, *sorted(cuts), SIZE)
    runs = [(chunk, chunk + 1) for chunk in range(len(bounds) - 1)]
    in_order = Bench(bounds).run(Kind.TOTAL, lambda m, inputs, targets: (inputs.sum(0), inputs[0, 0] > 0))
    random.shuffle(runs)
    assert torch.equal(Bench(bounds).run(Kind.COLLECT, plain, *runs), 2 * X)
    shuffled = Bench(bounds).run(Kind.TOTAL, lambda m, inputs, targets: (inputs.sum(0), inputs[0, 0] > 0), *runs)
    assert all(map(torch.equal, in_order, shuffled))
    torch.testing.assert_close(in_order[0], X.double().sum(0), rtol=1e-5, atol=1e-5)  # chunks are summed in X's dtype


def test_samples_of_a_list_are_summed_within_their_chunk() -> None:
    bench = Bench((0, 5, SIZE), data=list(X))
    torch.testing.assert_close(bench.run(Kind.TOTAL, lambda m, inputs, targets: inputs)[0], X.sum(0))


def test_state_modes_and_gradients_are_as_before() -> None:
    bench = Bench((0, 6, SIZE))
    before = {name: value.clone() for name, value in bench.module.state_dict().items()}
    weight = bench.module.get_parameter("1.weight")
    weight.grad = torch.ones(2, 3)

    def steps(module: nn.Module, inputs: torch.Tensor, targets: None) -> torch.Tensor:
        with torch.enable_grad():
            module(inputs).sum().backward()
        return inputs

    for train in (None, True):
        assert torch.equal(bench.run(Kind.COLLECT, steps, train=train), X)
    for name, value in bench.module.state_dict().items():
        assert torch.equal(value, before[name])
    assert weight.grad.eq(1).all() and bench.module.get_parameter("1.bias").grad is None and bench.module.training


def test_a_sum_of_another_form_is_refused_and_the_next_evaluation_is_its_own() -> None:
    bench = Bench((0, 5, SIZE))
    with pytest.raises(ValueError, match=r"returned `result` \(7,\) .* here, and `result` \(5,\) .* for other samples"):
        bench.run(Kind.TOTAL, lambda m, inputs, targets: inputs[:, 0])
    torch.testing.assert_close(bench.run(Kind.TOTAL, lambda m, inputs, targets: inputs.sum(0))[0], X.sum(0))


def test_nothing_is_held_after_the_end() -> None:
    bench = Bench()
    bench.run(Kind.TOTAL, plain)
    bench.tasks.end()
    with pytest.raises(RuntimeError, match="no task was begun"):
        _ = bench.tasks.loaded
