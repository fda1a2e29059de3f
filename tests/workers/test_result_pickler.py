"""What functions return is pickled with its tensors as bytes, and comes back as it was."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

import pytest
import torch

from batchopt_workers.process.loop import dumps


def back(result: Any) -> Any:
    return pickle.loads(dumps(result))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(0, 3, dtype=torch.int16),
        torch.tensor(True),
        torch.arange(8.0)[::2],
        torch.arange(3.0).expand(2, 3),
        torch.arange(3.0).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.ones(2, device="meta"),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype} {tensor.layout}",
)
def test_tensors_of_any_kind(tensor: torch.Tensor) -> None:
    found = back({"it": tensor, "again": tensor})
    assert found["it"] is found["again"]
    assert type(found["it"]) is type(tensor) and found["it"].requires_grad == tensor.requires_grad
    assert found["it"].dtype == tensor.dtype and found["it"].shape == tensor.shape
    if tensor.device.type != "meta":
        assert torch.equal(found["it"].detach().to_dense(), tensor.detach().to_dense())
        if tensor.is_contiguous():
            found["it"].detach().fill_(True)  # its own memory, to be written


def test_nothing_is_left_for_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            back([torch.zeros(3) for _ in range(10)])
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TypeError, match=r"returned an object that cannot be sent \(TypeError: cannot pickle .*lock"):
        dumps([threading.Lock()])
