"""A step of every model of the zoo, and that the small ones learn."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch.nn import functional as F

import model_zoo
from model_zoo.language import IGNORED, LanguageModel, next_token_loss

LABELS = torch.tensor([0, 1, 1])
TOKENS = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(12) < torch.tensor([[12], [5], [9]])).long()
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
WINDOWS = [TOKENS[:, :-1], TOKENS[:, 1:]]

MODELS = {
    "ResNet": (lambda: model_zoo.ResNet(8), [IMAGES, LABELS]),
    "ResNet with projections": (lambda: model_zoo.ResNet(8, projection=True), [IMAGES, LABELS]),
    "VGG11": (lambda: model_zoo.VGG11(width=0.1), [IMAGES, LABELS]),
    "KeywordSpotter": (
        lambda: model_zoo.KeywordSpotter(8, 2, (4, 4), 8),
        [torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(0)), LABELS],
    ),
    "FastText": (lambda: model_zoo.FastText(50, 8, (6, 4), 2), [TOKENS * MASK, MASK, LABELS]),
    "CharLM": (lambda: model_zoo.CharLM(50, hidden=16), WINDOWS),
    "CharLM with LSTM": (lambda: model_zoo.CharLM(50, hidden=16, cell="lstm"), WINDOWS),
}
WRAPPED = {
    "ViT": (lambda: model_zoo.ViT("micro", patch_size=8), [IMAGES, LABELS]),
    "BERT": (lambda: model_zoo.BERT("micro", vocab_size=50), [TOKENS, MASK, LABELS]),
    "ALBERT": (lambda: model_zoo.ALBERT("micro", 50), WINDOWS),
    "LLaMA": (lambda: model_zoo.LLaMA("micro", 50), WINDOWS),
    "LLaMA, tied": (lambda: model_zoo.LLaMA("micro", 50, tied=True), WINDOWS),
}
if importlib.util.find_spec("transformers"):
    MODELS |= WRAPPED


def silent(module):
    module.log_dict = lambda metrics, **_: None
    return module


def train(module, batch, num_steps):
    """Take so many steps on one batch; return the losses."""
    optimizer = module.configure_optimizers()
    optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = module.training_step(batch, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_a_step_moves_every_parameter_and_lowers_the_loss(name):
    make, batch = MODELS[name]
    torch.manual_seed(0)
    module = silent(make())
    before = [parameter.detach().clone() for parameter in module.parameters()]
    losses = train(module, batch, 10)
    for (path, parameter), old in zip(module.named_parameters(), before, strict=True):
        assert not torch.equal(parameter.detach(), old), path
    assert losses[-1] < losses[0]
    module.eval()
    with torch.no_grad():
        metrics = module.validation_step(batch, 0)
    more = {"top5_accuracy"} if batch is not WINDOWS and make().hparams.num_classes > 5 else set()
    assert set(metrics) == {"loss", "accuracy"} | more and all(
        math.isfinite(float(value)) for value in metrics.values()
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_makes_the_same_model_again(name, tmp_path):
    from tests.helpers.checkpoints import save_checkpoint

    make, batch = MODELS[name]
    module = make().eval()
    path = save_checkpoint(tmp_path, 1, module.state_dict(), module=module)
    again = type(module).load_from_checkpoint(path).eval()
    with torch.no_grad():
        assert torch.equal(again(*batch[:-1]), module(*batch[:-1]))


@pytest.mark.parametrize("name", [name for name, (_, batch) in MODELS.items() if batch is WINDOWS])
def test_no_position_of_a_language_model_sees_the_next(name):
    torch.manual_seed(0)
    module = MODELS[name][0]().eval()
    changed = TOKENS.clone()
    changed[:, 6:] = (changed[:, 6:] + 7) % 50
    with torch.no_grad():
        first, second = module(TOKENS), module(changed)
    assert first.shape == (3, 12, 50)
    assert torch.allclose(first[:, :6], second[:, :6], atol=1e-5) and not torch.allclose(first[:, 6:], second[:, 6:])


@pytest.mark.parametrize("name", [name for name in ("FastText", "BERT") if name in MODELS])
def test_padding_counts_for_nothing(name):
    module = MODELS[name][0]().eval()
    tokens = TOKENS * MASK
    longer, longer_mask = F.pad(tokens, (0, 5)), F.pad(MASK, (0, 5))
    with torch.no_grad():
        assert torch.allclose(module(longer, longer_mask), module(tokens, MASK), atol=1e-5)
        assert torch.allclose(module(tokens, MASK)[1:2], module(tokens[1:2, :5], MASK[1:2, :5]), atol=1e-5)


def test_a_batch_may_be_a_mapping():
    module = silent(model_zoo.FastText(50, 8, (6,), 2)).eval()
    expected = module.training_step([TOKENS, LABELS], 0)
    for key in ("labels", "label"):
        batch = {"tokens": TOKENS, "attention_mask": MASK, key: LABELS}
        assert torch.equal(module.training_step(batch, 0), expected)
        assert set(batch) == {"tokens", "attention_mask", key}


def test_the_next_token_loss_by_hand():
    """Three positions count: two are certain and right, one is undecided between two tokens."""

    class Fixed(LanguageModel):
        def forward(self, tokens):
            return logits

    large = 200.0
    logits = torch.tensor([[[large, 0.0], [0.0, large], [1.0, 1.0], [0.0, large]]])
    targets = torch.tensor([[0, 1, 1, IGNORED]])
    assert next_token_loss(logits, targets).item() == pytest.approx(math.log(2) / 3)
    metrics = silent(Fixed(0.1)).validation_step([targets, targets], 0)
    assert metrics["loss"].item() == pytest.approx(math.log(2) / 3)
    assert metrics["accuracy"].item() == pytest.approx(2 / 3)  # of two equal logits, the first is taken


def test_the_zero_padding_shortcut_by_hand():
    from model_zoo.resnet import ZeroPad

    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert ZeroPad(2, 2)(x).tolist() == [[[[0.0, 2.0], [8.0, 10.0]], [[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2]]


@pytest.mark.quick_cases("ResNet")
@pytest.mark.parametrize(
    ("make", "size", "num_images"),
    [
        (lambda: model_zoo.ResNet(8, 1, channels=8, lr=0.1), 8, 200),
        (lambda: model_zoo.VGG11(1, width=0.1), 32, 64),
        (lambda: model_zoo.ViT("micro", image_size=8, patch_size=2, in_channels=1, lr=3e-3), 8, 200),
    ],
    ids=["ResNet", "VGG11", "ViT"],
)
def test_image_models_learn_the_digits(make, size, num_images):
    """Real handwriting: in a few steps the loss falls far below that of guessing, log 10 = 2.3."""
    from raafl.data import Digits

    data = Digits()
    data.setup("fit")
    images, labels = (tensor[:num_images] for tensor in data.train.tensors)
    torch.manual_seed(0)
    module = silent(make())
    losses = train(module, [F.interpolate(images, size=size), labels], 30)
    assert losses[0] > 2 and losses[-1] < 1.9


@pytest.mark.skipif("ViT" not in MODELS, reason="needs transformers")
@pytest.mark.parametrize("mixes_labels", [True, False])
def test_mixup_by_hand(mixes_labels):
    """The order and the share are the next draws of torch's generator; the loss is mixed, or by the first labels alone."""
    torch.manual_seed(1)
    module = model_zoo.ViT("micro", patch_size=8, mixup=0.5, mixup_labels=mixes_labels)
    plain = model_zoo.ViT("micro", patch_size=8)
    plain.load_state_dict(module.state_dict())
    torch.manual_seed(2)
    loss = module.training_step([IMAGES, LABELS], 0)
    torch.manual_seed(2)
    order, share = torch.randperm(3).tolist(), torch.distributions.Beta(0.5, 0.5).sample().item()
    assert order != [0, 1, 2] and 0.01 < share < 0.99
    mixed = torch.stack([share * IMAGES[i] + (1 - share) * IMAGES[order[i]] for i in range(3)])
    first = plain.training_step([mixed, LABELS], 0)
    second = plain.training_step([mixed, LABELS[order]], 0)
    torch.testing.assert_close(loss, share * first + (1 - share) * second if mixes_labels else first)


