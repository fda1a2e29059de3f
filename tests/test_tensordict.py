"""TensorDicts as batches: a piece is the TensorDict of its samples, as its own slice would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import batchopt

tensordict = pytest.importorskip("tensordict")  # .ci/nightly installs it
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

A, B = torch.randn(6, 5, 3), torch.randn(6, 5)


def of(size: list[int], **entries: Any) -> Any:
    return tensordict.TensorDict({"a": A, "b": B, **entries}, batch_size=size)


def named() -> Any:
    return tensordict.TensorDict({"a": A, "b": B}, batch_size=[6, 5], names=["sample", "time"])


WHOLE: dict[str, Callable[[], Any]] = {
    "one dimension": lambda: of([6]),
    "two dimensions": lambda: of([6, 5]),
    "names": named,
    "no batch size": lambda: of([]),
    "locked": lambda: of([6]).lock_(),
    "nested": lambda: of([6], inner=of([6, 5])),
    "text": lambda: of([6], unit="m"),
}


def described(piece: Any) -> Any:
    """All that a module could see of it, with lists in place of tensors."""
    inner = described(piece["inner"]) if "inner" in piece.keys() else None
    values = piece["a"].tolist(), piece["b"].tolist(), piece["unit"] if "unit" in piece.keys() else None
    return type(piece).__name__, piece.batch_size, piece.names, sorted(piece.keys()), values, inner


def expected(whole: Any, start: int, stop: int) -> Any:
    """The library's own slice; it refuses one of a TensorDict without a batch size."""
    if whole.batch_dims == 0:
        return tensordict.TensorDict({"a": A[start:stop], "b": B[start:stop]}, batch_size=[])
    return whole[start:stop]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.layer(batch["a"]).squeeze(-1) - batch["b"]
        return output


def loss_fn(module: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
    loss: torch.Tensor = (module(inputs) - targets["y"]).square().mean()
    return loss


@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.parametrize("form", WHOLE)
def test_a_piece_is_the_slice_of_the_whole(form: str, parallelize: int) -> None:
    whole, targets = WHOLE[form](), tensordict.TensorDict({"y": B}, batch_size=[6, 5])
    with batchopt.BatchOptimizer(Net(), loss_fn=loss_fn, parallelize=parallelize, chunk_size=2) as opt:
        opt.load(whole, targets)
        assert opt.evaluate().item() == pytest.approx(loss_fn(opt.module, {"a": A, "b": B}, {"y": B}).item())
        found = opt.collect(lambda module, inputs, targets: [described(inputs)] * 2)
    assert found[::2] == [described(expected(whole, i, i + 2)) for i in (0, 2, 4)]


@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_module_may_return_one(parallelize: int) -> None:
    def predicted(module: nn.Module, inputs: Any, targets: None) -> Any:
        return tensordict.TensorDict({"out": module(inputs)}, batch_size=inputs.batch_size)

    with batchopt.BatchOptimizer(Net(), loss_fn=loss_fn, parallelize=parallelize, chunk_size=2) as opt:
        found = opt.collect(predicted, of([6]))
        assert type(found) is tensordict.TensorDict and found.batch_size == torch.Size([6])
        torch.testing.assert_close(found["out"], opt.module(of([6])))


class Pair:
    a: torch.Tensor
    b: torch.Tensor


OF_CLASS: Any = tensordict.tensorclass(Pair)


def lazy() -> Any:
    return tensordict.LazyStackedTensorDict.lazy_stack([of([6])[i] for i in range(6)])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: OF_CLASS(a=A, b=B, batch_size=[6]), "Pair"),
        (lazy, "LazyStackedTensorDict"),
        (lambda: of([6]).memmap_(), "TensorDict"),
        (lambda: of([6], words=tensordict.NonTensorStack(*"abcdef")), "NonTensorStack"),
    ],
    ids=["class", "stack", "memory of a file", "list of texts"],
)
def test_others_are_refused_and_what_the_error_advises_works(make: Callable[[], Any], kind: str) -> None:
    with batchopt.BatchOptimizer(Net(), loss_fn=lambda m, x, t: m(x).square().mean(), parallelize=2) as opt:
        with pytest.raises(ValueError, match=f"is a {kind} .*call .to_tensordict"):
            opt.load(make())
        whole = make()
        opt.load(whole.to_dict() if kind == "NonTensorStack" else whole.to_tensordict())
        assert opt.evaluate().item() == pytest.approx(opt.module(of([6])).square().mean().item())
