"""Output rows of classes that clients have masked: by hand, on both sides, through a checkpoint, and from a hostile client."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from model_zoo import MLP
from raafl.algorithms import fed_avg, fed_rolex, hetero_fl
from raafl.config.parse import parse
from raafl.core import restoring, saving
from raafl.core.masked_loss import CLASSES, output_layer
from raafl.core.options import Guard
from raafl.core.state import GlobalState
from raafl.core.types import Arrived, Update
from raafl.data import Dirichlet
from raafl.parts.merge.label_split import LabelSplit, RowsMemory
from raafl.parts.merge.mean import Mean
from raafl.parts.protect.robust import guarded
from raafl.runtime.replay import replay
from raafl.runtime.run import simulate
from raafl.submodel import FULL, Submodels
from tests.habits.source import ROOT
from tests.helpers.coordinators import answer, assigned, coordinator_for, filled, join, update_for, values_of
from tests.helpers.merges import merge_all, take
from tests.helpers.small_runs import experiment, finish


class Three(nn.Module):
    """Two inputs, `hidden` units, three classes; everything is 0 at first."""

    def __init__(self, hidden=2):
        super().__init__()
        self.fc1 = nn.Linear(2, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, 3)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def submodel_axes(self):
        return {"hidden": [("fc1.weight", 0), ("fc2.weight", 1)]}


BATCH = torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)


def state_of(module=None):
    submodels = Submodels(module or Three(), BATCH)
    return GlobalState(submodels, submodels.state(module or Three()))


def give(merge, state, *updates):
    """Let the merge fold in updates: value, classes (None = all), samples, spec; the tensors are only lent."""
    for number, (value, classes, num_samples, spec) in enumerate(updates, start=1):
        extra = {} if classes is None else {CLASSES: classes}
        update = Update(number, number, 0, filled(state, value, spec), num_samples, extra=extra)
        assert merge.reject_reason(state, update, spec, 0) is None
        take(merge, state, update, spec, 0)
        merge.detach(state)
        for buffer in update.tensors.buffers.values():
            buffer.fill_(torch.nan)
    merge_all(merge, state)
    return state.values


def test_two_clients_with_classes_0_1_and_1_2_by_hand():
    """Class 0 is client 1's (2), class 1 both have (the mean of 2 and 4), class 2 is client 2's (4); the rest is the mean."""
    values = give(LabelSplit(Mean(by_samples=False)), state_of(), (2.0, [0, 1], 1, FULL), (4.0, [1, 2], 1, FULL))
    assert values["fc2.weight"].tolist() == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]
    assert values["fc2.bias"].tolist() == [2.0, 3.0, 4.0]
    assert values["fc1.weight"].tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_samples_weigh_where_both_have_the_class():
    values = give(LabelSplit(Mean(by_samples=True)), state_of(), (2.0, [0, 1], 3, FULL), (6.0, [1, 2], 1, FULL))
    assert values["fc2.bias"].tolist() == [2.0, 3.0, 6.0]  # (3 * 2 + 6) / 4
    assert values["fc1.weight"].unique().tolist() == [3.0]


def test_a_narrow_client_has_its_units_columns_only():
    """Client 2 has unit 0 alone: of class 2, which only it has, the column of unit 1 stays at 0."""
    state = state_of()
    narrow = assigned(join(coordinator_for(hetero_fl(rates=0.5), state, min_clients=1), [1]))[1].spec
    values = give(LabelSplit(Mean(by_samples=False)), state, (2.0, [0, 1], 1, FULL), (4.0, [1, 2], 1, narrow))
    assert values["fc2.weight"].tolist() == [[2.0, 2.0], [3.0, 2.0], [4.0, 0.0]]
    assert values["fc2.bias"].tolist() == [2.0, 3.0, 4.0]


def test_a_row_that_nobody_has_stays_and_one_client_alone_changes_its_own():
    state = state_of()
    for _, buffer in state.values.buffers.items():
        buffer.fill_(0.3)
    values = give(LabelSplit(Mean()), state, (5.0, [1], 1, FULL))
    assert values["fc2.bias"].tolist() == [torch.tensor(0.3).item(), 5.0, torch.tensor(0.3).item()]
    values = give(LabelSplit(Mean()), state, (7.0, [0], 1, FULL), (9.0, None, 1, FULL))  # one that has all
    assert values["fc2.bias"].tolist() == [8.0, 9.0, 9.0]
    assert state.memory.find(RowsMemory) is None


def test_where_all_have_all_classes_it_is_the_mean_to_the_last_bit():
    def values(merge):
        torch.manual_seed(0)
        state = state_of(Three(8))
        for number in range(3):
            tensors = filled(state, 0.0)
            for buffer in tensors.buffers.values():
                buffer.normal_()
            take(merge, state, Update(number, number, 0, tensors, 1 + number), FULL, 0)
            merge.detach(state)
        merge_all(merge, state)
        return values_of(state)

    assert torch.equal(values(LabelSplit(Mean())), values(Mean()))


@pytest.mark.parametrize(
    "told", [[], [1, 0], [1, 1], [0, 3], [-1], [True], [0.0], ["0"], {"0": 1}, "01", 1, list(range(4)), None]
)
def test_classes_of_a_hostile_client_are_refused(told):
    coordinator = coordinator_for(hetero_fl(rates=1.0), state_of(), min_clients=1)
    task = assigned(join(coordinator, [1]))[1]
    update = update_for(coordinator.state, task, 1.0)
    update.extra = {CLASSES: told}
    actions = coordinator.handle(Arrived(update), 0.0)
    assert any(getattr(action, "outcome", "") == "refused:bad-classes" for action in actions)
    assert values_of(coordinator.state).eq(0).all()


def test_a_merge_that_is_cut_in_its_middle_goes_on_as_if_it_had_not_been():
    ends = []
    for cut in (False, True):
        coordinator = coordinator_for(hetero_fl(rates=1.0), state_of(), min_clients=2)
        tasks = assigned(join(coordinator, [1, 2]))
        first, second = (update_for(coordinator.state, tasks[n], 2.0 * n) for n in (1, 2))
        first.extra, second.extra = {CLASSES: [0, 1]}, {CLASSES: [1, 2]}
        coordinator.handle(Arrived(first), 0.0)
        if cut:
            saved = saving.save(coordinator)
            coordinator = coordinator_for(hetero_fl(rates=1.0), state_of(), min_clients=2)
            restoring.restore(coordinator, saved)
        coordinator.handle(Arrived(second), 0.0)
        ends.append(coordinator.state.values["fc2.bias"].tolist())
    assert ends == [[2.0, 3.0, 4.0]] * 2


# ---- which layer it is ----


class Named(Three):
    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x).logits, y)


class Scaled(Three):
    """Whose logits no layer gives as they are."""

    def forward(self, x):
        return 2.0 * super().forward(x)


class Twice(Three):
    """Whose output layer does something else as well."""

    def training_step(self, batch, index):
        return super().training_step(batch, index) + self.fc2(torch.ones(1, self.fc2.in_features)).sum()


class Frozen(Three):
    def __init__(self):
        super().__init__()
        self.fc2.requires_grad_(False)


def test_the_layer_that_gives_the_logits():
    assert [output_layer(Submodels(made(), BATCH)) for made in (Three, Named, Frozen)] == ["fc2"] * 3
    assert [output_layer(Submodels(made(), BATCH)) for made in (Scaled, Twice)] == [None, None]
    images = torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64)
    assert output_layer(Submodels(MLP(6, (4,), 3), images)) == "layers.3"
    assert output_layer(Submodels(Three())) is None  # no batch to look at


@pytest.mark.parametrize("made", [Scaled, Twice, Frozen])
def test_where_there_is_none_rows_count_for_all_and_the_run_says_so(made):
    state, merge = state_of(made()), LabelSplit(Mean(by_samples=False))
    (note,) = merge.notes(state, 2)
    assert note.startswith("masked loss: no trained linear layer was found that computes the logits")
    values = give(merge, state, (2.0, [0, 1], 1, FULL), (4.0, [1, 2], 1, FULL))
    assert made is Frozen or values["fc2.bias"].tolist() == [3.0, 3.0, 3.0]
    assert LabelSplit(Mean()).notes(state_of(), 2) == []


def test_a_median_of_rows_is_of_all_and_the_run_says_so():
    algorithm = guarded(hetero_fl(), Guard(combine="median"))
    (note,) = algorithm.merge.notes(state_of(), 2)
    assert note.startswith("masked loss: updates are combined before the merge")
    assert guarded(hetero_fl(masked=False), Guard(combine="median")).merge.notes(state_of(), 2) == []


# ---- runs ----


@pytest.mark.parametrize("make", [hetero_fl, fed_rolex])
def test_runs_differ_from_those_of_a_plain_mean(tmp_path, make):
    more, algorithm = {"partition": Dirichlet(alpha=0.05), "max_updates": 8}, make(rates=[1.0, 0.5])
    run = finish(experiment(tmp_path / "one", algorithm, **more))
    plain = finish(experiment(tmp_path / "plain", replace(algorithm, merge=Mean(by_samples=False)), **more))
    assert plain.digest != run.digest


@pytest.mark.long("test_runs_differ_from_those_of_a_plain_mean")
def test_a_run_replays(tmp_path):
    config = str(ROOT / "configs" / "quickstart.yaml")
    options = [
        "--algorithm=fed_rolex",
        "--partition=raafl.data.Dirichlet",
        "--partition.alpha=0.05",
        "--max_updates=16",
    ]
    parsed = parse("simulate", ["--config", config, *options, "--progress=quiet", f"--output={tmp_path / 'run'}"])
    simulate(parsed.experiment, parsed.config_yaml)
    assert replay(tmp_path / "run")["equal"] is True


def test_a_round_in_which_nobody_masks_is_fed_avg():
    """No client masks anything: the same answers give FedAvg's model."""
    first = coordinator_for(hetero_fl(rates=1.0), state_of(), min_clients=2)
    second = coordinator_for(fed_avg(by_samples=False), state_of(), min_clients=2)
    for coordinator in (first, second):
        tasks = assigned(join(coordinator, [1, 2]))
        answer(coordinator, tasks[2], 0.3)
        answer(coordinator, tasks[1], 0.7)
    assert torch.equal(values_of(first.state), values_of(second.state))
