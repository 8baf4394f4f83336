"""What travels beside a submodel: layouts, how they are cut and taken apart, by hand."""

from __future__ import annotations

import pytest
import torch

from raafl.core.local import Local
from raafl.core.payload import Payload
from raafl.submodel import FULL, FlatTensors, Layout, Spec
from tests.helpers.coordinators import line_state

PART = Spec.select({"hidden": [2]})


def test_without_bundles_layouts_are_the_submodels_own():
    submodels = line_state().submodels
    payload = Payload(submodels)
    assert not payload.has_bundles and payload.names == submodels.parameter_names
    for spec in (FULL, PART):
        assert payload.layout(spec, "sent") is submodels.layout(spec, "sent")
        assert payload.layout(spec, "trained") is submodels.layout(spec, "trained")


def test_bundles_lie_behind_the_values_and_are_cut_as_they_are():
    payload = Payload(line_state().submodels, down=("a", "b"), up=("b",))
    shapes = {"fc1.weight": (1, 2), "fc2.weight": (1, 1), "fc2.bias": (1,)}
    assert payload.layout(PART, "trained").shapes == shapes | {f"b/{name}": shape for name, shape in shapes.items()}
    assert list(payload.layout(PART, "sent").by_name) == [*shapes, *(f"{b}/{n}" for b in "ab" for n in shapes)]
    assert {"a/fc2.bias", "b/fc1.weight", "fc1.weight"} <= payload.names


def test_parts_share_the_storage_of_the_whole():
    payload = Payload(line_state().submodels, down=("a", "b"))
    flat = FlatTensors.from_named(
        {name: torch.full(shape, 1.0 + "ab".find(name[0])) for name, shape in payload.layout(PART).shapes.items()}
    )
    values, bundles = payload.split(flat, PART, "sent")
    assert [values["fc2.bias"].item(), bundles["a"]["fc2.bias"].item(), bundles["b"]["fc2.bias"].item()] == [0, 1, 2]
    assert bundles["a"].layout == values.layout
    bundles["b"].zero_()
    assert flat["b/fc1.weight"].tolist() == [[0, 0]] and flat["a/fc1.weight"].tolist() == [[1, 1]]


def test_a_plan_moves_values_and_bundles():
    payload = Payload(line_state().submodels, up=("b",))
    whole = FlatTensors.zeros(payload.layout(FULL, "trained"))
    whole["fc1.weight"][2], whole["b/fc2.weight"][0, 2] = 3.0, 4.0
    small = payload.plan(PART, "trained").gather(whole)
    assert small["fc1.weight"].tolist() == [[3, 3]] and small["b/fc2.weight"].tolist() == [[4]]


def test_a_bundle_of_its_own_layout_is_as_the_task_says_and_not_compressed():
    every = Layout.pack([("hidden", (4,), torch.float32)])
    payload = Payload(
        line_state().submodels,
        down=("a", "s"),
        up=("s",),
        own=lambda name, spec: None if name == "a" else every if spec is None or spec.trained == () else Layout(()),
    )
    frozen = Spec(trained=())
    assert list(payload.layout(frozen, "trained").by_name) == ["s/hidden"]
    assert payload.layout(FULL, "trained") == payload.submodels.layout(FULL, "trained")
    assert "s/hidden" in payload.layout(way="trained").by_name and "s/hidden" not in payload.names
    flat = FlatTensors.zeros(payload.layout(frozen))
    _, bundles = payload.split(flat, frozen, "sent")
    bundles["s"]["hidden"].fill_(2.0)
    whole = FlatTensors.zeros(payload.layout(way="sent"))
    payload.plan(frozen, "sent").scatter_(whole, flat)
    assert whole["s/hidden"].tolist() == [2.0] * 4


def test_a_method_has_bundles_or_an_exchange():
    with pytest.raises(
        TypeError,
        match=r"Both exchanges messages during a task and also sends bundles of extra tensors \(scores\): use only one of them",
    ):

        class Both(Local):
            up = ("scores",)

            def exchange(self, submodels, extra=None):
                return None
