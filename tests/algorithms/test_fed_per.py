"""FedPer and LG-FedAvg: what is shared, and what each client gets back as its own, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.algorithms import fed_per
from raafl.core.snapshots import Snapshots
from raafl.core.state import GlobalState
from raafl.errors import BadInput
from raafl.rules import Rules
from raafl.submodel import Submodels
from tests.helpers.coordinators import assigned, coordinator_for, join, line_state
from tests.helpers.single_task import Slope, give


def layers(flat):
    return flat["fc1.weight"][0, 0].item(), flat["fc2.weight"][0, 0].item(), flat["fc2.bias"].item()


@pytest.mark.parametrize(
    "algorithm, theirs, new",
    [
        (fed_per(cohort=2), ((3.0, 2.0, 2.0), (3.0, 4.0, 4.0)), (3.0, 1.0, 1.0)),
        (fed_per("body", cohort=2), ((2.0, 3.0, 3.0), (4.0, 3.0, 3.0)), (1.0, 3.0, 3.0)),
        (fed_per(layers=["fc2.bias"], cohort=2), ((3.0, 3.0, 2.0), (3.0, 3.0, 4.0)), (3.0, 3.0, 1.0)),
    ],
    ids=["head", "body", "by name"],
)
def test_after_a_round_of_two_that_come_from_1_to_2_and_4(algorithm, theirs, new):
    coordinator = coordinator_for(algorithm, line_state(2, 1.0), min_clients=3, num_clients=3)
    tasks = list(assigned(join(coordinator, [1, 2, 3])).values())
    for task, value in zip(tasks, (2.0, 4.0), strict=True):
        give(coordinator, task, value)
    assert tuple(layers(Snapshots(coordinator).cut(task)) for task in tasks) == theirs
    assert layers(coordinator.state.values) == new  # what a client that is new begins with


class Spare(Slope):
    """The last linear layer is one that the step does not use."""

    def __init__(self):
        super().__init__()
        self.line, self.head, self.spare = nn.Linear(1, 2), nn.Linear(2, 1), nn.Linear(2, 4)

    def training_step(self, batch, index):
        return self.head(self.line(batch[0])).mean()


@pytest.mark.parametrize("local", ["head", "body"])
def test_a_head_that_the_step_does_not_use_is_refused_with_the_layers_that_it_uses(local):
    module, batch = Spare(), (torch.ones(2, 1), torch.ones(2, 1))
    refused = (
        r"^layers is null, which is the last linear layer, 'spare', but training_step does not use it: give one that"
    )
    with pytest.raises(BadInput, match=refused), fed_per(local).local.trial(module):
        module.training_step(batch, 0)
    with fed_per(local, layers=["head"]).local.trial(module):
        module.training_step(batch, 0)


def test_paths_that_are_not_there_and_nothing_shared_are_said():
    state = line_state()
    assert "did you mean" in fed_per(layers=["fc1.weigth"]).merge.check(state)[0]
    assert "no layer is shared" in fed_per(layers=["fc1", "fc2"]).merge.notes(state, 2)[0]
    with pytest.raises(BadInput, match="local is 'tail'"):
        fed_per("tail")


class TiedEnds(Slope):
    """The last linear layer has the weight of the first, as in language models, and a bias of its own."""

    def __init__(self):
        super().__init__()
        self.line, self.middle, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1), nn.Linear(1, 1)
        self.head.weight = self.line.weight


@pytest.mark.parametrize(
    ("layers", "own"),
    [
        (None, None),  # the head's bias alone would be a client's own
        (["head"], None),
        (["line"], None),
        (["line", "head"], {"line.weight", "head.bias"}),
        (["head.bias", "middle"], {"head.bias", "middle.weight", "middle.bias"}),
    ],
)
def test_a_parameter_is_either_a_clients_own_or_shared_in_all_its_places(layers, own):
    submodels = Submodels(TiedEnds(), (torch.ones(2, 1), torch.ones(2, 1)))
    state = GlobalState(submodels, submodels.state(TiedEnds()))
    merge = fed_per(layers=layers).merge
    if own is None:
        refused = (
            f"layers is {layers or 'null'}, and 'head.weight' is the same parameter as 'line.weight', of which one is"
        )
        assert [problem[: len(refused)] for problem in merge.check(state)] == [refused]
    else:
        assert (merge.check(state), merge.own(submodels)) == ([], own)
    submodels.rules = Rules(6)  # an older run folder replays
    assert merge.check(state) == []
