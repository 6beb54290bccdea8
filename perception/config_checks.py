"""What the values of a configuration must be, field by field; `config.validate` calls it. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perception.errors import UserError, nearest
from perception.model_config import LaneModelConfig, SignModelConfig

FORMATS: dict[str, tuple[str, ...]] = {
    "lane": ("auto", "generated", "tusimple", "culane", "llamas", "curvelanes", "openlane", "vil100", "bdd100k_lanes"),
    "sign": ("auto", "generated", "gtsdb", "gtsrb", "tt100k", "mapillary", "lisa", "bdd100k", "coco", "yolo", "voc"),
}
"""A task → what `data.format` may be."""

TARGETS: dict[str, tuple[str, ...]] = {
    "lane": (
        *("culane_f1_50", "culane_f1_75", "culane_mf1", "tusimple_accuracy"),
        *("llamas_f1_50", "llamas_f1_75", "llamas_mf1"),
        *("curvelanes_f1_50", "curvelanes_f1_75", "curvelanes_mf1"),
        *("openlane_f1_30", "openlane_f1_75", "openlane_mf1"),
    ),
    "sign": ("ap50_class_agnostic", "ap50_superclass", "ap50", "ap"),
}
"""A task → the metrics of its validation that a run may aim at; more is better in all of them. Those that begin with
one of `BENCHMARKS` need images of that data set."""

BENCHMARKS = ("llamas", "curvelanes", "openlane")

CHOICES: dict[str, tuple[str, ...]] = {
    "data.scene_style": ("v1", "v2"),
    "model.stem": ("conv", "conv3", "patch"),
    "optim.name": ("adamw", "lamb", "lars"),
    "optim.lr_scaling": ("sqrt", "linear", "none"),
    "train.precision": ("auto", "bf16", "fp32"),
    "distributed.engine": ("auto", "horovod", "torch", "solo"),
    "distributed.transport": ("auto", "mpi", "gloo", "nccl"),
    "distributed.local_reduction": ("auto", "shared_memory", "engine"),
    "distributed.shared_update": ("auto", "on", "off"),
    "distributed.wire_format": ("fp32", "fp16", "bf16", "powersgd"),
}

LARGEST_WHOLE_NUMBER = 10**15
"""What is beyond has lost a decimal point, and ends in other programs as an overflow."""

# Fields of `model` that only one task has are checked where they are.
_POSITIVE = (
    "train.num_samples",
    "train.batch_size_per_rank",
    "train.accumulation",
    "train.log_every_steps",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
    "data.num_train_scenes",
    "data.num_validation_scenes",
    "data.scene_height",
    "data.scene_width",
    "model.backbone_widths",
    "model.backbone_blocks",
    "model.neck_channels",
    "model.input_height",
    "model.input_width",
    "model.num_sample_rows",
    "model.proposal_grid",
    "model.num_segments",
    "model.assignment_candidates",
    "model.iou_half_width_fraction",
    "model.max_lanes",
    "model.head_convolutions",
    "model.max_candidates_per_stride",
    "model.max_detections",
    "augment.scale_range",
    "optim.lr",
    "optim.reference_batch_size",
    "optim.trust_coefficient",
    "distributed.first_bucket_mib",
    "distributed.timeout_seconds",
    "distributed.powersgd_rank",
)

_NOT_NEGATIVE = (
    "model.num_classes",
    "model.num_background_points",
    "model.tile_size",
    "model.tile_overlap",
    "augment.min_side_pixels",
    "data.drop_near_duplicates",
    "data.hard_scene_weight",
    "data.image_cache_mib",
    "model.iou_cost_weight",
    "model.box_weight",
    "model.offset_weight",
    "model.objectness_weight",
    "model.class_weight",
    "distributed.num_ranks",
    "distributed.bucket_mib",
    "distributed.horovod_cycle_time_milliseconds",
    "distributed.horovod_fusion_threshold_mib",
    "distributed.stall_warning_seconds",
    "data.workers_per_rank",
    "optim.weight_decay",
    "optim.warmup_samples",
    "optim.clip_norm",
    "optim.ema_decay_samples",
    "train.global_batch",
    "train.seed",
    "train.max_nonfinite_steps",
    "train.evaluate_every_steps",
    "train.num_threads_per_rank",
    "train.trace_steps",
)

_LIMITS = {
    "augment.rotate_degrees": (0, 180),
    "augment.shift_fraction": (0, 1),
    # Of a sign image a window so much larger than the input is held in memory.
    "augment.scale_range": (0.1, 10),
    # An epoch is longer by half of it.
    "data.hard_scene_weight": (0, 100),
    "data.workers_per_rank": (0, 1024),
    "distributed.bucket_mib": (0, 1e6),
    "distributed.first_bucket_mib": (0, 1e6),
    "distributed.stall_warning_seconds": (0, 1e7),
    "distributed.timeout_seconds": (0, 1e7),
    "train.num_threads_per_rank": (0, 4096),
}
"""Beyond these other programs end in an overflow, or the machine's memory does."""

