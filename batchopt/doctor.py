"""Do f and its gradient describe one function, and is the parallel one the serial one? Four checks, and the first
culprit found."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from batchopt.function import BatchFunction
from batchopt_workers.batch import map_tensors
from batchopt_workers.inspection import attributes, normalises_by_chunk

CHUNKS = 4  # of the batch where a cut is tried
STEP = 1e-5  # of the finite difference, relative to the size of X
SLOPE_TOLERANCE = 1e-5  # relative; a central difference of this step is good to about 1e-9 in float64


class Culprit(Enum):
    """What makes f and its gradient no single function; the value says what to do."""

    NONE = "none found"
    STATE = "the module keeps something from one evaluation to the next: make it a buffer, which starts each step afresh, or drop it"
    RANDOMNESS = "something random that is not seeded: draw from torch's, NumPy's or random's global generator, which are seeded for each chunk"
    HOOK = "a hook changes the gradient or the loss (clipping, say): what a line search sees is no function; do it to the step instead"
    GRADIENT = "the gradient is not that of the loss: look for detach(), no_grad() or a custom backward on the way from parameters to loss"
    BATCH_NORM = "a layer normalises by the statistics of a chunk: call module.eval(), or use GroupNorm or LayerNorm"
    REDUCTION = "the loss of some samples is their sum, not their mean: pass reduction='sum'"
    CUT = "the loss of the whole batch is not the mean of its samples' losses: pass `denominators`, or reduction='sum'"
    PARALLEL = "workers compute something else than this process: look for what they have not (files, globals, precode)"


class Check(NamedTuple):
    """One question: whether the answer is good, and the numbers."""

    question: str
    passed: bool
    numbers: str


@dataclass(frozen=True)
class Diagnosis:
    """The checks that were made, and the first culprit found, with the names of what it concerns."""

    checks: tuple[Check, ...]
    culprit: Culprit
    detail: str = ""

    @property
    def healthy(self) -> bool:
        """Whether every check passed."""
        return self.culprit is Culprit.NONE

    def __str__(self) -> str:
        lines = [f"{'ok  ' if c.passed else 'FAIL'} {c.question}: {c.numbers}" for c in self.checks]
        culprit = f"culprit: {self.culprit.value}" + (f" ({self.detail})" if self.detail else "")
        return "\n".join([*lines, culprit])


class Value(NamedTuple):
    """f and df/dX at one point."""

    loss: float
    gradient: torch.Tensor


def _value(subject: BatchFunction) -> Value:
    loss = subject.evaluate().item()
    return Value(loss, subject.grad_parameters.detach().double().clone())


def _difference(one: Value, two: Value) -> float:
    """The larger of the relative differences of losses and of gradients."""
    scale = max(abs(one.loss), abs(two.loss)) or 1.0
    norm = max(one.gradient.norm().item(), two.gradient.norm().item()) or 1.0
    gradients = float((one.gradient - two.gradient).norm().item()) / norm
    return max(abs(one.loss - two.loss) / scale, gradients)


class Examination:
    """The checks of one subject on one batch, each made when it is asked for."""

    def __init__(self, subject: BatchFunction, inputs: Any, targets: Any, options: Any) -> None:
        """Loads the batch in `subject`, cut into fixed chunks."""
        self._subject, self._batch = subject, (inputs, targets, options)
        self.size, self._chunk_size = subject.load_in_chunks(CHUNKS, inputs, targets, options)
        self._doubles = self._can_double()
        self._dtype = torch.float64 if self._doubles else subject.parameters.dtype
        self._tolerance = 1e-9 if self._dtype is torch.float64 else 1e-3

    def _twin(self, hooks: bool = True, **changes: Any) -> BatchFunction:
        """A serial one over a copy of the module, in float64 where the module can be evaluated there."""
        module, criterion = copy.deepcopy((self._subject.module, self._subject.criterion))
        if self._doubles:
            module.double()
            if isinstance(criterion, torch.nn.Module):
                criterion.double()
        if not hooks:
            changes |= {"prehook": None, "posthook": None}
        return self._subject.twin(module, criterion=criterion, **changes)

    def _load(self, twin: BatchFunction) -> None:
        inputs, targets, options = self._batch
        if self._doubles:
            inputs, targets = _doubled(inputs), _doubled(targets)
        twin.load(inputs, targets, options)

    def _can_double(self) -> bool:
        self._doubles = True
        try:
            with self._twin(chunk_size=self.size, on_nonfinite="return") as twin:
                self._load(twin)
                twin.evaluate()
        except Exception:  # whatever a module does that was written for one dtype
            return False
        return True

    def value(self, dropout: bool = True, **changes: Any) -> Value:
        """f and df/dX of a twin."""
        with self._twin(**changes) as twin:
            if not dropout:
                for part in twin.module.modules():
                    if isinstance(part, torch.nn.modules.dropout._DropoutNd):
                        part.eval()
            self._load(twin)
            return _value(twin)

    def repeats(self) -> tuple[Check, list[str]]:
        """Two evaluations at one point; and the attributes of the module that they changed."""
        before = self._subject.run_on_workers(attributes)
        one, two = _value(self._subject), _value(self._subject)
        after = self._subject.run_on_workers(attributes)
        changed = sorted({name for a, b in zip(before, after, strict=True) for name in b if a.get(name) != b[name]})
        same = one.loss == two.loss and torch.equal(one.gradient, two.gradient)
        return Check("two evaluations have the same bits", same, f"difference {_difference(one, two):.1e}"), changed

    def slope(self, hooks: bool = True) -> Check:
        """A central difference along the gradient, against the gradient's own length."""
        with self._twin(chunk_size=self.size, hooks=hooks) as twin:
            self._load(twin)
            here = _value(twin)
            start = twin.parameters.clone()
            direction = _direction(here.gradient)
            step = STEP * max(1.0, start.double().norm().item()) * (1 if self._doubles else 1e2)
            sides = []
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    twin.parameters.copy_(start.double() + sign * step * direction)
                sides.append(twin.evaluate().item())
        measured = (sides[0] - sides[1]) / (2 * step)
        claimed = (here.gradient @ direction).item()
        # what rounding of f and the curvature leave uncertain
        noise = 10 * torch.finfo(self._dtype).eps * max(abs(here.loss), 1e-300) / step
        curved = abs(sides[0] - 2 * here.loss + sides[1]) / step * 1e-2
        tolerance = SLOPE_TOLERANCE if self._doubles else 5e-2
        passed = abs(measured - claimed) <= tolerance * max(abs(measured), abs(claimed)) + noise + curved
        return Check(f"the gradient is the slope of f ({self._dtype})", passed, f"{claimed:.9g} against {measured:.9g}")

    def cut(self, **changes: Any) -> Check:
        """The whole batch in one go, against the same in chunks; without dropout, whose masks are drawn for each
        chunk."""
        question = "the batch in chunks is the batch"
        options = {key: value for key, value in changes.items() if key != "reduction"}
        whole = self.value(dropout=False, chunk_size=self.size, **options)
        other_draws = self.value(dropout=False, chunk_size=self.size, seed=2**40, **options)
        if whole.loss != other_draws.loss:
            return Check(question, True, "not checked: the module draws random numbers beside dropout")
        parts = self.value(dropout=False, chunk_size=math.ceil(self.size / CHUNKS), **changes)
        difference = _difference(whole, parts)
        return Check(question, difference <= self._tolerance, f"difference {difference:.1e}")

    def parallel(self) -> Check:
        """The subject against a serial twin, both in their own precision."""
        doubles, self._doubles = self._doubles, False
        serial = self.value(chunk_size=self._chunk_size)
        self._doubles = doubles
        difference = _difference(serial, _value(self._subject))
        tolerance = 1e-9 if self._subject.parameters.dtype is torch.float64 else 1e-3
        return Check("workers compute what this process does", difference <= tolerance, f"difference {difference:.1e}")


