from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from model_zoo import MLP, ResNet, ViT
from raafl.algorithms import ada_vit
from raafl.algorithms.ada_vit import Adaptive, UsagePolicy, usage_loss
from raafl.errors import BadInput
from raafl.parts.merge.mean import Mean
from raafl.parts.select.submodels import Full
from raafl.submodel import Spec, Submodels, skeleton
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import experiment, finish

IMAGES = torch.linspace(-1, 1, 3 * 64).view(3, 1, 8, 8)


def vit() -> ViT:
    torch.manual_seed(0)
    return ViT("micro", 8, 4, 1)


def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet(depth=8, in_channels=1, channels=8, num_classes=10, lr=0.1)


def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP(64, (24,), 10, lr=0.05, momentum=0.5)


class Encoder(nn.Module):
    """torch's own blocks, whose attention shows no heads."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def policies(model: nn.Module) -> list[UsagePolicy]:
    return [part for part in model.modules() if isinstance(part, UsagePolicy)]


def force(model: nn.Module, *open: float) -> nn.Module:
    """Let every policy decide so, whatever it sees: logits of 1000 or -1000, one for each gate or one for all."""
    with torch.no_grad():
        for policy in policies(model):
            policy.linear.weight.zero_()
            policy.linear.bias.copy_(2000 * torch.tensor(open).expand_as(policy.linear.bias) - 1000)
    return model


def test_every_argument_reaches_its_part():
    algorithm = ada_vit(0.5, 0.6, 3.0, 2.0, 4, False)
    assert algorithm.select == Full()
    assert algorithm.local == Adaptive(0.5, 0.6, 3.0, 2.0, 4)
    assert algorithm.merge == Mean(by_samples=False)
    assert algorithm.describe()["local"].endswith("usage policies by input, heads 0.5, blocks 0.6, weight 3")


test_bad_arguments_are_named = refuses(
    ada_vit,
    ({"heads": 0.0}, "heads is 0.0: give a number above 0, at most 1"),
    ({"blocks": 1.1}, "blocks is 1.1"),
    ({"weight": 0.0}, "weight is 0.0"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"units": 0}, "units is 0"),
)


@pytest.mark.parametrize("make", [vit, resnet, mlp], ids=["vit", "resnet", "mlp"])
@pytest.mark.parametrize("training", [False, True], ids=["measured", "training"])
def test_with_all_gates_open_it_is_the_plain_model(make, training):
    """To the last bit, and with a usage loss of 0 at a target of 1."""
    plain, model = make().train(training), force(Adaptive(1.0, 1.0).prepare(make()), 1.0).train(training)
    assert torch.equal(model(IMAGES), plain(IMAGES))
    loss = usage_loss(policies(model), 1.0, 1.0)
    assert loss.item() == 0.0 if training else loss is None


def test_a_block_of_which_nothing_is_used_passes_its_input_on():
    """Both sublayers shut: nothing is added to the embeddings."""
    model = force(Adaptive().prepare(vit()), 0.0).eval()
    inner = model.model.vit
    seen = []
    inner.layers[-1].register_forward_hook(lambda layer, args, output: seen.append(output))
    model(IMAGES)
    assert torch.equal(seen[0], inner.embeddings(IMAGES))


def test_a_shut_head_is_a_head_without_its_part_of_the_joining_layer():
    """Logits are of two heads, then of attention and feed-forward part."""
    model = force(Adaptive().prepare(vit()), 0.0, 1.0, 1.0, 1.0).eval()
    reference = vit().eval()
    for layer in reference.model.vit.layers:
        with torch.no_grad():
            layer.attention.o_proj.weight[:, :16] = 0.0
    assert torch.allclose(model(IMAGES), reference(IMAGES), atol=1e-6)
    model = force(model, 1.0, 1.0, 0.0, 1.0)
    reference = vit().eval()
    for layer in reference.model.vit.layers:
        with torch.no_grad():
            layer.attention.o_proj.weight.zero_()
            layer.attention.o_proj.bias.zero_()
    assert torch.allclose(model(IMAGES), reference(IMAGES), atol=1e-6)


@pytest.mark.parametrize("batch_first", [True, False])
def test_blocks_of_torch_skip_sublayers(batch_first):
    """Sample by sample: a batch of both kinds gives what each gives alone."""
    model = Adaptive().prepare(Encoder(batch_first))
    assert [(policy.units, policy.sublayers) for policy in policies(model)] == [(0, 2)] * 2
    with torch.no_grad():
        for policy in policies(model):  # decides by the sign of the first feature
            policy.linear.weight.zero_()
            policy.linear.weight[:, 0] = torch.tensor([1.0, -1.0])
            policy.linear.bias.zero_()
    torch.manual_seed(1)
    x = torch.randn(4, 5, 8)
    turned = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    model.eval()
    together = turned(model(turned(x)))
    assert policies(model)[0].gates[:, 0].tolist() == (x[:, 0, 0] > 0).float().tolist()
    with torch.no_grad():
        alone = torch.cat([turned(model(turned(x[i : i + 1]))) for i in range(4)])
        assert torch.allclose(together, alone, atol=1e-5)
        force(model, 1.0)
        assert torch.allclose(model(turned(x)), Encoder(batch_first).train()(turned(x)), atol=1e-5)


def test_groups_of_hidden_units_by_hand():
    """24 units in 8 groups of 3: a shut group is one whose columns in the next layer are 0."""
    model = force(Adaptive().prepare(mlp()), 1, 0, 1, 1, 1, 1, 1, 0).eval()
    reference = mlp().eval()
    with torch.no_grad():
        reference.layers[3].weight[:, [3, 4, 5, 21, 22, 23]] = 0.0
    assert torch.allclose(model(IMAGES), reference(IMAGES), atol=1e-6)
    assert policies(Adaptive(units=5).prepare(mlp()))[0].units == 4  # 5 does not divide 24


def test_gates_are_drawn_as_often_as_the_target_says():
    torch.manual_seed(0)
    policy = UsagePolicy(4, 2, 1, (0.7, 0.2), 5.0).train()
    gates = policy(torch.zeros(20000, 4))
    assert set(gates.unique().tolist()) == {0.0, 1.0}
    assert gates.mean(0).tolist() == pytest.approx([0.7, 0.7, 0.2], abs=0.02)
    assert policy.eval()(torch.zeros(1, 4)).tolist() == [[1.0, 1.0, 0.0]]


def test_the_gradient_of_the_usage_loss_agrees_with_a_slow_reference():
    """Hard gates forward, the soft ones' derivative backward, number by number with the same noise."""
    torch.manual_seed(3)
    temperature, heads, blocks = 2.0, 0.5, 0.9
    both = [
        UsagePolicy(3, 2, 1, (0.6, 0.6), temperature).train(),
        UsagePolicy(3, 2, 2, (0.6, 0.6), temperature).train(),
    ]
    x = torch.randn(4, 3)
    torch.manual_seed(7)
    for policy in both:
        policy(x)
    loss = usage_loss(both, heads, blocks)
    loss.backward()
    torch.manual_seed(7)
    hard: dict[str, list[float]] = {"heads": [], "blocks": []}
    slopes: list[tuple[int, int, int, str, float]] = []
    for p, policy in enumerate(both):
        uniform = torch.rand(4, policy.units + policy.sublayers)
        noise = torch.log(uniform) - torch.log(1 - uniform)
        logits = x @ policy.linear.weight.T.detach() + policy.linear.bias.detach()
        for sample in range(4):
            for gate in range(policy.units + policy.sublayers):
                soft = 1 / (1 + torch.exp(-(logits[sample, gate] + noise[sample, gate]) / temperature)).item()
                kind = "heads" if gate < policy.units else "blocks"
                hard[kind].append(float(soft > 0.5))
                slopes.append((p, sample, gate, kind, soft * (1 - soft) / temperature))
    gaps = {kind: sum(hard[kind]) / len(hard[kind]) - target for kind, target in (("heads", heads), ("blocks", blocks))}
    assert loss.item() == pytest.approx(sum(gap**2 for gap in gaps.values()), abs=1e-6)
    expected = [torch.zeros_like(policy.linear.weight) for policy in both]
    for p, sample, gate, kind, slope in slopes:
        expected[p][gate] += 2 * gaps[kind] / len(hard[kind]) * slope * x[sample]
    for policy, weight in zip(both, expected, strict=True):
        assert torch.allclose(policy.linear.weight.grad, weight, atol=1e-6)


