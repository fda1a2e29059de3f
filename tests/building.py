"""What many tests have in common: an optimizer on a batch, a fork, a signal handler."""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from batchopt import BatchOptimizer
from tests.workloads import Workload


def loaded(module: nn.Module, criterion: Callable[..., Any] | None, *batch: Any, **options: Any) -> BatchOptimizer:
    """Evaluates the module on this batch, and has no optimizer unless it is given one."""
    opt = BatchOptimizer(module, criterion, **{"optimizer": None, **options})
    opt.load(*batch)
    return opt


def on(work: Workload, **options: Any) -> BatchOptimizer:
    """Evaluates the workload's module on its batch."""
    return loaded(work.module, work.criterion, work.inputs, work.targets, **options)


def _late(_: int, frame: Any) -> None:
    raise TimeoutError("".join(traceback.format_stack(frame)))


class Child:
    """A forked process that runs `function`."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.signal(signal.SIGALRM, _late)
                signal.alarm(100)
                text = repr(function())
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            finally:
                os.write(writer, text.encode())
                os._exit(0)
        os.close(writer)

    def said(self) -> str:
        """What it returned or raised, once it has ended, with CHILD for its number."""
        with open(self._reader, "rb") as pipe:
            found = pipe.read().decode()
        os.waitpid(self._pid, 0)
        return re.sub(rf"\b{self._pid}\b", "CHILD", found)


@contextmanager
def handling(handler: Callable[[], object], number: int = signal.SIGUSR1) -> Iterator[None]:
    """Inside, the signal is handled so."""
    before = signal.signal(number, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(number, before)
