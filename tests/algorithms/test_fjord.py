"""FjORD: a drawn width against the model that is really cut to it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from model_zoo import MLP
from raafl.algorithms import fjord
from raafl.algorithms.fjord import DrawnWidths, OrderedDropout, masks_of
from raafl.errors import BadInput
from raafl.parts.local.swap_parameters import with_tensors
from raafl.parts.merge.mean import Mean
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.select.units import leading
from raafl.submodel import FULL, Submodels
from tests.local.bench import assignment, filled, task_in

DATA = (torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 0, 1]))


def setting(width=1.0):
    torch.manual_seed(0)
    model = MLP(3, (8, 4), 2)
    submodels = Submodels(model, DATA)
    return model, submodels, leading(submodels.axes, width)


def cut(model, submodels, spec):
    return filled(submodels, spec, submodels.state(model)).module


def hook_for(module, submodels, spec, local, seed=0):
    return DrawnWidths(task_in(module, submodels, assignment(spec, seed)), local)


def test_every_argument_reaches_its_part():
    algorithm = fjord([0.5, 1.0], [0.25, 0.5], distil=False, by_samples=False)
    assert algorithm.select == RateSelect("leading", [0.5, 1.0], "width")
    assert algorithm.local == OrderedDropout((0.25, 0.5), distil=False)
    assert algorithm.merge == Mean(by_samples=False)
    assert fjord().select == RateSelect("leading", [0.2, 0.4, 0.6, 0.8, 1.0], "width")
    for wrong, message in (([], "ladder is empty"), ([1.5], "a width in ladder is 1.5")):
        with pytest.raises(BadInput, match=message):
            fjord(ladder=wrong)


def test_the_mask_of_a_width_by_hand():
    """Of 8 and 4 units a client with the first 4 and 2 trains the first 2 and 1 at width 1/4."""
    _, submodels, spec = setting(0.5)
    masks = masks_of(submodels, spec, 0.25)
    shapes = {name: tuple(mask.shape) for name, mask in masks.items()}
    kept = {name: int(mask.sum()) for name, mask in masks.items()}
    sizes = sorted((shapes[name], kept[name]) for name in shapes)
    assert sizes == [((2,), 1), ((2,), 2), ((2, 2), 2), ((2, 4), 2), ((4,), 2), ((4, 3), 6)]
    assert masks_of(submodels, spec, 0.75) is None
    assert all(bool((mask == 1).all()) for _, mask in masks_of(submodels, spec, 0.5).items())


@pytest.mark.parametrize("distil", [False, True])
def test_loss_and_gradients_are_those_of_the_cut_model(distil):
    model, submodels, spec = setting(0.5)
    module = cut(model, submodels, spec)
    hook = hook_for(module, submodels, spec, OrderedDropout((0.25,), distil))
    loss = hook.loss(DATA, 0)
    loss.backward()
    hook.close()
    x, y = DATA
    narrow = cut(model, submodels, leading(submodels.axes, 0.25))
    same = cut(model, submodels, spec)
    target = same(x).detach().softmax(-1) if distil else y
    wanted = F.cross_entropy(narrow(x), target)
    wanted.backward()
    if distil:
        teacher = F.cross_entropy(same(x), y)
        teacher.backward()
        wanted = wanted + teacher
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    small = dict(narrow.named_parameters())
    for name, parameter in module.named_parameters():
        part = torch.zeros_like(parameter)
        part[tuple(slice(size) for size in small[name].shape)] = small[name].grad
        if distil:
            part += dict(same.named_parameters())[name].grad
        torch.testing.assert_close(parameter.grad, part, rtol=1e-5, atol=1e-7)


def test_widths_are_drawn_evenly_among_those_that_the_client_has_and_alike_for_one_seed():
    model, submodels, spec = setting(0.5)
    module = cut(model, submodels, spec)
    local = OrderedDropout((0.25, 0.5, 0.75, 1.0), distil=False)

    def drawn(seed):
        hook = hook_for(module, submodels, spec, local, seed)
        with torch.no_grad():
            losses = [round(hook.loss(DATA, i).item(), 6) for i in range(60)]
        hook.close()
        return losses

    first = drawn(1)
    assert first == drawn(1) != drawn(2)
    assert len(Counter(first)) == 2 and min(Counter(first).values()) > 15


def test_parameters_and_running_statistics_are_put_back():
    layer = torch.nn.BatchNorm1d(2)
    own = dict(layer.named_parameters())
    with with_tensors(layer, {"weight": own["weight"] * 0}):
        assert layer(torch.randn(4, 2)).abs().max() == 0
    assert dict(layer.named_parameters()) == own
    assert layer.running_mean.abs().max() == 0 and layer.num_batches_tracked == 0
    gru = torch.nn.GRU(2, 2)
    with (
        pytest.raises(BadInput, match=r"'weight_ih_l0' belongs to a recurrent layer"),
        with_tensors(gru, {"weight_ih_l0": torch.zeros(6, 2)}),
    ):
        pass


def test_a_model_whose_logits_are_not_seen_needs_distil_false():
    model, submodels, _ = setting()
    model.training_step = lambda batch, index: F.cross_entropy(model.forward(batch[0]), batch[1])
    hook = hook_for(model, submodels, FULL, OrderedDropout())
    with pytest.raises(BadInput, match="set distil to false"):
        hook.loss(DATA, 0)
