"""The residual networks for 32 x 32 images: ResNet-20 and its deeper siblings."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.classifier import Classifier


class ResNet(Classifier):
    """ResNet for small images (He et al. 2016, arXiv:1512.03385, section 4.2): 6n + 2 layers in three stages.

    Input: images (batch, in_channels, height, width). Output: logits (batch, num_classes). The stages have 16, 32 and
    64 channels. torchvision's ResNets are others, those of section 4.1 for 224 x 224. Depth 20 with 10 classes has
    269,722 parameters (0.27 M in the paper).
    """

    def __init__(
        self,
        depth: int = 20,
        in_channels: int = 3,
        num_classes: int = 10,
        channels: int = 16,
        projection: bool = False,
        lr: float = 0.1,
        momentum: float = 0.9,
    ) -> None:
        """Build the layers.

        Args:
            depth: 6n + 2 (20, 32, 44, 56, 110).
            in_channels: 3 for CIFAR, 1 for MNIST.
            num_classes: number of logits.
            channels: of the first stage; the others have two and four times as many.
            projection: where the shape changes, use a 1x1 convolution as shortcut (the paper's option B) instead of
                padding with zeros (option A).
            lr: learning rate of SGD.
            momentum: momentum of SGD.

        Raises:
            ValueError: depth is not 6n + 2.
        """
        super().__init__(lr, momentum)
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"ResNet: depth is {depth}: give 6n + 2, such as 20, 32, 44 or 56")
        self.save_hyperparameters()
        num_blocks = depth // 6
        self.conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.stage1 = _stage(channels, channels, num_blocks, 1, projection)
        self.stage2 = _stage(channels, 2 * channels, num_blocks, 2, projection)
        self.stage3 = _stage(2 * channels, 4 * channels, num_blocks, 2, projection)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4 * channels, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        x = F.relu(self.norm(self.conv(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.head(self.pool(x).flatten(1))
        return logits


class ResidualBlock(nn.Module):
    """Residual block: two 3x3 convolutions beside a shortcut.

    Input: (batch, before, h, w). Output: (batch, after, h / stride, w / stride).
    """

    def __init__(self, before: int, after: int, stride: int, projection: bool) -> None:
        """Build the layers."""
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.shortcut: nn.Module = nn.Identity()
        if not same and projection:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        elif not same:
            self.shortcut = ZeroPad(after - before, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ZeroPad(nn.Module):
    """Shortcut without parameters: takes every ``stride``-th pixel and appends channels of zeros."""

    def __init__(self, num_new: int, stride: int) -> None:
        """Store the stride and the number of new channels."""
        super().__init__()
        self.num_new, self.stride = num_new, stride

    def forward(self, x: Tensor) -> Tensor:
        """Return the pixels with appended zeros, (batch, channels + num_new, h / stride, w / stride)."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new))


def _stage(before: int, after: int, num_blocks: int, stride: int, projection: bool) -> nn.Sequential:
    blocks = [ResidualBlock(before, after, stride, projection)]
    blocks += [ResidualBlock(after, after, 1, projection) for _ in range(1, num_blocks)]
    return nn.Sequential(*blocks)
