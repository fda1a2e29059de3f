"""One worker process as the parent sees it: its pipe, its memory, the messages that it was sent, and its end."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from itertools import takewhile
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol

import torch
import torch.multiprocessing as mp

from batchopt.backends.process.channel import Channel, HasDescriptor, WorkerReply
from batchopt.backends.process.forkserver import fork_worker
from batchopt.backends.process.roster import REAPING
from batchopt.backends.process.scheduler import Death
from batchopt.backends.process.stderr import Stderr
from batchopt.backends.process.task_files import TotalsFile
from batchopt.errors import RemoteTraceback, WorkerError
from batchopt_workers.data.batch import Numbering
from batchopt_workers.data.layout import Layout
from batchopt_workers.data.memory import SharedBlock
from batchopt_workers.data.packing import dumps
from batchopt_workers.map.sums import Rows, rows_nbytes
from batchopt_workers.map.watch import StateWritten
from batchopt_workers.process.failures import Failure, Warned
from batchopt_workers.process.messages import CHUNK, Cut, Kind, Order
from batchopt_workers.process.session import Session

# Signals from outside; SIGKILL also comes from the kernel if memory is short.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PATIENCE = " (if it was at work, give it more time: timeout=...)"
P = ParamSpec("P")


class Activity(Enum):
    """The activities of a worker, in the words of error messages."""

    STARTING = "starting"
    PRECODE = "running precode"
    INSTALLING = "receiving the module"
    HOOKS = "receiving hooks"
    TORCH = "receiving torch's settings"
    BATCH = "receiving the batch"
    TASK = "receiving the function"
    CUT = "receiving the cut"
    MEMORY = "receiving memory"
    EVALUATING = "evaluating"
    FUNCTION = "running a function"


class SessionCall(NamedTuple):
    """A pickled call of a method of the worker's `Session`, and the block or file whose descriptor is sent with it."""

    activity: Activity
    body: bytes
    block: HasDescriptor | None = None


def call(
    activity: Activity,
    method: Callable[Concatenate[Session, P], Any],
    *arguments: P.args,
    **keywords: P.kwargs,
) -> SessionCall:
    """Return a call of a method of `Session`. Raises what pickling the arguments raises."""
    assert not keywords  # which the message has no place for
    return SessionCall(activity, dumps((method.__name__, arguments)))


def call_with_block(
    activity: Activity, method: Callable[[Session, str, int], None], name: str, block: SharedBlock
) -> SessionCall:
    """Return a call whose last argument is the descriptor of `block`, which follows the message."""
    return SessionCall(activity, dumps((method.__name__, (name,))), block)


def call_with_file(
    activity: Activity, method: Callable[..., None], file: HasDescriptor, *arguments: Any
) -> SessionCall:
    """Return a call whose last argument, after these, is the descriptor of `file`, which follows the message."""
    return SessionCall(activity, dumps((method.__name__, arguments)), file)


_FINISHED = call(Activity.EVALUATING, Session.finished)


