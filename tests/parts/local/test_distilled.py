"""Self-distillation between exits (Co-S2P, Eq. 3)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from torch.nn import functional as F

from model_zoo import LLaMA, ViT
from raafl.errors import BadInput
from raafl.parts.local.distilled import Distilled, _logits, exit_depths, knowledge_loss, with_every_exit
from raafl.submodel import FULL, Spec, Submodels, depth_window
from tests.local.bench import assignment, filled, task_in


def three_blocks(monkeypatch):
    import model_zoo.vit

    monkeypatch.setitem(model_zoo.vit.SIZES, "micro", (3, 16, 24, 2))
    torch.manual_seed(0)
    return with_every_exit(ViT("micro", 8, 4, num_classes=5, dropout=0.1))


def task_for(module, submodels, spec=FULL):
    return task_in(module, submodels, assignment(spec))


def cut(model, submodels, spec):
    return filled(submodels, spec, submodels.state(model)).module


def batch():
    torch.manual_seed(3)
    return torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])


def test_knowledge_loss_by_hand():
    student, teacher = torch.tensor([[0.0, 2.0]]), torch.tensor([[4.0, 0.0]])
    p = [math.exp(2) / (math.exp(2) + 1), 1 / (math.exp(2) + 1)]  # logits / 2
    q = [1 / (1 + math.exp(1)), math.exp(1) / (1 + math.exp(1))]
    wanted = 4 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert knowledge_loss(student, teacher, 2.0).item() == pytest.approx(wanted, rel=1e-5)
    assert knowledge_loss(teacher, teacher, 2.0).item() == pytest.approx(0.0, abs=1e-6)
    both = torch.cat([student, teacher])[None], torch.cat([teacher, teacher])[None]
    assert knowledge_loss(*both, 2.0, torch.tensor([[True, False]])).item() == pytest.approx(wanted, rel=1e-5)


def test_each_block_but_the_last_gets_an_exit_on_skeletons_too(monkeypatch):
    from raafl.submodel import skeleton

    model = three_blocks(monkeypatch)
    assert exit_depths(Submodels(model)) == {1: "model.exit1", 2: "model.exit2"}
    with skeleton():
        other = with_every_exit(ViT("micro", 8, 4, num_classes=5, dropout=0.1))
    assert Submodels(other).layout().fingerprint == Submodels(model).layout().fingerprint
    assert with_every_exit(model) is model  # has them


@pytest.mark.parametrize("window", [(0, 3), (0, 2), (1, 3)])
def test_the_loss_is_the_sum_over_exits_of_one_forward_pass(monkeypatch, window):
    """Against each exit's own logits, taken by really cutting the model there; dropout is off."""
    model, (x, y) = three_blocks(monkeypatch).eval(), batch()
    submodels = Submodels(model)
    start, stop = window
    specs = {
        (0, 3): FULL,
        (0, 2): depth_window(submodels, 0, 2, exit=["model.exit1", "model.exit2"]),
        (1, 3): Spec(blocks=(), trained=(*depth_window(submodels, 1, 3).trained, "model.exits.exit2"), exits=None),
    }
    module = cut(model, submodels, specs[window]).eval()
    hook = Distilled(task_for(module, submodels, specs[window]), weight=0.3, temperature=2.0)
    found = hook.loss((x, y), 0)
    hook.close()
    logits = []
    for depth in range(start + 1, stop + 1):
        spec = FULL if depth == 3 else depth_window(submodels, 0, depth, exit=f"model.exit{depth}")
        logits.append(cut(model, submodels, spec).eval()(x).detach())
    teacher = logits[-1]
    wanted = sum(
        0.7 * F.cross_entropy(z, y)
        + 0.3
        * 4
        * (F.softmax(teacher / 2, -1) * (F.log_softmax(teacher / 2, -1) - F.log_softmax(z / 2, -1))).sum(-1).mean()
        for z in logits
    )
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_the_teacher_gets_no_gradient_from_distillation(monkeypatch):
    """With w = 1 there is nothing but distillation: what only the teacher has must not move."""
    model = three_blocks(monkeypatch)
    submodels = Submodels(model)
    hook = Distilled(task_for(model, submodels), weight=1.0, temperature=3.0)
    with torch.no_grad():
        for exit in ("exit1", "exit2"):
            model.model.exits[exit][1].weight.mul_(-1)
    hook.backward(hook.loss(batch(), 0))
    moved = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert any(name.startswith("model.exits.exit1") for name in moved)
    assert any(name.startswith("model.vit.layers.1.") for name in moved)
    alone = ("model.vit.layers.2.", "model.vit.layernorm", "model.classifier")
    assert not [name for name in moved if name.startswith(alone)]


def test_a_step_runs_once_and_is_drawn_once(monkeypatch):
    """Blocks run once for all exits, dropout is drawn once, and what the step logs is heard once."""
    model = three_blocks(monkeypatch).train()
    runs, heard = [], []
    model.model.vit.layers[0].register_forward_hook(lambda *_: runs.append(1))
    model.__dict__["log"] = lambda name, value: heard.append(name)
    step = model.training_step

    def logging_step(batch, index):
        model.log("seen", 1.0)
        return step((batch[0] + 0.1 * torch.randn(batch[0].shape), batch[1]), index)

    task = task_for(model, Submodels(model))
    task.loss = logging_step
    hook = Distilled(task, weight=0.2, temperature=3.0)
    torch.manual_seed(1)
    hook.loss(batch(), 0)
    after = torch.default_generator.get_state()
    torch.manual_seed(1)
    logging_step(batch(), 0)
    assert torch.equal(after, torch.default_generator.get_state())
    assert len(runs) == 2 and heard == ["seen", "seen"]
    hook.close()
    assert "forward" not in model.model.__dict__ and len(model.model._forward_hooks) == 0


def test_positions_without_a_target_do_not_count(monkeypatch):
    torch.manual_seed(0)
    model = with_every_exit(LLaMA("micro", vocab_size=13, max_length=16))
    tokens = torch.randint(0, 13, (2, 6))
    targets = torch.randint(0, 13, (2, 6))
    targets[:, 3:] = -100
    hook = Distilled(task_for(model, Submodels(model)), weight=1.0, temperature=3.0)
    with torch.no_grad():
        model.model.exits["exit1"][0].weight.uniform_(0.5, 1.5)
    one = hook.loss((tokens, targets), 0).item()
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 13  # no position that counts sees these
    assert hook.loss((other, targets), 0).item() == pytest.approx(one, rel=1e-6)
    assert one > 0


def test_an_output_with_its_own_loss_names_the_remedy_and_that_of_a_trainers_model():
    logits = torch.ones(2, 3)
    assert _logits(logits) is _logits(SimpleNamespace(logits=logits, loss=None)) is logits
    remedy = "compute the loss in `training_step`; a Trainer's model has it computed there, so take a method without"
    with pytest.raises(BadInput, match=remedy):
        _logits(SimpleNamespace(logits=logits, loss=torch.tensor(1.0)))
