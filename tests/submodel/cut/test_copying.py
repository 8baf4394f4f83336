"""Copies of a module's structure."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.submodel import Submodels
from raafl.submodel.cut.layers import remade, without_values


def test_a_copy_has_tables_of_its_own_the_empty_ones_too():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    shared = {}
    module[0].known, module[1].known, module[1].hook = shared, shared, module.register_forward_hook(print)
    copy = without_values(module)
    for part, other in zip(module.modules(), copy.modules(), strict=True):
        assert vars(part).keys() == vars(other).keys()
        for name, table in vars(part).items():
            if isinstance(table, dict | set):
                assert vars(other)[name] is not table and type(vars(other)[name]) is type(table), name
                assert len(vars(other)[name]) == len(table), name
    assert copy[0].known is copy[1].known  # what two parts share, their copies share
    assert list(copy._forward_hooks.values()) == [print]


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_what_a_hook_computes_before_each_forward_is_computed_in_a_copy_too():
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(3, 4)
    module(x)  # leaves a weight that deepcopy refuses: it hangs on weight_g and weight_v
    copy = remade(module, lambda p: p.detach().clone(), lambda b: b)
    assert torch.equal(copy(x), module(x))
    copy(x).sum().backward()
    assert copy[0].weight_g.grad is not None and module[0].weight_g.grad is None
    assert without_values(module)[0].weight_v.is_meta
    submodels = Submodels(module, (x, torch.zeros(3, dtype=torch.long)))
    assert [axis.size for axis in submodels.axes.values()] == [6]
