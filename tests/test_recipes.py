"""The programs of docs/recipes.md run and lower f over workers; Lightning's goes on from its checkpoint to the bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import CONTINUES, RECIPES

SECTIONS = re.split(r"^## ", RECIPES.read_text(), flags=re.MULTILINE)
HEAD, *BLOCKS = [re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) for text in SECTIONS]
PROGRAMS = {text.partition("\n")[0]: block[0] for text, block in zip(SECTIONS[1:], BLOCKS, strict=True)}

LOWER = """
first, last = (criterion(net(x), y).item() for net in (network(), opt.module))
assert opt.eval_counter >= 3 and last < 0.7 * first, (first, last)
"""
RESUMED = """
def fitted(epochs, checkpoint=None):
    global trainer
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", **quiet)
    fit = Fit()
    trainer.fit(fit, loader, ckpt_path=checkpoint)
    return fit

whole, _ = fitted(4), fitted(2)
trainer.save_checkpoint("half.ckpt")
again = fitted(4, "half.ckpt")
assert whole.opt.eval_counter == again.opt.eval_counter >= 8
assert all(torch.equal(*pair) for pair in zip(whole.net.parameters(), again.net.parameters()))
"""


def run(program: str, folder: Path) -> None:
    """Run it in a process of its own: the libraries warn, log and change settings of their process."""
    (folder / "program.py").write_text(program)
    ended = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, timeout=280, cwd=folder)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "heading",
    [pytest.param(h, marks=[] if h.startswith("Two optimizers") else pytest.mark.nightly) for h in PROGRAMS],
)
def test_a_program_does_what_it_says(heading: str, tmp_path: Path) -> None:
    program = PROGRAMS[heading]
    run(HEAD[0] + program + LOWER if program.startswith(CONTINUES) else program, tmp_path)


@pytest.mark.nightly
def test_a_training_of_lightning_goes_on_from_its_checkpoint_to_the_bit(tmp_path: Path) -> None:
    head = HEAD[0].replace("torch.nn.Tanh()", "torch.nn.Tanh(), torch.nn.Dropout(0.1)")
    program = PROGRAMS["Lightning"].replace("parallelize=2", "parallelize=2, chunk_size=100")
    run(head + program.replace("batch_size=len(x)", "batch_size=1000") + RESUMED, tmp_path)