class Bell:
    """The eventfd on which a worker waits for a repeated evaluation."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.fd)


class PendingMessage(NamedTuple):
    """A message without an answer so far.

    `state` names the state that it is part of, and `calls` are all calls of that: they are sent again if the worker
    fails to take them over. `patience`: the multiple of the usual time that it may take.
    """

    number: int
    activity: Activity
    state: str | None = None
    calls: tuple[SessionCall, ...] = ()
    order: Order | None = None
    patience: float = 1.0


class WorkerProcess:
    """A worker process: its pipe, the messages that it was sent, its memory, and its end.

    Messages are sent at the next `flush`. It is killed, with all that it started, when this object is collected. `rank`
    is the parent's name for it, `number` its rank among all `world_size` workers: a different one if some are on other
    machines. `warned`: the warnings that these have issued.
    """

    def __init__(self, rank: int, number: int, world_size: int, threads: int, warned: set[Warned]) -> None:
        ours, theirs = mp.get_context("spawn").Pipe(duplex=True)
        self.rank = rank
        self.channel = Channel(ours)
        self.stderr = Stderr(warned)
        self.rows: Rows | None = None
        self.bell: Bell | None = None
        self.given_up = 0  # the abandoned repetition that it may still be running
        self.totals: TotalsFile | None = None
        self.cut: Cut | None = None
        self.task_cut: Cut | None = None
        self.sent: dict[str, tuple[SessionCall, ...]] = {}
        self.synced_with: dict[str, tuple[SessionCall, ...]] | None = None  # the pool's state, once all of it was sent
        self.joined = False
        self.since = time.monotonic()  # of the last sign of progress
        self.verdict, self.killed_at = "", 0.0  # why and when this process killed it
        self._hung = False
        self._asked: deque[PendingMessage] = deque([PendingMessage(0, Activity.STARTING)])
        self._engaged = -1  # the number of the last order, or call of a function
        self._quiet = -1  # the number of the last order of which only the end is awaited
        self.writing = False  # whether the pipe is watched for room
        try:
            with theirs:
                self.process = fork_worker(theirs, self.stderr.writer, number, world_size, threads)
        except BaseException:
            self.channel.close()
            raise
        finally:
            self.stderr.close_writer()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def idle(self) -> bool:
        """Tell whether it has answered everything."""
        return self.channel.idle

    @property
    def calm(self) -> bool:
        """Tell whether it can work and every message was answered and handled."""
        return self.joined and self.channel.idle and not self.channel.unread

    @property
    def asked(self) -> PendingMessage | None:
        """The message that it is handling; None if it is idle."""
        self.forget_answered()
        return self._asked[0] if self._asked else None

    def forget_answered(self) -> None:
        """Drop answered messages: further replies about them are ignored."""
        while self._asked and self._asked[0].number <= self.channel.answered:
            self._asked.popleft()

    @property
    def free(self) -> bool:
        """Tell whether it can take an order: it evaluates nothing and runs no function, though it may still have to
        take over state."""
        return self.channel.answered >= self._engaged

    @property
    def quiet(self) -> bool:
        """Tell whether only its DONE is awaited, which the waking pipe announces."""
        return self.channel.answered < self._quiet

    def is_behind(self, state: str) -> bool:
        """Tell whether it still evaluates an order that is older than the latest version of that state."""
        self.forget_answered()
        before = list(takewhile(lambda asked: asked.state != state, self._asked))
        return len(before) < len(self._asked) and any(asked.order is not None for asked in before)

    def ask(self, message: SessionCall, state: str | None = None, calls: tuple[SessionCall, ...] = ()) -> None:
        """Queue a call for the next `flush`."""
        asked = PendingMessage(self.channel.number(), message.activity, state, calls)
        self._note(asked)
        self.channel.queue(asked.number, Kind.CALL, message.body, message.block)

    def order(self, order: Order, patience: float = 1.0) -> None:
        """Queue an order for the next `flush`."""
        asked = PendingMessage(self.channel.number(), Activity.EVALUATING, order=order, patience=patience)
        self._note(asked)
        self.channel.queue(asked.number, order.kind, order.encode())

    def flush(self) -> None:
        """Send queued messages, as far as the pipe takes them. Raises `OSError` if the worker is gone."""
        self.channel.flush()

    def set_cut(self, cut: Cut) -> None:
        """Send it this cut of the batch."""
        self.ask(call(Activity.CUT, Session.set_cut, cut))
        self.cut = cut

    def cut_task(self, cut: Cut) -> None:
        """Send it this cut of the task's batch."""
        self.ask(call(Activity.CUT, Session.cut_task, cut))
        self.task_cut = cut

    def make_totals(self) -> None:
        """Send it a file to sum totals in."""
        if self.totals is None:
            totals = TotalsFile()
            self.ask(call_with_file(Activity.MEMORY, Session.sum_in, totals.file))
            self.totals = totals

    def drop_totals(self) -> None:
        """Have it release the file for totals, if that is far too large."""
        if self.totals is not None and self.totals.is_too_large:
            self.totals = None
            self.ask(call(Activity.MEMORY, Session.sum_nowhere))

    def make_room(self, needed: int, layout: Layout, changes: int, device: torch.device) -> None:
        """Ensure that it has at least that many rows to sum gradients in; they only grow. After an interrupt they are
        sent again."""
        held = 0 if self.rows is None else len(self.rows)
        more = needed - held
        if more <= 0:
            return
        block = SharedBlock.create(rows_nbytes(layout, changes, more))
        self.ask(call_with_block(Activity.MEMORY, Session.attach, "rows", block))
        self.ask(call(Activity.MEMORY, Session.add_rows, held, more))
        if self.rows is None:
            self.rows = Rows(layout, changes, more, block, device)
        else:
            self.rows.grow(more, block)

    def hang_bell(self, board: SharedBlock, workers: int) -> None:
        """Set up the signal of repeated evaluations; skipped when no descriptor is available."""
        if self.bell is not None:
            return
        try:
            bell = Bell()
        except OSError:
            return
        self.ask(call_with_block(Activity.MEMORY, Session.attach, "board", board))
        self.ask(call_with_file(Activity.MEMORY, Session.repeat_for, bell, self.rank, workers))
        self.bell = bell

    def may_be_at(self, order: Order) -> None:
        """Note that it may be running an abandoned repetition: it counts as busy until it answers."""
        if self.given_up != order.evaluation:
            asked = PendingMessage(self.channel.number(), Activity.EVALUATING, order=order)
            self._note(asked)
            self._quiet = -1  # its answer is not announced on the waking pipe
            self.channel.queue(asked.number, Kind.CALL, _FINISHED.body)
            self.given_up = order.evaluation

    def _note(self, asked: PendingMessage) -> None:
        if self.idle:
            self.since = time.monotonic()
        self._asked.append(asked)
        if asked.order is not None or asked.activity is Activity.FUNCTION:
            self._engaged = asked.number
        if asked.order is not None and asked.order.is_quiet:
            self._quiet = asked.number

    def find(self, number: int) -> PendingMessage | None:
        """Return the message of that number, if it was not answered before."""
        return next((asked for asked in self._asked if asked.number == number), None)

    def limit(self, last: int) -> None:
        """Shorten its last order to the chunks before `last`."""
        number = next((asked.number for asked in reversed(self._asked) if asked.order is not None), None)
        if number is not None and number > self.channel.answered:
            self.channel.send_about(number, Kind.LIMIT, CHUNK.pack(last))

    def kill(self, verdict: str, hung: bool = False) -> None:
        """Kill it, with all that it started, for this reason."""
        if not self.verdict:
            self.verdict, self.killed_at, self._hung = verdict, time.monotonic(), hung
        self.process.kill_group()

    def reap(self) -> None:
        """Read its last replies, kill its remaining processes, and reap it."""
        self.channel.drain()
        self.process.kill_group()
        self.process.join(REAPING)
        with suppress(Warning):  # the user may have turned warnings into errors
            self.stderr.pass_on()

    @property
    def death(self) -> Death:
        """Return the cause of its death, as far as known."""
        if self.verdict:
            return Death.HANG if self._hung else Death.FAULT
        code = self.process.exitcode
        return Death.OUTSIDE if code is None or -code in _SENT else Death.FAULT

    def ending(self) -> str:
        """Describe its end in words, with the tail of its standard error."""
        code = self.process.exitcode if self.process.ended else None
        if self.verdict:
            ended = f"{self.verdict} and was killed"
        elif not self.process.ended:
            ended = "cannot be ended: the kernel holds it"
        elif code is None:
            ended = "ended"
        elif code < 0:
            ended = f"was killed by {_signal_name(-code)}"
        else:
            ended = f"exited with code {code}"
        doing = next((asked.activity.value for asked in self._asked if asked.number > self.channel.answered), "")
        while_doing = f" while {doing}" if doing and not self.verdict else ""
        hint = _hint(code) if not self.verdict else _PATIENCE if self._hung else ""
        tail = f"\n--- its standard error ends with\n{self.stderr.tail}" if self.stderr.tail else ""
        return f"{self.process.name} (pid {self.pid}) {ended}{while_doing}{hint}{tail}"

    def close(self) -> None:
        """Close the pipe; the process may end by itself."""
        self.channel.close()


