"""Run folders and exported files for tests, made in a moment: nothing is trained."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perception.config import RunConfig, to_json
from perception.model_config import LaneModelConfig
from perception.onnx_model import metadata_of

_MISSING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
NEEDS_EXPORT = pytest.mark.skipif(bool(_MISSING), reason=f'needs the extra "export": {", ".join(_MISSING)} missing')
onnx: Any = None if "onnx" in _MISSING else importlib.import_module("onnx")

MODEL = LaneModelConfig(
    backbone_widths=(8, 16, 24, 32), backbone_blocks=(1, 1, 1, 1), input_height=64, input_width=160, num_rows=65
)
CONFIG = RunConfig(task="lane", name="tiny", model=MODEL)


def make_run(folder: Path, config: RunConfig = CONFIG, seed: int = 0) -> Path:
    """A run folder with one checkpoint of a random model, whose score depends on the image."""
    import torch

    from perception.checkpoint import save_checkpoint
    from perception.tasks import task_for

    torch.manual_seed(seed)
    model = task_for(config).build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))
    content = {"config": to_json(config), "averaged_model": model.state_dict(), "step": 7, "samples": 70}
    checkpoint = save_checkpoint(folder / "checkpoints", 7, 70, content, 0.25)
    manifest = {"images": 3, "manifest_sha256_sum": "ab" * 32}
    environment = {
        "git": {"revision": "c0ffee", "diff": "+changed\n"},
        "image_digest": "sha256:1234",
        "data": {"source": "generated", "train": manifest, "validation": manifest},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    result = {"metrics": {"culane_f1_50": 0.25}, "checkpoint": {"sha256": checkpoint.sha256}}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


STUB_XS = (40.0, 100.0)
"""Input x of the two upright lanes that every image has according to `stub_file`; the input is 160 wide."""


def stub_file(
    path: Path,
    batch: int | None = None,
    crop_top_fraction: float = 0.0,
    bright_only: bool = False,
    max_lanes: int = MODEL.max_lanes,
) -> Path:
    """An exported file whose network knows two upright lanes, whatever it sees; one of them short and less sure.

    With `bright_only`, the first pixel's red value is added to the logits, which are low without it.
    """
    helper, tensor = onnx.helper, onnx.numpy_helper.from_array
    config = replace(CONFIG, model=replace(MODEL, crop_top_fraction=crop_top_fraction, max_lanes=max_lanes))
    values = {
        "logits": np.array([[1.0, 3.0, -9.0]], np.float32) - (20.0 if bright_only else 0.0),
        "xs": np.repeat(np.array([[[STUB_XS[1]], [STUB_XS[0]], [0.0]]], np.float32), MODEL.num_rows, axis=2),
        "start": np.zeros((1, 3), np.float32),
        "length": np.array([[33.0, 65.0, 65.0]], np.float32),
    }
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Slice", ["floats", "from", "to", "axes"], ["red"]),
        helper.make_node("Reshape", ["red", "column"], ["zeros_or_red"]),
        helper.make_node("Mul", ["zeros_or_red", "none"], ["zeros"]),
        helper.make_node("Reshape", ["zeros", "cube"], ["zeros3"]),
    ]
    constants = {
        "from": np.array([0, 0, 0]),
        "to": np.array([1, 1, 1]),
        "axes": np.array([1, 2, 3]),
        "column": np.array([-1, 1]),
        "cube": np.array([-1, 1, 1]),
        "none": np.zeros(1, np.float32),
    }
    for name, value in values.items():
        constants[f"{name}_value"] = value
        column = "zeros3" if value.ndim == 3 else "zeros"
        added = "zeros_or_red" if name == "logits" and bright_only else column
        nodes.append(helper.make_node("Add", [f"{name}_value", added], [name]))
    size = batch if batch is not None else "batch"
    images = helper.make_tensor_value_info(
        "images", onnx.TensorProto.UINT8, [size, MODEL.input_height, MODEL.input_width, 3]
    )
    outputs = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size, *value.shape[1:]])
        for name, value in values.items()
    ]
    initializers = [tensor(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "stub", [images], outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, metadata_of(to_json(config), (), "fp32"))
    onnx.save(model, str(path))
    return path
