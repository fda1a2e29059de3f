"""The versions that parent and worker must have in common to understand each other and to compute the same results."""

from __future__ import annotations

import hashlib
import platform
from functools import lru_cache
from pathlib import Path

import cloudpickle
import torch


@lru_cache(maxsize=1)
def versions() -> str:
    """Return those of Python, torch, cloudpickle, and a hash of this package's current text."""
    text = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        text.update(path.read_bytes())
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, cloudpickle {cloudpickle.__version__}, "
        f"batchopt_workers {text.hexdigest()[:12]}"
    )