class Listener(Protocol):
    """Receives the workers' replies, except those to state, and is notified of workers that are dead and reaped.

    Either method may raise `ProtocolError`: then that worker cannot be trusted, and is replaced.
    """

    def on_reply(self, worker: WorkerProcess, asked: PendingMessage, reply: WorkerReply) -> None:
        """Handle a reply to the message `asked`."""

    def on_lost(self, worker: WorkerProcess, ending: str) -> None:
        """Handle the end of a worker."""


class Ignore:
    """A listener that ignores everything."""

    def on_reply(self, worker: WorkerProcess, asked: PendingMessage, reply: WorkerReply) -> None:
        """Do nothing."""

    def on_lost(self, worker: WorkerProcess, ending: str) -> None:
        """Do nothing."""


def error_of(rank: int, failure: Failure, doing: Activity | None, numbering: Numbering | None = None) -> Exception:
    """Return the exception for a failure of the user's code in a worker. `numbering` is that of the batch, if the
    failure concerns one."""
    if failure.written:
        return StateWritten(failure.written)
    samples = failure.samples
    terms = {} if numbering is None else numbering.within(samples)
    what = "" if samples or doing is None else doing.value
    error = WorkerError(rank, failure.type_name, failure.message, samples, what, terms, failure.kinds)
    error.__cause__ = RemoteTraceback(failure.traceback)
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _hint(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return " (out of memory, perhaps: a smaller chunk_size needs less)"
    if code == -signal.SIGSEGV:
        return " (the parameters are read-only in workers: writing to them in a worker causes this)"
    return ""
