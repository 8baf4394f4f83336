"""VGG11 with batch norm, for images or spectrograms of 32 x 32."""

from __future__ import annotations

from torch import Tensor, nn

from model_zoo.classifier import Classifier

_LAYERS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


class VGG11(Classifier):
    """VGG11 with a batch norm after each convolution (Simonyan and Zisserman 2015, arXiv:1409.1556, configuration A).

    Input: images (batch, in_channels, height, width), at least 32 x 32. Output: logits (batch, num_classes). The
    convolutions have the names of torchvision's ``vgg11_bn``. A single linear layer replaces its three, which have 119
    million parameters and are made for 224 x 224. So 9.2 million parameters remain.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, lr: float = 0.05, momentum: float = 0.9, width: float = 1.0
    ) -> None:
        """Build the layers.

        Args:
            in_channels: 3 for CIFAR, 1 for MNIST padded to 32 x 32 or a mel spectrogram.
            num_classes: number of logits.
            lr: learning rate of SGD.
            momentum: momentum of SGD.
            width: factor on every number of channels.
        """
        super().__init__(lr, momentum)
        self.save_hyperparameters()
        layers: list[nn.Module] = []
        channels = in_channels
        for layer in _LAYERS:
            if isinstance(layer, str):
                layers.append(nn.MaxPool2d(2))
                continue
            after = max(1, round(layer * width))
            layers += [nn.Conv2d(channels, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            channels = after
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.head(self.pool(self.features(x)).flatten(1))
        return logits
