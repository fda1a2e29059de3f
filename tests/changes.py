"""What users change between two steps: a program with many parts, and the changes that are made to it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

FACTOR = 1.0  # which `World.loss` reads, a function that is sent by value


class Settings:
    """An object of the user's, with slots."""

    __slots__ = ("factor", "steps")

    def __init__(self) -> None:
        self.factor, self.steps = 1.0, [1.0, 1.0]


class Net(nn.Module):
    """Has attributes, buffers and frozen parameters of each kind; all of them matter."""

    shift: torch.Tensor
    mix: torch.Tensor
    spectrum: torch.Tensor
    wide: torch.Tensor
    late: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 4)
        self.act: nn.Module = nn.Tanh()
        self.drop = nn.Dropout(0.0)
        self.norm = nn.BatchNorm1d(5).eval()
        self.beta, self.shape, self.settings = 1.0, {"power": 1}, Settings()
        self.table = torch.ones(4)
        self.register_buffer("shift", torch.zeros(5))
        self.register_buffer("mix", torch.eye(4).to_sparse())
        self.register_buffer("spectrum", torch.ones(4, dtype=torch.complex64))
        self.register_buffer("wide", torch.zeros(1).expand(4))
        self.register_buffer("late", None)
        self.gain = nn.Parameter(torch.ones(4), requires_grad=False)
        self.rare = nn.Parameter(torch.ones(4))
        self.array = np.ones(4)
        self.last: Callable[[torch.Tensor], torch.Tensor] = _shifted(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.norm(self.act(self.first(x) + self.shift))) ** self.shape["power"]
        y = self.second(y) * self.beta * self.settings.factor * self.settings.steps[1]
        y = (self.mix.to(y.dtype) @ y.T).T * self.table + self.wide
        y = y * self.gain * torch.from_numpy(self.array) * self.spectrum.real
        y = y + torch.full((4,), 1 / 3)  # of the default dtype
        if self.late is not None:
            y = y + self.late
        far = x[:, :1] > 1
        if bool(far.any()):  # a chunk without one does not use the parameter
            y = y + far * self.rare
        return self.last(y)


class World:
    """One such program, and a batch."""

    def __init__(self, weighted: bool = True) -> None:
        torch.manual_seed(0)
        self.module, weight = Net().double(), torch.rand(4).double() + 0.5
        self.criterion = nn.CrossEntropyLoss(weight=weight if weighted else None)
        self.inputs, self.targets = torch.randn(13, 3).double(), torch.randint(0, 4, (13,))
        self.handles: list[Any] = []
        captured, scales, power = {"scale": 1.0}, torch.ones(2), 1.0

        def change_power(to: float) -> None:
            nonlocal power
            power = to

        def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = self_criterion(module(x), y) * captured["scale"] * scales[1] * power * FACTOR
            return value

        self_criterion = self.criterion
        self.captured, self.scales, self.change_power, self.loss = captured, scales, change_power, loss

    def reference(self, with_loss_fn: bool) -> tuple[float, torch.Tensor]:
        """f and df/dX by plain torch."""
        parameters = [parameter for parameter in self.module.parameters() if parameter is not self.module.gain]
        if with_loss_fn:
            value = self.loss(self.module, self.inputs, self.targets)
        else:
            value = self.criterion(self.module(self.inputs), self.targets)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        found = dict(zip(trained, torch.autograd.grad(value, trained), strict=True))
        return value.item(), torch.cat([found.get(p, torch.zeros_like(p)).flatten() for p in parameters])

    def undo_ambient(self) -> None:
        """Take back what concerns all modules of the process, or torch."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        torch.set_default_dtype(torch.float32)
        globals()["FACTOR"] = 1.0


def _hook(factor: float) -> Callable[..., Any]:
    return lambda module, inputs, output: output * factor


def _all_tanhs(factor: float) -> Callable[..., Any]:
    return lambda module, inputs, output: output * factor if isinstance(module, nn.Tanh) else None


def _backward(factor: float) -> Callable[..., Any]:
    return lambda module, inputs, outputs: tuple(g if g is None else g * factor for g in inputs)


def _shifted(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: y + by * torch.arange(4)


class _Squash(nn.Module):
    """Another activation, with an attribute."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * self.by)


def _set(target: str, attribute: str) -> Callable[[World, float], None]:
    def change(world: World, r: float) -> None:
        owner: Any = world
        for step in target.split(".")[1:]:
            owner = getattr(owner, step)
        setattr(owner, attribute, r)

    return change


def _rebind_data(world: World, r: float) -> None:
    world.module.shift.data = torch.full((5,), r, dtype=torch.float64)


def _forward_of_instance(world: World, r: float) -> None:
    world.module.act.forward = types.MethodType(lambda self, x: torch.sin(x * r), world.module.act)


def _note_handle(make: Callable[[World, float], Any]) -> Callable[[World, float], None]:
    return lambda world, r: world.handles.append(make(world, r))


def _item(read: Callable[[World], Any], key: Any) -> Callable[[World, float], None]:
    def change(world: World, r: float) -> None:
        read(world)[key] = r

    return change


def _sparse(world: World, r: float) -> None:
    world.module.mix = (torch.eye(4).double() * r).to_sparse()


def _sparse_in_place(world: World, r: float) -> None:
    world.module.mix.values().mul_(r)


def _weight(world: World, r: float) -> None:
    if world.criterion.weight is not None:
        world.criterion.weight[0] = r


# Each is made with a number between 0.5 and 2.
CHANGES: dict[str, Callable[[World, float], object]] = {
    "attribute": _set("world.module", "beta"),
    "attribute of an object with slots": _set("world.module.settings", "factor"),
    "item of a list in an object": _item(lambda world: world.module.settings.steps, 1),
    "item of a dict": lambda world, r: world.module.shape.update(power=2 if r > 1 else 1),
    "dropout": lambda world, r: setattr(world.module.drop, "p", 1.0 if r > 1 else 0.0),
    "tensor attribute in place": lambda world, r: world.module.table.mul_(r),
    "tensor attribute, data": lambda world, r: world.module.table.data.mul_(r),
    "tensor attribute": lambda world, r: setattr(world.module, "table", torch.full((4,), r)),
    "buffer in place": lambda world, r: world.module.shift.fill_(r),
    "buffer, data": _rebind_data,
    "buffer": lambda world, r: setattr(world.module, "shift", torch.full((5,), r).double()),
    "running statistics": lambda world, r: world.module.norm.get_buffer("running_mean").fill_(r),
    "sparse buffer": _sparse,
    "sparse buffer in place": _sparse_in_place,
    "complex buffer": lambda world, r: world.module.spectrum.mul_(r),
    "expanded buffer": lambda world, r: setattr(world.module, "wide", torch.full((1,), r).double().expand(4)),
    "buffer that was None": lambda world, r: setattr(world.module, "late", torch.full((4,), r).double()),
    "frozen parameter": lambda world, r: world.module.gain.data.mul_(r),
    "frozen parameter, another one": lambda world, r: setattr(
        world.module, "gain", nn.Parameter(torch.full((4,), r).double(), requires_grad=False)
    ),
    "NumPy array": _item(lambda world: world.module.array, 2),
    "function": lambda world, r: setattr(world.module, "last", _shifted(r)),
    "submodule": lambda world, r: setattr(world.module, "act", _Squash(r)),
    "method of an instance": _forward_of_instance,
    "forward hook": _note_handle(lambda world, r: world.module.act.register_forward_hook(_hook(r))),
    "forward hook of the module": _note_handle(lambda world, r: world.module.register_forward_hook(_hook(r))),
    "backward hook": _note_handle(lambda world, r: world.module.second.register_full_backward_hook(_backward(r))),
    "hook of all modules": _note_handle(lambda world, r: register_module_forward_hook(_all_tanhs(r))),
    "hooks taken off": lambda world, r: world.undo_ambient(),
    "mode": lambda world, r: world.module.drop.train(r > 1),
    "frozen": lambda world, r: world.module.first.weight.requires_grad_(r > 1),
    "class weights in place": _weight,
    "class weights": lambda world, r: setattr(world.criterion, "weight", torch.full((4,), r).double().cumsum(0)),
    "reduction": lambda world, r: setattr(world.criterion, "reduction", "sum" if r > 1 else "mean"),
    "label smoothing": lambda world, r: setattr(world.criterion, "label_smoothing", r / 4),
    "ignored class": lambda world, r: setattr(world.criterion, "ignore_index", int(r * 2)),
    "captured dict": _item(lambda world: world.captured, "scale"),
    "captured tensor": _item(lambda world: world.scales, 1),
    "captured variable": lambda world, r: world.change_power(r),
    "global": lambda world, r: globals().update(FACTOR=r),
    "default dtype": lambda world, r: torch.set_default_dtype(torch.float64),
}
# Of these, what code of the user's may do to the module that it is given.
IN_MODULE = {name for name in CHANGES if not any(word in name for word in ("class", "reduction", "label", "captured"))}
IN_MODULE -= {"global", "default dtype", "hook of all modules", "hooks taken off"}
# And what is put back then, in the user's own module too: all but elements.
PUT_BACK = IN_MODULE - {"frozen parameter", "running statistics", "complex buffer", "buffer, data"}
PUT_BACK -= {name for name in IN_MODULE if "in place" in name or name.endswith(", data")}