def test_the_task_trains_the_policies_through_the_gates():
    model = Adaptive().prepare(vit()).train()
    nn.functional.cross_entropy(model(IMAGES), torch.tensor([0, 1, 2])).backward()
    assert all(policy.linear.weight.grad.abs().sum() > 0 for policy in policies(model))


@pytest.mark.parametrize("make", [vit, resnet, mlp, Encoder], ids=["vit", "resnet", "mlp", "torch"])
def test_axes_and_layout_are_those_of_the_model(make):
    """A skeleton on a client has the tensors of the server's model, and copies have policies of their own."""
    plain, model = Submodels(make()), Submodels(Adaptive().prepare(make()))
    assert model.axes == plain.axes and model.axes
    assert {name for name in set(model.parameters) - set(plain.parameters) if "usage_policy" not in name} == set()
    with skeleton():
        bare = Adaptive().prepare(make())
    assert Submodels(bare).layout() == model.layout()
    one = Adaptive().prepare(make())
    other = copy.deepcopy(one)
    force(one, 0.0)
    shrunk = model.shrink(Spec())
    assert all(
        p.linear.weight.data_ptr() != q.linear.weight.data_ptr()
        for p, q in zip(policies(one), policies(other), strict=True)
    )
    assert len(policies(shrunk.module)) == len(policies(one)) > 0


