"""Checkpoints: everything comes back bit for bit, and the old file outlives whatever happens to the new one."""

from __future__ import annotations

import enum
import errno
import hashlib
import math
import os
import pickle
import random
import resource
import stat
import struct
import subprocess
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchopt import LBFGS, BatchOptimizer, Term
from batchopt._engine import checkpoint
from batchopt.errors import CheckpointError
from batchopt_workers.life import faults
from batchopt_workers.wire.layout import Layout
from tests.workers.test_memory import limited
from tests.workloads import misfit, size

LAYOUT = Layout.of([("fc.weight", torch.zeros(10, 4)), ("fc.bias", torch.zeros(10))], torch.float32)
POINTS = ["start", "writing", "sync", "replace", "replaced"]
OLD, NEW = {"x": torch.full((1000,), 1.0)}, {"x": torch.full((1000,), 2.0)}


def octets(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return values.view(torch.uint8).numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal in every type, key, dtype, shape and bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and octets(one) == octets(other)
    if isinstance(one, dict):
        attributes = not isinstance(one, OrderedDict) or same(vars(one), vars(other))
        return attributes and same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return pickle.dumps(one) == pickle.dumps(other)


def written(path: Path, state: dict[str, Any], layout: Layout = LAYOUT) -> dict[str, Any]:
    checkpoint.write(path, state, layout)
    return checkpoint.read(path, layout)


def shared_lists(levels: int) -> list[Any]:
    """A list that holds the same list twice, which holds the same list twice, …"""
    found: list[Any] = [1.0]
    for _ in range(levels):
        found = [found, found]
    return found


def temporaries(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.name.endswith(".tmp")]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of OLD, alone in its folder."""
    path = tmp_path / "run.pt"
    checkpoint.write(path, OLD, LAYOUT)
    return path


def at(point: str, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have `action` run once, at the fault point; returns the list that will tell whether it did."""
    reached: list[str] = []

    def hook(name: str, chunk: int) -> None:
        if name == f"checkpoint.{point}" and not reached:
            reached.append(name)
            action()

    monkeypatch.setattr(faults, "hook", hook)
    return reached


# What comes back.


def test_the_file_is_plain_for_torch(saved: Path) -> None:
    content = torch.load(saved, weights_only=True)
    assert list(content) == ["format", "version", "layout", "dtype", "state", "sha256"]
    assert (content["format"], content["version"], content["dtype"]) == ("batchopt checkpoint", 1, "float32")
    assert content["layout"] == [["fc.weight", [10, 4]], ["fc.bias", [10]]]
    assert same(content["state"], OLD)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def in_parts(dtype: torch.dtype) -> list[torch.Tensor]:
    """All bit patterns of a dtype, and views of them."""
    bits = torch.ones(96).byte() if dtype is torch.bool else torch.arange(96, dtype=torch.uint8) + 160
    matrix = bits.view(dtype).view(2, -1)
    return [bits.view(dtype), matrix.clone(), matrix[:, 1::2], matrix[1, :1]]


def odd_states() -> dict[str, Any]:
    """Two dtypes over one storage among them, which torch.save refuses."""
    big, waves = torch.randn(20, 30), torch.randn(3, dtype=torch.complex64)
    linear = nn.Linear(2, 1).state_dict()  # `_metadata` is what load_state_dict looks versions up in
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0123))[0]
    return {
        "numbers": [2**63, -(2**64), 2**2039 - 1, 1 - 2**2039, math.inf, payload, -payload, -0.0, 5e-324],
        "others": ["", "\n", "\0", "é", "\ud800", "x" * 70_000, True, 1, 1.0, None, shared_lists(5), [()] * 3],
        "a module": linear,
        **{str(dtype): in_parts(dtype) for dtype in DTYPES},
        "transposed": big.T,
        "expanded": torch.randn(3, 1).expand(3, 4),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "number": torch.tensor(2.5),
        "no rows": torch.empty(0, 7),
        "waves": waves,
        "conjugates": waves.conj(),
        "imaginary": waves.imag,
        "negative imaginary": waves.conj().imag,
        "negative": torch._neg_view(torch.randn(3)),
        "with a gradient": torch.randn(3, requires_grad=True) * 2,
        "payloads": torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32),
        "all": big,
        "all, as integers": big.view(torch.int32),
    }


def test_odd_states_come_back_alone_and_together(tmp_path: Path) -> None:
    state = odd_states()
    for some in [*({name: value} for name, value in state.items()), state]:
        loaded = written(tmp_path / "run.pt", some)
        assert same(loaded, some), list(some)
        assert not any(marks(loaded))


