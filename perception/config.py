"""Typed configuration: frozen dataclasses, overrides by dotted name, JSON round trip.

A pipeline returns a complete `RunConfig`; `--set optim.lr=3e-4` overlays it;
`config.json` in the run folder alone reproduces the run. No torch here: `--help`
and `show-config` answer at once.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from perception.augment_config import LaneAugmentConfig, SignAugmentConfig
from perception.config_checks import check_values
from perception.errors import UserError, nearest
from perception.model_config import LaneModelConfig, SignModelConfig


@dataclass(frozen=True)
class DataConfig:
    source: str = "generated"
    """"generated", the folder of a data set in its official layout, or of lanes a file.toml that mixes several."""
    format: str = "auto"
    """auto, generated, or a folder's format: see `config_checks.FORMATS`."""
    train_list: str = ""
    """Label or list file for training, relative to the folder; empty: the format's official one."""
    validation_list: str = ""
    """The same for validation; "train" evaluates on the training images (fit checks)."""
    corners: str = ""
    """Signs: how the boxes of a folder count pixels, e.g. half-open; empty: as its format has it."""
    class_map: str = ""
    """Signs: a file, or the name of a built-in map, that merges, renames, drops or ignores classes."""
    drop_near_duplicates: float = 0.0
    """Lanes in a folder: training leaves out frames that differ from the one before by less than so many grey levels of
    255, in the mean over a thumbnail; 0: none. Generated scenes are drawn one by one. See data/near_duplicates.py."""
    image_cache_mib: int = 0
    """Signs in a folder: each rank or loader process keeps so much of decoded images; decoding takes a third of
    the time that the small network takes to train on one."""
    num_train_scenes: int = 4000
    """Generated scenes for training."""
    num_validation_scenes: int = 200
    scene_height: int = 320
    scene_width: int = 800
    scene_style: str = "v1"
    """Of generated scenes of lanes: v1, or v2, which has more kinds of cameras, roads and nights."""
    workers_per_rank: int = 0
    """Loader processes per rank; 0 loads in the rank itself, best when cores are few."""
    hard_scene_weight: float = 0.0
    """Scenes are seen the more often the higher their loss was, the hardest this much more often than the easiest,
    and each as often as at 0 at least: an epoch is longer by half of it. See perception/hard_scenes.py."""
    cache_folder: str = ""
    """Where generated scenes are kept packed; empty: the user's cache folder."""


@dataclass(frozen=True)
class OptimConfig:
    name: str = "adamw"
    """adamw, or for large batches lamb or lars: see perception/large_batch.py. Each needs an `lr` of its own."""
    lr: float = 6e-4
    """Learning rate at `reference_batch_size`. lamb: the share of its length that each tensor moves in a step."""
    reference_batch_size: int = 40
    lr_scaling: str = "sqrt"
    """How lr follows the global batch: sqrt (for Adam's family, lamb too), linear (for lars) or none; always logged."""
    weight_decay: float = 0.01
    trust_coefficient: float = 0.001
    """lars only: lr times this is the share of its length that each tensor moves in a step, momentum apart."""
    warmup_samples: int = 32000
    """Samples over which lr rises linearly; at most a tenth of the run."""
    final_lr_fraction: float = 0.0
    """Cosine ends at this share of the peak."""
    clip_norm: float = 10.0
    """Gradients are scaled down to this global norm after the reduction; 0 clips nothing."""
    ema_decay_samples: int = 40000
    """Time constant of the weights' moving average, in samples; at most a tenth of the run. 0: none."""


@dataclass(frozen=True)
class TrainConfig:
    num_samples: int = 1_777_600
    """Length of the run in samples seen, over all ranks."""
    batch_size_per_rank: int = 5
    accumulation: int = 1
    """Micro-batches in a step; without `global_batch` a step is batch_size_per_rank * ranks * accumulation."""
    initial_checkpoint: str = ""
    """A run folder or checkpoint file whose averaged weights the run begins with; its model must be the same, and
    its classes. Not read when a run is resumed."""
    pretrained_backbone: bool = False
    """Begin with a backbone trained on ImageNet: for model.backbone = efficientnet-lite0, see perception/pretrained.py.
    Not read when a run is resumed."""
    global_batch: int = 0
    """Samples in a step. Where given, the same on any number of ranks, whose shares may differ by one sample:
    batch_size_per_rank is then the most that a rank takes at once, and accumulation follows."""
    precision: str = "auto"
    """bf16 (autocast), fp32, or auto: bf16 where the processor has it in hardware."""
    channels_last: bool = True
    sync_batch_norm: bool = False
    """Batch statistics over all ranks, on every engine."""
    seed: int = 0
    max_nonfinite_steps: int = 20
    """Steps with an inf or NaN gradient that are skipped before the run stops as diverged."""
    log_every_steps: int = 20
    checkpoint_every_steps: int = 500
    evaluate_every_steps: int = 0
    """0: only at the end."""
    target_metric: str = ""
    """The run ends at the first evaluation in which this metric of the validation reaches `target_value`."""
    target_value: float = 0.0
    keep_checkpoints: int = 2
    """Newest checkpoints kept beside the best."""
    num_threads_per_rank: int = 0
    """Compute threads; 0: cores / ranks on the host on CPUs, torch's choice on GPUs."""
    deterministic: bool = True
    trace_steps: int = 0
    """Steps, after the first five, that trace.json in the run folder shows in time on every rank; 0: no trace."""

    def global_batch_on(self, ranks: int) -> int:
        """Samples in a step of so many ranks."""
        return self.global_batch or self.batch_size_per_rank * ranks * self.accumulation


