"""A module with other values for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.parts.local.swap_parameters import with_parameters
from raafl.submodel import FlatTensors


def test_values_are_others_within_and_own_again_after_however_it_ends():
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    module.log = said = []
    storage = module[0].weight.data_ptr()
    other = FlatTensors.from_named({"0.weight": torch.full((1, 1), 7.0)})
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ZeroDivisionError), with_parameters(module, other):
        assert module[0].weight.item() == 7.0
        module(torch.ones(2, 1)).sum().backward()  # counts a batch
        module.log("loss", 1.0)
        raise ZeroDivisionError
    assert module[0].weight.data_ptr() == storage and module.log is said and said == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert "log_dict" not in module.__dict__
