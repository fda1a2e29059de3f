from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchopt_workers.data.memory import SharedBlock
from batchopt_workers.data.packing import Packed, dumps, pack, unpack

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
DTYPES += [torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.permute(tuple(reversed(range(t.dim())))),
    "every other": lambda t: t[..., ::2] if t.dim() else t,
    "expanded": lambda t: t.expand(3, *t.shape),
}


class Pair(NamedTuple):
    first: Any
    second: Any


class Marked(torch.Tensor):
    """A tensor subclass."""


def through(packed: Packed, parameters: Sequence[torch.Tensor] = ()) -> Any:
    block = SharedBlock.create(packed.nbytes)
    packed.place(block)
    return unpack(packed.data, packed.placements, block, parameters)


def round_trip(obj: Any, parameters: Sequence[torch.Tensor] = ()) -> Any:
    return through(pack(obj, parameters), parameters)


def raw(tensor: torch.Tensor) -> list[int]:
    """The bytes of the elements in row-major order."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits (of bool: 0 and 1) in any small shape, contiguous or not."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = torch.Size(draw(st.lists(st.integers(0, 4), max_size=3)))
    nbytes = shape.numel() * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=nbytes, max_size=nbytes)))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    tensor = torch.frombuffer(data, dtype=dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)
    return VIEWS[draw(st.sampled_from(sorted(VIEWS)))](tensor)


# -0.0, a quiet and a signalling NaN, all ones
BITS = {
    torch.float16: torch.tensor([-(2**15), 0x7E01, 0x7C01, -1], dtype=torch.int16),
    torch.float32: torch.tensor([-(2**31), 0x7FC00001, 0x7F800001, -1], dtype=torch.int32),
    torch.float64: torch.tensor([-(2**63), 0x7FF8000000000001, 0x7FF0000000000001, -1]),
}


@given(
    tensors()
    | st.builds(
        lambda dtype, view: VIEWS[view](BITS[dtype].view(dtype).view(2, 2)),
        st.sampled_from([*BITS]),
        st.sampled_from([*VIEWS]),
    )
)
@settings(deadline=None)
def test_a_tensor_keeps_its_type_shape_and_every_bit(tensor: torch.Tensor) -> None:
    found = round_trip(tensor)
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert raw(found) == raw(tensor)


@given(st.permutations(range(4)), st.lists(st.integers(0, 4), min_size=4, max_size=4))
@settings(deadline=None)
def test_a_dense_tensor_keeps_its_strides_whatever_the_order_of_its_dimensions(
    order: list[int], shape: list[int]
) -> None:
    numbers = torch.arange(float(torch.Size(shape).numel()))
    for tensor in (numbers.view(shape).permute(order), nn.Parameter(numbers.view(shape).permute(order))):
        found = round_trip(tensor)
        assert found.stride() == tensor.stride()
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_keeps_whether_it_requires_a_gradient_and_is_a_leaf(requires_grad: bool) -> None:
    leaf = torch.ones(2, requires_grad=requires_grad)
    for tensor, kind in (
        (leaf, torch.Tensor),
        (leaf * 2, torch.Tensor),
        (nn.Parameter(leaf, requires_grad), nn.Parameter),
    ):
        found = round_trip(tensor)
        assert type(found) is kind and found.is_leaf and found.requires_grad is requires_grad
        assert torch.equal(found, tensor)


def test_a_module_is_built_around_the_parameters_given_and_tied_weights_stay_tied() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    parameters = list(module.parameters())
    copies = copy.deepcopy(parameters)
    packed = pack(module, parameters)
    found = through(packed, copies)
    assert [id(parameter) for parameter in found.parameters()] == [id(parameter) for parameter in copies]
    assert found[2].weight is found[0].weight
    assert len(packed.tensors) == len(list(module.buffers()))
    assert torch.equal(found(torch.eye(3)), module(torch.eye(3)))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3) | tensors(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.builds(Pair, inner, inner)
            | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
@settings(deadline=None)
def test_nested_structures_keep_their_types_and_values(data: Any) -> None:
    assert_same(round_trip(data), data)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, raw(found)) == (expected.dtype, expected.shape, raw(expected))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.ones(2).as_subclass(Marked),
        torch.ones(2, device="meta"),
        torch.eye(3).to_sparse(),
    ],
    ids=["conjugated", "negated", "subclass", "meta", "sparse"],
)
def test_unusual_tensors_are_pickled_as_ever(tensor: torch.Tensor) -> None:
    packed = pack(tensor)
    found = through(packed)
    assert packed.tensors == () or tensor.is_sparse
    assert type(found) is type(tensor)
    for name in ("dtype", "shape", "device", "layout"):
        assert getattr(found, name) == getattr(tensor, name)
    assert tensor.is_meta or torch.equal(found.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("send", [pack, dumps])
def test_a_tensor_on_an_accelerator_is_not_sent(send: Callable[[Any], object]) -> None:
    with FakeTensorMode():
        there = torch.ones(2, device="cuda")
    with pytest.raises(TypeError, match=r"a tensor is on cuda:0, and workers run on cpu: call \.cpu\(\) on it"):
        send({"a": there})
