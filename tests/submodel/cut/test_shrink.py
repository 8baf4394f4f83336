"""What a small module is made of: views of the flat storage, sizes that layers report, blocks, exits, rescaling, skeletons."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from model_zoo import CNN, MLP
from raafl.errors import BadInput
from raafl.submodel import FULL, Spec, Submodels, skeleton
from raafl.trainer_stand_in import TrainerStandIn
from tests.local.bench import filled
from tests.submodel.models import CASES, Blocks, FusedAttention, Tied, built


def zeroed(module, masks):
    module = copy.deepcopy(module)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in masks:
                tensor.mul_(masks[name])
    return module


def test_tensors_are_views_into_the_flat_storage():
    _, submodels, full = built("cnn_norm")
    spec = Spec.select({"conv1": [0, 2], "fc1": range(3)})
    shrunk = filled(submodels, spec, full)
    tensors = {**dict(shrunk.module.named_parameters()), **dict(shrunk.module.named_buffers())}
    assert {name: t.data_ptr() for name, t in tensors.items()} == {
        name: view.data_ptr() for name, view in shrunk.present.items()
    }
    for dtype, buffer in shrunk.trained.buffers.items():
        assert buffer.data_ptr() == shrunk.present.buffers[dtype].data_ptr()


def test_training_changes_the_flat_storage_and_batch_norm_statistics_agree_with_the_full_ones():
    module, submodels, full = built("cnn_norm")
    spec = Spec.select({"conv1": [0, 2]})
    shrunk = filled(submodels, spec, full)
    before = shrunk.trained.clone()
    x = torch.randn(4, 2, 8, 8)
    shrunk.module.train()(x).square().sum().backward()
    module.train()(x)
    torch.testing.assert_close(shrunk.present["norm1.running_mean"], module.norm1.running_mean[[0, 2]])
    torch.testing.assert_close(shrunk.present["norm1.running_var"], module.norm1.running_var[[0, 2]])
    assert shrunk.present["norm1.num_batches_tracked"].item() == 4  # an integer buffer goes down and counts on
    assert "norm1.num_batches_tracked" not in shrunk.trained
    torch.optim.SGD(shrunk.module.parameters(), 0.1).step()
    for name, parameter in shrunk.module.named_parameters():
        assert torch.equal(shrunk.trained[name], parameter)
        torch.testing.assert_close(shrunk.trained[name], before[name] - 0.1 * parameter.grad)


def test_sizes_that_layers_report_are_the_small_ones():
    _, submodels, full = built("cnn_norm")
    small = filled(submodels, Spec.select({"conv1": [1], "conv2": [0, 3], "fc2": range(3)}), full).module
    assert (small.conv1.out_channels, small.conv2.in_channels, small.conv2.out_channels) == (1, 1, 2)
    assert (small.norm1.num_features, small.fc1.in_features, small.fc2.out_features) == (1, 2 * 2 * 2, 3)
    _, submodels, full = built("groups")
    small = filled(submodels, Spec.select({"conv": [0, 2]}), full).module
    assert (small.norm.num_groups, small.norm.num_channels) == (2, 4)
    assert (small.grouped.groups, small.grouped.in_channels, small.grouped.out_channels) == (2, 4, 4)
    _, submodels, full = built("residual")
    small = filled(submodels, Spec.select({"stem": [0, 4, 5]}), full).module
    assert (small.depthwise.groups, small.depthwise.in_channels) == (3, 3)
    _, submodels, full = built("tied")
    assert filled(submodels, Spec.select({"embed": range(4)}), full).module.embed.embedding_dim == 4


def test_tied_parameters_are_one_entry_and_stay_tied():
    _, submodels, full = built("tied")
    assert [entry.name for entry in full.layout.entries if "embed" in entry.name or "score" in entry.name] == [
        "embed.weight"
    ]
    small = filled(submodels, Spec.select({"embed": [1, 4]}), full).module
    assert small.score.weight is small.embed.weight
    assert small.embed.weight.shape == (11, 2)


def test_frozen_parameters_are_present_and_do_not_train():
    _, submodels, full = built("cnn")
    shrunk = filled(submodels, Spec.select({"conv1": range(2)}, trained=["fc2", "fc3.bias"]), full)
    assert {name for name, p in shrunk.module.named_parameters() if p.requires_grad} == {
        "fc2.weight",
        "fc2.bias",
        "fc3.bias",
    }
    assert [entry.name for entry in shrunk.trained.layout.entries] == ["fc2.weight", "fc2.bias", "fc3.bias"]
    assert [entry.name for entry in shrunk.present.layout.entries][:3] == ["fc2.weight", "fc2.bias", "fc3.bias"]
    assert len(shrunk.present) == 10
    frozen_by_the_user = MLP(4, (3,), 2)
    frozen_by_the_user.layers[1].weight.requires_grad_(False)
    submodels = Submodels(frozen_by_the_user)
    assert "layers.1.weight" not in submodels.layout(FULL, "trained").by_name
    assert not submodels.shrink().module.layers[1].weight.requires_grad


def test_absent_blocks_are_not_there_and_the_others_keep_their_names():
    module = Blocks()
    submodels = Submodels(module)
    full = submodels.state(module)
    shrunk = filled(submodels, Spec.select(blocks={"depth": [0, 3]}), full)
    reference = copy.deepcopy(module)
    for i in (1, 2):
        nn.init.zeros_(reference.stack[i][2].weight)
        nn.init.zeros_(reference.stack[i][2].bias)
    x = torch.randn(3, 4)
    assert torch.equal(shrunk.module(x), reference(x))
    assert {name for name, _ in shrunk.module.named_parameters()} == set(shrunk.present.layout.by_name)
    assert "stack.3.0.weight" in shrunk.present and "stack.1.0.weight" not in shrunk.present
    narrow = filled(submodels, Spec.select({"stack.0.0": [1]}, blocks={"depth": [0]}), full)
    assert narrow.module.stack[0][0].out_features == 1
    filled(submodels, Spec.select({"stack.1.0": [1]}, blocks={"depth": [0]}), full).module(x)  # narrowed, and absent


class Exits(nn.Module):
    """Two heads, either of which may be absent."""

    def __init__(self):
        super().__init__()
        self.body, self.early, self.late = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        x = self.body(x)
        return [head(x) for head in (self.early, self.late) if head is not None]

    def submodel_exits(self):
        return {"early": ["early"], "late": ["late"]}


def test_exits_that_are_left_out_are_none():
    module = Exits()
    submodels = Submodels(module)
    shrunk = filled(submodels, Spec.select(exits=["early"]), submodels.state(module))
    assert shrunk.module.late is None and "late.weight" not in shrunk.present
    x = torch.randn(2, 3)
    (only,) = shrunk.module(x)
    assert torch.equal(only, module(x)[0])
    assert submodels.layout(Spec.select(exits=["early", "late"])) is submodels.layout()


def test_rescale_multiplies_the_kept_activations_while_training_and_only_then():
    module = MLP(2, (4,), 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
    submodels = Submodels(module)
    small = filled(submodels, Spec.select({"layers.1": [3]}), submodels.state(module), rescale=True).module
    x = torch.tensor([[2.0, 3.0]])
    # one unit of four: 2 + 3 + 1 = 6, times 4/1 = 24, plus the output bias; the output layer lost no output
    assert small.train()(x).item() == 25.0
    assert small.eval()(x).item() == 7.0
    assert copy.deepcopy(small).train()(x).item() == 25.0
    small.train().layers.eval()  # as its author may have left them: the model trains
    assert small(x).item() == 25.0
    plain = filled(submodels, Spec.select({"layers.1": [3]}), submodels.state(module)).module
    assert plain.train()(x).item() == 7.0
    whole = submodels.shrink(FULL, rescale=True).module
    assert not any(layer._forward_hooks for layer in whole.modules())


def test_rescale_of_a_residual_width_leaves_depthwise_layers_alone():
    _, submodels, full = built("residual")
    small = filled(submodels, Spec.select({"stem": range(3)}), full, rescale=True).module
    assert {name for name, layer in small.named_modules() if layer._forward_hooks} == {"stem", "conv2"}


def test_a_lightning_module_survives():
    module = MLP(4, (6,), 2, lr=0.25)
    held = module._trainer = object()  # what a module in a running Trainer holds; it must neither be copied nor kept
    submodels = Submodels(module)
    module._trainer = None
    small = filled(submodels, Spec.select({"layers.1": range(2)}), submodels.state(module)).module
    assert isinstance(small._trainer, TrainerStandIn) and small._trainer is not held and small.hparams.lr == 0.25
    loss = small.training_step((torch.randn(3, 4), torch.tensor([0, 1, 1])), 0)
    loss.backward()
    optimizer = small.configure_optimizers()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert sum(p.numel() for p in optimizer.param_groups[0]["params"]) == 4 * 2 + 2 + 2 * 2 + 2


def test_the_global_state_itself_can_be_the_storage():
    module, submodels, full = built("mlp1")
    shared = submodels.shrink(present=full).module.eval()
    x = torch.randn(2, 8)
    assert torch.equal(shared(x), module(x))
    for buffer in full.buffers.values():
        buffer.zero_()
    assert torch.equal(shared(x), torch.zeros(2, 3))
    with pytest.raises(BadInput, match="not that of this submodel"):
        submodels.shrink(Spec.select({"layers.1": [0]}), present=full)


class WithTables(nn.Module):
    """A transient buffer that the constructor computes, one of them as wide as the axis."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("gain", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)

    def forward(self, x):
        return self.fc2(self.fc1(x) * self.gain)

    def submodel_axes(self):
        return {"hidden": [("fc1.weight", 0), ("fc1.bias", 0), ("gain", 0), ("fc2.weight", 1)]}


