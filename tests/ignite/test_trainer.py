"""The engines: steps, their events, errors, and going on from a position."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import ignite.metrics
import pytest
import torch
from ignite.engine import Engine, Events
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import batchopt
from batchopt import Batches, Iteration, NonFiniteError, WorkerError
from batchopt.ignite import StepEvents, create_evaluator, create_trainer, guarded
from tests.ignite.common import Killed, batches, data, optimizer

# Importing


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.slow
def test_ignite_is_imported_when_it_is_used() -> None:
    done = run("import sys, batchopt; assert 'ignite' not in sys.modules; batchopt.ignite.fit; sys.modules['ignite']")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_ignite_the_error_says_how_to_install_it() -> None:
    done = run("import sys; sys.modules.update({'ignite': None, 'ignite.engine': None}); import batchopt.ignite")
    assert "ImportError: batchopt.ignite needs pytorch-ignite: pip install batchopt[ignite]" in done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        batchopt.nothing  # noqa: B018


# Steps


@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_trainer_makes_the_steps_of_a_loop(parallelize: int) -> None:
    with optimizer(parallelize) as opt:
        epochs, losses = batches(), []
        while epochs.epoch < 2:
            losses += list(opt.steps(epochs))
        expected = opt.fingerprint()
    with optimizer(parallelize) as opt:
        found: list[Any] = []
        trainer = create_trainer(opt, output_transform=lambda loss: {"loss": loss})
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: found.append(trainer.state.output))
        state = trainer.run(batches(), max_epochs=2)
        assert opt.fingerprint() == expected
    assert (state.epoch, state.iteration, state.epoch_length) == (2, 10, 5)
    assert found == [{"loss": loss} for loss in losses]


def test_any_loader_and_batches_that_are_prepared_by_the_user() -> None:
    x, y = data()
    with optimizer() as opt:
        for _ in range(2):
            opt.step(x, y)
        expected = opt.fingerprint()

    def swapped(batch: Any) -> Any:
        return batch[1], batch[0]

    for given in ([(y, x)], Batches((y, x))):
        with optimizer() as opt:
            create_trainer(opt, prepare_batch=swapped).run(given, max_epochs=2)
            assert opt.fingerprint() == expected


def test_a_run_goes_on_from_the_position_of_batches() -> None:
    with optimizer() as opt:
        create_trainer(opt).run(batches(), max_epochs=2)
        expected = opt.fingerprint()
    for stop in range(1, 11):
        with optimizer() as opt:
            position = batches()
            trainer = create_trainer(opt)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), trainer.terminate)
            trainer.run(position, max_epochs=2)
            assert position.iteration == stop
            # the same engine, and another one
            state = (trainer if stop % 2 else create_trainer(opt)).run(position, max_epochs=2)
            assert (state.epoch, state.iteration, opt.fingerprint()) == (2, 10, expected)
            assert create_trainer(opt).run(position, max_epochs=2).iteration == 10  # nothing is left to do
            assert opt.fingerprint() == expected


def test_an_interrupted_run_goes_on() -> None:
    with optimizer() as opt:
        trainer, position = create_trainer(opt), batches()
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=[2, 7]), trainer.interrupt)
        for expected in (2, 7, 10):
            trainer.run(position, max_epochs=2)
            assert trainer.state.iteration == position.iteration == expected


def test_svrg_is_told_of_passes_and_not_twice_where_an_epoch_goes_on() -> None:
    def svrg(params: Any) -> Any:
        return batchopt.SVRG(torch.optim.SGD(params, lr=0.01))

    with optimizer(optimizer=svrg) as opt:
        epochs = batches()
        while epochs.epoch < 3:
            opt.optimizer.begin_pass(lambda: opt.full_gradient(epochs))  # type: ignore[union-attr]
            list(opt.steps(epochs))
        expected = opt.fingerprint()
    for stop in (2, 5, 7):
        with optimizer(optimizer=svrg) as opt:
            position = batches()
            trainer = create_trainer(opt)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), trainer.terminate)
            trainer.run(position, max_epochs=3)
            create_trainer(opt).run(position, max_epochs=3)
            assert opt.fingerprint() == expected
    with optimizer(optimizer=svrg) as opt:
        create_trainer(opt).run([data()], max_epochs=2)  # another loader


# Events in steps


def test_evaluations_and_iterations_have_events_and_the_users_callback_stays() -> None:
    mine: list[int] = []

    def callback(iteration: Iteration) -> bool:
        mine.append(iteration.number)
        return False

    def lbfgs(params: Any) -> Any:
        return batchopt.LBFGS(params, max_iter=3, callback=callback)

    with optimizer(optimizer=lbfgs) as opt:
        create_trainer(opt).run(batches(), max_epochs=1)
        expected, count = opt.fingerprint(), len(mine)
    mine.clear()
    evaluations, iterates, tenth = [], [], []
    with optimizer(optimizer=lbfgs) as opt:
        trainer = create_trainer(opt)
        state: Any = trainer.state
        trainer.add_event_handler(StepEvents.EVALUATED, lambda: evaluations.append(state.evaluation))
        trainer.add_event_handler(StepEvents.EVALUATED(every=10), lambda: tenth.append(state.evaluation.number))
        trainer.add_event_handler(StepEvents.ACCEPTED, lambda: iterates.append(state.iterate))
        trainer.run(batches(), max_epochs=1)
        assert opt.fingerprint() == expected
        assert opt.optimizer.callback is callback  # type: ignore[union-attr]
        assert [e.number for e in evaluations] == list(range(1, opt.eval_counter + 1))
        assert tenth == list(range(10, opt.eval_counter + 1, 10))
    assert len(mine) == count and [iterate.number for iterate in iterates] == mine
    assert all(e.loss > 0 and e.seconds > 0 and e.terms == {} for e in evaluations)


def test_terminate_ends_the_step_of_an_optimizer_of_ours() -> None:
    with optimizer(optimizer=lambda params: batchopt.LBFGS(params, max_iter=50)) as opt:
        trainer = create_trainer(opt)
        trainer.add_event_handler(StepEvents.ACCEPTED(once=2), trainer.terminate)
        trainer.run(batches(), max_epochs=2)
        assert trainer.state.iteration == 1 and opt.result.iterations == 2


# Errors


def test_every_handler_of_an_error_runs_and_the_error_itself_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []

    def first(_: Engine, error: Exception) -> None:
        told.append(error)
        raise RuntimeError("in the handler")

    def step(*_: Any) -> None:
        raise Killed

    trainer = guarded(Engine(step))
    trainer.add_event_handler(Events.EXCEPTION_RAISED, first)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: told.append(error))
    epochs: list[int] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: epochs.append(1))
    with caplog.at_level(logging.ERROR, "batchopt"), pytest.raises(Killed) as caught:
        trainer.run([1, 2], max_epochs=2)
    assert told == [caught.value, caught.value] and epochs == []
    assert "a handler of Killed failed" in caplog.text and "in the handler" in caplog.text
    with pytest.raises(Killed):
        trainer.run([1, 2], max_epochs=2)
    assert len(told) == 4


@pytest.mark.parametrize("parallelize", [1, 2])
def test_what_is_not_finite_stops_before_the_parameters_move_and_the_run_can_go_on(parallelize: int) -> None:
    with optimizer(parallelize) as opt:
        create_trainer(opt).run(Batches(data(), 10), max_epochs=2)
        expected = opt.fingerprint()
    x, y = data()
    good = x[30].clone()
    told: list[Any] = []
    with optimizer(parallelize) as opt:
        x[30] = torch.nan
        position, trainer = Batches((x, y), 10), create_trainer(opt)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: told.append(type(error)))
        seen: list[torch.Tensor] = []
        trainer.add_event_handler(Events.ITERATION_STARTED, lambda: seen.append(opt.parameters.clone()))
        with pytest.raises(NonFiniteError):
            trainer.run(position, max_epochs=2)
        assert told == [NonFiniteError] and position.iteration == 3
        assert torch.equal(seen[-1], opt.parameters)
        x[30] = good
        trainer.run(position, max_epochs=2)
        assert opt.fingerprint() == expected


# Evaluation

NO: Any = 3
WITHOUT: Any = lambda: 1  # noqa: E731


@pytest.mark.parametrize("parallelize", [1, 2])
def test_metrics_are_those_of_one_process(parallelize: int) -> None:
    import torchmetrics  # three seconds, which whoever runs other tests need not wait for

    x, y = data()
    made = {"loss": mse_loss, "mse": torchmetrics.MeanSquaredError(), "ignite": ignite.metrics.MeanSquaredError()}
    with optimizer(1) as opt:
        expected = opt.score((x, y), made)
        with torch.no_grad():
            assert expected["loss"] == mse_loss(opt.module.eval()(x), y).item()
    with optimizer(parallelize) as opt:
        evaluator = create_evaluator(opt, made)
        rows: list[int] = []
        evaluator.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda: rows.append(len(evaluator.state.output[0])),  # type: ignore[index]
        )
        dataset = TensorDataset(x, y)
        loader = DataLoader(dataset, 20)
        given: Any
        for given in ((x, y), loader, dataset, Batches((x, y), 15), Batches(dataset, 20)):
            assert evaluator.run(given).metrics == expected
        assert rows == [50, 20, 20, 10, 50, 15, 15, 15, 5, 20, 20, 10]
        assert create_evaluator(opt, mse_loss).run((x, y)).metrics == {"metric": expected["loss"]}
        assert opt.eval_counter == 0 and opt.module.training


def test_errors_of_an_evaluation() -> None:
    with optimizer() as opt:
        evaluator = create_evaluator(opt, {"loss": mse_loss})
        evaluator.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
        with pytest.raises(WorkerError):
            evaluator.run((data()[0][:, :2], data()[1]))
        with pytest.raises(ValueError, match="there are no targets"):
            evaluator.run(DataLoader(data()[0], 20))  # type: ignore[arg-type]
        assert evaluator.run(data()).metrics["loss"] > 0
        with pytest.raises(ValueError, match="goes over its data once"):
            evaluator.run(data(), max_epochs=2)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda opt: create_trainer(opt.module), "`opt` must be a BatchOptimizer; got Sequential"),
        (lambda opt: create_trainer(opt, prepare_batch=NO), "`prepare_batch` must be callable"),
        (lambda opt: create_trainer(opt, output_transform=WITHOUT), "`output_transform` must be callable"),
        (lambda opt: create_evaluator(NO), "`opt` must be a BatchOptimizer; got int"),
        (lambda opt: create_evaluator(opt, [mse_loss]), "`metrics` is a list"),
        (lambda opt: create_evaluator(opt, mse_loss, transform=NO), "`transform` must be callable"),
    ],
)
def test_wrong_arguments_are_named(make: Any, message: str) -> None:
    with optimizer() as opt, pytest.raises(TypeError, match=message):
        make(opt)
