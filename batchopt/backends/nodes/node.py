"""A node's process: the loop that carries out the parent's commands.

    parent                                  ║ network     this process
    Command: fields, X                    ──╫──►  NodeSession.take, one field after the other; then
                                            ║     Team ── ProcessBackend ── worker processes
    Result, partials          ◄─────────────╫───  X, batch and partials in shared memory

What must hold:

- A node decides nothing. It carries out commands in their order, and answers each that has an answer in one exchange,
  also if it could not take the fields: then it says so, and the parent sends everything again.
- If a member of the group is lost, the remaining ones wait for the next generation, which the parent forms. There each
  reports the last command whose fields it has taken, so that the parent knows what it has.
- It ends when it is told to, when it belongs to no generation any more, or when the parent's store is gone.
"""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from batchopt.backends.nodes.group import Group, address_towards, dist
from batchopt.backends.nodes.session import NodeSession
from batchopt.backends.nodes.team import Evaluation, Team
from batchopt.errors import NodeLostError
from batchopt_workers.wire.orders import TASKS, versions

# Seconds between two signs of life.
BEAT = 1.0
# Seconds to wait for the parent before checking whether it is still there.
LISTENING = 600.0


class Membership(NamedTuple):
    """The members of a generation: the node at each place except the parent's, its workers' ranks, the seconds in which
    it has to join, and whether bits are fixed."""

    numbers: tuple[int, ...]
    ranks: tuple[range, ...]
    timeout: float
    fixed_bits: bool


class Command(NamedTuple):
    """A command to a node, to be carried out once it has taken these fields. `x`: X, if it has changed; empty for a
    long one, which the parent sends after this."""

    what: str
    number: int = 0
    fields: Sequence[tuple[str, Any]] = ()
    x: torch.Tensor | None = None
    arguments: tuple[Any, ...] = ()


class Node:
    """This process as a node."""

    def __init__(self) -> None:
        self.session = NodeSession()
        self.taken = 0  # the last command of which all fields were taken
        self.joined: tuple[int, Group] | None = None  # the number of a generation, and its group

    def follow(self, group: Group, membership: Membership) -> None:
        """Carry out the parent's commands. Raises `NodeLostError`, and `EOFError` at the end."""
        session, team = self.session, Team(group, [range(0), *membership.ranks], [0], membership.fixed_bits)
        while True:
            command: Command = group.take(0)
            if command.what == "end":
                raise EOFError
            if command.what == "regroup":
                return
            failure: Exception | None = None
            try:
                for name, value in command.fields:
                    session.take(name, value)
                self.taken = command.number
            except Exception as error:
                failure = error
            if command.x is not None and len(command.x):
                session.flat.vector.copy_(command.x)
            elif command.x is not None:
                group.broadcast(session.flat.vector)
            team.local, team.wire = session.workers, session.wire
            try:
                self._carry_out(team, command, failure)
            except NodeLostError:
                raise
            except Exception:  # all members have it, and the parent raises it
                continue

    def _carry_out(self, team: Team, command: Command, failure: Exception | None) -> None:
        if command.what == "evaluate":
            evaluation = Evaluation(*command.arguments)
            team.evaluate(self.session.cuts[evaluation.order.kind in TASKS], evaluation, failed=failure)
            return
        value, is_behind = None, failure is not None
        if not is_behind:
            try:
                value = getattr(self, f"_{command.what}")(team, *command.arguments)
            except Exception as error:
                failure = error
        team.exchange(None, value, failure, is_behind)

    # ---- commands beside evaluations, each of which returns its answer

    def _meet(self, team: Team) -> None:
        """Answer that all fields were taken."""

    def _run(self, team: Team, function: bytes) -> list[bytes]:
        return self.session.run(*pickle.loads(function))


def serve(address: str, port: int, number: int) -> None:
    """Serve as node `number`: report to the parent, and join each generation of the group to which it belongs, until
    there is none or the parent is gone."""

    def reach() -> Any:
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=LISTENING))

    store, node, over = reach(), Node(), threading.Event()
    threading.Thread(target=_beat, args=(reach, number, node, over), daemon=True).start()
    try:
        store.set(f"new/{number}", pickle.dumps((versions(), socket.gethostname())))
        generation = int(store.get(f"join/{number}"))
        while True:
            membership: Membership = pickle.loads(store.get(f"members/{generation}"))
            if number not in membership.numbers:
                return
            place, size = membership.numbers.index(number) + 1, len(membership.numbers) + 1
            try:
                name, host = f"group/{generation}", address_towards(address)
                group = Group(store, name, place, size, membership.timeout, host, is_patient=True)
                node.joined = generation, group
                node.follow(group, membership)
            except NodeLostError:
                pass
            generation += 1
            store.set(f"here/{generation}/{number}", str(node.taken))
    except (EOFError, RuntimeError):  # asked to end, or the parent is gone
        return
    finally:
        over.set()
        node.session.close()


def _beat(reach: Callable[[], Any], number: int, node: Node, over: threading.Event) -> None:
    """Give signs of life, and end waits of a generation that is over, since the awaited member may be unreachable."""
    beats = 0
    try:
        store = reach()
        while not over.wait(BEAT):
            beats += 1
            store.set(f"alive/{number}", str(beats))
            joined = node.joined  # once, as the other thread may replace it
            if joined is not None and store.check([f"over/{joined[0]}"]):
                joined[1].abort()
    except RuntimeError:  # the parent is gone
        if node.joined is not None:
            node.joined[1].abort()
