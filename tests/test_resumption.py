"""One goes on from a state of the same kind, and from no other: a state that is refused has changed nothing."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import batchopt
from batchopt import BatchOptimizer, CheckpointError
from batchopt._checkpoint.plain_data import copied, digest
from batchopt._function.resumption import class_of
from tests.workloads import Mlp, mlp

KINDS: dict[str, Any] = {
    "adam": "adam",
    "sgd": "sgd",
    "torch's lbfgs": lambda params: torch.optim.LBFGS(params, max_iter=2),
    "lbfgs": lambda params: batchopt.LBFGS(params, max_iter=2),
    "cg": lambda params: batchopt.CG(params, max_iter=2),
    "ssbroyden": lambda params: batchopt.SSBroyden(params, max_iter=2),
}
# Of our L-BFGS it is documented that it takes over what it can of torch's.
READS = {("torch's lbfgs", "lbfgs")}


def optimizer(kind: Any, steps: int = 1) -> BatchOptimizer:
    """One that has made some steps."""
    case = mlp()
    torch.manual_seed(steps)
    opt = BatchOptimizer(Mlp().double(), case.criterion, optimizer=kind)
    for _ in range(steps):
        opt.step(case.inputs, case.targets)
    return opt


def everything(opt: BatchOptimizer) -> Any:
    """All that a state that is refused must leave as it was."""
    return digest(copied(opt.state_dict())), opt.fingerprint(), [worker.speed for worker in opt.workers]


@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_a_state_of_another_class_is_refused_and_names_both(here: str, there: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    case = mlp()
    with optimizer(KINDS[there]) as one, optimizer(KINDS[here], steps=2) as other:
        one.save(path)
        if here == there or (there, here) in READS:
            other.load_checkpoint(path)
            assert torch.equal(other.parameters, one.parameters)
            other.step(case.inputs, case.targets)
            return
        before = everything(other)
        names = class_of(one.optimizer), class_of(other.optimizer)
        with pytest.raises(ValueError, match=f"optimizer of the state is {names[0]} and this one is {names[1]}"):
            other.load_state_dict(one.state_dict())
        with pytest.raises(CheckpointError, match=f"{names[0]} and this one is {names[1]}"):
            other.load_checkpoint(path)
        assert everything(other) == before


def test_older_states_which_do_not_say_their_class_load_if_their_options_are_there() -> None:
    for here in KINDS:
        with optimizer(KINDS[here]) as one, optimizer(KINDS[here], steps=2) as other:
            state = one.state_dict()
            del state["optimizer_class"]
            other.load_state_dict(state)
            assert torch.equal(other.parameters, one.parameters)
    for there, here in (("adam", "lbfgs"), ("lbfgs", "adam"), ("adam", "sgd"), ("sgd", "cg")):
        with optimizer(KINDS[there]) as one, optimizer(KINDS[here], steps=2) as other:
            state, before = one.state_dict(), everything(other)
            del state["optimizer_class"]
            with pytest.raises(ValueError, match=r"does not say its class, and lacks the options \['"):
                other.load_state_dict(state)
            assert everything(other) == before


class Mine(torch.optim.SGD):
    """The user's own."""


def test_what_a_class_is_called() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    base = torch.optim.SGD(parameters, lr=0.1)
    assert class_of(None) is None
    assert class_of(base) == "torch.SGD" and class_of(Mine(parameters)) == "Mine"
    assert class_of(batchopt.LBFGS(parameters)) == "batchopt.LBFGS"
    assert class_of(batchopt.SVRG(base)) == "batchopt.SVRG around torch.SGD"


def without(name: str) -> Callable[[dict[str, Any]], None]:
    """Takes an entry out."""
    return lambda state: state.pop(name) and None


def having(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Puts a value at a path."""
    return lambda state: functools.reduce(lambda inner, key: inner[key], path[:-1], state).update({path[-1]: value})


BAD: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    **{f"no {name}": (without(name), f"lacks \\['{name}'\\]") for name in ("module", "history", "speeds", "seed")},
    "no optimizer entry": (without("optimizer"), r"lacks \['optimizer'\]"),
    "module": (having("module", value=[1]), "`module` of the state must be a dict.*got list"),
    "a parameter is no tensor": (having("module", "second.bias", value="text"), "second.bias"),
    "a parameter of another shape": (having("module", "second.bias", value=torch.zeros(7)), "second.bias"),
    "speeds: text": (having("speeds", value="fast"), "`speeds` of the state"),
    "speeds: of texts": (having("speeds", value=["fast"]), "`speeds` of the state"),
    "speeds: a number": (having("speeds", value=3.0), "`speeds` of the state"),
    "speeds: infinite": (having("speeds", value=[math.inf]), "`speeds` of the state"),
    "speeds: negative": (having("speeds", value=[-1.0]), "`speeds` of the state"),
    "history": (having("history", value=[]), "`history` of the state must be a dict"),
    "history: text": (having("history", "evaluations", value="many"), "has evaluations 'many'"),
    "history: negative": (having("history", "steps", value=-1), "has steps -1"),
    "history: loss": (having("history", "loss", value=None), "has loss None"),
    "history: chain": (having("history", "losses", value="xyz"), "has losses 'xyz'"),
    "history: terms": (having("history", "terms", value={"a": "b"}), "has terms"),
    "history: unknown": (having("history", "evils", value=1), r"has unknown \['evils'\]"),
    "seed": (having("seed", value="0"), "`seed` is 0 here and '0'"),
    "optimizer": (having("optimizer", value=5), "`optimizer` of the state must be a dict"),
    "optimizer: no groups": (having("optimizer", value={"state": {}}), "no state of an optimizer"),
    "optimizer: groups": (having("optimizer", "param_groups", value=[5]), "each of `param_groups`"),
    "optimizer: more groups": (having("optimizer", "param_groups", value=[]), "parameter group"),
    "optimizer: memory": (having("optimizer", "state", 0, value=7), "remembers of each parameter"),
    "optimizer: lr": (having("optimizer", "param_groups", 0, "lr", value=-1.0), "`?lr"),
    "choice": (having("parallelize", value=2), "`parallelize` of the state must be a dict"),
    "choice: workers": (having("parallelize", value={"workers": 0, "samples": 1}), "`parallelize` of the state is"),
    "weights": (having("weights", value={"a": 1.0}), "this BatchOptimizer has none"),
}


@pytest.mark.parametrize("kind", ["adam", "lbfgs"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_entry_is_named_and_nothing_has_changed(name: str, kind: str) -> None:
    change, message = BAD[name]
    with optimizer(KINDS[kind]) as one, optimizer(KINDS[kind], steps=2) as other:
        state = copy.deepcopy(one.state_dict())
        change(state)
        before = everything(other)
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            other.load_state_dict(state)
        assert everything(other) == before
        other.evaluate()  # the batch is still loaded
        assert other.step(mlp().inputs, mlp().targets) > 0


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_what_is_no_state_at_all(state: Any) -> None:
    with optimizer("sgd") as opt, pytest.raises(TypeError, match="the state must be a dict"):
        opt.load_state_dict(state)


def test_what_compression_had_left_is_not_dropped_without_a_word() -> None:
    with optimizer("sgd") as opt:
        state = opt.state_dict()
        state["residuals"] = {0: torch.zeros_like(opt.parameters)}
        with pytest.warns(RuntimeWarning, match="compression residuals, which are dropped"):
            opt.load_state_dict(state)
