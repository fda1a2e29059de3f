"""Reading data as a batch: by the rules of each term, which depend on the current criterion."""

from __future__ import annotations

from typing import Any

import torch

from batchopt._data.batches import BatchSpecs, read_batch
from batchopt._data.denominators import marks_of
from batchopt._data.forms import BatchForm, with_form
from batchopt._engine.settings import Settings
from batchopt._engine.workers import Workers
from batchopt_workers.batch.batch import Batch


class BatchReader:
    """Reads the user's data for these workers; `terms` are those of f, with their current weights."""

    def __init__(self, settings: Settings, workers: Workers, device: torch.device) -> None:
        self._settings, self._workers, self._device = settings, workers, device
        self.terms = settings.terms
        self._read: tuple[Any, BatchSpecs] | None = None  # cached with its key
        self._form: tuple[BatchSpecs, BatchForm] | None = None  # of the last batch read

    @property
    def specs(self) -> BatchSpecs:
        """The rules by which data becomes a batch, by term name; the same object as long as nothing changes."""
        marks = marks_of(self._settings.criterion), self._workers.alone
        if self._read is None or self._read[0] != marks:
            at = self._device
            self._read = marks, self._settings.specs(None if self._workers.alone else at, at)
        return self._read[1]

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each term in f, for the batch that is loaded next; `(1.0,)` without terms."""
        return (1.0,) if self.terms is None else tuple(term.weight for term in self.terms.values())

    def read(self, inputs: Any, targets: Any, options: Any) -> Batch:
        """Return the batch, in the form of the previous one if it fits. Raises what `read_batch` raises."""
        specs = self.specs
        if self._form is not None and self._form[0] is specs and options is None:
            batch = self._form[1].filled(inputs, targets, specs[None])
            if batch is not None:
                return batch
        batch = with_form(read_batch(inputs, targets, options, specs))
        self._form = None if batch.plain is None or None not in specs else (specs, batch.plain.form)
        return batch
