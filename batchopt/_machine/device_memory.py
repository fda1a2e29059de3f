"""The memory of a card: what is free, and what an evaluation takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """The memory of one card, in bytes, as this process may use it."""

    def free(self) -> int:
        """Return what can be had now."""

    def taken_by(self, function: Callable[[], object]) -> int:
        """Call a function, and return the most that it held at once, beside what was held before."""

    def release(self) -> None:
        """Give back what is kept for later use, after there was too little."""


class CudaMemory:
    """The memory of a CUDA device, through torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """See `DeviceMemory.free`: of the device, and of what torch keeps for later use."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device))

    def taken_by(self, function: Callable[[], object]) -> int:
        """See `DeviceMemory.taken_by`. It resets the peak that `torch.cuda.max_memory_allocated` returns."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        function()
        return int(torch.cuda.max_memory_allocated(self._device) - before)

    def release(self) -> None:
        """See `DeviceMemory.release`."""
        torch.cuda.empty_cache()


# By the type of device.
MEMORY: dict[str, Callable[[torch.device], DeviceMemory]] = {"cuda": CudaMemory}
