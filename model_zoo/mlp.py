"""A multilayer perceptron for images or vectors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from model_zoo.adamw import adamw
from model_zoo.classifier import Classifier

_Optimizer = Literal["sgd", "adamw"]


class MLP(Classifier):
    """Multilayer perceptron: linear layers with ReLU between them, trained with SGD or AdamW on the cross-entropy.

    Input: any shape with ``in_features`` values per sample. Output: logits (batch, num_classes).
    """

    def __init__(
        self,
        in_features: int = 784,
        hidden: Sequence[int] = (200,),
        num_classes: int = 10,
        lr: float = 0.005,
        momentum: float = 0.5,
        dropout: float = 0.0,
        optimizer: _Optimizer = "sgd",
        weight_decay: float = 0.0,
    ) -> None:
        """Build the layers.

        Args:
            in_features: values per sample (28 x 28 = 784).
            hidden: width of each hidden layer; empty = logistic regression.
            num_classes: number of logits.
            lr: learning rate.
            momentum: momentum of SGD.
            dropout: probability of dropping a hidden unit; 0 = no dropout layers.
            optimizer: sgd, or adamw, which does not decay biases.
            weight_decay: L2 penalty of SGD; decoupled weight decay of AdamW.

        Raises:
            ValueError: there is no such optimizer.
        """
        super().__init__(lr, momentum, weight_decay)
        if optimizer not in get_args(_Optimizer):
            raise ValueError(f"MLP: optimizer is '{optimizer}': give sgd or adamw")
        self.optimizer_name = optimizer
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer for the parameters that train."""
        if self.optimizer_name == "sgd":
            return super().configure_optimizers()
        made: torch.optim.Optimizer = adamw(self, self.lr, self.weight_decay, 0)
        return made
