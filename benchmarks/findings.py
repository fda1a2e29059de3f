"""What a benchmark found, beside what it should find: a table for people, JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Finding:
    """A number, and the bound that it should keep: `most`, or `least`, or none."""

    question: str
    value: float
    unit: str = ""
    most: float | None = None
    least: float | None = None

    @property
    def target(self) -> str:
        """The bound in words."""
        if self.most is not None:
            return f"<= {self.most:g} {self.unit}".strip()
        return "" if self.least is None else f">= {self.least:g} {self.unit}".strip()

    @property
    def verdict(self) -> str:
        """Whether the target is met."""
        if self.most is None and self.least is None:
            return ""
        kept = (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)
        return "met" if kept else "NOT MET"


def machine() -> str:
    """This machine, as far as it matters."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores; {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"


def table(findings: Sequence[Finding]) -> str:
    """One line a finding."""
    lines = []
    for f in findings:
        lines.append(f"{f.question:64}{f'{f.value:.4g} {f.unit}'.strip():>14}{f.target:>14}  {f.verdict}".rstrip())
    return "\n".join(lines)


def publish(name: str, findings: Sequence[Finding], details: Mapping[str, Any]) -> None:
    """Print the findings, and write them with `details` to `results/<name>.json`."""
    print(table(findings), flush=True)
    write(name, findings, details)


def write(name: str, findings: Sequence[Finding], details: Mapping[str, Any]) -> None:
    """Write them without a word, and each list of numbers on one line."""
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine(), "findings": [asdict(f) for f in findings], "details": details}
    text = re.sub(r"\[[^][{}\"]+\]", lambda found: " ".join(found[0].split()), json.dumps(content, indent=1))
    (RESULTS / f"{name}.json").write_text(text + "\n")


def read(name: str) -> list[Finding]:
    """The findings that were published last; none if it never ran, or keeps results of another kind."""
    path = RESULTS / f"{name}.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    return [Finding(**f) for f in content["findings"]] if "findings" in content else []


def main() -> None:
    """Print all findings that were published last."""
    print(machine())
    for path in sorted(RESULTS.glob("*.json")):
        if findings := read(path.stem):
            print(f"\n{path.stem}\n{table(findings)}")


if __name__ == "__main__":
    main()