def test_a_copy_after_a_step_is_a_copy_without_its_decisions():
    model = Adaptive().prepare(vit()).train()
    first = model(IMAGES)
    again = copy.deepcopy(model)
    assert all(policy.gates is None and policy.used == [] for policy in policies(again))
    assert first.requires_grad and again.eval()(IMAGES).shape == (3, 10)


def test_the_cost_is_the_whole_models_and_the_policies_and_a_note_says_so():
    batch = (torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))
    plain, model = Submodels(vit(), batch), Submodels(Adaptive().prepare(vit()), batch)
    before, after = (Adaptive().cost(one, Spec(), 8, {}) for one in (plain, model))
    # two blocks, each a layer from 32 features to two heads and two sublayers
    assert after.params - before.params == 2 * (32 + 1) * 4
    # forward and backward of that layer for the class token; its input has a gradient in both blocks
    assert after.flops_per_sample - before.flops_per_sample == 2 * 3 * 2 * 32 * 4
    (note,) = Adaptive().notes(model)
    assert note == (
        "ada_vit chooses among 4 heads and 4 sublayers of blocks for each sample, but training computes all of them: it "
        "costs as much as the whole model, and 264 more parameters"
    )


def test_ranks_of_lora_are_taken_for_neither_heads_nor_sublayers():
    pytest.importorskip("peft")
    from tests.helpers.lora_models import lora_bert

    model = Adaptive().prepare(lora_bert())
    assert not any(isinstance(part, UsagePolicy) for part in model.modules())
    assert Adaptive().notes(Submodels(model)) == [
        "ada_vit has no effect in a model with LoRA adapters, which are averaged as usual"
    ]


def test_a_model_with_nothing_to_decide_on_is_averaged_and_a_note_says_so():
    model = Submodels(Adaptive().prepare(MLP(64, (), 10)))
    assert Adaptive().notes(model) == [
        "ada_vit finds neither blocks nor hidden units to choose among in this model: it has no effect"
    ]


@pytest.mark.parametrize("model", [vit, mlp], ids=["vit", "mlp"])
def test_it_learns(tmp_path, model):
    run = finish(experiment(tmp_path / "run", ada_vit(), model=model, max_updates=8))
    losses = [float(row["loss"]) for row in run.rows("metrics.csv")]
    assert losses[-1] < losses[0]


class Half(MLP):
    """An optimiser that knows of its own layers alone."""

    def configure_optimizers(self):
        parameters = [p for name, p in self.named_parameters() if "usage_policy" not in name]
        return torch.optim.SGD(parameters, lr=0.1)


def test_an_optimiser_that_leaves_the_policies_out_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"ada_vit adds 'usage_policy' to the model, but Half\.configure_optimizers"):
        finish(experiment(tmp_path / "r", ada_vit(), model=lambda: Half(64, (8,), 10)))
