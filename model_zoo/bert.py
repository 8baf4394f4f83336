"""BERT in its small sizes, as a text classifier."""

from __future__ import annotations

from typing import Final, Literal

from torch import Tensor

from model_zoo import hub
from model_zoo.adamw import Optimizer
from model_zoo.huggingface import HFClassifier
from model_zoo.sizes import shape_of

SIZES: Final = {
    "micro": (2, 32, 2),
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "base": (12, 768, 12),
}
"""Blocks, width, heads; the MLP is four times as wide. All but micro (for tests) are those of Turc et al. 2019
(arXiv:1908.08962); small is the Co-S2P paper's model for SST-2."""


class BERT(HFClassifier):
    """BERT as a text classifier: transformers' ``BertForSequenceClassification`` with random weights.

    Devlin et al. 2019 (arXiv:1810.04805). Input: tokens and attention mask, both (batch, length) int64. Output: logits
    (batch, num_classes). Trained with AdamW. For pretrained weights use `HFSequenceClassifier`.
    """

    def __init__(
        self,
        size: Literal["micro", "tiny", "mini", "small", "base"] = "small",
        num_classes: int = 2,
        vocab_size: int = 30522,
        max_length: int = 512,
        dropout: float = 0.1,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        optimizer: Optimizer = "adamw",
    ) -> None:
        """Build the model.

        Args:
            size: one of `SIZES`.
            num_classes: number of logits.
            vocab_size: number of tokens; 0 is padding.
            max_length: longest text in tokens.
            dropout: probability of dropping a hidden unit or an attention weight.
            lr: learning rate of AdamW.
            weight_decay: of matrices.
            warmup_steps: steps of each task over which the learning rate rises.
            optimizer: adamw, or adan (Xie et al. 2022).

        Raises:
            ValueError: there is no such size.
        """
        depth, width, heads = shape_of("BERT", size, SIZES)
        architecture = {
            "model_type": "bert",
            "num_hidden_layers": depth,
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_attention_heads": heads,
            "vocab_size": vocab_size,
            "max_position_embeddings": max_length,
            "num_labels": num_classes,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
        }
        super().__init__(
            hub.make("SequenceClassification", None, False, architecture), lr, weight_decay, warmup_steps, optimizer
        )
        self.save_hyperparameters()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits
