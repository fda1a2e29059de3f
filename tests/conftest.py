"""What every test must leave as it found it: no process, no shared memory with a name, no listening socket."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from batchopt.backends.process import forkserver
from batchopt.backends.process.group import WorkerGroup

gc.disable()  # collections while thousands of tests are made are a fifth of that time
pytest.register_assert_rewrite("tests.backends.contract")
# A change is tested by the same examples each time, and others are tried each night. No deadline: how long an example
# takes says how busy the machine is.
hypothesis.settings.register_profile("tests", deadline=None, derandomize="BATCHOPT_TEST_RANDOM" not in os.environ)
hypothesis.settings.load_profile("tests")

# Seconds that a process may need to be gone after its optimizer is.
PATIENCE = 30.0
# Folders and files whose tests have a process in common that takes long to start, or a cluster: one process of pytest
# runs all of them.
TOGETHER = {"faults", "nodes", "ranks", "cluster", "test_auto"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one group are one piece of work, and any other test is."""
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = group_of
    return scheduler


def group_of(nodeid: str) -> str:
    """The name of a test's group; its own without one."""
    path = Path(nodeid.partition("::")[0])
    return next(iter(TOGETHER & {path.stem, path.parent.name}), nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the `rows` of a test the first is run more often than the others: these are slow, or, where it is slow, of the
    night."""
    begun = set[str]()
    for item in items:
        marks, test = {mark.name for mark in item.iter_markers()}, item.nodeid.partition("[")[0]
        if "rows" in marks and "nightly" not in marks:
            if test in begun:
                item.add_marker("nightly" if "slow" in marks else "slow")
            begun.add(test)


def pytest_collection_finish() -> None:
    """From here on there is garbage."""
    gc.enable()


def named_memory() -> set[str]:
    """The names in /dev/shm."""
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def shared_memory() -> set[str]:
    """The names in /dev/shm, but for those that programs other than this one have open or map: we make none that lives
    on."""
    names = named_memory()
    return names - of_others() if names else names


def of_others() -> set[str]:
    """The names in /dev/shm that processes have which are neither this one nor its descendants."""
    me = psutil.Process()
    ours = {me.pid, *(child.pid for child in me.children(recursive=True))}
    found: set[str] = set()
    for pid in set(psutil.pids()) - ours:
        with suppress(OSError):
            with open(f"/proc/{pid}/maps") as maps:
                found |= set(re.findall(r" /dev/shm/(\S+)", maps.read()))
            with os.scandir(f"/proc/{pid}/fd") as entries:
                opened = [os.readlink(entry.path) for entry in entries]
            found |= {path.removeprefix("/dev/shm/") for path in opened if path.startswith("/dev/shm/")}
    return found


def sockets(pids: list[int]) -> dict[str, int]:
    """The sockets that the processes have, and whose each is."""
    found = {}
    for pid in pids:
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with suppress(OSError):
                    target = os.readlink(entry.path)
                    if target.startswith("socket:["):
                        found[target[len("socket:[") : -1]] = pid
    return found


def listening(pids: list[int]) -> set[str]:
    """The sockets, TCP and Unix, on which one of the processes listens."""
    return listeners(sockets(pids))


def listeners(inodes: Mapping[str, int]) -> set[str]:
    """Those of the sockets on which somebody listens."""
    found: set[str] = set()
    if not inodes:
        return found
    for kind, state_column, listen, inode_column in (("tcp", 3, "0A", 9), ("tcp6", 3, "0A", 9)):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[state_column] == listen and fields[inode_column] in inodes:
                found.add(f"{kind} {fields[1]} of pid {inodes[fields[inode_column]]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        accepts_connections = int(fields[3], 16) & 0x10000
        if accepts_connections and fields[6] in inodes:
            found.add(f"unix {fields[7:]} of pid {inodes[fields[6]]}")
    return found


def descendants(pid: int) -> set[int]:
    """The processes that it has started, and those that they have."""
    found: set[int] = set()
    with suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"{thread.path}/children") as file:
                found |= set(map(int, file.read().split()))
    return found.union(*map(descendants, found))


def is_fork_server(pid: int) -> bool:
    """Whether it is a process that the next workers may be forked from."""
    return any(server._process.pid == pid for server in forkserver._kept)


@pytest.fixture(scope="session", autouse=True)
def preloaded_workers() -> Iterator[None]:
    """Those of this process are forked from one that has imported what the tests do."""
    with pytest.MonkeyPatch.context() as patch:
        start = forkserver.START.replace("batchopt_workers.life.forkserver", "tests.preload")
        patch.setattr(forkserver, "START", start)
        patch.setattr(forkserver, "STARTING", 240.0)  # it imports more than a user's, beside other tests
        yield


LONG = 0.01


def collect_garbage() -> None:
    """Collect it. What lives on, such as modules and what tests cache, is set aside when there is so much that to look
    at it takes `LONG` seconds; else each test would take longer than the one before."""
    began = time.perf_counter()
    gc.collect()
    if time.perf_counter() - began > LONG:
        gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a child process, a name in /dev/shm, a listening socket or a thread."""
    me = os.getpid()
    names, before, threads = named_memory(), sockets([me]), threading.active_count()
    children = descendants(me)
    yield
    collect_garbage()
    left = []
    for pid in descendants(me) - children:
        with suppress(psutil.NoSuchProcess):
            left += [] if is_fork_server(pid) else [psutil.Process(pid)]
    _, left = psutil.wait_procs(left, timeout=PATIENCE)
    assert not left, f"processes left: {[process.as_dict(['pid', 'ppid', 'cmdline', 'status']) for process in left]}"
    deadline = time.monotonic() + PATIENCE  # what another program makes has nobody for a moment
    while (made := shared_memory() - names) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert not made, f"names left in /dev/shm: {made}"
    new = {inode: pid for inode, pid in sockets([me]).items() if inode not in before}
    assert not listeners(new)
    deadline = time.monotonic() + PATIENCE
    while threading.active_count() > threads and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert threading.active_count() <= threads, threading.enumerate()


@pytest.fixture
def nobody_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is given a chunk evaluates it. On a busy machine a worker may be late, or not yet heard of its last report,
    and another takes its chunks."""
    monkeypatch.setattr("batchopt.backends.process.scheduler.GRACE", 1e9)
    monkeypatch.setattr("batchopt.backends.process.scheduler.WORTHWHILE", 1e9)
    gather = WorkerGroup._gather

    def gather_when_idle(self: WorkerGroup, of: Any, *rest: Any) -> None:
        if not of.scheduler.workers:  # none was rung
            self._pool.wait()
        gather(self, of, *rest)

    monkeypatch.setattr(WorkerGroup, "_gather", gather_when_idle)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
