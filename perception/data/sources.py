"""The data sets that a configuration names: generated scenes, or a folder in an official layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from perception.config import DataConfig
from perception.data.open import open_lane_dataset
from perception.data.packed import PackedScenes, prepare_chunks, scenes_folder
from perception.data.sample import LaneDataset
from perception.errors import MissingListError, UserError

SCENES_SEED = 0
"""Generated data are the same for every run: `train.seed` varies weights, order and augmentation only."""
FIRST_TRAINING_SCENE = 1_000_000
"""Training and validation scenes never meet: validation starts at 0."""
_FIT_CHECK = "the training images are evaluated: a check of fit, not of skill"


@dataclass(frozen=True)
class Sources:
    train: LaneDataset
    validation: LaneDataset
    notes: tuple[str, ...]
    """What the user should know of the choice."""


def prepare_sources(config: DataConfig, share: tuple[int, int], progress: Callable[[int, int], None]) -> None:
    """Render what is missing of the generated scenes; `share` = (rank, size) among the ranks of this host."""
    if config.source != "generated":
        return
    if config.num_validation_scenes > FIRST_TRAINING_SCENE:
        raise UserError(
            f"data.num_validation_scenes = {config.num_validation_scenes}: must be at most {FIRST_TRAINING_SCENE}, "
            "where the training scenes start"
        )
    folder = _generated_folder(config)
    size = (config.scene_height, config.scene_width)
    prepare_chunks(folder, SCENES_SEED, *size, FIRST_TRAINING_SCENE, config.num_train_scenes, share, progress)
    prepare_chunks(folder, SCENES_SEED, *size, 0, config.num_validation_scenes, share, progress)


def open_sources(config: DataConfig) -> Sources:
    """Open training and validation data; UserError names what is missing."""
    if config.source == "generated":
        folder = _generated_folder(config)
        return Sources(
            PackedScenes(folder, FIRST_TRAINING_SCENE, config.num_train_scenes),
            PackedScenes(folder, 0, config.num_validation_scenes),
            (),
        )
    if config.format == "generated":
        raise UserError(
            f'data.format = generated, but data.source = "{config.source}" is a folder: set it to generated'
        )
    train = open_lane_dataset(config.source, config.format, config.train_list, "train")
    try:
        validation = open_lane_dataset(config.source, config.format, config.validation_list, "validation")
    except MissingListError:
        if config.validation_list:
            raise
        return Sources(train, train, (f"{config.source}: no validation list, so {_FIT_CHECK}",))
    notes = (f'data.validation_list = "train": {_FIT_CHECK}',) if config.validation_list == "train" else ()
    return Sources(train, validation, notes)


def user_cache() -> Path:
    """The user's cache folder for this project."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "roadfuse"


def _generated_folder(config: DataConfig) -> Path:
    cache = Path(config.cache_folder) if config.cache_folder else user_cache()
    return scenes_folder(cache, SCENES_SEED, config.scene_height, config.scene_width)
