"""Checks that f and its gradient describe one function and the parallel one is the serial one."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

import batchopt.extending as extending
from batchopt.errors import WorkerError
from batchopt.evaluations import Evaluations
from batchopt.extending import DRIFTS, doubled, let_through, map_tensors, normalises_by_chunk

CHUNKS = 4  # of the batch, to test a cut
# Steps of the finite differences, relative to the size of X; in single precision a hundred times as long. For the first
# `FINE` of them a fourth difference of f is only noise.
STEPS = (1e-5, 1e-6, 1e-4, 1e-3, 1e-2)
FINE = 3
# Relative tolerances, in addition to the uncertainty from noise: of the slope, of the cut, and of the cut in single
# precision. A solver with its own tolerance takes other steps for other parameters, which its gradient ignores, and for
# other samples: so a cut may be off by `LOOSER` times as much as its slope, up to `MOST`. (An adaptive Runge-Kutta
# method of tolerance 1e-4, at 36 points: the cut was off by up to 250 times as much as the slope, and by at most 8e-4.)
SLOPE_TOLERANCE, CUT_TOLERANCE, SINGLE = 1e-3, 1e-5, 1e-3
LOOSER, MOST = 1000, 2e-3


class Culprit(Enum):
    """The reasons why f and its gradient may not describe one function; each value says what to do."""

    NONE = "none found"
    STATE = (
        "the module keeps something from one evaluation to the next: make it a buffer of few real numbers, which "
        "starts each step afresh, or drop it"
    )
    RANDOMNESS = (
        "something random that is not seeded: draw from torch's, NumPy's or random's global generator, which are "
        "seeded for each chunk"
    )
    HOOK = (
        "a hook changes the gradient or the loss (clipping, say): what a line search sees is no function; do it to "
        "the step instead"
    )
    GRADIENT = (
        "the gradient is not that of the loss: look for detach(), no_grad() or a custom backward on the way from "
        "parameters to loss"
    )
    BATCH_NORM = "a layer normalises by the statistics of a chunk: call module.eval(), or use GroupNorm or LayerNorm"
    REDUCTION = "the loss of some samples is their sum, not their mean: pass reduction='sum'"
    UNDECIDED = (
        "the loss draws random numbers, and a few samples do not tell whether it is the mean of its samples' losses: "
        "check it with less noise, or without it"
    )
    CUT = (
        "the loss of the whole batch is not the mean of its samples' losses: pass `denominators`, or reduction='sum'; "
        "if it is neither, as one of pairs or ranks, use parallelize=1 without `chunk_size`"
    )
    COMPILED = "compiled evaluations find something else: tracing does not see all of the loss; leave `compile` out"
    RECORDED = "recorded evaluations find something else than eager ones: pass compile=False"
    PARALLEL = "workers compute something else than this process: look for what they have not (files, globals, precode)"


class Check(NamedTuple):
    """A question, whether the check passed, and the numbers."""

    question: str
    passed: bool
    numbers: str


@dataclass(frozen=True)
class Diagnosis:
    """The checks made, and the first culprit found, with the names of the parts concerned."""

    checks: tuple[Check, ...]
    culprit: Culprit
    detail: str = ""

    @property
    def healthy(self) -> bool:
        """Tell whether every check passed."""
        return self.culprit is Culprit.NONE

    def __str__(self) -> str:
        lines = [f"{'ok  ' if c.passed else 'FAIL'} {c.question}: {c.numbers}" for c in self.checks]
        culprit = f"culprit: {self.culprit.value}" + (f" ({self.detail})" if self.detail else "")
        return "\n".join([*lines, culprit])

    __repr__ = __str__


class Value(NamedTuple):
    """f and df/dX at one point."""

    loss: float
    gradient: torch.Tensor


def _value(opt: Evaluations) -> Value:
    loss = opt.evaluate().item()
    return Value(loss, opt.grad_parameters.double().clone())


def _difference(one: Value, two: Value) -> float:
    """Return the larger of the relative differences of losses and of gradients."""
    scale = max(abs(one.loss), abs(two.loss)) or 1.0
    norm = max(one.gradient.norm().item(), two.gradient.norm().item()) or 1.0
    gradients = float((one.gradient - two.gradient).norm().item()) / norm
    return max(abs(one.loss - two.loss) / scale, gradients)


def same(question: str, one: Value, other: Value, tolerance: float = 0.0, status: str | None = "") -> Check:
    """Return the check that two values differ by no more than `tolerance`; `status` says by which way one was found."""
    difference = _difference(one, other)
    return Check(question, difference <= tolerance, f"difference {difference:.1e}" + (f", {status}" if status else ""))


class Stencil(NamedTuple):
    """f at five points, `step` apart, and derived numbers: the slope `measured` there and `claimed` by the gradient,
    each with its fourth difference, which is only noise; and the relative `noise` of f and its gradient."""

    step: float
    measured: float
    claimed: float
    unrest: float
    unrest_claimed: float
    noise: float


class Verdict(NamedTuple):
    """A comparison of two slopes: `passed` within the `uncertain` amount; `sure` if that is negligible."""

    passed: bool
    sure: bool
    measured: float
    claimed: float
    uncertain: float


def best_slope(stencils: Sequence[Stencil]) -> Verdict:
    """Return the verdict of steps of several lengths, by those whose result is most certain. Rounding makes short steps
    less certain, and curvature long ones."""
    fine = stencils[:FINE]
    floor, floor_claimed = max(s.unrest for s in fine), max(s.unrest_claimed for s in fine)

    def uncertain(stencil: Stencil) -> float:
        # a fourth difference amplifies noise 8 times, and the error of the slope is once the noise per step
        return 0.75 * (max(stencil.unrest, floor) / stencil.step + max(stencil.unrest_claimed, floor_claimed))

    least = min(map(uncertain, stencils))
    found = []
    for stencil in stencils:
        doubt = uncertain(stencil)
        allowed = SLOPE_TOLERANCE * max(abs(stencil.measured), abs(stencil.claimed))
        passed = abs(stencil.measured - stencil.claimed) <= allowed + doubt
        if doubt <= 3 * least:
            found.append(Verdict(passed, doubt <= allowed, stencil.measured, stencil.claimed, doubt))
    return max(found, key=lambda verdict: (verdict.passed, -verdict.uncertain))


class Examination:
    """The checks of one function on one batch, each made on request."""

    def __init__(
        self, opt: Evaluations, batch: tuple[Any, Any, Any], chunk_size: int, double: bool, is_whole: bool
    ) -> None:
        """Examine `opt`, in which the batch is loaded, cut into chunks of this size; `double`: in float64 if it can be
        evaluated in it; `is_whole`: `opt` itself evaluates it in one piece."""
        self.is_whole = is_whole
        self._opt, self._batch, self._chunk_size, self.size = opt, batch, chunk_size, extending.batch_size(opt)
        self._doubles = double and self._can_double()
        self._dtype = torch.float64 if self._doubles else opt.parameters.dtype
        self._cut_tolerance = CUT_TOLERANCE if self._dtype is torch.float64 else SINGLE
        self.undecided = False  # a cut could not be judged
        self._imprecision = 0.0  # of f and its gradient, relative, as found by the slope

    def _can_double(self) -> bool:
        self._doubles = True
        try:
            with self._loaded(chunk_size=self.size, on_nonfinite="return") as twin:
                twin.evaluate()
        except Exception as error:  # a module written for one dtype may raise anything
            let_through(error)
            return False
        return True

    @contextmanager
    def _loaded(self, dropout: bool = True, hooks: bool = True, **changes: Any) -> Iterator[Evaluations]:
        """Load the batch in a twin, with or without dropout, in float64 where the module can be evaluated in it."""
        with extending.twin(self._opt, double=self._doubles, hooks=hooks, **changes) as twin:
            if not dropout:
                for part in twin.module.modules():
                    if isinstance(part, torch.nn.modules.dropout._DropoutNd):
                        part.eval()
            inputs, targets, options = self._batch
            if self._doubles:
                inputs, targets = _doubled(inputs), _doubled(targets)
            twin.load(inputs, targets, options)
            yield twin

    def value(self, dropout: bool = True, **changes: Any) -> Value:
        """Return f and df/dX of a twin."""
        with self._loaded(dropout, **changes) as twin:
            return _value(twin)

    def repeats(self) -> tuple[Check, list[str]]:
        """Compare two evaluations at one point; also return which parts of module and criterion they changed."""
        question = "two evaluations have the same bits"
        try:
            return same(question, _value(self._opt), _value(self._opt)), []
        except WorkerError as error:  # an audit has found it before
            if not error.message.startswith(DRIFTS):
                raise
            names = error.message.removeprefix(DRIFTS).partition(", or of")[0]
            return Check(question, False, "a worker's copy is no longer what was sent"), re.findall("'(.+?)'", names)

    def compiled(self) -> Check | None:
        """Compare a compiled evaluation with an eager one; None if none are compiled."""
        if not extending.compiled(self._opt):
            return None
        with extending.uncompiled(self._opt):
            eager = _value(self._opt)
        tolerance, status = torch.finfo(self._opt.parameters.dtype).eps ** 0.5, extending.compiled(self._opt)
        return same("compiled evaluations are the eager ones", _value(self._opt), eager, tolerance, status)

    def recorded(self) -> Check | None:
        """Compare a recorded evaluation with an eager one; None where none are recorded."""
        if not extending.arguments(self._opt)["graph"] or self._opt.workers[0].graph is None:
            return None
        with self._loaded(graph=True) as twin:
            *_, found = [_value(twin) for _ in range(3)]
            status = twin.workers[0].graph
        tolerance = torch.finfo(self._dtype).eps ** 0.5
        return same("recorded evaluations are the eager ones", found, self.value(), tolerance, status)

    def slope(self, hooks: bool = True) -> Check:
        """Compare central differences along a direction with the gradient's slope there. The precision of f is unknown
        (a module may compute in single precision inside, or solve an equation to a tolerance): it is measured at each
        step length."""
        stencils: list[Stencil] = []
        with self._loaded(chunk_size=self.size, hooks=hooks) as twin:
            here = _value(twin)
            start = twin.parameters.double().clone()
            direction = _direction(here.gradient, start)
            for step in STEPS if self._doubles else [100 * step for step in STEPS]:
                stencils.append(_stencil(twin, start, direction, here, step))
                verdict = best_slope(stencils)
                if verdict.sure and verdict.passed:
                    break
        off = abs(verdict.claimed - verdict.measured) / (abs(verdict.claimed) or 1.0)
        self._imprecision = max(10 * max(stencil.noise for stencil in stencils[:FINE]), min(LOOSER * off, MOST))
        numbers = f"{verdict.claimed:.9g} against {verdict.measured:.9g} +- {verdict.uncertain:.1e}"
        if max(abs(verdict.claimed), abs(verdict.measured)) <= verdict.uncertain:
            numbers += ", which does not tell, as at a minimum: check at other parameters, too"
        return Check(f"the gradient is the slope of f ({self._dtype})", verdict.passed, numbers)

    def cut(self, **changes: Any) -> Check:
        """Compare the batch in a single forward with the batch in chunks; without dropout, whose masks are drawn per
        chunk. If other draws are made for each chunk, compare a few samples with the same draws."""
        question = "the batch in chunks is the batch"
        options = {key: value for key, value in changes.items() if key != "reduction"}
        whole = self.value(dropout=False, chunk_size=self.size, **options)
        other_draws = self.value(dropout=False, chunk_size=self.size, seed=2**40, **options)
        if whole.loss != other_draws.loss:
            return self._cut_of_few(question, **changes)
        parts = self.value(dropout=False, chunk_size=math.ceil(self.size / CHUNKS), **changes)
        return same(question, whole, parts, self._tolerance(self._cut_tolerance))

    def _cut_of_few(self, question: str, **changes: Any) -> Check:
        with self._loaded(dropout=False, chunk_size=self.size, **changes) as twin:
            found = extending.cut_differences(twin, self.size)
        self.undecided = not all(difference.decided for difference in found)
        drawn = "it draws random numbers, so of a few samples: "
        if self.undecided:
            drawn += "not decided, "
        return Check(question, not found, drawn + ("; ".join(map(str, found)) or "no difference"))

    def _tolerance(self, least: float) -> float:
        """Return the largest difference that is no fault: `least`, or the imprecision of f if that is larger."""
        return max(least, self._imprecision)

    def parallel(self) -> Check:
        """Compare the function with a serial twin, both in their own precision."""
        doubles, self._doubles = self._doubles, False
        serial = self.value(chunk_size=self._chunk_size)
        self._doubles = doubles
        tolerance = self._tolerance(1e-9 if self._opt.parameters.dtype is torch.float64 else SINGLE)
        return same("workers compute what this process does", serial, _value(self._opt), tolerance)


def examine(opt: Evaluations, batch: tuple[Any, Any, Any], double: bool) -> Diagnosis:
    """Check `opt` on a batch; stop at the first check that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with extending.examining(opt, "check()"):
            opt.load(*batch)
            own = extending.chunk_size(opt)
            size = own or math.ceil(extending.batch_size(opt) / max(CHUNKS, len(opt.workers)))
        with extending.examining(opt, "check()", chunk_size=size):
            opt.load(*batch)
            return _examine(opt, Examination(opt, batch, size, double, own is None and len(opt.workers) == 1))


