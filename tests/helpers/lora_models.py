"""Build a tiny BERT with LoRA adapters, and short texts of random tokens to train it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

from raafl.config.experiment import Experiment
from raafl.parts import RateSelect
from tests.helpers.small_runs import experiment

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 30,
    "max_position_embeddings": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}
RANK = 8
RATES = [1.0, 0.5, 0.25, 0.125]
RANKS = [8, 4, 2, 1]
LAYERS = [f"model.bert.encoder.layer.{i}.attention.self.{name}" for i in (0, 1) for name in ("query", "value")]


class Tokens(LightningDataModule):
    """64 texts of 6 tokens to train on and 16 for evaluation; the label is whether the first token is a high one."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str | None = None) -> None:
        tokens = torch.randint(1, 30, (80, 6), generator=torch.Generator().manual_seed(3))
        mask, labels = torch.ones_like(tokens), (tokens[:, 0] > 14).long()
        self.train = TensorDataset(tokens[:64], mask[:64], labels[:64])
        self.test = TensorDataset(tokens[64:], mask[64:], labels[64:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=16)


def lora_bert(**more: Any) -> LightningModule:
    from model_zoo import HFSequenceClassifier
    from model_zoo.lora import LoRA

    lora = LoRA(rank=RANK, alpha=16.0, target_modules=["query", "value"])
    return HFSequenceClassifier(**{"architecture": BERT, "lr": 0.01, "lora": lora, **more})


def rated() -> RateSelect:
    return RateSelect(rates=RATES, rate_of="width")


def lora_run(output: Path, algorithm: Any, **fields: Any) -> Experiment:
    """Return an experiment of four clients with ranks 8, 4, 2 and 1; ``fields``: fields of the experiment that differ."""
    return experiment(output, algorithm, **{"model": lora_bert, "data": Tokens, **fields})


def trained_bytes(rank: int) -> int:
    """Compute the bytes of float32 adapters of four 16 x 16 layers, and of the head of two classes."""
    return 4 * (4 * (rank * 16 + 16 * rank) + 2 * 16 + 2)
