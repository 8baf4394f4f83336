from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from raafl.algorithms import platon
from raafl.algorithms.platon import BestUnits, MeasuredSensitivity, PlatonMemory, ScoredMean, Sensitivity, cubic
from raafl.core.algorithm import Task
from raafl.core.types import Arrived, Assignment, ClientInfo, Joined
from raafl.devices.profiles import Profile
from raafl.parts.merge.mean import Staleness
from raafl.parts.select.rate_select import unit_scores
from raafl.parts.trigger import AllReported, EachArrival
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from tests.helpers.coordinators import (
    assigned,
    coordinator_for,
    cut_in_the_middle,
    join,
    line_state,
    update_for,
    values_of,
)
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import experiment, finish
from tests.local.bench import filled, task_in


def test_every_argument_reaches_its_part():
    algorithm = platon([1.0, 0.5], 3, 9, 0.5, 0.6, 4)
    assert algorithm.select == BestUnits([1.0, 0.5], 3, 9, 4)
    assert algorithm.local == Sensitivity(0.5, 0.6, 4)
    assert algorithm.trigger == AllReported()
    assert algorithm.merge == ScoredMean(groups=4)
    late = platon(trigger="each", alpha=0.5, staleness="hinge", staleness_a=2.0, staleness_b=3.0)
    assert late.trigger == EachArrival()
    assert late.merge == ScoredMean(0.5, Staleness("hinge", 2.0, 3.0), by_samples=False)
    assert platon().describe()["select"] == (
        "units by upper confidence bound, down to 1, 0.5, 0.25, 0.125, 0.0625 of the width within 21 tasks"
    )


test_bad_arguments_are_named = refuses(
    platon,
    ({"rates": 1.5}, "a rate in rates is 1.5"),
    ({"warm_up": -1}, "warm_up is -1: give 0 or more"),
    ({"rounds": 0}, "rounds is 0: give a number above 0"),
    ({"beta1": 1.0}, "beta1 is 1.0: give a number from 0 to below 1"),
    ({"beta2": -0.1}, "beta2 is -0.1"),
    ({"groups": 0}, "groups is 0"),
    ({"trigger": "al"}, "trigger is 'al': did you mean 'all'"),
    ({"alpha": 0.5}, "alpha is 0.5, but trigger all"),
    ({"trigger": "each", "alpha": 2.0}, "alpha is 2.0"),
)


def test_the_schedule_by_hand():
    """From 1 to 1/4 in 4 tasks after 2: at a quarter, a half and three quarters of the way (3/4)^3, 1/8 and 1/64 are left."""
    shares = [cubic(t, 1.0, 0.25, 2, 4) for t in range(9)]
    assert shares == [1.0, 1.0, 1.0, 0.25 + 0.75 * 27 / 64, 0.25 + 0.75 / 8, 0.25 + 0.75 / 64, 0.25, 0.25, 0.25]
    assert cubic(0, 0.5, 0.5, 0, 1) == 0.5


class LoraPair(nn.Module):
    """Two weights, two units of one weight each."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0]))

    def submodel_axes(self) -> dict[str, list[tuple[str, int]]]:
        return {"units": [("w", 0)]}


def task_of(submodels: Submodels, module: nn.Module, spec: Spec = FULL, extra: dict | None = None) -> Task:
    """A task whose step leaves the weights as they are."""
    assignment = Assignment(1, 1, 0, 0, 0, spec, 1, None, None, 0, 0.0, extra=extra or {})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    received = FlatTensors.zeros(submodels.layout(spec))
    changes = {"optimizer": optimizer, "received": received, "num_batches": 3, "update": optimizer.zero_grad}
    return task_in(module, submodels, assignment, **changes)


def test_three_steps_of_two_weights_by_hand():
    """beta1 = beta2 = 1/2, weights 1 and -2. Gradients (1, 1), (2, 0), (0, 3): I = (1, 2), (2, 0), (0, 6).

    Ibar: 1/2, 5/4, 5/8 and 1, 1/2, 13/4. |I - Ibar|: 1/2, 3/4, 5/8 and 1, 1/2, 11/4. Ubar: 1/4, 1/2, 9/16 and 1/2, 1/2, 13/8.
    """
    module = LoraPair()
    submodels, local = Submodels(module), Sensitivity(0.5, 0.5)
    hook = MeasuredSensitivity(task_of(submodels, module), local)
    gradients = [[1.0, 1.0], [2.0, 0.0], [0.0, -3.0]]
    for gradient in gradients:
        module.w.grad = torch.tensor(gradient)
        hook.update()
        assert module.w.grad is None
    told = hook.finish()
    assert told == {"importance": {"units": [0.625, 3.25]}, "uncertainty": {"units": [0.5625, 1.625]}}
    # Another task goes on from there: I = (1, 0), Ibar 13/16, 13/8; |I - Ibar| 3/16, 13/8; Ubar 3/8, 13/8.
    hook = MeasuredSensitivity(task_of(submodels, module, extra=told), local)
    module.w.grad = torch.tensor([1.0, 0.0])
    hook.update()
    assert hook.finish() == {"importance": {"units": [0.8125, 1.625]}, "uncertainty": {"units": [0.375, 1.625]}}


class Attending(nn.Module):
    """q, k and v in one tensor: a cut moves what lies behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 4, 6, batch_first=True) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def test_units_of_a_cut_model_are_scored_where_they_lie():
    """A slow reference: |theta g| written back into a whole model of zeros, and summed there."""
    torch.manual_seed(0)
    full = Attending()
    submodels = Submodels(full)
    spec = Spec.select({"blocks.0.heads": [1, 3], "blocks.0.ffn": [0, 2, 5], "blocks.1.heads": [2]})
    state = submodels.state(full)
    small = filled(submodels, spec, state)
    hook = MeasuredSensitivity(task_of(submodels, small.module, spec), Sensitivity(0.0, 0.0))
    worth = FlatTensors.zeros(submodels.layout(spec, "trained"))
    for name, parameter in small.module.named_parameters():
        parameter.grad = torch.randn_like(parameter)
        worth[name].copy_((parameter * parameter.grad).abs().detach())
    hook.update()
    whole = FlatTensors.zeros(submodels.layout())
    submodels.plan(spec).scatter_(whole, worth)
    told = hook.finish()["importance"]
    for name, axis in submodels.axes.items():
        kept = spec.indices(name) or range(axis.size)
        expected = unit_scores(axis, dict(whole.items()), squared=False)[list(kept)]
        assert told[name] == pytest.approx(expected.tolist(), rel=1e-4)


def test_neighbours_share_a_score_where_an_axis_is_wide():
    """Four units in two groups; of the first unit 1 alone is kept, of the second both: their mean."""
    submodels = line_state().submodels
    spec = Spec.select({"hidden": [1, 2, 3]})
    small = submodels.shrink(spec)
    small.present.buffers[torch.float32].fill_(1.0)
    hook = MeasuredSensitivity(task_of(submodels, small.module, spec), Sensitivity(0.0, 0.0, groups=2))
    small.module.fc1.weight.grad = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    small.module.fc2.weight.grad = torch.tensor([[0.5, 1.0, 2.0]])
    hook.update()
    assert hook.finish()["importance"] == {"hidden": [2.5, (5.0 + 8.0) / 2]}


def told(*importance: float, uncertainty: list[float] | None = None) -> dict:
    return {
        "importance": {"hidden": list(importance)},
        "uncertainty": {"hidden": uncertainty or [1.0] * len(importance)},
    }


def hand_in(coordinator, task, value, extra):
    update = replace(update_for(coordinator.state, task, value), extra=extra)
    return assigned(coordinator.handle(Arrived(update), 0.0))


def test_each_client_keeps_the_units_of_its_own_highest_bound():
    """Rate 1/2 after one task in which it falls: two of four units, in its third task and after."""
    coordinator = coordinator_for(platon(rates=0.5, warm_up=1, rounds=1), line_state(), min_clients=2)
    state = coordinator.state
    tasks = assigned(join(coordinator, [1, 2]))
    for t in range(2):
        assert {str(task.spec) for task in tasks.values()} == {"full"}
        assert {bool(task.extra) for task in tasks.values()} == {t > 0}
        hand_in(coordinator, tasks[1], 1.0, told(1.0, 4.0, 2.0, 3.0))
        tasks = hand_in(coordinator, tasks[2], 1.0, told(1.0, 4.0, 2.0, 3.0, uncertainty=[9.0, 1.0, 0.0, 2.0]))
    # bounds: 1, 4, 2, 3 and 9, 4, 0, 6
    assert [list(tasks[n].spec.indices("hidden")) for n in (1, 2)] == [[1, 3], [0, 3]]
    assert tasks[1].extra == told(4.0, 3.0)
    assert tasks[2].extra == told(1.0, 3.0, uncertainty=[9.0, 2.0])
    # Client 1 finds less in both: unit 2, last measured at 2, comes back before unit 3 at 1.
    hand_in(coordinator, tasks[1], 5.0, told(2.5, 1.0))
    tasks = hand_in(coordinator, tasks[2], 7.0, told(1.0, 3.0, uncertainty=[9.0, 2.0]))
    assert list(tasks[1].spec.indices("hidden")) == [1, 2]
    assert tasks[1].extra == told(2.5, 2.0)
    # a mean over those that trained it: unit 3 both, unit 1 client 1, unit 0 client 2, unit 2 nobody
    assert state.values["fc2.weight"].tolist() == [[7.0, 5.0, 1.0, 6.0]]


