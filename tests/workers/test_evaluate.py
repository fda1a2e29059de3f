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
from batchopt_workers.map.chunk import LoadedBatch
from batchopt_workers.map.evaluate import Evaluator
from batchopt_workers.map.module_state import ModuleState
from batchopt_workers.map.program import Program
from batchopt_workers.map.seeding import draws_kept
from batchopt_workers.map.sums import Report, Rows
from batchopt_workers.map.tree import Node
from batchopt_workers.map.weighting import Weighting
from batchopt_workers.process.messages import Cut, Order
from batchopt_workers.worker import Worker

CPU = torch.device("cpu")
SIZE = 12
INPUTS = torch.linspace(-1, 2, SIZE * 3, dtype=torch.float64).sin().view(SIZE, 3)
TARGETS = torch.linspace(0, 3, SIZE * 2, dtype=torch.float64).cos().view(SIZE, 2)
CLASS_WEIGHTS = {0: 0.3, 1: 2.1}
IGNORED = -100


def network(*, dropout: bool = False, norm: bool = False) -> nn.Sequential:
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
        self.module, self.criterion, self.evaluations = module, criterion, 0
        self.parameters = list(module.parameters())
        buffers = ModuleState(module)
        buffers.watch((), self.parameters)
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
    ) -> Bench:
        data = [Samples(x) if isinstance(x, list) else Columns(x) for x in (inputs, targets)]
        weighting = Weighting("mean" if mean else "sum", bounds[-1], running)
        part = Part(data[0], None if targets is None else data[1], None, weighting, collate)
        self.evaluator.loaded = LoadedBatch(Batch((part,)))
        self.evaluator.cut = Cut(bounds)
        return self

    def evaluate(self, first: int = 0, last: int | None = None, step: int = 0) -> Report:
        """What there is at the end."""
        return self.reports(first, last, step)[-1][0]

    def reports(self, first: int = 0, last: int | None = None, step: int = 0) -> list[tuple[Report, list[Any]]]:
        """After each chunk, in an evaluation of its own."""
        self.evaluations += 1
        order = Order(self.evaluations, step, first, self.evaluator.cut.chunks if last is None else last)
        with draws_kept():
            return [(done.report(), [*(done.results or ())]) for done in self.evaluator.evaluate(order, self.rows)]

    def gradient(self, done: Report | None = None) -> torch.Tensor:
        """Of an evaluation of every chunk, which is made if there is none."""
        return self.rows[(done or self.evaluate()).partials[0][1].row].gradient

    def check(self, done: Report, inputs: Any = INPUTS, targets: Any = TARGETS, rtol: float = 1e-12) -> None:
        """What was found is what one process computes on the whole batch; to the bit if `rtol` is 0."""
        loss, gradient = plain(self.module, self.criterion, inputs, targets)
        assert done.partials[0][1].losses[0] == pytest.approx(loss, rel=rtol / 10, abs=0.0)
        torch.testing.assert_close(self.gradient(done), gradient, rtol=rtol, atol=rtol / 1000)


def plain(module: nn.Module, criterion: Any, inputs: Any = INPUTS, targets: Any = TARGETS) -> Any:
    """f and df/dX by plain torch."""
    loss = criterion(module(inputs), targets)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def weighted_cross_entropy() -> nn.CrossEntropyLoss:
    weight = torch.tensor(list(CLASS_WEIGHTS.values()), dtype=torch.float64)
    return nn.CrossEntropyLoss(weight, ignore_index=IGNORED)


def running_sum(denominators: list[float]) -> torch.Tensor:
    return torch.tensor([0.0, *denominators], dtype=torch.float64).cumsum(0)


def counted(classes: list[int]) -> torch.Tensor:
    """The running sum of their weights."""
    return running_sum([CLASS_WEIGHTS.get(number, 0.0) for number in classes])


@st.composite
def bounds_of(draw: st.DrawFn) -> tuple[int, ...]:
    inner = draw(st.sets(st.integers(1, SIZE - 1)))
    return (0, *sorted(inner), SIZE)


@given(bounds_of(), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=40)
@example((0, 5, SIZE), True, True)
@example((0, 5, SIZE), False, True)
def test_every_cut_gives_the_loss_and_gradient_of_one_process(
    bounds: tuple[int, ...], mean: bool, as_list: bool
) -> None:
    bench = Bench(network(), nn.MSELoss(reduction="mean" if mean else "sum"))
    data: tuple[Any, Any] = (list(INPUTS), list(TARGETS)) if as_list else (INPUTS, TARGETS)
    bench.load(*data, bounds=bounds, mean=mean)
    done = bench.evaluate()
    ((_, partial),) = done.partials
    assert done.next == len(bounds) - 1
    assert done.seconds > 0
    bench.check(done)
    assert partial.used == b"\1" * len(bench.parameters)


def test_a_chunk_that_counts_nothing_adds_nothing_even_if_its_loss_is_no_number() -> None:
    inputs, targets = torch.cat([INPUTS, torch.full((2, 3), torch.nan)]), torch.cat([TARGETS, TARGETS[:2]])
    running = running_sum([1.0] * SIZE + [0.0] * 2)
    bench = Bench(network(), nn.MSELoss()).load(inputs, targets, (0, SIZE, 14), running=running)
    bench.check(bench.evaluate())


def test_chunks_in_order_need_few_rows_and_what_was_reported_is_not_written_until_the_next_report() -> None:
    bench = Bench(network(), nn.MSELoss(), rows=4).load(INPUTS[:8], TARGETS[:8], bounds=tuple(range(9)))
    with draws_kept():
        reports = bench.evaluator.evaluate(Order(1, 0, 0, 8), bench.rows)
        before = next(reports).report()
        for _ in range(7):
            kept = {partial.row: bench.rows[partial.row].gradient.clone() for _, partial in before.partials}
            after = next(reports).report()  # by now the next chunk was evaluated and merged
            for row, gradient in kept.items():
                assert torch.equal(bench.rows[row].gradient, gradient)
            assert after.next == before.next + 1
            before = after
    assert [node for node, _ in before.partials] == [Node(3, 0)]
    bench.check(before, INPUTS[:8], TARGETS[:8])


def test_several_orders_of_one_evaluation_merge_whatever_their_order() -> None:
    bench = Bench(network(), nn.MSELoss(), rows=5).load(INPUTS[:8], TARGETS[:8], bounds=tuple(range(9)))
    assert bench.reports(1, 1) == []  # nothing to report
    whole = bench.evaluate()
    gradient = bench.gradient(whole).clone()
    with draws_kept():
        for first, last in ((5, 8), (0, 2), (4, 5), (2, 4)):
            *_, done = bench.evaluator.evaluate(Order(99, 0, first, last), bench.rows)
            report = done.report()
    assert [node for node, _ in report.partials] == [Node(3, 0)]
    assert report.partials[0][1].losses[0] == whole.partials[0][1].losses[0]
    assert torch.equal(bench.gradient(report), gradient)


def test_some_chunks_are_the_largest_subtrees_that_they_fill() -> None:
    bench = Bench(network(), nn.MSELoss()).load(bounds=tuple(range(SIZE + 1)))
    partials = bench.evaluate(1, 7).partials
    assert [node for node, _ in partials] == [Node(0, 1), Node(1, 1), Node(1, 2), Node(0, 6)]
    for node, partial in partials:
        first, size = node.first_chunk, 2**node.level
        loss, gradient = plain(bench.module, nn.MSELoss(), INPUTS[first : first + size], TARGETS[first : first + size])
        assert partial.losses[0] == pytest.approx(loss * size / SIZE, rel=1e-13)
        torch.testing.assert_close(bench.rows[partial.row].gradient, gradient * size / SIZE, rtol=1e-12, atol=1e-15)


def test_where_every_target_is_ignored_the_mean_is_no_number_as_in_one_process() -> None:
    targets, bench = torch.full((SIZE,), IGNORED), Bench(network(), weighted_cross_entropy())
    bench.load(INPUTS, targets, bounds=(0, 5, 12), running=running_sum([0.0] * SIZE))
    assert torch.tensor(plain(bench.module, bench.criterion, targets=targets)[0]).isnan()
    assert torch.tensor(bench.evaluate().partials[0][1].losses[0]).isnan()


def stacked(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.stack(column) for column in zip(*pairs, strict=True))


@given(
    st.integers(1, 200),
    st.sampled_from(["mean", "sum", "classes", "collated"]),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None, max_examples=60)
