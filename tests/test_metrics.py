"""Metrics, however they are written: each is what it is when its own library is given all outputs at once."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch

from batchopt import BatchOptimizer

SAMPLES, CLASSES = 1000, 5


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    return logits, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


@pytest.fixture(scope="module")
def ignite() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it compiles with what torch has deprecated
        import ignite.metrics
    return ignite.metrics


@pytest.fixture(scope="module")
def torchmetrics() -> ModuleType:
    found: ModuleType = pytest.importorskip("torchmetrics")
    return found


class Given(torch.nn.Module):
    """Whose outputs are its inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.one


def measured(metrics: Any, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    with BatchOptimizer(Given(outputs.dtype), torch.nn.MSELoss(), optimizer=None, chunk_size=300) as opt:
        return opt.score((outputs, targets), metrics)


ANY = torch.zeros(2), torch.zeros(2)


def same(one: Any, two: Any) -> bool:
    """Whether they are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two) and one.dtype == two.dtype
    return type(one) is type(two) and bool(one == two)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).double().mean()


# Functions, and numbers


def test_a_function_is_called_with_outputs_and_targets(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = measured({"accuracy": accuracy, "loss": torch.nn.CrossEntropyLoss()}, *data)
    assert list(found) == ["accuracy", "loss"]
    assert same(found["accuracy"], accuracy(*data).item())
    assert same(found["loss"], torch.nn.functional.cross_entropy(*data).item())


@pytest.mark.parametrize(
    "number", [3, True, 3.0, np.float32(3), np.array(3), torch.tensor(3), torch.tensor(3.0)], ids=repr
)
def test_one_number_is_a_float(number: Any) -> None:
    assert same(measured(lambda outputs, targets: number, *ANY), float(number))


@pytest.mark.parametrize("value", [torch.ones(1), np.ones(2), {"a": torch.tensor(1.0)}, "text", None, 1j], ids=repr)
def test_anything_else_is_what_the_metric_returns(value: Any) -> None:
    assert measured(lambda outputs, targets: value, *ANY) is value


# Objects


@pytest.mark.parametrize("name", ["Accuracy", "AUROC", "ConfusionMatrix", "CalibrationError", "F1Score"])
def test_those_of_torchmetrics(torchmetrics: ModuleType, data: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    def made() -> Any:
        return getattr(torchmetrics, name)(task="multiclass", num_classes=CLASSES)

    metric, expected = made(), made()
    expected.update(*data)
    value = expected.compute()
    metric.update(data[0][:100], data[1][:100])  # an epoch that was not finished
    for _ in range(2):
        assert same(measured(metric, *data), value if value.ndim else value.item())
    assert same(metric.compute(), value)


def by_engine(metric: Any, data: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """What ignite says of a metric."""
    from ignite.engine import Engine

    engine = Engine(lambda *_: data)
    metric.attach(engine, "it")
    return engine.run([0]).metrics["it"]


@pytest.mark.parametrize("name", ["Accuracy", "Precision", "TopKCategoricalAccuracy", "ConfusionMatrix"])
def test_those_of_ignite(ignite: ModuleType, data: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    options = {"ConfusionMatrix": {"num_classes": CLASSES}, "TopKCategoricalAccuracy": {"k": 2}}.get(name, {})

    def made() -> Any:
        return getattr(ignite, name)(**options)

    metric, expected = made(), by_engine(made(), data)
    metric.update((data[0][:100], data[1][:100]))
    for _ in range(2):
        assert same(measured({"it": metric}, *data)["it"], expected)
    assert np.array_equal(metric.compute(), expected)


# scikit-learn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_function_of_sklearn_gets_arrays_and_what_is_true_first(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(SAMPLES, generator=generator, dtype=torch.float64).to(dtype)
    targets = outputs.double() * 2 + torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
    true, predicted = targets.numpy(), (outputs.float() if dtype == torch.bfloat16 else outputs).numpy()
    expected = float(sklearn.metrics.r2_score(true, predicted))
    assert same(measured(sklearn.metrics.r2_score, outputs, targets), expected)
    assert expected != sklearn.metrics.r2_score(predicted, true)
    pinball = functools.partial(sklearn.metrics.mean_pinball_loss, alpha=0.1)
    assert same(measured({"pinball": pinball}, outputs, targets), {"pinball": float(pinball(true, predicted))})
