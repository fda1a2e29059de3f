"""The public names, their documentation, and the one arrow between the two packages."""

from __future__ import annotations

import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType, ModuleType

import pytest
import torch

import batchopt
import batchopt_workers


def test_the_public_names_are_these() -> None:
    names = {n for n, value in vars(batchopt).items() if not n.startswith("_") and not isinstance(value, ModuleType)}
    assert names == set(
        """
        BatchOptimizer LBFGS CG SSBroyden LevenbergMarquardt SVRG Result Status Iteration split_batch Worker Sample
        Term Penalty Weighted Batches Observer Evaluated hogwild resample Diagnosis BatchoptError WorkerError
        WorkerLostError WorkerStartError PoisonChunkError AllWorkersLostError NodeLostError NodesDifferError
        NonFiniteError CheckpointError CompileError Covariance finite_differences
        """.split()
    )
    assert names == set(batchopt.__all__)


def test_the_public_names_of_the_training_loop_are_these() -> None:
    loop = import_module("batchopt.training")
    names = {n for n, value in vars(loop).items() if not n.startswith("_") and not isinstance(value, ModuleType)}
    assert names == set(
        """
        fit State Moment Checkpoint Record Monitor EveryEpoch EverySeconds EarlyStopping log_steps
        """.split()
    )


def modules(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield import_module(found.name)


def documentation(module: ModuleType) -> Iterator[tuple[str, str | None]]:
    """Each public function, class, method and property defined in `module`, with its docstring."""
    yield module.__name__, module.__doc__
    for name, item in vars(module).items():
        if name.startswith("_") or getattr(item, "__module__", None) != module.__name__:
            continue
        if isinstance(item, FunctionType):
            yield f"{module.__name__}.{name}", item.__doc__
        if isinstance(item, type):
            generated = f"{name}("  # what a dataclass or a named tuple without a docstring is given
            yield f"{module.__name__}.{name}", None if (item.__doc__ or "").startswith(generated) else item.__doc__
            for member in vars(item):
                kinds = (FunctionType, property, classmethod, staticmethod)
                if not member.startswith("_") and isinstance(vars(item)[member], kinds):
                    yield f"{module.__name__}.{name}.{member}", inspect.getdoc(getattr(item, member))


@pytest.mark.parametrize("package", [batchopt, batchopt_workers])
def test_everything_public_is_documented(package: ModuleType) -> None:
    found = [entry for module in modules(package) for entry in documentation(module)]
    assert [name for name, docstring in found if not docstring] == []
    assert len(found) > 30  # the walk has found something


@pytest.mark.slow
def test_a_worker_needs_neither_the_parents_side_nor_its_progress_bar() -> None:
    # None in sys.modules makes an import fail. torch itself takes tqdm only where it is there.
    code = "import sys; sys.modules.update(batchopt=None, tqdm=None); import batchopt_workers.life.loop"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


GROUPS = "Args", "What f is", "Where it is evaluated", "How", "When something happens"


def blocks(thing: object) -> list[str]:
    """The lines under each heading of arguments in a docstring."""
    found = re.findall(rf"^(?:{'|'.join(GROUPS)}):\n((?: .*\n)+)", inspect.getdoc(thing) or "", re.MULTILINE)
    return [line for block in found for line in block.splitlines()]


TOLD = [name for name, value in sorted(vars(batchopt).items()) if callable(value) and blocks(value)]


@pytest.mark.parametrize("name", TOLD)
def test_each_argument_that_is_told_begins_a_line_of_its_own(name: str) -> None:
    """And nothing else of a docstring is indented so: the lines of an argument lie further in."""
    thing = getattr(batchopt, name)
    told = [line.strip().split(":")[0] for line in blocks(thing) if re.match(r" {4}\S", line)]
    parameters = inspect.signature(thing).parameters
    assert {part.strip() for line in told for part in line.split(",")} == {*parameters}, told


def test_what_only_torchs_optimizers_have_leads_to_the_recipes() -> None:
    with batchopt.BatchOptimizer(torch.nn.Linear(1, 1)) as opt:
        for name in ("zero_grad", "param_groups", "add_param_group"):
            with pytest.raises(AttributeError, match=rf"no attribute '{name}': a trainer .* `opt.optimizer`, and"):
                getattr(opt, name)
        with pytest.raises(AttributeError, match=r"no attribute 'lods'$"):
            _ = opt.lods  # type: ignore[attr-defined]