def marks(state: dict[str, Any]) -> list[bool]:
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.requires_grad or tensor.is_conj() or tensor.is_neg() for tensor in tensors]


def test_a_view_does_not_drag_its_storage_along_and_a_shared_part_is_stored_once(tmp_path: Path) -> None:
    vector = torch.zeros(1_000_000)
    path = tmp_path / "run.pt"
    checkpoint.write(path, {"view": vector[5:8]}, LAYOUT)
    assert path.stat().st_size < 10_000
    tied = {"encoder": vector[:50_000].view(500, 100), "decoder": vector[:50_000].view(500, 100)}
    checkpoint.write(path, tied, LAYOUT)
    assert 200_000 < path.stat().st_size < 210_000
    assert same(checkpoint.read(path, LAYOUT), tied)


# What is refused before anything is written.


U4 = torch.uint4  # type: ignore[attr-defined]
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


class Foo:
    pass


class Tagged(torch.Tensor):
    pass


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


def noted() -> OrderedDict[str, int]:
    """With an attribute, as a state_dict has."""
    found: OrderedDict[str, int] = OrderedDict(a=1)
    found._metadata = {"hook": Foo()}  # type: ignore[attr-defined]
    return found


IN_X = "['optimizer']['state'][0]['x'][1][0]"
NOT_PLAIN: list[tuple[Any, str]] = [
    (Foo(), " is a Foo, not plain data"),
    *((Foo, " is a type,"), (len, " is a builtin_function_or_method,"), (lambda: 0, " is a function,")),
    *((np.complex64(1.0), " is a complex,"), (np.datetime64(1, "s"), " is a datetime,"), (1j, " is a complex,")),
    *((np.zeros(2), " is a ndarray,"), (nn.Parameter(torch.zeros(2)), " is a Parameter,")),
    *((torch.zeros(2).as_subclass(Tagged), " is a Tagged,"), (torch.float32, " is a dtype,")),
    *((torch.Size([1]), " is a Size,"), (Pair(1, 2), " is a Pair,"), (Colour.RED, " is a Colour,")),
    *(({1, 2}, " is a set,"), (b"bytes", " is a bytes,"), (2**2039, " is a int, not plain data")),
    *((torch.zeros(2, 2).to_sparse(), " is a Tensor,"), (torch.zeros(2, device="meta"), " is a Tensor,")),
    *((ENDLESS, "RecursionError"), (shared_lists(60), "in too many places"), (torch.empty(4, dtype=U4), "uint4")),
]


def test_what_is_not_plain_data_is_named_and_nothing_is_written(saved: Path) -> None:
    before = sha256(saved)
    for value, complaint in NOT_PLAIN:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.write(saved, {"optimizer": {"state": {0: {"x": (1, [value])}}}}, LAYOUT)
        assert str(caught.value).startswith(f"cannot write checkpoint '{saved}': ") and complaint in str(caught.value)
        if complaint.startswith(" "):
            assert f"{IN_X}{complaint}" in str(caught.value)
            assert caught.value.__cause__ is None and caught.value.__suppress_context__  # one error, not a chain
        assert os.listdir(saved.parent) == ["run.pt"] and sha256(saved) == before
    for keys, complaint in (({2**30_000: 3}, "a key of .* is a int"), (noted(), r"vars\(.*\['hook'\] is a Foo")):
        with pytest.raises(CheckpointError, match=complaint):
            checkpoint.write(saved, {"x": keys}, LAYOUT)
    assert os.listdir(saved.parent) == ["run.pt"] and sha256(saved) == before


# What is refused when it is read.


def rewritten(path: Path, **changes: Any) -> None:
    """Change some entries of the file behind the back of the library."""
    torch.save({**torch.load(path, weights_only=True), **changes}, path)


def test_every_flipped_bit_that_matters_is_found(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.25, 3e-39])
    state = {"module": OrderedDict(w=values, n=torch.tensor(7)), "seed": 3, "speeds": [0.5, True, None]}
    path = tmp_path / "run.pt"
    checkpoint.write(path, state, LAYOUT)
    intact = path.read_bytes()
    start = 8 * intact.index(octets(values))
    data = range(start, start + 8 * len(octets(values)))
    others = random.Random(0).sample(range(8 * len(intact)), 500)
    found = 0
    for bit in [*data, *others]:
        damaged = bytearray(intact)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            # padding and most of the zip archive's own notes say nothing about the state
            loaded = checkpoint.read(path, LAYOUT)
            assert same(loaded, state) and not any(marks(loaded["module"])), bit
            assert bit not in data
        except CheckpointError:
            found += 1
    assert found > len(data) + 100


def test_a_truncated_file_is_refused(saved: Path) -> None:
    intact = saved.read_bytes()
    lengths = {0, 1, 3, 4, 5, len(intact) - 1, *random.Random(0).sample(range(len(intact)), 80)}
    for length in lengths:
        saved.write_bytes(intact[:length])
        with pytest.raises(CheckpointError, match=r"damaged|not a checkpoint of batchopt"):
            checkpoint.read(saved, LAYOUT)


def test_each_part_of_the_content_is_under_the_digest(saved: Path) -> None:
    noted = OrderedDict(a=1)
    noted._metadata = {"version": 2}  # type: ignore[attr-defined]
    numbers = torch.tensor([1.0, -0.0])
    states: list[tuple[Any, Any]] = [
        *(
            (numbers, other)
            for other in (numbers.double(), numbers.view(torch.int32), numbers.view(2, 1), numbers.abs())
        ),
        *((1, other) for other in (2, 1.0, True, "1", None)),
        *((0.0, -0.0), ([1], (1,)), ([1, [2]], [[1], 2])),
        *(({"a": 1, "b": 2}, other) for other in ({"b": 2, "a": 1}, {"a": 1, "c": 2}, ["a", 1, "b", 2])),
        *((noted, other) for other in (OrderedDict(noted), dict(noted))),
    ]
    for one, other in states:
        for before, after in [(one, other), (other, one)]:
            checkpoint.write(saved, {"x": before}, LAYOUT)
            rewritten(saved, state={"x": after})
            with pytest.raises(CheckpointError, match=r"it is damaged: .*sha256"):
                checkpoint.read(saved, LAYOUT)
    headers: list[dict[str, Any]] = [
        {"layout": [["fc.weight", [10, 4]], ["fc.bias", [11]]]},
        *({"dtype": "float64"}, {"version": 0}, {"sha256": "0" * 64}, {"more": 1}),
    ]
    for changes in headers:
        checkpoint.write(saved, OLD, LAYOUT)
        rewritten(saved, **changes)
        with pytest.raises(CheckpointError, match=r"it is damaged: .*sha256"):
            checkpoint.read(saved, LAYOUT)


class Bomb:
    """Makes a folder when it is unpickled with code allowed."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_bomb_does_not_go_off(saved: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    marker = saved.parent / "marker"
    content = {**torch.load(saved, weights_only=True), "state": Bomb(marker)}
    torch.save(content, saved, _use_new_zipfile_serialization=zipped)
    torch.load(saved, weights_only=False)
    marker.rmdir()  # so it is live
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(CheckpointError, match="not a checkpoint of batchopt"):
        checkpoint.read(saved, LAYOUT)
    assert not marker.exists()


def contents(saved: Path) -> list[tuple[Any, str]]:
    """What a file may hold that is no checkpoint, and what is said of it."""
    content = torch.load(saved, weights_only=True)
    huge = OLD["x"].as_strided((2**40,), (0,))
    others = [torch.zeros(3), {"state": 1}, {"format": "safe"}, {"format": torch.zeros(2)}, []]
    own = {"format": "batchopt checkpoint"}
    return [
        *(
            ({**content, "state": {"x": x}}, "is a (set|Tensor|Parameter), not")
            for x in ({1}, nn.Parameter(OLD["x"]), huge)
        ),
        ({**content, "state": {"x": torch.zeros(9)[::2]}}, "it is damaged"),
        *((other, "it is not a checkpoint") for other in others),
        *((some, "it is damaged, or not a checkpoint") for some in (own, {**own, "version": "one"})),
        ({**content, "version": 2}, "it is of version 2, and this batchopt reads up to 1"),
        ({**content, "state": {"x": shared_lists(90)}}, "in too many places"),
    ]


def test_another_file_is_not_taken_for_a_checkpoint(saved: Path) -> None:
    for content, words in contents(saved):
        torch.save(content, saved)
        with pytest.raises(CheckpointError, match=f"cannot read checkpoint '{saved}': .*{words}"):
            checkpoint.read(saved, LAYOUT)
    saved.write_text("fc.weight: 1.0\n")
    with pytest.raises(CheckpointError, match="it is not a checkpoint of batchopt"):
        checkpoint.read(saved, LAYOUT)


def test_a_checkpoint_of_another_model_says_what_differs(saved: Path) -> None:
    weight, bias = ("fc.weight", (10, 4)), ("fc.bias", (10,))
    layouts: list[tuple[list[tuple[str, tuple[int, ...]]], torch.dtype, str]] = [
        ([("fc.weight", (10, 8)), bias], torch.float32, "'fc.weight' is (10, 8) here and (10, 4) in the file"),
        ([weight], torch.float32, "'fc.bias' is missing here and (10,) in the file"),
        ([weight, bias, ("x", ())], torch.float32, "'x' is () here and missing in the file"),
        ([bias, weight], torch.float32, "the same parameters are in another order in the file"),
        ([weight, bias], torch.float64, "'dtype of all' is float64 here and float32 in the file"),
    ]
    for slots, dtype, message in layouts:
        layout = Layout.of([(name, torch.zeros(shape)) for name, shape in slots], dtype)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.read(saved, layout)
        assert str(caught.value) == f"cannot read checkpoint '{saved}': 1 parts of the layout differ: {message}"


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    for name, reason in [
        ("none.pt", os.strerror(errno.ENOENT)),
        (".", os.strerror(errno.EISDIR)),
        ("pipe", "it is not a checkpoint"),
    ]:
        with pytest.raises(CheckpointError, match=f"cannot read checkpoint '{tmp_path / name}': .*{reason}"):
            checkpoint.read(tmp_path / name, LAYOUT)


# What happens to the old file.


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("point", POINTS)
def test_a_write_that_ends_in_the_middle_leaves_the_old_file(
    saved: Path, monkeypatch: pytest.MonkeyPatch, point: str, error: BaseException
) -> None:
    """So it is at any moment: what a process leaves that is killed there, beside a temporary file."""
    expected = NEW if point == "replaced" else OLD
    seen: list[Any] = []

    def fail() -> None:
        seen.extend([checkpoint.read(saved, LAYOUT), len(temporaries(saved.parent))])
        raise error

    at(point, fail, monkeypatch)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        checkpoint.write(saved, NEW, LAYOUT)
    assert same(seen, [expected, int(point in ("writing", "sync", "replace"))])
    if isinstance(error, OSError):
        assert str(caught.value) == f"cannot write checkpoint '{saved}': OSError: [Errno 28] No space left on device"
        assert isinstance(caught.value.__cause__, OSError)
    assert os.listdir(saved.parent) == ["run.pt"]
    assert same(checkpoint.read(saved, LAYOUT), expected)


def test_a_file_that_may_not_grow_leaves_the_old_one(saved: Path) -> None:
    with limited(resource.RLIMIT_FSIZE, saved.stat().st_size - 1):
        with pytest.raises(CheckpointError, match=f"cannot write checkpoint '{saved}': .* File too large"):
            checkpoint.write(saved, NEW, LAYOUT)
    assert os.listdir(saved.parent) == ["run.pt"] and same(checkpoint.read(saved, LAYOUT), OLD)


def test_what_a_living_process_writes_stays_and_what_a_dead_one_left_goes(saved: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper, subprocess.Popen(["true"]) as ended:
        ended.wait()
        name = ".run.pt.{}.0123abce.0.tmp".format
        living = [name(sleeper.pid)]
        dead = [name(ended.pid), name(os.getpid())]  # one of a process with the number of this one
        others = [f".other.pt.{ended.pid}.0123abce.0.tmp", f"{name(ended.pid)}.pt", ".run.pt.x.0123abce.0.tmp"]
        for entry in [*living, *dead, *others]:
            (saved.parent / entry).touch()
        checkpoint.write(saved, NEW, LAYOUT)
        assert set(os.listdir(saved.parent)) == {"run.pt", *living, *others}
        sleeper.kill()
        sleeper.wait()
        checkpoint.write(saved, NEW, LAYOUT)
        assert set(os.listdir(saved.parent)) == {"run.pt", *others}


def test_a_write_within_a_write_harms_neither(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a handler of SIGTERM that saves, and threads that save at once
    seen: list[dict[str, Any]] = []

    def inner() -> None:
        checkpoint.write(saved, NEW, LAYOUT)
        seen.append(checkpoint.read(saved, LAYOUT))

    assert at("writing", inner, monkeypatch) == []
    checkpoint.write(saved, OLD, LAYOUT)
    assert same(seen, [NEW])
    assert same(checkpoint.read(saved, LAYOUT), OLD)
    assert os.listdir(saved.parent) == ["run.pt"]


def test_the_file_is_synced_then_renamed_then_its_folder_synced(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        status = os.fstat(fd)
        events.append("sync folder" if stat.S_ISDIR(status.st_mode) else f"sync {status.st_size > 4000}")
        sync(fd)

    def renamed(*arguments: Any, **more: Any) -> None:
        events.append("rename")
        replace(*arguments, **more)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    checkpoint.write(saved, NEW, LAYOUT)
    assert events == ["sync True", "rename", "sync folder"]


# Where it may be written.


def test_a_path_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(os.listdir(tmp_path))
    for name, reason in [
        ("folder", "it is not a regular file"),
        ("none/run.pt", f"No such file or directory: '{tmp_path}/none'"),
        ("file/run.pt", "Not a directory"),
        ("pipe", "it is not a regular file"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 256, "File name too long"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.write(tmp_path / name, NEW, LAYOUT)
        assert str(caught.value).startswith(f"cannot write checkpoint '{tmp_path / name}': ")
        assert reason in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    target, link = tmp_path / "runs" / "7.pt", tmp_path / "latest.pt"
    checkpoint.write(target, OLD, LAYOUT)
    link.symlink_to("runs/7.pt")
    checkpoint.write(link, NEW, LAYOUT)
    assert link.is_symlink() and not target.is_symlink()
    assert same(checkpoint.read(target, LAYOUT), NEW) and os.listdir(tmp_path / "runs") == ["7.pt"]


def test_a_new_file_is_private_and_an_old_one_keeps_its_mode(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    saved.chmod(0o664)
    modes: list[int] = []

    def look() -> None:
        [temporary] = temporaries(saved.parent)
        modes.append(stat.S_IMODE((saved.parent / temporary).stat().st_mode))

    at("writing", look, monkeypatch)
    checkpoint.write(saved, NEW, LAYOUT)
    assert modes == [0o600]
    assert stat.S_IMODE(saved.stat().st_mode) == 0o664
    saved.chmod(0o6755)
    checkpoint.write(saved, NEW, LAYOUT)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o755  # it does not run as its owner


# Of earlier versions.


@pytest.mark.skipif(torch.__version__ < "2.7", reason="dropout draws other numbers there")
@pytest.mark.filterwarnings("ignore:'2' .BatchNorm1d. is in training mode")
def test_a_checkpoint_of_version_0_1_0_is_gone_on_from() -> None:
    """With batch normalisation, dropout, two terms and L-BFGS's memory: this version has this loss two steps later, and
    had 0.124871, as that one, with that one's first steps along the steepest descent (0.116157 with those that changed
    the largest parameter by 0.15 of it)."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1)).double()
    terms = {"data": Term(misfit), "size": Term(size, weight=0.5)}
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).view(20, 3)
    batch = {"data": (x, x.prod(1, keepdim=True)), "size": x[::2]}
    options: dict[str, Any] = {"chunk_size": 5, "seed": 3, "check_cut": False, "parallelize": 2}
    with BatchOptimizer(module, terms=terms, **options) as opt:
        opt.load_checkpoint(Path(__file__).parent / "data" / "checkpoint-0.1.0.pt")
        assert opt.batch_counter == 2
        for _ in range(2):
            opt.step(batch)
        # another processor's rounding moves it by 3e-6; an X that was changed by 1e-14, which begins anew, by 5 %
        assert opt.output == pytest.approx(0.11542648519954715, rel=1e-4)


def test_a_checkpoint_of_version_0_2_0_is_read_and_its_damage_found(tmp_path: Path) -> None:
    """With rows of a history and entries of the user."""
    path = Path(__file__).parent / "data" / "checkpoint-0.2.0.pt"
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(10, 2)
    mine: dict[str, Any] = {}
    with BatchOptimizer(module, nn.MSELoss(), chunk_size=5, history=True, optimizer=lbfgs) as opt:
        opt.load_checkpoint(path, take=mine.update)
        assert same(mine["mine"], [1, (2.5, None), "x", torch.arange(3)])
        assert opt.step(x, x.prod(1, keepdim=True)) == pytest.approx(0.10250975833086605, rel=1e-6)
        content = torch.load(path, weights_only=True)
        for changes in ({"version": 0}, {"state": {**content["state"], "seed": 1}}, {"sha256": "0" * 64}):
            torch.save({**content, **changes}, tmp_path / "run.pt")
            with pytest.raises(CheckpointError, match="it is damaged"):
                opt.load_checkpoint(tmp_path / "run.pt")


def lbfgs(parameters: Any) -> LBFGS:
    return LBFGS(parameters, max_iter=3, history_size=4)
