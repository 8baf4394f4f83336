"""Moving values between the full model and a submodel, against masks written element by element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raafl.errors import BadInput
from raafl.submodel import FULL, CopyPlan, FlatTensors, Spec, Submodels
from tests.submodel.models import CASES, built, named_specs, slow_masks

PARTS = st.sampled_from(["present", "trained"])


def views_of(plan, full):
    """The pieces that lie in the full storage itself; the others are copies."""
    here = {buffer.untyped_storage().data_ptr() for buffer in full.buffers.values()}
    pieces = []
    plan.apply_(full, plan.gather(full), lambda target, source: pieces.append(target))
    return [piece for piece in pieces if piece.untyped_storage().data_ptr() in here]


def numbered(layout, start=1.0):
    """Storage in which every element has a number of its own (up to what the dtype can tell apart)."""
    flat = FlatTensors.empty(layout)
    for buffer in flat.buffers.values():
        buffer.copy_(torch.arange(buffer.numel()) + start)
    return flat


@given(named_specs, PARTS, st.sampled_from(["scatter", "add", "lerp", "cover", "apply"]))
def test_every_operation_changes_what_is_kept_and_nothing_else(named, part, operation):
    name, spec = named
    _, submodels, full = built(name)
    masks = slow_masks(submodels, spec)
    plan = submodels.plan(spec, part)
    small = numbered(plan.layout)
    before, given_small = full.clone(), small.clone()
    if operation == "lerp" and part == "present":
        return  # integers cannot be mixed, and never come up
    expected = {
        "scatter": lambda old, new: new,
        "add": lambda old, new: old + 2 * new,
        "lerp": lambda old, new: torch.lerp(old, new, 0.25),
        "cover": lambda old, new: old + 2,
        "apply": lambda old, new: old * new,
    }[operation]
    {
        "scatter": lambda: plan.scatter_(full, small),
        "add": lambda: plan.add_(full, small, 2),
        "lerp": lambda: plan.lerp_(full, small, 0.25),
        "cover": lambda: plan.cover_(full, 2),
        "apply": lambda: plan.apply_(full, small, lambda target, source: target.mul_(source)),
    }[operation]()
    assert small.fingerprint() == given_small.fingerprint()
    for tensor_name, tensor in full.items():
        old = before[tensor_name]
        if tensor_name not in small:
            assert torch.equal(tensor, old)
            continue
        mask = masks[tensor_name]
        assert torch.equal(tensor[~mask], old[~mask])
        assert torch.equal(tensor[mask], expected(old[mask], small[tensor_name].flatten()))


@given(st.sampled_from(sorted(CASES)), st.data())
def test_ranges_are_views_of_the_full_storage(name, data):
    _, submodels, full = built(name)
    kept = {}
    for axis, size in CASES[name].axes.items():
        start = data.draw(st.integers(0, size - 1))
        kept[axis] = range(start, data.draw(st.integers(start + 1, size)))
    plan = submodels.plan(Spec.select(kept))
    begins = {b.data_ptr(): b.data_ptr() + b.numel() * b.itemsize for b in full.buffers.values()}
    views = views_of(plan, full)
    assert sum(view.numel() for view in views) == sum(plan.layout.numel.values())
    assert all(any(begin <= view.data_ptr() < end for begin, end in begins.items()) for view in views)


@pytest.mark.parametrize("name", ["mlp3", "cnn_norm", "tied"])
def test_a_full_spec_is_one_call_per_dtype_on_the_flat_storage(name):
    _, submodels, full = built(name)
    small = submodels.plan(FULL).gather(full)
    calls = []
    submodels.plan(FULL).apply_(full, small, lambda target, source: calls.append((target, source)))
    assert len(calls) == 1
    target, source = calls[0]
    assert target.data_ptr() == full.buffers[torch.float32].data_ptr()
    assert target.dim() == 1 and target.numel() == source.numel() == small.layout.numel[torch.float32]


def test_an_explicitly_whole_axis_is_the_full_spec():
    _, submodels, _ = built("mlp2")
    assert submodels.plan(Spec.select({"layers.1": range(7)})) is submodels.plan(FULL)


def test_two_runs_are_two_views_and_many_runs_are_index_lists():
    module = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    submodels = Submodels(module)
    full = submodels.state(module)
    wrapped = submodels.plan(Spec.select({"0": [*range(50, 64), *range(10)]}))  # a rolling window at its end
    scattered = submodels.plan(Spec.select({"0": range(0, 64, 2)}))
    assert sum(view.numel() for view in views_of(wrapped, full)) == sum(wrapped.layout.numel.values())
    assert sum(view.numel() for view in views_of(scattered, full)) == 2  # the output bias
    assert torch.equal(scattered.gather(full)["2.weight"], module[2].weight[:, ::2])
    assert torch.equal(wrapped.gather(full)["0.weight"], torch.cat([module[0].weight[:10], module[0].weight[50:]]))


def test_lists_in_two_dimensions_of_one_tensor():
    module = torch.nn.Sequential(
        torch.nn.Linear(2, 40), torch.nn.ReLU(), torch.nn.Linear(40, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1)
    )
    submodels = Submodels(module)
    full = submodels.state(module)
    spec = Spec.select({"0": range(0, 40, 3), "2": range(1, 40, 2)})
    expected = full["2.weight"].clone()
    expected[1::2, ::3] *= 3
    plan = submodels.plan(spec)
    plan.add_(full, plan.gather(full), 2.0)
    assert torch.allclose(full["2.weight"], expected)


def test_frozen_parameters_are_left_out_of_what_comes_back():
    _, submodels, full = built("mlp2")
    spec = Spec.select({"layers.1": range(2)}, trained=["layers.7"])
    plan = submodels.plan(spec)
    assert [entry.name for entry in plan.layout.entries] == ["layers.7.weight", "layers.7.bias"]
    before = full.clone()
    plan.cover_(full, 1.0)
    changed = [name for name, tensor in full.items() if not torch.equal(tensor, before[name])]
    assert changed == ["layers.7.weight", "layers.7.bias"]


def test_storage_that_starts_inside_a_larger_tensor():
    _, submodels, full = built("mlp1")
    layout, offset = full.layout, 13
    large = torch.zeros(full.buffers[torch.float32].numel() + 2 * offset)
    inside = FlatTensors(layout, {torch.float32: large[offset:-offset]}).copy_(full)
    spec = Spec.select({"layers.1": [1, 2, 5]})
    assert submodels.plan(spec).gather(inside).fingerprint() == submodels.plan(spec).gather(full).fingerprint()


def test_tensors_of_another_layout_are_refused():
    _, submodels, full = built("mlp1")
    plan = submodels.plan(Spec.select({"layers.1": range(3)}))
    other = submodels.plan(Spec.select({"layers.1": range(4)})).gather(full)
    with pytest.raises(BadInput, match="small tensors have another layout"):
        plan.scatter_(full, other)
    with pytest.raises(BadInput, match="full tensors have another layout"):
        plan.gather(other)


def test_a_plan_needs_only_layouts_and_runs():
    _, _, full = built("mlp1")
    plan = CopyPlan(FULL, full.layout, full.layout, {})
    assert plan.gather(full).fingerprint() == full.fingerprint()


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (3, 3, 5, 5, 5), (3, 5, 3, 3), (3,)])
def test_strided_ranges_that_repeat_at_equal_distances_are_one_view(sizes):
    """Blocks of one width repeat; those between others do not. The columns of each second layer are the strided ranges."""
    parts = [torch.nn.Sequential(torch.nn.Linear(4, n), torch.nn.ReLU(), torch.nn.Linear(n, 4)) for n in sizes]
    module = torch.nn.Sequential(*parts)
    submodels = Submodels(module)
    full = numbered(submodels.layout())
    spec = Spec.select({f"{place}.0": (1, 2) for place in range(len(sizes))})
    plan = submodels.plan(spec)
    small = plan.gather(full)
    for place in range(len(sizes)):
        assert torch.equal(small[f"{place}.2.weight"], full[f"{place}.2.weight"][:, 1:3])
    expected = {name: tensor.clone() for name, tensor in full.items()}
    for place in range(len(sizes)):
        expected[f"{place}.2.weight"][:, 1:3] *= 2
    plan.add_(full, small)
    assert all(torch.equal(full[name], expected[name]) for name in expected if name.endswith("2.weight"))
    strided = [view for view in views_of(plan, full) if view.dim() > 1]
    assert len(strided) == {(3, 3, 3, 3): 1, (3, 3, 5, 5, 5): 2, (3, 5, 3, 3): 3, (3,): 1}[sizes]
