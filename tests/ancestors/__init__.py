"""What the systems that batchopt descends from let people do, tried against it: the rows of docs/ancestors.md."""

import batchopt.ignite  # noqa: F401  # before ignite itself, whose import warns
