"""Define the next-token loss and the optimiser that the zoo's language models share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from model_zoo.metrics import IGNORED, ExactMatch, Perplexity

Batch = Sequence[Tensor] | Mapping[str, Tensor]


class LanguageModel(LightningModule):
    """Base class of language models, whose forward returns logits (batch, length, vocab_size) for the next token.

    Batches are ``(tokens, targets)``, both (batch, length) int64. The targets are the tokens shifted by one position,
    or -100 where there is nothing to predict. The loss is in nats per token; perplexity is exp(loss). Trained with SGD.
    """

    def __init__(self, lr: float, momentum: float = 0.0) -> None:
        """Store the learning rate and momentum of SGD."""
        super().__init__()
        self.lr, self.momentum = lr, momentum

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over the tokens of a batch."""
        return next_token_loss(*self._logits_and_targets(batch))

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return and log the mean loss and accuracy over a batch's tokens; log perplexity and, for examples, exact matches."""
        logits, targets = self._logits_and_targets(batch)
        counted = targets != IGNORED
        hits, num_tokens = (logits.argmax(dim=-1) == targets) & counted, int(counted.sum())
        metrics = {"loss": next_token_loss(logits, targets), "accuracy": hits.sum() / max(num_tokens, 1)}
        if "perplexity" not in self._modules:  # not before: copies that only train do without it
            self.perplexity, self.exact_match = Perplexity().to(logits.device), ExactMatch().to(logits.device)
        self.perplexity.update(logits, targets)
        found: dict[str, Any] = {**metrics, "perplexity": self.perplexity}
        if isinstance(batch, Mapping):
            self.exact_match.update(self._predicted(batch, logits, targets), targets)
            found["exact_match"] = self.exact_match
        if num_tokens:  # each token weighs the same, however many a batch has
            self.log_dict(found, batch_size=num_tokens)
        return metrics

    def _logits_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        tokens, targets = cast("Sequence[Tensor]", batch)
        return self(tokens), targets

    def _predicted(self, batch: Mapping[str, Tensor], logits: Tensor, targets: Tensor) -> Tensor:
        """Predict the tokens whose answers are counted as `exact_match`, (batch, length)."""
        return logits.argmax(dim=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD for the parameters that train."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=self.momentum)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the positions that have a target, at least in float32.

    Args:
        logits: logits, (batch, length, vocab_size).
        targets: tokens to predict, (batch, length); -100 = no target.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
