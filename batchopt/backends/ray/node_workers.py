"""The worker processes of one machine among several: a process backend whose batch comes in parts, and which can be asked
for something while it evaluates."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from batchopt.backends.base import Setup
from batchopt.backends.ledger import Run
from batchopt.backends.process.backend import Placed, ProcessBackend
from batchopt.backends.process.gather import ProcessGather
from batchopt.backends.process.worker import Activity, Call, call, call_with_block
from batchopt.backends.ray.messages import CalledOff, Question
from batchopt.backends.ray.transfer import Fragment, Hold
from batchopt_workers.batch import Batch
from batchopt_workers.buffers import StepBuffers
from batchopt_workers.evaluate import Program
from batchopt_workers.packing import unpack
from batchopt_workers.session import PIECE, Session
from batchopt_workers.torch_settings import TorchSettings


class Crew(ProcessBackend):
    """Worker processes that are some of all. While the main thread evaluates, others may ask it for something."""

    def __init__(self, setup: Setup, torch: TorchSettings) -> None:
        self.torch = torch  # as it is where an evaluation is asked for
        self._bell, self._button = os.pipe()
        self._lock = threading.Lock()
        self._asked: deque[tuple[Question, Future[list[Run]]]] = deque()
        self._attempt = -1  # the share that is evaluated
        self._off: set[int] = set()  # those that nobody waits for any more
        self._placed: Placed | None = None
        self._pieces: list[list[Call]] = []  # what the workers were told of samples in lists
        try:
            super().__init__(setup)
        except BaseException:
            self._close_bell()
            raise
        self._pool.wake_up_for(self._bell)

    def _torch_settings(self) -> TorchSettings:
        return self.torch

    def _module_hooks(self) -> Mapping[str, Any]:
        return self._program.module_hooks

    def replace_program(self, program: Program, buffers: StepBuffers) -> None:
        """Evaluate another program from the next step on."""
        self._program, self._setup = program, replace(self._setup, program=program, buffers=buffers)

    def open(self, hold: Hold, weights: tuple[float, ...]) -> None:
        """Begin a step on a batch whose samples come later, with `fill`."""
        skeleton = hold.skeleton
        batch: Batch = unpack(skeleton.data, skeleton.placements, hold.block)
        load = call(Activity.BATCH, Session.load, "batch 0", skeleton.data, skeleton.placements)
        for number in range(len(self._pieces)):
            self._pool.tell(f"{PIECE}{number}")
        self._placed, self._pieces = Placed(batch, 0, hold.block, load), []
        self.load(self._placed, weights)

    def reopen(self, weights: tuple[float, ...]) -> None:
        """Begin another step on the same batch, with the samples that it has."""
        assert self._placed is not None
        self.load(self._placed, weights)
        for number, calls in enumerate(self._pieces):  # they are forgotten when a step begins
            self._pool.tell(f"{PIECE}{number}", *calls)

    def fill(self, fragment: Fragment) -> None:
        """Let the workers have what a fragment has in lists; its rows they see in the batch's memory."""
        if fragment.lists is None:
            return
        name, freight = f"{PIECE}{len(self._pieces)}", fragment.lists
        calls = [
            call_with_block(Activity.SAMPLES, Session.attach_copy, name, freight.unload()),
            call(
                Activity.SAMPLES,
                Session.fill,
                name,
                fragment.term,
                fragment.start,
                freight.data,
                freight.placements,
            ),
        ]
        self._pieces.append(calls)
        self._pool.tell(name, *calls)

    def keep(self, workers: int, world: int) -> None:
        """Have no more than so many workers, of `world` in all."""
        assert self._setup.ranks is not None
        self._setup = replace(self._setup, ranks=self._setup.ranks[:workers], world=world)
        self.resize(workers)

    @property
    def calm(self) -> bool:
        """Whether no worker evaluates anything."""
        return all(child.free for child in self._pool.children.values())

    # ---- from other threads

    def begin(self, attempt: int) -> None:
        """From now on questions about this share are answered, between two messages of the workers. Raises `CalledOff`."""
        with self._lock:
            if attempt in self._off:
                raise CalledOff("this share was called off")
            self._off = {later for later in self._off if later > attempt}  # shares come in their order
            self._attempt = attempt

    def end(self) -> None:
        """From now on there is nothing to answer."""
        with self._lock:
            self._attempt = -1
        self._turn(None)

    def ask(self, question: Question, attempt: int, seconds: float) -> list[Run]:
        """The answer of the thread that evaluates; nothing if it evaluates another share. Raises `TimeoutError`."""
        answer: Future[list[Run]] = Future()
        with self._lock:
            if attempt != self._attempt:
                if question is Question.CALL_OFF:
                    self._off.add(attempt)
                return []
            self._asked.append((question, answer))
        os.write(self._button, b"!")
        return answer.result(seconds)

    def _turn(self, round: ProcessGather | None) -> None:
        while self._asked:
            question, answer = self._asked.popleft()
            released: list[Run] = []
            if question is Question.RELEASE and round is not None:
                released, limits = round.dispatch.release()
                for limit in limits:
                    with suppress(OSError):  # gone; the pool will find out
                        self._pool.children[limit.worker].limit(limit.last)
            answer.set_result(released)
            if question is Question.CALL_OFF and round is not None:
                raise CalledOff("this share was called off")

    def close(self) -> None:
        super().close()
        self._close_bell()

    def _close_bell(self) -> None:
        for end in (self._bell, self._button):
            if end >= 0:
                os.close(end)
        self._bell = self._button = -1
