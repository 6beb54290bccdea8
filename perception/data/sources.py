"""The data sets that a configuration names: generated scenes, or a folder in an official layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from perception.config import DataConfig
from perception.config_checks import BENCHMARKS
from perception.data import mixture
from perception.data.generated import DEFAULT_STYLE
from perception.data.mixture import MixedLanes, read_mixture
from perception.data.near_duplicates import differences_folder, measure_differences, without_near_duplicates
from perception.data.open import open_lane_dataset
from perception.data.packed import PackedScenes, prepare_chunks, scenes_folder
from perception.data.sample import ReadReport
from perception.data.signs.cache import CachedImages
from perception.data.signs.open import open_sign_dataset
from perception.data.signs.packed import PackedSignScenes, prepare_sign_chunks, sign_scenes_folder
from perception.data.signs.sample import SignDataset
from perception.errors import MissingListError, UserError

SCENES_SEED = 0
"""Generated data are the same for every run: `train.seed` varies weights, order and augmentation only."""
FIRST_TRAINING_SCENE = 1_000_000
"""Training and validation scenes never meet: validation starts at 0."""
_FIT_CHECK = "the training images are evaluated: a check of fit, not of skill"
_NAMED_CLASSES = 6


class LabelledImages(Protocol):
    """A data set of any task; what its samples and truths are, only the task knows."""

    report: ReadReport

    def __len__(self) -> int: ...

    def truth(self, index: int) -> Any: ...

    def sample(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Sources:
    train: Any
    """LabelledImages; those of the sign task have `classes` too."""
    validation: Any
    """The same, of the same classes."""
    notes: tuple[str, ...]
    """What the user should know of the choice."""


def prepare_sources(
    config: DataConfig, task: str, share: tuple[int, int], progress: Callable[[int, int], None]
) -> None:
    """Render what is missing of the generated scenes, and compare the frames of a folder where near-duplicates are to
    be dropped; `share` = (rank, size) among the ranks of this host.
    """
    if is_mixture(config):
        for part in _mixed(config, task):
            prepare_sources(part, task, share, progress)
        return
    if config.source != "generated":
        if config.drop_near_duplicates:
            frames = _open(config, task, config.train_list, "train")
            measure_differences(frames, differences_folder(_cache_folder(config)), share, progress)
        return
    if config.num_validation_scenes > FIRST_TRAINING_SCENE:
        raise UserError(
            f"data.num_validation_scenes = {config.num_validation_scenes}: must be at most {FIRST_TRAINING_SCENE}, "
            "where the training scenes start"
        )
    folder, size = _generated_folder(config, task), (config.scene_height, config.scene_width)
    for first, count in ((FIRST_TRAINING_SCENE, config.num_train_scenes), (0, config.num_validation_scenes)):
        if task == "sign":
            prepare_sign_chunks(folder, SCENES_SEED, *size, first, count, share, progress)
        else:
            prepare_chunks(folder, SCENES_SEED, *size, first, count, share, progress, config.scene_style)


def open_sources(config: DataConfig, task: str) -> Sources:
    """Open training and validation data; UserError names what is missing."""
    if is_mixture(config):
        return _open_mixture(config, task)
    if config.source == "generated":
        folder, scenes = _generated_folder(config, task), PackedSignScenes if task == "sign" else PackedScenes
        return Sources(
            scenes(folder, FIRST_TRAINING_SCENE, config.num_train_scenes),
            scenes(folder, 0, config.num_validation_scenes),
            (),
        )
    if config.format == "generated":
        raise UserError(
            f'data.format = generated, but data.source = "{config.source}" is a folder: set it to generated'
        )
    train = _open(config, task, config.train_list, "train")
    try:
        validation = _open(config, task, config.validation_list, "validation")
        notes = (f'data.validation_list = "train": {_FIT_CHECK}',) if config.validation_list == "train" else ()
    except MissingListError:
        if config.validation_list:
            raise
        validation, notes = train, (f"{config.source}: no validation list, so {_FIT_CHECK}",)
    if task == "sign":
        notes = (*notes, *_notes_on_classes(train, validation))
        train = CachedImages(train, config.image_cache_mib << 20) if config.image_cache_mib else train
    return Sources(_to_train_on(config, train), validation, notes)


def check_target(metric: str, validation: LabelledImages) -> None:
    """Raise UserError where no validation image gives the figure that `train.target_metric` = `metric` names."""
    benchmark = metric.partition("_")[0]
    if benchmark not in BENCHMARKS:
        return
    if not any(validation.truth(index).benchmark == benchmark for index in range(len(validation))):
        raise UserError(
            f"train.target_metric = {metric}: no validation image is of the format {benchmark}; aim at culane_f1_50 or "
            "tusimple_accuracy, or validate on such images"
        )


def is_mixture(config: DataConfig) -> bool:
    return config.source.endswith(mixture.SUFFIX)


def _mixed(config: DataConfig, task: str) -> list[DataConfig]:
    """Each part of a mixture as it would be configured alone."""
    if task != "lane":
        raise UserError(f"data.source = {config.source}: only lane data can be mixed; give one folder of signs")
    for name in ("train_list", "validation_list"):
        if getattr(config, name):
            raise UserError(f"data.{name} = {getattr(config, name)}: each part of {config.source} has its own there")
    return [
        replace(
            config,
            source=part.source,
            format=part.format,
            train_list=part.train_list,
            validation_list=part.validation_list,
        )
        for part in read_mixture(Path(config.source))
    ]


def _open_mixture(config: DataConfig, task: str) -> Sources:
    parts = list(zip(read_mixture(Path(config.source)), _mixed(config, task), strict=True))
    # Near-duplicates are dropped below: until then a part that trains on its validation images can be told.
    opened = [(part, open_sources(replace(alone, drop_near_duplicates=0.0), task)) for part, alone in parts]
    kept = [
        (part, _to_train_on(alone, sources.train)) for (part, alone), (_, sources) in zip(parts, opened, strict=True)
    ]
    notes = [f"{part.source}: weight {part.weight:g}, {len(train)} images" for part, train in kept]
    # A part without a validation list is not evaluated on what it trains on, unless all are so.
    validation = [(part, sources.validation) for part, sources in opened if sources.validation is not sources.train]
    if validation:
        left_out = [part.source for part, sources in opened if sources.validation is sources.train]
        notes += [f"{source}: no validation list, so it is not evaluated" for source in left_out]
    else:
        validation = [(part, sources.validation) for part, sources in opened]
        notes.append(f"{config.source}: no part has a validation list, so {_FIT_CHECK}")
    return Sources(MixedLanes(kept), MixedLanes(validation), tuple(notes))


def _to_train_on(config: DataConfig, train: Any) -> Any:
    """Training data without near-duplicate frames, where the configuration leaves them out."""
    if not config.drop_near_duplicates or config.source == "generated":
        return train
    return without_near_duplicates(train, differences_folder(_cache_folder(config)), config.drop_near_duplicates)


def user_cache() -> Path:
    """The user's cache folder for this project."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "roadfuse"


def _open(config: DataConfig, task: str, list_name: str, split: str) -> Any:
    if task == "sign":
        return open_sign_dataset(
            config.source, config.format, list_name, split, config.class_map, corners=config.corners
        )
    return open_lane_dataset(config.source, config.format, list_name, split)


def _notes_on_classes(train: SignDataset, validation: SignDataset) -> tuple[str, ...]:
    """Classes that cannot be learnt; UserError where training and validation are of different ones."""
    if train.classes != validation.classes:
        a, b = next((a, b) for a, b in zip([*train.classes, None], [*validation.classes, None], strict=False) if a != b)
        raise UserError(f"training has class {a} where validation has {b}: their lists must be of the same classes")
    labels = [train.truth(index).labels for index in range(len(train))]
    counts = np.bincount(np.concatenate([np.empty(0, np.int64), *labels]), minlength=len(train.classes))
    unseen = [name for name, count in zip(train.classes, counts, strict=True) if count == 0]
    if not unseen:
        return ()
    more = ", ..." if len(unseen) > _NAMED_CLASSES else ""
    return (
        f"{len(unseen)} of {len(train.classes)} classes have no sign to train on: "
        f"{', '.join(unseen[:_NAMED_CLASSES])}{more}",
    )


def _cache_folder(config: DataConfig) -> Path:
    return Path(config.cache_folder) if config.cache_folder else user_cache()


def _generated_folder(config: DataConfig, task: str) -> Path:
    place = (_cache_folder(config), SCENES_SEED, config.scene_height, config.scene_width)
    if task != "sign":
        return scenes_folder(*place, config.scene_style)
    if config.scene_style != DEFAULT_STYLE:
        raise UserError(f"data.scene_style = {config.scene_style}: scenes of signs are of style {DEFAULT_STYLE} only")
    return sign_scenes_folder(*place)
