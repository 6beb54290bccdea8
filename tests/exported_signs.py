"""Sign run folders and exported sign files for tests, made in a moment: nothing is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from perception.augment_config import SignAugmentConfig
from perception.config import RunConfig, to_json
from perception.model_config import SignModelConfig
from perception.onnx_model import metadata_of
from tests.exported_models import onnx

CLASSES = ("stop", "give-way")
MODEL = SignModelConfig(
    num_classes=2,
    class_names=CLASSES,
    backbone_widths=(8, 8, 16, 16),
    backbone_blocks=(1, 1, 1, 1),
    stem="conv3",
    neck_channels=8,
    head_convolutions=1,
    input_height=64,
    input_width=96,
    nms_iou_threshold=0.35,
    tile_overlap=32,
)
CONFIG = RunConfig(task="sign", name="tiny-sign", model=MODEL, augment=SignAugmentConfig())


def sign_model(config: RunConfig = CONFIG, seed: int = 0) -> Any:
    """A random network that is sure of one point in a hundred of a drawn scene."""
    import torch

    from perception.data.generated import render_sign_scene
    from perception.tasks import task_for

    torch.manual_seed(seed)
    model: Any = task_for(config).build_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        scene = torch.from_numpy(render_sign_scene(1, 0, 128, 256).image)[None]
        # Its normalisation is of what it sees, as that of a trained one.
        model.train()
        for _ in range(30):
            model(scene)
        model.eval()
        objectness = model(scene).objectness
        model.regress.weight[0] *= 2 / objectness.std()
        model.regress.bias[0] = 0
        model.regress.bias[0] = -model(scene).objectness.flatten().sort().values[-len(objectness[0]) // 100]
        model.classify.bias.zero_()
    return model


def make_sign_run(folder: Path, config: RunConfig = CONFIG, seed: int = 0) -> Path:
    """A run folder with one checkpoint of `sign_model`."""
    from perception.checkpoint import save_checkpoint

    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))
    content = {
        "config": to_json(config),
        "averaged_model": sign_model(config, seed).state_dict(),
        "step": 7,
        "samples": 70,
    }
    checkpoint = save_checkpoint(folder / "checkpoints", 7, 70, content, 0.5)
    environment = {"git": {"revision": "c0ffee", "diff": ""}, "image_digest": None, "data": {"source": "generated"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    result = {"metrics": {"ap50_class_agnostic": 0.75}, "checkpoint": {"sha256": checkpoint.sha256}}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def sign_stub_file(
    path: Path, batch: int | None = None, size: tuple[int, int] | None = None, model: SignModelConfig = MODEL
) -> Path:
    """An exported file whose network takes each bright red square of 16 pixels, at multiples of 16, for a "stop".

    `size` is the height and width of its input, None leaves them open.
    """
    helper, tensor = onnx.helper, onnx.numpy_helper.from_array
    config = replace(CONFIG, model=model)
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Slice", ["floats", "from", "to", "axes"], ["red_last"]),
        helper.make_node("Transpose", ["red_last"], ["red"], perm=[0, 3, 1, 2]),
    ]
    # A mean of 255 is a logit of 2.55, one of 0 is -10.
    for stride in (4, 8, 16):
        nodes += [
            helper.make_node(
                "AveragePool", ["red"], [f"mean{stride}"], kernel_shape=[stride] * 2, strides=[stride] * 2
            ),
            helper.make_node("Reshape", [f"mean{stride}", "row"], [f"flat{stride}"]),
            helper.make_node("Mul", [f"flat{stride}", f"factor{stride}"], [f"scaled{stride}"]),
            helper.make_node("Add", [f"scaled{stride}", f"summand{stride}"], [f"logits{stride}"]),
        ]
    nodes += [
        helper.make_node("Concat", ["logits4", "logits8", "logits16"], ["objectness"], axis=1),
        helper.make_node("Unsqueeze", ["objectness", "last"], ["column"]),
        helper.make_node("Mul", ["column", "zero"], ["zeros"]),
        helper.make_node("Add", ["zeros", "class_values"], ["classes"]),
        helper.make_node("Add", ["zeros", "offset_values"], ["offsets"]),
    ]
    constants = {
        "from": np.array([0]),
        "to": np.array([1]),
        "axes": np.array([3]),
        "row": np.array([0, -1]),
        "last": np.array([2]),
        "zero": np.zeros(1, np.float32),
        "class_values": np.array([[[8.0, -8.0]]], np.float32),
        "offset_values": np.zeros((1, 1, 4), np.float32),
        **{f"factor{stride}": np.array([value], np.float32) for stride, value in ((4, 0.0), (8, 0.0), (16, 0.0492))},
        **{f"summand{stride}": np.array([value], np.float32) for stride, value in ((4, -20), (8, -20), (16, -10))},
    }
    height, width = size or ("height", "width")
    number = batch if batch is not None else "batch"
    images = helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, [number, height, width, 3])
    shapes = {"objectness": [number, "points"], "classes": [number, "points", 2], "offsets": [number, "points", 4]}
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    initializers = [tensor(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "stub", [images], outputs, initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(made, metadata_of(to_json(config), CLASSES, "fp32"))
    onnx.save(made, str(path))
    return path
