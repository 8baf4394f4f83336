"""Convolutional networks of VGG's kind with batch norm, for images or spectrograms."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from model_zoo.classifier import Classifier

_VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


class _Stack(Classifier):
    """Convolutions with batch norm and some poolings, then the mean over all pixels and one linear layer."""

    def _build(self, layers: Sequence[int | str], in_channels: int, num_classes: int) -> None:
        parts: list[nn.Module] = []
        channels = in_channels
        for layer in layers:
            if isinstance(layer, str):
                parts.append(nn.MaxPool2d(2))
                continue
            parts += [nn.Conv2d(channels, layer, 3, padding=1), nn.BatchNorm2d(layer), nn.ReLU(inplace=True)]
            channels = layer
        self.features = nn.Sequential(*parts)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.head(self.pool(self.features(x)).flatten(1))
        return logits


class VGG(_Stack):
    """Convolutional network of 3 x 3 convolutions with batch norm, of which some are followed by max pooling.

    At the end the mean over all pixels goes to one linear layer. Input: images (batch, in_channels, height, width).
    Output: logits (batch, num_classes). `layers` [64, pool, 128, pool, 256, pool, 512] is HeteroFL's network for MNIST
    (Diao et al. 2021, Table 1).
    """

    def __init__(
        self,
        layers: Sequence[int | str] = _VGG11,
        in_channels: int = 3,
        num_classes: int = 10,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        """Build the layers.

        Args:
            layers: numbers of channels of the convolutions, and "pool" for each max pooling that halves height and width.
            in_channels: 1 for MNIST, 3 for CIFAR.
            num_classes: number of logits.
            lr: learning rate of SGD.
            momentum: momentum of SGD.
            weight_decay: L2 penalty of SGD.
        """
        super().__init__(lr, momentum, weight_decay)
        wrong = [layer for layer in layers if layer != "pool" and not (isinstance(layer, int) and layer > 0)]
        if wrong or not any(isinstance(layer, int) for layer in layers):
            raise ValueError(f"VGG: layers is {list(layers)}: give numbers of channels above 0, and pool between them")
        self.save_hyperparameters()
        self._build(layers, in_channels, num_classes)


class VGG11(_Stack):
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
        layers = [layer if isinstance(layer, str) else max(1, round(layer * width)) for layer in _VGG11]
        self._build(layers, in_channels, num_classes)
