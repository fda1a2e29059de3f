"""Every form of data, however it is read, cut and asked for, has the numbers of plain torch on the whole batch; and the
bits of one worker for any number of them."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from batchopt import Batches, BatchOptimizer, NonFiniteError, Term, Weighted
from tests.workloads import Listed, Mlp, Pairs, difference, mean_square, misfit, size

N = 12
X = torch.linspace(-2.0, 2.0, N * 6, dtype=torch.float64).reshape(N, 6).sin()
Y = torch.linspace(-1.0, 3.0, N * 4, dtype=torch.float64).reshape(N, 4).cos()
W = torch.linspace(0.0, 5.0, N, dtype=torch.float64).cos().square()
W[3:5] = 0.0
COUNTS = (torch.arange(N) % 4).double()
COUNTED = torch.cat([COUNTS[:, None], Y], 1)
CLASSES = torch.arange(N) * 5 % 4
SOME = CLASSES.clone()
SOME[::5] = -100
UNEQUAL = torch.tensor([0.0, 1.0, 0.3, 2.0], dtype=torch.float64)
SHARES = Y.softmax(1)
LENGTHS = [1, 3, 2, 4, 1, 1]  # of samples, 12 rows in all
ROWS, ROW_TARGETS = [*torch.split(X, LENGTHS)], [*torch.split(Y, LENGTHS)]

Plain = Callable[[Any], torch.Tensor]
Built = tuple[tuple[Any, ...], dict[str, Any], Plain]


class Pair(NamedTuple):
    points: torch.Tensor
    values: torch.Tensor


class Encoding(UserDict[str, torch.Tensor]):
    """As transformers' BatchEncoding: items are attributes, too."""

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["data"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Record:
    points: torch.Tensor
    values: torch.Tensor
    name: str = "no tensor"
    total: int = field(init=False, default=0)


# ---- the forms: a batch, the options that it needs, and f by plain torch


def squares(module: Any) -> torch.Tensor:
    return F.mse_loss(module(X), Y)


def by(criterion: Any, targets: Any = Y) -> Plain:
    return lambda module: criterion(module(X), targets)


def in_structure(kind: type, get: Callable[[Any], tuple[Any, Any]], batch: Any) -> Built:
    """Inputs and targets in one structure, of which each piece has the type."""

    def loss_fn(module: nn.Module, inputs: Any, targets: None) -> torch.Tensor:
        assert type(inputs).__name__ == kind.__name__ and targets is None
        points, values = get(inputs)
        assert len(points) == len(values)
        return F.mse_loss(module(points), values)

    return (batch,), {"loss_fn": loss_fn}, squares


def beside(batch: Any) -> tuple[Any, Any]:
    assert type(batch["n"]) is list and type(batch["a"]) is np.ndarray and batch["unit"] == "m"
    assert len(batch["n"]) == len(batch["a"]) == len(batch["x"])
    return batch["x"], batch["y"]


def counted(inputs: Any, targets: Any) -> Any:
    """Numbers of what counts, for a loss that counts rows by its targets."""
    return targets[:, 0]


def by_counts(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over other numbers for each sample."""
    counts, values = targets[:, 0], targets[:, 1:]
    return (counts * (output - values).square().mean(1)).sum() / counts.sum()


def of_counts(module: Any) -> torch.Tensor:
    return by_counts(module(X), COUNTED)


def stack(pairs: list[Any]) -> Any:
    return tuple(map(torch.stack, zip(*pairs, strict=True)))


def cat(pairs: list[Any]) -> Any:
    return tuple(map(torch.cat, zip(*pairs, strict=True)))


def from_dicts(items: list[Any]) -> Any:
    return torch.stack([item["a"] for item in items]), torch.stack([item["b"] for item in items])


def loss_in_item(module: nn.Module, inputs: Any, targets: None) -> torch.Tensor:
    return F.mse_loss(module(inputs["x"]), inputs["y"])


def weighing(function: Callable[..., torch.Tensor], targets: torch.Tensor = Y) -> Plain:
    """The mean with weights of samples, by its definition."""

    def loss(module: Any) -> torch.Tensor:
        found: torch.Tensor = W @ function(module(X), targets, reduction="none").reshape(N, -1).mean(1) / W.sum()
        return found

    return loss


def class_loss(targets: torch.Tensor, **options: Any) -> Plain:
    """Weighted losses by the weights that count."""

    def loss(module: Any) -> torch.Tensor:
        each = F.cross_entropy(module(X), targets, reduction="none", **options)
        weights = options.get("weight", torch.ones(4, dtype=torch.float64))
        found: torch.Tensor = W @ each / (W @ (weights[targets.clamp(min=0)] * (targets != -100)))
        return found

    return loss


def whole(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (output - targets).square().sum()
    return found


def terms_of(form: Any) -> Built:
    """Five terms, of every reduction, with data of their own."""
    terms = {
        "mean": Term(misfit, 1.5),
        "none": Term(size, 0.0),
        "sum": Term(lambda m, x, y: whole(m(x), y), 0.5, "sum"),
        "list": Term(
            lambda m, x, _: m(x[0]).square().sum(), reduction="sum", collate_fn=lambda s: (torch.cat(s), None)
        ),
        "masked": Term(lambda m, x, y: by_counts(m(x), y), 3.0, denominators=counted),
        "robust": Term(residual=difference, loss="cauchy", scale=0.5),
    }
    batch = {
        **{"mean": form, "none": X[:7], "sum": (X[2:9], Y[2:9]), "list": (ROWS,)},
        **{"masked": (X, COUNTED), "robust": (Weighted(X[:8], W[:8]), Y[:8])},
    }

    def plain(module: Any) -> torch.Tensor:
        each = ((module(X[:8]) - Y[:8]) / 0.5).square().log1p().mean(1)
        robust = 0.25 * W[:8] @ each / W[:8].sum()
        counts = 3 * by_counts(module(X), COUNTED)
        rest = 0.5 * whole(module(X[2:9]), Y[2:9]) + module(X).square().sum()
        found: torch.Tensor = 1.5 * squares(module) + rest + counts + robust
        return found

    return (batch,), {"terms": terms}, plain


MSE: dict[str, Any] = {"criterion": nn.MSELoss()}
BCE, CE = nn.BCEWithLogitsLoss, nn.CrossEntropyLoss
ENTRIES = Y.abs() + 0.1
READ_BY_WORKERS: dict[str, Dataset[Any]] = {
    "a dataset": Pairs(X, Y),
    "a TensorDataset": TensorDataset(X, Y),
    "a Subset": Subset(TensorDataset(X.flip(0), Y.flip(0)), range(N)[::-1]),
    "a ConcatDataset": ConcatDataset([Pairs(X[:5], Y[:5]), TensorDataset(X[5:], Y[5:])]),
    "items of arrays": Listed(*([a, b] for a, b in zip(X.numpy(), Y.numpy(), strict=True))),
}
ARRAYS = {
    "of doubles": X.numpy(),
    "backwards": X.flip(0).numpy()[::-1],
    "read-only": np.broadcast_to(X.numpy(), X.shape),
    "of the other byte order": X.numpy().astype(">f8"),
}
ROWS_OF_NUMBERS: dict[str, Any] = {
    "a tensor": counted,
    "a result of autograd": lambda x, y: y[:, 0].clone().requires_grad_() * 1,
    "an array": lambda x, y: y[:, 0].numpy().astype(np.float32),
    "tensors": lambda x, y: [*y[:, 0]],
}
LOSSES: list[tuple[Any, torch.Tensor]] = [
    (CE(weight=UNEQUAL, label_smoothing=0.1), SOME),
    (CE(weight=UNEQUAL, reduction="sum", ignore_index=1), CLASSES),
    (BCE(weight=ENTRIES[:, :1], pos_weight=ENTRIES), SHARES),
]
LOSSES_WITH_WEIGHTS: list[tuple[Any, torch.Tensor, Plain]] = [
    (nn.MSELoss(reduction="sum"), Y, lambda module: (W[:, None] * (module(X) - Y).square()).sum()),
    (nn.L1Loss(), Y, weighing(F.l1_loss)),
    (
        nn.KLDivLoss(reduction="batchmean"),
        SHARES,
        lambda module: (W[:, None] * F.kl_div(module(X), SHARES, reduction="none")).sum() / W.sum(),
    ),
    (
        BCE(weight=ENTRIES),
        SHARES,
        weighing(
            lambda o, t, reduction: F.binary_cross_entropy_with_logits(o, t, ENTRIES, reduction=reduction),
            SHARES,
        ),
    ),
    (CE(weight=UNEQUAL, label_smoothing=0.1), SOME, class_loss(SOME, weight=UNEQUAL, label_smoothing=0.1)),
]
FORMS: dict[str, Built] = {
    "tensors": ((X, Y), MSE, squares),
    "residuals": ((X, Y), {"residual": difference}, squares),
    "a sum of residuals": ((X, Y), {"residual": difference, "reduction": "sum"}, lambda m: whole(m(X), Y)),
    "a term": (({"a": (X, Y)},), {"terms": {"a": Term(misfit)}}, squares),
    "inputs alone": ((X,), {"criterion": mean_square}, lambda module: mean_square(module(X))),
    "a leaf that requires grad": ((X.clone().requires_grad_(), Y), MSE, squares),
    **{f"an array {name}": ((array, Y.numpy()), MSE, squares) for name, array in ARRAYS.items()},
    "a tuple": in_structure(tuple, lambda batch: batch, (X, Y)),
    "a named tuple": in_structure(Pair, lambda batch: batch, Pair(X, Y)),
    "a dict": in_structure(dict, lambda batch: (batch["x"], batch["y"]), {"x": X, "y": Y}),
    "a mapping": in_structure(Encoding, lambda batch: (batch.x, batch["y"]), Encoding(x=X, y=Y)),
    "a dataclass": in_structure(Record, lambda batch: (batch.points, batch.values), Record(X, Y)),
    "nested": in_structure(dict, lambda b: (b["a"][0], b["a"][1][0]), {"a": (X, [Y, COUNTS]), "b": "no tensor"}),
    "values beside tensors": in_structure(
        dict, beside, {"x": X, "y": Y, "n": ["n"] * N, "unit": "m", "a": np.array(["a"] * N)}
    ),
    "a list": (([*X], [*Y]), MSE, squares),
    "a list of dicts": (
        ([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],),
        {"loss_fn": loss_in_item},
        squares,
    ),
    "a list of many lengths": (
        (ROWS, ROW_TARGETS),
        MSE,
        lambda m: torch.stack([F.mse_loss(m(x), y) for x, y in zip(ROWS, ROW_TARGETS, strict=True)]).mean(),
    ),
    "a list that is collated": (([*X], [*Y]), {**MSE, "collate_fn": stack}, squares),
    "a list that is collated to rows": (
        (ROWS, ROW_TARGETS),
        {"criterion": nn.MSELoss(reduction="sum"), "collate_fn": cat},
        lambda module: whole(module(X), Y),
    ),
    **{
        f"denominators as {name}": (
            (X, COUNTED),
            {"criterion": by_counts, "denominators": given},
            of_counts,
        )
        for name, given in ROWS_OF_NUMBERS.items()
    },
    "rows with denominators": (
        (ROWS, ROW_TARGETS),
        {**MSE, "collate_fn": cat, "denominators": lambda inputs, targets: [len(x) for x in inputs]},
        squares,
    ),
    **{name: ((data,), MSE, squares) for name, data in READ_BY_WORKERS.items()},
    "a dataset read each time": ((Pairs(X, Y),), {**MSE, "cache": False}, squares),
    "a dataset of dicts": (
        (Listed(*({"x": x, "y": y} for x, y in zip(X, Y, strict=True))),),
        {"loss_fn": loss_in_item},
        squares,
    ),
    "a dataset of inputs": ((Listed(*X),), {"criterion": mean_square}, lambda module: mean_square(module(X))),
    "a dataset that is collated": (
        (Listed(*({"a": x, "b": y} for x, y in zip(X, Y, strict=True))),),
        {**MSE, "collate_fn": from_dicts},
        squares,
    ),
    "a sum": ((X, Y), {"criterion": nn.MSELoss(reduction="sum")}, lambda module: whole(module(X), Y)),
    "denominators of a dataset": (
        (Pairs(X, COUNTED),),
        {"criterion": by_counts, "denominators": counted},
        of_counts,
    ),
    **{
        f"{kind}{criterion} {number}": ((batch(targets)), {"criterion": criterion}, by(criterion, targets))
        for number, (criterion, targets) in enumerate(LOSSES)
        for kind, batch in (
            ("", lambda targets: (X, targets)),
            ("read, ", lambda targets: (Pairs(X, targets),)),
            ("a list, ", lambda targets: ([*X], [*targets])),
        )
        if not (kind == "read, " and -100 in targets)
    },
    **{
        f"weights of {name}": ((Weighted(inputs, weights), targets), MSE, weighing(F.mse_loss))
        for name, inputs, targets, weights in (
            ("tensors", X, Y, W),
            ("lists", [*X], [*Y], W.tolist()),
            ("arrays", X.numpy(), Y.numpy(), W.numpy()),
            ("a dataset", Pairs(X, Y), None, 7 * W),
        )
    },
    **{
        f"weights of {criterion} {number}": ((Weighted(X, W), targets), {"criterion": criterion}, plain)
        for number, (criterion, targets, plain) in enumerate(LOSSES_WITH_WEIGHTS)
    },
    "terms": terms_of((X, Y)),
    "terms and a dataset": terms_of(Pairs(X, Y)),
}


class Waves(nn.Module):
    """Complex parameters, a real one of odd size before them, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
        self.first = nn.Parameter(torch.view_as_complex(X.reshape(6, 6, 2).clone()))
        self.second = nn.Parameter(torch.view_as_complex(Y.reshape(6, 4, 2) / 2))
        self.nothing = nn.Parameter(torch.empty(0, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.tanh((x + 0j) @ self.first.conj()) @ self.second * self.rate
        return (found + found.conj() @ (self.second.mH @ self.second)).abs()


def network() -> nn.Module:
    torch.manual_seed(0)
    return Mlp(6, 5, 4).double()


def close(found: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance * float(right.abs().sum() + 1))


def asked(batch: tuple[Any, ...], options: dict[str, Any], plain: Plain, module: nn.Module, **how: Any) -> list[Any]:
    """The numbers of one way, compared with plain torch's."""
    expected, once = plain(module), batch[0] if "terms" in options else batch
    parameters = list(module.parameters())
    slopes = torch.autograd.grad(expected, parameters, allow_unused=True, materialize_grads=True)
    with BatchOptimizer(module, **{"optimizer": None, "check_cut": False, **options, **how}) as opt:
        opt.load(*batch)
        for _ in range(2):  # repeated, and what was read is kept
            f = opt.evaluate()
            assert f.item() == pytest.approx(expected.item(), rel=1e-12)
            for parameter, slope in zip(parameters, slopes, strict=True):
                close(parameter.grad if parameter.grad is not None else torch.zeros_like(slope), slope)
        gradient = opt.grad_parameters.clone()
        v = torch.linspace(-1.0, 1.0, len(gradient), dtype=torch.float64)
        points = torch.stack([opt.parameters, opt.parameters + 1e-5 * v, opt.parameters - 1e-5 * v])
        losses, gradients = opt.evaluate_many(points, gradients=True)
        close(losses[:1], f[None])
        close(gradients[0], gradient)
        if "parallelize" not in how:  # the first product in a worker takes half a second
            close(opt.hvp(v), (gradients[1] - gradients[2]) / 2e-5, 1e-6)
        ahead = [*opt.steps([once] * 2)]
        assert ahead == [pytest.approx(expected.item(), rel=1e-12)] * 2
        if "terms" not in options:
            total, of_all = opt.full_gradient([once])
            assert total == pytest.approx(expected.item(), rel=1e-12)
            close(of_all, gradient)
        return [f.item(), gradient, losses, gradients, *map(torch.tensor, ahead)]


def each(names: Iterable[str]) -> list[Any]:
    """As parameters; of siblings those that differ in an array's kind or in the loss are of the night."""
    siblings = re.compile(
        "an array (back|read|of the)|denominators as (an|te)|read, |weights of (lists|arrays|[^C].*[(])"
    )
    return [pytest.param(name, marks=[pytest.mark.nightly] * bool(siblings.match(name))) for name in names]


@pytest.mark.rows
@pytest.mark.filterwarnings("ignore:.* for . workers")
@pytest.mark.parametrize("name", each(FORMS))
def test_each_form_has_the_numbers_of_plain_torch_and_the_bits_of_one_worker(name: str) -> None:
    form = FORMS[name]
    asked(*form, network())
    one, two = (asked(*form, network(), parallelize=workers, chunk_size=4) for workers in (1, 2))
    assert one[0] == two[0] and all(map(torch.equal, one[1:], two[1:]))


@pytest.mark.rows
@pytest.mark.filterwarnings("ignore:.* for . workers")
@pytest.mark.parametrize("name", ["tensors", "a list", "a dataset", "terms", "weights of tensors"])
def test_so_it_has_with_complex_parameters(name: str) -> None:
    one, two = (asked(*FORMS[name], Waves(), parallelize=workers, chunk_size=5) for workers in (1, 2))
    assert one[0] == two[0] and all(map(torch.equal, one[1:], two[1:]))


# ---- tasks, and batches of an epoch

EPOCHS = ["tensors", "an array of doubles", "a list that is collated", "a dataset", "a TensorDataset", "a Subset"]


@pytest.mark.rows
@pytest.mark.filterwarnings("ignore:.* for . workers")
@pytest.mark.parametrize("name", EPOCHS)
@pytest.mark.parametrize("parallelize", [1, 2])
def test_epochs_and_tasks_of_each_form_are_those_of_tensors(name: str, parallelize: int) -> None:
    batch, options, _ = FORMS[name]
    data: Any = batch[0] if len(batch) == 1 else batch
    if isinstance(batch[0], list):
        data = [*zip(*batch, strict=True)]
    module = network()
    with BatchOptimizer(
        module, **options, optimizer="sgd", parallelize=parallelize, chunk_size=4, check_cut=False
    ) as opt:
        opt.load(*batch)
        opt.evaluate()
        close(opt.predict(), module(X).detach())
        gradient, inputs = opt.grad_parameters.clone(), X.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(F.mse_loss(module(inputs), Y), inputs)
        found = opt.input_gradients()
        close(torch.stack([*found]) if isinstance(found, list) else found, slopes)
        total, of_all = opt.full_gradient(Batches(data, 5, collate_fn=options.get("collate_fn")))
        assert total == pytest.approx(squares(module).item(), rel=1e-12)
        close(of_all, gradient)


# ---- how many samples there are

FOUR, THREE = [torch.rand(4, 2), torch.rand(4)], [torch.rand(3)] * 3
SIZES: list[tuple[tuple[Any, ...], int]] = [
    ((torch.arange(4), [0, 1, 2, 3]), 4),
    ((MappingProxyType({"points": torch.rand(4, 3)}),), 4),
    (([{"atoms": torch.rand(n, 3), "charge": n} for n in range(5)],), 5),
    ((["a", "b", "c", "d"],), 4),
    # a list is samples, a tuple is columns
    ((tuple(FOUR), [1, 2, 3, 4]), 4),
    *(((FOUR, targets), 2) for targets in (None, torch.rand(2), [1, 2], FOUR)),
    ((THREE, [torch.tensor(0)] * 3), 3),
]


@pytest.mark.parametrize("row", range(len(SIZES)))
def test_the_number_of_samples(row: int) -> None:
    batch, samples = SIZES[row]
    with BatchOptimizer(
        nn.Linear(1, 1),
        loss_fn=lambda module, x, y: next(module.parameters()).sum(),
        optimizer=None,
        posthook=lambda worker, sample: [*sample.indices],
    ) as opt:
        opt.load(*batch)
        opt.evaluate()
        assert [*chain(*opt.hook_results)] == [*range(samples)]


def test_options_are_one_object_a_sample() -> None:
    several: list[Any] = [["a", "b", None], ("a", "b", None), torch.arange(3)]
    for given in several:
        with BatchOptimizer(nn.Linear(1, 1), nn.MSELoss(), posthook=lambda worker, sample: sample.options) as opt:
            opt.load(torch.rand(3, 1), torch.rand(3, 1), given)
            opt.evaluate()
            assert opt.hook_results == [[*given]]


def test_a_mean_over_nothing_is_not_a_number_as_in_torch() -> None:
    with BatchOptimizer(nn.Linear(2, 3), nn.CrossEntropyLoss(), optimizer=None) as opt:
        opt.load(torch.rand(4, 2), torch.full((4,), -100))
        with pytest.raises(NonFiniteError, match=r"mean over no counted targets|loss is nan"):
            opt.evaluate()
