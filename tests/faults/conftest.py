"""Cases are played by one process, and held against one that nothing disturbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import Ended, Fault, Host, Play, play


@pytest.fixture(scope="package")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Plays the cases; what they are forked from is there before the first one, which would seem to leave it."""
    folder = tmp_path_factory.mktemp("host")
    host = Host(folder)
    play(folder / "first", [], host, optimizer="sgd", parallelize=2)
    yield host
    host.end()


@pytest.fixture
def run(tmp_path: Path, host: Host) -> Play:
    """Plays a case in a folder of its own."""

    def play_case(*faults: Fault, **case: Any) -> Ended:
        return play(tmp_path / "run", faults, host, **{"optimizer": "sgd", "parallelize": 2, **case})

    return play_case


@pytest.fixture(scope="package")
def oracle(tmp_path_factory: pytest.TempPathFactory, host: Host) -> Callable[..., Ended]:
    """The run without faults, in one process."""
    known: dict[str, Ended] = {}

    def undisturbed(optimizer: str = "sgd", **case: Any) -> Ended:
        name = f"{optimizer} {case}"
        if name not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[name] = play(folder / "run", [], host, optimizer=optimizer, backend="serial", **case)
            assert "error" not in known[name].outcome, known[name].outcome
        return known[name]

    return undisturbed
