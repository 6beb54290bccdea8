"""Complete configurations of the sign detector; a variant is a small function that derives from another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perception.augment_config import SignAugmentConfig
from perception.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from perception.model_config import SignModelConfig


def sign() -> RunConfig:
    """A detector of one million parameters that two processor cores train in minutes, on generated scenes.

    python -m pipelines train sign --data generated --ranks 2

    Takes 6 minutes of training at 87 images/s on two undisturbed cores, after a minute of rendering. Measured on the
    200 validation scenes, one seed: AP50 regardless of class .932, of super-classes .915, of the 43 classes .231.
    """
    return RunConfig(
        task="sign",
        name="sign",
        data=DataConfig(num_train_scenes=2500),
        # Scenes are many and hold several signs each: mosaics would only cost time.
        augment=SignAugmentConfig(scale_range=(0.8, 1.4), mosaic_probability=0.0),
        model=SignModelConfig(
            num_classes=0,
            backbone_widths=(32, 64, 96, 128),
            backbone_blocks=(1, 1, 2, 2),
            stem="conv3",
            neck_channels=48,
            bottom_up=False,
            head_convolutions=1,
            depthwise=True,
            # Crops around signs: of a whole scene nearly all is background.
            input_height=256,
            input_width=320,
            # Of equal weight, objectness is learnt last, and it ranks detections.
            objectness_weight=4.0,
            num_background_points=32,
            nms_iou_threshold=0.35,
        ),
        # On so short a schedule the number of steps decides: batches are small and the rate is high.
        optim=OptimConfig(lr=3e-3, reference_batch_size=8, warmup_samples=1600, ema_decay_samples=1500),
        train=TrainConfig(num_samples=30_000, batch_size_per_rank=4, log_every_steps=50, checkpoint_every_steps=2500),
    )


def sign_on_folder(config: RunConfig) -> RunConfig:
    """What `sign` is on a folder of photographs: many more passes over fewer images, and rare classes more often.

    python -m pipelines train sign --data FOLDER --format gtsdb --ranks 2

    750 passes over GTSDB's 351 training images, which hold those with rare classes up to four times each. Should take
    50 minutes on two cores; not measured at full length. 8000 crops in two minutes of one process gave class-agnostic
    AP50 .68, of super-classes .78, on the 49 validation images.
    """
    return replace(
        config,
        data=replace(config.data, image_cache_mib=2048),
        augment=SignAugmentConfig(repeat_threshold=0.05),
        model=replace(config.model, input_height=256, input_width=256),
        optim=replace(config.optim, reference_batch_size=16, warmup_samples=5000, ema_decay_samples=10_000),
        train=replace(config.train, num_samples=350_000, batch_size_per_rank=8, log_every_steps=200),
    )


def sign_full() -> RunConfig:
    """ResNet-18 with 640x640 crops, for real data on GPUs.

    python -m pipelines train sign-full --data FOLDER --ranks 8

    300 passes over a data set of 2000 images. Not measured here.
    """
    return RunConfig(
        task="sign",
        name="sign-full",
        augment=SignAugmentConfig(repeat_threshold=0.05),
        model=SignModelConfig(num_classes=0, objectness_weight=4.0, num_background_points=32, nms_iou_threshold=0.35),
        optim=OptimConfig(lr=1e-3, reference_batch_size=64, warmup_samples=10_000, ema_decay_samples=20_000),
        train=TrainConfig(num_samples=600_000, batch_size_per_rank=8),
    )


CONFIGS: dict[str, Callable[[], RunConfig]] = {"sign": sign, "sign-full": sign_full}
ON_FOLDERS: dict[str, Callable[[RunConfig], RunConfig]] = {"sign": sign_on_folder}
"""A configuration for generated scenes → what it is where a folder of images is named by --data."""
