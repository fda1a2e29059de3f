"""The policy of `compile`: it finds compiled evaluations for what is at hand, and decides whether they are used.

    evaluate ─► before ─► program, settings and forms as before? ─ yes ─► has the compiler answered? (auto)
                             │ no: evaluations are eager from here
                             ▼
                          request ─► another process traces and compiles ─► libraries ─► the workers' mode
                             True: waits for it          auto: goes on; then times both, and keeps the faster

What is compiled belongs to one version of the user's program, as the backend knows it: a change of it is seen there,
and workers drop what they had.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch

from batchopt._engine.evaluating import Evaluating
from batchopt._engine.reporter import warn
from batchopt._engine.step import Step
from batchopt._machine.cores import share_cores
from batchopt._program.compiler import Compiler
from batchopt._program.program import PickledProgram
from batchopt.errors import BatchoptError, CompileError, WorkerError
from batchopt_workers.batch.batch import Batch, Piece
from batchopt_workers.evaluate.draws import draws_kept
from batchopt_workers.life.torch_settings import TorchSettings
from batchopt_workers.shortcuts.form import Artifact, PackedPiece, PieceForm, Request, form_of, in_rows, packed
from batchopt_workers.shortcuts.recording import obstacle_of
from batchopt_workers.shortcuts.shortcuts import Differs
from batchopt_workers.wire.failures import names_of
from batchopt_workers.wire.orders import Cut
from batchopt_workers.wire.packing import pack

# Evaluations of each kind that are timed, and the gain from which compiled ones are kept.
TIMED, GAIN = 5, 1.02
# Versions of a program that are compiled, one after the other, before "auto" gives up.
MOST = 4
# Forms of pieces that are compiled: each takes seconds.
FORMS = 8


# The class of the exception in a worker where a compiled evaluation differs from an eager one.
DIFFERS = names_of((Differs,))


class Abandoned(BatchoptError):
    """A step was begun with evaluations by a shortcut that found something else than eager ones; it is to be made
    anew."""


class Stage(Enum):
    """The state of a compilation."""

    EAGER = "eager"  # and remains so, for what is at hand
    COMPILING = "compiling"
    TIMING = "timing"
    COMPILED = "compiled"


class Target(NamedTuple):
    """The target of compilation, compared field by field: the version of the program that workers have, the settings of
    torch, the number of threads, whether somebody looks at each forward, and the forms of the pieces."""

    version: object
    settings: TorchSettings
    threads: int
    is_watched: bool
    forms: frozenset[PieceForm]

    @property
    def without_forms(self) -> Target:
        """The target of pieces of any form: libraries for several forms have it in common."""
        return self._replace(forms=frozenset())


class Pieces(NamedTuple):
    """The forms of a step's pieces, each with the largest piece, without elements. `number` of the step, `cut`, and
    `plain` form of its batch: steps of the same have the same."""

    number: int
    cut: Cut
    plain: object
    found: dict[PieceForm, PackedPiece]


class Compilation:
    """The policy of an engine that evaluates by libraries, as soon as there are some. `insists`: evaluations wait for
    them, and what cannot be compiled is an error; else they are used only where they were measured to be faster."""

    def __init__(self, insists: bool) -> None:
        self.insists = insists
        self.phase, self.reason = Stage.EAGER, "nothing was evaluated yet"
        self.keys: tuple[str, ...] = ()  # of the libraries in use
        self.expected: tuple[str, ...] | None = None  # those of the run that is resumed; None: of no other
        self._compiler: Compiler | None = None
        self._target: Target | None = None
        self._pieces: Pieces | None = None
        self._libraries: dict[Target, dict[PieceForm, Artifact | str]] = {}
        self._versions = 0  # that were compiled
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # of evaluations, eager and compiled
        self._took = 0.0  # seconds of compiling

    def __str__(self) -> str:
        """Say what runs, in one line."""
        if self.phase is Stage.COMPILED:
            eager, compiled = (min(self._seconds[kind], default=0.0) for kind in (False, True))
            gain = f"{eager / compiled:.2g} x eager, " if eager and compiled else ""
            return f"compiled (inductor, {gain}{self._took:.1f} s once)"
        others = {Stage.COMPILING: "eager, while it is compiled", Stage.TIMING: "compiled, and being timed"}
        return others.get(self.phase, f"eager ({self.reason})")

    # ---- between evaluations

    def before(self, engine: Evaluating) -> None:
        """Have the workers evaluate by what there is for the program and the batch at hand. Raises `CompileError` if it
        `insists` and there is nothing."""
        step = engine.current_step()
        target = self._target_of(engine, step)
        if target != self._target:
            self._target = None
            self._use(engine, {})
            self._seconds = {False: [], True: []}
            self._begin(engine, step, target)
            self._target = target
        if self.phase is Stage.COMPILING:
            self._take(engine, target)

    def took(self, engine: Evaluating, seconds: float) -> None:
        """Count the time of an evaluation, and decide once there were enough."""
        kind = bool(self.keys)
        times = self._seconds[kind]
        times.append(seconds)
        del times[: -2 * TIMED]
        if self.phase is Stage.TIMING and len(times) >= TIMED + 3:  # the first ones are compared with eager ones
            eager, compiled = min(self._seconds[False], default=0.0), min(times[3:])
            if self._seconds[False] and eager < GAIN * compiled:
                self._stay_eager(
                    engine, f"compiled evaluations take {compiled * 1e3:.3g} ms, eager ones {eager * 1e3:.3g}"
                )
            else:
                self.phase = Stage.COMPILED
                engine.observers.decided("%s", self)

    def stop(self, engine: Evaluating, error: WorkerError) -> None:
        """Evaluate eagerly from now on, because a compiled evaluation has found something else."""
        self.insists = False
        self._stay_eager(engine, f"compiled evaluations found something else: {error.message}")
        if self._target is not None:
            self._libraries[self._target.without_forms] = dict.fromkeys(self._target.forms, self.reason)

    def close(self) -> None:
        """End the process that compiles."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None

    # ---- what there is to compile

    def _target_of(self, engine: Evaluating, step: Step) -> Target:
        pieces = self._pieces = _pieces_of(step, self._pieces)
        workers, (count, threads, *_) = engine.workers, engine.workers.way
        threads = threads or (torch.get_num_threads() if workers.alone else min(share_cores(count, None)))
        is_watched = workers.hooks != (None, None) or workers.mode.outputs
        forms = frozenset(pieces.found)
        return Target(workers.backend.version, TorchSettings.current(), threads, is_watched, forms)

    def _begin(self, engine: Evaluating, step: Step, target: Target) -> None:
        """Find what is known for the target; request what is not."""
        self.phase = Stage.EAGER
        self._compiler = self._compiler or Compiler()
        reason = self._compiler.obstacle() or _obstacle(engine, step, target)
        there = self._libraries.setdefault(target.without_forms, {})
        assert self._pieces is not None
        lacking = [piece for form, piece in self._pieces.found.items() if form not in there]
        if reason is None and lacking and not self.insists and self._versions >= MOST:
            reason = f"the program was changed {MOST} times, and each time it would be compiled again"
        if reason is None:
            try:
                if lacking:
                    self._request(engine, target, lacking)
            except (BatchoptError, OSError, TypeError, ValueError) as error:
                reason = f"it cannot be sent to the process that compiles: {error}"
        if reason is not None:
            self._refuse(engine, reason)
            return
        self.phase = Stage.COMPILING

    def _request(self, engine: Evaluating, target: Target, pieces: list[PackedPiece]) -> None:
        program = PickledProgram(engine.workers.program, engine.subject.parameters).packed
        parameters = pack(engine.subject.parameters).placements
        request = Request(
            program.data,
            tuple(map(in_rows, program.placements)),
            parameters,
            tuple(pieces),
            target.settings,
            target.threads,
        )
        assert self._compiler is not None
        if self._compiler.is_busy:  # with what nobody needs any more
            self._compiler.close()
        self._compiler.request(request)
        self._versions += self._compiler.is_busy  # else it was known

    # ---- what came of it

    def _take(self, engine: Evaluating, target: Target) -> None:
        """Use what was compiled, if it is there by now."""
        there = self._libraries[target.without_forms]
        if not target.forms <= there.keys():
            assert self._compiler is not None
            reply = self._compiler.reply(waits=self.insists)
            if reply is None:
                return
            if isinstance(reply, str):
                there |= {form: reply for form in target.forms if form not in there}
            else:
                self._took += reply.seconds
                there |= reply.found
        libraries = {form: there[form] for form in target.forms}
        reasons = [found for found in libraries.values() if isinstance(found, str)]
        if reasons:
            self._refuse(engine, reasons[0])
            return
        self._use(engine, libraries)
        self.phase = Stage.COMPILED if self.insists else Stage.TIMING
        if self.insists:
            engine.observers.decided("%s", self)

    def _use(self, engine: Evaluating, libraries: dict[PieceForm, Artifact | str]) -> None:
        found = tuple(artifact for artifact in libraries.values() if isinstance(artifact, Artifact))
        engine.workers.evaluate_by(found)
        self.keys = tuple(sorted(artifact.key for artifact in found))
        if self.keys and self.expected is not None:
            if engine.settings.fixed_bits and not set(self.keys) <= set(self.expected):
                warn(
                    "the evaluations before were not compiled as those from here are (another version of torch or of "
                    "the compiler, another processor, or none at all): bits differ from here"
                )
            self.expected = None

    def _refuse(self, engine: Evaluating, reason: str) -> None:
        if self.insists:
            raise CompileError(f"compile=True, but this cannot be compiled: {reason}; use compile='auto' or False")
        self._stay_eager(engine, reason)

    def _stay_eager(self, engine: Evaluating, reason: str) -> None:
        self._use(engine, {})
        self.phase, self.reason = Stage.EAGER, reason
        engine.observers.decided("%s", self)


