"""Exported files are run as they were exported, and refused in one line where they are not ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perception.errors import UserError
from perception.onnx_model import OnnxModel, metadata_of
from tests.exported_models import NEEDS_EXPORT, STUB_XS, onnx, stub_file

pytestmark = NEEDS_EXPORT


def image(height: int, width: int, value: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full((height, width, 3), value, np.uint8)


@pytest.mark.parametrize(("height", "width"), [(64, 160), (590, 1640), (33, 1000), (1080, 31)])
def test_lanes_are_in_pixels_of_an_image_of_any_size(height: int, width: int, tmp_path: Path) -> None:
    model = OnnxModel(stub_file(tmp_path / "m.onnx", crop_top_fraction=0.5))
    (prediction,), seconds = model.predict([model.prepare(image(height, width), "a.jpg")])
    assert seconds > 0 and len(prediction.lanes) == 2 and prediction.scores[0] > prediction.scores[1]
    for lane, x in zip(prediction.lanes, STUB_XS, strict=True):
        np.testing.assert_allclose(lane[:, 0], (x + 0.5) * width / 160 - 0.5)
    # The upper half was cut off: a lane over all rows starts at its edge and ends at the image's.
    top, bottom = prediction.lanes[0][-1, 1], prediction.lanes[0][0, 1]
    cut = int(height / 2)
    np.testing.assert_allclose([top, bottom], [cut - 0.5 + 0.5 * (height - cut) / 64, height - 0.5], atol=height / 64)


@pytest.mark.parametrize("batch", [None, 1, 2, 3])
def test_any_number_of_images_goes_through_any_batch(batch: int | None, tmp_path: Path) -> None:
    model = OnnxModel(stub_file(tmp_path / "m.onnx", batch, bright_only=True))
    assert model.fixed_batch == batch
    values = [0, 255, 0, 0, 255]
    prepared = [model.prepare(image(64, 160, value), "a") for value in values]
    for count in range(1, 6):
        predictions, _ = model.predict(prepared[:count])
        assert [bool(p.lanes) for p in predictions] == [value > 0 for value in values[:count]]


def test_no_image_is_no_prediction(tmp_path: Path) -> None:
    assert OnnxModel(stub_file(tmp_path / "m.onnx")).predict([])[0] == []


def damaged(path: Path, **metadata: str | None) -> Path:
    model = onnx.load(str(path))
    props = {entry.key: entry.value for entry in model.metadata_props}
    for name, value in metadata.items():
        key = f"roadfuse.{name}"
        props.pop(key)
        if value is not None:
            props[key] = value
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, props)
    onnx.save(model, str(path))
    return path


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": None}, "not one that `python -m pipelines export` wrote"),
        ({"format": "9"}, "export format 9, this version reads 1"),
        ({"classes": None}, "its metadata are incomplete"),
        ({"config": "{"}, "not JSON"),
        ({"config": '{"task": "lane", "name": "x", "modl": {}}'}, 'field modl is unknown; did you mean "model"?'),
        (
            {"config": '{"task": "sign", "name": "x"}'},
            "its outputs are logits, xs, start, length, those of a sign model",
        ),
    ],
)
def test_a_foreign_file_is_refused(metadata: dict[str, str | None], message: str, tmp_path: Path) -> None:
    path = damaged(stub_file(tmp_path / "m.onnx"), **metadata)
    with pytest.raises(UserError) as error:
        OnnxModel(path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_or_truncated_file_is_refused(tmp_path: Path) -> None:
    path = stub_file(tmp_path / "m.onnx")
    for content in (path.read_bytes()[:200], b"", b"no onnx"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"m\.onnx: not a readable ONNX file") as error:
            OnnxModel(path)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"none\.onnx: no such exported file"):
        OnnxModel(tmp_path / "none.onnx")


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stub_file(tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r'onnxruntime cannot be imported .*install the extra "export"'):
        OnnxModel(path)


def test_metadata_are_texts() -> None:
    assert all(isinstance(value, str) for value in metadata_of("{}", ("ä",), "int8").values())