_SHARES = (
    "augment.min_visibility",
    "augment.repeat_threshold",
    "model.class_score_power",
    "model.nms_iou_threshold",
    "model.score_threshold",
    "optim.final_lr_fraction",
)


def check_values(model: LaneModelConfig | SignModelConfig, values: Mapping[str, Any]) -> None:
    """Raise UserError for the first field that is out of range; `values` by dotted name."""
    for name, value in values.items():
        if any(isinstance(number, float) and not math.isfinite(number) for number in _numbers(value)):
            raise UserError(f"{name} = {value}: must be finite")
        if any(isinstance(number, int) and number > LARGEST_WHOLE_NUMBER for number in _numbers(value)):
            raise UserError(f"{name} = {value}: must be at most {LARGEST_WHOLE_NUMBER}")
    backbones = {"model.backbone": ("resnet", "efficientnet-lite0")} if "model.backbone" in values else {}
    for name, allowed in {**CHOICES, **backbones, "data.format": FORMATS[values["task"]]}.items():
        if values[name] not in allowed:
            raise UserError(f'{name} = "{values[name]}" is unknown{nearest(str(values[name]), allowed)}')
    for name in sorted(values.keys() & _POSITIVE):
        if min(_numbers(values[name]), default=0) <= 0:
            raise UserError(f"{name} = {values[name]}: must be above 0")
    for name in sorted(values.keys() & _NOT_NEGATIVE):
        if values[name] < 0:
            raise UserError(f"{name} = {values[name]}: must not be negative")
    for name in sorted(values.keys() & _LIMITS.keys()):
        lowest, highest = _LIMITS[name]
        if not all(lowest <= number <= highest for number in _numbers(values[name])):
            raise UserError(f"{name} = {values[name]}: must be from {lowest:g} to {highest:g}")
    for name, value in values.items():
        if (name.endswith("_probability") or name in _SHARES) and not 0 <= value <= 1:
            raise UserError(f"{name} = {value}: must be between 0 and 1")
    if values["train.pretrained_backbone"] and values.get("model.backbone") != "efficientnet-lite0":
        raise UserError(
            "train.pretrained_backbone = true: weights are at hand for model.backbone = efficientnet-lite0 only"
        )
    if values["data.hard_scene_weight"] and values["task"] != "lane":
        raise UserError(
            f"data.hard_scene_weight = {values['data.hard_scene_weight']}: for lanes only, as a sign image's loss is "
            "that of a crop drawn at random; rare signs are seen more often by augment.repeat_threshold"
        )
    if values["data.drop_near_duplicates"] and values["task"] == "sign":
        found = values["data.drop_near_duplicates"]
        raise UserError(f"data.drop_near_duplicates = {found}: only frames of lanes are dropped; set it to 0")
    targets = TARGETS[values["task"]]
    if values["train.target_metric"] not in ("", *targets):
        found = values["train.target_metric"]
        raise UserError(f'train.target_metric = "{found}" is unknown{nearest(found, targets)}')
    if len(model.backbone_widths) != 4 or len(model.backbone_blocks) != 4:
        raise UserError("model.backbone_widths and model.backbone_blocks: must have 4 values, one a stage")
    smallest, largest = values["augment.scale_range"]
    if smallest > largest:
        raise UserError(f"augment.scale_range = {smallest, largest}: the smaller must come first")
    if model.input_height % 32 or model.input_width % 32:
        raise UserError(
            f"model.input_height x model.input_width = {model.input_height}x{model.input_width}: "
            "both must be multiples of 32"
        )
    if isinstance(model, LaneModelConfig):
        _check_lane_model(model)
    else:
        _check_sign_model(model)


def _check_lane_model(model: LaneModelConfig) -> None:
    if model.num_rows < 3:
        # The direction of a lane at a row is that from the row before to the row after.
        raise UserError(f"model.num_rows = {model.num_rows}: must be at least 3")
    if model.num_sample_rows % model.num_segments:
        raise UserError(
            f"model.num_sample_rows = {model.num_sample_rows}: must be a multiple of "
            f"model.num_segments = {model.num_segments}"
        )
    if not 0 <= model.crop_top_fraction < 1:
        raise UserError(f"model.crop_top_fraction = {model.crop_top_fraction}: must be in [0, 1)")


def _check_sign_model(model: SignModelConfig) -> None:
    if model.class_names and model.num_classes != len(model.class_names):
        raise UserError(
            f"model.num_classes = {model.num_classes}, but model.class_names has {len(model.class_names)}: leave both "
            "out, and the data decide"
        )
    if len(set(model.class_names)) != len(model.class_names):
        raise UserError("model.class_names: a name stands twice")
    if model.tile_size and (model.tile_size % 32 or model.tile_overlap >= model.tile_size):
        raise UserError(
            f"model.tile_size = {model.tile_size}, model.tile_overlap = {model.tile_overlap}: the size must be a "
            "multiple of 32 and above the overlap"
        )


def _numbers(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
