"""Reading batches: every form that is one, and what each other thing is told."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchopt import BatchOptimizer
from batchopt._data.batches import BatchSpec, read_part
from batchopt_workers.data.batch import Columns, Part, Samples
from batchopt_workers.data.items import Collate
from batchopt_workers.data.structures import tensors_in


class Pair(NamedTuple):
    points: torch.Tensor
    values: torch.Tensor


def read(inputs: Any, targets: Any = None, options: Any = None, collate: Collate | None = None) -> Part:
    return read_part(inputs, targets, options, BatchSpec(collate, "mean", None, None))


def concatenate(samples: list[Any]) -> Any:
    return samples


class Encoding(UserDict[str, torch.Tensor]):
    """As transformers' BatchEncoding: items are attributes, too."""

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["data"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Record:
    points: torch.Tensor
    values: torch.Tensor
    name: str = "no tensor"
    total: int = field(init=False, default=0)


COLUMNS: dict[str, Any] = {
    "another mapping": Encoding(points=torch.rand(4, 3), values=torch.rand(4)),
    "mapping that cannot be changed": MappingProxyType({"points": torch.rand(4, 3)}),
    "dataclass": Record(torch.rand(4, 3), torch.rand(4)),
    "in one another": {"points": (Record(torch.rand(4, 3), torch.rand(4)), Encoding(a=torch.rand(4)))},
    "tensor": torch.rand(4, 3),
    "vector": torch.rand(4),
    "tuple": (torch.rand(4, 3), torch.rand(4)),
    "named tuple": Pair(torch.rand(4, 3), torch.rand(4)),
    "dict": {"points": torch.rand(4, 3), "values": torch.rand(4)},
    "nested": {"points": (torch.rand(4, 3), [torch.rand(4), torch.rand(4, 1)]), "label": "no tensor"},
    "integers": torch.arange(4),
    "leaf that requires grad": torch.rand(4, 3, requires_grad=True),
}

SAMPLES: dict[str, list[Any]] = {
    "tensors of many lengths": [torch.rand(n) for n in (1, 2, 3, 4)],
    "0-dim tensors": [torch.tensor(float(n)) for n in range(4)],
    "dicts": [{"atoms": torch.rand(n, 3), "charge": n} for n in range(4)],
    "tuples": [(torch.rand(3), torch.rand(3))] * 4,
    "no tensors": ["a", "b", "c", "d"],
}


@pytest.mark.parametrize("targets", [None, torch.rand(4), [0, 1, 2, 3]], ids=["no targets", "tensor", "list"])
@pytest.mark.parametrize("inputs", COLUMNS.values(), ids=COLUMNS)
def test_columns_are_samples_along_the_first_dimension(inputs: Any, targets: Any) -> None:
    batch = read(inputs, targets)
    assert batch.size == 4
    assert isinstance(batch.inputs, Columns)
    assert batch.inputs.data is inputs
    assert batch.targets is None if targets is None else batch.targets is not None and batch.targets.data is targets


@pytest.mark.parametrize("targets", [None, torch.rand(4), [0, 1, 2, 3]], ids=["no targets", "tensor", "list"])
@pytest.mark.parametrize("inputs", SAMPLES.values(), ids=SAMPLES)
def test_lists_have_one_entry_a_sample(inputs: list[Any], targets: Any) -> None:
    batch = read(inputs, targets)
    assert batch.size == 4
    assert isinstance(batch.inputs, Samples)
    assert batch.inputs.data is inputs


TWO_OF_FOUR = [torch.rand(4, 2), torch.rand(4)]


@pytest.mark.parametrize(
    "targets, options, form",
    [
        (torch.rand(4), None, Columns),
        (torch.rand(2), None, Samples),
        ([1, 2, 3, 4], None, Columns),
        ([1, 2], None, Samples),
        (None, [None] * 4, Columns),
        (None, [None] * 2, Samples),
        ([torch.rand(4), torch.rand(4)], [None] * 4, Columns),
    ],
)
def test_the_number_of_targets_and_options_tells_columns_from_samples(targets: Any, options: Any, form: type) -> None:
    batch = read(TWO_OF_FOUR, targets, options)
    assert type(batch.inputs) is form
    assert batch.size == (4 if form is Columns else 2)


def test_two_lists_of_tensors_that_are_alike_are_lists_of_samples() -> None:
    batch = read([torch.zeros(5, 1)] * 3, [torch.zeros(5, 2)] * 3)
    assert isinstance(batch.inputs, Samples) and isinstance(batch.targets, Samples) and batch.size == 3
    columns = read([torch.zeros(5, 1)] * 3, [0, 1, 2, 3, 4])
    assert isinstance(columns.inputs, Columns) and columns.size == 5
    batch = read([torch.rand(3)] * 3, [torch.tensor(0)] * 3)  # which only can be samples
    assert isinstance(batch.inputs, Samples) and batch.size == 3


@pytest.mark.parametrize("samples", [1, 3])
def test_options_of_nothing_say_that_each_is_a_sample_as_the_error_advises(samples: int) -> None:
    inputs = [torch.rand(samples, 2)] * samples
    with pytest.raises(ValueError, match=r"or `options` with one \(None\) a sample"):
        read(inputs)
    with pytest.raises(ValueError, match=r"or `options` with one \(None\) a sample"):
        read(inputs, options=["a"] * samples)
    batch = read(inputs, options=[None] * samples)
    assert isinstance(batch.inputs, Samples) and batch.size == samples


def test_with_a_collate_function_a_list_is_always_samples() -> None:
    batch = read(TWO_OF_FOUR, collate=concatenate)
    assert isinstance(batch.inputs, Samples)
    assert batch.size == 2
    assert batch.collate is concatenate


@pytest.mark.parametrize(
    "options", [["a", "b", None], ("a", "b", None), torch.arange(3)], ids=["list", "tuple", "tensor"]
)
def test_options_are_one_object_a_sample(options: Any) -> None:
    assert read(torch.rand(3), None, options).options == list(options)
    assert read(torch.rand(3)).options is None


WEIGHTED = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))


