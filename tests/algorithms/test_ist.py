from __future__ import annotations

from collections import Counter

import pytest
import torch

from model_zoo import MLP
from raafl.algorithms import ist
from raafl.algorithms.ist import DisjointUnits, deal
from raafl.core.algorithm import Local
from raafl.core.sample import Sample
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo, Dismiss, Joined, Lost
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.parts.merge.mean import Mean
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.trigger import AllReported
from raafl.submodel import Axis, Member, Submodels
from tests.helpers.coordinators import answer, assigned, coordinator_for, join

AXES = {"a": Axis("a", 10, (Member("w", 0),)), "b": Axis("b", 2, (Member("v", 0),))}


def kept(spec, name, size):
    indices = spec.indices(name)
    return list(range(size)) if indices is None else list(indices)


def test_every_argument_reaches_its_part():
    algorithm = ist(subnets=3, rescale=True, cohort=4, concurrency=2)
    assert algorithm.sample == Sample(4, 2)
    assert algorithm.select == DisjointUnits(3, 4)
    assert algorithm.local == Local(rescale=True)
    assert algorithm.trigger == AllReported()
    assert algorithm.merge == Mean(by_samples=False)
    with pytest.raises(BadInput, match=r"subnets is 2, but submodel says"):
        ist(subnets=2, submodel=RateSelect())
    with pytest.raises(BadInput, match=r"subnets is 0: give a number above 0"):
        ist(subnets=0)


@pytest.mark.parametrize("shares", [1, 2, 3, 4])
def test_every_unit_is_dealt_and_to_one_where_there_are_enough(shares):
    for round in range(5):
        specs = deal(AXES, shares, seed=1, round=round)
        units = [kept(spec, "a", 10) for spec in specs]
        assert sorted(i for mine in units for i in mine) == list(range(10))
        assert max(map(len, units)) - min(map(len, units)) <= 1
        few = [kept(spec, "b", 2) for spec in specs]  # two units: from three shares on one each, some the same
        assert {i for mine in few for i in mine} == {0, 1}
        assert all(len(mine) == max(2 // shares, 1) for mine in few)


def test_each_round_is_dealt_anew_and_the_same_again_from_the_same_seed():
    dealt = [deal(AXES, 3, seed=1, round=round) for round in range(6)]
    assert dealt == [deal(AXES, 3, seed=1, round=round) for round in range(6)]
    assert len(set(dealt)) == 6
    first = Counter(i for round in range(300) for i in kept(deal(AXES, 5, seed=2, round=round)[0], "a", 10))
    assert all(30 < number < 90 for number in first.values())  # 60 expected, the deviation is 7


def test_two_rounds_by_hand():
    coordinator = coordinator_for(ist(), min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    expected = [0.0] * 4
    for first, second in ((1.0, 2.0), (5.0, 7.0)):
        mine = [set(tasks[n].spec.indices("hidden")) for n in (1, 2)]
        assert mine[0] | mine[1] == {0, 1, 2, 3} and len(mine[0]) == len(mine[1]) == 2
        expected = [first if i in mine[0] else second for i in range(4)]
        answer(coordinator, tasks[1], first)
        tasks = assigned(answer(coordinator, tasks[2], second))
        values = coordinator.state.values
        assert values["fc2.weight"].tolist() == [expected]
        assert values["fc1.weight"].tolist() == [[value, value] for value in expected]
        assert values["fc2.bias"].tolist() == [(first + second) / 2]


def test_the_units_of_a_lost_client_stay():
    coordinator = coordinator_for(ist(), min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    answer(coordinator, tasks[1], 3.0)
    coordinator.handle(Lost(2, "gone"), 1.0)
    mine = tasks[1].spec.indices("hidden")
    assert coordinator.state.values["fc2.weight"].tolist() == [[3.0 if i in mine else 0.0 for i in range(4)]]


def test_a_cohort_deals_to_as_many_as_it_has():
    coordinator = coordinator_for(ist(cohort=2), min_clients=4)
    tasks = assigned(join(coordinator, range(1, 5)))
    mine = [set(task.spec.indices("hidden")) for task in tasks.values()]
    assert len(mine) == 2 and mine[0] | mine[1] == {0, 1, 2, 3}


def test_weights_between_units_of_two_clients_are_nobodys():
    module = MLP(3, (4, 4), 2)
    submodels = Submodels(module, (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))
    state = GlobalState(submodels, submodels.state(module))
    for buffer in state.values.buffers.values():
        buffer.zero_()
    coordinator = coordinator_for(ist(), state, min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    answer(coordinator, tasks[1], 1.0)
    answer(coordinator, tasks[2], 2.0)
    (first, second) = submodels.axes
    name = next(name for name, value in state.values.items() if value.shape == (4, 4))
    for n in (1, 2):
        rows, columns = tasks[n].spec.indices(second), tasks[n].spec.indices(first)
        for i in range(4):
            for j in range(4):
                if i in rows and j in columns:
                    assert state.values[name][i, j] == n
    assert state.values[name].eq(0).sum() == 8


def test_a_client_whose_memory_a_share_exceeds_is_named():
    coordinator = coordinator_for(ist())
    coordinator.roster.join(ClientInfo(1, 1, Profile(memory_bytes=10.0)))
    problems = coordinator.algorithm.select.check(coordinator.fleet)
    assert len(problems) == 1
    assert problems[0].startswith("client 1: memory_bytes is 10, one of 1 equal shares needs ")


def test_while_others_are_away_a_client_gets_a_share_that_fits_its_memory():
    """Shares of a half would not fit clients that have memory for a quarter; they were dismissed for good."""
    coordinator = coordinator_for(ist(), min_clients=4)
    (quarter, *_) = deal(coordinator.fleet.state.submodels.axes, 4, 0, 0)
    profile = Profile(memory_bytes=coordinator.fleet.cost(quarter).peak_bytes)
    actions = [a for n in range(1, 5) for a in coordinator.handle(Joined(ClientInfo(n, 1, profile)), 0.0)]
    tasks = assigned(actions)
    coordinator.handle(Lost(3, "gone"), 0.0)
    coordinator.handle(Lost(4, "gone"), 0.0)
    for _ in range(3):
        tasks = assigned(answer(coordinator, tasks[1], 1.0) + answer(coordinator, tasks[2], 1.0))
        units = [set(tasks[n].spec.indices("hidden")) for n in (1, 2)]
        assert list(map(len, units)) == [1, 1] and len(set.union(*units)) == 2


def test_a_client_without_memory_for_any_share_changes_nothing_for_the_others():
    coordinator = coordinator_for(ist(), min_clients=2)
    join(coordinator, [1])
    actions = coordinator.handle(Joined(ClientInfo(2, 1, Profile(memory_bytes=10.0))), 0.0)
    assert len(assigned(actions)[1].spec.indices("hidden")) == 2
    assert any(isinstance(action, Dismiss) for action in actions)


def test_the_check_before_a_run_finds_a_larger_share_in_the_middle():
    coordinator = coordinator_for(ist(subnets=3), min_clients=3)
    shares = deal(coordinator.fleet.state.submodels.axes, 3, 0, 0)
    assert [len(spec.indices("hidden")) for spec in shares] == [1, 2, 1]
    memory_bytes = coordinator.fleet.cost(shares[0]).peak_bytes
    for n in (1, 2, 3):
        coordinator.roster.join(ClientInfo(n, 1, Profile(memory_bytes=memory_bytes)))
    problems = coordinator.algorithm.select.check(coordinator.fleet)
    assert len(problems) == 3 and "one of 3 equal shares needs" in problems[0]
