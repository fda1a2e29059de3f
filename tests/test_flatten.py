"""Flattening: the module's trainable parameters become views of one vector, with every bit kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt import BatchOptimizer

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
SPECIALS = [-0.0, float("nan"), float("inf"), 5e-324, 1.0]

# How a parameter lies in memory before it is flattened.
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda values: values.view(2, 3, 2, 2),
    "0-dim": lambda values: values[0].clone(),
    "empty": lambda values: values[:0].view(3, 0),
    "transposed": lambda values: values.view(4, 6).t(),
    "every other": lambda values: values.view(12, 2)[:, 1],
    "channels last": lambda values: values.view(2, 3, 2, 2).to(memory_format=torch.channels_last),
}


def bits(tensor: torch.Tensor) -> list[int]:
    """The elements in row-major order, as integers: NaNs and signed zeros can be compared."""
    found: list[int] = tensor.detach().contiguous().view(BITS[tensor.dtype]).flatten().tolist()
    return found


def any_bits(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """24 elements of any bits at all, signed zeros, infinities and NaNs of all kinds among them."""
    limits = torch.iinfo(BITS[dtype])
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(limits.min, limits.max, (24,), generator=generator, dtype=BITS[dtype]).view(dtype)
    places = torch.randperm(24, generator=generator)[: len(SPECIALS)]
    values[places] = torch.tensor(SPECIALS, dtype=dtype)
    return values


@st.composite
def module_trees(draw: st.DrawFn) -> torch.nn.Module:
    """A tree of modules with trainable, tied and frozen parameters, and buffers."""
    root = torch.nn.Module()
    owners = [root]
    for i in range(draw(st.integers(0, 3))):
        child = torch.nn.Module()
        draw(st.sampled_from(owners)).add_module(f"child{i}", child)
        owners.append(child)
    dtype = draw(st.sampled_from(list(BITS)))
    trained: list[torch.nn.Parameter] = []
    for i in range(draw(st.integers(1, 7))):
        owner = draw(st.sampled_from(owners))
        role = draw(st.sampled_from(["trained", "tied", "frozen", "buffer"])) if trained else "trained"
        tensor = FORMS[draw(st.sampled_from(list(FORMS)))](any_bits(dtype, draw(st.integers(0, 2**32))))
        if role == "tied":
            owner.register_parameter(f"p{i}", draw(st.sampled_from(trained)))
        elif role == "buffer":
            owner.register_buffer(f"p{i}", tensor)
        else:
            parameter = torch.nn.Parameter(tensor, requires_grad=role == "trained")
            owner.register_parameter(f"p{i}", parameter)
            trained += [parameter] if role == "trained" else []
    return root


def others(module: torch.nn.Module) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Where frozen parameters and buffers are."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: (t.data_ptr(), t.stride()) for name, t in named if not t.requires_grad}


def flatten(module: torch.nn.Module) -> tuple[torch.Tensor, list[torch.nn.Parameter]]:
    """X, and the parameters that are in it, in order."""
    with BatchOptimizer(module, torch.nn.MSELoss(), optimizer=None) as opt:
        return opt.parameters, [parameter for parameter in module.parameters() if parameter.requires_grad]


@given(module_trees())
@settings(deadline=None)
def test_the_vector_has_every_bit_in_order_and_what_is_not_trained_or_tied_stays(module: torch.nn.Module) -> None:
    before = {name: (tensor.shape, bits(tensor)) for name, tensor in module.state_dict().items()}
    identities = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    elsewhere = others(module)
    x, parameters = flatten(module)
    assert {name: (tensor.shape, bits(tensor)) for name, tensor in module.state_dict().items()} == before
    assert {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)} == identities
    assert others(module) == elsewhere
    assert bits(x) == [word for parameter in parameters for word in bits(parameter)]  # tied ones count once


@given(module_trees())
@settings(deadline=None)
def test_writes_go_both_ways(module: torch.nn.Module) -> None:
    x, parameters = flatten(module)
    numbers = list(range(len(x)))
    x.copy_(torch.tensor(numbers))
    assert [value for parameter in parameters for value in parameter.flatten().tolist()] == numbers
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            parameter.fill_(-index)
    assert x.tolist() == [-index for index, parameter in enumerate(parameters) for _ in parameter.flatten()]
