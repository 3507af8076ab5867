"""ResNet, the residual network for images (He et al. 2015, arXiv:1512.03385), of bottleneck blocks.

This is ResNet v1.5: the stride of a block is in its 3 x 3 convolution, not in its first 1 x 1. The last BatchNorm of
each block begins with a scale of 0, and the classifier with a deviation of 0.01 (Goyal et al. 2017, arXiv:1706.02677).
So a block begins as its shortcut.

The names of parameters and buffers are torchvision's.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 4  # channels that leave a block, for each channel of its 3 x 3 convolution

# Shapes: B images, C channels, H x W pixels.


class Bottleneck(nn.Module):
    """A 1 x 1, a 3 x 3 and a 1 x 1 convolution with a shortcut.

    Args:
        inputs: Channels that enter.
        width: Channels of the 3 x 3 convolution. `EXPANSION` times as many leave.
        stride: 2 halves height and width.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        return F.relu(self.bn3(self.conv3(x)) + shortcut, inplace=True)


class ResNet(nn.Module):
    """Images (B, 3, H, W) to logits (B, classes).

    Args:
        classes: Rows of the classifier.
        layers: Blocks of each stage. A stage after the first halves height and width, and doubles the channels.
        width: Channels of the 3 x 3 convolutions of the first stage.
        small_stem: The first layer is a 3 x 3 convolution of stride 1, for images of few pixels. Otherwise a 7 x 7
            convolution and a pooling divide height and width by 4.
    """

    def __init__(
        self, classes: int = 1000, layers: Sequence[int] = (3, 4, 6, 3), width: int = 64, small_stem: bool = False
    ) -> None:
        super().__init__()
        kernel, stride, padding = (3, 1, 1) if small_stem else (7, 2, 3)
        self.conv1 = nn.Conv2d(3, width, kernel, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, 2, 1)
        self.stages = [f"layer{number}" for number in range(1, len(layers) + 1)]
        channels = width
        for number, (name, blocks) in enumerate(zip(self.stages, layers, strict=True)):
            stage, inner = [], width << number
            for block in range(blocks):
                stage.append(Bottleneck(channels, inner, 2 if number and not block else 1))
                channels = EXPANSION * inner
            self.add_module(name, nn.Sequential(*stage))
        self.fc = nn.Linear(channels, classes)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def blocks(self) -> list[nn.Module]:
        """Return the bottleneck blocks in order."""
        return [block for name in self.stages for block in getattr(self, name)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(x.mean((2, 3)))
