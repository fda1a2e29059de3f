"""Studies of f of a batch, each by a module of `batchopt.extras`, which is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from batchopt._data.arguments import read_bool
from batchopt._machine.ownership import exclusive
from batchopt.evaluations import Evaluations

if TYPE_CHECKING:
    from batchopt.extras.covariance import Covariance
    from batchopt.extras.doctor import Diagnosis
    from batchopt.extras.scaling import Scaling
    from batchopt.extras.timeline import Timeline


class Studies(Evaluations):
    """Examines whether f is right, how fast it is, what was done when, and what its minimum says."""

    @exclusive
    def check(
        self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None, *, double: bool = True
    ) -> Diagnosis:
        """Check that f and its gradient describe one function on this batch, and that the parallel one equals the
        serial one.

        Evaluates twice for equal bits; compares the gradient with finite differences, in float64 where the module can
        be evaluated in it (`double=False`: in its own dtype, which detects less); the batch in chunks with the full
        batch; workers with this process. The precision of f, for a module that computes in single precision inside or
        solves an equation to a tolerance, is measured, and differences that it explains are accepted: it detects a
        slope that is off by a thousandth, and a cut by a hundred-thousandth, or the limit set by that precision.
        Returns a `Diagnosis`: `healthy`, `culprit`, and a report when printed. Parameters, counters and later draws are
        as before; hooks run, in this process too. A batch has to be loaded again.

        >>> opt.check(x, y)  # doctest: +ELLIPSIS
        ok   two evaluations have the same bits: difference 0.0e+00
        ok   the gradient is the slope of f (torch.float64): ... against ...
        ok   the batch in chunks is the batch: difference ...
        ok   workers compute what this process does: difference ...
        culprit: none found
        """
        from batchopt.extras.doctor import examine

        return examine(self, (inputs, targets, options), read_bool("double", double))

    @exclusive
    def scaling(self, *, seconds: float = 5.0) -> Scaling:
        """Measure how fast evaluations of the loaded batch are by this process and by 2, 4, ... workers on all usable
        cores, for `seconds` in all.

        `print` the result for a table with a summary. Other workers are measured than those of this optimizer, on a
        copy of the module: they run `precode` and hooks, and evaluate eagerly. Raises `ValueError` on a cluster, with
        `devices` and for a number that is not positive, and `BatchoptError` in the middle of a step and if no batch is
        loaded.
        """
        from batchopt.extras.scaling import measure_scaling

        self._owner.check_between_steps("scaling")
        return measure_scaling(self, seconds)

    @exclusive
    def covariance(
        self,
        kind: str | None = None,
        *,
        sigma: float | None = None,
        tolerance: float | None = None,
        limit: int = 5_000,
    ) -> Covariance:
        """Return the covariance of the parameters at X as estimated from the loaded batch: a `Covariance`, of which
        `print(found.summary())` shows standard errors, AIC and BIC, and `found.of(function)` gives the errors of
        functions of the module.

        kind: `"least squares"`, where f is a sum of squares: s² (JᵀVJ)⁻¹, by `normal`, with V the weights of samples
        and terms. `"likelihood"`: the inverse Hessian, by `hvp`, of f as a negative log likelihood; a mean is
        multiplied by what it divides by. `"sandwich"`: H⁻¹ G H⁻¹, where G has the outer products of the gradients of
        samples, which is right also if the likelihood is not (Huber, "The behavior of maximum likelihood estimates
        under nonstandard conditions", 1967; White, "Maximum likelihood estimation of misspecified models",
        Econometrica 50, 1982). Default: the first where f is a sum of squares, else the second.

        sigma: the known standard deviation of a residual of weight 1. Default: s² is the sum of weighted squares
        divided by the degrees of freedom. tolerance: the largest eigenvalue of a singular direction, of the matrix
        scaled to a unit diagonal; parameters that take part have infinite errors, and `singular` names them. Default:
        what rounding makes of 0. limit: of the number of parameters.

        Algebra is in float64; rows and products are in X's dtype, and `digits` says what that leaves. Frozen parameters
        have no error. A likelihood takes an evaluation, which sets `grad_parameters`, and p products. Raises
        `ValueError` for a Hessian with a negative eigenvalue, a robust loss or means of several terms as least squares,
        no degrees of freedom, or gradients of samples that do not sum up to df/dX; and what `normal`, `hvp` and `total`
        raise.

        >>> opt.load(x, y)
        >>> opt.covariance(tolerance=1e-6)  # of a network some directions are not determined # doctest: +ELLIPSIS
        Covariance(least squares, 25 parameters, ... singular directions)
        """
        from batchopt.extras.uncertainty import covariance_of

        self._owner.check_between_steps("covariance")
        return covariance_of(self, kind, sigma, tolerance, limit)

    def timeline(self) -> AbstractContextManager[Timeline]:
        """Record the activities of the parent and the workers inside a `with` statement; no overhead outside it.

        `with opt.timeline() as timeline: ...`; then `print(timeline)` for each worker's utilisation and split,
        `timeline.save("trace.json")` for a trace viewer (Perfetto), `timeline.draw("timeline.png")` for a figure.

        >>> with opt.timeline() as timeline:
        ...     loss = opt.step(x, y)
        >>> sorted(timeline.utilisation)
        [0, 1]
        """
        from batchopt.extras.timeline import Timeline

        return self._engine.observers.including(Timeline())
