"""The graphs of a process: which pieces are evaluated by one, and when that ends.

    a piece of a form ─► seen before? ─► rehearsed ─► recorded ─► compared ─► replayed, as long as nothing changes
                            │ no            │ cannot be recorded      │ differs
                            └───────────────┴─────────► eager ◄───────┘

What must hold: a replay finds what the eager evaluation would find. So a graph reads all tensors where they are, draws
random numbers from the same generator, and is dropped when anything else that f depends on has changed
(`Circumstances`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from batchopt_workers.batch.batch import Piece
from batchopt_workers.evaluate.program import Program
from batchopt_workers.evaluate.state import ModuleState
from batchopt_workers.life.torch_settings import TorchSettings
from batchopt_workers.shortcuts.form import PieceForm, arguments_of
from batchopt_workers.shortcuts.recording import Recording, Rehearsal, can_add_there, is_held, obstacle_of
from batchopt_workers.shortcuts.shortcuts import Differs, Eager, Shortcuts, Start
from batchopt_workers.watch.record import Record
from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.structures import map_tensors, tensors_in

# Graphs that are kept: each has memory for its inputs and results.
MOST = 8


class Key(NamedTuple):
    """The form of pieces that one graph serves."""

    form: PieceForm
    samples: int
    strides: tuple[tuple[int, ...], ...]


class Graph:
    """A recorded evaluation of pieces of one form; call it to set the gradients of the parameters, write the module's
    state, and return the loss, in memory that the next call overwrites."""

    def __init__(self, piece: Piece, eager: Eager, parameters: Sequence[torch.Tensor], recording: Recording) -> None:
        """Record it; the gradients, the module's state and the random states are then others. Raise `RuntimeError`."""
        self._parameters, self._recording = parameters, recording
        with torch.no_grad():
            self._inputs = [_room_for(tensor).copy_(tensor) for tensor in tensors_in(arguments_of(piece))]
        self._loss, self._gradients = recording.record(partial(self._evaluate, piece, eager))

    def _evaluate(self, piece: Piece, eager: Eager) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        inputs = iter(self._inputs)
        inputs, targets, attributes = map_tensors(
            lambda tensor: next(inputs).detach().requires_grad_(tensor.requires_grad), arguments_of(piece)
        )
        for parameter in self._parameters:
            parameter.grad = None
        loss = eager(dataclasses.replace(piece, inputs=inputs, targets=targets, attributes=attributes))
        torch.clear_autocast_cache()  # casts of X are recorded anew, and lie in memory that replays overwrite
        return loss.detach(), [parameter.grad for parameter in self._parameters]

    def __call__(self, piece: Sequence[torch.Tensor]) -> torch.Tensor:
        """Evaluate the piece with these tensors."""
        if self._inputs:
            with torch.no_grad():
                torch._foreach_copy_(self._inputs, [tensor.detach() for tensor in piece])
        self._recording.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory of its own for a tensor, with the same strides: kernels, and so bits, may depend on them."""
    if 0 in tensor.stride():
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class Circumstances:
    """The circumstances under which graphs were recorded: all that the program refers to, where its tensors lie,
    and the settings of torch."""

    def __init__(self, roots: Mapping[str, object], parameters: Sequence[torch.Tensor]) -> None:
        """Raise `ValueError` for a context that nobody can look into."""
        self._record = Record(roots, functions=True)
        self._tensors = [*parameters, *(found.tensor for found in self._record.tensors)]
        self._places, self._settings = self._places_now(), _settings()

    def _places_now(self) -> list[tuple[int, torch.Size, tuple[int, ...]]]:
        return [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in self._tensors]

    @property
    def hold(self) -> bool:
        """Tell whether they are the same now, as far as it can be compared."""
        try:
            return self._record.holds() and self._places_now() == self._places and _settings() == self._settings
        except ValueError:  # a context of the user's
            return False


def _settings() -> tuple[object, ...]:
    cudnn, cuda, _C = torch.backends.cudnn, torch.backends.cuda, torch._C
    kernels = _C._get_flash_sdp_enabled(), _C._get_mem_efficient_sdp_enabled(), _C._get_math_sdp_enabled()
    own = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cuda.matmul.allow_tf32
    return TorchSettings.current(), own, kernels


class Recordable(NamedTuple):
    """The program that is evaluated, X's parameters, and the state that a forward may write."""

    program: Program
    parameters: Sequence[torch.Tensor]
    state: ModuleState

    @property
    def roots(self) -> dict[str, object]:
        """The parts that f depends on, by name."""
        program = self.program
        return {"module": program.module, "criterion": program.criterion, "loss_fns": program.loss_fns}