def _examine(opt: Evaluations, examination: Examination) -> Diagnosis:
    checks: list[Check] = []

    def failed(check: Check) -> bool:
        checks.append(check)
        return not check.passed

    def found(culprit: Culprit, detail: str = "") -> Diagnosis:
        return Diagnosis(tuple(checks), culprit, detail)

    repeats, changed = examination.repeats()
    if failed(repeats):
        return found(Culprit.STATE if changed else Culprit.RANDOMNESS, ", ".join(changed))
    if failed(examination.slope()):
        return found(Culprit.HOOK if examination.slope(hooks=False).passed else Culprit.GRADIENT)
    if examination.size > 1 and failed(cut := examination.cut()):
        culprit, detail = _culprit_of_cut(opt, examination)
        if culprit is not Culprit.CUT or not examination.is_whole:
            return found(culprit, detail)
        checks[-1] = cut._replace(passed=True, numbers=f"no, {cut.numbers}, and here it is evaluated whole")
    for compare, culprit in (
        (examination.parallel, Culprit.PARALLEL),
        (examination.compiled, Culprit.COMPILED),
        (examination.recorded, Culprit.RECORDED),
    ):
        check = compare()
        if check is not None and failed(check):
            return found(culprit)
    return found(Culprit.NONE)


def _culprit_of_cut(opt: Evaluations, examination: Examination) -> tuple[Culprit, str]:
    """Return why the batch in chunks is not the batch, and the names of the parts concerned."""
    norms = [name for name, part in opt.module.named_modules() if normalises_by_chunk(part) is part]
    if norms:
        return Culprit.BATCH_NORM, ", ".join(norms)
    if examination.undecided:
        return Culprit.UNDECIDED, ""
    if getattr(opt.criterion, "reduction", None) is None and examination.cut(reduction="sum").passed:
        return Culprit.REDUCTION, ""
    return (Culprit.HOOK if examination.cut(hooks=False).passed else Culprit.CUT), ""


