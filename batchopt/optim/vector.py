"""An optimizer's parameters as one vector."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from batchopt.optim.algebra import copy
from batchopt_workers.wire.layout import reals


def _whole(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return all elements as one vector, in place: None unless each tensor lies directly after the one before. In main
    memory addresses alone decide, whatever the storages; elsewhere they must be parts of one storage. The vector is
    valid as long as `tensors` are."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return None
    first, on_cpu = filled[0], filled[0].device.type == "cpu"
    dtype = first.dtype.to_real()
    start = end = first.data_ptr()
    for tensor in filled:
        as_it_is = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        alike = tensor.dtype.to_real() is dtype and as_it_is
        if not alike or tensor.data_ptr() != end:
            return None
        if not on_cpu and tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += tensor.nbytes
    if on_cpu:
        return torch.frombuffer((ctypes.c_char * (end - start)).from_address(start), dtype=dtype)
    return reals(first).as_strided(((end - start) // dtype.itemsize,), (1,))


class Vector:
    """Reads and writes parameters, and reads their gradients, as one vector of `size` elements; in a single operation
    if they are contiguous in memory.

    `dtype` is that of the vector: the parameters', real, but at least single precision. Raises `ValueError` for
    parameters on several devices, or of several dtypes, where complex ones count as their real numbers.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        kinds = {(parameter.device, parameter.dtype.to_real()) for parameter in parameters}
        if len(kinds) > 1:
            raise ValueError(f"the parameters must share one device and one dtype; got {sorted(map(str, kinds))}")
        ((self.device, dtype),) = kinds
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.size = sum(reals(parameter.detach()).numel() for parameter in parameters)
        self._parameters = list(parameters)

    def empty(self) -> torch.Tensor:
        """Return a new uninitialised vector."""
        return torch.empty(self.size, dtype=self.dtype, device=self.device)

    def read(self, out: torch.Tensor) -> None:
        """Copy the parameters to `out`."""
        self._gather([parameter.detach() for parameter in self._parameters], out)

    def read_gradient(self, out: torch.Tensor) -> None:
        """Copy their gradients to `out`; 0 where there is none."""
        self._gather([_gradient(parameter) for parameter in self._parameters], out)

    def write(self, x: torch.Tensor) -> None:
        """Set the parameters to `x`: graphs that need their previous values can no longer be differentiated."""
        tensors = [parameter.detach() for parameter in self._parameters]
        for part, tensor in self._parts(tensors, x):
            copy(part.view_as(tensor), tensor)
        torch.autograd.graph.increment_version(self._parameters)

    def hold_frozen(self, vector: torch.Tensor) -> None:
        """Set the elements of `vector` to 0 that belong to parameters which require no gradient."""
        if not all(parameter.requires_grad for parameter in self._parameters):
            sizes = [reals(parameter.detach()).numel() for parameter in self._parameters]
            for parameter, part in zip(self._parameters, torch.split(vector, sizes), strict=True):
                if not parameter.requires_grad:
                    part.zero_()

    def _gather(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        for part, tensor in self._parts(tensors, out):
            copy(tensor.reshape(-1), part)

    def _parts(self, tensors: Sequence[torch.Tensor], vector: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the part of `vector` that belongs to each of `tensors`; a single part if they are contiguous."""
        if (whole := _whole(tensors)) is not None:
            return [(vector, whole)]
        parts, start = [], 0
        for tensor in tensors:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            parts.append((vector[start : start + real.numel()], real))
            start += real.numel()
        return parts


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient, dense; 0 where there is none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient.detach().resolve_conj()
