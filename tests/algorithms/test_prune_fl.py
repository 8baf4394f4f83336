from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from raafl.algorithms import prune_fl
from raafl.algorithms.prune_fl import Choice, ChosenMean, Pruned, choose, unit_times
from raafl.core.algorithm import Local
from raafl.core.types import OUT_OF_MEMORY, Arrived
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.trigger import AllReported
from raafl.rules import CURRENT, Rules
from raafl.submodel import FULL, Spec
from tests.helpers.coordinators import answer, assigned, coordinator_for, join, line_state, update_for
from tests.helpers.refusals import refuses


def test_every_argument_reaches_its_part():
    algorithm = prune_fl(every=5, prunable=0.2, rates=[0.5, 0.25], by_samples=False)
    assert algorithm.select == Pruned(5, [0.5, 0.25])
    assert algorithm.local == Local()
    assert algorithm.trigger == AllReported()
    assert algorithm.merge == ChosenMean(by_samples=False, every=5, prunable=0.2)
    assert algorithm.describe()["select"] == (
        "units by squared gradient per time, chosen every 5 rounds, at most 0.5, 0.25 of the parameters"
    )


test_bad_arguments_are_named = refuses(
    prune_fl,
    ({"every": 0}, "every is 0: give a number above 0"),
    ({"prunable": 0.0}, "prunable is 0.0: give a number above 0 and below 1"),
    ({"prunable": 1.0}, "prunable is 1.0"),
    ({"rates": 1.5}, "a rate in rates is 1.5"),
    ({"every": 3, "submodel": RateSelect()}, "every is 3, but submodel says"),
)


def test_units_take_their_share_of_the_flops():
    submodels = line_state().submodels
    times, fixed = unit_times(submodels)

    def flops(spec):
        return submodels.cost(spec, 2).flops_per_sample

    assert times["hidden"] > 0 and fixed > 0
    for units in (1, 2, 3):
        assert flops(Spec.select({"hidden": range(units)})) == pytest.approx(fixed + (units - 1) * times["hidden"])
    assert flops(Spec()) == pytest.approx(fixed + 3 * times["hidden"])


def test_a_choice_by_hand(monkeypatch):
    """Gamma = (gain in) / (time in); t = 2 for each unit, c = 4."""
    monkeypatch.setattr(
        sys.modules["raafl.algorithms.prune_fl"], "unit_times", lambda submodels: ({"hidden": 2.0}, 4.0)
    )
    submodels = line_state().submodels
    values = {"fc2.weight": torch.tensor([[1.0, -2.0, 3.0, 4.0]])}

    def squares(*gains):
        return {"fc2.weight": torch.tensor([gains]), "fc2.bias": torch.tensor([4.0])}

    # Half may go: units 0 and 1 have the smallest weights. In are the bias and units 2, 3: (4 + 3 + 5) / (4 + 2 * 2) = 1.5.
    # Unit 0 is worth 10 / 2 = 5 and comes in: 22 / 10 = 2.2. Unit 1, worth 0.5, does not.
    first = choose(submodels, values, squares(10.0, 1.0, 3.0, 5.0), 0.5)
    assert first == [("hidden", 0), ("hidden", 3), ("hidden", 2)]
    # One of these three may go, unit 0: (4 + 3 + 5) / 8 = 1.5 without it. Unit 1, dropped before, is worth 4.5 now and comes
    # back: 21 / 10 = 2.1. Unit 0, worth 1, goes.
    second = choose(submodels, values, squares(2.0, 9.0, 3.0, 5.0), 0.5, first)
    assert second == [("hidden", 1), ("hidden", 3), ("hidden", 2)]
    # Whatever is learned, what may not be dropped stays.
    assert choose(submodels, values, squares(0.0, 0.0, 0.0, 0.0), 0.5)[-2:] == [("hidden", 2), ("hidden", 3)]


def test_whole_rounds_choose_for_the_rounds_between():
    """Rounds 0 and 3 are of the whole model; between them both clients train the units that have learned."""
    state = line_state()
    state.values["fc2.weight"].copy_(torch.tensor([[1.0, 3.0, 2.0, 4.0]]))
    state.values["fc1.weight"][1] = 3.0
    coordinator = coordinator_for(prune_fl(every=3, prunable=0.5), state, min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    assert {str(task.spec) for task in tasks.values()} == {"full"}
    answer(coordinator, tasks[1], 3.0)
    tasks = assigned(answer(coordinator, tasks[2], 3.0))
    # All is 3 now, so units 0 and 1 may go. Squared changes: of fc2 4, 0, 1, 1; of the rows of fc1 18, 0, 18, 18. Unit 0 has
    # learned most and comes in first; unit 1 nothing.
    assert state.memory.find(Choice) == Choice(0, [("hidden", 0), ("hidden", 2), ("hidden", 3)])
    for value in (5.0, 7.0):
        assert {task.spec for task in tasks.values()} == {Spec.select({"hidden": [0, 2, 3]})}
        answer(coordinator, tasks[1], value)
        tasks = assigned(answer(coordinator, tasks[2], value))
    assert state.values["fc2.weight"].tolist() == [[7.0, 3.0, 7.0, 7.0]]
    assert {str(task.spec) for task in tasks.values()} == {"full"}


@pytest.mark.parametrize(("revision", "gets_less"), [(5, False), (CURRENT, True)])
def test_a_client_that_ran_out_of_memory_gets_less_in_whole_rounds_too(revision, gets_less):
    coordinator = coordinator_for(prune_fl(every=3), min_clients=2)
    coordinator.change(fleet=replace(coordinator.fleet, rules=Rules(revision)))
    task = assigned(join(coordinator, [1, 2]))[1]
    refused = update_for(coordinator.state, task, 0.0, refusal=OUT_OF_MEMORY)
    again = assigned(coordinator.handle(Arrived(refused), 1.0))[1]
    assert task.spec == FULL and (again.spec != FULL) is gets_less


def test_a_client_gets_the_best_of_the_chosen_within_its_rate():
    """13 parameters in all, 3 for a unit and 1 besides: 0.6 of them hold two units, 0.4 one."""
    state = line_state()
    state.memory.put(Choice(0, [("hidden", 2), ("hidden", 0), ("hidden", 3)]))
    state.version = 1
    coordinator = coordinator_for(prune_fl(rates=[1.0, 0.6, 0.4]), state, min_clients=3)
    tasks = assigned(join(coordinator, [1, 2, 3]))
    assert [list(tasks[n].spec.indices("hidden")) for n in (1, 2, 3)] == [[0, 2, 3], [0, 2], [2]]
