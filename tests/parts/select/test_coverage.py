from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raafl.errors import BadInput
from raafl.parts.select.coverage import RegionCoverage, mask_level, of_regions, topped_up
from raafl.submodel import FULL, Axis, Member, Spec, Stack
from tests.helpers.refusals import refuses

AXES = {"a": Axis("a", 8, (Member("a.weight", 0),)), "blocks": Stack("blocks", ("0", "1", "2", "3"))}


@st.composite
def schedules(draw: st.DrawFn) -> RegionCoverage:
    """Any schedule that can be kept, with rest from the least to more than is ever used."""
    regions = draw(st.integers(1, 6))
    trained = draw(st.integers(1, regions))
    takes = draw(st.lists(st.integers(1, trained), min_size=trained, max_size=9))
    coverage = draw(st.none() | st.integers(1, min(sum(takes) // trained, len(takes))))
    period = -(-regions // trained) * -(-trained // min(takes))
    rest = draw(st.none() | st.integers(period - 1, 2 * period - 2))
    hold = rest is None and draw(st.booleans())
    try:
        return RegionCoverage(tuple(takes), regions, trained, coverage, rest, hold)
    except BadInput as error:  # clients with several regions in turn cover each more often than that
        assert (rest is not None or hold) and "or leave out coverage" in str(error)
        return RegionCoverage(tuple(takes), regions, trained, None, rest, hold)


@given(schedules(), st.integers(0, 99))
def test_every_round_keeps_the_numbers_it_was_given(schedule, seed):
    rounds = range(3 * schedule.period + 2)
    taken = [schedule.taken(q, seed) for q in rounds]
    for mine in taken:
        assert [len(regions) for regions in mine] == list(schedule.takes)
        covered = Counter(i for regions in mine for i in regions)
        assert len(covered) == schedule.trained  # S*
        assert min(covered.values()) >= (schedule.coverage or 1)  # Gamma*
        if schedule.coverage and (schedule.hold or schedule.rest is not None):
            assert min(covered.values()) == schedule.coverage
        assert set(covered) <= set(range(schedule.regions))
    if schedule.rest is not None:
        for n in range(len(schedule.takes)):
            for region in range(schedule.regions):
                at = [-1, *(q for q in rounds if region in taken[q][n])]
                assert all(after - before - 1 <= schedule.rest for before, after in pairwise(at))
                assert rounds[-1] - at[-1] <= schedule.rest  # tau
    assert taken == [schedule.taken(q, seed) for q in rounds]


@pytest.mark.parametrize("rest", [3, 4, 6, None])
def test_the_papers_settings(rest):
    """S-Arb of 10 clients (sections 6.4.1 and 6.4.2): each takes one of four regions."""
    takes = mask_level("S-Arb", 10)
    for coverage, trained in ((1, 4), (2, 4)):
        schedule = RegionCoverage(takes, 4, trained, coverage, rest)
        for q in range(20):
            covered = Counter(i for mine in schedule.taken(q) for i in mine)
            assert sorted(covered) == [0, 1, 2, 3] and min(covered.values()) >= coverage
            assert rest is None or min(covered.values()) == coverage
    everyone = RegionCoverage(takes, 4, 1, 10, rest)
    assert {mine for q in range(8) for mine in everyone.taken(q)} == {(0,), (1,), (2,), (3,)}
    assert all(len(set(everyone.taken(q))) == 1 for q in range(8))


@pytest.mark.parametrize("rest", [3, 4, 5, 6])
def test_a_rest_is_reached_and_never_passed(rest):
    schedule = RegionCoverage(mask_level("S-Arb", 10), 4, None, 1, rest)
    taken = [schedule.taken(q, seed=3) for q in range(200)]
    gaps = [
        after - before - 1
        for n in range(10)
        for region in range(4)
        for before, after in pairwise(q for q in range(200) if region in taken[q][n])
    ]
    assert max(gaps) == rest


@pytest.mark.parametrize("coverage", [1, 2, 3])
def test_one_assignment_is_held_and_leaves_a_region_to_nobody(coverage):
    schedule = RegionCoverage(mask_level("S-Arb", 10), 4, 3, coverage, hold=True)
    (taken,) = {schedule.taken(q, seed=1) for q in range(20)}
    covered = Counter(i for mine in taken for i in mine)
    assert len(covered) == 3 and min(covered.values()) == coverage and covered.total() == 10
    assert len({schedule.taken(0, seed=seed) for seed in range(20)}) > 1


def test_rounds_differ_where_they_may():
    takes = mask_level("L-Arb", 10)
    drawn = RegionCoverage(takes)
    # C(4, 2) = 6 kinds of submodel (section 6.2)
    assert {mine for q in range(40) for mine in drawn.taken(q)} == {(i, j) for j in range(4) for i in range(j)}
    assert drawn.taken(0, seed=1) != drawn.taken(0, seed=2)
    strict = RegionCoverage(mask_level("S-Arb", 4), rest=3)
    assert [strict.taken(q) for q in range(4)] == [strict.taken(q) for q in range(4, 8)]
    loose = RegionCoverage(mask_level("S-Arb", 4), rest=6)
    assert [loose.taken(q) for q in range(40)] != [loose.taken(q) for q in range(4)] * 10


def test_regions_are_added_among_those_of_the_round():
    rng = random.Random(0)
    assert topped_up(((0,), (2,), (0, 2)), (2, 1, 2), rng) == ((0, 2), (2,), (0, 2))
    assert topped_up(((1,), (1,)), (2, 2), rng) == ((1,), (1,))  # nobody trains another
    drawn = {topped_up(((0,), (1,), (2,)), (2, 1, 1), rng) for _ in range(40)}
    assert drawn == {((0, 1), (1,), (2,)), ((0, 2), (1,), (2,))}


def test_mask_levels():
    assert mask_level("L-Arb", 3) == (2, 2, 2) and mask_level("S-Arb", 3) == (1, 1, 1)
    assert Counter(mask_level("MIX-Arb", 10, seed=3)) == {1: 5, 2: 5}
    assert mask_level("MIX-Arb", 10, seed=3) != mask_level("MIX-Arb", 10, seed=4)
    with pytest.raises(BadInput, match="mask level is 'M-Arb'"):
        mask_level("M-Arb", 3)


def test_regions_are_equal_ranges_of_every_axis():
    assert of_regions(AXES, [0], 4) == Spec.select({"a": range(2)}, blocks={"blocks": [0]})
    assert of_regions(AXES, [1, 3], 4) == Spec.select({"a": [2, 3, 6, 7]}, blocks={"blocks": [1, 3]})
    assert of_regions(AXES, range(4), 4) == FULL and of_regions(AXES, [0], 1) == FULL


def test_regions_share_the_units_of_an_axis_that_has_fewer():
    # the middles of five regions lie in blocks 0.4, 1.2, 2, 2.8 and 3.6; eight units are cut at 1.6, 3.2, 4.8 and 6.4
    kept = [of_regions(AXES, [region], 5) for region in range(5)]
    assert [list(dict(spec.blocks)["blocks"]) for spec in kept] == [[0], [1], [2], [2], [3]]
    assert [list(spec.indices("a")) for spec in kept] == [[0, 1], [2], [3, 4], [5], [6, 7]]
    assert of_regions(AXES, [2, 3], 5) == Spec.select({"a": [3, 4, 5]}, blocks={"blocks": [2]})
    assert of_regions(AXES, range(5), 5) == FULL


test_what_cannot_be_kept_is_refused = refuses(
    RegionCoverage,
    ({"takes": ()}, "'takes' is empty"),
    ({"takes": (5,)}, "'takes' contains 5: give numbers from 1 to 4"),
    ({"takes": (1, 1), "trained": 5}, "'trained' is 5: give 1 to 4"),
    ({"takes": (1, 1)}, "cover 4 regions 0 times: give fewer trained regions, or more takes"),
    ({"takes": (1,) * 10, "coverage": 3}, "coverage is 3: 10 clients take 10 regions .* give 1 to 2"),
    ({"takes": (2, 2, 2), "trained": 2, "coverage": 4}, "coverage is 4.*give 1 to 3"),
    ({"takes": (1,) * 4, "rest": 2}, r"rest \(.*\) is 2: .* needs 4 rounds .* give at least 3"),
    ({"takes": (1,) * 10, "rest": 200}, r"rest \(.*\) is 200: .* for more than 6: give at most that, or hold: true"),
    ({"takes": (1,) * 10, "rest": 4, "hold": True}, "'rest' is 4, but with 'hold' the assignment never changes"),
    (
        {"takes": (4, 4, 1, 1), "coverage": 1, "rest": 3},
        r"coverage is 1, but the smallest number .* is 2 \(4 clients train 1 or 4 of 4 ",
    ),
    ({"takes": (1,), "regions": 0}, "regions is 0"),
)
