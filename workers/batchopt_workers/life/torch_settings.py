"""The state of torch that a worker takes over from its parent: settings, hooks of all modules, kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

# Half of it is 0 only if denormal numbers are flushed to 0.
_TINY = 2.0**-1040
_AUTOCAST_DEVICES = ("cpu", "cuda")
# Torch 2.6 does not tell which hooks for saved tensors are in force, so they are not detected there.
TOP_SAVED_TENSORS_HOOKS: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)


class TorchSettings(NamedTuple):
    """The settings and contexts of torch that change the result of a forward.

    `autocast`: for each type of device the dtype, and whether casts are cached. `device`: the default for new tensors.
    """

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warns_only: bool
    matmul_precision: str
    mkldnn: bool
    flush_denormal: bool
    anomaly: tuple[bool, bool]
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    device: torch.device | None

    @classmethod
    def current(cls) -> TorchSettings:
        """Return those of this process and thread; takes some microseconds.

        Raise `ValueError` for a context that cannot be carried to another process.
        """
        return cls(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            torch._C._get_mkldnn_enabled(),
            _TINY * 0.5 == 0.0,
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            autocast_in_force() if torch._C._is_any_autocast_enabled() else (),
            _device(),
        )

    def apply(self) -> None:
        """Set the settings of this process; `contexts` are entered separately.

        Only those that differ: torch's switch of deterministic algorithms imports a compiler, which takes half a
        second.
        """
        now = TorchSettings.current()
        torch.set_default_dtype(self.default_dtype)
        if (now.deterministic, now.deterministic_warns_only) != (self.deterministic, self.deterministic_warns_only):
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns_only)
        torch.set_float32_matmul_precision(self.matmul_precision)
        if now.mkldnn != self.mkldnn:
            torch._C._set_mkldnn_enabled(self.mkldnn)
        if now.flush_denormal != self.flush_denormal:
            torch.set_flush_denormal(self.flush_denormal)

    @property
    def has_contexts(self) -> bool:
        """Tell whether the caller is in any context."""
        return bool(self.device is not None or self.autocast or self.anomaly[0])

    def contexts(self) -> AbstractContextManager[Any]:
        """Return the contexts that the caller is in, to be entered."""
        stack = ExitStack()
        if self.device is not None:
            stack.enter_context(self.device)
        for device, dtype, cached in self.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cached))
        if self.anomaly[0]:
            stack.enter_context(torch.autograd.set_detect_anomaly(*self.anomaly))
        return stack


def autocast_in_force() -> tuple[tuple[str, torch.dtype, bool], ...]:
    """Return, for each type of device with autocast enabled, the dtype and whether casts are cached."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    cached = torch.is_autocast_cache_enabled()
    on = filter(torch.is_autocast_enabled, _AUTOCAST_DEVICES)
    return tuple((device, torch.get_autocast_dtype(device), cached) for device in on)


def _device() -> torch.device | None:
    """Return the default device of new tensors; None is the CPU. Raise `ValueError` for other contexts."""
    if TOP_SAVED_TENSORS_HOOKS is not None and TOP_SAVED_TENSORS_HOOKS(True) is not None:
        _refuse("torch.autograd.graph.saved_tensors_hooks")
    if torch._C._len_torch_dispatch_stack():
        _refuse(f"{type(torch._C._get_dispatch_stack_at(0)).__name__} (a TorchDispatchMode)")
    found = None
    if torch._C._len_torch_function_stack():
        for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            if not isinstance(mode, DeviceContext):
                _refuse(f"{type(mode).__name__} (a TorchFunctionMode)")
            found = mode.device
    return found


def _refuse(what: str) -> None:
    raise ValueError(
        f"{what} is active and cannot be transferred to workers: enter it inside `loss_fn` or the module's "
        "forward, leave it, or use parallelize=1"
    )


_REGISTRIES = tuple(
    name
    for name, value in vars(module).items()
    if name.startswith(("_global_forward", "_global_backward")) and isinstance(value, dict)
)
_KIND_OF_BACKWARD = "_global_is_full_backward_hook"


def module_hooks() -> dict[str, Any]:
    """Return the registries of this process's hooks of all modules, by their names."""
    return {name: getattr(module, name) for name in (*_REGISTRIES, _KIND_OF_BACKWARD)}


def set_module_hooks(hooks: Mapping[str, Any]) -> None:
    """Make these, of another process, the hooks of this one."""
    for name, found in hooks.items():
        if name == _KIND_OF_BACKWARD:
            setattr(module, name, found)
        else:
            mine: dict[Any, Any] = getattr(module, name)
            mine.clear()
            mine.update(found)


def leave_contexts() -> None:
    """Leave whatever context the user's code has entered in this process and not left."""
    for device in _AUTOCAST_DEVICES:
        torch.set_autocast_enabled(device, False)
    torch.set_autocast_cache_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    if _device() is not None:
        torch.set_default_device(None)


def differentiable_twice() -> AbstractContextManager[Any]:
    """Return a context in which `scaled_dot_product_attention` uses plain operations: the backward of its fused kernels
    cannot be differentiated, which products with a Hessian or a Jacobian need."""
    return sdpa_kernel(SDPBackend.MATH)
