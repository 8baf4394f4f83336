"""Centred clipping, against numbers that can be followed by hand."""

from __future__ import annotations

import math

import pytest

from raafl.algorithms import fed_async, fed_avg, scaffold
from raafl.core.options import Guard
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Mean, Staleness
from raafl.parts.protect.robust import Centred, CentredMemory, guarded
from raafl.submodel import FULL, Spec
from tests.helpers.coordinators import filled, line_state, values_of
from tests.helpers.merges import merge_all, take

TOP, BOTTOM = (Spec.select({"hidden": kept}) for kept in (range(0, 2), range(2, 4)))
ROOT_13 = math.sqrt(13)  # the line's 13 parameters: a difference of x everywhere has norm x sqrt(13)


def give(merge, state, values, samples=1):
    """Merge updates with every element at a value, or at (value, submodel)."""
    for number, one in enumerate(values, start=1):
        value, spec = one if isinstance(one, tuple) else (one, FULL)
        update = Update(number, number, 0, filled(state, value, spec), samples)
        assert merge.reject_reason(state, update, spec, 0) is None
        take(merge, state, update, spec, 0)
        merge.detach(state)
    merge_all(merge, state)
    return state


def test_an_update_beyond_the_radius_moves_the_mean_by_no_more_than_that():
    """The median of 1, 2 and 50 is 2; -1 and 0 are within the radius of 3, and 48 is cut to 3: 2 + (-1 + 0 + 3) / 3."""
    state = give(Centred(Mean(), 3 * ROOT_13), line_state(), [1.0, 2.0, 50.0])
    assert values_of(state).tolist() == pytest.approx([2 + 2 / 3] * 13)


def test_without_a_radius_the_median_distance_is_taken():
    """From the median 2 the distances are 1, 0 and 48: 1 is the median, so 48 is cut to 1: 2 + (-1 + 0 + 1) / 3."""
    state = give(Centred(Mean(), None), line_state(), [1.0, 2.0, 50.0])
    assert values_of(state).tolist() == pytest.approx([2.0] * 13)


def test_the_centre_is_that_of_the_merge_before():
    """The first merge ends at 2; from there the next differences are 4 - 2 (cut to 1), 5 - 2 (cut to 1) and 2 - 2."""
    merge = Centred(Deltas(staleness=Staleness()), ROOT_13)
    state = give(merge, line_state(), [2.0, 2.0, 2.0])
    give(merge, state, [4.0, 5.0, 2.0])
    assert values_of(state).tolist() == pytest.approx([2.0 + 2 + 2 / 3] * 13)


def test_with_a_wide_radius_it_is_the_unweighted_mean():
    wide, plain = Centred(Mean(), 1e6), Mean(by_samples=False)
    updates = [(1.0, FULL), (4.0, TOP), (-2.0, BOTTOM), (0.5, FULL)]
    first, second = give(wide, line_state(value=3.0), updates, samples=7), give(plain, line_state(value=3.0), updates)
    assert values_of(first).tolist() == pytest.approx(values_of(second).tolist(), rel=1e-6)


def test_submodels_that_share_an_element_are_averaged_there():
    """Units 0 and 1 in one client, 2 and 3 in another; the bias in both. The start is the median, their mean at the bias."""
    state = give(Centred(Deltas(staleness=Staleness()), 1e6), line_state(), [(2.0, TOP), (6.0, BOTTOM)])
    assert state.values["fc2.weight"][0].tolist() == pytest.approx([2.0, 2.0, 6.0, 6.0])
    assert state.values["fc2.bias"].item() == pytest.approx(4.0)


def test_what_nobody_covers_stays_and_is_remembered():
    merge = Centred(Deltas(staleness=Staleness()), 1e6)
    state = give(merge, line_state(value=1.0), [2.0])
    give(merge, state, [(5.0, TOP)])
    assert state.values["fc1.weight"][2:].unique().tolist() == [3.0] and state.values["fc1.weight"][0, 0] == 8.0
    assert state.memory.of(CentredMemory).centre["fc1.weight"][3].tolist() == [2.0, 2.0]


def test_in_a_round_values_and_deltas_are_the_same():
    values = give(Centred(Mean(), None), line_state(value=10.0), [11.0, 12.0, 8.0, 90.0])
    deltas = give(Centred(Deltas(staleness=Staleness()), None), line_state(value=10.0), [1.0, 2.0, -2.0, 80.0])
    assert values_of(values).tolist() == pytest.approx(values_of(deltas).tolist(), rel=1e-6)


def test_equal_updates_are_themselves():
    state = give(Centred(Mean(), None), line_state(value=1.0), [1.75] * 4)
    assert values_of(state).tolist() == [1.75] * 13


def test_where_there_is_nothing_to_combine_it_is_refused_by_name():
    guard = Guard(combine="centred_clip")
    with pytest.raises(BadInput, match=r"guard\.combine is 'centred_clip', but fed_async merges each update alone"):
        guarded(fed_async(), guard)
    with pytest.raises(
        BadInput, match=r"guard\.combine is 'centred_clip', but scaffold merges each client's update by itself"
    ):
        guarded(scaffold(), guard)
    with pytest.raises(BadInput, match=r"guard\.radius is 0"):
        Guard(radius=0.0)
    assert str(guarded(fed_avg(), guard).merge).startswith("centred clipping at the median distance, then")
