"""What a worker lacks is sent in one order, and with a module what it drops with the one before."""

from __future__ import annotations

from itertools import product

from batchopt.backends.process.roster import AT_WORK, ORDERABLE, SILENT, STATES, State
from batchopt.backends.process.wanted import AFTER, NOTHING, Told, Wanted, having, lacking


def told(value: object) -> Told:
    return Told((), value)._replace(calls=(object(),))  # type: ignore[arg-type]  # any call


ALL = Wanted(*[told(name) for name in Wanted._fields])


def taken(have: Wanted, want: Wanted) -> Wanted:
    """Once all that it lacks was sent."""
    for name in lacking(have, want):
        have = having(have, name, getattr(want, name))
    return have


def test_a_new_worker_is_sent_everything_in_the_order_of_the_fields() -> None:
    assert [*lacking(Wanted(), ALL)] == [*Wanted._fields]
    assert taken(Wanted(), ALL) == ALL and not [*lacking(ALL, ALL)]


def test_what_has_changed_is_sent_alone_also_if_it_is_equal() -> None:
    again = told("weights")._replace(calls=ALL.weights.calls)
    assert again == ALL.weights
    assert [*lacking(ALL, ALL._replace(weights=again))] == ["weights"]


def test_with_a_module_all_that_belongs_to_it_is_sent_again() -> None:
    want = ALL._replace(module=told("another"), outputs=NOTHING)
    found = [*lacking(ALL, want)]
    assert found == ["module", *(name for name in Wanted._fields if name in AFTER["module"])]
    assert taken(ALL, want) == want


def test_what_was_dropped_is_lacking_wherever_an_interrupt_came() -> None:
    want = ALL._replace(module=told("another"))
    for sent in range(len(Wanted._fields)):
        have = ALL
        for name in [*lacking(have, want)][:sent]:
            have = having(have, name, getattr(want, name))
        assert taken(have, want) == want


def test_each_state_is_in_the_table_and_says_what_may_be_done() -> None:
    assert {*STATES.values()} == {*State}
    for key in product((True,), ("field", "function", None), (True, False)):
        assert key in STATES
    assert not ORDERABLE & AT_WORK and not SILENT & AT_WORK
