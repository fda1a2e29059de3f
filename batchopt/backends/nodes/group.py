"""A group of processes that exchange objects and vectors, by sends and receives of torch.distributed's gloo.

Each member has a `place`. Sender and receiver of a vector know its length: gloo ends a process that is sent more than
it expects. Objects of all members are passed on from member to member, in as many rounds as their number can be halved:
messages take longer than bytes. An object is sent to the inbox that its receiver keeps open from the end of one
exchange to the next: so it is sent at once, without waking up the receiver for a handshake, which takes longer than the
message. The part that does not fit follows. A member that ends, closes its group or is silent for `timeout` seconds is
an error on all that wait for it; they close theirs, so that all members notice, and may form another group over the
same store under another name.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as _dist

from batchopt.errors import BatchoptError, NodeLostError
from batchopt_workers.wire.memory import octets

dist: Any = _dist  # torch exports only a part of it

# Size of an inbox in bytes.
BLOCK = 2**19
# A wait of this many seconds makes the next one of its kind interruptible, which needs another thread and takes longer.
LONG = 0.02
# Seconds of a wait without limit.
FOREVER = 1e6
# Seconds between two checks whether something is wrong.
LOOKING = 1.0
_LENGTH = struct.Struct("<q")
_OBJECT, _REST, _NEVER, _VECTOR = 1, 2, 4, 16  # tags; vectors have one for each number of bytes

# Work to wait for, with the place of the member at the other end; the answer is the error, and the member's place.
Posted = tuple[int, Any]
Wrong = tuple[int, str]
# Work to wait for, and for how long.
Asked = tuple[Sequence[Posted], timedelta]


class _Waiter:
    """Waits for work of gloo, a long time in another thread: the one that asks remains interruptible, which it is not
    within gloo. `watch`, which raises if something is wrong, is called repeatedly meanwhile."""

    def __init__(self, patience: timedelta, watch: Callable[[], None] | None) -> None:
        self._patience, self._watch = patience, watch
        self._lasts: dict[int | None, float] = {}  # seconds, of the last wait of each kind
        asked: SimpleQueue[Asked | None] = SimpleQueue()
        self._asked, self._answers = asked, SimpleQueue[Wrong | None]()
        threading.Thread(target=_wait, args=(asked, self._answers), daemon=True).start()
        self.end = weakref.finalize(self, asked.put, None)

    def wait(self, posted: Sequence[Posted], kind: int | None) -> Wrong | None:
        """Wait for this work, which takes about as long as the last one of its kind; return what went wrong."""
        began = time.perf_counter()
        if self._watch is None and self._lasts.get(kind, LONG) < LONG:
            wrong = _waited(posted, self._patience)
        else:
            self._asked.put((posted, self._patience if self._watch is None else timedelta(seconds=FOREVER)))
            wrong = self._answer()
        self._lasts[kind] = time.perf_counter() - began
        return wrong

    def _answer(self) -> Wrong | None:
        while True:
            try:
                return self._answers.get(timeout=None if self._watch is None else LOOKING)
            except Empty:
                assert self._watch is not None
                self._watch()

    def stop(self, why: str) -> None:
        """Make a wait end, with this text as what went wrong."""
        self._answers.put((-1, why))


def _wait(asked: SimpleQueue[Asked | None], answers: SimpleQueue[Wrong | None]) -> None:
    """The main loop of the thread for long waits."""
    while (posted := asked.get()) is not None:
        answers.put(_waited(*posted))
        del posted


def _waited(posted: Sequence[Posted], patience: timedelta) -> Wrong | None:
    for place, work in posted:
        try:
            work.wait(patience)
        except RuntimeError as error:  # as text, since its traceback would keep the group alive
            return place, str(error)
    return None


class _Making:
    """The creation of the group, as work to wait for."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments, self.made = arguments, None

    def wait(self, patience: timedelta) -> None:
        """Wait until all others have joined."""
        self.made = _gloo(*self._arguments)


class Group:
    """This process, at `place` of `size`, and the others, which create theirs over the same store under the same
    name."""

    def __init__(
        self,
        store: Any,
        name: str,
        place: int,
        size: int,
        timeout: float,
        host: str,
        watch: Callable[[], None] | None = None,
        is_patient: bool = False,
    ) -> None:
        """`host`: the address of this process for the others. `watch`, which raises if something is wrong, is called
        repeatedly while this waits; if it `is_patient` it waits as long as the others live. Raises `NodeLostError` if
        they do not join."""
        self.place, self.size, self._timeout = place, size, timeout
        self.names: Sequence[str] = [f"node {i}" for i in range(size)]  # for messages
        self._steps = [1 << i for i in range((size - 1).bit_length())]
        # The member from which this one has what it broadcasts on, and those that send it objects, beside place 0.
        self._origin = place & (place - 1)
        self._senders = {0, self._origin, *((place + step) % size for step in self._steps)} - {place}
        self._memory: dict[int, torch.Tensor] = {}  # the inbox for each of them
        self._boxes: dict[int, Any] = {}  # those that are open
        self._waiter = _Waiter(timedelta(seconds=FOREVER if is_patient else timeout), watch)
        making = _Making(dist.PrefixStore(name, store), place, size, timeout, host)
        self._group: Any = None
        self._posted: list[Posted] = [(place, making)]
        self.wait()
        self._group = making.made

    @property
    def others(self) -> list[int]:
        """The places of all others, starting with the one after this member."""
        return [(self.place + i) % self.size for i in range(1, self.size)]

    # ---- vectors

    def send(self, vector: torch.Tensor, to: int, tag: int = 0) -> None:
        """Begin to send a contiguous tensor, which must not change before `wait` returns."""
        self._posted.append((to, self._begin("send", vector, to, tag or _VECTOR + vector.nbytes % 2**30)))

    def receive(self, vector: torch.Tensor, origin: int, tag: int = 0) -> Posted:
        """Begin to receive into a contiguous tensor, which has its elements when `wait` returns."""
        posted = origin, self._begin("recv", vector, origin, tag or _VECTOR + vector.nbytes % 2**30)
        self._posted.append(posted)
        return posted

    def _begin(self, what: str, vector: torch.Tensor, place: int, tag: int) -> Any:
        if self._group is None:
            raise BatchoptError("the nodes do not work together any more: build a new BatchOptimizer on each of them")
        try:
            return getattr(self._group, what)([vector], place, tag)
        except RuntimeError as error:  # the other end is known to be gone
            self.close()
            raise NodeLostError(self._described(place, str(error)), place) from None

    def broadcast(self, vector: torch.Tensor) -> None:
        """Copy this contiguous tensor from the member at place 0 to all others, along a tree."""
        if self.place:
            self.receive(vector, self._origin)
            self.wait()
        for other in self._below:
            self.send(vector, other)
        self.wait()

    @property
    def _below(self) -> list[int]:
        """The members to which this one broadcasts: along a tree, the one with the most others below it first."""
        steps = [step for step in reversed(self._steps) if not self.place or step < self.place & -self.place]
        return [self.place + step for step in steps if self.place + step < self.size]

    def trade(
        self, mine: Sequence[torch.Tensor], theirs: Sequence[Sequence[torch.Tensor]], takers: Sequence[int]
    ) -> None:
        """Send vectors to all `takers`; as one of them, receive those of each other member, by place."""
        for other in self.others:
            for vector in theirs[other] if self.place in takers else ():
                self.receive(vector, other)
            for vector in mine if other in takers else ():
                self.send(vector, other)
        self.wait()

    def wait(self, some: Sequence[Posted] | None = None, kind: int | None = None) -> None:
        """Wait for all work that was begun, or for `some`; `kind`: the place of the member whose object that is. Raises
        `NodeLostError`, and `BatchoptError` if this was stopped."""
        posted = self._posted if some is None else some
        self._posted = [] if some is None else [one for one in self._posted if not any(one is other for other in some)]
        if not posted:
            return
        try:
            wrong = self._waiter.wait(posted, kind)
        except BaseException:  # raised by a signal handler: it is unknown what has arrived
            self.close()
            raise
        posted = []  # a traceback would keep it alive
        if wrong is None:
            return
        self.close()
        place, text = wrong
        if place < 0:
            raise BatchoptError(text)
        raise NodeLostError(self._described(place, text), place)

    def _described(self, place: int, text: str) -> str:
        if place == self.place:
            return f"only some of {self.size} joined within {self._timeout:.4g} s (`timeout`): {text[:300]}"
        if "timed out" in text.lower():
            # Who passes on what it lacks itself is not who is lost.
            other = ", or waits for another one that did not" if self.size > 3 else ""
            return f"{self.names[place]} did not respond for {self._timeout:.4g} s (`timeout`){other}"
        return f"{self.names[place]} has ended, or closed its optimizer"

    # ---- objects

    def exchange(self, value: Any) -> list[Any]:
        """Exchange values with all members; return them by place."""
        found: list[Any] = [_packed(value)]  # of this member, and those after it
        for step in self._steps:
            self._send_object(_to_send(found[: self.size - step]), (self.place - step) % self.size)
            found += self.take((self.place + step) % self.size)
        self.wait()
        values = [value, *map(pickle.loads, found[1:])]
        return [values[i - self.place] for i in range(self.size)]

    def gather(self, value: Any, brief: Any) -> list[Any]:
        """Return the values of all members, by place; on all but the one at place 0, their `brief` ones."""
        found: list[Any] = [(_packed(value), _packed(brief))]  # of this member, and those below it
        for other in reversed(self._below):
            found += self.take(other)
        if self.place:
            self._send_object(_to_send(found), self._origin)
            found = self.take(self._origin)
        briefs = found if self.place else [brief for _, brief in found]
        for other in self._below:
            self._send_object(_to_send(briefs), other)
        self.wait()
        values = [pickle.loads(data) for data in (briefs if self.place else [whole for whole, _ in found])]
        return [value if i == self.place else of for i, of in enumerate(values)]

    def open(self) -> None:
        """Open the inboxes, ideally some time before an object is sent to them."""
        for other in self._senders:
            if other not in self._boxes:
                box = self._memory.setdefault(other, torch.empty(BLOCK, dtype=torch.uint8))
                self._boxes[other] = self._begin("recv", box, other, _OBJECT)

    def give(self, values: Mapping[int, Any]) -> None:
        """Send objects to members, which `take` them."""
        kept = [(to, _to_send(value)) for to, value in values.items()]
        for to, parts in kept:
            self._send_object(parts, to)
        self.wait()

    def take(self, origin: int) -> Any:
        """Receive an object that a member gives."""
        self.open()
        # Not for what is sent: the rest of that is asked for by a receiver that may wait for this member's.
        self.wait([(origin, self._boxes.pop(origin))], kind=origin)
        elements: Any = self._memory[origin].numpy()
        box = memoryview(elements)
        (length,) = _LENGTH.unpack_from(box)
        head = box[_LENGTH.size : _LENGTH.size + length]
        if length == len(head):
            return pickle.loads(head)
        rest = torch.empty(length - len(head), dtype=torch.uint8)
        self.wait([self.receive(rest, origin, _REST)])
        return pickle.loads(head.tobytes() + rest.numpy().tobytes())

    def _send_object(self, parts: Sequence[torch.Tensor], to: int) -> None:
        for part, tag in zip(parts, (_OBJECT, _REST), strict=False):
            self.send(part, to, tag)

    # ---- the end

    def stop(self) -> None:
        """Make a blocked `wait` raise `BatchoptError`."""
        self._waiter.stop("this BatchOptimizer was closed while it waited for other nodes")

    @property
    def is_open(self) -> bool:
        """Tell whether this member still belongs to the group."""
        return self._group is not None

    def abort(self) -> None:
        """Make every wait raise `NodeLostError`, here and on members that wait for this one."""
        group = self._group
        for other in self.others if group is not None else ():
            try:
                never = group.recv([torch.empty(1, device="cpu")], other, _NEVER)
            except RuntimeError:  # the other member is gone
                continue
            # If a receive times out, gloo ends all connections of the group: there is no other way to end a wait.
            with suppress(RuntimeError):
                never.wait(timedelta(milliseconds=1))
            return

    def close(self) -> None:
        """Leave the group; members that wait for this one are notified."""
        self.abort()
        self._group, self._posted, self._boxes = None, [], {}
        self._waiter.end()


