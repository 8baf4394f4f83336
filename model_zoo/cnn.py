"""A small convolutional network for 28 x 28 and 32 x 32 images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.classifier import Classifier


class CNN(Classifier):
    """Convolutional network: two 5x5 convolutions with max pooling, then three linear layers; trained with SGD.

    Input: images (batch, in_channels, image_size, image_size). Output: logits (batch, num_classes).
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int = 28,
        channels: Sequence[int] = (32, 64),
        hidden: Sequence[int] = (120, 84),
        num_classes: int = 10,
        lr: float = 0.01,
        momentum: float = 0.5,
        batch_norm: bool = False,
        padding: int = 2,
        weight_decay: float = 0.0,
    ) -> None:
        """Build the layers.

        Args:
            in_channels: 1 for MNIST, 3 for CIFAR.
            image_size: height and width, divisible by 4.
            channels: of the two convolutions.
            hidden: widths of the first two linear layers.
            num_classes: number of logits.
            lr: learning rate of SGD.
            momentum: momentum of SGD.
            batch_norm: put a batch norm after each convolution.
            padding: zeros around the input of each convolution: 2 keeps height and width, 0 is LeNet-5's.
            weight_decay: L2 penalty of SGD.
        """
        super().__init__(lr, momentum, weight_decay)
        if len(channels) != 2 or len(hidden) != 2 or image_size % 4:
            raise ValueError(
                f"CNN: channels {tuple(channels)} and hidden {tuple(hidden)} must be two widths each, image_size "
                f"{image_size} a multiple of 4"
            )
        self.save_hyperparameters()
        self.conv1 = nn.Conv2d(in_channels, channels[0], 5, padding=padding)
        self.norm1 = nn.BatchNorm2d(channels[0]) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5, padding=padding)
        self.norm2 = nn.BatchNorm2d(channels[1]) if batch_norm else nn.Identity()
        side = ((image_size - 4 + 2 * padding) // 2 - 4 + 2 * padding) // 2
        self.fc1 = nn.Linear(channels[1] * side**2, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc3 = nn.Linear(hidden[1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits
