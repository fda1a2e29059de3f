from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from batchopt_workers.data.batch import Batch, Columns, Part, Samples
from batchopt_workers.data.items import Collate
from batchopt_workers.data.layout import Layout
from batchopt_workers.map import sums
from batchopt_workers.map.buffers import StepBuffers
from batchopt_workers.map.evaluate import Evaluator, Program
from batchopt_workers.map.seeding import draws_kept
from batchopt_workers.map.sums import Rows
from batchopt_workers.map.tree import Fold, Node
from batchopt_workers.map.weighting import Weighting
from batchopt_workers.process.messages import Cut, Kind, Order, Report
from batchopt_workers.worker import Sample, Worker

CPU = torch.device("cpu")
SIZE = 12
INPUTS = torch.linspace(-1, 2, SIZE * 3, dtype=torch.float64).sin().view(SIZE, 3)
TARGETS = torch.linspace(0, 3, SIZE * 2, dtype=torch.float64).cos().view(SIZE, 2)
CLASS_WEIGHTS = {0: 0.3, 1: 2.1}
IGNORED = -100


def network(*, dropout: bool = False, norm: bool = False) -> nn.Module:
    with draws_kept():
        torch.manual_seed(0)
        middle: list[nn.Module] = [nn.Dropout(0.4)] if dropout else []
        middle += [nn.BatchNorm1d(5)] if norm else []
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), *middle, nn.Linear(5, 2)).double()


class Bench:
    """An evaluator in this process, and rows to sum in."""

    def __init__(
        self, module: nn.Module, criterion: Any = None, loss_fn: Any = None, rows: int = 5, seed: int = 0
    ) -> None:
        self.module = module
        self.evaluations = 0
        self.parameters = list(module.parameters())
        buffers = StepBuffers(module)
        worker = Worker(0, 1, CPU, module, criterion)
        self.evaluator = Evaluator(Program(module, criterion, (loss_fn,), seed), worker, self.parameters, buffers)
        self.layout = Layout.of(module.named_parameters(), next(module.parameters()).dtype)
        self.rows = Rows(self.layout, buffers.size, rows, None, CPU)
        for row in (self.rows[i] for i in range(rows)):
            row.gradient.fill_(torch.nan)
            row.changes.fill_(torch.nan)

    def load(
        self,
        inputs: Any = INPUTS,
        targets: Any = TARGETS,
        bounds: tuple[int, ...] = (0, SIZE),
        mean: bool = True,
        running: torch.Tensor | None = None,
        collate: Collate | None = None,
    ) -> None:
        data = [Samples(x) if isinstance(x, list) else Columns(x) for x in (inputs, targets)]
        weighting = Weighting("mean" if mean else "sum", bounds[-1], running)
        part = Part(data[0], None if targets is None else data[1], None, weighting, collate)
        self.evaluator.batch = Batch((part,))
        self.evaluator.cut = Cut(bounds)

    def evaluate(self, first: int = 0, last: int | None = None, step: int = 0) -> Report:
        """What there is at the end."""
        return self.reports(first, last, step)[-1][0]

    def reports(self, first: int = 0, last: int | None = None, step: int = 0) -> list[tuple[Report, list[Any]]]:
        """After each chunk, in an evaluation of its own."""
        self.evaluations += 1
        order = Order(self.evaluations, step, first, self.evaluator.cut.chunks if last is None else last)
        with draws_kept():
            return [(done.report(), [*done.results]) for done in self.evaluator.evaluate(order, self.rows)]

    def gradient(self, done: Report) -> torch.Tensor:
        """Of an evaluation of every chunk."""
        return self.rows[done.summaries[0].row].gradient


def plain(
    module: nn.Module, criterion: Any, inputs: Any = INPUTS, targets: Any = TARGETS
) -> tuple[float, torch.Tensor]:
    """What one process computes on the whole batch."""
    loss = criterion(module(inputs), targets)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def weighted_cross_entropy() -> nn.CrossEntropyLoss:
    weight = torch.tensor(list(CLASS_WEIGHTS.values()), dtype=torch.float64)
    return nn.CrossEntropyLoss(weight, ignore_index=IGNORED)


def any_counts(classes: list[int]) -> bool:
    return any(number != IGNORED for number in classes)


