"""Top-5 accuracy, macro F1 and perplexity over uneven batches, against slow and obvious references."""

from __future__ import annotations

import math

import pytest
import torch
from lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from model_zoo.classifier import Classifier
from model_zoo.language import IGNORED, LanguageModel
from model_zoo.metrics import ExactMatch, MacroF1
from raafl.local.evaluate import Evaluator
from raafl.submodel import Submodels

NUM_CLASSES = 8


class Given(Classifier):
    """Its inputs are its logits."""

    def __init__(self):
        super().__init__(0.1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


class GivenTokens(LanguageModel, Given):
    def __init__(self):
        super().__init__(0.1)
        self.scale = nn.Parameter(torch.ones(()))


def samples(num=23):
    """Class 7 is never a label nor a prediction; class 6 is a label and never a prediction."""
    generator = torch.Generator().manual_seed(4)
    logits, labels = torch.randn(num, NUM_CLASSES, generator=generator), torch.arange(num) % 7
    logits[:, 6:] -= 20
    return logits, labels


def f1_of(predicted, labels):
    """Macro F1 as its definition says it: precision and recall of each class that occurs."""
    scores = []
    for one in sorted({*predicted, *labels}):
        right = sum(p == y == one for p, y in zip(predicted, labels, strict=True))
        said, there = predicted.count(one), labels.count(one)
        precision, recall = right / said if said else 0.0, right / there if there else 0.0
        scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    return sum(scores) / len(scores)


def evaluated(module, *tensors, sizes):
    batches = list(zip(*(torch.split(tensor, sizes) for tensor in tensors), strict=True))
    submodels = Submodels(module, batches[0])
    evaluator = Evaluator(submodels, lambda: [(batch, len(batch[0])) for batch in batches], seed=0)
    first, second = (evaluator(submodels.state(module), 0) for _ in range(2))
    assert first == second  # nothing is left over from one evaluation to the next
    return first


@pytest.mark.parametrize("sizes", [[23], [8, 8, 7], [10, 10, 3], [1] * 23])
def test_metrics_of_a_classifier_are_those_of_the_whole_set_whatever_the_batches(sizes):
    logits, labels = samples()
    found = evaluated(Given(), logits, labels, sizes=sizes)
    ranked = [sorted(range(NUM_CLASSES), key=lambda c, row=row: -row[c]) for row in logits.tolist()]
    predicted, y = [order[0] for order in ranked], labels.tolist()
    losses = [math.log(sum(map(math.exp, row))) - row[one] for row, one in zip(logits.tolist(), y, strict=True)]
    assert {6, 7} & {*predicted} == set() and 6 in y
    assert found == {
        "loss": pytest.approx(sum(losses) / 23, rel=1e-5),
        "accuracy": pytest.approx(sum(p == one for p, one in zip(predicted, y, strict=True)) / 23),
        "top5_accuracy": pytest.approx(sum(one in order[:5] for order, one in zip(ranked, y, strict=True)) / 23),
        "macro_f1": pytest.approx(f1_of(predicted, y)),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_a_classifier_in_half_precision_has_all_its_digits(dtype):
    logits, labels = samples()
    logits = logits.to(dtype)
    expected = nn.functional.cross_entropy(logits.double(), labels).item()
    assert evaluated(Given().to(dtype), logits, labels, sizes=[10, 10, 3])["loss"] == pytest.approx(expected, rel=1e-6)


def test_five_classes_have_no_top_5():
    logits, labels = samples()
    assert "top5_accuracy" not in evaluated(Given(), logits[:, :5], labels % 5, sizes=[23])


def test_macro_f1_by_hand():
    score = MacroF1()
    score.update(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([0, 1, 1, IGNORED]))
    # class 0: one right of two said, one there: 2 / (2 + 1); class 1 likewise one of one said and two there
    assert score.compute().item() == pytest.approx((2 / 3 + 2 / 3) / 2)
    score.reset()
    score.update(torch.eye(4), torch.full((4,), IGNORED))
    assert score.compute().item() == 0


def test_a_lightning_trainer_finds_the_same_as_raafl():
    logits, labels = samples()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(accelerator="cpu", **quiet)
    (found,) = trainer.validate(Given(), DataLoader(TensorDataset(logits, labels), batch_size=10), verbose=False)
    expected = evaluated(Given(), logits, labels, sizes=[10, 10, 3])
    assert found == {name: pytest.approx(value, rel=1e-5) for name, value in expected.items()}


@pytest.mark.parametrize("sizes", [[5], [2, 2, 1], [1] * 5])
def test_loss_accuracy_and_perplexity_of_a_language_model_are_means_over_tokens(sizes):
    logits = torch.randn(5, 6, NUM_CLASSES, generator=torch.Generator().manual_seed(5))
    targets = torch.arange(30).reshape(5, 6) % NUM_CLASSES
    for row, num in enumerate([6, 1, 0, 3, 5]):  # tokens of each text; the rest is padding
        targets[row, num:] = IGNORED
    found = evaluated(GivenTokens(), logits, targets, sizes=sizes)
    losses, hits = [], 0
    for row, one in zip(logits.flatten(0, 1).tolist(), targets.flatten().tolist(), strict=True):
        if one != IGNORED:
            losses.append(math.log(sum(map(math.exp, row))) - row[one])
            hits += row[one] == max(row)
    assert len(losses) == 15
    mean = sum(losses) / 15
    assert found == {
        "loss": pytest.approx(mean, rel=1e-5),
        "accuracy": pytest.approx(hits / 15),
        "perplexity": pytest.approx(math.exp(mean), rel=1e-5),
    }


def test_exact_match_by_hand():
    score = ExactMatch()
    #  answers: row 0 has 1 2 (right) and 3 (wrong), row 1 has 4 at its end (right), row 2 has 5 6 from its start (6 is wrong)
    targets = torch.tensor([[IGNORED, 1, 2, IGNORED, 3], [IGNORED] * 4 + [4], [5, 6, IGNORED, IGNORED, IGNORED]])
    predicted = torch.tensor([[0, 1, 2, 7, 0], [1, 1, 1, 1, 4], [5, 0, 0, 0, 0]])
    for row, wanted in zip(predicted.split(1), targets.split(1), strict=True):
        score.update(row, wanted)
    assert score.compute().item() == pytest.approx(2 / 4)
    whole = ExactMatch()
    whole.update(predicted, targets)
    assert whole.compute() == score.compute()
    whole.reset()
    whole.update(predicted, torch.full_like(targets, IGNORED))
    assert whole.compute() == 0
