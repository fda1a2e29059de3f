"""Functions of the batch under adverse conditions: interrupts, hangs, late workers, limits, and what is given back."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import batchopt
from batchopt import BatchOptimizer, Worker, WorkerError, WorkerLostError
from batchopt._mapreduce.answers import Answer, common_form, forms_of
from batchopt.backends.process.backend import ProcessBackend
from batchopt_workers.process import loop
from batchopt_workers.tasks.forms import Form, rows_form
from tests.building import loaded
from tests.workers.test_memory import limited
from tests.workloads import Mlp, once

X = torch.linspace(-2.0, 2.0, 40 * 6, dtype=torch.float64).reshape(40, 6).sin()
Y = torch.linspace(-1.0, 3.0, 40 * 4, dtype=torch.float64).reshape(40, 4).cos()
EACH = pytest.mark.parametrize("parallelize", [1, 2])


def make(parallelize: int, *batch: Any, **options: Any) -> BatchOptimizer:
    torch.manual_seed(0)
    return loaded(
        Mlp().double(), nn.MSELoss(), *(batch or (X, Y)), **{"parallelize": parallelize, "chunk_size": 5, **options}
    )


def outputs(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module(inputs)
    return found


def gram(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return inputs.T @ inputs


def wide(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Rows that are too many to be copied."""
    return inputs.repeat(1, 1000)


@EACH
def test_a_function_is_given_samples_of_its_own(parallelize: int) -> None:
    def negated(module: nn.Module, inputs: torch.Tensor, targets: Any) -> torch.Tensor:
        array = inputs.numpy()
        array *= -1.0
        return inputs.clone()

    with make(parallelize, backend="process") as opt:
        for value in (1.0, 7.0, 3.0):
            given = torch.full_like(X, value)
            assert torch.equal(opt.collect(negated, given, Y), torch.full_like(X, -value))
            assert torch.equal(given, torch.full_like(X, value))


# ---- what comes in between


TASKS: dict[str, Callable[[BatchOptimizer, Any], Any]] = {
    "collect": lambda opt, disturb: opt.collect(lambda m, inputs, targets: disturb(m(inputs))),
    "total": lambda opt, disturb: opt.total(lambda m, inputs, targets: disturb(m(inputs).sum(0))),
    "predict": lambda opt, disturb: opt.predict(X, transform=disturb),
    "loader": lambda opt, disturb: opt.predict(iter([X[:20], X[20:]]), transform=disturb),
}


@EACH
@pytest.mark.parametrize("what", TASKS)
def test_an_interrupt_leaves_the_step_as_it_was(
    interruptible: None, tmp_path: Path, parallelize: int, what: str
) -> None:
    parent, marker = os.getpid(), tmp_path / "marker"

    def disturb(result: torch.Tensor) -> torch.Tensor:
        if once(marker):
            os.kill(parent, signal.SIGINT)
            time.sleep(0.3)  # for it to arrive
        return result

    with make(parallelize) as opt:
        loss, expected = opt.evaluate(), TASKS[what](opt, lambda result: result)
        counters = opt.eval_counter, opt.batch_counter
        with pytest.raises(KeyboardInterrupt):
            TASKS[what](opt, disturb)
        assert (opt.eval_counter, opt.batch_counter) == counters
        assert torch.equal(TASKS[what](opt, lambda result: result), expected)
        assert opt.evaluate() == loss
        assert [worker.restarts for worker in opt.workers] == [0] * parallelize