@example(49, "mean", torch.float32)
@example(49, "collated", torch.float64)
@example(49, "classes", torch.float64)
@example(98, "classes", torch.float64)
@example(107, "classes", torch.float64)
@example(161, "classes", torch.float64)
def test_one_chunk_gives_the_bits_of_one_process(size: int, kind: str, dtype: torch.dtype) -> None:
    inputs = torch.linspace(-1, 2, size * 3, dtype=dtype).sin().view(size, 3)
    if kind == "classes":
        classes = [(0, 1, IGNORED, 1)[index % 4] for index in range(size)]
        targets, bench = torch.tensor(classes), Bench(network().to(dtype), weighted_cross_entropy().to(dtype))
        bench.load(inputs, targets, (0, size), running=counted(classes))
    else:
        targets = torch.linspace(0, 3, size * 2, dtype=dtype).cos().view(size, 2)
        bench = Bench(network().to(dtype), nn.MSELoss(reduction="sum" if kind == "sum" else "mean"))
        collated = kind == "collated"
        data: tuple[Any, Any] = (list(inputs), list(targets)) if collated else (inputs, targets)
        bench.load(*data, (0, size), kind != "sum", collate=stacked if collated else None)
    bench.check(bench.evaluate(), inputs, targets, rtol=0.0)


def test_draws_are_those_of_the_programs_seed_and_of_the_step() -> None:
    def losses(seed: int) -> list[float]:
        bench = Bench(network(dropout=True), nn.MSELoss(), seed=seed).load(bounds=(0, 5, 12))
        return [bench.evaluate(step=step).partials[0][1].losses[0] for step in (3, 3, 4, 3)]

    found = losses(0)
    assert found[0] == found[1] == found[3] != found[2]
    assert found == losses(0) and found[0] != losses(1)[0]


def test_buffers_are_left_as_found_and_their_changes_reported() -> None:
    bench = Bench(network(norm=True), nn.MSELoss()).load()
    before = [buffer.clone() for buffer in bench.module.buffers()]
    _, partial = bench.evaluate().partials[0]
    assert all(map(torch.equal, bench.module.buffers(), before))
    values, flags = bench.rows[partial.row].changes.view(2, -1)
    bench.evaluator.loss.posthook = lambda worker, sample: 1 / 0
    with pytest.raises(ZeroDivisionError):
        bench.evaluate()
    assert all(map(torch.equal, bench.module.buffers(), before))
    plain(bench.module, nn.MSELoss())
    expected = torch.cat([buffer.flatten().double() for buffer in bench.module.buffers()])
    assert torch.equal(values, expected)
    assert flags.tolist() == [1.0] * len(expected)


def test_counters_become_what_the_first_chunk_left_in_them() -> None:
    bench = Bench(network(norm=True), nn.MSELoss()).load(bounds=(0, 4, 8, SIZE))
    for first, value in ((0, 1), (1, 0)):
        found = [bench.rows[p.row].changes.view(2, -1)[:, -1] for _, p in bench.evaluate(first, 3).partials]
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
    inputs = torch.tensor([[-3.0, -4.0], [1.0, 2.0], [-5.0, -6.0]], dtype=torch.float64)
    bench = Bench(Unused()).load(inputs, None, bounds=(0, 1, 2, 3), mean=False)
    _, negative = bench.evaluate(2, 3).partials[0]
    assert negative.used == bytes([1, 0, 0])
    assert bench.rows[negative.row].gradient.tolist() == [-5, -6, 0, 0, 0, 0]
    _, every = bench.evaluate().partials[0]
    assert every.used == bytes([1, 0, 1])
    assert bench.rows[every.row].gradient.tolist() == [-7, -8, 0, 0, 1, 1]
    bench.parameters[2].requires_grad_(False)
    assert bench.evaluate().partials[0][1].used == bytes([1, 0, 0])


def test_a_sparse_gradient_is_summed_like_a_dense_one() -> None:
    gradients = []
    for sparse in (False, True):
        module = nn.Embedding(4, 2, sparse=sparse, dtype=torch.float64)
        with torch.no_grad():
            module.weight.copy_(torch.arange(8.0).view(4, 2))
        bench = Bench(module, lambda output: output.pow(2).sum())
        gradients.append(bench.load(torch.tensor([0, 2, 2]), None, bounds=(0, 2, 3), mean=False).gradient())
    assert gradients[0].tolist() == [0, 2, 0, 0, 16, 20, 0, 0]
    assert torch.equal(gradients[0], gradients[1])