class Graphs(Shortcuts):
    """The graphs for a program on one device.

    A form of pieces is recorded once it was seen in as many evaluations as `patience` says, which doubles with each
    change of the program: recording takes as long as tens of evaluations.
    """

    def __init__(self, subject: Recordable, recording: Callable[[], Recording]) -> None:
        """`recording`: makes a new one."""
        super().__init__(subject.parameters, lambda: subject.state.tensors)
        self._subject, self._recording, self.patience = subject, recording, 1
        self._circumstances: Circumstances | None = None  # of all graphs that there are
        self._seen: dict[Key, set[int]] = {}  # the evaluations in which pieces without a graph were seen
        self._evaluation = -1

    def __str__(self) -> str:
        """Say what runs."""
        return f"{len(self._table)} recorded" if self._table else f"eager ({self.reason})"

    def look(self, evaluation: int) -> None:
        """Drop all graphs if something has changed that f depends on."""
        self._evaluation = evaluation
        if self._circumstances is not None and not self._circumstances.hold:
            self._forget("the program, its memory or torch's settings have changed")

    def key_of(self, form: PieceForm, piece: Piece, tensors: Sequence[torch.Tensor]) -> Key:
        """See `Shortcuts.key_of`."""
        return Key(form, len(piece.indices), tuple([tensor.stride() for tensor in tensors]))

    # ---- recording

    def _is_time(self, key: Key) -> bool:
        """Tell whether pieces of this form have been seen often enough to be recorded."""
        if key not in self._seen and len(self._table) + len(self._seen) >= MOST:
            self.reason = f"the pieces have more than {MOST} forms or sizes"
            return False
        seen = self._seen.setdefault(key, set())
        if len(seen) < self.patience:
            seen.add(self._evaluation)
            return False
        return self._evaluation not in seen

    def missing(self, key: Key, piece: Piece, eager: Eager) -> torch.Tensor | None:
        """Evaluate a piece of a form for which there is no graph yet, and record one if it is time and possible."""
        if not self._is_time(key):
            return None
        parameters = self._subject.parameters
        obstacle = obstacle_of(self._subject.program.module)
        if obstacle is not None:
            self.stop(obstacle)
            return None
        if not can_add_there() and is_held(parameters):
            self.reason = "an output or a loss from before, of the same parameters, is kept with its autograd graph"
            return None
        try:
            circumstances = self._circumstances or Circumstances(self._subject.roots, parameters)
        except ValueError as error:
            self.stop(str(error))
            return None
        start = Start(self._subject.state.tensors)
        try:
            with Rehearsal(parameters[0].device) as rehearsal:
                value = eager(piece)
        except torch.OutOfMemoryError:
            start.restore(parameters)
            raise
        except Exception as error:
            let_through(error)
            start.restore(parameters)
            self.stop(f"it cannot be looked at: {type(error).__name__}")
            return None  # if it was the user's, it is raised again
        obstacle = rehearsal.obstacle or start.obstacle
        if obstacle is None and not circumstances.hold:
            obstacle = "forward or loss change attributes, or hold something that cannot be compared"
        if obstacle is not None:
            self.stop(obstacle)
            return value
        start.restore(parameters)
        try:
            graph = Graph(piece, eager, parameters, self._recording())
            start.restore(parameters)
            found = self.compared(graph, piece, eager)
        except (RuntimeError, Differs) as error:
            start.restore(parameters)
            self.stop(f"it cannot be recorded: {str(error).splitlines()[0]}")
            return None
        del self._seen[key]
        self._circumstances, self._table[key] = circumstances, graph
        return found

    # ---- the end

    def _forget(self, reason: str) -> None:
        self.stop(reason)
        self.is_over = False

    def look_again(self) -> None:
        """Drop all graphs, and why something was not recorded, because the program was changed."""
        self._forget("the program has changed")

    def stop(self, reason: str) -> None:
        """Drop all graphs, and stay eager until the program is another one."""
        super().stop(reason)
        self._seen, self._circumstances, self.patience = {}, None, 2 * self.patience
