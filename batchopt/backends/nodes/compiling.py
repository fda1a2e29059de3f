"""Compiled evaluations on nodes: each machine compiles for itself, and the parent names libraries by their keys.

    parent: NodesCompiler ── requests, a field of `Wanted` ──► node: Libraries ──► a process of that machine
            replies of all, merged ◄── Reply (or why not) ─────

A node that came later, or in place of a lost one, has the same requests among what it lacks, and waits for what they
make before it evaluates by it: so it evaluates with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from batchopt._program.compiler import Compiler
from batchopt_workers.shortcuts.form import Artifact, PieceForm, Reply, Request

# Seconds between two questions whether nodes have compiled.
PAUSE = 0.1


class Libraries:
    """The libraries of a node, by their keys, and the process that makes them, one request after the other."""

    def __init__(self) -> None:
        self._compiler = Compiler()
        self._requests: tuple[Request, ...] = ()
        self._replies: dict[Request, Reply | str] = {}
        self._current: Request | None = None  # that is being carried out

    def begin(self, requests: tuple[Request, ...]) -> None:
        """Carry out these requests."""
        self._requests = requests
        if self._current is not None and self._current not in requests:
            self._compiler.close()
            self._current = None
        self.reply(waits=False)

    def reply(self, waits: bool) -> Reply | str | None:
        """Return the reply to the last request, or why there is none; None if it is not there yet, unless it
        `waits`."""
        obstacle = self._compiler.obstacle()
        if obstacle is not None or not self._requests:
            return obstacle or "nothing was requested"
        for request in self._requests:
            if request in self._replies:
                continue
            if self._current is None:
                self._current = request
                self._compiler.request(request)
            found = self._compiler.reply(waits)
            if found is None:
                return None
            self._replies[request], self._current = found, None
        return self._replies[self._requests[-1]]

    def of(self, keys: Sequence[str]) -> tuple[Artifact, ...]:
        """Return the libraries with these keys. Raise `RuntimeError` if one cannot be made here."""
        if not keys:
            return ()
        reply = self.reply(waits=True)
        made = [found for reply in self._replies.values() if isinstance(reply, Reply) for found in reply.found.values()]
        known = {artifact.key: artifact for artifact in made if isinstance(artifact, Artifact)}
        if not known.keys() >= set(keys):
            why = reply if isinstance(reply, str) else "it made something else"
            raise RuntimeError(
                f"a node cannot compile what the others have compiled ({why}): install the same compiler on all, or "
                "leave `compile` out"
            )
        return tuple(known[key] for key in keys)

    def close(self) -> None:
        """End the process."""
        self._compiler.close()
        self._current = None


class NodesCompiler:
    """The compilers of all nodes, as one: see `Compiling`."""

    def __init__(self, begin: Callable[[Request], None], ask: Callable[[], list[Reply | str | None]]) -> None:
        """`begin` has the nodes carry out a request; `ask` returns what each of them has."""
        self._begin, self._ask = begin, ask
        self.is_busy = False

    def obstacle(self) -> str | None:
        """See `Compiling.obstacle`: nodes say it in their replies."""
        return None

    def request(self, request: Request) -> None:
        """See `Compiling.request`."""
        self.is_busy = True
        self._begin(request)

    def reply(self, waits: bool) -> Reply | str | None:
        """See `Compiling.reply`."""
        while True:
            found = merged(self._ask())
            if found is not None or not waits:
                self.is_busy = self.is_busy and found is None
                return found
            time.sleep(PAUSE)

    def close(self) -> None:
        """See `Compiling.close`. Nodes end what nobody needs with the next request, or when they end."""
        self.is_busy = False


def merged(replies: Sequence[Reply | str | None]) -> Reply | str | None:
    """Return the common reply of nodes: for each form the first one's library, if all have made an equal one; else a
    reason. None if one of them has not replied."""
    if any(reply is None for reply in replies):
        return None
    for reply in replies:
        if not isinstance(reply, Reply):
            return reply
    whole = [reply for reply in replies if isinstance(reply, Reply)]
    first, found = whole[0], dict[PieceForm, Artifact | str]()
    for form in first.found:
        of_all = [reply.found.get(form, "a node was asked for something else") for reply in whole]
        reasons = [one for one in of_all if isinstance(one, str)]
        keys = {one.key for one in of_all if isinstance(one, Artifact)}
        differs = "the nodes compile it to different libraries: their processors or compilers differ"
        found[form] = reasons[0] if reasons else first.found[form] if len(keys) == 1 else differs
    return Reply(found, max(reply.seconds for reply in whole))
