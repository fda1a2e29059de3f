"""A node's process: its workers, and the loop that carries out the parent's commands.

    parent                                  ║ network     this process
    NodeCommand, X                        ──╫──►  makes the updates, then
                                            ║     Team ── ProcessBackend ── worker processes
    Contribution, partials    ◄─────────────╫───  X, batch and partials in shared memory

If a member of the group is lost, the remaining ones wait for the next generation, which the parent forms.
"""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from batchopt._mapreduce.compression import Compression
from batchopt._program.flatten import Flat
from batchopt.backends.base import Mode, Prepared, Run, Setup
from batchopt.backends.nodes.contribution import GradientResiduals, Round
from batchopt.backends.nodes.group import Group, address_towards, dist
from batchopt.backends.nodes.team import Team
from batchopt.backends.nodes.transfer import PackedBytes, ProgramUpdate, made, with_rows, write
from batchopt.backends.process.backend import ProcessBackend
from batchopt.backends.process.shared_program import Holder
from batchopt.errors import NodeLostError
from batchopt_workers.data.batch import Batch
from batchopt_workers.data.layout import Layout
from batchopt_workers.data.memory import SharedBlock
from batchopt_workers.data.packing import assemble, dumps
from batchopt_workers.map.module_state import ModuleState
from batchopt_workers.map.program import Program
from batchopt_workers.process.messages import TASKS, Cut, Order, versions
from batchopt_workers.process.torch_settings import TorchSettings

# Seconds between two signs of life.
BEAT = 1.0
# Seconds to wait for the parent before checking whether it is still there.
LISTENING = 600.0


class Membership(NamedTuple):
    """The members of a generation: the node at each place except the parent's, its workers' ranks, and the timeout."""

    numbers: tuple[int, ...]
    ranks: tuple[range, ...]
    timeout: float


@dataclass(frozen=True)
class NodeSetup:
    """The settings of a node's workers for as long as they live; `precode` is pickled."""

    layout: Layout
    precode: bytes
    fixed_bits: bool
    timeout: float | None
    restarts: int
    threads: int
    devices: tuple[torch.device, ...] | None
    torch: TorchSettings
    compression: Compression | None


class Update(NamedTuple):
    """A call of a method of `NodeSession`, by its name."""

    method: str
    arguments: tuple[Any, ...]


class NodeCommand(NamedTuple):
    """A command to a node, to be carried out after its updates. `vectors`: the bytes of X and of the direction if they
    have changed; None for a long one, which the parent sends after this."""

    what: str
    updates: Sequence[Update] = ()
    arguments: tuple[Any, ...] = ()
    vectors: Sequence[tuple[str, bytes | None]] = ()


class NodeSession:
    """The parent's program on this machine."""

    def __init__(self) -> None:
        self.workers: ProcessBackend | None = None
        self.taken = 0  # commands whose updates were made
        self.joined: tuple[int, Group] | None = None  # the number of a generation, and its group
        self._team: Team | None = None
        self._residuals: GradientResiduals | None = None
        self._cut = self._task_cut = Cut((0,))
        self._prepared = Prepared(Batch(()))  # the batch of the step, with the rows that are here

    # ---- the group

    def follow(self, group: Group, membership: Membership) -> None:
        """Carry out the parent's commands. Raises `NodeLostError`, and `EOFError` at the end."""
        ranks = [range(0), *membership.ranks]
        fixed_bits = self._setup.fixed_bits if self.workers is not None else False
        self._team = Team(group, None, ranks, [0], fixed_bits, self._residuals)
        self._use()
        while True:
            command: NodeCommand = group.take(0)
            if command.what == "end":
                raise EOFError
            if command.what == "regroup":
                return
            failure = self._take_in(command)
            for name, written in command.vectors:
                self._receive(group, name, written)
            try:
                getattr(self, f"_{command.what}")(failure, *command.arguments)
            except NodeLostError:
                raise
            except Exception:  # all members have it, and the parent raises it
                continue

    def _use(self) -> None:
        if self._team is not None and self.workers is not None:
            self._team.local = self.workers

    def _take_in(self, command: NodeCommand) -> BaseException | None:
        """Make the updates; return an exception raised by one of them."""
        self.taken += 1
        try:
            for method, arguments in command.updates:
                getattr(self, method)(*arguments)
        except Exception as error:
            return error
        return None

    def _receive(self, group: Group, name: str, written: bytes | None) -> None:
        if written is None:
            group.broadcast(self._vector)
        else:
            self._vector.copy_(torch.frombuffer(bytearray(written), dtype=self._vector.dtype))

    # ---- commands to all nodes at once

    def _evaluate(self, failure: BaseException | None, order: Order, runs: Sequence[Run], of: Round | None) -> None:
        cut = self._task_cut if order.kind in TASKS else self._cut
        self._joined.evaluate(cut, order, runs, {}, None, of, failure)

    def _run(self, failure: BaseException | None, function: bytes) -> None:
        found: list[bytes] = []
        is_behind = failure is not None
        if failure is None:
            try:
                called, arguments = pickle.loads(function)
                found = [dumps(value) for value in self._workers.run(called, arguments)]
            except Exception as error:
                failure = error
        self._joined.exchange({}, found, failure, is_behind)

    def _meet(self, failure: BaseException | None) -> None:
        """Report that the updates were made."""
        self._joined.exchange({}, None, failure, failure is not None)

    def _tell_residuals(self, failure: BaseException | None, evaluation: int) -> None:
        left = None if self._residuals is None else self._residuals.after(evaluation)
        self._joined.exchange({}, left, failure, failure is not None)

    def _take_residuals(self, failure: BaseException | None, evaluation: int, of_all: dict[int, torch.Tensor]) -> None:
        self._joined.restore_residuals(evaluation, of_all)
        self._joined.exchange({}, None, failure, failure is not None)

    @property
    def _joined(self) -> Team:
        assert self._team is not None
        return self._team

    @property
    def _workers(self) -> ProcessBackend:
        if self.workers is None:
            raise RuntimeError("the workers of this node were not started")
        return self.workers

    # ---- updates

    def start(self, setup: NodeSetup, program: ProgramUpdate, ranks: range, world: int) -> None:
        """Start the workers of a program."""
        if self.workers is not None:  # from a start whose answer was not received, because another node was lost
            self.workers.close()
        setup.torch.apply()
        layout = setup.layout
        block = SharedBlock.create(layout.size * layout.dtype.itemsize)
        self._setup, self._vector = setup, block.tensor(layout.dtype, (layout.size,))
        self._parameters = [torch.nn.Parameter(view) for view in layout.views(self._vector)]
        loaded = self._rebuilt(program)
        found = Setup(
            workers=len(ranks),
            fixed_bits=setup.fixed_bits,
            timeout=setup.timeout,
            restarts=setup.restarts,
            threads=setup.threads,
            devices=setup.devices,
            precode=pickle.loads(setup.precode),
            program=loaded,
            flat=Flat(layout, self._vector, block),
            parameters=self._parameters,
            buffers=ModuleState(loaded.module, state=loaded.state),
            ranks=tuple(ranks),
            world=world,
        )
        if setup.compression is not None:
            self._residuals = GradientResiduals(setup.compression, layout.size, layout.sum_dtype)
        self._torch, self._ranks = setup.torch, tuple(ranks)
        self._program = loaded
        self.workers = ProcessBackend(found, Holder(lambda: self._torch, lambda: self._program.module_hooks))
        self._joined.fixed_bits, self._joined.residuals = setup.fixed_bits, self._residuals
        self._use()

    def _rebuilt(self, program: ProgramUpdate) -> Program:
        assert program.data is not None
        self._tensors = made(program.placements, [program.elements[i] for i in range(len(program.placements))])
        loaded: Program = assemble(program.data, self._tensors, self._parameters)
        return loaded

    def set_mode(self, hooked: bool, outputs: bool) -> None:
        """Set whether hooks run, and whether evaluations return the module's outputs."""
        program = self._program
        self._workers.set_mode(Mode(program.prehook, program.posthook, hooked, program.state, outputs))

    def set_torch(self, settings: TorchSettings) -> None:
        """Use these settings of torch."""
        settings.apply()
        self._torch = settings

    def change(self, found: ProgramUpdate) -> None:
        """Take over another version of the program, for the next step or the current one."""
        if found.data is None:
            write(found, self._tensors)
            return
        self._program = loaded = self._rebuilt(found)
        self._workers.replace_program(loaded, ModuleState(loaded.module, state=loaded.state))

    def load(self, batch: PackedBytes, weights: tuple[float, ...]) -> None:
        """Begin a step on a batch, of which these rows are sent."""
        self._prepared = self._workers.place(batch.packed())
        self.reload(weights)

    def extend(self, rows: PackedBytes, weights: tuple[float, ...]) -> None:
        """Begin a step on the previous step's batch, with more rows."""
        # Its rows are read from the workers' memory, so the new batch is placed in another block.
        whole = with_rows(self._prepared.batch, rows.unpacked())
        self._prepared = self._workers.prepare(whole, ahead=True)
        self.reload(weights)
        self._workers.give_back()

    def reload(self, weights: tuple[float, ...]) -> None:
        """Begin a step on the previous step's batch."""
        self._workers.load(self._prepared, weights)

    def begin_task(self, task: PackedBytes, batch: PackedBytes | None) -> None:
        """Begin a task, on the loaded batch or on this one."""
        self._workers.begin_task(
            task.unpacked(self._parameters), None if batch is None else batch.unpacked(), follow=True
        )

    def end_task(self) -> None:
        """End the task."""
        self._workers.end_task()

    def set_cut(self, cut: Cut) -> None:
        """Set the cut of the batch."""
        self._cut = cut

    def set_task_cut(self, cut: Cut) -> None:
        """Set the cut of the task's batch."""
        self._task_cut = cut

    def resize(self, workers: int, world: int) -> None:
        """Keep `workers` workers, of `world` on all nodes."""
        self._ranks = self._ranks[:workers]
        self._workers.resize(workers, self._ranks, world)

    def close(self) -> None:
        """End the workers."""
        if self.workers is not None:
            self.workers.close()


def serve(address: str, port: int, number: int) -> None:
    """Serve as node `number`: report to the parent, and join each generation of the group to which it belongs, until
    there is none or the parent is gone."""

    def reach() -> Any:
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=LISTENING))

    store, node, over = reach(), NodeSession(), threading.Event()
    threading.Thread(target=_beat, args=(reach, number, node, over), daemon=True).start()
    try:
        store.set(f"new/{number}", pickle.dumps((versions(), socket.gethostname())))
        generation = int(_word(store, f"join/{number}"))
        while True:
            membership: Membership = pickle.loads(_word(store, f"members/{generation}"))
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
        node.close()


def _word(store: Any, key: str) -> bytes:
    found: bytes = store.get(key)
    return found


def _beat(reach: Callable[[], Any], number: int, node: NodeSession, over: threading.Event) -> None:
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
