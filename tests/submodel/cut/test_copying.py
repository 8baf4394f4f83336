"""Copies of a module's structure."""

from __future__ import annotations

from torch import nn

from raafl.submodel.cut.copying import without_values


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
