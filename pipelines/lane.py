"""Complete configurations of the lane detector; a variant is a small function that derives from another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perception.augment_config import LaneAugmentConfig
from perception.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from perception.model_config import LaneModelConfig


def lane() -> RunConfig:
    """ResNet-18 at 320x800, for real data on GPUs.

    python -m pipelines train lane --data FOLDER --ranks 8

    20 passes over CULane's training list. Set model.crop_top_fraction to the data set's sky: 0.457 for
    CULane, 0.222 for TuSimple. Published for this recipe on CULane: F1@50 .79; not measured here.
    """
    return RunConfig(task="lane", name="lane")


def lane_small() -> RunConfig:
    """A detector of 1.2 million parameters that two processor cores train in minutes.

    python -m pipelines train lane-small --data generated --ranks 2

    Takes 6 minutes of training at 127 images/s on two undisturbed cores with bfloat16, after a minute of rendering.
    Measured: CULane F1@50 .868, F1@75 .600, TuSimple accuracy .957 on the 200 validation scenes, one seed.
    """
    return replace(
        lane(),
        name="lane-small",
        data=DataConfig(num_train_scenes=4000),
        # Lighter than for a long run: each scene is seen some ten times only.
        augment=LaneAugmentConfig(affine_probability=0.3, hue_probability=0.3, blur_probability=0.1),
        model=LaneModelConfig(
            backbone_widths=(32, 64, 96, 128),
            backbone_blocks=(1, 1, 2, 2),
            stem="patch",
            # Each stride by itself: so many more samples fit into the time that lanes lie closer to the paint.
            use_fpn=False,
            input_height=160,
            input_width=512,
            # No generated lane reaches the upper 30 %.
            crop_top_fraction=0.25,
            iou_half_width_fraction=15 / 800,
        ),
        # On so short a schedule the number of steps decides: batches are small and the rate is high.
        optim=OptimConfig(lr=1.5e-3, reference_batch_size=8, warmup_samples=1600, ema_decay_samples=1500),
        train=TrainConfig(num_samples=46_000, batch_size_per_rank=4, log_every_steps=50, checkpoint_every_steps=2500),
    )


CONFIGS: dict[str, Callable[[], RunConfig]] = {"lane": lane, "lane-small": lane_small}