def test_no_gradient_is_left_in_the_parameters_or_taken_from_them_where_they_are_switched_off_too() -> None:
    bench = Bench(network(), nn.MSELoss()).load(bounds=(0, 5, 12))
    expected = bench.gradient().clone()
    for parameter in bench.parameters:
        parameter.grad = torch.full_like(parameter, 100.0)
    with torch.no_grad():
        assert torch.equal(bench.gradient(), expected)
    assert [parameter.grad for parameter in bench.parameters] == [None] * 4


@pytest.mark.parametrize(("as_list", "expected"), [(False, range(5, 12)), (True, range(6, 7))])
def test_the_samples_of_a_failed_forward_are_at_hand_and_the_next_evaluation_is_sound(
    as_list: bool, expected: range
) -> None:
    inputs = INPUTS.clone()
    inputs[6] = torch.inf
    data: tuple[Any, Any] = (list(inputs), list(TARGETS)) if as_list else (inputs, TARGETS)
    bench = Bench(network(), nn.MSELoss()).load(*data, bounds=(0, 5, 12))
    bench.evaluator.loss.prehook = lambda worker, sample: None if sample.inputs.isfinite().all() else 1 / 0
    with pytest.raises(ZeroDivisionError):
        bench.evaluate()
    assert bench.evaluator.current == expected
    done = bench.load(bounds=(0, 5, 12)).evaluate()
    assert bench.evaluator.current == range(0)
    bench.check(done)


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
    with pytest.raises(ValueError, match=r"buffer 'seen' of Growing was \(5, 3\) .* replaced by \(7, 3\)"):
        Bench(module, nn.MSELoss()).load(bounds=(0, 5, 12)).evaluate()
    assert torch.equal(module.seen, torch.zeros(5, 3, dtype=torch.float64))


# ---- gradients that are collected as soon as the backward has made them


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any module counts as large."""
    monkeypatch.setattr(sums, "LARGE", 0)


def twice(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(module(inputs) + module(2 * inputs), targets)


def inner(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    module(inputs).sum().backward()  # stays in .grad
    return nn.functional.mse_loss(module(inputs), targets)


@pytest.mark.parametrize("loss_fn", [None, twice, inner])
def test_collected_in_the_backward_or_after_it_they_are_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, loss_fn: Any
) -> None:
    """A parameter that is used twice counts in full, and a backward of the loss function itself as in plain torch."""
    found, module = [], network()
    for limit in (10**9, 0):
        monkeypatch.setattr(sums, "LARGE", limit)
        bench = Bench(module, nn.MSELoss() if loss_fn is None else None, loss_fn).load(bounds=(0, 5, SIZE))
        found.append(bench.gradient().clone())
        assert all(parameter.grad is None for parameter in module.parameters())
        assert not hooked(module)
    assert torch.equal(*found)
    assert torch.allclose(found[0], plain(module, nn.MSELoss())[1]) == (loss_fn is None)


def hooked(module: nn.Module) -> bool:
    """Whether a gradient that has been made is told to anybody."""
    return any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in module.parameters())


def test_hooks_of_the_users_see_gradients(large: None) -> None:
    module, seen = network(), []
    bench = Bench(module, nn.MSELoss()).load()
    bench.evaluator.loss.posthook = lambda worker, sample: [p.grad is not None for p in module.parameters()]
    weight = next(module.parameters())
    handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[no-untyped-call]
    ((done, results),) = bench.reports()
    handle.remove()
    gradient = bench.gradient(done)
    assert results == [[True] * 4]
    assert torch.equal(seen[0].flatten(), gradient[: weight.numel()])
    assert torch.equal(gradient, plain(module, nn.MSELoss())[1])


def test_a_backward_that_raises_leaves_no_hook(large: None) -> None:
    def loss_fn(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = module(x)
        outputs.register_hook(lambda gradient: 1 / 0)  # type: ignore[no-untyped-call]
        return outputs.sum()

    module = network()
    with pytest.raises(ZeroDivisionError):
        Bench(module, loss_fn=loss_fn).load().evaluate()
    assert not hooked(module)


def test_a_large_model_keeps_no_second_gradient(large: None) -> None:
    """While the backward goes on, what was collected is gone."""
    module, kept = network(), []

    def loss_fn(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = module[:2](x)
        hidden.register_hook(lambda gradient: kept.append([p.grad is None for p in module[2].parameters()]))  # type: ignore[no-untyped-call]
        return nn.functional.mse_loss(module[2](hidden), y)

    Bench(module, loss_fn=loss_fn).load().evaluate()
    assert kept == [[True, True]]