def _stencil(twin: Evaluations, start: torch.Tensor, direction: torch.Tensor, here: Value, step: float) -> Stencil:
    """Evaluate five points along `direction` (shape `(n,)`); the middle one is `start`, where f is `here`."""
    values = []
    for i in (-2, -1, 0, 1, 2):
        wanted = start + i * step * direction
        with torch.no_grad():
            twin.parameters.copy_(wanted)
        value = here if i == 0 else _value(twin)
        # correct for the rounding of X, if it is in single precision
        values.append(value._replace(loss=value.loss - float(here.gradient @ (twin.parameters.double() - wanted))))
    f, g = [value.loss for value in values], [value.gradient for value in values]
    slopes = [float(gradient @ direction) for gradient in g]
    rounding = 10 * torch.finfo(torch.float64).eps * max(map(abs, f))
    unrest, unrest_claimed = abs(_fourth(f)) + rounding, abs(_fourth(slopes))
    noise = unrest / (max(map(abs, f)) or 1.0), float(torch.as_tensor(_fourth(g)).norm()) / (float(g[2].norm()) or 1.0)
    measured = (8 * (f[3] - f[1]) - (f[4] - f[0])) / (12 * step)
    return Stencil(step, measured, slopes[2], unrest, unrest_claimed, max(noise) / 8)


def _fourth(values: Sequence[Any]) -> Any:
    """Return the fourth difference of five values."""
    return values[0] - 4 * values[1] + 6 * values[2] - 4 * values[3] + values[4]


def _direction(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a direction with the parameters in units of their own size, so that a step of length 1 moves them by about
    that: along the gradient, and along the diagonal of those whose gradient is 0, on which f may yet depend."""
    size = torch.where(x == 0, 1.0, x.abs())
    parts = [gradient * size, (gradient == 0).to(x)]
    direction = size * torch.stack([part / part.norm() for part in parts if part.any()]).sum(0)
    return direction.mul_(len(x) ** 0.5)


def _doubled(data: Any) -> Any:
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return doubled(tensor.detach()).requires_grad_(tensor.requires_grad)

    return _DoubledItems(data) if isinstance(data, Dataset) else map_tensors(double, data)


class _DoubledItems(Dataset[Any]):
    """A dataset with the floating-point tensors of its items in float64."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return _doubled(self._dataset[index])
