"""The ways that are chosen by which times: on machines that were measured, and on computed ones of up to 128 cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt._engine.search import CROSSING, DEVICE, MANY, PATIENCE, START, Search, Way, coordination

ALONE, ONE, TWO = Way(1, None), Way(1, 1), Way(2, 1)
CARD = torch.device("cuda", 0)
ON_CARD, ON_TWO = Way(1, None, (CARD,)), Way(2, None, (CARD, CARD))


def search(cores: int, gradient: int = 0, devices: int = 0) -> Search:
    """A search among the ways on so many cores and devices."""
    halves = [cores >> halved for halved in range(cores.bit_length())]
    here = [ALONE, *(Way(1, threads) for threads in halves[1:])]
    several = [[Way(count, cores // count)] for count in halves if count > 1]
    return Search(ALONE, [here, *several, [ON_CARD, ON_TWO][:devices]], gradient)


def follow(found: Search, seconds: Callable[[Way], float], share: Callable[[Way], float], evaluations: int) -> float:
    """Let it search where an evaluation takes `seconds(way)`, and a worker's share in this process `share(way)`; return
    the seconds of evaluations, shares and starting workers."""
    passed = 0.0
    for _ in range(evaluations):
        way = found.due
        if way is not None and found.unknown:
            assert found.present.is_here  # where shares can be timed
            for one in found.unknown:
                passed += 3 * share(one)
                found.share_took(one, share(one))
        elif way is not None:
            passed += way.price + 2 * seconds(found.present)  # to compare f
            found.begin(way)
        if found.is_over:
            break
        took = seconds(found.present)
        passed += took
        found.took(took)
    return passed


def decide(cores: int, seconds: Mapping[Way, float], share: float, evaluations: int, devices: int = 0) -> Search:
    """The search after so many evaluations."""
    found = search(cores, devices=devices)
    follow(found, lambda way: seconds.get(way, 1.0), lambda way: share, evaluations)
    return found


# ---- two cores


@pytest.mark.parametrize(
    ("seconds", "share", "evaluations", "expected"),
    [
        ({ALONE: 1e-3, ONE: 1.2e-3}, 0.8e-3, 10_000, ALONE),  # what coordination takes is more than what is saved
        ({ALONE: 1e-3, ONE: 0.5e-3, TWO: 0.7e-3}, 0.4e-3, 10_000, ONE),  # threads are in each other's way
        ({ALONE: 0.1, ONE: 0.11, TWO: 0.06}, 0.055, 15, ALONE),  # the program was too short for workers to pay
        ({ALONE: 0.1, ONE: 0.11, TWO: 0.06}, 0.055, 60, TWO),
        ({ALONE: 0.1, ONE: 0.11, TWO: 0.12}, 0.055, 60, ALONE),  # workers were tried, and are in each other's way
    ],
)
def test_choices(seconds: dict[Way, float], share: float, evaluations: int, expected: Way) -> None:
    assert decide(2, seconds, share, evaluations).best == expected


def test_fewer_threads_are_given_up_after_one_evaluation_that_takes_far_longer() -> None:
    """After the first, which warms up."""
    found = decide(2, {ALONE: 10e-3}, 9.9e-3, 0)
    for _ in range(MANY):
        found.took(10e-3)
    assert found.unknown == [TWO]
    found.share_took(TWO, 9.9e-3)
    assert found.due == ONE
    found.begin(ONE)
    found.took(20e-3)
    assert found.present == ONE
    found.took(20e-3)
    assert found.present == ALONE and found.times[ONE] == 20e-3 and found.is_over


def test_what_cannot_be_used_is_tried_again_neither_as_it_is_nor_in_another_number() -> None:
    found = search(4, devices=2)
    for _ in range(4):
        found.took(1.0)
    for one in found.unknown:
        found.share_took(one, 0.2)
    way = found.due
    assert way is not None and way.workers > 1
    found.begin(way)
    found.refuse(way, "it has no file")
    assert found.present == ALONE
    follow(found, lambda way: 0.1 if way.devices else 1.0, lambda way: 0.2, 1000)
    assert found.is_over and found.present == ON_CARD
    assert {tried for tried in found.times if tried.has_shares} == {way} and f"{way} failed" in str(found)


def test_smaller_chunks_are_tried_as_long_as_they_are_faster() -> None:
    for one, two, three, expected in ((4.0, 3.0, 2.0, 20), (4.0, 3.0, 3.5, 80), (4.0, 5.0, 2.0, None)):
        found = Search(TWO, [], 0)
        assert found.is_over
        found.add([TWO, TWO._replace(chunk_size=80), TWO._replace(chunk_size=20)])
        seconds = {TWO: one, TWO._replace(chunk_size=80): two, TWO._replace(chunk_size=20): three}
        follow(found, seconds.__getitem__, lambda way: 0.0, 400)
        assert found.is_over and found.present.chunk_size == expected


# ---- devices


@pytest.mark.parametrize(
    ("seconds", "evaluations", "expected"),
    [
        ({ALONE: 0.1, TWO: 0.06, ON_CARD: 0.01, ON_TWO: 0.02}, 40, TWO),  # its start would not have paid yet
        ({ALONE: 0.1, TWO: 0.06, ON_CARD: 0.01, ON_TWO: 0.02}, 100, ON_CARD),
        ({ALONE: 0.1, TWO: 0.06, ON_CARD: 0.01, ON_TWO: 0.006}, 2000, ON_TWO),
        ({ALONE: 0.1, TWO: 0.06, ON_CARD: 0.09, ON_TWO: 0.1}, 2000, TWO),  # it was tried, and the cores are faster
        ({ALONE: 0.3e-3, ONE: 0.4e-3, TWO: 1.0}, 20_000, ALONE),  # to reach it takes longer
        ({ALONE: 0.5e-3, ONE: 0.6e-3, TWO: 1.0}, 200, ALONE),  # it would pay after too many
    ],
)
def test_choices_among_cores_and_devices(seconds: dict[Way, float], evaluations: int, expected: Way) -> None:
    found = decide(2, seconds, seconds[TWO] / 2, evaluations, devices=2)
    assert found.best == expected
    assert found.is_over or evaluations <= 100  # nothing that is compiled has to wait for it


# ---- machines that were measured, in ms: this process with all threads and with one, then workers on all cores

# Two cores of an Intel Xeon, the functions of benchmarks/results/auto.json.
TWO_CORES = {
    "20-20, 10,000": (1.64, 2.12, 1.61),
    "20 layers of 64, 1,000": (4.43, 6.10, 3.91),
    "20 layers of 64, 20,000": (86.2, 139.6, 72.8),
    "784-256-10, 512": (2.36, 3.74, 2.72),
    "784-256-10, 8,192": (27.4, 54.5, 27.2),
    "1024-1024-1024-10, 256": (12.95, 21.7, 14.1),
    "Burgers, 300": (2.65, 2.59, 2.43),
    "Burgers, 3,000": (7.86, 12.1, 6.47),
    "Burgers, 100,000": (274.0, 492.5, 253.9),
    "convolutions, 64": (4.56, 7.75, 4.80),
    "convolutions, 1,024": (101.0, 193.1, 80.0),
    "GRU, 256 of 30": (17.9, 19.4, 11.3),
    "transformer, 128 of 32": (24.0, 40.7, 20.0),
}


@pytest.mark.parametrize("name", list(TWO_CORES))
def test_on_two_measured_cores_it_is_within_a_tenth_of_the_best(name: str) -> None:
    alone, one, two = (1e-3 * ms for ms in TWO_CORES[name])
    times = {ALONE: alone, ONE: one, TWO: two}
    found = decide(2, times, one / 2, 20_000)
    assert times[found.best] <= 1.1 * min(times.values())


# ---- machines that are computed


class Machine(NamedTuple):
    """A function on `cores` cores, in seconds: `fixed`, whatever is done in an evaluation; `rest`, its samples on one
    thread; `waits` of two threads for each other; the fraction `memory` of the samples' time that all cores need for
    what they read from memory. `gradient`: its bytes; `device`: the seconds of an evaluation there, 0 if there is
    none."""

    cores: int
    fixed: float
    rest: float
    waits: float
    memory: float
    gradient: int
    device: float = 0.0

    def share(self, of: float, threads: int = 1) -> float:
        """Seconds of this fraction of the batch."""
        waits = self.waits * math.log2(threads) * (1 + threads / 32) if threads > 1 else 0.0
        return self.fixed + self.rest * of / threads + waits

    def seconds(self, way: Way) -> float:
        """An evaluation."""
        if way.devices:
            return self.device
        workers, threads = way.workers, way.threads or self.cores
        seconds = self.share(1 / workers, threads)
        if workers * threads > 1:
            seconds = max(seconds, self.memory * self.rest)
        return seconds if workers == 1 else seconds + coordination(workers, self.gradient)

    @property
    def best(self) -> float:
        """Seconds by the fastest way."""
        halves = [self.cores >> k for k in range(self.cores.bit_length())]
        alone = [Way(1, threads) for threads in halves]
        workers = [Way(count, self.cores // count) for count in halves if count > 1]
        return min(self.device or math.inf, *map(self.seconds, [*alone, *workers]))


def decades(least: float, most: float) -> st.SearchStrategy[float]:
    """Numbers between powers of ten."""
    return st.floats(least, most).map(lambda exponent: 10.0**exponent)


MACHINES = st.builds(
    Machine,
    cores=st.sampled_from([2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 96, 128]),
    fixed=decades(-4.5, -1.8),
    rest=decades(-3.5, 1),
    waits=decades(-5, -2),
    memory=st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.4]),
    gradient=st.integers(3, 8).map(lambda exponent: 10**exponent),
    device=st.one_of(st.just(0.0), decades(-3.3, 0)),
)


def search_on(machine: Machine) -> tuple[Search, float, int]:
    """The search there, for at most 3,000 evaluations; their seconds and number."""
    found, passed, evaluations = search(machine.cores, machine.gradient, bool(machine.device)), 0.0, 0
    while not found.is_over and evaluations < 3000:
        passed += follow(found, machine.seconds, lambda way: machine.share(1 / way.workers, way.threads or 1), 1)
        evaluations += 1
    return found, passed, evaluations


@settings(max_examples=40, deadline=None)
@given(machine=MACHINES)
def test_on_computed_machines_trials_cost_no_more_than_they_could_save_and_the_choice_is_good(machine: Machine) -> None:
    found, passed, evaluations = search_on(machine)
    on_device = 2 * DEVICE + machine.device  # it is given up once it took what a start takes
    started = sum(on_device if tried.devices else START for tried in found.times)
    most = 2 * evaluations * machine.seconds(found.best) + 75 * machine.seconds(ALONE) + START + started
    assert passed <= most
    if found.is_over:
        took, best = machine.seconds(found.present), machine.best
        if machine.device and not any(way.devices for way in found.times):  # it could not pay soon
            assert DEVICE > PATIENCE * (took - CROSSING)
            best = machine._replace(device=0.0).best
        assert took <= 1.25 * best