def _pieces_of(step: Step, before: Pieces | None) -> Pieces:
    """Return the pieces of a step, which may be those of one `before`. Of samples that are no columns those of the
    first chunk are taken, and those of later batches for alike: to read them takes time, and workers see what they
    get."""
    batch, cut = step.batch, step.plan.cut
    plain = batch.plain.form if batch.plain is not None else None
    if before is not None and before.cut is cut:
        if before.number == step.number or (plain is not None and (plain is before.plain or plain == before.plain)):
            return before
    if before is not None and before.found and not batch.is_of_columns:
        return before._replace(number=step.number, cut=cut)
    found: dict[PieceForm, PackedPiece] = {}
    with draws_kept():
        for piece in _largest(batch, cut):
            form = form_of(piece)
            if form is not None and (form not in found or len(piece.indices) > found[form].samples):
                found[form] = packed(piece, form, batch.size)
    return Pieces(step.number, cut, plain, found)


def _largest(batch: Batch, cut: Cut) -> Iterator[Piece]:
    """Yield pieces of a batch: of columns all sizes that there are, else those of the first chunk."""
    if any(part.one_by_one for part in batch.parts):
        return
    seen = set[object]()
    for start, stop in pairwise(cut.bounds if batch.is_of_columns else cut.bounds[:2]):
        sizes = tuple((term, len(samples)) for term, samples in batch.numbering.split(range(start, stop)))
        if sizes not in seen:
            seen.add(sizes)
            yield from batch.pieces(start, stop)


def _obstacle(engine: Evaluating, step: Step, target: Target) -> str | None:
    """Return why this is not compiled, as far as it is known without tracing."""
    module = engine.subject.module
    prehook, posthook = engine.workers.hooks
    if prehook is not None or posthook is not None:
        return "there are hooks, which look at each forward"
    if engine.workers.mode.outputs:
        return "outputs are kept"
    if any(worker.device.type != "cpu" for worker in engine.workers.infos) or engine.workers.way.devices:
        return "only evaluations on CPUs are compiled"
    if len(target.forms) > FORMS:
        return f"the pieces have {len(target.forms)} forms, and each would be compiled"
    if any(part.one_by_one for part in step.batch.parts):
        return "each sample takes a forward of its own"
    if not target.forms:
        return "the samples hold something that cannot be compared"
    if target.settings.autocast:
        return "autocast rounds more than compiled code would"
    return obstacle_of(module)
