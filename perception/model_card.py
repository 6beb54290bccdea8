"""The model card beside an exported file: what it is, how it is used, what it was trained on, where it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perception.model_config import LaneModelConfig, SignModelConfig
from perception.provenance import record_lines

if TYPE_CHECKING:
    from perception.export_checks import Checks
    from perception.onnx_model import OnnxModel
    from perception.run_model import TrainedModel

_SHOWN_METRICS = (
    "culane_f1_50",
    "culane_f1_75",
    "culane_mf1",
    "tusimple_accuracy",
    "tusimple_fp",
    "tusimple_fn",
    "ap50_class_agnostic",
    "ap50_superclass",
    "ap50",
    "ap",
)


def model_card(trained: TrainedModel, exported: OnnxModel, record: dict[str, Any], checks: Checks) -> str:
    """Markdown; every figure is from the run or from the checks of this export."""
    name = record["file"]["name"]
    sections = [
        f"# {name}\n\n{trained.config.name}, {record['export']['precision']}, sha256 `{record['file']['sha256']}`",
        "## Use\n\n" + _use(trained, exported, name),
        "## Training data\n\n" + _data(record),
        "## Metrics\n\n" + _metrics(record),
        "## Checked at export\n\n" + _bullets([*checks.lines(), *checks.notes()]),
        "## Limits\n\n" + _bullets(_limits(trained, record)),
        f"## Origin\n\n```\n{_lines(record_lines(record))}\n```\n\nVerify with `python -m pipelines trace {name}`.",
    ]
    return "\n\n".join(sections) + "\n"


def _use(trained: TrainedModel, exported: OnnxModel, name: str) -> str:
    model = trained.config.model
    batch = exported.fixed_batch or "any number"
    sides = "height, width" if exported.fixed_size is None else f"{exported.fixed_size[0]}, {exported.fixed_size[1]}"
    lines = [
        f"Input `images`: uint8 ({batch}, {sides}, 3) RGB."
        " Outputs are tensors; `perception.onnx_model` prepares images of any size and decodes, without torch:",
        "",
        "```python",
        "from pathlib import Path",
        "from perception.data.images import read_image",
        "from perception.onnx_model import OnnxModel",
        "",
        f'model = OnnxModel(Path("{name}"))',
        'prepared = model.prepare(read_image(Path("frame.jpg")), "frame.jpg")',
        "predictions, network_seconds = model.predict([prepared])",
        "```",
        "",
        f"or `python -m pipelines predict {name} INPUT`.",
    ]
    if isinstance(model, LaneModelConfig):
        lines += [
            "",
            f"An image is cut at the top by {model.crop_top_fraction:g} of its height, halved along each side as often"
            " as that is 1.8 times too long, then resized linearly; proposals of a"
            f" score under {model.score_threshold:g} go, and those nearer than {model.nms_distance_pixels:g} px"
            " (at an input 800 wide) to a better one.",
        ]
    if isinstance(model, SignModelConfig):
        lines += ["", _sign_use(model, exported.fixed_size)]
    return _lines(lines)


def _sign_use(model: SignModelConfig, fixed_size: tuple[int, int] | None) -> str:
    power = "" if model.class_score_power == 1 else f" ^ {model.class_score_power:g}"
    kind = "any class" if model.nms_class_agnostic else "its own class"
    if fixed_size is None:
        tiles = "as a whole" if not model.tile_size else f"in tiles of {model.tile_size} px where it is larger"
        size = f"Height and width are any multiples of 32; an image is searched at its own resolution, {tiles}."
    else:
        size = (
            f"An image is searched at its own resolution, a larger one in tiles of {fixed_size[0]}x{fixed_size[1]} px."
        )
    return (
        f"{size} What is left of an input beside the image is grey (114). `perception.sign_decode_numpy.decode_signs`"
        f" is the decoding: a score is objectness · class{power}, those under {model.score_threshold:g} go, and of two"
        f" boxes with an IoU above {model.nms_iou_threshold:g} the surer one suppresses the other, of {kind}."
        f" For drawings a score of 0.3 or more is sure enough."
    )


def _data(record: dict[str, Any]) -> str:
    data = record["training"]["data"]
    if not data:
        return "Not recorded: the run folder has no environment.json."
    source = data.get("source")
    what = "procedurally drawn road scenes, no photographs" if source == "generated" else f"`{source}`"
    rows = [
        f"{split}: {data[split]['images']} images, manifest `{data[split]['manifest_sha256_sum']}`"
        for split in ("train", "validation")
        if split in data
    ]
    seen = f"seen in training: {record['checkpoint']['samples']} images (with repetitions)"
    return f"Source: {what}.\n\n" + _bullets([*rows, seen])


def _metrics(record: dict[str, Any]) -> str:
    metrics = record["training"]["metrics"]
    rows = [f"| {name} | {metrics[name]:.4f} |" for name in _SHOWN_METRICS if name in metrics]
    if not rows:
        return "This checkpoint was never evaluated in its run."
    return _lines(["On the validation data, by torch:", "", "| metric | value |", "|---|---|", *rows])


def _limits(trained: TrainedModel, record: dict[str, Any]) -> list[str]:
    limits = []
    if (record["training"]["data"] or {}).get("source", "generated") == "generated":
        limits.append("Trained on drawn scenes only: nothing is known of how it does on real roads.")
    else:
        limits.append("Figures hold for the data set it was evaluated on; other cameras, countries and weather differ.")
    model = trained.config.model
    if isinstance(model, LaneModelConfig):
        limits.append(f"At most {model.max_lanes} lanes an image; a lane is one x a row, so it cannot turn back down.")
        limits.append("The camera must look ahead along the road, at about the height in the image as in its data.")
        limits.append(
            f"An image is stretched to {model.input_height}x{model.input_width}: one of quite another aspect than the "
            "training data's is seen distorted."
        )
    else:
        limits.append(f"At most {model.max_detections} signs an image; a sign is one upright box and one class.")
        limits.append(
            "Signs must be about as large in pixels as in the training data: an image of a finer camera is not made "
            "smaller, one of a coarser camera not larger."
        )
        limits.append("Classes are those it was trained on; any other sign is missed or called one of them.")
    if record["export"]["precision"] == "int8":
        scenes = record["export"]["num_calibration_scenes"]
        limits.append(f"Ranges of int8 were taken from {scenes} drawn scenes; brighter or other images may saturate.")
    limits.append("A frame is looked at by itself; scores are not calibrated probabilities.")
    limits.append("Not validated for control of a vehicle.")
    return limits


def _bullets(lines: list[str]) -> str:
    return _lines([f"- {line}" for line in lines])


def _lines(lines: list[str]) -> str:
    return "\n".join(lines)
