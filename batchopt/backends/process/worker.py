"""One worker process as the parent sees it: its pipe and its page, what it was sent and ordered, its memory and end."""

from __future__ import annotations

import signal
import socket
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch

from batchopt.backends.process.channel import RING, Channel, PendingCall
from batchopt.backends.process.forkserver import fork_worker
from batchopt.backends.process.roster import REAPING, SILENT, STATES, State
from batchopt.backends.process.scheduler import Death
from batchopt.backends.process.stderr import Stderr
from batchopt.backends.process.task_files import TotalsFile
from batchopt.backends.process.wanted import Activity, Field, SessionCall, Wanted
from batchopt.errors import RemoteTraceback, WorkerError
from batchopt_workers.batch.batch import Numbering
from batchopt_workers.evaluate.sums import Rows, rows_nbytes
from batchopt_workers.life.session import Session
from batchopt_workers.wire.failures import Failure, Warned
from batchopt_workers.wire.layout import Layout
from batchopt_workers.wire.memory import SharedBlock
from batchopt_workers.wire.orders import Kind, Order, Start
from batchopt_workers.wire.packets import HasDescriptor, Received
from batchopt_workers.wire.packing import dumps
from batchopt_workers.wire.page import DONE, EVALUATION, NUMBER, Board

# Signals from outside; SIGKILL also comes from the kernel if memory is short.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_MORE_TIME = " (if it was at work, give it more time: timeout=...)"
P = ParamSpec("P")


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
    """Return a call whose last argument is the descriptor of `block`, which travels with it."""
    return SessionCall(activity, dumps((method.__name__, (name,))), block)


def call_with_file(
    activity: Activity, method: Callable[..., None], file: HasDescriptor, *arguments: Any
) -> SessionCall:
    """Return a call whose last argument, after these, is the descriptor of `file`, which travels with it."""
    return SessionCall(activity, dumps((method.__name__, arguments)), file)


@dataclass
class GivenOrder:
    """The last order that a worker was given, with that `number`, about chunks `first` up to `last`, from that `start`;
    the last call before it was `after`. `leniency`: the multiple of the usual time that it may take; `form`: that of
    results that it had sent before."""

    number: int = 0
    evaluation: int = -1
    kind: Kind = Kind.EVALUATE
    first: int = 0
    last: int = 0
    start: Start = field(default_factory=Start)
    after: int = 0
    leniency: float = 1.0
    form: bytes = b""


class Killed(NamedTuple):
    """Why and when this process killed a worker, and whether because it made no progress."""

    why: str
    at: float
    hung: bool = False


@dataclass
class Heard:
    """The part of what a worker has said that was taken in: that it has all that it must have; so many reports on its
    page, and the end of the order of that number; how often its posthook returned nothing but None, by chunk; and the
    form of results, pickled, that it has sent last."""

    joined: bool = False
    reports: int = 0
    done: int = 0
    nones: dict[int, int] = field(default_factory=dict)
    form: bytes = b""


@dataclass
class Memory:
    """The memory that a worker shares with this process alone: rows for gradients, and the file for totals."""

    rows: Rows | None = None
    totals: TotalsFile | None = None


class WorkerProcess:
    """A worker process.

    Calls and rings leave at the next flush of its channel that finds room. It is killed, with all that it started, when
    this object is collected. `rank` is the parent's name for it, `number` its
    rank among all `world_size` workers: a different one if some are on other machines. It has a page of `board`, and
    wakes this process up through `waker`. `warned`: the warnings that workers have issued.
    """

    def __init__(
        self,
        rank: int,
        number: int,
        world_size: int,
        threads: int,
        board: Board,
        waker: HasDescriptor,
        warned: set[Warned],
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.rank = rank
        self.channel = Channel(ours)
        self.stderr = Stderr(warned)
        self.page, self.given, self.heard = board.page(rank), GivenOrder(), Heard()
        self.memory = Memory()
        self.have = Wanted()  # once it has answered
        self.since = time.monotonic()  # of the last sign of progress
        self.killed: Killed | None = None
        try:
            with theirs:
                self.process = fork_worker(theirs, self.stderr.writer, number, world_size, threads)
        except BaseException:
            self.channel.close()
            raise
        finally:
            self.stderr.close_writer()
        self.move(board, waker)

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def evaluates(self) -> bool:
        """Tell whether it is not done with its order."""
        return self.page.ints[DONE] != self.given.number

    @property
    def state(self) -> State:
        """Its state, as the facts show it."""
        self.channel.forget_answered()
        todo = self.channel.todo
        called = any(asked.activity is Activity.FUNCTION for asked in todo)
        waits = "function" if called else "field" if todo else None
        return STATES[self.heard.joined, waits, self.evaluates]

    @property
    def is_heard(self) -> bool:
        """Tell whether everything that it has said was handled."""
        return not self.channel.unread and self.heard.done == self.given.number

    @property
    def activity(self) -> Activity | None:
        """The part of its work that it is at; None if it has nothing to do."""
        self.channel.forget_answered()
        todo = self.channel.todo
        if todo and not (self.evaluates and todo[0].number > self.given.after):
            return todo[0].activity
        return Activity.EVALUATING if self.evaluates else None

    def ask(self, message: SessionCall, name: str = "", field: Field | None = None) -> None:
        """Queue a call."""
        if self.state in SILENT:
            self.since = time.monotonic()
        self.channel.ask(message, name, field)

    def order(self, number: int, order: Order, first: int, last: int, start: Start, leniency: float = 1.0) -> None:
        """Give it that part of an order, and ring for it, or queue a ring."""
        # One function, since evaluations that repeat do nothing else for a worker.
        given, page, channel = self.given, self.page.ints, self.channel
        given.number, given.evaluation, given.kind = number, order.evaluation, order.kind
        given.first, given.last = first, last
        given.start, given.after = start, channel.todo[-1].number if channel.todo else channel.answered
        given.leniency, given.form, self.since = leniency, self.heard.form, time.monotonic()
        numbers = order.evaluation, order.step, order.kind, first, last, *start, given.after
        page[EVALUATION:NUMBER] = memoryview(array("q", numbers))
        page[NUMBER] = number
        channel.rings = True
        if not channel.todo:
            try:
                channel.wake(RING.data)
                channel.rings = False
            except OSError:  # no room; or it is gone, which is noticed elsewhere
                pass

    def call_off(self) -> None:
        """Have it stop after the current chunk, or begin none: an interrupt may have come before it was rung for, or
        before the page said so."""
        self.page.limit(0)
        self.page.ints[NUMBER] = self.given.number
        self.channel.rings = True
        self.channel.flush()

    def move(self, board: Board, waker: HasDescriptor) -> None:
        """Give it a page of that board, which it takes before its next order; it must be done with the last one."""
        self.page, self.heard.reports = board.page(self.rank), 0
        self.page.clear(self.given.number)
        self.ask(call_with_block(Activity.STARTING, Session.attach, "board", board.block))
        self.ask(call_with_file(Activity.STARTING, Session.take_page, waker, self.rank, board.workers))

    # ---- its memory

    def make_room(self, needed: int, layout: Layout, changes: int, terms: int, device: torch.device) -> None:
        """Ensure that it has at least that many rows to sum gradients in; they only grow. After an interrupt they are
        sent again."""
        rows = self.memory.rows
        held = 0 if rows is None else len(rows)
        more = needed - held
        if more <= 0:
            return
        block = SharedBlock.create(rows_nbytes(layout, changes, more, terms))
        self.ask(call_with_block(Activity.MEMORY, Session.attach, "rows", block))
        self.ask(call(Activity.MEMORY, Session.add_rows, held, more, terms))
        if rows is None:
            self.memory.rows = Rows(layout, changes, more, block, device, terms)
        else:
            rows.grow(more, block)

    def make_totals(self) -> None:
        """Send it a file to sum totals in."""
        if self.memory.totals is None:
            totals = TotalsFile()
            self.ask(call_with_file(Activity.MEMORY, Session.sum_in, totals.file))
            self.memory.totals = totals

    def drop_totals(self) -> bool:
        """Have it release the file for totals, if that is far too large; return whether it is."""
        if self.memory.totals is None or not self.memory.totals.is_too_large:
            return False
        self.memory.totals = None
        self.ask(call(Activity.MEMORY, Session.sum_nowhere))
        return True

    # ---- its end

    def kill(self, why: str, hung: bool = False) -> None:
        """Kill it, with all that it started, for this reason."""
        if self.killed is None:
            self.killed = Killed(why, time.monotonic(), hung)
        self.process.kill_group()

    def reap(self) -> None:
        """Read its last replies, kill its remaining processes, and reap it."""
        with suppress(EOFError, OSError):
            self.channel.receive()
        self.process.kill_group()
        self.process.join(REAPING)
        with suppress(Warning):  # the user may have turned warnings into errors
            self.stderr.pass_on()

    @property
    def death(self) -> Death:
        """Return the cause of its death, as far as known."""
        if self.killed is not None:
            return Death.HANG if self.killed.hung else Death.FAULT
        code = self.process.exitcode
        return Death.OUTSIDE if code is None or -code in _SENT else Death.FAULT

    def ending(self) -> str:
        """Describe its end in words, with the tail of its standard error."""
        code, killed = self.process.exitcode if self.process.ended else None, self.killed
        activity = self.activity if killed is None else None
        doing = "" if activity is None else f" while {activity.value}"
        if killed is not None:
            ended = f"{killed.why} and was killed{_MORE_TIME if killed.hung else ''}"
        elif not self.process.ended:
            ended = f"cannot be ended: the kernel holds it{doing}"
        elif code is None:
            ended = f"ended with the process that it was forked from{doing}"
        elif code < 0:
            ended = f"was killed by {_signal_name(-code)}{doing}{_hint(code)}"
        else:
            ended = f"exited with code {code}{doing}"
        tail = f"\n--- its standard error ends with\n{self.stderr.tail}" if self.stderr.tail else ""
        return f"{self.process.name} (pid {self.pid}) {ended}{tail}"

    def close(self) -> None:
        """Close the pipe; the process may end by itself."""
        self.channel.close()


class Listener:
    """Is told of what workers say and of their ends; this one ignores everything.

    A method may raise `ProtocolError`: then that worker cannot be trusted, and is replaced.
    """

    def on_reply(self, worker: WorkerProcess, asked: PendingCall, reply: Received) -> None:
        """Handle a reply to a call that is part of nothing that workers must have."""

    def on_message(self, worker: WorkerProcess, message: Received) -> None:
        """Handle a message about the worker's order."""

    def on_report(self, worker: WorkerProcess) -> None:
        """Handle a new report on its page."""

    def on_done(self, worker: WorkerProcess) -> None:
        """Handle the end of its order."""

    def on_lost(self, worker: WorkerProcess, ending: str) -> None:
        """Handle the end of a worker, which is dead and reaped."""


def error_of(rank: int, failure: Failure, doing: Activity | None, numbering: Numbering | None = None) -> Exception:
    """Return the exception for a failure of the user's code in a worker. `numbering` is that of the batch, if the
    failure concerns one."""
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


def _hint(code: int) -> str:
    if code == -signal.SIGKILL:
        return " (out of memory, perhaps: a smaller chunk_size needs less)"
    if code == -signal.SIGSEGV:
        return " (the parameters are read-only in workers: writing to them in a worker causes this)"
    return ""
