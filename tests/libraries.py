"""Runs the program under a heading of docs/libraries.md, then compares f and df/dX of its module and data with those of
plain torch, with one and two workers; prints the differences.

    python tests/libraries.py GPyTorch

For tests/test_libraries.py, in a process of its own: the libraries warn, log and change settings of their process.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import batchopt

PAGE = Path(__file__).parent.parent / "docs" / "libraries.md"


def programs() -> dict[str, str]:
    """The program under each heading."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    blocks = {text.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M) for text in sections}
    return {heading: "\n".join(found) for heading, found in blocks.items()}


class Recorded(batchopt.BatchOptimizer):
    """Keeps the arguments of the last one that was made, and the last batch."""

    made: tuple[torch.nn.Module, dict[str, Any]]
    batch: tuple[Any, Any]

    def __init__(self, module: torch.nn.Module, **settings: Any) -> None:
        super().__init__(module, **settings)
        Recorded.made = module, settings

    def load(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> None:
        """Load the batch."""
        Recorded.batch = inputs, targets
        super().load(inputs, targets, options)


def plain(module: torch.nn.Module, settings: dict[str, Any]) -> torch.Tensor:
    """f by plain torch, in one forward pass per term, with its graph."""
    inputs, targets = Recorded.batch
    if "terms" not in settings:
        collate = settings.get("collate_fn", lambda inputs: inputs)
        found: torch.Tensor = settings["loss_fn"](module, collate(inputs), targets)
        return found
    total = torch.zeros(())
    for name, term in settings["terms"].items():
        collate = term.collate_fn or (lambda inputs: inputs)
        residual = getattr(term.loss_fn, "residual", None)
        if residual is None:
            total = total + term.weight * term.loss_fn(module, collate(inputs[name]), None)
        else:
            total = total + term.weight * residual(module, collate(inputs[name]), None).square().mean()
    return total


def main() -> None:
    """Run what is under a heading of the page, and print relative differences in units of the dtype's rounding."""
    original, batchopt.BatchOptimizer = batchopt.BatchOptimizer, Recorded  # type: ignore[misc, assignment]
    exec(compile(programs()[sys.argv[1]], str(PAGE), "exec"), {"__name__": "program"})
    module, settings = Recorded.made
    module.train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.1)  # away from a minimum, where the gradient is rounding
    loss = plain(module, settings)
    gradient = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, parameters, materialize_grads=True)])
    eps = torch.finfo(gradient.dtype).eps
    found = {}
    for workers in (1, 2):
        with original(module, **{**settings, "optimizer": None, "parallelize": workers}) as opt:
            opt.load(*Recorded.batch)
            f = opt.evaluate().item()
            apart = (opt.grad_parameters - gradient).abs().max() / gradient.abs().max()
        found[workers] = {"f": abs(f - loss.item()) / abs(loss.item()) / eps, "gradient": apart.item() / eps}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
