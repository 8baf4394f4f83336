"""ALBERT as a next-word model: one transformer block, applied again and again."""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from model_zoo import hub
from model_zoo.huggingface import HFLanguageModel
from model_zoo.sizes import shape_of

SIZES: Final = {"micro": (3, 32, 16, 2), "base": (12, 768, 128, 12)}
"""Times that the block is applied, width, length of a word vector, heads; the MLP is four times as wide."""


class ALBERT(HFLanguageModel):
    """ALBERT for predicting the next word: transformers' ``AlbertForMaskedLM`` with a causal mask.

    Lan et al. 2020 (arXiv:1909.11942). All layers share their parameters, and the output layer shares the word vectors.
    The TimelyFL paper trains it on Reddit (30,000 words). Input: tokens (batch, length) int64, padded at the end.
    Output: logits (batch, length, vocab_size). Trained with AdamW.
    """

    def __init__(
        self,
        size: Literal["micro", "base"] = "base",
        vocab_size: int = 30000,
        max_length: int = 512,
        dropout: float = 0.0,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
    ) -> None:
        """Build the model.

        Args:
            size: one of `SIZES`.
            vocab_size: number of tokens.
            max_length: longest text in tokens.
            dropout: probability of dropping a hidden unit or an attention weight.
            lr: learning rate of AdamW.
            weight_decay: of matrices.
            warmup_steps: steps of each task over which the learning rate rises.

        Raises:
            ValueError: there is no such size.
        """
        depth, width, embedding, heads = shape_of("ALBERT", size, SIZES)
        architecture = {
            "model_type": "albert",
            "num_hidden_layers": depth,
            "hidden_size": width,
            "embedding_size": embedding,
            "intermediate_size": 4 * width,
            "num_attention_heads": heads,
            "vocab_size": vocab_size,
            "max_position_embeddings": max_length,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
        }
        super().__init__(hub.make("MaskedLM", None, False, architecture), lr, weight_decay, warmup_steps)
        self.save_hyperparameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position."""
        batch, length = tokens.shape
        # A mask of four dimensions is taken as it is; one of two would let every position see all others.
        seen = (
            torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril().expand(batch, 1, length, length)
        )
        logits: Tensor = self.model(input_ids=tokens, attention_mask=seen).logits
        return logits