def running_sum(denominators: list[float]) -> torch.Tensor:
    return torch.tensor([0.0, *denominators], dtype=torch.float64).cumsum(0)


@st.composite
def bounds_of(draw: st.DrawFn) -> tuple[int, ...]:
    inner = draw(st.sets(st.integers(1, SIZE - 1)))
    return (0, *sorted(inner), SIZE)


@given(bounds_of(), st.booleans())
@settings(deadline=None, max_examples=40)
def test_every_cut_gives_the_loss_and_gradient_of_one_process(bounds: tuple[int, ...], mean: bool) -> None:
    module, criterion = network(), nn.MSELoss(reduction="mean" if mean else "sum")
    bench = Bench(module, criterion)
    bench.load(bounds=bounds, mean=mean)
    done = bench.evaluate()
    (summary,) = done.summaries
    loss, gradient = plain(module, criterion)
    assert (done.evaluation, done.next) == (bench.evaluations, len(bounds) - 1)
    assert done.seconds > 0
    assert summary.losses[0] == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(bench.gradient(done), gradient, rtol=1e-12, atol=1e-15)
    assert summary.used == b"\1" * len(bench.parameters)


@pytest.mark.slow
@given(bounds_of(), st.data())
@settings(deadline=None, max_examples=40)
def test_two_workers_give_the_bits_of_one(bounds: tuple[int, ...], data: st.DataObject) -> None:
    module, criterion = network(dropout=True, norm=True), nn.MSELoss()
    bench, chunks = Bench(module, criterion, rows=8), len(bounds) - 1
    inputs, targets = (torch.cat([tensor, tensor]) for tensor in (INPUTS, TARGETS))
    bench.load(inputs, targets, tuple(2 * bound for bound in bounds))  # batch norm wants two samples
    border = data.draw(st.integers(0, chunks))

    def add(left: list[Any], right: list[Any]) -> list[Any]:
        return [one + other for one, other in zip(left, right, strict=True)]

    fold: Fold[list[Any]] = Fold(chunks, add)
    for first, last in ((border, chunks), (0, border)):
        for summary in bench.evaluate(first, last).summaries if first < last else ():
            row = bench.rows[summary.row]
            fold.add(summary.node, [summary.losses[0], row.gradient.clone(), row.changes.clone()])
    done = bench.evaluate()
    assert fold.root[0] == done.summaries[0].losses[0]
    assert torch.equal(fold.root[1], bench.gradient(done))
    assert torch.equal(fold.root[2], bench.rows[done.summaries[0].row].changes)


def test_a_chunk_that_counts_nothing_adds_nothing_even_if_its_loss_is_no_number() -> None:
    module, criterion = network(), nn.MSELoss()
    bench = Bench(module, criterion)
    inputs, targets = torch.cat([INPUTS, torch.full((2, 3), torch.nan)]), torch.cat([TARGETS, TARGETS[:2]])
    bench.load(inputs, targets, (0, SIZE, 14), running=running_sum([1.0] * SIZE + [0.0] * 2))
    done = bench.evaluate()
    loss, gradient = plain(module, criterion)
    assert done.summaries[0].losses[0] == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(bench.gradient(done), gradient, rtol=1e-12, atol=1e-15)


def test_an_empty_order_has_nothing_to_report() -> None:
    bench = Bench(network(), nn.MSELoss())
    bench.load(bounds=(0, 4, 12))
    assert bench.reports(1, 1) == []


def test_what_was_reported_is_not_written_until_the_next_report() -> None:
    bench = Bench(network(), nn.MSELoss(), rows=4)
    bench.load(INPUTS[:8], TARGETS[:8], bounds=tuple(range(9)))
    with draws_kept():
        reports = bench.evaluator.evaluate(Order(1, 0, 0, 8), bench.rows)
        before = next(reports).report()
        for _ in range(7):
            kept = {summary.row: bench.rows[summary.row].gradient.clone() for summary in before.summaries}
            after = next(reports).report()  # by now the next chunk was evaluated and merged
            for row, gradient in kept.items():
                assert torch.equal(bench.rows[row].gradient, gradient)
            assert after.next == before.next + 1
            before = after


def test_several_orders_of_one_evaluation_merge_whatever_their_order() -> None:
    bench = Bench(network(), nn.MSELoss(), rows=5)
    bench.load(INPUTS[:8], TARGETS[:8], bounds=tuple(range(9)))
    whole = bench.evaluate()
    gradient = bench.gradient(whole).clone()
    with draws_kept():
        for first, last in ((5, 8), (0, 2), (4, 5), (2, 4)):
            *_, done = bench.evaluator.evaluate(Order(99, 0, first, last), bench.rows)
            report = done.report()
    assert [summary.node for summary in report.summaries] == [Node(3, 0)]
    assert report.summaries[0].losses[0] == whole.summaries[0].losses[0]
    assert torch.equal(bench.gradient(report), gradient)


def test_chunks_in_order_need_few_rows() -> None:
    bench = Bench(network(), nn.MSELoss(), rows=4)
    bench.load(INPUTS[:8], TARGETS[:8], bounds=tuple(range(9)))
    loss, gradient = plain(bench.module, nn.MSELoss(), INPUTS[:8], TARGETS[:8])
    done = bench.evaluate()
    assert [summary.node for summary in done.summaries] == [Node(3, 0)]
    assert done.summaries[0].losses[0] == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(bench.gradient(done), gradient, rtol=1e-12, atol=1e-15)


def test_some_chunks_are_the_largest_subtrees_that_they_fill() -> None:
    bench = Bench(network(), nn.MSELoss())
    bench.load(bounds=tuple(range(SIZE + 1)))
    summaries = bench.evaluate(1, 7).summaries
    assert [summary.node for summary in summaries] == [Node(0, 1), Node(1, 1), Node(1, 2), Node(0, 6)]
    for summary in summaries:
        first = summary.node.first_chunk
        part = slice(first, first + 2**summary.node.level)
        loss, gradient = plain(bench.module, nn.MSELoss(), INPUTS[part], TARGETS[part])
        share = 2**summary.node.level / SIZE
        assert summary.losses[0] == pytest.approx(loss * share, rel=1e-13)
        torch.testing.assert_close(bench.rows[summary.row].gradient, gradient * share, rtol=1e-12, atol=1e-15)


def test_the_mean_over_a_list_is_that_of_its_samples() -> None:
    module, criterion = network(), nn.MSELoss()
    bench = Bench(module, criterion)
    bench.load(list(INPUTS), list(TARGETS), bounds=(0, 5, 12))
    done = bench.evaluate()
    loss, gradient = plain(module, criterion)
    assert done.summaries[0].losses[0] == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(bench.gradient(done), gradient, rtol=1e-12, atol=1e-15)


