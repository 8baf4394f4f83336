"""The invariants of a submodel, on every model of the zoo and on a model for each Hugging Face adapter and torch layer.

All in double precision, so that what should be equal up to rounding is equal to twelve digits.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from raafl.local.trainable import Buffers
from raafl.submodel import FULL, FlatTensors, Spec, SpecError
from tests.local.bench import filled
from tests.submodel.cut.test_shrink import zeroed
from tests.submodel.models import slow_masks, specs
from tests.submodel.zoo import COVERING, MODELS, SMALL, TORCHS, ZOO, any_spec, built, kept_masks, one_step, trains

few = settings(deadline=None, max_examples=3, derandomize=True, phases=[Phase.explicit, Phase.generate])
CLOSE = {"rtol": 1e-7, "atol": 1e-9}
WIDE = [name for name, model in MODELS.items() if model.width is not None]
COVERING_WIDE = [name for name in COVERING if name in WIDE]
TIED = {
    "ALBERT": ["model.predictions.decoder.weight", "model.predictions.decoder.bias"],
    "LLaMA, tied": ["model.lm_head.weight"],
    "bert_tied of transformers": ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
    "llama_tied of transformers": ["lm_head.weight"],
    "tied": ["score.weight"],
}
GROUPED = {
    "LLaMA": ("model.model.layers", 2, 2, 8),
    "LLaMA, tied": ("model.model.layers", 2, 2, 8),
    "llama of transformers": ("model.layers", 3, 2, 2),
    "mistral of transformers": ("model.layers", 3, 2, 4),
    "qwen2 of transformers": ("model.layers", 3, 2, 2),
}
"""Path of the blocks, key-value groups, query heads in a group, features of a head: by hand from the configs."""


def renewed(full: FlatTensors) -> FlatTensors:
    """The same layout, every number another one."""
    other = full.clone()
    for buffer in other.buffers.values():
        buffer.add_(1)
    return other


@pytest.mark.quick_cases(*COVERING, *SMALL)
@pytest.mark.parametrize("name", MODELS)
def test_axes_are_those_expected(name):
    _, submodels, _ = built(name)
    assert {axis.name: axis.size for axis in submodels.axes.values()} == dict(MODELS[name].axes)


@pytest.mark.quick_cases(*COVERING)
@pytest.mark.parametrize("name", MODELS)
def test_tied_parameters_are_those_expected(name):
    assert sorted(built(name)[1].aliases) == sorted(TIED.get(name, []))


@pytest.mark.quick_cases(*COVERING_WIDE)
@pytest.mark.parametrize("name", WIDE)
def test_the_residual_width_is_an_axis_where_asked_for(name):
    _, submodels, _ = built(name, residual_width=True)
    (width,) = set(submodels.axes) - set(MODELS[name].axes)
    assert width == MODELS[name].width and submodels.axes[width].size == (32 if name in ZOO else 12)


@pytest.mark.quick_cases(*COVERING, *SMALL)
@pytest.mark.parametrize("name", MODELS)
@few
@given(st.data())
def test_extract_then_scatter_is_the_identity_on_what_is_kept_and_touches_nothing_else(name, data):
    _, submodels, full = built(name, residual_width=True)
    spec = data.draw(any_spec(submodels))
    masks = kept_masks(submodels, spec)
    for part in ("present", "trained"):
        plan = submodels.plan(spec, part)
        small, other = plan.gather(full), renewed(full)
        untouched = other.clone()
        plan.scatter_(other, small)
        for tensor_name, tensor in other.items():
            if tensor_name not in small:
                assert torch.equal(tensor, untouched[tensor_name])
                assert part == "trained" or not masks[tensor_name].any()
                continue
            mask = masks[tensor_name]
            assert mask.any() and torch.equal(small[tensor_name].flatten(), full[tensor_name][mask])
            assert torch.equal(tensor, torch.where(mask, full[tensor_name], untouched[tensor_name]))


def lying_like(module, flat):
    """A copy whose parameters begin where those of ``flat`` do in a cache line: a matrix product's rounding hangs on that."""
    module = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        size = parameter.element_size()
        room = torch.empty(parameter.numel() + 64 // size, dtype=parameter.dtype)
        start = (flat[name].data_ptr() - room.data_ptr()) % 64 // size
        parameter.data = room[start : start + parameter.numel()].view_as(parameter).copy_(parameter.detach())
        assert (parameter.data_ptr() - flat[name].data_ptr()) % 64 == 0
    return module


@pytest.mark.quick_cases(*COVERING)
@pytest.mark.parametrize("name", MODELS)
def test_a_small_module_gives_the_same_outputs_after_copying_and_pickling(name):
    _, submodels, full = built(name)
    spec = Spec.select({axis.name: range(max(axis.size // 2, 1)) for axis in submodels.axes.values()})
    shrunk = filled(submodels, spec, full, rescale=True)
    answers = []
    for module in (shrunk.module, pickle.loads(pickle.dumps(shrunk.module)), copy.deepcopy(shrunk.module)):
        torch.manual_seed(1)
        answers.append(MODELS[name].answer(lying_like(module, shrunk.present).train()))
    assert torch.equal(answers[1], answers[0]) and torch.equal(answers[2], answers[0])


@pytest.mark.quick_cases(*COVERING, *TORCHS, *SMALL)
@pytest.mark.parametrize("name", MODELS)
def test_a_full_spec_gives_the_same_outputs_bit_for_bit(name):
    module, submodels, full = built(name, residual_width=True)
    whole = Spec.select(
        {axis.name: range(axis.size) for axis in submodels.axes.values()},
        blocks={stack: range(len(found)) for stack, found in submodels.stacks.items()},
    )
    assert submodels.normal(whole) == FULL
    for spec in (FULL, whole):
        shrunk = filled(submodels, spec, full)
        small, reference = shrunk.module, lying_like(module, shrunk.present)
        for training in (False, True):
            torch.manual_seed(1)
            expected = MODELS[name].answer(reference.train(training))
            torch.manual_seed(1)
            assert torch.equal(MODELS[name].answer(small.train(training)), expected)


@pytest.mark.quick_cases(*COVERING, *TORCHS, *SMALL)
@pytest.mark.parametrize("name", MODELS)
@few
@given(st.data())
def test_a_small_module_equals_the_full_one_with_dropped_units_zeroed(name, data):
    spec = data.draw(specs(MODELS[name].axes))
    # those of transformers drop units at random while they train
    training = data.draw(st.booleans()) if name in ZOO else False
    module, submodels, full = built(name)
    masks = slow_masks(submodels, spec)
    reference = zeroed(module, masks).train(training)
    small = filled(submodels, spec, full).module.train(training)
    actual, expected = MODELS[name].answer(small), MODELS[name].answer(reference)
    torch.testing.assert_close(actual, expected, **CLOSE)
    weights = torch.randn_like(expected)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {key: parameter.grad for key, parameter in reference.named_parameters()}
    for key, parameter in small.named_parameters():
        if parameter.grad is None:
            assert gradients[key] is None
        else:
            torch.testing.assert_close(parameter.grad.flatten(), gradients[key][masks[key]], **CLOSE)


@pytest.mark.quick_cases(*COVERING_WIDE)
@pytest.mark.parametrize("name", WIDE)
def test_where_a_norm_spans_the_width_a_small_module_is_not_the_zeroed_one(name):
    module, submodels, full = built(name, residual_width=True)
    width = MODELS[name].width
    spec = Spec.select({width: range(submodels.axes[width].size // 2)})
    small = filled(submodels, spec, full).module.eval()
    reference = zeroed(module, slow_masks(submodels, spec))
    actual, expected = MODELS[name].answer(small), MODELS[name].answer(reference)
    assert actual.shape == expected.shape and actual.isfinite().all()
    assert (actual - expected).norm() > 0.01 * expected.norm()
    actual.sum().backward()
    assert all(p.grad is not None or "exits." in key or "pooler" in key for key, p in small.named_parameters())


@pytest.mark.parametrize("name", TIED)
@few
@given(st.data())
def test_tied_parameters_stay_tied_and_move_together(name, data):
    module, submodels, full = built(name, residual_width=True)
    spec = data.draw(specs({axis.name: axis.size for axis in submodels.axes.values()}))
    shrunk = filled(submodels, spec, full)
    for other, first in submodels.aliases.items():
        assert shrunk.module.get_parameter(other) is shrunk.module.get_parameter(first)
        assert other not in shrunk.present and shrunk.trained[first].data_ptr() == shrunk.present[first].data_ptr()
    one_step(name, shrunk.module)
    after = full.clone()
    submodels.plan(spec, "trained").scatter_(after, shrunk.trained)
    whole = copy.deepcopy(module)
    submodels.load_(whole, after)
    for other, first in submodels.aliases.items():
        tied = whole.get_parameter(other)
        assert tied is whole.get_parameter(first) and torch.equal(tied, after[first])
        assert not torch.equal(tied, module.get_parameter(other))


@pytest.mark.quick_cases(*COVERING)
@pytest.mark.parametrize("name", MODELS)
@few
@given(st.data())
def test_a_step_changes_covered_elements_only(name, data):
    _, submodels, full = built(name, residual_width=True)
    spec = data.draw(any_spec(submodels))
    masks = kept_masks(submodels, spec)
    shrunk = filled(submodels, spec, full)
    given_small = shrunk.present.clone()
    buffers = Buffers(shrunk.module, shrunk.present)
    one_step(name, shrunk.module)
    buffers.gather()
    after = full.clone()
    submodels.plan(spec, "trained").scatter_(after, shrunk.trained)
    for tensor_name, tensor in after.items():
        mask, changed = masks[tensor_name], tensor != full[tensor_name]
        if tensor_name in submodels.parameters and not trains(submodels, spec, tensor_name):
            assert not changed.any(), tensor_name
            if tensor_name in shrunk.present:  # frozen, and so it was in the step
                assert torch.equal(shrunk.present[tensor_name], given_small[tensor_name])
        assert not changed[~mask].any(), tensor_name
        if tensor_name in shrunk.trained:
            assert torch.equal(tensor[mask], shrunk.trained[tensor_name].flatten())


@pytest.mark.quick_cases(*COVERING)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_the_whole_model_changes_every_matrix_that_it_uses(name):
    # not every bias: one of all keys shifts the scores alike, one before a batch norm is taken out again
    _, submodels, full = built(name)
    shrunk = filled(submodels, FULL, full)
    one_step(name, shrunk.module)
    still = {key for key, value in shrunk.trained.items() if value.dim() > 1 and torch.equal(value, full[key])}
    # of two ways the head reads the last place, where the way back has no state yet
    assert not [key for key in still if not any(part in key for part in ("exits.", "pooler.", "hh_l1_reverse"))]


@pytest.mark.parametrize("name", GROUPED)
def test_a_key_value_group_goes_whole(name):
    path, groups, per_group, features = GROUPED[name]
    module, submodels, full = built(name)
    for dropped in range(groups):
        kept = [group for group in range(groups) if group != dropped]
        small = filled(submodels, Spec.select({f"{path}.0.heads": kept}), full).module
        own, whole = (part.get_submodule(f"{path}.0.self_attn") for part in (small, module))
        queries = [i for g in kept for i in range(g * per_group * features, (g + 1) * per_group * features)]
        keys = [i for g in kept for i in range(g * features, (g + 1) * features)]
        assert torch.equal(own.q_proj.weight, whole.q_proj.weight[queries])
        assert torch.equal(own.k_proj.weight, whole.k_proj.weight[keys])
        assert torch.equal(own.v_proj.weight, whole.v_proj.weight[keys])
        assert torch.equal(own.o_proj.weight, whole.o_proj.weight[:, queries])
        assert own.num_key_value_groups == per_group and own.head_dim == features


def errors_of(submodels, make):
    """The message of the one error, whatever the spec is used for."""
    messages = set()
    for use in (submodels.normal, submodels.layout, submodels.plan, submodels.shrink, submodels.cost):
        with pytest.raises(SpecError) as caught:
            use(make())
        messages.add(str(caught.value))
    (message,) = messages
    assert "\n" not in message
    return message


@pytest.mark.quick_cases(*COVERING)
@pytest.mark.parametrize("name", MODELS)
def test_a_spec_that_the_model_does_not_have_is_one_clear_error(name):
    _, submodels, _ = built(name)
    for axis in submodels.axes.values():
        message = errors_of(submodels, lambda axis=axis: Spec.select({axis.name: [0, axis.size]}))
        assert f"index {axis.size} of axis '{axis.name}', which has {axis.size} units: give indices below" in message
        with pytest.raises(SpecError, match=r"keeps nothing of axis '.*': keep at least one index") as caught:
            Spec.select({axis.name: []})
        assert f"'{axis.name}'" in str(caught.value)
    first = next(iter(submodels.axes))
    message = errors_of(submodels, lambda: Spec.select({f"{first}x": [0]}))
    assert f"axis '{first}x', which this model does not have" in message and f"did you mean '{first}'?" in message
    strange = next(axis for model in MODELS.values() for axis in model.axes if axis not in submodels.axes)
    message = errors_of(submodels, lambda: Spec.select({strange: [0]}))
    assert f"axis '{strange}', which this model does not have; " in message
    message = errors_of(submodels, lambda: Spec.select(blocks={"floors": [0]}))
    assert "blocks of 'floors', which this model does not have" in message
    message = errors_of(submodels, lambda: Spec.select(trained=["nobody"]))
    assert "trains 'nobody', which this model does not have" in message
    message = errors_of(submodels, lambda: Spec.select(exits=["exit9"]))
    assert "the exit 'exit9', which this model does not have" in message
    for stack, found in submodels.stacks.items():
        message = errors_of(submodels, lambda stack=stack, found=found: Spec.select(blocks={stack: [len(found)]}))
        assert f"block {len(found)} of '{stack}', which has {len(found)} blocks: give lower indices" in message
