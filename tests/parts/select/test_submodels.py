from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raafl.core.algorithm import SelectContext, Training
from raafl.core.types import ClientInfo, Work
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.parts.select import submodels
from raafl.parts.select.submodels import TABLE_4, Fragments, Full, Ranking, fragment_ratios, fragment_specs
from raafl.parts.select.units import shared_fragments
from raafl.submodel import FULL, Axis, Member
from tests.helpers.coordinators import line_state


def fleet_of(speeds, hidden=10, seed=0, memory=float("inf"), batch_size=1):
    clients = {i: ClientInfo(i, 1, Profile(flops_per_s=s, memory_bytes=memory)) for i, s in enumerate(speeds, start=1)}
    return SelectContext(line_state(hidden), clients, random.Random(seed), Training(num_epochs=1), batch_size)


def test_table_4_and_any_ratios():
    assert fragment_ratios(4) == (0.1, 0.2, 0.3, 0.4)
    assert fragment_ratios([1, 3]) == (0.25, 0.75)
    assert all(sum(ratios) == pytest.approx(1.0) and len(ratios) == m for m, ratios in TABLE_4.items())
    with pytest.raises(BadInput, match="fragments is 6"):
        fragment_ratios(6)
    with pytest.raises(BadInput, match="ratio in fragments is 0"):
        fragment_ratios([0.5, 0.0])


@pytest.mark.parametrize("m", TABLE_4)
def test_fragments_are_disjoint_and_cover_the_axis(m):
    state = line_state(hidden=200)
    kept = [list(spec.indices("hidden") or range(200)) for spec in fragment_specs(state.submodels, TABLE_4[m])]
    assert sorted(i for part in kept for i in part) == list(range(200))
    assert [len(part) for part in kept] == [round(200 * r) for r in TABLE_4[m]]


def kept_of(hidden, ratios):
    return [
        list(spec.indices("hidden") or range(hidden)) for spec in fragment_specs(line_state(hidden).submodels, ratios)
    ]


def test_a_fragment_that_would_be_empty_takes_a_unit_from_its_neighbour():
    # cuts at 0.4, 1.2, 2.8 and 5.2 of eight units: the first would be at 0
    assert kept_of(8, TABLE_4[5]) == [[0], [1], [2], [3, 4], [5, 6, 7]]
    assert kept_of(4, [0.97, 0.01, 0.01, 0.01]) == [[0], [1], [2], [3]]
    assert kept_of(5, [0.01, 0.01, 0.98]) == [[0], [1], [2, 3, 4]]


def test_fragments_share_the_units_of_an_axis_that_has_fewer():
    # two heads: the middles of 20, 30 and 50 % lie in heads 0.2, 0.7 and 1.5
    assert kept_of(2, TABLE_4[3]) == [[0], [0], [1]]
    # the middles lie in units 0.1, 0.4, 1, 2 and 3.3
    assert kept_of(4, TABLE_4[5]) == [[0], [0], [1], [2], [3]]
    # the middles lie in 1.35, 2.7, 2.8 and 2.9: none may be left out
    assert kept_of(3, [0.9, 1 / 30, 1 / 30, 1 / 30]) == [[0], [1], [2], [2]]
    assert kept_of(1, TABLE_4[3]) == [[0], [0], [0]]


@given(st.integers(1, 12), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8))
@settings(derandomize=True)
def test_every_fragment_has_a_unit_and_every_unit_a_fragment(size, ratios):
    axes = {"a": Axis("a", size, (Member("a.weight", 0),))}
    kept = [list(spec.indices("a") or range(size)) for spec in shared_fragments(axes, ratios)]
    assert all(kept) and sorted({i for part in kept for i in part}) == list(range(size))
    assert [part[0] for part in kept] == sorted(part[0] for part in kept)
    # one unit is as much as two fragments ever have in common, and only where there are not enough
    assert sum(map(len, kept)) == max(size, len(ratios))


def test_a_model_without_axes_is_one_fragment_and_this_is_said():
    fleet = fleet_of([4.0, 2.0, 1.0])
    select = Fragments(TABLE_4[3])
    assert select.notes(fleet) == []
    fleet.state.submodels.__dict__["_table"] = type("None", (), {"axes": {}})()
    (note,) = select.notes(fleet)
    assert note.startswith("every client trains all of the model, which has no axes to cut into fragments: ")
    assert Fragments(TABLE_4[1]).notes(fleet) == []
    works = [select(client, fleet) for client in fleet.clients.values()]
    assert [(work.spec, work.region) for work in works] == [(FULL, 1)] * 3
    assert select.bound(fleet) == max(fleet.cost_s(client, Work()) for client in fleet.clients.values())
    poor = fleet_of([1.0], memory=1.0)
    poor.state.submodels.__dict__["_table"] = type("None", (), {"axes": {}})()
    (problem,) = select.check(poor)
    assert problem.startswith("client 1: memory_bytes is 1, ") and problem.endswith(
        "use a smaller batch, or a smaller model"
    )


def test_k_says_nothing_where_there_is_no_bound():
    with pytest.raises(BadInput, match=r"K is 9.0, but select 'fewest_updates' has no time limit: leave K out"):
        Fragments(TABLE_4[3], "fewest_updates", 9.0)
    with pytest.raises(BadInput, match=r"K is 0.0"):
        Fragments(TABLE_4[3], bound_s=0.0)


@pytest.mark.parametrize("how", ["gre_raa", "random", "fewest_updates"])
def test_a_client_gets_the_fragment_of_its_region(how):
    fleet, select = fleet_of([10.0, 10.0, 10.0]), Fragments(TABLE_4[3], how)
    for region in (1, 2, 3):
        fleet.state.counts.update({1: 5, 2: 5, 3: 5} | {region: 4})
        work = select(fleet.clients[1], fleet)
        assert work.spec == select.specs(fleet)[work.region - 1]
        assert how == "random" or work.region == region
    assert isinstance(select.below(), Full)


def test_costs_of_a_bounded_number_of_kinds_of_clients_are_stored(monkeypatch):
    monkeypatch.setattr(submodels, "MAX_KINDS", 2)
    fleet, select = fleet_of([8.0, 4.0, 2.0, 1.0]), Fragments(TABLE_4[3], bound_s=1e9)
    found = [select.allowed(client, fleet) for client in fleet.clients.values()]
    assert found == [[1, 2, 3]] * 4 and len(fleet.cache["kinds"]) == len(fleet.cache["S"]) == 2


@pytest.mark.parametrize(
    ("sizes", "capability", "bound"),
    [
        # the large one goes to the fast two, the small one to the slow two: 3/6, 3/3, 2/2, 2/1
        ([2.0, 3.0], [3.0, 1.0, 6.0, 2.0], 2.0),
        # floor(3/2) = 1: large to 4.0, small to 2.0, and small to 0.25, which is left over
        ([1.0, 4.0], [4.0, 2.0, 0.25], 4.0),
        # fewer clients than fragments: 4 and 3 to the fast one, 2 and 1 to the slow one
        ([1.0, 2.0, 3.0, 4.0], [2.0, 1.0], 2.0),
    ],
)
def test_the_offline_bound_by_hand(sizes, capability, bound):
    costs = [[size / c for size in sizes] for c in capability]
    assert Ranking(sizes, zip(range(9), capability, costs, strict=False)).bound() == bound


def test_gre_raa_takes_the_least_merged_fragment_it_can_afford():
    # fragments of 20, 30, 50 %; K lets the slow client take the smallest only
    fleet = fleet_of([10.0, 10.0, 1.0])
    select = Fragments(TABLE_4[3])
    costs = [[fleet.cost_s(c, w) for w in [select(c, fleet)]] for c in fleet.clients.values()]
    assert len(costs) == 3
    slow, fast = fleet.clients[3], fleet.clients[1]
    assert select.allowed(slow, fleet) == [1]
    assert select.allowed(fast, fleet) == [1, 2, 3]
    fleet.state.counts.update({1: 5, 2: 3, 3: 4})
    assert select(fast, fleet).region == 2
    assert select(slow, fleet).region == 1
    fleet.state.counts.update({2: 9})
    assert select(fast, fleet).region == 3


def test_ties_are_broken_at_random():
    fleet, select = fleet_of([1.0, 1.0, 1.0]), Fragments(TABLE_4[3], bound_s=1e9)
    counts = Counter(select(fleet.clients[1], fleet).region for _ in range(600))
    assert set(counts) == {1, 2, 3} and min(counts.values()) > 140


def test_devices_that_need_no_time_may_train_every_fragment():
    fleet = fleet_of([float("inf")] * 3)
    select = Fragments(TABLE_4[3])
    assert select.bound(fleet) == 0.0
    assert [select.allowed(client, fleet) for client in fleet.clients.values()] == [[1, 2, 3]] * 3


def test_random_stays_within_k_and_mp_ignores_it():
    fleet = fleet_of([10.0, 10.0, 1.0])
    slow = fleet.clients[3]
    assert {Fragments(TABLE_4[3], "random")(slow, fleet).region for _ in range(50)} == {1}
    fleet.cache.clear()
    fleet.state.counts.update({1: 5, 2: 3, 3: 4})
    assert Fragments(TABLE_4[3], "fewest_updates")(slow, fleet).region == 2


def test_cost_is_compute_plus_both_links():
    fleet = fleet_of([1.0])
    client = ClientInfo(1, 7, Profile(flops_per_s=50.0, down_bytes_per_s=10.0, up_bytes_per_s=5.0, latency_s=0.5))
    work = Full()(client, fleet)
    cost = fleet.state.submodels.cost(work.spec, 1)
    assert cost.down_bytes == cost.up_bytes == 4 * (20 + 10 + 1)
    expected = cost.flops_per_sample * 7 / 50 + 124 / 10 + 124 / 5 + 1.0
    assert fleet.cost_s(client, work) == pytest.approx(expected)


def test_an_impossible_k_names_client_fragment_and_k():
    fleet = fleet_of([10.0, 1.0])
    problems = Fragments(TABLE_4[2], bound_s=1e-6).check(fleet)
    assert len(problems) == 2
    assert problems[1].startswith("client 2: its cheapest fragment, 1, takes") and "K = 1e-06 s" in problems[1]
    with pytest.raises(BadInput, match="client 2: its cheapest fragment"):
        Fragments(TABLE_4[2], bound_s=1e-6)(fleet.clients[2], fleet)


def test_memory_keeps_a_fragment_away_and_too_little_is_named():
    fleet = fleet_of([1.0])
    peaks = [fleet.state.submodels.cost(s, 1).peak_bytes for s in Fragments(TABLE_4[3]).specs(fleet)]
    assert peaks == sorted(peaks) and peaks[0] < peaks[2]
    tight = fleet_of([1.0], memory=peaks[1])
    assert Fragments(TABLE_4[3], bound_s=1e9).allowed(tight.clients[1], tight) == [1, 2]
    none = fleet_of([1.0], memory=peaks[0] - 1)
    assert "too small for any fragment" in Fragments(TABLE_4[3]).check(none)[0]
    assert "the full model needs" in Full().check(none)[0]