def test_the_sum_over_a_list_is_that_of_its_samples() -> None:
    module, criterion = network(), nn.MSELoss(reduction="sum")
    bench = Bench(module, criterion)
    bench.load(list(INPUTS), list(TARGETS), bounds=(0, 5, 12), mean=False)
    done = bench.evaluate()
    loss, gradient = plain(module, criterion)
    assert done.summaries[0].losses[0] == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(bench.gradient(done), gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
@given(
    bounds_of(), st.lists(st.sampled_from([0, 1, IGNORED]), min_size=SIZE, max_size=SIZE).filter(any_counts), st.data()
)
@settings(deadline=None, max_examples=40)
def test_with_class_weights_and_ignored_targets_each_sample_counts_its_own(
    bounds: tuple[int, ...], classes: list[int], data: st.DataObject
) -> None:
    module, criterion = network(), weighted_cross_entropy()
    targets = torch.tensor(classes)
    as_list = data.draw(st.booleans())
    bench = Bench(module, criterion)
    running = running_sum([CLASS_WEIGHTS.get(number, 0.0) for number in classes])
    bench.load(list(INPUTS) if as_list else INPUTS, list(targets) if as_list else targets, bounds, running=running)
    done = bench.evaluate()
    loss, gradient = plain(module, criterion, targets=targets)
    assert done.summaries[0].losses[0] == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(bench.gradient(done), gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("as_list", [False, True])
def test_where_every_target_is_ignored_the_mean_is_no_number_as_in_one_process(as_list: bool) -> None:
    module, criterion = network(), weighted_cross_entropy()
    targets = torch.full((SIZE,), IGNORED)
    bench = Bench(module, criterion)
    data: tuple[Any, Any] = (list(INPUTS), list(targets)) if as_list else (INPUTS, targets)
    bench.load(*data, bounds=(0, 5, 12), running=running_sum([0.0] * SIZE))
    assert torch.tensor(plain(module, criterion, targets=targets)[0]).isnan()
    assert torch.tensor(bench.evaluate().summaries[0].losses[0]).isnan()


@given(st.integers(1, 200) | st.just(49), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None, max_examples=60)
@example(49, True, torch.float32)
def test_one_chunk_gives_the_bits_of_one_process(size: int, mean: bool, dtype: torch.dtype) -> None:
    module, criterion = network().to(dtype), nn.MSELoss(reduction="mean" if mean else "sum")
    inputs = torch.linspace(-1, 2, size * 3, dtype=dtype).sin().view(size, 3)
    targets = torch.linspace(0, 3, size * 2, dtype=dtype).cos().view(size, 2)
    bench = Bench(module, criterion)
    bench.load(inputs, targets, (0, size), mean)
    done = bench.evaluate()
    loss, gradient = plain(module, criterion, inputs, targets)
    assert done.summaries[0].losses[0] == loss
    assert torch.equal(bench.gradient(done), gradient)


@pytest.mark.parametrize("size", [1, 3, 49, 98, 107, 161])
def test_one_chunk_gives_the_bits_of_one_process_with_class_weights_and_ignored_targets(size: int) -> None:
    module, criterion = network(), weighted_cross_entropy()
    inputs = torch.linspace(-1, 2, size * 3, dtype=torch.float64).sin().view(size, 3)
    classes = [(0, 1, IGNORED, 1)[index % 4] for index in range(size)]
    bench = Bench(module, criterion)
    running = running_sum([CLASS_WEIGHTS.get(number, 0.0) for number in classes])
    bench.load(inputs, torch.tensor(classes), (0, size), running=running)
    done = bench.evaluate()
    loss, gradient = plain(module, criterion, inputs, torch.tensor(classes))
    assert done.summaries[0].losses[0] == loss
    assert torch.equal(bench.gradient(done), gradient)


def test_one_chunk_gives_the_bits_of_one_process_where_a_collate_makes_it_of_a_list() -> None:
    module, criterion = network(), nn.MSELoss()
    inputs, targets = torch.cat([INPUTS] * 5)[:49], torch.cat([TARGETS] * 5)[:49]

    def stacked(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.stack(column) for column in zip(*pairs, strict=True))

    bench = Bench(module, criterion)
    bench.load(list(inputs), list(targets), (0, 49), collate=stacked)
    done = bench.evaluate()
    loss, gradient = plain(module, criterion, inputs, targets)
    assert done.summaries[0].losses[0] == loss
    assert torch.equal(bench.gradient(done), gradient)


def test_dropout_is_the_same_within_a_step_and_another_in_the_next() -> None:
    bench = Bench(network(dropout=True), nn.MSELoss())
    bench.load(bounds=(0, 5, 12))
    losses = [bench.evaluate(step=step).summaries[0].losses[0] for step in (3, 3, 4, 3)]
    assert losses[0] == losses[1] == losses[3]
    assert losses[0] != losses[2]


def test_the_seed_is_the_programs() -> None:
    losses = []
    for seed in (0, 1, 0):
        bench = Bench(network(dropout=True), nn.MSELoss(), seed=seed)
        bench.load()
        losses.append(bench.evaluate().summaries[0].losses[0])
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]


def test_buffers_are_left_as_found_and_their_changes_reported() -> None:
    bench = Bench(network(norm=True), nn.MSELoss())
    bench.load()
    before = {name: buffer.clone() for name, buffer in bench.module.named_buffers()}
    summary = bench.evaluate().summaries[0]
    for name, buffer in bench.module.named_buffers():
        assert torch.equal(buffer, before[name])
    values, flags = bench.rows[summary.row].changes.view(2, -1)
    plain(bench.module, nn.MSELoss())
    expected = torch.cat([buffer.flatten().double() for buffer in bench.module.buffers()])
    assert torch.equal(values, expected)
    assert flags.tolist() == [1.0] * len(expected)


def test_counters_become_what_the_first_chunk_left_in_them() -> None:
    bench = Bench(network(norm=True), nn.MSELoss())
    bench.load(bounds=(0, 4, 8, SIZE))
    for first, value in ((0, 1), (1, 0)):
        found = [bench.rows[s.row].changes.view(2, -1)[:, -1] for s in bench.evaluate(first, 3).summaries]
        # the last buffer is `num_batches_tracked`: its value, and how many chunks changed it
        assert torch.stack(found).sum(0).tolist() == [value, 3 - first]


class Unused(nn.Module):
    """Of its three parameters one is used, one is not, and one is used for positive inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.sometimes = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.used).sum()
        return y + self.sometimes.sum() if x.sum() > 0 else y


def test_a_parameter_without_gradient_is_unused_and_its_sum_zero() -> None:
    bench = Bench(Unused())
    inputs = torch.tensor([[-3.0, -4.0], [1.0, 2.0], [-5.0, -6.0]], dtype=torch.float64)
    bench.load(inputs, None, bounds=(0, 1, 2, 3), mean=False)
    negative = bench.evaluate(2, 3).summaries[0]
    assert negative.used == bytes([1, 0, 0])
    assert bench.rows[negative.row].gradient.tolist() == [-5, -6, 0, 0, 0, 0]
    every = bench.evaluate().summaries[0]
    assert every.used == bytes([1, 0, 1])
    assert bench.rows[every.row].gradient.tolist() == [-7, -8, 0, 0, 1, 1]


def test_a_frozen_parameter_is_unused() -> None:
    bench = Bench(network(), nn.MSELoss())
    bench.parameters[0].requires_grad_(False)
    bench.load()
    assert bench.evaluate().summaries[0].used == bytes([0, 1, 1, 1])


def test_a_sparse_gradient_is_summed_like_a_dense_one() -> None:
    gradients = []
    for sparse in (False, True):
        module = nn.Embedding(4, 2, sparse=sparse, dtype=torch.float64)
        bench = Bench(module, lambda output: output.pow(2).sum())
        with torch.no_grad():
            module.weight.copy_(torch.arange(8.0).view(4, 2))
        bench.load(torch.tensor([0, 2, 2]), None, bounds=(0, 2, 3), mean=False)
        gradients.append(bench.gradient(bench.evaluate()).clone())
    assert gradients[0].tolist() == [0, 2, 0, 0, 16, 20, 0, 0]
    assert torch.equal(gradients[0], gradients[1])


def test_no_gradient_is_left_in_the_parameters_or_taken_from_them() -> None:
    bench = Bench(network(), nn.MSELoss())
    bench.load(bounds=(0, 5, 12))
    expected = bench.gradient(bench.evaluate()).clone()
    for parameter in bench.parameters:
        parameter.grad = torch.full_like(parameter, 100.0)
    assert torch.equal(bench.gradient(bench.evaluate()), expected)
    assert [parameter.grad for parameter in bench.parameters] == [None] * 4


def test_gradients_are_computed_where_they_are_switched_off() -> None:
    bench = Bench(network(), nn.MSELoss())
    bench.load()
    with torch.no_grad():
        done = bench.evaluate()
    torch.testing.assert_close(bench.gradient(done), plain(bench.module, nn.MSELoss())[1], rtol=1e-12, atol=1e-15)


def test_inputs_may_require_gradients_of_their_own() -> None:
    def slope(module: nn.Module, x: torch.Tensor, _: None) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return gradient.pow(2).mean()

    module = network()
    bench = Bench(module, loss_fn=slope)
    inputs = INPUTS.clone().requires_grad_()
    bench.load(inputs, None, bounds=(0, 5, 12))
    done = bench.evaluate()
    assert inputs.grad is None
    loss = slope(module, inputs, None)
    assert done.summaries[0].losses[0] == pytest.approx(loss.item(), rel=1e-13)


def test_the_posthooks_results_come_in_sample_order_with_output_and_loss() -> None:
    module = network()
    bench = Bench(module, nn.MSELoss())
    bench.load(bounds=(0, 5, 12))

    def note(worker: Worker, sample: Sample) -> Any:
        assert worker is bench.evaluator.worker
        return sample.indices, sample.output.detach(), sample.loss

    bench.evaluator.posthook = note
    results = [result for _, of_chunk in bench.reports() for result in of_chunk]
    assert [indices for indices, _, _ in results] == [range(0, 5), range(5, 12)]
    for indices, output, loss in results:
        part = slice(indices.start, indices.stop)
        torch.testing.assert_close(output, module(INPUTS[part]).detach())
        assert loss == pytest.approx(plain(module, nn.MSELoss(), INPUTS[part], TARGETS[part])[0])


def test_without_a_posthook_there_are_no_results() -> None:
    bench = Bench(network(), nn.MSELoss())
    bench.load()
    assert [results for _, results in bench.reports()] == [[]]


def test_a_prehook_may_put_other_inputs_and_targets_in_place() -> None:
    bench = Bench(network(), nn.MSELoss())
    bench.load()

    def replace(worker: Worker, sample: Sample) -> None:
        assert sample.output is None
        sample.inputs, sample.targets = sample.inputs * 2, sample.targets + 1

    bench.evaluator.prehook = replace
    done = bench.evaluate()
    loss, gradient = plain(bench.module, nn.MSELoss(), INPUTS * 2, TARGETS + 1)
    assert done.summaries[0].losses[0] == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(bench.gradient(done), gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("as_list", "expected"), [(False, range(5, 12)), (True, range(6, 7))])
def test_the_samples_of_a_failed_forward_are_at_hand_and_the_next_evaluation_is_sound(
    as_list: bool, expected: range
) -> None:
    bench = Bench(network(), nn.MSELoss())
    inputs = INPUTS.clone()
    inputs[6] = torch.inf
    bench.load(list(inputs) if as_list else inputs, list(TARGETS) if as_list else TARGETS, bounds=(0, 5, 12))

    def refuse(worker: Worker, sample: Sample) -> None:
        if not sample.inputs.isfinite().all():
            raise ArithmeticError

    bench.evaluator.prehook = refuse
    with pytest.raises(ArithmeticError):
        bench.evaluate()
    assert bench.evaluator.current == expected
    bench.load(bounds=(0, 5, 12))
    done = bench.evaluate()
    assert bench.evaluator.current == range(0)
    assert done.summaries[0].losses[0] == pytest.approx(plain(bench.module, nn.MSELoss())[0], rel=1e-13)


def test_a_failed_chunk_leaves_the_buffers_as_they_were() -> None:
    bench = Bench(network(norm=True), nn.MSELoss())
    bench.load()
    before = [buffer.clone() for buffer in bench.module.buffers()]

    def refuse(worker: Worker, sample: Sample) -> None:
        raise ArithmeticError

    bench.evaluator.posthook = refuse
    with pytest.raises(ArithmeticError):
        bench.evaluate()
    assert all(torch.equal(buffer, old) for buffer, old in zip(bench.module.buffers(), before, strict=True))


class Growing(nn.Module):
    """Keeps each batch as it came, so that its buffer's shape follows the chunk's."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("seen", torch.zeros(5, 3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        output: torch.Tensor = self.inner(x)
        return output


def test_a_buffer_that_changes_its_shape_is_named_and_left_as_it_was() -> None:
    module = Growing()
    bench = Bench(module, nn.MSELoss())
    bench.load(bounds=(0, 5, 12))
    with pytest.raises(ValueError, match=r"buffer 'seen' of Growing was \(5, 3\) .* replaced by \(7, 3\)"):
        bench.evaluate()
    assert torch.equal(module.seen, torch.zeros(5, 3, dtype=torch.float64))


# ---- gradients that are collected as soon as the backward has made them


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any module counts as large."""
    monkeypatch.setattr(sums, "LARGE", 0)


def both_ways(monkeypatch: pytest.MonkeyPatch, module: nn.Module, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient, collected after the backward and during it."""
    found = []
    for limit in (10**9, 0):
        monkeypatch.setattr(sums, "LARGE", limit)
        bench = Bench(module, **{"criterion": nn.MSELoss(), **options})
        bench.load(bounds=(0, 5, SIZE))
        found.append(bench.gradient(bench.evaluate()).clone())
        assert all(parameter.grad is None for parameter in module.parameters())
        assert not any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in module.parameters())
    return found[0], found[1]