@pytest.mark.parametrize("reduction, weight", [("mean", 0.25), ("sum", 1.0)])
def test_the_batch_knows_how_much_its_losses_count(reduction: str, weight: float) -> None:
    targets = torch.tensor([0, 1])
    batch = read_part(torch.rand(2, 2), targets, None, BatchSpec(None, reduction, WEIGHTED, None))
    assert batch.weighting.of(0, 1) == weight


@pytest.mark.parametrize("criterion", [None, WEIGHTED], ids=["no criterion", "a criterion with its own"])
def test_denominators_that_are_given_are_the_ones_that_count(criterion: Any) -> None:
    spec = BatchSpec(None, "mean", criterion, lambda inputs, targets: inputs[:, 0] + targets)
    batch = read_part(torch.tensor([[1.0], [6.0]]), torch.tensor([0, 1]), None, spec)
    assert [batch.weighting.of(0, 1), batch.weighting.of(1, 2)] == [0.125, 0.875]


def test_denominators_are_given_the_data_as_they_were_passed() -> None:
    seen: list[Any] = []

    def ones(*data: Any) -> list[int]:
        seen.extend(data)
        return [1, 1, 1]

    inputs, targets = [X, X, X], [0, 1, 2]
    read_part(inputs, targets, None, BatchSpec(concatenate, "mean", None, ones))
    read_part(inputs, None, None, BatchSpec(concatenate, "mean", None, ones))
    assert [id(item) for item in seen] == [id(inputs), id(targets), id(inputs), id(None)]


def test_a_sum_asks_for_no_denominators() -> None:
    def never(inputs: Any, targets: Any) -> Any:
        raise AssertionError

    batch = read_part(X, None, None, BatchSpec(None, "sum", None, never))
    assert batch.weighting.of(0, 1) == 1.0


def test_the_batch_has_the_rows_of_a_criterion_that_weighs_each_sample() -> None:
    rows = torch.rand(3, 2)
    spec = BatchSpec(None, "mean", torch.nn.BCELoss(weight=rows), None)
    found = read_part(X, torch.rand(3, 2), None, spec).criterion_rows
    assert list(found) == ["weight"] and torch.equal(found["weight"], rows)
    assert read_part(X[:2], torch.rand(2, 2), None, spec).criterion_rows == {}
    assert read(X, torch.rand(3, 2)).criterion_rows == {}


X = torch.rand(3)


def on_an_accelerator() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3, 2, device="cuda:1")