def examine(subject: BatchFunction, inputs: Any, targets: Any, options: Any) -> Diagnosis:
    """Check `subject` on a batch; stop at the first check that fails."""
    with subject.unobserved(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _examine(subject, Examination(subject, inputs, targets, options))


def _examine(subject: BatchFunction, examination: Examination) -> Diagnosis:
    checks: list[Check] = []

    def failed(check: Check) -> bool:
        checks.append(check)
        return not check.passed

    def found(culprit: Culprit, detail: str = "") -> Diagnosis:
        return Diagnosis(tuple(checks), culprit, detail)

    repeats, changed = examination.repeats()
    if failed(repeats):
        return found(Culprit.STATE, ", ".join(changed)) if changed else found(Culprit.RANDOMNESS)
    if failed(examination.slope()):
        return found(Culprit.HOOK if examination.slope(hooks=False).passed else Culprit.GRADIENT)
    if examination.size > 1 and failed(examination.cut()):
        norms = [name for name, part in subject.module.named_modules() if normalises_by_chunk(part)]
        if norms:
            return found(Culprit.BATCH_NORM, ", ".join(norms))
        if getattr(subject.criterion, "reduction", None) is None and examination.cut(reduction="sum").passed:
            return found(Culprit.REDUCTION)
        return found(Culprit.HOOK if examination.cut(hooks=False).passed else Culprit.CUT)
    if failed(examination.parallel()):
        return found(Culprit.PARALLEL)
    return found(Culprit.NONE)


def _direction(gradient: torch.Tensor) -> torch.Tensor:
    """Along the gradient, or along all axes where it vanishes."""
    norm = gradient.norm()
    return gradient / norm if norm > 0 else torch.full_like(gradient, len(gradient) ** -0.5)


def _doubled(data: Any) -> Any:
    def double(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    return map_tensors(double, data)
