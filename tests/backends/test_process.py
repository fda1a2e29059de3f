"""The process backend keeps the contract."""

from __future__ import annotations

from tests.backends.contract import Contract


class TestTwoProcesses(Contract):
    """Two workers."""

    backend = "process"
    parallelize = 2
