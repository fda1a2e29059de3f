"""Runs a program of docs/recipes.md, over workers and over plain torch, with three optimizers; prints what came of it.

    python tests/recipes.py Lightning

For tests/test_recipes.py, in a process of its own: the libraries warn, log and change settings of their process.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

import batchopt

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"

# None is the page's own.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "torch.optim.LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=10, line_search_fn="strong_wolfe"),
    "batchopt.LBFGS": None,
    "torch.optim.Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


class PlainTorch:
    """As much of `BatchOptimizer` as the programs use, by plain torch in this process."""

    def __init__(self, module: torch.nn.Module, criterion: Callable[..., torch.Tensor], **_: object) -> None:
        self.module, self.criterion = module, criterion
        self.eval_counter = 0
        self.keep_outputs = False

    def load(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Make this the batch."""
        self._batch = inputs, targets

    def loss(self) -> torch.Tensor:
        """f, with torch's own graph."""
        inputs, targets = self._batch
        output = self.module(inputs)
        self.eval_counter += 1
        self._output = output.detach()
        return self.criterion(output, targets)

    def outputs(self) -> torch.Tensor:
        """What the module returned last."""
        output: torch.Tensor = self._output
        return output

    def score(self, data: tuple[torch.Tensor, torch.Tensor], metrics: dict[str, Any]) -> dict[str, float]:
        """Each metric of the module's outputs."""
        inputs, targets = data
        with torch.no_grad():
            output = self.module(inputs)
        return {name: metric(output, targets).item() for name, metric in metrics.items()}

    def close(self) -> None:
        pass

    def __enter__(self) -> PlainTorch:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def read() -> tuple[str, dict[str, str]]:
    """What all programs of the page begin with, and the program under each heading."""
    beginning, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    blocks = {text.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M) for text in sections}
    (head,) = re.findall(r"^```python\n(.*?)^```$", beginning, re.S | re.M)
    return head, {heading: block[0] for heading, block in blocks.items() if block}


def run(program: str, optimizer: str, plain: bool = False) -> dict[str, Any]:
    """Run it; returns the evaluations, the loss before and after, and the metric if the program computes one."""
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(read()[0], str(PAGE), "exec"), names)
    names["optimizer"] = OPTIMIZERS[optimizer] or names["optimizer"]
    if plain:
        names["batchopt"] = SimpleNamespace(BatchOptimizer=PlainTorch, LBFGS=batchopt.LBFGS)
    exec(compile(program, str(PAGE), "exec"), names)
    found = {
        "evaluations": names["opt"].eval_counter,
        "before": loss_of(names["network"](), names),
        "after": loss_of(names["opt"].module, names),
    }
    metrics = {"metric": names["r2"].item(), **names["validated"]} if "r2" in names else {}
    return found | metrics


def loss_of(module: torch.nn.Module, names: dict[str, Any]) -> float:
    """f at the module's parameters."""
    with torch.no_grad():
        loss: float = names["criterion"](module(names["x"]), names["y"]).item()
    return loss


def resumed(optimizer: str) -> dict[str, Any]:
    """Run Lightning's program for four epochs, and for two and two more from a checkpoint, with dropout and two batches
    an epoch; returns whether the bits are the same, and the evaluations."""
    head, programs = read()
    names: dict[str, Any] = {"__name__": "program"}
    exec(head.replace("torch.nn.Tanh()", "torch.nn.Tanh(), torch.nn.Dropout(0.1)"), names)
    names["optimizer"] = OPTIMIZERS[optimizer] or names["optimizer"]
    program = programs["Lightning"].replace("parallelize=2", "parallelize=2, chunk_size=100")
    exec(program.replace("batch_size=len(x)", "batch_size=1000"), names)

    def fitted(epochs: int, checkpoint: str | None = None) -> Any:
        names["trainer"] = names["lightning"].Trainer(max_epochs=epochs, accelerator="cpu", **names["quiet"])
        fit = names["Fit"]()
        names["trainer"].fit(fit, names["loader"], ckpt_path=checkpoint)
        return fit

    with TemporaryDirectory() as folder:
        names["quiet"] |= {"default_root_dir": folder}
        whole, _ = fitted(4), fitted(2)
        names["trainer"].save_checkpoint(path := f"{folder}/half.ckpt")
        again = fitted(4, path)
    pairs = zip(whole.net.parameters(), again.net.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    return {"same": same, "evaluations": [fit.opt.eval_counter for fit in (whole, again)]}


def main() -> None:
    """Run what is under a heading of the page."""
    if sys.argv[1] == "resumed":
        print(json.dumps({optimizer: resumed(optimizer) for optimizer in OPTIMIZERS}))
        return
    program = read()[1][sys.argv[1]]
    found = {name: [run(program, name, plain) for plain in (False, True)] for name in OPTIMIZERS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
