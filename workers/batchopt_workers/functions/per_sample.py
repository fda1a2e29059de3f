"""A stand-in for the module in which each sample has its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call, vmap

from batchopt_workers.wire.structures import has_a_row_each, is_tensor, map_tensors, tensors_in


class Unmappable(Exception):
    """Samples cannot be evaluated separately in this way."""


class PerSample:
    """Called like the module, or a part of it; evaluates each sample with its own parameters, which are views of
    `parameters`, shape `(samples, ...)`. Any other use raises `Unmappable`."""

    def __init__(
        self, module: torch.nn.Module, prefix: str, parameters: Mapping[str, torch.Tensor], samples: int
    ) -> None:
        self._module, self._prefix, self._parameters, self._samples = module, prefix, parameters, samples

    def __call__(self, *arguments: Any) -> Any:
        leaves, rebuild = sample_tensors(arguments, self._samples)
        own = {
            name.removeprefix(self._prefix): parameter
            for name, parameter in self._parameters.items()
            if name.startswith(self._prefix)
        }

        def one(parameters: dict[str, torch.Tensor], *rows: torch.Tensor) -> Any:
            found = functional_call(self._module, parameters, tuple(rebuild([row.unsqueeze(0) for row in rows])))
            return map_tensors(lambda tensor: tensor.squeeze(0), found)

        return vmap(one, in_dims=(0, *[0] * len(leaves)))(own, *leaves)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, torch.nn.Parameter) and found.requires_grad:
            own = self._parameters.get(self._prefix + name)
            if own is None:
                raise Unmappable
            return own.as_subclass(OwnNumbers)
        if type(found) in (bool, int, float, str, torch.nn.Parameter):  # a frozen parameter
            return found
        if isinstance(found, torch.nn.Module):
            return PerSample(found, f"{self._prefix}{name}.", self._parameters, self._samples)
        raise Unmappable

    def __getitem__(self, key: object) -> Any:  # of a list or mapping of modules or parameters
        return getattr(self, str(key))


class OwnNumbers(torch.Tensor):
    """Numbers of which each sample has its own, shape `(samples, ...)`, to be computed with as if their shape were
    `(...)`: they meet rows of samples in these rows' dimensions. Right for what takes entry by entry; for any other
    function it may be wrong, which the comparison with a plain backward then tells."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, arguments: Any = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.Tensor.__getitem__:
                own, index = arguments
                return own[(slice(None), *(index if type(index) is tuple else (index,)))].as_subclass(cls)
            ours = [one for one in arguments if isinstance(one, cls)]
            others = [one for one in arguments if is_tensor(one) and not isinstance(one, cls)]
            rows = [one for one in others if one.shape[:1] == ours[0].shape[:1]]
            rank = max(one.dim() for one in rows or ours)
            given = [_with_rank(one, rank) if isinstance(one, cls) else one for one in arguments]
            found = function(*given, **(keywords or {}))
        return found if rows or not is_tensor(found) else found.as_subclass(cls)


def _with_rank(own: torch.Tensor, rank: int) -> torch.Tensor:
    """Return numbers of each sample with `rank` dimensions, the first of which is that of the samples."""
    shape = own.shape[1:]
    if len(shape) >= rank and own[0].numel() == 1:  # one number meets a tensor without dimensions
        shape = shape[len(shape) - rank + 1 :]
    return own.reshape(len(own), *[1] * (rank - 1 - len(shape)), *shape)


def sample_tensors(data: Any, samples: int) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """Return the tensors with a row for each sample, and a function that replaces them. Raise `Unmappable` if anything
    else has an entry for each sample."""

    def is_leaf(item: Any) -> bool:
        return is_tensor(item) or has_a_row_each(item, samples)

    leaves = [*tensors_in(data)]
    mapped = [leaf for leaf in leaves if leaf.dim() > 0 and leaf.shape[0] == samples]
    if not mapped or any(leaf.dim() > 0 and leaf.shape[0] != samples for leaf in leaves):
        raise Unmappable

    def rebuild(rows: Sequence[torch.Tensor]) -> Any:
        given = iter(rows)

        def own(item: Any) -> Any:
            if not is_tensor(item):
                raise Unmappable
            return next(given) if item.dim() > 0 else item

        return map_tensors(own, data, is_leaf)

    return mapped, rebuild