@dataclass(frozen=True)
class DistributedConfig:
    engine: str = "auto"
    """horovod, torch, solo or auto: solo for one rank, else horovod where installed, else torch."""
    transport: str = "auto"
    """mpi, gloo or nccl; auto: nccl on GPUs, mpi for horovod on CPUs if built in and it is to reduce, else gloo."""
    first_bucket_mib: float = 1.0
    bucket_mib: float = 0.0
    """Size of a bucket; 0: 4 on CPUs, where a share is summed while it is in the cache, 25 on GPUs."""
    num_ranks: int = 0
    """Processes of the run; the global batch follows from them. Recorded by each run; 0 where none was made yet."""
    timeout_seconds: float = 300.0
    """Longest wait for other ranks in one reduction."""
    horovod_cycle_time_milliseconds: float = 0.0
    """How often Horovod's thread looks for work; 0: 1, or 20 where shared memory does it and the thread is idle."""
    horovod_fusion_threshold_mib: float = 0.0
    """Horovod copies what is ready at once together, up to this size; 0: never, buckets are fused already."""
    local_reduction: str = "auto"
    """How ranks of one host reduce: shared_memory, engine, or auto: shared memory on CPUs where it can be had."""
    shared_update: str = "auto"
    """Do ranks of one host share the optimizer's work, on one copy of the parameters: on, off, or auto: on CPUs where
    memory can be shared. Weights are the same to the bit."""
    wire_format: str = "fp32"
    """What fp32 gradients travel as: fp32, fp16, bf16, or powersgd (low rank, with error feedback)."""
    powersgd_rank: int = 4
    stall_warning_seconds: float = 10.0
    """A rank that waits longer for another says for which, and at which bucket; 0: never."""

    def bucket_sizes_mib(self, on_gpu: bool) -> tuple[float, float]:
        """Sizes of the first bucket and of the others."""
        return self.first_bucket_mib, self.bucket_mib or (25.0 if on_gpu else 4.0)


