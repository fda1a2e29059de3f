"""The rows that functions return in worker processes: the files for them, and how the parent reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from batchopt.backends.process.pool import Pool
from batchopt.backends.process.task_files import ResultFile
from batchopt.backends.process.wanted import Activity, Field, SessionCall
from batchopt.backends.process.worker import call, call_with_block, call_with_file
from batchopt_workers.functions.forms import Column
from batchopt_workers.life.session import TASK, Session
from batchopt_workers.wire.memory import SharedBlock
from batchopt_workers.wire.packing import Packed, Placement


class KeptTask(NamedTuple):
    """A task that workers have as long as their `field` is this one, the memory of its tensors, if it has any,
    and the file for its rows."""

    data: bytes
    placements: Sequence[Placement]
    memory: SharedBlock | None
    file: ResultFile
    field: Field

    def is_of(self, packed: Packed) -> bool:
        """Tell whether a packed task differs from it in the elements of tensors only."""
        return packed.data == self.data and packed.placements == self.placements


class Results:
    """The files that workers write to. Two are kept: while one is filled, the user still has the previous result."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._files: list[ResultFile | None] = [None, None]
        self._number = 0  # of the file in use
        self._kept: KeptTask | None = None
        self._keeps = False
        self.keeps_outputs = False

    @property
    def _file(self) -> ResultFile:
        file = self._files[self._number]
        assert file is not None
        return file

    @property
    def _has_kept(self) -> bool:
        """Tell whether workers still have the task that was kept."""
        kept = self._kept
        return kept is not None and kept.field is self._pool.want.task and kept.file is self._files[self._number]

    def _begin(self) -> int:
        """Begin a result in a file that is free, or in a new one; return its number."""
        free = [number for number, file in enumerate(self._files) if file is None or file.is_free]
        # With none free, the older one is left to those who still see its pages.
        self._number = number = max(free, key=lambda number: self._files[number] is not None, default=1 - self._number)
        file = self._files[number]
        if file is None or not file.is_free:
            file = self._files[number] = ResultFile()
        file.begin()
        take = call_with_file(Activity.MEMORY, Session.take_file, file.file, number)
        self._pool.tell_of(f"file_{number}", file, lambda: [take])
        return number

    def begin_task(self, packed: Packed, batch: Sequence[SessionCall], keeps: bool) -> bool:
        """Send workers a packed task, with its tensors in memory of its own, unless they have it: return whether they
        do. `batch`: the calls by which a worker loads the batch that comes with it; `keeps`: workers may keep it for
        the next time, which may have other elements in its tensors."""
        self._keeps, kept = keeps and not batch, self._kept
        if self._keeps and kept is not None and self._has_kept and kept.is_of(packed) and self._file.is_free:
            if kept.memory is not None:
                packed.place(kept.memory)
            self._file.begin()
            return True
        number, memory = self._begin(), None
        calls = [call(Activity.TASK, Session.begin_task, packed.data, packed.placements, number)]
        if packed.placements:  # new memory: the user's code may keep tensors of the previous task
            memory = SharedBlock.create(packed.nbytes)
            packed.place(memory)
            calls.insert(0, call_with_block(Activity.TASK, Session.attach_copy, TASK, memory))
        self._pool.tell("task", *batch, *calls)
        self._kept = KeptTask(packed.data, packed.placements, memory, self._file, self._pool.want.task)
        return False

    def end_task(self) -> None:
        """Release everything that belongs to the task, unless workers keep it."""
        if not (self._keeps and self._has_kept and self._file.was_read):
            self._kept = None
            self._pool.tell("task", call(Activity.TASK, Session.end_task))
        self._release()

    def _release(self) -> None:
        """Release the file if it is too large to be kept."""
        if self._files[self._number] is not None and self._file.is_too_large:
            self._files[self._number] = None
            drop = call(Activity.MEMORY, Session.drop_file, self._number)
            self._pool.tell_of(f"file_{self._number}", None, lambda: [drop])

    def keep_outputs(self, keep: bool) -> None:
        """Let evaluations write what the module returns, or not."""
        self.keeps_outputs = keep
        if not keep:
            self._pool.tell("outputs", call(Activity.MEMORY, Session.write_no_outputs))

    def begin_evaluation(self) -> None:
        """Have the outputs of an evaluation, if they are kept, written to a file."""
        if self.keeps_outputs:
            self._pool.tell("outputs", call(Activity.MEMORY, Session.write_outputs_to, self._begin()))

    def leave_unwritten(self) -> None:
        """Note that nothing was written to the file of the task, whose results were summed."""
        self._file.leave_unwritten()

    def read(self, columns: Sequence[Column], samples: int, in_use: bool) -> list[torch.Tensor]:
        """Return the rows of `samples` samples that were written last; `in_use`: a worker may still be writing."""
        return self._file.read(columns, samples, in_use)
