"""Layer tables of the networks that published scaling figures were measured with, built from their definitions.

ResNet-50/101/152 (He et al. 2016, with the stride in the 3x3 convolution), VGG-16 (Simonyan and Zisserman 2014),
Inception-V3 (Szegedy et al. 2015, no auxiliary head) and the DeepLabv3+ of the Summit runs (Kurth et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from perception.scaling.layers import Layer

NUM_CLASSES = 1000


class Shape(NamedTuple):
    height: int
    width: int
    channels: int


class _Table:
    """Collects layers while a network is walked through; each call returns the shape that comes out."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def conv(
        self,
        shape: Shape,
        channels: int,
        size: int | tuple[int, int],
        stride: int = 1,
        *,
        valid: bool = False,
        bias: bool = False,
        norm: bool = True,
    ) -> Shape:
        """A convolution, padded to keep the size unless `valid`, with a batch norm unless not."""
        rows, columns = (size, size) if isinstance(size, int) else size
        if valid:
            out = Shape((shape.height - rows) // stride + 1, (shape.width - columns) // stride + 1, channels)
        else:
            out = Shape(-(-shape.height // stride), -(-shape.width // stride), channels)
        self._add("conv", shape, out, rows * columns, out.height * out.width, bias, norm)
        return out

    def deconv(self, shape: Shape, channels: int, size: int) -> Shape:
        """A transposed convolution of stride 2, with a bias."""
        out = Shape(2 * shape.height, 2 * shape.width, channels)
        self._add("deconv", shape, out, size * size, shape.height * shape.width, bias=True, norm=False)
        return out

    def linear(self, features: int, outputs: int) -> None:
        self._add("linear", Shape(1, 1, features), Shape(1, 1, outputs), 1, 1, bias=True, norm=False)

    def _add(self, kind: str, given: Shape, out: Shape, taps: int, positions: int, bias: bool, norm: bool) -> None:
        weight = taps * given.channels * out.channels
        parameters = [("weight", weight)]
        if bias:
            parameters.append(("bias", out.channels))
        if norm:
            parameters += [("norm.weight", out.channels), ("norm.bias", out.channels)]
        flops = 2.0 * weight * positions
        self.layers.append(Layer(f"{kind}{len(self.layers)}", tuple(parameters), flops))


def _pooled(shape: Shape, size: int, valid: bool = False) -> Shape:
    """After pooling with stride 2."""
    if valid:
        return Shape((shape.height - size) // 2 + 1, (shape.width - size) // 2 + 1, shape.channels)
    return Shape(-(-shape.height // 2), -(-shape.width // 2), shape.channels)


def _bottlenecks(table: _Table, shape: Shape, blocks: Sequence[int], strides: Sequence[int]) -> tuple[Shape, Shape]:
    """ResNet's four stages; also the shape after the first one."""
    after_first = shape
    for stage, (num_blocks, stage_stride) in enumerate(zip(blocks, strides, strict=True)):
        width = 64 << stage
        for block in range(num_blocks):
            stride = stage_stride if block == 0 else 1
            inner = table.conv(shape, width, 1)
            inner = table.conv(inner, width, 3, stride)
            out = table.conv(inner, 4 * width, 1)
            if block == 0:
                table.conv(shape, 4 * width, 1, stride)
            shape = out
        if stage == 0:
            after_first = shape
    return shape, after_first


def resnet(blocks: Sequence[int]) -> tuple[Layer, ...]:
    table = _Table()
    shape = _pooled(table.conv(Shape(224, 224, 3), 64, 7, 2), 3)
    shape, _ = _bottlenecks(table, shape, blocks, (1, 2, 2, 2))
    table.linear(shape.channels, NUM_CLASSES)
    return tuple(table.layers)


def vgg16() -> tuple[Layer, ...]:
    table = _Table()
    shape = Shape(224, 224, 3)
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            shape = table.conv(shape, width, 3, bias=True, norm=False)
        shape = _pooled(shape, 2)
    table.linear(shape.height * shape.width * shape.channels, 4096)
    table.linear(4096, 4096)
    table.linear(4096, NUM_CLASSES)
    return tuple(table.layers)


def inception_v3() -> tuple[Layer, ...]:
    table = _Table()
    conv = table.conv
    shape = conv(Shape(299, 299, 3), 32, 3, 2, valid=True)
    shape = conv(conv(shape, 32, 3, valid=True), 64, 3)
    shape = conv(_pooled(shape, 3, valid=True), 80, 1, valid=True)
    shape = _pooled(conv(shape, 192, 3, valid=True), 3, valid=True)
    for pool_channels in (32, 64, 64):
        conv(shape, 64, 1)
        conv(conv(shape, 48, 1), 64, 5)
        conv(conv(conv(shape, 64, 1), 96, 3), 96, 3)
        conv(shape, pool_channels, 1)
        shape = shape._replace(channels=64 + 64 + 96 + pool_channels)
    conv(shape, 384, 3, 2, valid=True)
    reduced = conv(conv(conv(shape, 64, 1), 96, 3), 96, 3, 2, valid=True)
    shape = reduced._replace(channels=384 + 96 + shape.channels)
    for width in (128, 160, 160, 192):
        conv(shape, 192, 1)
        conv(conv(conv(shape, width, 1), width, (1, 7)), 192, (7, 1))
        inner = conv(conv(conv(shape, width, 1), width, (7, 1)), width, (1, 7))
        conv(conv(inner, width, (7, 1)), 192, (1, 7))
        conv(shape, 192, 1)
        shape = shape._replace(channels=4 * 192)
    conv(conv(shape, 192, 1), 320, 3, 2, valid=True)
    inner = conv(conv(conv(shape, 192, 1), 192, (1, 7)), 192, (7, 1))
    reduced = conv(inner, 192, 3, 2, valid=True)
    shape = reduced._replace(channels=320 + 192 + shape.channels)
    for _ in range(2):
        conv(shape, 320, 1)
        inner = conv(shape, 384, 1)
        conv(inner, 384, (1, 3))
        conv(inner, 384, (3, 1))
        inner = conv(conv(shape, 448, 1), 384, 3)
        conv(inner, 384, (1, 3))
        conv(inner, 384, (3, 1))
        conv(shape, 192, 1)
        shape = shape._replace(channels=320 + 2 * 384 + 2 * 384 + 192)
    table.linear(shape.channels, NUM_CLASSES)
    return tuple(table.layers)


def deeplab_v3_plus_summit() -> tuple[Layer, ...]:
    """768 x 1152 pixels of 16 channels, 3 classes; ResNet-50 at stride 8 and a decoder up to full resolution.

    As in the runs' own code (azrael417/ClimDeepLearn, deeplab_model.py, decoder deconv1x).
    """
    table = _Table()
    conv = table.conv
    image = Shape(768, 1152, 16)
    shape = _pooled(conv(image, 64, 7, 2), 3)
    # Stages 3 and 4 are dilated instead of strided.
    shape, early = _bottlenecks(table, shape, (3, 4, 6, 3), (1, 2, 1, 1))
    for size in (1, 3, 3, 3):
        conv(shape, 256, size)
    conv(Shape(1, 1, shape.channels), 256, 1)
    shape = conv(shape._replace(channels=5 * 256), 256, 1)
    # The skip comes from inside the first stage, where it has 64 channels.
    conv(early._replace(channels=64), 48, 1)
    shape = table.deconv(shape, 256, 3)
    shape = conv(conv(shape._replace(channels=256 + 48), 256, 3), 256, 3)
    shape = table.deconv(table.deconv(shape, 256, 3), 256, 3)
    conv(conv(image, 64, 3, bias=True, norm=False), 128, 3, bias=True, norm=False)
    shape = conv(shape._replace(channels=256 + 128), 256, 3, bias=True, norm=False)
    shape = conv(shape, 256, 3, bias=True, norm=False)
    conv(shape, 3, 1, bias=True, norm=False)
    return tuple(table.layers)


REFERENCE_NETWORKS: dict[str, Callable[[], tuple[Layer, ...]]] = {
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "resnet101": lambda: resnet((3, 4, 23, 3)),
    "resnet152": lambda: resnet((3, 8, 36, 3)),
    "inception-v3": inception_v3,
    "vgg16": vgg16,
    "deeplab-v3-plus": deeplab_v3_plus_summit,
}