def test_transient_buffers_are_real_in_a_skeleton_and_shrink_with_their_axis():
    with skeleton():
        module = WithTables()
    assert module.fc1.weight.is_meta and module.gain.tolist() == [1, 2, 3, 4]
    submodels = Submodels(module)
    assert "gain" not in submodels.layout().by_name
    assert submodels.shrink(Spec.select({"hidden": [1, 3]})).module.gain.tolist() == [2, 4]


def test_a_skeleton_has_the_layouts_of_the_real_model():
    for make in (lambda: CNN(2, 8, (3, 5), (6, 4), 3, batch_norm=True), Tied, FusedAttention):
        with skeleton():
            module = make()
        assert all(parameter.is_meta for parameter in module.parameters())
        assert Submodels(module).layout().fingerprint == Submodels(make()).layout().fingerprint
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_parameter_with_two_names_stays_one_in_a_skeleton():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.ones(3))
            self.one, self.other = weight, weight

        def forward(self, x):
            return F.relu(x * self.one * self.other)

    with skeleton():
        module = Shared()
    assert module.one is module.other
    assert len(Submodels(module).layout().entries) == 1


def test_the_state_of_a_real_module_goes_out_and_back():
    module, submodels, full = built("cnn_norm")
    other = CASES["cnn_norm"].make()
    submodels.load_(other, full)
    assert submodels.state(other).fingerprint() == full.fingerprint()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True))
