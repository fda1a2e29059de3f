"""One goes on from a state of the same kind, and from no other: a state that is refused has changed nothing."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import batchopt
from batchopt import BatchOptimizer, CheckpointError
from tests.workloads import Mlp, mlp


class Mine(torch.optim.SGD):
    """The user's own."""


KINDS: dict[str, Any] = {
    "torch.Adam": "adam",
    "torch.SGD": "sgd",
    "torch.LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=2),
    "batchopt.LBFGS": lambda params: batchopt.LBFGS(params, max_iter=2),
    "batchopt.CG": lambda params: batchopt.CG(params, max_iter=2),
    "batchopt.SSBroyden": lambda params: batchopt.SSBroyden(params, max_iter=2),
    "Mine": Mine,
    "batchopt.SVRG around torch.SGD": lambda params: batchopt.SVRG(torch.optim.SGD(params)),
    "None": None,
}
# Of our L-BFGS it is documented that it takes over what it can of torch's.
READS = {("torch.LBFGS", "batchopt.LBFGS")}
CASE = mlp()


def optimizer(kind: str, steps: int = 1) -> BatchOptimizer:
    """One that has made some steps."""
    torch.manual_seed(steps)
    module = torch.nn.Sequential(Mlp(), torch.nn.BatchNorm1d(4)).double().eval()
    module.get_buffer("1.running_mean").fill_(steps)
    opt = BatchOptimizer(module, CASE.criterion, optimizer=KINDS[kind], seed=7)
    for _ in range(steps):
        if isinstance(opt.optimizer, batchopt.SVRG):
            opt.optimizer.begin_pass(lambda: opt.full_gradient([(CASE.inputs, CASE.targets)]))
        opt.step(CASE.inputs, CASE.targets)
    return opt


@pytest.fixture
def everything(tmp_path: Path) -> Any:
    """All that a state that is refused must leave as it was, as bytes."""

    def found(opt: BatchOptimizer) -> bytes:
        opt.save(tmp_path / "present")
        return (tmp_path / "present").read_bytes()

    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("here", KINDS)
def test_a_state_of_another_class_is_refused_and_names_both(here: str, everything: Any, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with optimizer(here, steps=2) as other:
        before = everything(other)
        for there in KINDS:
            with optimizer(there) as one:
                state = one.state_dict()
                assert str(state["optimizer_class"]) == there
                one.save(path)
                if here == there or (there, here) in READS:
                    continue
                words = f"optimizer of the state is {there} and this one is {here}|must both have an optimizer"
                with pytest.raises(ValueError, match=words):
                    other.load_state_dict(state)
                with pytest.raises(CheckpointError, match=words):
                    other.load_checkpoint(path)
                assert everything(other) == before
        for there in [here, *(there for there, reads in READS if reads == here)]:
            with optimizer(there) as one:
                one.save(path)
                other.load_checkpoint(path)
                assert torch.equal(other.parameters, one.parameters)
        other.load(CASE.inputs, CASE.targets)
        assert other.evaluate() > 0


@pytest.mark.slow
def test_older_states_which_do_not_say_their_class_load_if_their_options_are_there(everything: Any) -> None:
    for here in list(KINDS)[:-1]:
        with optimizer(here) as one, optimizer(here, steps=2) as other:
            state = one.state_dict()
            del state["optimizer_class"]
            other.load_state_dict(state)
            assert torch.equal(other.parameters, one.parameters)
    for there, here in (
        ("torch.Adam", "batchopt.LBFGS"),
        ("batchopt.LBFGS", "torch.Adam"),
        ("torch.SGD", "batchopt.CG"),
    ):
        with optimizer(there) as one, optimizer(here, steps=2) as other:
            state, before = one.state_dict(), everything(other)
            del state["optimizer_class"]
            with pytest.raises(ValueError, match=r"does not say its class, and lacks the options \['"):
                other.load_state_dict(state)
            assert everything(other) == before


X = torch.zeros(111, dtype=torch.float64)
# What is changed in a state, to what, and what is said. DROP takes it out.
DROP = object()
BAD: list[tuple[list[Any], Any, str]] = [
    *(([name], DROP, f"lacks \\['{name}'\\]") for name in ("module", "history", "speeds", "seed", "optimizer")),
    (["module"], [1], "`module` of the state must be a dict.*got list"),
    (["module", "0.second.bias"], "text", "0.second.bias"),
    (["module", "0.second.bias"], torch.zeros(7), "0.second.bias"),
    *((["speeds"], bad, "`speeds` of the state") for bad in ("fast", ["fast"], 3.0, [math.inf], [-1.0])),
    (["history"], [], "`history` of the state must be a dict"),
    (["history", "evaluations"], "many", "has evaluations 'many'"),
    (["history", "steps"], -1, "has steps -1"),
    (["history", "loss"], None, "has loss None"),
    (["history", "losses"], "xyz", "has losses 'xyz'"),
    (["history", "terms"], {"a": "b"}, "has terms"),
    (["history", "evils"], 1, r"has unknown \['evils'\]"),
    (["seed"], "7", "`seed` is 7 here and '7'"),
    (["optimizer"], 5, "`optimizer` of the state must be a dict"),
    (["optimizer"], {"state": {}}, "no state of an optimizer"),
    (["optimizer", "param_groups"], [5], "each of `param_groups`"),
    (["optimizer", "param_groups"], [], "parameter group"),
    (["optimizer", "state", 0], 7, "remembers of each parameter"),
    (["optimizer", "param_groups", 0, "lr"], -1.0, "`?lr"),
    (["parallelize"], 2, "`parallelize` of the state must be a dict"),
    (["parallelize"], {"workers": 0, "samples": 1}, "`parallelize` of the state is"),
    (["weights"], {"a": 1.0}, "this BatchOptimizer has none"),
]


@pytest.mark.parametrize("kind", ["torch.Adam", "batchopt.LBFGS"])
def test_a_bad_entry_is_named_and_nothing_has_changed(kind: str, everything: Any) -> None:
    with optimizer(kind) as one, optimizer(kind, steps=2) as other:
        before = everything(other)
        for path, value, words in BAD:
            state = copy.deepcopy(one.state_dict())
            inner = functools.reduce(lambda inner, key: inner[key], path[:-1], state)
            inner.update({path[-1]: value})
            if value is DROP:
                del inner[path[-1]]
            with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
                other.load_state_dict(state)
            assert everything(other) == before, path
        nothing: list[Any] = [None, [], "state", 3]
        for none in nothing:
            with pytest.raises(TypeError, match="the state must be a dict"):
                other.load_state_dict(none)
        other.evaluate()  # the batch is still loaded
        assert other.step(CASE.inputs, CASE.targets) > 0


def test_what_compression_had_left_is_not_dropped_without_a_word() -> None:
    with optimizer("torch.SGD") as opt:
        state = opt.state_dict()
        state["residuals"] = {0: torch.zeros_like(opt.parameters)}
        with pytest.warns(RuntimeWarning, match="compression residuals, which are dropped"):
            opt.load_state_dict(state)