def test_they_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    after, during = both_ways(monkeypatch, network())
    assert torch.equal(after, during)


def test_a_parameter_that_is_used_twice_counts_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    tied = network()

    def twice(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(module(inputs) + module(2 * inputs), targets)

    after, during = both_ways(monkeypatch, tied, criterion=None, loss_fn=twice)
    assert torch.equal(after, during)


def test_a_backward_of_the_loss_function_itself_counts_as_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        module(inputs).sum().backward()  # stays in .grad
        return nn.functional.mse_loss(module(inputs), targets)

    after, during = both_ways(monkeypatch, network(), criterion=None, loss_fn=inner)
    assert torch.equal(after, during)
    without, _ = both_ways(monkeypatch, network())
    assert not torch.allclose(after, without)


def test_a_hook_of_the_users_on_a_parameter_sees_its_gradient(large: None) -> None:
    module, seen = network(), []
    bench = Bench(module, nn.MSELoss())
    bench.load()
    weight = next(module.parameters())
    handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[no-untyped-call]
    gradient = bench.gradient(bench.evaluate())
    handle.remove()
    assert torch.equal(seen[0].flatten(), gradient[: weight.numel()])
    assert torch.equal(gradient, plain(module, nn.MSELoss())[1])


def test_a_posthook_sees_all_gradients(large: None) -> None:
    module = network()
    bench = Bench(module, nn.MSELoss())
    bench.load()
    bench.evaluator.posthook = lambda worker, sample: [p.grad is not None for p in module.parameters()]
    ((_, results),) = bench.reports()
    assert results == [[True] * 4]


def test_a_backward_that_raises_leaves_no_hook(large: None) -> None:
    module = network()

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("in the backward")

    bench = Bench(module, loss_fn=lambda module, x, y: Bad.apply(module(x)).sum())  # type: ignore[no-untyped-call]
    bench.load()
    with pytest.raises(ArithmeticError):
        bench.evaluate()
    assert not any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in module.parameters())