@pytest.mark.parametrize(
    "wrap, path",
    [
        (lambda t: t, "inputs"),
        (lambda t: (X, t), "inputs[1]"),
        (lambda t: {"a": X, "b": [t]}, "inputs['b'][0]"),
        (lambda t: [{"a": X}, {"a": t}, {}], "inputs[1]['a']"),
    ],
    ids=["alone", "tuple", "dict", "list"],
)
def test_a_batch_is_where_the_workers_are(wrap: Callable[[torch.Tensor], Any], path: str) -> None:
    spec = BatchSpec(None, "mean", None, None, torch.device("cpu"))
    data = wrap(on_an_accelerator())
    with pytest.raises(ValueError) as caught:
        read_part(data, None, None, spec)
    message = "is on cuda:1; workers run on cpu: call .to('cpu') on it, or use parallelize=1"
    assert str(caught.value) == f"`{path}` {message}"
    assert read_part(data, None, None, BatchSpec(None, "mean", None, None)).size == 3
    assert read_part(wrap(X), None, None, spec).size == 3
    with pytest.raises(ValueError, match=r"^`targets` is on cuda:1; workers run on cpu"):
        read_part(X, on_an_accelerator(), None, spec)


def inputs_of(data: Any) -> Columns | Samples:
    """The inputs of data in memory."""
    found = read(data).inputs
    assert isinstance(found, (Columns, Samples))
    return found


def test_mappings_and_dataclasses_are_cut_and_keep_their_types() -> None:
    encoding = Encoding(points=torch.arange(4.0), values=torch.arange(4))
    part = inputs_of(encoding).slice(1, 3)
    assert type(part) is Encoding and part.points.tolist() == [1, 2] and part["values"].tolist() == [1, 2]
    assert encoding.points.tolist() == [0, 1, 2, 3]
    record = Record(torch.arange(4.0), torch.arange(4))
    part = inputs_of(record).slice(1, 3)
    assert type(part) is Record and (part.values.tolist(), part.name) == ([1, 2], "no tensor")
    assert record.values.tolist() == [0, 1, 2, 3]
    assert inputs_of([record, record]).sample(1).values.tolist() == [0, 1, 2, 3]
    frozen = inputs_of(MappingProxyType({"points": torch.arange(4)})).slice(1, 3)
    assert frozen["points"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(3, 2),
        np.arange(6.0).reshape(3, 2)[::-1],
        np.broadcast_to(np.arange(2.0), (3, 2)),
        np.arange(6, dtype=">i4").reshape(3, 2),
        np.array([[True], [False], [True]]),
    ],
    ids=["of doubles", "backwards", "read-only", "of the other byte order", "of truth values"],
)
def test_arrays_of_numbers_are_tensors(array: np.ndarray[Any, Any]) -> None:
    for given in (array, (array, array), {"a": array}):
        batch = read(given, array[:, 0])
        assert isinstance(batch.inputs, Columns) and batch.size == 3
        assert all(tensor.tolist() == array.tolist() for tensor in tensors_in(batch.inputs.data))
        assert isinstance(batch.targets, Columns) and batch.targets.data.tolist() == array[:, 0].tolist()


def test_arrays_beside_tensors_and_in_lists_stay_arrays() -> None:
    beside = inputs_of({"x": X, "names": np.array(["a", "b", "c"])}).slice(1, 3)
    assert isinstance(beside["names"], np.ndarray) and beside["names"].tolist() == ["b", "c"]
    assert isinstance(inputs_of([np.zeros(2), np.zeros(3)]).sample(1), np.ndarray)


class Uniform(UserDict[str, Any]):
    """Rejects an entry of another batch size, as a TensorDict does."""

    def __init__(self, items: Any = (), batch_size: Any = ()) -> None:
        self.batch_size = torch.Size(batch_size)
        super().__init__(items)

    def __setitem__(self, key: str, value: Any) -> None:
        if value.shape[: len(self.batch_size)] != self.batch_size:
            raise RuntimeError("batch dimension mismatch")
        super().__setitem__(key, value)

    def auto_batch_size_(self, dimensions: int) -> Uniform:
        self.batch_size = next(iter(self.values())).shape[:dimensions]
        return self


@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_mapping_of_one_batch_size_keeps_its_type_in_chunks(parallelize: int) -> None:
    inputs, targets = Uniform({"x": torch.randn(12, 3)}, [12]), torch.ones(12, 1)
    module = nn.Linear(3, 1)

    def loss_fn(module: nn.Module, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
        assert type(inputs).__name__ == "Uniform" and inputs.batch_size == (4,)
        return nn.functional.mse_loss(module(inputs["x"]), targets)

    with BatchOptimizer(module, loss_fn=loss_fn, parallelize=parallelize, chunk_size=4, check_cut=False) as opt:
        opt.load(inputs, targets)
        assert opt.evaluate().item() == pytest.approx(nn.functional.mse_loss(module(inputs["x"]), targets).item())
