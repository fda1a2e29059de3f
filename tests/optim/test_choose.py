"""The user's optimizer, by name, from a factory, or made already."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import batchopt
from batchopt.optim.choose import choose_optimizer

# Every optimizer of this torch; all of them take matrices.
KINDS = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
}
OURS: dict[str, type[torch.optim.Optimizer]] = {
    "lbfgs": batchopt.LBFGS,
    "cg": batchopt.CG,
    "ssbroyden": batchopt.SSBroyden,
}


def matrices() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(3, 2))]


def held(optimizer: torch.optim.Optimizer | None) -> list[int]:
    assert optimizer is not None
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("name", [*OURS, "sgd", "adam", *sorted(KINDS.keys() - {"lbfgs", "sgd", "adam"})])
def test_a_name_is_that_of_a_class_in_lower_case_ours_before_those_of_torch(name: str) -> None:
    parameters = matrices()
    chosen = choose_optimizer(name, parameters)
    assert type(chosen) is {**KINDS, **OURS}[name]
    assert held(chosen) == [id(p) for p in parameters]


def test_lbfgs_has_a_line_search() -> None:
    chosen = choose_optimizer("lbfgs", matrices())
    assert chosen is not None
    assert chosen.param_groups[0]["line_search_fn"] == "strong_wolfe"


def test_other_names_have_the_defaults_of_torch() -> None:
    chosen = choose_optimizer("sgd", matrices())
    assert chosen is not None
    assert chosen.defaults == torch.optim.SGD(matrices()).defaults


@pytest.mark.parametrize(
    "factory",
    [lambda params: torch.optim.SGD(params, lr=0.5), functools.partial(torch.optim.SGD, lr=0.5)],
    ids=["lambda", "partial"],
)
def test_a_factory_is_given_the_parameters(factory: Any) -> None:
    parameters = matrices()
    chosen = choose_optimizer(factory, parameters)
    assert chosen is not None
    assert held(chosen) == [id(p) for p in parameters]
    assert chosen.defaults["lr"] == 0.5


def test_an_instance_is_taken_as_it_is() -> None:
    parameters = matrices()
    instance = torch.optim.Adam(parameters[:1])
    assert choose_optimizer(instance, parameters) is instance


def test_none_is_no_optimizer() -> None:
    assert choose_optimizer(None, matrices()) is None


def test_frozen_parameters_of_the_optimizer_are_no_concern() -> None:
    parameters = matrices()
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    instance = torch.optim.SGD([*parameters, frozen])
    assert choose_optimizer(instance, parameters) is instance


@pytest.mark.parametrize("choice", ["Adam", "ADAM", torch.optim.Adam])
def test_a_name_in_any_case_or_a_class_is_made_with_its_defaults(choice: Any) -> None:
    parameters = matrices()
    chosen = choose_optimizer(choice, parameters)
    assert type(chosen) is torch.optim.Adam and chosen.defaults == torch.optim.Adam(matrices()).defaults
    assert held(chosen) == [id(p) for p in parameters]
    assert type(choose_optimizer("LBFGS", parameters)) is OURS["lbfgs"]


def with_options(kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """An optimizer of two groups, of which the second has these options; set where torch does not look."""
    first, second = matrices()
    groups = [first] if kind is torch.optim.LBFGS else [{"params": [first]}, {"params": [second]}]
    optimizer = kind(groups)  # type: ignore[call-arg]
    optimizer.param_groups[-1].update(options)
    return optimizer


def of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("lr", [0, 0.5, 1e9, torch.tensor(0.1), "not a number, and torch's affair"])
def test_a_learning_rate_that_goes_somewhere_or_nowhere_is_taken(lr: Any) -> None:
    instance = with_options(torch.optim.SGD, lr=lr)
    assert choose_optimizer(instance, of(instance)) is instance


def test_an_optimizer_without_a_learning_rate_is_taken() -> None:
    class Own(torch.optim.Optimizer):
        pass

    instance = Own(matrices(), {"max_iter": 0})
    assert choose_optimizer(instance, of(instance)) is instance
