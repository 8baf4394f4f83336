"""The classifiers of the zoo: shapes, what a step returns and logs, and that they learn."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import model_zoo
from model_zoo import CNN, MLP
from model_zoo.classifier import accuracy


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (MLP(), (3, 1, 28, 28)),
        (MLP(64, (), 10), (3, 8, 8)),
        (MLP(12, (5, 4, 3), 7, dropout=0.1), (3, 12)),
        (CNN(), (3, 1, 28, 28)),
        (CNN(3, 32, num_classes=100, batch_norm=True), (3, 3, 32, 32)),
        (CNN(channels=(6, 16), padding=0), (3, 1, 28, 28)),
    ],
)
def test_any_depth_and_shape(module, inputs):
    logits = module(torch.randn(inputs))
    assert logits.shape == (3, module.hparams.num_classes)


def test_widths_are_those_asked_for():
    linear = [layer for layer in MLP(12, (5, 4), 7).layers if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [(12, 5), (5, 4), (4, 7)]
    assert sum(p.numel() for p in MLP().parameters()) == 784 * 200 + 200 + 200 * 10 + 10
    lenet = CNN(channels=(6, 16), padding=0)  # LeNet-5 without padding: (28-4)/2 = 12, (12-4)/2 = 4, 16*4*4 = 256
    assert lenet.fc1.in_features == 256
    cnn = CNN(3, 32, (4, 6), (8, 5), 2)
    assert sum(p.numel() for p in cnn.parameters()) == (
        (3 * 25 * 4 + 4) + (4 * 25 * 6 + 6) + (6 * 64 * 8 + 8) + (8 * 5 + 5) + (5 * 2 + 2)
    )


def test_a_cnn_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="image_size 30"):
        CNN(image_size=30)
    with pytest.raises(ValueError, match="channels"):
        CNN(channels=(3,))


def uniform(module):
    """All logits zero: the loss is log(number of classes), and the first class wins."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


@pytest.mark.parametrize("module", [MLP(4, (3,), 5), CNN(1, 4, (2, 2), (3, 3), 5)])
def test_steps_return_and_log_what_they_say(module):
    logged = {}
    module.log_dict = lambda metrics, **_: logged.update(metrics)
    x = torch.randn(4, 4) if isinstance(module, MLP) else torch.randn(4, 1, 4, 4)
    y = torch.tensor([0, 0, 0, 1])
    uniform(module)
    loss = module.training_step((x, y), 0)
    assert loss.requires_grad and loss.item() == pytest.approx(math.log(5))
    with torch.no_grad():
        metrics = module.validation_step((x, y), 0)
    score = logged.pop("macro_f1").compute().item()  # of the first class 2 * 3 / (4 + 3), of the second 0
    assert metrics == logged and score == pytest.approx(6 / 7 / 2)
    assert {name: float(value) for name, value in logged.items()} == {
        "loss": pytest.approx(math.log(5)),
        "accuracy": 0.75,
    }


def test_accuracy_by_hand():
    assert accuracy(
        torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 1, 1])
    ).item() == pytest.approx(2 / 3)


def test_the_optimizer_has_the_parameters_that_train():
    module = MLP(4, (3,), 2, lr=0.125, momentum=0.25)
    module.layers[1].weight.requires_grad_(False)
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.125, 0.25)
    assert sum(p.numel() for p in optimizer.param_groups[0]["params"]) == 3 + 3 * 2 + 2


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize("make", [lambda: MLP(64, (32,), 2, lr=0.1), lambda: CNN(1, 8, (4, 4), (16, 16), 2, lr=0.2)])
def test_it_learns_which_half_is_brighter(make):
    torch.manual_seed(0)
    module = make()
    module.log_dict = lambda metrics, **_: None
    x, y = torch.rand(256, 1, 8, 8), torch.arange(256) % 2
    x[y == 1, :, :4] += 0.5  # a difference that any way of rounding finds
    x[y == 0, :, 4:] += 0.5
    optimizer = module.configure_optimizers()
    for _ in range(300):
        optimizer.zero_grad()
        module.training_step((x, y), 0).backward()
        optimizer.step()
    assert module.validation_step((x, y), 0)["accuracy"] > 0.95


def test_a_model_is_imported_when_it_is_asked_for():
    code = "import sys, model_zoo; assert 'lightning' not in sys.modules and 'MLP' in dir(model_zoo)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match=r"no model 'GPT'; it has ALBERT, BERT, CNN, .*, MLP"):
        _ = model_zoo.GPT
