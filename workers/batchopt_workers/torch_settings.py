"""The settings of torch that a worker shares with the parent, so that the same code computes the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TorchSettings:
    """Process-wide settings that change what a module computes."""

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warns_only: bool
    matmul_precision: str

    @classmethod
    def current(cls) -> TorchSettings:
        """Those of this process."""
        return cls(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
        )

    def apply(self) -> None:
        """Make them those of this process.

        Only what differs: torch's switch of deterministic algorithms imports a compiler, half a second's work.
        """
        now = TorchSettings.current()
        torch.set_default_dtype(self.default_dtype)
        if (now.deterministic, now.deterministic_warns_only) != (self.deterministic, self.deterministic_warns_only):
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns_only)
        torch.set_float32_matmul_precision(self.matmul_precision)