class _Pickler(pickle.Pickler):
    """Writes of tensors only their elements: that takes a tenth of the time, and is all that is needed here."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        elements: Any = octets(obj).numpy()
        return read_tensor, (pickle.PickleBuffer(elements), obj.dtype, tuple(obj.shape))


def read_tensor(elements: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with these elements, in row-major order."""
    if not elements:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(elements, dtype=dtype).view(shape)


def pickled(value: Any) -> memoryview:
    """Pickle an object, with room for its length before it."""
    file = io.BytesIO()
    file.write(bytes(_LENGTH.size))
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getbuffer()


def _packed(value: Any) -> bytes:
    """Pickle an object that is to be sent inside others."""
    return bytes(pickled(value)[_LENGTH.size :])  # a PickleBuffer in a traceback's cycle crashes Python 3.11


def _to_send(value: Any) -> list[torch.Tensor]:
    """Return a pickled object with its length before it: as much of it as fits in an inbox, and the rest, if there is
    any."""
    data = pickled(value)
    _LENGTH.pack_into(data, 0, len(data) - _LENGTH.size)
    whole = torch.frombuffer(data, dtype=torch.uint8)
    return [whole[:BLOCK], whole[BLOCK:]] if len(whole) > BLOCK else [whole]


def _gloo(store: Any, place: int, size: int, timeout: float, host: str) -> Any:
    """Create a private gloo group over this store, which is not registered with torch.distributed."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    device = kind.create_device(interface=interface) if interface else kind.create_device(hostname=host)
    options._timeout, options._devices, options._threads = timedelta(seconds=timeout), [device], 1
    return kind(store, place, size, options)


def address_towards(host: str) -> str:
    """Return the address of this machine as seen from another one."""
    kind, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as way:
        way.connect(address)  # sends nothing
        found: str = way.getsockname()[0]
        return found
