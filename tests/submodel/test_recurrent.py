"""Recurrent nets: states are followed, both directions go together, weights stay in the flat storage."""

from __future__ import annotations

import torch
from torch import nn

from raafl.submodel import FULL, Member, Spec, Submodels
from tests.local.bench import filled
from tests.submodel.networks import CASES, Spotter, built, last_state


def test_the_last_state_of_a_recurrent_net_is_followed():
    class LastState(Spotter):
        forward = last_state

    for kind in (nn.GRU, nn.LSTM):
        submodels = Submodels(LastState(kind), CASES["gru"].inputs())
        assert {axis.name: axis.size for axis in submodels.axes.values()} == {"conv": 6, "rnn": 5}
        assert Member("head.weight", 1) in submodels.axes["rnn"].members


def test_both_directions_of_a_recurrent_net_go_together():
    module, submodels, full = built("both_ways")
    small = filled(submodels, Spec.select({"rnn": [1, 4]}), full).module
    assert torch.equal(small.head.weight, module.head.weight[:, [1, 4, 6, 9]])
    assert torch.equal(
        small.rnn.weight_ih_l1_reverse, module.rnn.weight_ih_l1_reverse[[1, 4, 6, 9, 11, 14]][:, [1, 4, 6, 9]]
    )

    class Mean(Spotter):
        def forward(self, x):
            out, _ = self.rnn(self.conv(x).transpose(1, 2))
            return self.head(torch.relu(out.mean(dim=1)))

    assert list(Submodels(Mean(bidirectional=True), CASES["gru"].inputs()).axes) == ["conv", "rnn"]


def test_a_recurrent_net_behind_a_branch_is_followed_by_value():
    class Hidden(Spotter):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    submodels = Submodels(Hidden(), [torch.ones(2, 3, 9)])
    assert {axis.name: axis.size for axis in submodels.axes.values()} == {"conv": 6, "rnn": 5}


def test_the_units_and_projection_of_a_projected_net():
    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, proj_size=2), nn.Linear(2, 5)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    submodels = Submodels(Projected(), [torch.ones(6, 2, 3)])
    assert {axis.name: axis.size for axis in submodels.axes.values()} == {"rnn": 4, "rnn.2": 2}
    small = submodels.shrink(Spec.select({"rnn": [0, 3], "rnn.2": [1]})).module
    assert (small.rnn.hidden_size, small.rnn.proj_size) == (2, 1)
    assert small(torch.ones(6, 2, 3)).shape == (6, 2, 5)


def test_recurrent_weights_stay_in_the_flat_storage():
    _, submodels, full = built("gru")
    for spec in (FULL, Spec.select({"rnn": [0, 3]})):
        shrunk = filled(submodels, spec, full)
        x = CASES["gru"].inputs()
        shrunk.module.rnn.flatten_parameters()
        shrunk.module(**x)
        for name, parameter in shrunk.module.rnn.named_parameters():
            assert parameter.data_ptr() == shrunk.present[f"rnn.{name}"].data_ptr()
        before = shrunk.module(**x)
        shrunk.present["rnn.weight_hh_l1"].mul_(3)
        assert not torch.equal(shrunk.module(**x), before)