@EACH
def test_after_an_exception_in_one_chunk_another_task_is_its_own(parallelize: int) -> None:
    def raises(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.equal(inputs[0], X[20]):
            raise ArithmeticError("in the middle")
        return inputs

    with make(parallelize) as opt:
        loss = opt.evaluate()
        for _ in range(3):
            for task in (opt.collect, lambda function: opt.total(lambda m, i, t: function(m, i, t).sum(0))):
                with pytest.raises(WorkerError, match=r"samples 20\.\.24: in the middle"):
                    task(raises)
                assert torch.equal(opt.collect(lambda m, inputs, targets: inputs + 1), X + 1)
                torch.testing.assert_close(opt.total(gram), X.T @ X)
        assert opt.evaluate() == loss


def test_a_hang_is_ended_after_timeout(nobody_late: None, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    def hangs(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if once(marker):
            time.sleep(1000)
        return inputs

    with make(2, timeout=0.5) as opt:
        loss = opt.evaluate()
        assert torch.equal(opt.collect(hangs), X)
        assert sum(worker.restarts for worker in opt.workers) == 1
        assert opt.evaluate() == loss
        with pytest.raises(batchopt.PoisonChunkError, match="timeout="):
            opt.total(lambda m, inputs, targets: time.sleep(1000) if torch.equal(inputs[0], X[0]) else 0)
        assert torch.equal(opt.collect(lambda m, inputs, targets: inputs), X)


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["collect", "outputs"])
def test_what_a_late_worker_writes_is_in_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    """It is stopped in a chunk; another one takes that over. When it goes on it writes other rows."""
    monkeypatch.setattr("batchopt.backends.process.scheduler.PATIENCE", 2.0)
    armed, late = tmp_path / "armed", tmp_path / "late"

    class Stops(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x).repeat(1, 1000)
            if armed.exists() and once(late):
                late.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
                found = found * 0 - 1
            return found

    with BatchOptimizer(
        Stops().double(), loss_fn=None, criterion=nn.MSELoss(), optimizer=None, parallelize=2, chunk_size=5
    ) as opt:
        targets = Y.repeat(1, 1000)
        opt.keep_outputs = True
        for _ in range(2):  # so that one knows how long it takes
            opt.load(X, targets)
            opt.evaluate()
            opt.collect(outputs)
        armed.touch()
        if what == "collect":
            found = opt.collect(outputs)
        else:
            opt.evaluate()
            found = opt.outputs()
        pid = int(late.read_text())
        stopped = psutil.Process(pid)
        assert stopped.status() == psutil.STATUS_STOPPED
        before = found.clone()
        assert (before != -1).all()
        os.kill(pid, signal.SIGCONT)
        opt.run_on_workers(lambda worker: None)  # it has done what it was at
        assert torch.equal(found, before)
        assert torch.equal(opt.collect(outputs), before)
        assert [worker.restarts for worker in opt.workers] == [0, 0]


# ---- limits


def limit(worker: Worker, what: int, number: int) -> None:
    resource.setrlimit(what, (number, resource.getrlimit(what)[1]))


def test_results_of_many_batches_take_no_descriptors() -> None:
    with make(2) as opt:
        opt.predict(X)
        opened = len(os.listdir("/proc/self/fd"))
        with limited(resource.RLIMIT_NOFILE, opened + 20):
            found = opt.predict(iter([X] * 60), transform=lambda rows: rows.repeat(1, 100))
            kept = [rows for rows, _ in opt.iter_predict(iter([X] * 60), transform=lambda rows: rows.repeat(1, 100))]
    assert torch.equal(found, torch.cat(kept)) and len(found) == 60 * len(X)


def test_limits_of_workers_are_named_and_survived() -> None:
    with make(2) as opt:
        opt.run_on_workers(limit, resource.RLIMIT_FSIZE, 2**17)
        with pytest.raises(WorkerError, match="ulimit -f"):
            opt.collect(wide)
        with pytest.raises(WorkerError, match="ulimit -f"):
            opt.total(lambda m, inputs, targets: torch.zeros(300, 300))
        assert opt.collect(outputs).shape == (40, 4)


def test_more_objects_than_a_message_holds_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def shrink(worker: Worker) -> None:
        vars(loop)["LARGEST"] = 10_000

    def objects(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[bytes]:
        return [bytes(3000) for _ in inputs]

    with make(2) as opt:
        opt.run_on_workers(shrink)
        with pytest.raises(
            WorkerError, match=r"the pickled result has .* GB; the limit is .* GB: return less at a time"
        ):
            opt.collect(objects)
        assert opt.collect(outputs).shape == (40, 4)


@EACH
def test_inference_mode_around_a_task_is_not_there_afterwards(parallelize: int) -> None:
    with make(parallelize) as opt:
        expected = opt.evaluate(), opt.predict(X), opt.collect(outputs), opt.total(gram)
        with make(parallelize) as fresh:
            for _ in range(2):
                with torch.inference_mode():
                    inside = fresh.predict(X), fresh.collect(outputs), fresh.total(gram)
                found = fresh.evaluate(), fresh.predict(X), fresh.collect(outputs), fresh.total(gram)
                assert all(map(torch.equal, found, expected)) and all(map(torch.equal, inside, expected[1:]))
                assert not any(tensor.is_inference() for tensor in found)
            with torch.inference_mode():
                assert fresh.evaluate() == expected[0]
            assert fresh.evaluate() == expected[0]


# ---- what is given back


def held(pids: list[int]) -> list[tuple[int, int]]:
    """Descriptors of each process, and mappings of memory without a name."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    return [(len(os.listdir(f"/proc/{pid}/fd")), text.count("memfd")) for pid, text in zip(pids, maps, strict=True)]


@pytest.mark.nightly
def test_calls_do_not_pile_up_descriptors_mappings_or_memory() -> None:
    inputs, targets = X.repeat(50, 1), Y.repeat(50, 1)
    with make(2, inputs, targets, chunk_size=250) as opt:
        points = torch.stack([opt.parameters] * 4)

        def of_the_last() -> Any:
            opt.evaluate()
            return opt.outputs()

        calls: list[Callable[[], Any]] = [
            lambda: opt.collect(lambda m, i, t: (m(i), i.repeat(1, 10))),
            lambda: opt.collect(outputs, inputs[:700], targets[:700]),
            lambda: opt.collect(lambda m, i, t: [{"row": row} for row in i]),
            lambda: opt.total(gram),
            lambda: opt.predict(iter([inputs, inputs])),
            lambda: opt.evaluate_many(points, gradients=True),
            of_the_last,
        ]
        opt.keep_outputs = True
        pids = [os.getpid(), *(worker.pid for worker in opt.workers)]
        for call in calls:
            for _ in range(5):
                call()
            gc.collect()
            before, memory = held(pids), [psutil.Process(pid).memory_info().rss for pid in pids]
            gc.disable()
            try:
                for _ in range(300):
                    call()
            finally:
                gc.enable()
            after = held(pids)
            for (fds, maps), (fds_before, maps_before) in zip(after, before, strict=True):
                assert fds <= fds_before + 6 and maps <= maps_before + 6, (before, after)
            for pid, then in zip(pids, memory, strict=True):
                assert psutil.Process(pid).memory_info().rss < then + 2**25


@EACH
def test_results_die_with_their_last_reference(parallelize: int) -> None:
    with make(parallelize) as opt:
        opt.evaluate()
        gc.collect()
        gc.disable()
        try:
            for call in (
                lambda: opt.collect(wide),
                lambda: opt.total(gram),
                lambda: opt.predict(X),
                lambda: opt.evaluate_many(opt.parameters[None], gradients=True)[1],
                lambda: opt.collect(lambda m, inputs, targets: [[row] for row in inputs])[0][0],
            ):
                found = call()
                gone = weakref.ref(found)
                del found
                assert gone() is None and gc.collect() == 0
        finally:
            gc.enable()


def shared_bytes() -> int:
    """Of the memory without a name that this process has descriptors of."""
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            if "memfd" in os.readlink(entry.path):
                status = os.stat(entry.path)
                found[status.st_ino] = 512 * status.st_blocks
        except OSError:
            continue
    return sum(found.values())


def test_memory_for_a_large_total_is_given_back_by_a_small_one(nobody_late: None) -> None:
    def large(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.ones(3000, 2000, dtype=torch.float64)

    with make(2) as opt:
        small = opt.total(gram)
        before = shared_bytes()
        for _ in range(2):
            assert opt.total(large).sum() == 8 * 6_000_000
            assert shared_bytes() > before + 2 * 48_000_000  # kept for the next one
            assert torch.equal(opt.total(gram), small)
            assert shared_bytes() < before + 2**22
            assert sum(opt.run_on_workers(lambda worker: shared_bytes())) < 2 * before + 2**22
            assert torch.equal(opt.total(gram), small)


def test_workers_hold_nothing_of_a_task_that_is_over() -> None:
    with make(2) as opt:
        opt.evaluate()
        opt.total(gram)
        before = opt.run_on_workers(lambda worker: shared_bytes())
        large = torch.zeros(40, 10_000, dtype=torch.float64)
        opt.collect(lambda m, inputs, targets: inputs, large)
        opt.predict(X, transform=lambda rows: rows + large.sum())
        kept = 2 * large.nbytes  # of the batch, mapped as it is and as a copy: the memory for the next one
        assert all(
            now <= then + kept + 2**16
            for now, then in zip(opt.run_on_workers(lambda worker: shared_bytes()), before, strict=True)
        )


def test_a_call_is_two_messages_to_a_worker_and_a_prediction_again_is_none(nobody_late: None) -> None:
    """The function with its file, and that it is over; an order is on the page."""
    with loaded(nn.Linear(3, 2), nn.MSELoss(), torch.ones(8, 3), torch.ones(8, 2), parallelize=2) as opt:
        backend = opt._function.workers.backend
        assert isinstance(backend, ProcessBackend)
        calls: list[tuple[Callable[[], Any], int]] = [(lambda: opt.collect(outputs), 2), (opt.predict, 0)]
        for call, messages in calls:
            call()
            opt.run_on_workers(lambda worker: None)  # which has answered all
            workers = backend._pool.workers.values()
            before = [worker.channel.sent for worker in workers]
            call()
            assert [worker.channel.sent for worker in workers] == [sent + messages for sent in before]


def fails(opt: Any) -> None:
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        opt.collect(lambda module, inputs, targets: 1 / 0)


def kill(opt: Any) -> None:
    os.kill(next(worker.pid for worker in opt.workers if worker.alive), signal.SIGKILL)


def resize(opt: Any) -> None:
    opt.resize(len(opt.workers) + 1)
    opt.load(X, Y)


def scale(opt: Any) -> None:
    opt.module.scale += 1.0
    opt.load(X, Y)


def keep_outputs(opt: Any) -> None:
    opt.keep_outputs = True
    opt.evaluate()
    opt.keep_outputs = False


OTHER = (2 * X + Y.repeat(1, 2)[:, :6], Y)

# What comes between two predictions of the loaded batch.
BETWEEN: dict[str, Callable[[Any], object]] = {
    "nothing": lambda opt: None,
    "other parameters": lambda opt: opt.parameters.add_(0.25),
    "a step": lambda opt: (opt.step(X, Y), opt.load(X, Y)),
    "another batch": lambda opt: opt.load(*OTHER),
    "a smaller batch": lambda opt: opt.load(X[:7], Y[:7]),
    "another program": scale,
    "another function": lambda opt: opt.collect(outputs, X[:3], Y[:3]),
    "a function that fails": fails,
    "a worker's death": kill,
    "more workers": resize,
    "a function on the workers": lambda opt: opt.run_on_workers(lambda worker: worker.rank),
    "an evaluation": lambda opt: opt.evaluate(),
    "an evaluation with outputs": keep_outputs,
}


class Scaled(nn.Module):
    """Draws, has an attribute that is no tensor, and returns many columns if it is `wide`."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.mlp, self.drop = Mlp().double(), nn.Dropout(0.5)
        self.scale, self.wide = 1.0, wide

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.scale * self.drop(self.mlp(inputs))
        return found.repeat(1, self.wide)


class Few(nn.MSELoss):
    """Of the first columns."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output[:, : target.shape[1]], target)


@pytest.mark.parametrize("width", [1, 4000], ids=["copied", "mapped"])
@pytest.mark.parametrize("what", BETWEEN)
def test_a_prediction_again_is_of_what_is_there_now(nobody_late: None, what: str, width: int) -> None:
    module = Scaled(width)
    with BatchOptimizer(module, Few(), parallelize=2, optimizer="sgd") as opt:
        opt.load(X, Y)
        kept = []
        for again in range(5):
            if again >= 2:
                BETWEEN[what](opt)
            inputs = {"another batch": OTHER[0], "a smaller batch": X[:7]}.get(what, X) if again >= 2 else X
            found, expected = opt.predict(), module.scale * module.mlp(inputs).detach().repeat(1, width)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            kept.append((found, found.clone()))
            if again == 2:
                del kept[0], found
        assert all(torch.equal(found, then) for found, then in kept)


@pytest.mark.parametrize("held", [False, True])
def test_outputs_are_kept_after_a_large_result_took_their_file_and_a_worker_died(held: bool) -> None:
    def large(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return inputs.new_ones(len(inputs), 250_000)

    module = Scaled(4000 if held else 1).eval()
    with BatchOptimizer(module, Few(), parallelize=2, optimizer=None) as opt:
        for _ in range(2):
            opt.load(X, Y)
            opt.keep_outputs = True
            opt.evaluate()
            results = [opt.collect(large) for _ in range(3)]
            assert all(rows.sum() == 40 * 250_000 for rows in results)
            kill(opt)
            with suppress(WorkerLostError):  # it may die in there
                opt.run_on_workers(lambda worker: worker.rank)
            assert opt.run_on_workers(lambda worker: worker.rank) == [0, 1]
            module.scale += 1.0
            opt.load(X, Y)
            opt.evaluate()
            torch.testing.assert_close(opt.outputs(), module(X).detach(), rtol=1e-12, atol=1e-12)


def test_what_a_function_keeps_of_its_own_tensors_stays_what_it_was() -> None:
    """In a worker, for later calls: others' tensors come to other memory."""

    def keep(module: nn.Module, inputs: torch.Tensor, targets: Any, own: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = vars(nn.functional).setdefault("_kept_by_the_test", own)
        return kept.expand(len(inputs), -1).clone()

    with loaded(nn.Linear(3, 2), nn.MSELoss(), torch.ones(8, 3), torch.ones(8, 2), parallelize=2) as opt:
        for value in (1.0, 2.0, 3.0):
            found = opt.collect(partial(keep, own=torch.full((5,), value)))
            assert torch.equal(found, torch.ones(8, 5))


# ---- on workers whose speeds differ


MANY = torch.linspace(-2.0, 2.0, 60 * 6, dtype=torch.float64).reshape(60, 6).sin()


def rows(module: nn.Module, inputs: torch.Tensor, targets: None) -> torch.Tensor:
    """Those of the samples."""
    return inputs


@pytest.mark.parametrize("speeds", [(1.0, 9.0, 3.0), (0.001, 1.0, 0.001)])
def test_results_come_in_the_order_of_samples_whatever_the_shares(speeds: tuple[float, ...]) -> None:
    with BatchOptimizer(Mlp().double(), nn.MSELoss(), optimizer=None, parallelize=3, speeds=speeds) as opt:
        assert torch.equal(opt.collect(rows, MANY), MANY)
        assert torch.equal(torch.stack(opt.collect(lambda m, inputs, targets: [*inputs], MANY)), MANY)
        torch.testing.assert_close(opt.total(lambda m, inputs, targets: inputs.sum(0), MANY), MANY.sum(0))


def test_work_that_changes_hands_stays_in_order() -> None:
    def late(module: nn.Module, inputs: torch.Tensor, targets: None) -> torch.Tensor:
        time.sleep(0.05 if inputs[0, 0] < MANY[30, 0] else 0.001)
        return inputs

    with BatchOptimizer(
        Mlp().double(), nn.MSELoss(), optimizer=None, parallelize=2, chunk_size=2, speeds=(1, 1)
    ) as opt:
        assert torch.equal(opt.collect(late, MANY), MANY)
        with opt.timeline() as timeline:
            assert torch.equal(opt.collect(late, MANY), MANY)
        assert "collect" in str(timeline)
        done = {
            lane: sum(e.details["samples"] for e in timeline.events if e.lane == lane and e.name == "collect")
            for lane in (0, 1)
        }
        assert sum(done.values()) >= len(MANY) and done[1] > done[0]


def test_tasks_share_the_work_by_what_they_have_shown() -> None:
    def counted(module: nn.Module, inputs: torch.Tensor, targets: None) -> list[int]:
        time.sleep(len(inputs) * (0.01 if os.environ["RANK"] == "1" else 0.002))
        return [len(inputs)] * len(inputs)

    with BatchOptimizer(Mlp().double(), nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        opt.run_on_workers(lambda worker: os.environ.update(RANK=str(worker.rank)))
        first, *_, last = opt.collect(counted, MANY)
        assert first == last == 30
        first, *_, last = opt.collect(counted, MANY)
        assert first + last == 60 and first > 1.5 * last


# ---- the forms of all chunks have one reading, or the chunk that has another one is named


def common(results: Sequence[tuple[Any, int]]) -> Form:
    forms = {chunk: rows_form(result, samples)[0] for chunk, (result, samples) in enumerate(results)}
    return common_form(forms, [0, *accumulate(samples for _, samples in results)])


def columns(samples: int) -> list[torch.Tensor]:
    return [torch.zeros(samples), torch.ones(samples)]


def ragged(*lengths: int) -> list[torch.Tensor]:
    return [torch.full((length,), float(length)) for length in lengths]


def test_forms_come_in_the_order_of_chunks() -> None:
    forms = [rows_form(torch.zeros(1, i), 1)[0] for i in range(4)]
    answers = [
        Answer(0, 2, 0.0, [], forms={3: forms[3], 1: forms[1]}),
        Answer(1, 2, 0.0, [], forms={0: forms[0], 2: forms[2]}),
    ]
    assert list(forms_of(answers).items()) == list(enumerate(forms))


def test_other_chunks_decide_how_a_list_is_read() -> None:
    as_columns = common([(columns(2), 2), (columns(3), 3)])
    assert as_columns.objects is None and len(as_columns.columns) == 2
    for lengths in ((1, 2), (2, 3)):
        as_objects = common([(ragged(2, 2), 2), (ragged(*lengths), 2)])
        assert as_objects.objects is not None and [len(item) for item in as_objects.objects] == [2, 2, *lengths]


def test_a_list_that_can_be_read_both_ways_in_all_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one tensor a sample, or one row a sample .*return a tuple"):
        common([(columns(2), 2), (columns(2), 2)])
    with pytest.raises(ValueError, match="one tensor a sample, or one row a sample"):
        common([(columns(2), 2)])
    assert len(common([(tuple(columns(2)), 2)]).columns) == 2


def test_one_sample_alone_is_the_same_either_way() -> None:
    assert len(common([([torch.zeros(1, 4)], 1)]).columns) == 1


def test_objects_of_all_chunks_are_one_list() -> None:
    assert common([([1, "a"], 2), ([None], 1), ([{}, []], 2)]).objects == [1, "a", None, {}, []]


@pytest.mark.parametrize(
    "other, words",
    [
        (torch.zeros(2, 4), r"`result` \(4,\) torch.float32 for chunk 1 \(samples 3..4\), and `result` \(3,\)"),
        (torch.zeros(2, 3).double(), r"torch.float64 for chunk 1 \(samples 3..4\), and `result` \(3,\) torch.float32"),
        ((torch.zeros(2, 3),), r"`result\[0\]` .* for chunk 1"),
        ([1, 2], "a list of objects for chunk 1"),
    ],
)
def test_a_chunk_that_differs_is_named(other: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        common([(torch.zeros(3, 3), 3), (other, 2)])
    with pytest.raises(ValueError, match="chunk"):
        common([(other, 2), (torch.zeros(3, 3), 3)])
