"""Runs under planned faults, one after the other, as standard input names them, line by line: a case as JSON and a
folder for its outcome. `python -m tests.faults.program <folder of its own>`."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import batchopt
import batchopt.backends.process.scheduler
from batchopt.backends.process import forkserver
from batchopt.backends.process.backend import ProcessBackend
from tests.faults.sitecustomize import install
from tests.workloads import Workload, mlp

SAMPLES = 48
CHUNK = 8


def optimizer(name: str) -> Any:
    """One whose state shows any difference of bits."""
    if name == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return lambda parameters: torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe")


def build(case: dict[str, Any], workload: Workload) -> batchopt.BatchOptimizer:
    """The case's, of the module of the workload."""
    return batchopt.BatchOptimizer(
        workload.module,
        workload.criterion,
        optimizer=optimizer(case["optimizer"]),
        parallelize=case.get("parallelize", 1),
        backend=case.get("backend", "process"),
        **{"chunk_size": CHUNK, "speeds": [1] * case.get("parallelize", 1), **case.get("options", {})},
    )


def wait(opt: batchopt.BatchOptimizer) -> None:
    """Until all workers can work."""
    if hasattr(opt._engine.workers.backend, "_pool"):
        opt._engine.workers.backend._pool.wait()


def run_tasks(case: dict[str, Any]) -> dict[str, Any]:
    """An evaluation, functions of the batch, and another evaluation; what they find, up to the first error, or, each
    again after an error, to the end. So many of them, `tasks`, begin with workers that have nothing to do."""
    workload = mlp(samples=SAMPLES)
    inputs, targets = workload.inputs, workload.targets
    opt = build(case, workload)
    calls: dict[str, Callable[[], Any]] = {
        "first": opt.evaluate,
        "collect": lambda: opt.collect(lambda module, inputs, targets: {"out": module(inputs), "rows": [inputs]}),
        "total": lambda: opt.total(lambda module, inputs, targets: [module(inputs).sum(0), len(inputs)]),
        "predict": lambda: opt.predict(inputs, transform=lambda outputs: outputs.repeat(1, 1000)),
        "last": opt.evaluate,
    }
    outcome: dict[str, Any] = {"results": []}
    opt.load(inputs, targets)
    x = opt.parameters.clone()
    for number, name in enumerate(case.get("calls", calls)):
        if number < case["tasks"]:  # else, on a busy machine, a call is over before the second worker has a chunk of it
            wait(opt)
        counters = opt.eval_counter, opt.batch_counter
        try:
            outcome["results"].append(calls[name]())
        except BaseException as error:
            same = counters == (opt.eval_counter, opt.batch_counter)
            outcome |= {"error": f"{type(error).__name__}: {error}", "at": name, "restored": same}
            if not case.get("again"):
                break
            outcome["results"].append(calls[name]())
    outcome |= {"unchanged": torch.equal(opt.parameters, x), "restarts": [worker.restarts for worker in opt.workers]}
    opt.close()
    return outcome


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Three steps; what is left after them, or after the first error."""
    workload = mlp(samples=SAMPLES)
    opt = build(case, workload)
    outcome: dict[str, Any] = {"losses": []}
    before = opt.state_dict()
    try:
        for _ in range(3):
            before = {"X": opt.parameters.clone(), "counters": opt.eval_counter}
            outcome["losses"].append(opt.step(workload.inputs, workload.targets))
            if case.get("save"):
                opt.save(folder / "checkpoint")
    except BaseException as error:
        same = torch.equal(opt.parameters, before["X"]) and opt.eval_counter == before["counters"]
        outcome |= {"error": f"{type(error).__name__}: {error}", "restored": same}
        if case.get("again"):
            while len(outcome["losses"]) < 3:
                outcome["losses"].append(opt.step(workload.inputs, workload.targets))
    assert opt.optimizer is not None
    outcome |= {
        "fingerprint": opt.fingerprint(),
        "X": opt.parameters.clone(),
        "state": opt.optimizer.state_dict()["state"],
        "evaluations": opt.eval_counter,
        "restarts": [worker.restarts for worker in opt.workers],
    }
    if not case.get("leave"):
        opt.close()
    return outcome


USUAL = batchopt.backends.process.scheduler.GRACE, batchopt.backends.process.scheduler.WORTHWHILE


def play(case: dict[str, Any], folder: Path) -> None:
    """Write the outcome, under a limit that shows where everybody was."""
    faulthandler.dump_traceback_later(50, exit=True)
    scheduler = batchopt.backends.process.scheduler
    # if not late, each chunk is evaluated once, but for the fault
    scheduler.GRACE, scheduler.WORTHWHILE = USUAL if case.get("late") else (1e9, 1e9)
    started = time.monotonic()
    try:
        outcome = run_tasks(case) if case.get("tasks") else run(case, folder)
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    outcome["seconds"] = time.monotonic() - started
    torch.save(outcome, folder / "outcome")
    faulthandler.cancel_dump_traceback_later()


def serve(home: Path) -> None:
    """Play what standard input names."""
    for line in sys.stdin:
        case, folder = json.loads(line)
        (home / "case").write_text(folder)  # for the workers
        install(Path(folder))  # for this process
        stderr = os.open(Path(folder) / "stderr", os.O_WRONLY | os.O_CREAT)
        os.dup2(stderr, 2)
        os.close(stderr)
        play(case, Path(folder))
        print("over", flush=True)


def main() -> None:
    """Until standard input ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests were started in the background
    ProcessBackend.local = False  # a single worker is a process here too
    # The process that workers are forked from is not replaced between two cases, however long tests of others take,
    # nor on a machine that stands still for seconds: the test would take the new one for something left behind.
    forkserver.START = forkserver.START.replace(
        "batchopt_workers.life.forkserver import main", "tests.preload import lasting as main"
    )
    forkserver.ANSWERING = forkserver.STARTING
    serve(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
