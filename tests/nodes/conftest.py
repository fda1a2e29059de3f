"""Processes that become nodes of one test after the other, so that torch is imported once in each."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tests.conftest import PATIENCE, collect_garbage, is_fork_server, named_memory
from tests.nodes import local

# Of each part of the contract some, and what is about losses of workers; the rest is what nodes have in common with
# every other backend.
SOME = re.compile("do_not_depend|failed_step|goes_on_in_one|is_one_error|killed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The rest of the contract is of the night."""
    for item in items:
        if "nodes/test_contract.py" in item.nodeid and not SOME.search(item.name):
            item.add_marker("nightly")


@pytest.fixture(scope="package", autouse=True)
def local_nodes() -> Iterator[None]:
    """The backend has a name, and its processes end with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        local.name(patch)
        yield
        local.end()


def strangers() -> list[psutil.Process]:
    """Children of this process but for nodes that wait for their next test, each with the process that its workers are
    forked from; of these, workers."""
    found = []
    idle = set(local.idle())
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.pid in idle:
                found += [worker for template in child.children() for worker in template.children(recursive=True)]
            elif not is_fork_server(child.pid):
                found.append(child)
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a name in /dev/shm or a thread."""
    before, names, threads = set(strangers()), named_memory(), threading.active_count()
    yield
    collect_garbage()
    _, left = psutil.wait_procs([child for child in strangers() if child not in before], timeout=PATIENCE)
    assert not left, f"processes left: {[process.as_dict(['pid', 'cmdline']) for process in left]}"
    until = time.monotonic() + PATIENCE
    while (named_memory() - names or threading.active_count() > threads) and time.monotonic() < until:
        threading.Event().wait(0.01)
    assert not named_memory() - names and threading.active_count() <= threads
