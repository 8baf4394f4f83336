"""Axes: declared as plain data, sized by the shapes, and checked against the tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.submodel import Axis, Member, Spec, SpecError, Submodels
from raafl.submodel.find.declared_axes import declared_axes, without_overlaps
from raafl.submodel.spec import AxisTable
from tests.helpers.refusals import refuses
from tests.submodel.models import FusedAttention, Tied

SHAPES = {"fc1.weight": (6, 4), "fc1.bias": (6,), "fc2.weight": (3, 12), "qkv": (18, 4)}


def declared(**axes):
    return AxisTable(declared_axes(axes, SHAPES, {"alias": "fc1.weight"}), SHAPES)


def test_sizes_follow_from_the_shapes():
    table = declared(
        a=[("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1, 2)], b=[("qkv", 0, 2, 0), ("qkv", 0, 1, 12)]
    )
    assert {name: axis.size for name, axis in table.axes.items()} == {"a": 6, "b": 6}
    assert table.axes["a"].members[2] == Member("fc2.weight", 1, 2, 0)


def test_runs_of_a_unit_and_of_several_members():
    table = declared(b=[("qkv", 0, 2, 0), ("qkv", 0, 1, 12)])
    # index 1 is rows 2, 3 of the first part and row 13 of the second
    assert table.selections(Spec.select({"b": [1]})) == {"qkv": {0: [(2, 4), (13, 14)]}}
    # what no member covers stays: here the rows from 15 of an axis of three
    short = AxisTable([Axis("c", 3, (Member("qkv", 0, 5),))], SHAPES)
    assert short.selections(Spec.select({"c": [0, 2]})) == {"qkv": {0: [(0, 5), (10, 18)]}}
    assert short.selections(Spec.select({"c": range(3)})) == {}


def test_a_tied_name_is_its_tensor():
    table = declared(a=[("alias", 0), ("fc1.weight", 0)])
    assert table.axes["a"].members == (Member("fc1.weight", 0),)


def test_objects_are_taken_as_they_are():
    axis = Axis("a", 2, (Member("fc1.weight", 0, 3),))
    assert declared(a=axis).axes == {"a": axis}


test_mistakes_are_named = refuses(
    declared,
    ({"a": [("fc1.wieght", 0)]}, "no such parameter or buffer; did you mean 'fc1.weight'"),
    ({"a": [("fc1.weight", 2)]}, r"its shape is \(6, 4\): give a dimension from 0 to 1"),
    (
        {"a": [("fc1.weight", 0), ("fc2.weight", 1)]},
        "has 12 indices .* but 6 in another|has 6 indices .* but 12 in another",
    ),
    ({"a": ["fc1.weight"]}, "give \\(parameter name, dim"),
    ({"a": [("fc1.weight", "0")]}, "give \\(parameter name, dim"),
    ({"a": []}, "without members"),
    ({"a": [("fc1.weight", 0, 0)]}, "unit and size must be 1 or more"),
    ({"a": [("fc1.weight", 0, 2, 5)]}, "ends at element 7 of 6"),
    ({"a": [("fc1.weight", 0)], "b": [("fc1.weight", 0)]}, "'a' and 'b' both have element 0 of dimension 0"),
    ({"a": Axis("a", 7, (Member("fc1.bias", 0),))}, "ends at element 7 of 6"),
    error=SpecError,
)


def test_a_whole_group_of_heads_goes_at_once():
    torch.manual_seed(0)
    module = FusedAttention()
    submodels = Submodels(module)
    assert {name: axis.size for name, axis in submodels.axes.items()} == {"heads": 2}
    small = submodels.plan(Spec.select({"heads": [1]})).gather(submodels.state(module))
    rows = [*range(6, 12), *range(15, 18), *range(21, 24)]  # q heads 2 and 3, k and v head 1
    assert torch.equal(small["qkv.weight"], module.qkv.weight[rows])
    assert torch.equal(small["out.weight"], module.out.weight[:, 6:])


def test_a_module_may_follow_its_own_width():
    class Heads(Tied):
        num_units = 8

        def submodel_axes(self):
            return {"units": [("up.weight", 0), ("up.bias", 0), ("down.weight", 1)]}

        def submodel_resize(self, counts):
            self.num_units = counts["units"]

    submodels = Submodels(Heads())
    assert submodels.shrink(Spec.select({"units": [0, 5, 7]})).module.num_units == 3
    assert submodels.shrink().module.num_units == 8


def test_declared_axes_need_no_tracing(monkeypatch):
    monkeypatch.setattr("raafl.submodel.find.discover.discover_axes", lambda *args: pytest.fail("traced"))
    assert Submodels(FusedAttention()).axes
    assert isinstance(Submodels(nn.Linear(2, 2)).layout().fingerprint, str)  # nor does the full model


def test_of_axes_with_common_elements_the_one_with_more_members_is_left():
    """Heads of a layer, found alone and as heads of all layers, which a prefix ties together; units 8 to 11 are free."""
    alone = Axis("layer.heads", 2, (Member("q", 0, 4),))
    tied = Axis("heads", 2, (Member("q", 0, 4), Member("prefix", 1, 4)))
    free = Axis("free", 4, (Member("q", 0, 1, 8),))
    kept, reasons = without_overlaps([alone, tied, free])
    assert kept == [tied, free]
    assert reasons == {"layer.heads": "axis 'heads' has elements of its 'q', too"}
    AxisTable(kept, {"q": (12, 3), "prefix": (5, 8)})
