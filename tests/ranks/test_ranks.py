"""Several ranks of one script: bits, ranks that come apart or are lost, and whoever starts them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from batchopt import BatchoptError
from batchopt.backends.ranks.launch import Launch, read_launch
from tests.ranks.launch import ROOT, environment, free_port, launch, program, torchrun


@cache
def alone(*arguments: object) -> str:
    """What one process prints."""
    (found,) = program("bits", 1, "process", *arguments, size=1)
    return found


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("width, size", [(3000, 3), (20, 2), (30_000, 2)])
def test_bits_are_those_of_one_process_with_any_number_of_ranks(width: int, size: int) -> None:
    """Short vectors, which go whole, and long ones, in slices."""
    assert set(program("bits", "1,2,1", "ranks", width, size=size)) == {alone(width)}


@pytest.mark.nightly
def test_compiled_evaluations_have_the_bits_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHOPT_CACHE_DIR", str(tmp_path))
    expected = alone(20, "compile")
    assert set(program("bits", "1,2", "ranks", 20, "compile", size=2)) == {expected}
    assert expected != alone(20)


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("seed", "X [0-9a-f]+ on rank 0, [0-9a-f]+ on rank 1; batch of 210 samples"),
        *((how, "batch of 210 samples .* on rank 0, of 210") for how in ("batch", "lists")),
        ("draws", "seed 0 on rank 0, 1 on rank 1"),
        ("calls", "call evaluate on rank 0, run_on_workers on rank 1"),
        ("attribute", "'body.2.p' [0-9a-f]+ on rank 0, [0-9a-f]+ on rank 1"),
        ("frozen", "'scale' [0-9a-f]+ on rank 0, [0-9a-f]+ on rank 1"),
        ("beta", "'criterion.beta' [0-9a-f]+ on rank 0, [0-9a-f]+ on rank 1"),
        ("captured", r"f of the last samples .*\[0.2.* on rank 0, \[0.* on rank 1"),
    ],
)
def test_ranks_that_have_come_apart_say_in_what(how: str, words: str) -> None:
    for line in program("differ", how):
        assert re.match(f"NodesDifferError the ranks have diverged: .*{words}", line), line


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["1,1", "1,2"])
def test_what_forwards_write_and_ids_and_devices_may_differ(workers: str) -> None:
    assert len(set(program("alike", workers))) == len(fingerprints(program("alike", workers)[0])) == 1


@pytest.mark.rows
@pytest.mark.parametrize(("what", "kinds"), [("error", ["WorkerError"] * 2), ("exit", ["WorkerError", "SystemExit"])])
def test_what_one_rank_raises_all_raise_and_go_on(what: str, kinds: list[str]) -> None:
    found = program("raises", what)
    assert [line.split()[0] for line in found] == kinds
    assert found[0].split()[-1] == found[1].split()[-1]


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("when", ["in", "before", "after"])
def test_a_rank_that_is_killed_is_an_error_of_all_others(when: str) -> None:
    for line in program("lost", "kill", when, 60, size=3 if when == "in" else 2, lacking=1):
        assert line.startswith("NodeLostError rank ") and "has ended" in line


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("when", ["in", "before", "after"])
def test_a_rank_that_is_stopped_is_an_error_within_the_timeout(when: str) -> None:
    found = program("lost", "stop", when, 4, lacking=1)
    assert found == ["NodeLostError rank 1 did not respond for 4 s (`timeout`)"]


@pytest.mark.nightly
def test_other_numbers_of_workers_and_two_optimizers() -> None:
    _, bits, workers, _ = program("resized")[0].split()
    assert (bits, workers) == (alone().split()[1], "3")


@pytest.mark.nightly
def test_objects_that_are_longer_than_an_inbox() -> None:
    assert program("large", size=3) == [str(3 * 2**20)] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("compress", ["fp16", "bf16", "2bit"])
def test_compressed_gradients(compress: str) -> None:
    found = program("compressed", compress)
    assert len(set(found)) == 1 and found[0].endswith("True")


# ---- who starts them


@pytest.mark.nightly
def test_a_group_that_the_user_has_made() -> None:
    assert set(program("grouped")) == {alone()}


def fingerprints(printed: str) -> list[str]:
    return re.findall(r"[0-9a-f]{64}", printed)


MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")


@pytest.mark.nightly
def test_a_rank_that_is_killed_and_started_again_by_torchrun_ends_with_the_same_bits(tmp_path: Path) -> None:
    found = []
    for killed in ("", "killed"):
        folder = tmp_path / (killed or "undisturbed")
        folder.mkdir()
        found += fingerprints(
            launch(*torchrun(restarts=2), "-m", "tests.ranks.programs", folder, *[killed] * bool(killed))
        )
        assert len((folder / "log.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "killed" / "killed").exists()
    assert len(found) == 4 and len(set(found)) == 1


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=needs_mpirun)])
def test_the_program_of_the_page_about_clusters(launcher: str, tmp_path: Path) -> None:
    (program,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    printed = launch(*(MPIRUN if launcher == "mpirun" else torchrun()), tmp_path / "train.py")
    losses = [float(line.split()[-1]) for line in printed.splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0] / 100


SRUN = """#!/bin/bash
# Three tasks; the signal goes to one of them only.
shift
export MASTER_PORT=$PORT SLURM_NTASKS=3 SLURM_NTASKS_PER_NODE=3 SLURM_NODELIST=localhost
for i in 0 1 2; do SLURM_PROCID=$i "$@" & tasks+=($!); done
trap 'kill -USR1 ${tasks[1]}' USR1
worst=0
for task in ${tasks[@]}; do
    while kill -0 $task 2> /dev/null; do wait $task; done
    wait $task
    status=$?
    [ $status -gt $worst ] && worst=$status
done
exit $worst
"""


@pytest.mark.nightly
def test_the_job_of_the_page_about_time_limits_goes_on_to_the_bit(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "time-limits.md").read_text()
    program, job = (re.findall(f"```{kind}\\n(.*?)```", page, re.DOTALL)[0] for kind in ("py", "sh"))
    for name, text in {
        "train.py": program.replace("% 50", "% 10"),
        "job.sh": job,
        "bin/srun": SRUN,
        "bin/scontrol": "#!/bin/sh\necho $* > requeued",
        "bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def run(at: str = "") -> tuple[int, str]:
        """Run the job, and signal it once it has printed this."""
        (tmp_path / "requeued").unlink(missing_ok=True)
        common = environment(PATH=path, SLURM_JOB_ID="7", PORT=str(free_port()))
        with subprocess.Popen(
            ["bash", "job.sh"], cwd=tmp_path, env=common, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if at and line.startswith(at):
                    process.send_signal(signal.SIGUSR1)
        requeued = tmp_path / "requeued"
        assert (process.returncode == 75) == requeued.exists(), "".join(lines)
        return process.returncode, "".join(lines)

    def parameters() -> torch.Tensor:
        found: torch.Tensor = torch.load(tmp_path / "run.batchopt")["state"]["optimizer"]["state"][0]["x"]
        return found

    assert run("20 ")[0] == 75
    status, printed = run()
    assert status == 0 and "done" in printed
    pieces = parameters()
    (tmp_path / "run.batchopt").unlink()
    assert run()[0] == 0
    assert torch.equal(pieces, parameters())


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ("RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=5", Launch(1, 4, 2, "a", 5, "0")),
        (
            "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_NTASKS_PER_NODE=4(x2) SLURM_JOB_ID=7 "
            "SLURM_STEP_NODELIST=node[07-12,15],other",
            Launch(3, 8, 4, "node07", 23613, "0"),
        ),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_PORT=9",
            Launch(0, 2, 2, "127.0.0.1", 9, "0"),
        ),
    ],
)
def test_what_launchers_say(says: str, found: Launch) -> None:
    read = read_launch(dict(variable.split("=") for variable in says.split()))
    assert read._replace(port=0) == found._replace(port=0)
    assert read.port == found.port or "SLURM_JOB_ID" in says


def test_without_a_launcher_or_without_an_address() -> None:
    with pytest.raises(BatchoptError, match="needs a script that torchrun, srun or mpirun started"):
        read_launch({})
    names = ("RANK", "SIZE", "LOCAL_SIZE")
    with pytest.raises(BatchoptError, match="MASTER_ADDR is not set"):
        read_launch({f"OMPI_COMM_WORLD_{name}": number for name, number in zip(names, "042", strict=True)})
