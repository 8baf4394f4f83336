"""RA-Fed: who trains which regions, and what it must equal."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from raafl.algorithms import ra_fed, ram_fed
from raafl.algorithms.ra_fed import Regions
from raafl.core.types import ClientInfo, Dismiss, Lost
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.submodel import FULL, Spec
from tests.helpers.coordinators import answer, assigned, coordinator_for, join, line_state
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import experiment, finish

REGION = [Spec.select({"hidden": range(2 * i, 2 * i + 2)}) for i in range(4)]


def rounds(algorithm, num_clients, num_rounds, seed=0):
    """The regions that each client was asked to train, round by round."""
    coordinator = coordinator_for(algorithm, line_state(hidden=8), seed, min_clients=num_clients)
    found = []
    tasks = assigned(join(coordinator, range(1, num_clients + 1)))
    for _ in range(num_rounds):
        kept = {n: task.spec.indices("hidden") for n, task in tasks.items()}
        found.append({n: {i // 2 for i in (range(8) if k is None else k)} for n, k in kept.items()})
        actions = []
        for task in tasks.values():
            actions += answer(coordinator, task, 1.0)
        tasks = assigned(actions)
    return found


def covered(mine):
    return Counter(region for regions in mine.values() for region in regions)


# ---- by hand ----


def test_two_rounds_by_hand_and_an_uncovered_region_is_kept():
    """Two clients with one region each of four; the output's bias goes with both."""
    coordinator = coordinator_for(ra_fed(mask="S-Arb"), line_state(hidden=8, value=0.5), min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    for _ in range(4):
        before = coordinator.state.values["fc2.weight"][0].clone()
        expected = before.clone()
        for unit in range(8):
            given = [value for n, value in ((1, 2.0), (2, 5.0)) if unit in tasks[n].spec.indices("hidden")]
            expected[unit] = sum(given) / len(given) if given else before[unit]
        actions = answer(coordinator, tasks[1], 2.0) + answer(coordinator, tasks[2], 5.0)
        assert torch.equal(coordinator.state.values["fc2.weight"][0], expected)
        assert torch.equal(coordinator.state.values["fc1.weight"][:, 1], expected)
        assert coordinator.state.values["fc2.bias"].item() == 3.5
        tasks = assigned(actions)


# ---- masks ----


@pytest.mark.parametrize(("mask", "sizes"), [("L-Arb", {2: 10}), ("S-Arb", {1: 10}), ("MIX-Arb", {1: 5, 2: 5})])
def test_levels(mask, sizes):
    found = rounds(ra_fed(mask=mask), 10, 6)
    assert all(Counter(len(regions) for regions in mine.values()) == sizes for mine in found)
    assert {len(mine[1]) for mine in found} == set(sizes)  # MIX-Arb: another half in each round
    assert len({tuple(map(tuple, mine.values())) for mine in found}) == 6
    assert found == rounds(ra_fed(mask=mask), 10, 6) != rounds(ra_fed(mask=mask), 10, 6, seed=1)


@pytest.mark.parametrize(
    ("numbers", "trained", "coverage"),
    [
        ({"trained": 3}, 3, 1),
        ({"coverage": 3}, 4, 3),  # 15 takes of 10 clients cover four regions three times
        ({"trained": 2, "every": 3}, None, 1),
        ({"rest": 3}, 4, 1),
        ({"rest": 6, "coverage": 2}, 4, 2),
        ({"rest": 6, "trained": 2, "coverage": 5}, 2, 5),
    ],
)
def test_under_control_mix_arb_draws_its_half_anew(numbers, trained, coverage):
    algorithm = ram_fed(mask="MIX-Arb", **numbers)
    found = rounds(algorithm, 10, 18)
    for q, mine in enumerate(found):
        assert Counter(len(regions) for regions in mine.values()) == {1: 5, 2: 5}
        assert len(covered(mine)) == (trained or (2 if q % 3 == 2 else 4))
        assert min(covered(mine).values()) >= coverage
    for client in range(1, 11):  # in 18 draws of half the clients, each is drawn and left out
        assert {len(mine[client]) for mine in found} == {1, 2}
        for start in range(18 - numbers.get("rest", 18)):
            window = found[start : start + numbers["rest"] + 1]
            assert set().union(*(mine[client] for mine in window)) == {0, 1, 2, 3}
    assert algorithm.select.notes(fleet_of(algorithm, 10)) == []
    assert found == rounds(algorithm, 10, 18)


def fleet_of(algorithm, num_clients):
    coordinator = coordinator_for(algorithm, line_state(hidden=8), min_clients=num_clients)
    join(coordinator, range(1, num_clients + 1))
    return coordinator.fleet


@pytest.mark.parametrize(("num_clients", "coverage"), [(10, 3), (3, 1)])
def test_where_the_second_regions_are_needed_in_turn_the_half_stays_and_this_is_said(num_clients, coverage):
    """Ten clients with one region each cover four regions twice, three cover three."""
    algorithm = ra_fed(mask="MIX-Arb", rest=4, coverage=coverage)
    found = rounds(algorithm, num_clients, 8)
    for client in range(1, num_clients + 1):
        assert len({len(mine[client]) for mine in found}) == 1
    assert all(min(covered(mine).values()) >= coverage and len(covered(mine)) == 4 for mine in found)
    (note,) = algorithm.select.notes(fleet_of(algorithm, num_clients))
    assert note.startswith("MIX-Arb with rest 4: the same half of the clients trains two regions in all rounds")
    assert f"{num_clients} clients cannot cover 4 regions {coverage} times" in note


def test_the_half_is_drawn_among_those_with_room_for_two_regions():
    algorithm = ra_fed(mask="MIX-Arb", coverage=1)
    fleet = fleet_of(algorithm, 6)
    one, two = (fleet.cost(Spec.select({"hidden": range(2 * m)})).peak_bytes for m in (1, 2))
    for n in range(1, 7):
        fleet.clients[n] = ClientInfo(n, 1, Profile(memory_bytes=two if n <= 4 else one))
    fleet.cache.clear()
    seen = set()
    for version in range(12):
        fleet.state.version = version
        works = [algorithm.select(fleet.clients[n], fleet) for n in range(1, 7)]
        seen.add(large := tuple(n for n, work in enumerate(works, start=1) if len(work.spec.indices("hidden")) == 4))
        assert len(large) == 3 and max(large) <= 4
    assert len(seen) > 1


@pytest.mark.parametrize(("coverage", "trained"), [(1, 4), (2, 4), (10, 1)])
def test_figure_3(coverage, trained):
    for mine in rounds(ra_fed(mask="S-Arb", coverage=coverage, trained=trained), 10, 8):
        assert len(covered(mine)) == trained and min(covered(mine).values()) >= coverage


@pytest.mark.parametrize("coverage", [1, 2])
def test_figure_4(coverage):
    found = rounds(ram_fed(mask="S-Arb", coverage=coverage, rest=4), 10, 20)
    for mine in found:
        assert len(covered(mine)) == 4 and min(covered(mine).values()) == coverage
    for client in range(1, 11):
        for start in range(16):
            assert set().union(*(mine[client] for mine in found[start : start + 5])) == {0, 1, 2, 3}


def test_regions_are_left_out_periodically_and_the_first_round_may_be_full():
    found = rounds(ra_fed(mask="L-Arb", trained=3, every=3, full_first=True), 10, 9)
    assert [len(covered(mine)) for mine in found] == [4, 4, 3] * 3
    assert all(regions == {0, 1, 2, 3} for regions in found[0].values())
    assert all(len(regions) == 2 for mine in found[1:] for regions in mine.values())


@pytest.mark.parametrize(
    ("numbers", "coverage"),
    [
        ({"mask": "S-Arb", "coverage": 2}, 2),
        ({"mask": "S-Arb", "trained": 4}, 1),
        ({"mask": "S-Arb", "coverage": 2, "rest": 3}, 2),
        ({"mask": "S-Arb", "trained": 3, "hold": True, "coverage": 2}, 2),
        ({"mask": "MIX-Arb", "rest": 4}, 1),
        # client 1 needs four rounds for all regions, the others two, which cannot leave one out for six
        ({"mask": [1, 2, 2, 2, 2, 2, 2, 2], "rest": 6}, 1),
    ],
)
def test_while_clients_are_away_the_others_cover_what_they_can(numbers, coverage):
    """They were dismissed for good, since no schedule of two clients has what the settings ask for."""
    coordinator = coordinator_for(ra_fed(**numbers), line_state(hidden=8), min_clients=8)
    tasks = assigned(join(coordinator, range(1, 9)))
    for away in (1, *range(4, 9)):
        coordinator.handle(Lost(away, "gone"), 0.0)
    for _ in range(8):
        actions = answer(coordinator, tasks[2], 1.0) + answer(coordinator, tasks[3], 1.0)
        tasks = assigned(actions)
        assert tasks.keys() == {2, 3} and not any(isinstance(action, Dismiss) for action in actions)
        assert len({tasks[2].spec, tasks[3].spec}) > 1 or len(tasks[2].spec.indices("hidden")) > 2
    tasks |= assigned(join(coordinator, (1, *range(4, 9))))
    tasks = assigned(action for task in tasks.values() for action in answer(coordinator, task, 1.0))
    trained = Counter(unit // 2 for task in tasks.values() for unit in task.spec.indices("hidden")[::2])
    assert len(tasks) == 8 and min(trained.values()) >= coverage


def test_fewer_regions_in_a_round_than_a_mask_has():
    assert all(len(set(map(tuple, mine.values()))) == 1 for mine in rounds(ra_fed(mask="L-Arb", trained=1), 3, 4))


def test_without_rounds_each_client_counts_its_own():
    coordinator = coordinator_for(ram_fed(mask="S-Arb", rest=3, trigger="each"), line_state(hidden=8), min_clients=4)
    tasks, seen = assigned(join(coordinator, range(1, 5))), []
    for _ in range(4):  # client 1 alone goes on
        seen.append(tasks[1].spec)
        tasks |= assigned(answer(coordinator, tasks[1], 1.0))
    assert sorted(map(str, seen)) == sorted(map(str, REGION))


def test_a_client_gets_as_many_regions_as_its_memory_holds(tmp_path):
    fleet = coordinator_for(ra_fed(mask=[3]), line_state(hidden=8)).fleet
    peaks = [fleet.state.submodels.cost(Spec.select({"hidden": range(2 * m)}), 1).peak_bytes for m in (1, 2, 3, 4)]
    assert peaks == sorted(set(peaks))
    for budget, most in ((peaks[0], 1), (peaks[2] - 1, 2), (peaks[2], 3), (peaks[3], 3)):
        client = ClientInfo(1, 1, Profile(memory_bytes=budget))
        fleet.clients[1] = client
        work = Regions([3])(client, fleet)
        assert len(work.spec.indices("hidden")) == 2 * most
        fleet.cache.clear()
    fleet.clients[1] = ClientInfo(1, 1, Profile(memory_bytes=peaks[0] - 1))
    (problem,) = Regions([3]).check(fleet)
    assert problem.startswith("client 1: memory_bytes is") and "too small for one of 4 regions" in problem


test_bad_arguments_are_named = refuses(
    ra_fed,
    ({"regions": 0}, "regions is 0"),
    ({"regions": 3}, "regions is 3, but the mask L-Arb is defined for 4 regions"),
    ({"mask": [5]}, r"mask is \[5\]: give a list with the number of regions that each client trains, from 1 to 4"),
    ({"mask": []}, r"mask is \[\]"),
    ({"trained": 5}, "'trained' is 5: give 1 to 4"),
    ({"every": 2}, "'every' is 2, but no round leaves regions out"),
    ({"trained": 3, "every": 2, "rest": 9}, "'every' is 2, but 'rest' is 9, which needs"),
    ({"coverage": 0}, "coverage is 0"),
)


def test_what_no_schedule_can_keep_is_found_before_training(tmp_path):
    with pytest.raises(BadInput, match=r"mask S-Arb: coverage is 3: 4 clients take 4 regions"):
        finish(experiment(tmp_path / "run", ra_fed(mask="S-Arb", coverage=3)))


# ---- whole runs ----


@pytest.mark.parametrize("algorithm", [ra_fed, ram_fed])
def test_scaling_changes_what_cut_clients_learn(algorithm, tmp_path):
    plain, scaled = (
        finish(experiment(tmp_path / str(value), algorithm(mask="S-Arb", rescale=value))).digest
        for value in (False, True)
    )
    assert plain != scaled


def test_a_model_without_axes_is_trained_whole():
    coordinator = coordinator_for(ra_fed(), line_state(hidden=8), min_clients=1)
    coordinator.state.submodels.__dict__["_table"] = type("None", (), {"axes": {}})()
    (task,) = assigned(join(coordinator, [1])).values()
    assert task.spec == FULL