def test_units_that_do_not_fit_are_tried_once_they_can_be():
    """A client without memory for more than two units begins with the first, goes on with the others, then has a choice."""
    state = line_state()
    coordinator = coordinator_for(platon(rates=1.0), state)
    need = coordinator.fleet.cost(Spec.select({"hidden": range(2)})).peak_bytes
    client = ClientInfo(1, 1, Profile(flops_per_s=1.0, memory_bytes=need))
    tasks = assigned(coordinator.handle(Joined(client), 0.0))
    assert list(tasks[1].spec.indices("hidden")) == [0, 1]
    tasks = hand_in(coordinator, tasks[1], 1.0, told(5.0, 2.0))
    assert list(tasks[1].spec.indices("hidden")) == [2, 3]
    assert tasks[1].extra == told(0.0, 0.0, uncertainty=[0.0, 0.0])
    tasks = hand_in(coordinator, tasks[1], 1.0, told(3.0, 1.0))
    assert list(tasks[1].spec.indices("hidden")) == [0, 2]
    small = replace(client, profile=Profile(memory_bytes=8))
    fleet = replace(coordinator.fleet, clients={1: small}, cache={})
    assert "too little for any submodel" in coordinator.algorithm.select.check(fleet)[0]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"importance": {"hidden": [1.0] * 4}},
        told(1.0, 2.0, 3.0),
        told(1.0, 2.0, 3.0, -1.0),
        told(1.0, 2.0, 3.0, float("nan")),
        told(1.0, 2.0, 3.0, float("inf")),
        told(1.0, 2.0, 3.0, 10**400),
        told(1.0, 2.0, 3.0, True),
        told(1.0, 2.0, 3.0, "4"),
        {"importance": {"other": [1.0] * 4}, "uncertainty": {"hidden": [1.0] * 4}},
        {"importance": [1.0] * 4, "uncertainty": {"hidden": [1.0] * 4}},
    ],
)
def test_scores_that_are_none_are_refused(extra):
    coordinator = coordinator_for(platon(rates=0.5))
    tasks = assigned(join(coordinator, [1]))
    before = values_of(coordinator.state).clone()
    hand_in(coordinator, tasks[1], 1.0, extra)
    assert coordinator.admission.refused == {"bad-scores": 1}
    assert torch.equal(values_of(coordinator.state), before) and coordinator.state.memory.of(PlatonMemory).value == {}


def test_what_is_told_and_measured_costs():
    submodels = line_state().submodels
    plain, cost = submodels.cost(FULL, 2), Sensitivity().estimate(submodels, FULL, 2, {})
    # four units, two numbers of 12 bytes each way; 12 parameters on the axis, of which fc1 has 8
    assert cost.up_bytes - plain.up_bytes == cost.down_bytes - plain.down_bytes == 4 * 2 * 12
    assert cost.flops_per_sample - plain.flops_per_sample == 2 * 12 / 2
    assert cost.peak_bytes - plain.peak_bytes == 8 * 4 + 2 * 4 * 4
    assert cost.moved_bytes_per_sample - plain.moved_bytes_per_sample == 4 * 12 * 4 / 2
    followed = Sensitivity().cost(submodels, FULL, 2, {})
    assert (followed.up_bytes, followed.down_bytes) == (cost.up_bytes, cost.down_bytes)
    assert followed.flops_per_sample == plain.flops_per_sample  # it adds no product of matrices
    grouped = Sensitivity(groups=2).cost(submodels, Spec.select({"hidden": range(3)}), 2, {})
    assert grouped.up_bytes - submodels.cost(Spec.select({"hidden": range(3)}), 2).up_bytes == 2 * 2 * 12


class Whole(nn.Module):
    """Nothing to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def submodel_axes(self) -> dict[str, list[tuple[str, int]]]:
        return {}


def test_a_model_without_axes_is_averaged_and_a_note_says_so():
    notes = Sensitivity().notes(Submodels(Whole()))
    assert len(notes) == 1 and notes[0].startswith("platon prunes nothing here, so it is plain averaging")
    assert Sensitivity().notes(line_state().submodels) == []
    assert Sensitivity(groups=2).notes(line_state().submodels) == [
        "platon scores 1 axes of more than 2 units by groups of neighbours"
    ]


@pytest.mark.parametrize("trigger", ["all", "each"])
def test_it_prunes(tmp_path, trigger):
    algorithm = platon(rates=0.25, warm_up=1, rounds=2, groups=8, trigger=trigger)
    one = finish(experiment(tmp_path / "run", algorithm, max_updates=16))
    specs = [row["spec"] for row in one.rows() if row["client"] == "1"]
    assert specs[0] == "full" and "[6" in specs[-1]  # of 24 units a quarter
    assert "non-finite" not in one.text("clients.csv")


def test_scores_survive_a_checkpoint(monkeypatch):
    from tests.helpers import coordinators

    def scored(state, assignment, value, **more):
        number = len(assignment.spec.indices("hidden") or range(4))
        return replace(update_for(state, assignment, value, **more), extra=told(*(value + i for i in range(number))))

    monkeypatch.setattr(coordinators, "update_for", scored)

    def fresh():
        return coordinator_for(platon(rates=0.5, rounds=1), line_state(value=0.5), min_clients=4)

    whole, again = cut_in_the_middle(fresh, 6, lambda step: float(step % 5))
    scores, of_again = (one.state.memory.of(PlatonMemory).value for one in (whole, again))
    assert scores == of_again and len(scores) == 4
    assert torch.equal(values_of(whole.state), values_of(again.state))
