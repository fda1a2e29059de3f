"""The backends of this machine keep the contract."""

from __future__ import annotations

from tests.backends.contract import Contract


class TestSerial(Contract):
    """`parallelize=1`: this process."""

    backend = "serial"
    parallelize = 1
    processes = False


class TestTwoProcesses(Contract):
    """Two workers."""

    backend = "process"
    parallelize = 2