@dataclass(frozen=True)
class RunConfig:
    task: str
    """lane or sign; it decides which fields `model` and `augment` have."""
    name: str
    """The configuration's own name, e.g. lane-small."""
    data: DataConfig = field(default_factory=DataConfig)
    augment: LaneAugmentConfig | SignAugmentConfig = field(default_factory=LaneAugmentConfig)
    model: LaneModelConfig | SignModelConfig = field(default_factory=LaneModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


MODEL_CONFIGS: dict[str, type[LaneModelConfig] | type[SignModelConfig]] = {
    "lane": LaneModelConfig,
    "sign": SignModelConfig,
}
"""A task → the type of its `RunConfig.model`."""

AUGMENT_CONFIGS: dict[str, type[LaneAugmentConfig] | type[SignAugmentConfig]] = {
    "lane": LaneAugmentConfig,
    "sign": SignAugmentConfig,
}
"""The same for `RunConfig.augment`."""


def override(config: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """Apply `section.field=value` texts; a value is JSON, a text field takes it as it is written.

    Raises UserError for an unknown name (with the nearest right one) or a value
    of another type.
    """
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator:
            raise UserError(f"--set {assignment}: write it as name=value, e.g. optim.lr=3e-4")
        every = flatten(config)
        config = _replace_dotted(config, name.strip(), name.strip().split("."), text.strip(), every)
    validate(config)
    return config


def to_json(config: RunConfig) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, where: str) -> RunConfig:
    """Parse what `to_json` wrote; `where` names the file in error messages.

    A missing field takes its default (older files stay readable); an unknown one is an error.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); take config.json of a run folder") from None
    if not isinstance(raw, dict) or "task" not in raw or "name" not in raw:
        raise UserError(f"{where}: not a run configuration: fields task and name are missing")
    task = _convert(str, raw["task"], f"{where}: field task")
    if task not in MODEL_CONFIGS:
        raise UserError(f'{where}: task = "{task}" is unknown{nearest(task, MODEL_CONFIGS)}')
    hints = {**typing.get_type_hints(RunConfig), "model": MODEL_CONFIGS[task], "augment": AUGMENT_CONFIGS[task]}
    # A file may leave them out: they are then the default ones of its task.
    config: RunConfig = _build(RunConfig, hints, {"model": {}, "augment": {}, **raw}, where, "")
    try:
        validate(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


def flatten(config: RunConfig) -> dict[str, Any]:
    """Dotted name → value of every field."""

    def walk(value: Any, prefix: str) -> dict[str, Any]:
        if not dataclasses.is_dataclass(value):
            return {prefix: value}
        out: dict[str, Any] = {}
        for f in dataclasses.fields(value):
            out.update(walk(getattr(value, f.name), f"{prefix}.{f.name}" if prefix else f.name))
        return out

    return walk(config, "")


def validate(config: RunConfig) -> None:
    """Raise UserError for the first field that is out of range."""
    if config.task not in MODEL_CONFIGS:
        raise UserError(f'task = "{config.task}" is unknown{nearest(config.task, MODEL_CONFIGS)}')
    if not isinstance(config.model, MODEL_CONFIGS[config.task]):
        raise UserError(f"task = {config.task}: the model's settings are another task's; take a {config.task} model")
    if not isinstance(config.augment, AUGMENT_CONFIGS[config.task]):
        raise UserError(f"task = {config.task}: the augmentation's settings are another task's")
    check_values(config.model, flatten(config))


def _parse(hint: Any, text: str) -> Any:
    """A value from the command line: JSON, but a text field keeps digits, true or null as they are written."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if hint is str and not isinstance(value, str) else value


def _replace_dotted(node: Any, full_name: str, path: list[str], text: str, every: Iterable[str]) -> Any:
    names = [f.name for f in dataclasses.fields(node)]
    if path[0] not in names:
        raise UserError(f"--set {full_name}: no such field{_nearest_dotted(full_name, every)}")
    current = getattr(node, path[0])
    if len(path) > 1:
        if not dataclasses.is_dataclass(current):
            raise UserError(f"--set {full_name}: {path[0]} has no fields of its own")
        return dataclasses.replace(node, **{path[0]: _replace_dotted(current, full_name, path[1:], text, every)})
    if dataclasses.is_dataclass(current):
        example = f"{full_name}.{dataclasses.fields(current)[0].name}"
        raise UserError(f"--set {full_name}: name one of its fields, e.g. {example}")
    hint = typing.get_type_hints(type(node))[path[0]]
    return dataclasses.replace(node, **{path[0]: _convert(hint, _parse(hint, text), f"--set {full_name}")})


def _nearest_dotted(name: str, every: Iterable[str]) -> str:
    by_leaf = [dotted for dotted in every if dotted.split(".")[-1] == name.split(".")[-1]]
    if by_leaf:
        return f'; did you mean "{by_leaf[0]}"?'
    hint = nearest(name, every)
    return hint if hint.startswith("; did") else "; `show-config` lists all names"


def _build(cls: type[Any], hints: dict[str, Any], raw: dict[str, Any], where: str, prefix: str) -> Any:
    unknown = sorted(set(raw) - set(hints))
    if unknown:
        raise UserError(f"{where}: field {prefix}{unknown[0]} is unknown{nearest(unknown[0], hints)}")
    arguments = {}
    for name, value in raw.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if not isinstance(value, dict):
                raise UserError(f"{where}: field {prefix}{name} must be an object")
            arguments[name] = _build(hint, typing.get_type_hints(hint), value, where, f"{prefix}{name}.")
        else:
            arguments[name] = _convert(hint, value, f"{where}: field {prefix}{name}")
    return cls(**arguments)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Check `value` against a field's type; int is accepted for float, list for tuple."""
    if typing.get_origin(hint) is tuple:
        arguments = typing.get_args(hint)
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{where}: must be a list, got {value!r}")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_convert(arguments[0], item, where) for item in value)
        if len(value) != len(arguments):
            raise UserError(f"{where}: must have {len(arguments)} values, got {len(value)}")
        return tuple(_convert(item_hint, item, where) for item_hint, item in zip(arguments, value, strict=True))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{where}: {str(value)[:20]}... is too large") from None
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{where}: must be of type {hint.__name__}, got {value!r}")
    return value
