"""A recurrent character language model."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from model_zoo.language import LanguageModel


class CharLM(LanguageModel):
    """Language model of characters: recurrent layers that predict the next character at each position.

    With ``cell="lstm"`` this is the model of McMahan et al. 2017 (arXiv:1602.05629, section 3) for Shakespeare:
    character vectors of size 8, two layers of 256. Input: tokens (batch, length) int64. Output: logits (batch, length,
    vocab_size).
    """

    def __init__(
        self,
        vocab_size: int = 65,
        embedding: int = 8,
        hidden: int = 256,
        num_layers: int = 2,
        cell: Literal["gru", "lstm"] = "gru",
        lr: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        """Build the layers.

        Args:
            vocab_size: number of characters.
            embedding: length of a character's vector.
            hidden: units of each recurrent layer.
            num_layers: number of recurrent layers.
            cell: kind of recurrent layer.
            lr: learning rate of SGD.
            momentum: momentum of SGD.

        Raises:
            ValueError: there is no such cell.
        """
        super().__init__(lr, momentum)
        cells = {"gru": nn.GRU, "lstm": nn.LSTM}
        if cell not in cells:
            raise ValueError(f"CharLM: cell is '{cell}': give gru or lstm")
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocab_size, embedding)
        self.rnn = cells[cell](embedding, hidden, num_layers, batch_first=True)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character at each position."""
        hidden, _ = self.rnn(self.embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits
