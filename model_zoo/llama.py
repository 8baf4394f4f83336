"""Decoders in the style of LLaMA, up to TinyLlama's shape."""

from __future__ import annotations

from typing import Final, Literal

from torch import Tensor

from model_zoo import hub
from model_zoo.adamw import Optimizer
from model_zoo.huggingface import HFLanguageModel
from model_zoo.sizes import shape_of

SIZES: Final = {
    "micro": (2, 32, 88, 4, 2),
    "nano": (3, 64, 176, 4, 4),
    "tiny": (4, 160, 432, 4, 4),
    "mini": (4, 256, 688, 8, 4),
    "char": (6, 384, 1024, 8, 8),
    "small": (12, 768, 2048, 12, 4),
    "tinyllama": (22, 2048, 5632, 32, 4),
}
"""Blocks, width, width of the gated MLP, query heads, key-value heads. tinyllama is Zhang et al. 2024 (arXiv:2401.02385),
1.1 B parameters, Co-S2P's largest model; micro is for tests, nano, tiny (1.3 M) and mini for a CPU, char (10.7 M)
for texts by character."""


class LLaMA(HFLanguageModel):
    """LLaMA: transformers' ``LlamaForCausalLM`` with random weights (Touvron et al. 2023, arXiv:2307.09288).

    It has rotary positions, RMS norms, gated MLPs and grouped-query attention. Input: tokens (batch, length) int64,
    padded at the end. Output: logits (batch, length, vocab_size). Trained with AdamW. For pretrained weights use
    `HFCausalLM`.
    """

    def __init__(
        self,
        size: Literal["micro", "nano", "tiny", "mini", "char", "small", "tinyllama"] = "tinyllama",
        vocab_size: int = 32000,
        max_length: int = 2048,
        tied: bool = False,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 0,
        optimizer: Optimizer = "adamw",
    ) -> None:
        """Build the model.

        Args:
            size: one of `SIZES`.
            vocab_size: number of tokens.
            max_length: longest text in tokens.
            tied: whether the output layer shares the word vectors.
            lr: learning rate of AdamW.
            weight_decay: of matrices.
            warmup_steps: steps of each task over which the learning rate rises.
            optimizer: adamw, or adan (Xie et al. 2022).

        Raises:
            ValueError: there is no such size.
        """
        depth, width, mlp, heads, groups = shape_of("LLaMA", size, SIZES)
        architecture = {
            "model_type": "llama",
            "num_hidden_layers": depth,
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "vocab_size": vocab_size,
            "max_position_embeddings": max_length,
            "tie_word_embeddings": tied,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        super().__init__(hub.make("CausalLM", None, False, architecture), lr, weight_decay, warmup_steps, optimizer)
        self.save_hyperparameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits
