"""How long does it take until four workers can work, against one `import torch`?

Both in fresh processes, in turn. The second start in a process is there for comparison.

    python -m benchmarks.startup [--workers 4] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from benchmarks.findings import Finding, publish

IMPORT = "import time; started = time.perf_counter(); import torch; print(time.perf_counter() - started)"
START = """
import time, torch, batchopt
for _ in range(2):
    started = time.perf_counter()
    opt = batchopt.BatchOptimizer(torch.nn.Linear(1, 1), torch.nn.MSELoss(), parallelize={workers})
    print(time.perf_counter() - started)
    opt.close()
"""


def run(script: str) -> list[float]:
    """The numbers that the script prints, in a fresh process."""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [float(line) for line in ended.stdout.split()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    imports, starts = [], []
    for turn in range(given.rounds + 1):
        imported, started = run(IMPORT), run(START.format(workers=given.workers))
        if turn:  # the first finds a cold disk
            imports += imported
            starts.append(started)
    one_import = statistics.median(imports)
    first, second = (statistics.median(start[i] for start in starts) for i in (0, 1))
    findings = [
        Finding("one import of torch", one_import, "s"),
        Finding(f"start of {given.workers} workers", first, "s"),
        Finding("the same, the second time in a process", second, "s"),
        Finding(f"start of {given.workers} workers / one import of torch", first / one_import, most=2.5),
    ]
    publish("startup", findings, {"imports": imports, "starts": starts})


if __name__ == "__main__":
    main()
