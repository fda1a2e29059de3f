"""The map: carrying out orders on one module. The same code runs in the parent, in a child and on another machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from batchopt_workers.batch.batch import Batch
from batchopt_workers.evaluate.chunk import LoadedBatch, Walk
from batchopt_workers.evaluate.gradient import GradientWork, PieceLoss
from batchopt_workers.evaluate.program import Program, Worker
from batchopt_workers.evaluate.state import ModuleState
from batchopt_workers.evaluate.sums import GradsKept, Rows, Sums
from batchopt_workers.evaluate.tree import most_held
from batchopt_workers.evaluate.unwritten import Unwritten
from batchopt_workers.evaluate.work import ChunkDone, run
from batchopt_workers.functions.forms import Output
from batchopt_workers.functions.runner import TaskRunner
from batchopt_workers.functions.simulation import is_by_differences
from batchopt_workers.functions.task import Evaluation
from batchopt_workers.life import faults
from batchopt_workers.shortcuts.form import Artifact
from batchopt_workers.shortcuts.graphs import Graphs, Recordable
from batchopt_workers.shortcuts.recording import RECORDINGS
from batchopt_workers.shortcuts.run import CompiledPieces, Sources
from batchopt_workers.wire.layout import Layout
from batchopt_workers.wire.orders import Cut, Kind, Order


class Evaluator:
    """Carries out orders on one module: f and its gradient for the loaded batch, and tasks.

    `parameters` are the module's trainable ones, in the order of the layout. `loss` has the hooks and weights in force.
    """

    def __init__(
        self,
        program: Program,
        worker: Worker,
        parameters: Sequence[torch.Tensor],
        state: ModuleState,
        constants: Unwritten,
    ) -> None:
        self.worker = worker
        self.walk = Walk(worker, program.seed, state, constants)
        self.loss = PieceLoss(program, worker, self.walk)
        self.tasks = TaskRunner(self.walk, program.module, parameters)
        self._gradient = GradientWork(self.loss, self.walk, parameters)
        self.program, self.parameters = program, parameters
        recording = RECORDINGS.get(worker.device.type) if program.graphs else None
        self.graphs: Graphs | None = None  # of what is evaluated on a card
        if recording is not None:
            self.graphs = Graphs(Recordable(program, parameters, state), partial(recording, worker.device))
        self._gradient.shortcuts = self.graphs
        self._loaded: LoadedBatch | None = None
        self.cut = Cut((0,))  # of the loaded batch, and of later ones
        self._sums = Sums(-1, 0)

    @property
    def loaded(self) -> LoadedBatch:
        """The loaded batch; set it to use another one, or one that has other elements now. Raise `RuntimeError` if
        there is none."""
        if self._loaded is None:
            raise RuntimeError("no batch was loaded in this worker")
        return self._loaded

    @loaded.setter
    def loaded(self, loaded: LoadedBatch) -> None:
        if loaded is not self._loaded:
            self._gradient.paired = None
        self._loaded = loaded
        if loaded.cut is not self.cut:
            loaded.cut_into(self.cut)
        self.loss.names = loaded.batch.numbering.names
        for jacobian in self.tasks.jacobians.values():
            jacobian.looked_at.clear()

    def cut_into(self, cut: Cut) -> None:
        """Use this cut of the loaded batch, and of later ones."""
        self.cut, self._sums = cut, Sums(-1, cut.chunks)
        if self._loaded is not None:
            self._loaded.cut_into(cut)

    @property
    def has_batch(self) -> bool:
        """Tell whether a batch was loaded."""
        return self._loaded is not None

    @property
    def outputs(self) -> Output | None:
        """The place where evaluations write what the module returns, if there is any."""
        return self._gradient.outputs

    @outputs.setter
    def outputs(self, outputs: Output | None) -> None:
        self._gradient.outputs = outputs

    def compile(self, artifacts: Sequence[Artifact], tensors: Sequence[torch.Tensor]) -> None:
        """Evaluate pieces by these artifacts where they serve; `tensors`: those of the program, in the order in which
        it was packed. Without artifacts, evaluate all eagerly."""
        sources = Sources(self.parameters, self.walk.state.tensors, tensors)
        self._gradient.shortcuts = CompiledPieces(artifacts, sources) if artifacts else self.graphs

    @property
    def current(self) -> range:
        """The samples, numbered through all terms, of the running or last forward."""
        return self.walk.current

    def evaluate(self, order: Order, rows: Rows | None) -> Iterator[ChunkDone]:
        """Carry out an order, chunk by chunk: see `run`. Gradients are summed in `rows`; tasks have memory of their
        own."""
        loss = self.loss
        self.walk.runs_others = loss.hooked and not loss.prehook is loss.posthook is None
        if order.kind is not Kind.EVALUATE:
            self.walk.runs_others |= self.tasks.is_users
            return self.tasks.evaluate(order, self)
        loaded, sums = self._loaded or self.loaded, self._sums
        if sums.evaluation != order.evaluation:
            sums.evaluation = order.evaluation
            sums.held.clear()
        self._gradient.rows = rows
        if self._gradient.shortcuts is not None:
            self._gradient.shortcuts.begin(order.evaluation)
        return run(self.walk, self._gradient, loaded, order, sums)

    def look_again(self) -> None:
        """Forget what was derived from the program, because it was changed: it is evaluated eagerly at first."""
        self.tasks.jacobians.clear()
        self._gradient.shortcuts = self.graphs
        if self.graphs is not None:
            self.graphs.look_again()

    # ---- for tasks

    def evaluate_all(
        self, step: int, cut: Cut, gradient: bool, batch: Batch | None = None, later: int = 0
    ) -> Evaluation:
        """Return the loss of each term of the loaded batch, with this cut, and df/dX (shape `(n,)`; empty without
        `gradient`), with the bits of an evaluation; or of another `batch` of the same terms. Draws are those of a step
        that is so much `later`. The posthook does not run."""
        is_cut_so = batch is None and self.loaded.cut.bounds == cut.bounds  # then its cache can be used
        loaded = self.loaded if is_cut_so else LoadedBatch(batch or self.loaded.batch, cut, keeps=False)
        work = GradientWork(self.loss, self.walk, self.parameters, hooks=False)
        if gradient:
            work.shortcuts = None if self.graphs is not None else self._gradient.shortcuts
            layout = Layout.of((("", parameter) for parameter in self.parameters), self.parameters[0].dtype)
            count = most_held(0, cut.chunks, cut.chunks)
            work.rows = Rows(layout, self.walk.state.size, count, device=self.worker.device)
        sums = Sums(-1, cut.chunks)
        for _ in run(self.walk, work, loaded, Order(-1, step + later, 0, cut.chunks), sums):
            pass
        sums.settle(None)
        whole = sums.root
        if work.rows is None:
            return Evaluation(whole.losses, torch.empty(0), torch.empty(0), b"")
        row = work.rows[whole.row]
        return Evaluation(whole.losses, row.gradient, row.changes, whole.used)

    # ---- for audits

    def eagerly(self, step: int, batch: Batch) -> Evaluation:
        """Return an evaluation of another batch of the same terms, in one chunk: without shortcuts, without hooks; of
        simulators without df/dX, since calls may take minutes."""
        loss, work, place = self.loss, self._gradient, self.walk.place
        hooked, shortcuts, hook = loss.hooked, work.shortcuts, faults.hook
        loss.hooked, work.shortcuts, self.walk.runs_others, faults.hook = False, None, False, None
        if place is not None:
            place.keeps = False
        try:
            with GradsKept(self.parameters):
                gradient = not is_by_differences(self.program.module, *self.program.loss_fns)
                return self.evaluate_all(step, Cut((0, batch.size)), gradient, batch)
        finally:
            loss.hooked, work.shortcuts, faults.hook = hooked, shortcuts, hook
            if place is not None:
                place.keeps = True

    def adopt(self, before: Evaluator) -> None:
        """Go on with the batch, the cut, the task and the modes of another one, on another copy of its program."""
        loss, of = self.loss, before.loss
        loss.weights, loss.hooked, loss.names = of.weights, of.hooked, of.names
        self._gradient.outputs, self._loaded = before.outputs, before._loaded
        self.cut, self._sums = before.cut, Sums(-1, before.cut.chunks)
        self.walk.current = before.walk.current  # for an error that is described after this
        self.tasks = before.tasks
        self.tasks.use(self.walk, self.program.module, self.parameters)
