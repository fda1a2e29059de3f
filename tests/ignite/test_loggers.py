"""The programs of docs/logging.md: what is logged is what was computed, as each library itself reads it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.handlers.base_logger import BaseLogger

import batchopt
from batchopt.ignite import log_steps
from tests.ignite.common import data
from tests.test_docs import LOGGING, blocks
from tests.workloads import misfit

HEAD, *PROGRAMS = blocks(LOGGING)
# What the library read of each run: steps and losses, in order.
READ = {
    "TensorBoard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
logs = [EventAccumulator(f"runs/{name}").Reload().Scalars("batchopt/loss") for name in ("fit", "own")]
found = [[(event.step, event.value) for event in log] for log in logs]
""",
    "MLflow": """
import mlflow
client = mlflow.MlflowClient()
runs = client.search_runs([one.experiment_id for one in client.search_experiments()], order_by=["start_time"])
logs = [client.get_metric_history(run.info.run_id, "batchopt loss") for run in runs]
found = [[(metric.step, metric.value) for metric in log] for log in logs]
""",
    "Weights & Biases": """
import glob, struct, wandb
from wandb.proto.wandb_internal_pb2 import Record

def records(content, block=32768):
    at, whole = 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole, at = whole + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # the last part of a record
            yield Record.FromString(whole)
            whole = b""

wandb.teardown()  # its service has written all
found = []
for path in sorted(glob.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime):
    lines = [line.history.item for line in records(open(path, "rb").read()) if line.history.item]
    lines = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in line} for line in lines]
    found.append([(line["_step"], line["batchopt/loss"]) for line in lines])
""",
    "ClearML": """
import glob, zipfile
found = []
for path in sorted(glob.glob("clearml/**/*.zip", recursive=True), key=os.path.getmtime):
    events = [json.loads(line) for line in zipfile.ZipFile(path).read("metrics.jsonl").decode().splitlines()]
    events = [event for events in events for event in (events if isinstance(events, list) else [events])]
    found.append([(e["iter"], e["value"]) for e in events if e.get("variant") == "loss"])
""",
}
CHECK = """
of_fit, (*points, (last, loss)) = sorted(found, key=len)
assert [step for step, _ in of_fit] == [4, 8, 12], found
assert [step for step, _ in points] == [*range(1, last)] and abs(loss - opt.output) <= 1e-6 * opt.output, found
"""
OFFLINE = {
    "CLEARML_OFFLINE_MODE": "1",
    "CLEARML_CACHE_DIR": "clearml",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "MLFLOW_TRACKING_URI": "file:mlruns",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # mlflow-skinny has no other store
}


@pytest.mark.nightly
@pytest.mark.parametrize(("library", "program"), [*zip(READ, PROGRAMS, strict=True)], ids=[*READ])
def test_each_library_has_the_numbers_of_fit_and_of_a_loop(library: str, program: str, tmp_path: Path) -> None:
    name = {"TensorBoard": "tensorboard", "Weights & Biases": "wandb"}.get(library, library.lower())
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"not installed: {name}; .ci/nightly installs it")
    text = "\n".join([HEAD, program, "import json, os", READ[library], CHECK])
    (tmp_path / "program.py").write_text(text)
    env = {**os.environ, **OFFLINE, "HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, timeout=280, cwd=tmp_path, env=env
    )
    assert ended.returncode == 0, ended.stderr


class Kept(BaseLogger):
    """A logger of ignite that keeps its lines: pairs of the number of an iteration, and numbers by name."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def _create_output_handler(self, *_: Any, **given: Any) -> Any:
        def handler(engine: Any, logger: Kept, event: Any) -> None:
            self.lines.append((given["global_step_transform"](engine, event), given["output_transform"](None)))

        return handler

    def _create_opt_params_handler(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def test_a_loop_passes_on_accepted_points_and_steps_of_other_optimizers(tmp_path: Path) -> None:
    given: dict[str, Any] = {"terms": {"fit": batchopt.Term(misfit), "more": batchopt.Term(misfit, 0.1)}}
    batch = {"fit": data(), "more": data()}
    logger, other = Kept(), Kept()

    def made(optimizer: str) -> batchopt.BatchOptimizer:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        return batchopt.BatchOptimizer(module, optimizer=optimizer, history=True, **given)

    with made("lbfgs") as opt, log_steps(opt, logger), log_steps(opt, other, every=5):
        opt.step(batch)
        opt.save(tmp_path / "half")
    with made("lbfgs") as opt:
        opt.load_checkpoint(tmp_path / "half")
        with log_steps(opt, logger):
            opt.step(batch)
        rows = opt.history.rows
    assert [number for number, _ in logger.lines] == [row["iteration"] for row in rows] == [*range(1, len(rows) + 1)]
    assert [number for number, _ in other.lines] == [*range(5, other.lines[-1][0] + 1, 5)]
    for (_, line), row in zip(logger.lines, rows, strict=True):
        assert line["loss"] == row["f"] and line["lr"] == 1.0
        assert all(line[name] == row[name] for name in ("step", "evaluations", "gradient", "change", "length"))
        assert line["loss"] == pytest.approx(line["loss/fit"] + 0.1 * line["loss/more"])
    with made("adam") as opt, log_steps(opt, adam := Kept()):
        losses = [opt.step(batch) for _ in range(3)]
        with pytest.raises(ValueError, match="lacks"):
            opt.step({"fit": data()})
    assert [(number, line["loss"]) for number, line in adam.lines] == [(i + 1, losses[i]) for i in range(3)]
    with made("adam") as opt, pytest.raises(TypeError, match="must be loggers of ignite"), log_steps(opt, "runs"):  # type: ignore[arg-type]
        opt.step(batch)
