"""The user's optimizer, by name, from a factory, or made already; `test_bad_inputs.py` has what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import batchopt
from batchopt.extending import choose_optimizer

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


def chosen(choice: Any) -> torch.optim.Optimizer:
    """The optimizer, over all of the parameters."""
    parameters = matrices()
    found = choose_optimizer(choice, parameters)
    assert found is not None
    assert [id(p) for group in found.param_groups for p in group["params"]] == [id(p) for p in parameters]
    return found


@pytest.mark.parametrize("name", [*OURS, "sgd", "adam", *sorted(KINDS.keys() - {"lbfgs", "sgd", "adam"})])
def test_a_name_is_that_of_a_class_in_any_case_ours_before_those_of_torch(name: str) -> None:
    assert type(chosen(name)) is type(chosen(name.upper())) is {**KINDS, **OURS}[name]


def test_a_class_or_a_name_has_its_defaults_and_lbfgs_a_line_search() -> None:
    for choice in ("Adam", torch.optim.Adam):
        assert type(chosen(choice)) is torch.optim.Adam
        assert chosen(choice).defaults == torch.optim.Adam(matrices()).defaults
    assert chosen("lbfgs").param_groups[0]["line_search_fn"] == "strong_wolfe"


@pytest.mark.parametrize(
    "factory",
    [lambda params: torch.optim.SGD(params, lr=0.5), functools.partial(torch.optim.SGD, lr=0.5)],
    ids=["lambda", "partial"],
)
def test_a_factory_is_given_the_parameters(factory: Any) -> None:
    assert chosen(factory).defaults["lr"] == 0.5


class Own(torch.optim.Optimizer):
    """Has no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"max_iter": 0})


@pytest.mark.parametrize("kind", [torch.optim.Adam, Own])
def test_an_instance_is_taken_as_it_is_over_some_and_over_frozen_parameters(kind: Any) -> None:
    parameters = matrices()
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    for held in (parameters, parameters[:1], [*parameters, frozen]):
        instance = kind(held)
        assert choose_optimizer(instance, parameters) is instance
    assert choose_optimizer(None, parameters) is None
