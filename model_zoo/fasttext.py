"""A bag of words with two hidden layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from model_zoo.classifier import Classifier


class FastText(Classifier):
    """Text classifier: the mean of a text's word vectors, followed by linear layers with ReLU between them.

    Joulin et al. 2017 (arXiv:1607.01759), with the two hidden layers that the RA-Fed paper uses for AG News. Input:
    tokens (batch, length) int64, in which 0 is padding and does not count. Output: logits (batch, num_classes).
    """

    def __init__(
        self,
        vocab_size: int = 20000,
        embedding: int = 64,
        hidden: Sequence[int] = (128, 64),
        num_classes: int = 4,
        lr: float = 0.1,
        momentum: float = 0.5,
    ) -> None:
        """Build the layers.

        Args:
            vocab_size: number of tokens, padding included.
            embedding: length of a word vector.
            hidden: width of each hidden layer.
            num_classes: number of logits.
            lr: learning rate of SGD.
            momentum: momentum of SGD.
        """
        super().__init__(lr, momentum)
        self.save_hyperparameters()
        self.embedding = nn.EmbeddingBag(vocab_size, embedding, mode="mean", padding_idx=0)
        layers: list[nn.Module] = []
        widths = [embedding, *hidden]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits of a batch; the mask is not needed, since padding is token 0."""
        logits: Tensor = self.layers(self.embedding(tokens))
        return logits
