"""A multilayer perceptron for images or vectors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from model_zoo.classifier import Classifier


class MLP(Classifier):
    """Linear layers with ReLU between them, trained with SGD on the cross-entropy.

    Takes inputs of any shape with ``in_features`` values per sample; returns logits (batch, num_classes).
    """

    def __init__(
        self,
        in_features: int = 784,
        hidden: Sequence[int] = (200,),
        num_classes: int = 10,
        lr: float = 0.005,
        momentum: float = 0.5,
        dropout: float = 0.0,
    ) -> None:
        """Build the layers.

        Args:
            in_features: values per sample (28 x 28 = 784).
            hidden: width of each hidden layer; empty = logistic regression.
            num_classes: number of logits.
            lr: learning rate of SGD.
            momentum: momentum of SGD.
            dropout: probability of dropping a hidden unit; 0 = no dropout layers.
        """
        super().__init__(lr, momentum)
        self.save_hyperparameters()
        widths = [in_features, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(widths[-1], num_classes))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.layers(x)
        return logits
