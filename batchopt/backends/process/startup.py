"""What a worker process must have been told before it is given the program."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import torch

from batchopt.backends.base import Setup
from batchopt.backends.process.forkserver import worker_environment
from batchopt.backends.process.spawn import preparation
from batchopt.backends.process.worker import Activity, SessionCall, call, call_with_block
from batchopt.backends.sendable import sending
from batchopt_workers.memory import SharedBlock
from batchopt_workers.session import Session
from batchopt_workers.torch_settings import TorchSettings


def startup_calls(
    setup: Setup,
    parameters: SharedBlock,
    settings: TorchSettings,
    threads: int,
    devices: Mapping[int, torch.device] | None,
) -> Iterator[tuple[str, list[SessionCall]]]:
    """The calls by name, in order. Raises `TypeError` for a precode that cannot be sent."""
    precode: list[SessionCall] = []
    if setup.precode is not None:
        with sending("`precode`", setup.precode):
            precode = [call(Activity.PRECODE, Session.run, setup.precode)]
    environment = worker_environment(threads)
    yield "process", [call(Activity.STARTING, Session.prepare, environment, preparation(), sys.getrecursionlimit())]
    if devices is not None:
        yield "devices", [call(Activity.STARTING, Session.use, devices)]
    yield "torch", [call(Activity.STARTING, Session.set_torch, settings)]
    if precode:
        yield "precode", precode
    yield (
        "parameters",
        [
            call_with_block(Activity.INSTALLING, Session.attach, "parameters", parameters),
            call(Activity.INSTALLING, Session.use_parameters, setup.flat.layout),
        ],
    )
