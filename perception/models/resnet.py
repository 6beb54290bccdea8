"""ResNet backbone with basic blocks (He et al. 2016), strides 4 to 32."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: (B, in, H, W) → (B, out, H/stride, W/stride).

    Where the shape changes, the shortcut averages before its 1x1 convolution (ResNet-D,
    He et al. 2019), so that no pixel is thrown away.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        shortcut: list[nn.Module] = []
        if stride > 1:
            shortcut.append(nn.AvgPool2d(stride))
        if stride > 1 or channels_in != channels_out:
            shortcut += [nn.Conv2d(channels_in, channels_out, 1, bias=False), nn.BatchNorm2d(channels_out)]
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        return functional.relu(y + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Images (B, 3, H, W), H and W multiples of 32 → one map a stage, at strides 4, 8, 16 and 32.

    `stem` "conv" is the classic 7x7 convolution and max-pooling; "conv3" two 3x3 convolutions, cheaper and
    finer; "patch" takes non-overlapping 4x4 patches, which costs a tenth of the classic one on a processor.
    """

    def __init__(self, widths: Sequence[int], blocks: Sequence[int], stem: str = "conv") -> None:
        super().__init__()
        if len(widths) != 4 or len(blocks) != 4:
            raise ValueError(f"a ResNet has 4 stages, got widths {tuple(widths)} and blocks {tuple(blocks)}")
        if stem == "conv":
            self.stem = nn.Sequential(
                nn.Conv2d(3, widths[0], 7, stride=2, padding=3, bias=False),
                nn.BatchNorm2d(widths[0]),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
        elif stem == "conv3":
            half = widths[0] // 2
            self.stem = nn.Sequential(
                nn.Conv2d(3, half, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(half),
                nn.ReLU(inplace=True),
                nn.Conv2d(half, widths[0], 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(widths[0]),
                nn.ReLU(inplace=True),
            )
        elif stem == "patch":
            self.stem = nn.Sequential(
                nn.Conv2d(3, widths[0], 4, stride=4, bias=False),
                nn.BatchNorm2d(widths[0]),
                nn.ReLU(inplace=True),
            )
        else:
            raise ValueError(f'stem is "conv", "conv3" or "patch", not "{stem}"')
        stages = []
        channels = widths[0]
        for level, (width, num_blocks) in enumerate(zip(widths, blocks, strict=True)):
            stage = []
            for block in range(num_blocks):
                stage.append(BasicBlock(channels, width, stride=2 if level > 0 and block == 0 else 1))
                channels = width
            stages.append(nn.Sequential(*stage))
        self.stages = nn.ModuleList(stages)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Kaiming-normal convolutions; the last scale of each block 0, so that it starts as its shortcut."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for module in self.modules():
            if isinstance(module, BasicBlock):
                nn.init.zeros_(module.norm2.weight)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.stem(images)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


def normalise(images: Tensor) -> Tensor:
    """uint8 (B, H, W, 3) RGB → float32 (B, 3, H, W) of about mean 0 and deviation 1, laid out channels-last.

    One scale for all colours: ImageNet's differ by less than 7 % between them, the network starts
    with a convolution that learns the rest, and three scales cost ten times as much on a processor.
    """
    # A permuted NHWC tensor already has the channels-last layout: no copy.
    return (images.float() * (1 / 57.6) - 2.0).permute(0, 3, 1, 2)
