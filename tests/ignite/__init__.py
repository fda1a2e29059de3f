"""The training loop on pytorch-ignite."""

import batchopt.ignite  # noqa: F401  # before ignite itself, whose import warns
