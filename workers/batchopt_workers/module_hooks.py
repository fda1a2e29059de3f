"""The hooks that torch calls for every module of a process: `torch.nn.modules.module.register_module_forward_hook` and
its like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.modules import module

_REGISTRIES = tuple(
    name
    for name, value in vars(module).items()
    if name.startswith(("_global_forward", "_global_backward")) and isinstance(value, dict)
)
_KIND_OF_BACKWARD = "_global_is_full_backward_hook"


def module_hooks() -> dict[str, Any]:
    """Those of this process, by the names of the registries: the registries themselves."""
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