def test_a_large_model_keeps_no_second_gradient(large: None) -> None:
    """While the backward goes on, what was collected is gone."""
    module, kept = network(), []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            kept.append([p.grad is None for p in module[2].parameters()])  # type: ignore[index]
            return gradients[0]

    def loss_fn(whole: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert isinstance(whole, nn.Sequential)
        hidden = Look.apply(whole[1](whole[0](x)))  # type: ignore[no-untyped-call]
        return nn.functional.mse_loss(whole[2](hidden), y)

    bench = Bench(module, loss_fn=loss_fn)
    bench.load()
    bench.evaluate()
    assert kept == [[True, True]]


def curvature(module: nn.Module, direction: torch.Tensor) -> torch.Tensor:
    """The Hessian times `direction`, on the whole batch in one process."""
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(nn.MSELoss()(module(INPUTS), TARGETS), parameters, create_graph=True)
    slope = torch.cat([gradient.flatten() for gradient in gradients]) @ direction
    return torch.cat([part.flatten() for part in torch.autograd.grad(slope, parameters)])


@given(bounds_of())
@settings(deadline=None, max_examples=20)
def test_every_cut_gives_the_product_of_one_process(bounds: tuple[int, ...]) -> None:
    module = network()
    bench = Bench(module, nn.MSELoss())
    bench.load(bounds=bounds)
    direction = torch.linspace(-1, 1, bench.layout.size, dtype=torch.float64)
    bench.evaluator.direction = bench.layout.views(direction)
    grads = [torch.full_like(parameter, 7.0) for parameter in bench.parameters]
    for parameter, grad in zip(bench.parameters, grads, strict=True):
        parameter.grad = grad
    seen: list[str] = []
    bench.evaluator.prehook = lambda worker, sample: seen.append("pre")
    bench.evaluator.posthook = lambda worker, sample: seen.append("post")
    with draws_kept():
        *_, done = bench.evaluator.evaluate(Order(1, 0, 0, len(bounds) - 1, Kind.MULTIPLY), bench.rows)
        report, results = done.report(), done.results
    torch.testing.assert_close(bench.gradient(report), curvature(module, direction), rtol=1e-12, atol=1e-15)
    assert all(p.grad is grad and (grad == 7.0).all() for p, grad in zip(bench.parameters, grads, strict=True))
    assert seen == ["pre"] * (len(bounds) - 1) and not results
