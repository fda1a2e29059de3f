"""A module that is optimized, or was, is saved, pickled and copied as any other one is."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer

for library in ("accelerate", "huggingface_hub", "safetensors"):
    pytest.importorskip(library)

import accelerate  # noqa: E402
import huggingface_hub  # noqa: E402
import safetensors.torch  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
# Bytes that a file or a pickle may have beside what its tensors hold.
FRAME = 6_000


class Net(nn.Module):
    """Parameters of several shapes, tied, frozen and empty ones, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 200)
        self.norm = nn.BatchNorm1d(200).eval()  # in training a result would depend on the cut
        self.last = nn.Linear(200, 500)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0, 2))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.first(x)).tanh()) * self.scale + self.frozen.sum()
        return found


class Hub(Net, huggingface_hub.PyTorchModelHubMixin):
    """The same, with what the hub adds."""


WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "safetensors": lambda module, folder: safetensors.torch.save_model(module, str(folder / "model.safetensors")),
    "accelerate": lambda module, folder: accelerate.Accelerator(cpu=True).save_model(module, str(folder)),
    "the hub": lambda module, folder: module.save_pretrained(folder),
}
X = torch.linspace(-1, 1, 24).view(8, 3)
Y = torch.linspace(0, 1, 4000).view(8, 500)


@contextmanager
def trained(workers: int, closed: bool, module: nn.Module | None = None) -> Iterator[nn.Module]:
    """A module after a step, with its optimizer open or closed."""
    module = Net() if module is None else module
    dtype = next(module.parameters()).dtype
    with BatchOptimizer(module, nn.MSELoss(), optimizer="sgd", parallelize=workers) as opt:
        opt.step(X.to(dtype), Y.to(dtype))
        if closed:
            opt.close()
        yield module


def nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def saved(value: object) -> int:
    """The size of what torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def each_case(test: Any) -> Any:
    return pytest.mark.parametrize("workers, closed", [(1, False), (2, True)])(test)


@pytest.mark.slow
@each_case
def test_every_tensor_is_written(workers: int, closed: bool, tmp_path: Path) -> None:
    with trained(workers, closed, Hub()) as module:
        for writer, write in WRITERS.items():
            folder = tmp_path / writer
            folder.mkdir()
            write(module, folder)
            if writer == "the hub":
                assert_equal(Hub.from_pretrained(folder).state_dict(), module.state_dict())
                continue
            assert_equal(safetensors.torch.load_file(folder / "model.safetensors"), module.state_dict())
            again = Net()
            safetensors.torch.load_model(again, folder / "model.safetensors")
            assert_equal(again.state_dict(), module.state_dict())


@pytest.mark.slow
@each_case
def test_a_part_of_a_module_takes_its_own_bytes(workers: int, closed: bool) -> None:
    for dtype in DTYPES:
        with trained(workers, closed, Net().to(dtype)) as module:
            for part in (module.get_submodule("first"), module.get_submodule("norm"), module):
                expected = nbytes(part.state_dict())
                assert expected <= saved(part.state_dict()) < expected + 2 * FRAME
                assert expected <= len(pickle.dumps(part)) < expected + 2 * FRAME
            assert saved(module.get_parameter("scale")) < FRAME
            assert_equal(pickle.loads(pickle.dumps(module)).state_dict(), module.state_dict())


@pytest.mark.slow
@each_case
def test_a_copy_is_the_owner_of_its_values(workers: int, closed: bool) -> None:
    with trained(workers, closed) as module:
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        twin = copy.deepcopy(module)
        assert_equal(twin.state_dict(), before)
        storages = {p.untyped_storage().data_ptr() for p in twin.parameters() if p.numel()}
        assert len(storages) == 7 + 1  # the frozen one too
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.fill_(5.0)
        assert_equal(dict(module.state_dict()), before)
