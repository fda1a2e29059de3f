"""Batches of any data given to `fit`, with a position from which a run resumes exactly."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from batchopt.extending import Batches, LoaderSource


def batches_of(data: Any, seed: int) -> Batches:
    """Return `data` itself if it is `Batches`, else `Batches` of it: one batch of tensors and datasets; those of a
    loader, in an order that depends on `seed` and the epoch alone."""
    if isinstance(data, Batches):
        return data
    batches = Batches(data)
    return Batches(source=SeededLoader(data, seed)) if isinstance(batches.source, LoaderSource) else batches


class SeededLoader(LoaderSource):
    """The batches of a loader, with seeded draws. Draws from the loader's generators and from those of this process are
    seeded: by the epoch for its order, and also by the batch for the processing of samples in this process. The
    generators of the process are restored; those of the loader are not. A position is found by reading and skipping."""

    def __init__(self, loader: Iterable[Any], seed: int) -> None:
        super().__init__(loader)
        self._seed = seed

    def read(self, epoch: int, start: int) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of an epoch from number `start` on, each with a flag that marks the last one."""
        for number, generator in enumerate(generators_of(self.loader)):
            generator.manual_seed(_derived(self._seed, epoch, number))
        for sampler in _samplers(self.loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        with _with_generators(_samplers(self.loader), _derived(self._seed, epoch)):
            yield from self._read(epoch, start)

    def _read(self, epoch: int, start: int) -> Iterator[tuple[Any, bool]]:
        with seeded(_derived(self._seed, epoch)):
            batches = self.batches()
        nothing, number = object(), 0
        ahead = self._drawn(batches, epoch)
        batch = next(ahead, nothing)
        while batch is not nothing:
            following = next(ahead, nothing)
            if number >= start:
                yield batch, following is nothing
            number, batch = number + 1, following
        if number <= start:
            raise ValueError(f"the loader ({type(self.loader).__name__}) has no batch {start} in epoch {epoch}")

    def _drawn(self, batches: Iterator[Any], epoch: int) -> Iterator[Any]:
        nothing, number = object(), 0
        generators = generators_of(self.loader)  # other iterators over the loader may draw from them too
        states = [generator.get_state() for generator in generators]
        while True:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            with seeded(_derived(self._seed, epoch, number)):
                batch = next(batches, nothing)
            states = [generator.get_state() for generator in generators]
            if batch is nothing:
                return
            yield batch
            number += 1

    def identity(self) -> dict[str, int]:
        """Return what determines the order, including the seed."""
        return {**super().identity(), "seed": self._seed}


def _samplers(loader: Any) -> list[Any]:
    found = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    found += [getattr(sampler, "sampler", None) for sampler in found]
    return [sampler for number, sampler in enumerate(found) if sampler is not None and sampler not in found[:number]]


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader or its samplers were given, each once."""
    found: list[torch.Generator] = []
    for owner in (loader, *_samplers(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found


@contextmanager
def _with_generators(samplers: list[Any], seed: int) -> Iterator[None]:
    """Give samplers that draw from the process's generators their own in the body, so that draws do not depend on the
    number of the loader's workers."""
    without = [sampler for sampler in samplers if getattr(sampler, "generator", sampler) is None]
    for sampler in without:
        sampler.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        for sampler in without:
            sampler.generator = None


def _derived(*numbers: int) -> int:
    digest = hashlib.blake2b(b"".join(struct.pack("<Q", n % 2**64) for n in numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch, NumPy and `random` of this process, on the CPU, in the body, and restore them."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])