@pytest.mark.skipif("ViT" not in MODELS, reason="needs transformers")
@pytest.mark.parametrize("fields", [{"mixup": -1.0}, {"mixup_labels": False}])
def test_mixup_that_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match=r"ViT: mixup.* is .*: (give|leave|but)|but mixup is 0"):
        model_zoo.ViT("micro", patch_size=8, **fields)


def test_fasttext_learns_ag_news(raafl_data):
    from raafl.data import AGNews

    data = AGNews("words", raafl_data, max_length=40, vocab_size=3000, download=False, num_train=4000)
    data.setup("fit")
    torch.manual_seed(0)
    module = silent(model_zoo.FastText(3000, 32, (32,), 4, lr=0.5, momentum=0.9))
    optimizer = module.configure_optimizers()
    for _ in range(3):
        for batch in data.train_dataloader():
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
    with torch.no_grad():
        metrics = module.validation_step(data.test.gather(torch.arange(len(data.test))), 0)
    assert metrics["accuracy"] > 0.4  # guessing has 0.25


def test_the_character_model_learns_shakespeare(raafl_data):
    from raafl.data import Shakespeare

    data = Shakespeare(raafl_data, length=40, download=False, num_train=64)
    data.setup("fit")
    torch.manual_seed(0)
    module = silent(model_zoo.CharLM(hidden=32, num_layers=1, lr=4.0))
    losses = train(module, data.train.dataset.gather(torch.arange(64)), 40)
    assert losses[0] == pytest.approx(math.log(65), abs=0.2) and losses[-1] < 3.4  # single letters give 3.3
