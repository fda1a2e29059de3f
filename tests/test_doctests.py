"""The examples in the docstrings of public names run, and print what they say; reprs say what a thing is."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import batchopt
import batchopt.training
from batchopt import extending
from batchopt.evaluations import Evaluations
from batchopt.studies import Studies

# Their examples are also those of their parts: of each method after the example of the class.
PUBLIC = {name: getattr(batchopt, name) for name in batchopt.__all__}
PUBLIC |= {f"training.{name}": thing for name, thing in vars(batchopt.training).items() if not name.startswith("_")}


def found() -> Iterator[tuple[str, list[doctest.DocTest]]]:
    """Each public name and method with an example, and what is run for it, in this order."""
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=False)
    for name, thing in PUBLIC.items():
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        first = [test for test in finder.find(thing, name) if test.examples]
        if first:
            yield name, first
        if inspect.isclass(thing) and thing.__module__.startswith("batchopt"):
            for kind in (Evaluations, Studies, thing) if thing is batchopt.BatchOptimizer else (thing,):
                for member, of in vars(kind).items():
                    if not member.startswith("_") and (inspect.isfunction(of) or isinstance(of, property)):
                        for test in finder.find(of, f"{name}.{member}"):
                            if test.examples:
                                yield f"{name}.{member}", [*first, test]

    for name, door in vars(extending).items():
        if inspect.isfunction(door) and "opt" in inspect.signature(door).parameters:
            for test in finder.find(door, name):
                yield f"extending.{name}", [*finder.find(batchopt.BatchOptimizer, "BatchOptimizer"), test]


EXAMPLES = dict(found())


@pytest.mark.rows
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "batchopt": batchopt, "__name__": "program"}
    said: list[str] = []
    try:
        for test in EXAMPLES[name]:
            again = doctest.DocTest(test.examples, names, test.name, test.filename, test.lineno, test.docstring)
            again.globs = names  # DocTest copies them
            doctest.DocTestRunner().run(again, out=said.append, clear_globs=False)
    finally:
        if "opt" in names:
            names["opt"].close()
    assert "".join(said) == ""


# Reprs


def test_a_repr_says_what_a_thing_is_and_how_far_it_has_come() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    model = torch.nn.Linear(1, 1).double()
    with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), parallelize=2) as opt:
        assert repr(opt) == (
            "BatchOptimizer(Linear of 2 parameters, MSELoss(), optimizer=LBFGS, parallelize=2, 0 batches, 0 "
            "evaluations)"
        )
        loss = opt.step(x, 2 * x)
        assert f"1 batches, {opt.eval_counter} evaluations, loss {loss:.6g})" in repr(opt)
        assert isinstance(opt.optimizer, batchopt.LBFGS) and opt.result is not None
        result = opt.result
        assert repr(result).startswith(f"Result({result.status.name}, iterations={result.iterations}, evaluations=")
        worker = opt.workers[0]
        assert repr(worker).startswith(f"WorkerInfo(0: pid {worker.pid} on {worker.host}, cpu, ")
        assert repr(worker).endswith(f"{worker.samples} samples in {worker.busy_seconds:.3g} s, 0 restarts, alive)")
        opt.load(x, 2 * x)
        assert repr(opt.objective()) == "FlatObjective(2 parameters)"
        assert repr(opt.normal()).endswith(", vector and matrix of 2 parameters)")
        assert [repr(batch) for batch in extending.prepared(opt, [(x, 2 * x)])] == ["PreparedBatch(40 samples)"]
        with opt.timeline() as timeline:
            opt.step(x, 2 * x)
        assert repr(timeline) == str(timeline)
    assert "optimizer=LBFGS, closed, " in repr(opt)


def square(module: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss, or residuals."""
    return module(inputs).square().mean()  # type: ignore[no-any-return]


def test_a_repr_has_the_arguments_that_were_given() -> None:
    terms = {"a": batchopt.Term(square, 2.0), "b": batchopt.Term(residual=square, loss="huber")}
    assert repr([*terms.values()]) == "[Term(loss_fn=square, weight=2.0), Term(residual=square, loss='huber')]"
    with batchopt.BatchOptimizer(torch.nn.Linear(1, 1), terms=terms, optimizer=None) as opt:
        assert "of 2 parameters, terms=['a', 'b'], optimizer=None" in repr(opt)
    with batchopt.BatchOptimizer(torch.nn.Linear(1, 1), residual=square) as opt:
        assert "of 2 parameters, square, optimizer=LBFGS" in repr(opt)
    weighted = batchopt.Weighted(torch.ones(5, 3), torch.ones(5))
    assert repr(weighted) == "Weighted(shape (5, 3), float32; weights of 5 samples)"
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 1)), batch_size=3)
    assert repr(batchopt.Batches(loader)) == "Batches(length=2; at batch 0 of epoch 0)"
