"""What `parallelize="auto"` chooses by which times: on machines that were measured, and on computed ones of up to 128
cores."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt._function import choice
from batchopt._function.choice import Choice, Phase
from batchopt._function.costs import GAIN, Configuration, coordination

ALONE, ONE, TWO = Configuration(1, None), Configuration(1, 1), Configuration(2, 1)


def decide(
    cores: int, threads: int | None, seconds: Callable[[Configuration], float], probe: Any, evaluations: int
) -> Choice:
    """What is chosen where an evaluation by a configuration takes `seconds(configuration)`."""
    found = Choice(cores, threads, 0)
    follow(found, seconds, probe, evaluations)
    return found


def follow(found: Choice, seconds: Callable[[Configuration], float], probe: Any, evaluations: int) -> float:
    """Let it choose; return the seconds of the evaluations and of starting workers."""
    passed = 0.0
    for _ in range(evaluations):
        if found.phase is Phase.PROBE and (found.is_due or not isinstance(probe, tuple)):
            found.probed(*(probe if isinstance(probe, tuple) else (probe, None)))
        if found.pays:
            passed += choice.DEVICE if found.wanted.devices else choice.FIRST if found.wanted.workers > 1 else 0.0
            found.next(found.configuration, movable=True, ready=True)
        took = seconds(found.configuration)
        passed += took
        found.took(took)
    return passed


# ---- two cores


@given(
    times=st.fixed_dictionaries({name: st.floats(1e-4, 1.0) for name in (ALONE, ONE, TWO)}),
    probe=st.floats(1e-4, 1.0),
)
def test_the_fastest_of_those_that_were_timed_is_chosen_or_this_process_within_three_percent(
    times: dict[Configuration, float], probe: float
) -> None:
    found = decide(2, None, times.__getitem__, probe, 4000)
    if found.phase is Phase.CHOSEN:
        assert times[found.configuration] <= min(times[timed] for timed in found.outlook.times) / GAIN
    else:  # workers would not have paid for themselves yet
        saved = 4000 * (min(times[ALONE], times[ONE]) - found.outlook.hoped(found.wanted))
        assert found.phase is Phase.WAIT and saved < 1.1 * choice.FIRST + 1


@pytest.mark.parametrize(
    ("seconds", "probe", "evaluations", "expected"),
    [
        ({ALONE: 1e-3, ONE: 1.2e-3}, 0.8e-3, 10_000, ALONE),  # what coordination takes is more than what is saved
        ({ALONE: 1e-3, ONE: 0.5e-3, TWO: 0.7e-3}, 0.4e-3, 10_000, ONE),  # threads are in each other's way
        ({ALONE: 0.1, ONE: 0.11, TWO: 0.06}, 0.055, 15, ALONE),  # the program was too short for workers to pay
        ({ALONE: 0.1, ONE: 0.11, TWO: 0.06}, 0.055, 40, TWO),
        ({ALONE: 0.1, ONE: 0.11, TWO: 0.12}, 0.055, 40, ALONE),  # workers were tried, and are in each other's way
    ],
)
def test_choices(seconds: dict[Configuration, float], probe: float, evaluations: int, expected: Any) -> None:
    assert decide(2, None, seconds.__getitem__, probe, evaluations).configuration == expected


def test_one_thread_is_kept_where_bits_need_it_and_on_one_core_nothing_is_timed() -> None:
    found = decide(2, 1, {ONE: 1.0, TWO: 0.6}.__getitem__, 0.5, 20)
    assert found.configuration == TWO and ALONE not in found.outlook.times
    assert Choice(1, None, 0).phase is Phase.CHOSEN


def test_fewer_threads_are_given_up_after_one_evaluation_that_takes_far_longer() -> None:
    """After the first, which warms up."""
    times = {ALONE: 10e-3, ONE: 20e-3}
    found = decide(2, None, times.__getitem__, 5.9e-3, 1 + choice.MANY + 1)
    assert found.configuration == ONE
    found.took(20e-3)
    assert found.configuration == ALONE and found.outlook.times[ONE] == 20e-3


def test_fewer_threads_are_tried_one_half_after_the_other_where_no_part_of_the_batch_can_be_evaluated() -> None:
    found = Choice(8, None, 0)
    times = {ALONE: 8e-3, **{Configuration(1, threads): 1e-3 * (threads + 1) for threads in (4, 2)}, ONE: 4e-3}
    for _ in range(200):
        if found.is_due:
            found.refuse("it has statistics")
        if found.pays:
            found.next(found.configuration, movable=True, ready=True)
        found.took(times[found.configuration])
    assert (found.configuration, found.phase) == (Configuration(1, 2), Phase.CHOSEN) and set(
        found.outlook.times
    ) == set(times)


def test_it_is_chosen_again_when_times_change_by_a_factor_ever_more_seldom() -> None:
    found = decide(2, None, {ALONE: 1e-3, ONE: 2e-3}.__getitem__, 1e-3, 3 + choice.MANY + 2 * choice.OFTEN)
    assert found.phase is Phase.CHOSEN
    looks = []
    for seconds in (1.2e-3, 5e-3):
        for _ in range(choice.OFTEN + 1):
            found.took(seconds)
        looks.append((found.phase, found.drift.often))
    assert looks == [(Phase.CHOSEN, choice.OFTEN), (Phase.TIME, 2 * choice.OFTEN)]


def test_evaluations_that_are_compiled_from_here_are_no_reason_to_choose_again() -> None:
    found = decide(2, None, {ALONE: 1e-3, ONE: 2e-3}.__getitem__, 1e-3, 3 + choice.MANY + 2 * choice.OFTEN)
    found.settle()
    for _ in range(2 * choice.OFTEN):
        found.took(0.4e-3)
    assert found.phase is Phase.CHOSEN


# ---- devices

CARD = torch.device("cuda", 0)
ON_CARD, ON_TWO = Configuration(1, None, (CARD,)), Configuration(2, None, (CARD, CARD))


@pytest.mark.parametrize(
    ("seconds", "evaluations", "expected"),
    [
        ({ALONE: 0.1, TWO: 0.06, ON_CARD: 0.01, ON_TWO: 0.02}, 40, TWO),  # its start would not have paid yet
        ({ALONE: 0.1, TWO: 0.06, ON_CARD: 0.01, ON_TWO: 0.02}, 60, ON_CARD),
        ({ALONE: 0.1, TWO: 0.06, ON_CARD: 0.01, ON_TWO: 0.006}, 2000, ON_TWO),
        ({ALONE: 0.1, TWO: 0.06, ON_CARD: 0.09, ON_TWO: 0.1}, 2000, TWO),  # it was tried, and the cores are faster
        ({ALONE: 0.3e-3, ONE: 0.4e-3, TWO: 1.0}, 20_000, ALONE),  # to reach it takes longer
        ({ALONE: 0.5e-3, ONE: 0.6e-3, TWO: 1.0}, 100, ALONE),  # it would pay after too many
    ],
)
def test_choices_among_cores_and_devices(
    seconds: dict[Configuration, float], evaluations: int, expected: Configuration
) -> None:
    found = Choice(2, None, 0, (CARD, CARD))
    follow(found, lambda configuration: seconds.get(configuration, 1.0), (seconds[TWO] / 2, None), evaluations)
    assert found.configuration == expected
    assert found.phase is Phase.CHOSEN or evaluations < 100  # nothing that is compiled has to wait for it


def test_one_device_is_tried_where_the_batch_cannot_be_cut_or_there_is_one_core_but_not_two() -> None:
    times = {ALONE: 0.1, ON_CARD: 0.01}
    found = Choice(2, None, 0, (CARD, CARD))
    for _ in range(200):
        if found.is_due:
            found.refuse("it has statistics")
        if found.pays:
            found.next(found.configuration, movable=True, ready=True)
        found.took(times.get(found.configuration, 1.0))
    assert found.configuration == ON_CARD and ON_TWO not in found.outlook.times
    assert found.outlook.refused and found.outlook.is_cut_known
    found = Choice(1, None, 0, (CARD,))
    follow(found, times.__getitem__, None, 200)
    assert found.configuration == ON_CARD and found.phase is Phase.CHOSEN


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
# 16 cores: the same for 2, 4, 8 and 16 workers; what a sixteenth takes on one thread, and half of that.
SIXTEEN_CORES = {
    "pinn": (14.4, 75.4, 13.1, 14.2, 10.8, 8.4, 8.2, 6.1),
    "cnn": (23.2, 290.0, 23.6, 21.7, 22.8, 23.1, 18.1, 9.1),
    "mlp": (7.8, 65.3, 6.5, 7.9, 8.9, 11.8, 4.1, 2.2),
}


@pytest.mark.parametrize("name", list(TWO_CORES))
def test_on_two_measured_cores_it_is_within_a_tenth_of_the_best(name: str) -> None:
    alone, one, two = (1e-3 * ms for ms in TWO_CORES[name])
    times = {ALONE: alone, ONE: one, TWO: two}
    found = decide(2, None, times.__getitem__, (one / 2, None), 20_000)
    assert times[found.configuration] <= 1.1 * min(times.values())


@pytest.mark.parametrize("name", list(SIXTEEN_CORES))
def test_on_sixteen_measured_cores_it_is_within_a_tenth_of_the_best(name: str) -> None:
    ms = SIXTEEN_CORES[name]
    times = {ALONE: ms[0], ONE: ms[1], **{Configuration(2**k, 16 // 2**k): ms[1 + k] for k in (1, 2, 3, 4)}}
    for threads in (2, 4, 8):  # of this process, which were not measured: between the ends
        times[Configuration(1, threads)] = ms[0] * (ms[1] / ms[0]) ** (1 - math.log2(threads) / 4)
    seconds = {configuration: 1e-3 * found for configuration, found in times.items()}
    found = decide(16, None, seconds.__getitem__, (1e-3 * ms[6], 1e-3 * ms[7]), 20_000)
    assert found.phase is Phase.CHOSEN and seconds[found.configuration] <= 1.1 * min(seconds.values())


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

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices that there are."""
        return (CARD,) if self.device else ()

    def share(self, of: float, threads: int = 1) -> float:
        """Seconds of this fraction of the batch."""
        waits = self.waits * math.log2(threads) * (1 + threads / 32) if threads > 1 else 0.0
        return self.fixed + self.rest * of / threads + waits

    def seconds(self, configuration: Configuration) -> float:
        """An evaluation."""
        if configuration.devices:
            return self.device
        workers, threads = configuration.workers, configuration.threads or self.cores
        seconds = self.share(1 / workers, threads)
        if workers * threads > 1:
            seconds = max(seconds, self.memory * self.rest)
        return seconds if workers == 1 else seconds + coordination(workers, self.gradient)

    @property
    def best(self) -> float:
        """Seconds by the fastest configuration."""
        halves = [self.cores >> k for k in range(self.cores.bit_length())]
        alone = [Configuration(1, threads) for threads in halves]
        workers = [Configuration(count, self.cores // count) for count in halves if count > 1]
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


def choose_on(machine: Machine) -> tuple[Choice, float, int]:
    """The choice made there, after at most 3,000 evaluations; the seconds until then, and the evaluations."""
    found = Choice(machine.cores, None, machine.gradient, machine.devices)
    probe, passed, evaluations = (machine.share(1 / machine.cores), machine.share(0.5 / machine.cores)), 0.0, 0
    while found.phase is not Phase.CHOSEN and evaluations < 3000:
        passed += follow(found, machine.seconds, probe, 1)
        evaluations += 1
    return found, passed, evaluations


@settings(max_examples=40, deadline=None)
@given(machine=MACHINES)
def test_on_computed_machines_trials_cost_no_more_than_they_could_save_and_the_choice_is_good(machine: Machine) -> None:
    found, passed, evaluations = choose_on(machine)
    on_device = 2 * choice.DEVICE + machine.device  # it is given up once it took what a start takes
    started = sum(on_device if tried.devices else choice.FIRST for tried in found.outlook.times)
    assert (
        passed
        <= 2 * evaluations * machine.seconds(found.configuration) + 75 * machine.seconds(ALONE) + choice.FIRST + started
    )
    if found.phase is Phase.CHOSEN:
        assert machine.seconds(found.configuration) <= 1.25 * machine.best


def test_on_computed_machines_it_is_within_a_tenth_of_the_best() -> None:
    draw = random.Random(0)
    ratios = []
    for cores in (2, 4, 8, 16, 32, 64, 96, 128):
        for _ in range(25):
            fixed, rest, waits = (10 ** draw.uniform(*ends) for ends in ((-4.5, -1.8), (-3.5, 1), (-5, -2)))
            memory, gradient = draw.choice([0.0, 0.05, 0.1, 0.2, 0.4]), 10 ** draw.randint(3, 8)
            device = draw.choice([0.0, 10 ** draw.uniform(-3.3, 0)])
            machine = Machine(cores, fixed, rest, waits, memory, gradient, device)
            found, *_ = choose_on(machine)
            if found.phase is Phase.CHOSEN:
                ratios.append(machine.seconds(found.configuration) / machine.best)
    assert len(ratios) > 150 and max(ratios) <= 1.1
