"""The rows that functions return in worker processes: the files for them, and how the parent reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchopt.backends.process.pool import Pool
from batchopt.backends.process.task_files import read_columns
from batchopt.backends.process.worker import Activity, SessionCall, call, call_with_block, call_with_file
from batchopt_workers.data.memory import GrowingFile, SharedBlock
from batchopt_workers.data.packing import Placement
from batchopt_workers.process.session import TASK, Session
from batchopt_workers.tasks.forms import Column


class Results:
    """The file that workers write to: a new one for each task, and for each evaluation whose outputs are kept, since a
    late worker may still write to the previous one."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._file: GrowingFile | None = None
        self.keeps_outputs = False

    def begin_task(
        self, data: bytes, placements: Sequence[Placement], memory: SharedBlock | None, batch: Sequence[SessionCall]
    ) -> None:
        """Send workers a packed task, with its tensors, if it has any, in `memory`; `batch`: the calls by which a
        worker loads the batch that comes with it."""
        self._file = GrowingFile()
        attach = [] if memory is None else [call_with_block(Activity.TASK, Session.attach_copy, TASK, memory)]
        begin = call_with_file(Activity.TASK, Session.begin_task, self._file, data, placements)
        self._pool.set_state("task", *batch, *attach, begin)

    def end_task(self) -> None:
        """Release everything that belongs to the task."""
        self._file = None
        self._pool.set_state("task", call(Activity.TASK, Session.end_task))

    def keep_outputs(self, keep: bool) -> None:
        """Let evaluations write what the module returns, or not."""
        self.keeps_outputs = keep
        if not keep:
            self._pool.set_state("outputs", call(Activity.MEMORY, Session.write_no_outputs))

    def begin_evaluation(self) -> None:
        """Have the outputs of an evaluation written to a new file."""
        if self.keeps_outputs:
            self._file = GrowingFile()
            write = call_with_file(Activity.MEMORY, Session.write_outputs_to, self._file)
            self._pool.set_state("outputs", write)

    def read(self, columns: Sequence[Column], samples: int, copied: bool) -> list[torch.Tensor]:
        """Return the rows of `samples` samples that were written last; `copied` ones are in new memory."""
        assert self._file is not None
        return read_columns(self._file, columns, samples, copied)
