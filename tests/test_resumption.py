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
    opt = BatchOptimizer(module, CASE.criterion, optimizer=KINDS[kind], seed=7, history=True)
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


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("here", ["batchopt.LBFGS", "torch.Adam", "None"])
def test_a_state_of_another_class_is_refused_and_names_both(here: str, everything: Any, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with optimizer(here, steps=2) as other:
        before = everything(other)
        for there in KINDS:
            with optimizer(there) as one:
                state = one.state_dict()
                assert str(state["optimizer_class"]) == there
                if here == there or (there, here) in READS:
                    continue
                words = f"optimizer of the state is {there} and this one is {here}"
                with pytest.raises(ValueError, match=words):
                    other.load_state_dict(state)
        with optimizer("Mine") as one, pytest.raises(CheckpointError, match="optimizer of the state is Mine and this"):
            one.save(path)
            other.load_checkpoint(path)
        assert everything(other) == before
        for there in [here, *(there for there, reads in READS if reads == here)]:
            with optimizer(there) as one:
                one.save(path)
                other.load_checkpoint(path)
                assert torch.equal(other.parameters, one.parameters)
        other.load(CASE.inputs, CASE.targets)
        assert other.evaluate() > 0


# What is changed in a state, to what, and what is said. DROP takes it out.
DROP = object()
BAD: list[tuple[list[Any], Any, str]] = [
    *(([name], DROP, f"KeyError: '{name}'") for name in ("module", "history", "speeds", "seed", "optimizer_class")),
    (["module"], [1], "dict-like.*got.*list"),
    (["module", "0.second.bias"], "text", "0.second.bias"),
    (["module", "0.second.bias"], torch.zeros(7), "0.second.bias"),
    (["module", "1.running_mean"], DROP, "1.running_mean"),
    (["speeds"], "fast", "not supported between|not iterable"),
    *((["speeds"], bad, "`speeds` of the state") for bad in ([math.inf], [-1.0])),
    (["history"], [], "must be a mapping"),
    (["history", "evaluations"], "many", "has evaluations 'many'"),
    (["history", "steps"], -1, "has steps -1"),
    (["history", "losses"], "xyz", "hexadecimal"),
    (["history", "terms"], {"a": "b"}, "could not convert string to float: 'b'"),
    (["history", "evils"], 1, "unexpected keyword argument 'evils'"),
    (["seed"], "7", "`seed` is 7 here and '7'"),
    (["optimizer"], 5, "not a mapping|has no attribute|not subscriptable"),
    (["optimizer"], {"state": {}}, "param_groups"),
    (["optimizer", "param_groups"], [], "parameter group"),
    (["optimizer", "state", 0], 7, "has no attribute|has no len"),
    (["optimizer", "param_groups", 0, "lr"], -1.0, "`?lr"),
    (["weights"], {"a": 1.0}, "this BatchOptimizer has none"),
    (["course"], {"rows": 3, "seconds": 0.0}, "not iterable"),
    (["course"], {"rows": []}, "KeyError: 'seconds'"),
]


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("kind", ["batchopt.LBFGS", "torch.Adam"])
def test_a_bad_entry_is_named_and_nothing_has_changed(kind: str, everything: Any) -> None:
    """At whatever entry, in the middle of what is not yet applied, and with the objects that it had."""
    with optimizer(kind) as one, optimizer(kind, steps=2) as other, optimizer(kind, steps=2) as twin:
        for opt in (other, twin):
            opt.load(CASE.inputs, CASE.targets)
            opt.evaluate()
        assert isinstance(other.optimizer, torch.optim.Optimizer)
        before, groups = everything(other), other.optimizer.param_groups
        for path, value, words in BAD:
            state = copy.deepcopy(one.state_dict())
            inner = functools.reduce(lambda inner, key: inner[key], path[:-1], state)
            inner.update({path[-1]: value})
            if value is DROP:
                del inner[path[-1]]
            with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
                other.load_state_dict(state)
        nothing: list[Any] = [None, [], "state", 3]
        for none in nothing:
            with pytest.raises(TypeError):
                other.load_state_dict(none)
        assert everything(other) == before and other.optimizer.param_groups is groups
        assert other.evaluate() == twin.evaluate()  # the batch is still loaded
        assert other.step(CASE.inputs, CASE.targets) == twin.step(CASE.inputs, CASE.targets)
        assert other.fingerprint() == twin.fingerprint()


def test_an_interrupt_is_undone_too(everything: Any) -> None:
    with optimizer("torch.Adam") as one, optimizer("torch.Adam", steps=2) as other:
        before, state = everything(other), one.state_dict()

        class Interrupting(dict[str, Any]):
            def get(self, *_: Any) -> Any:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            other.load_state_dict(Interrupting(state))
        assert everything(other) == before
