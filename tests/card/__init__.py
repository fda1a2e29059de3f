"""A device made of this machine's memory, so that what holds for modules on a card is tested where there is none.

    card = tests.card.device()      # torch.device("card:0")
    module.to(card)

To torch it is another device than the CPU: tensors of both in one operation are refused, as a card's driver would.
What a card waits for is counted (`Counts`). What it cannot show is speed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch.utils import backend_registration

SOURCE = Path(__file__).with_name("card.cpp")


class Counts(NamedTuple):
    """What was done on the card: elements read and tensors copied to the CPU, operations, and bytes."""

    reads: int
    kernels: int
    allocated: int
    most: int


class _Card(ModuleType):
    """What torch asks the module of a device."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass  # it draws with the CPU's generator


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_built()))


def _built() -> Path:
    """Return the compiled library, one for each version of torch and of the source."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler, by which the card is built")
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"batchopt-card-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    assert place.stat().st_uid == os.getuid(), f"{place} holds what will run here, and is another user's"
    found, cannot = place / f"card-{key}.so", place / f"card-{key}.cannot"
    if cannot.exists():  # each test would try for ten seconds
        pytest.skip(f"the simulated card cannot be built for torch {torch.__version__}")
    if not found.exists():
        root = Path(torch.__file__).parent
        with tempfile.NamedTemporaryFile(dir=place, suffix=".so", delete=False) as file:
            abi = int(torch.compiled_with_cxx11_abi())
            options = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
            paths = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib"]
            command = [compiler, *options, *paths, str(SOURCE), "-o", file.name, "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            os.unlink(file.name)
            assert tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), done.stderr[-4000:]
            cannot.touch()
            pytest.skip(f"the simulated card cannot be built for torch {torch.__version__}")
        os.replace(file.name, found)
    return found


@functools.cache
def device() -> torch.device:
    """Return the card; build and load it first."""
    library = _library()
    library.card_begin()
    backend_registration.rename_privateuse1_backend("card")
    torch._register_device_module("card", _Card("torch.card"))  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()
    return torch.device("card:0")


def counts() -> Counts:
    """Return what was done since the beginning, and the most bytes since `forget_most`."""
    found = []
    for name in Counts._fields:
        function = getattr(_library(), f"card_{name}")
        function.restype = ctypes.c_int64
        found.append(function())
    return Counts(*found)


def forget_most() -> None:
    """Count the most bytes from here."""
    _library().card_forget_most()


def limit(nbytes: int | None) -> None:
    """Let the card have so many bytes, or any number."""
    _library().card_limit(ctypes.c_int64(-1 if nbytes is None else nbytes))


def free() -> int:
    """Return the bytes that can be allocated."""
    function = _library().card_free
    function.restype = ctypes.c_int64
    return int(function())
