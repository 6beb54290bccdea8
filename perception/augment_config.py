"""Settings of the augmentation, a frozen dataclass a task; the rest of a run's settings is in `config.py`. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaneAugmentConfig:
    enabled: bool = True
    flip_probability: float = 0.5
    affine_probability: float = 0.7
    shift_fraction: float = 0.1
    scale_range: tuple[float, float] = (0.8, 1.2)
    rotate_degrees: float = 10.0
    brightness_probability: float = 0.6
    hue_probability: float = 0.7
    blur_probability: float = 0.2
    channel_shuffle_probability: float = 0.1


@dataclass(frozen=True)
class SignAugmentConfig:
    """Training sees crops of the network's input size, at about the image's own scale."""

    enabled: bool = True
    """False: crops are still drawn, but neither rescaled, mirrored, put together nor recoloured."""
    around_sign_probability: float = 0.7
    """Of an image with signs: the crop holds one of them, else it lies anywhere."""
    scale_range: tuple[float, float] = (0.6, 1.6)
    """Crops are magnified by a factor that is drawn evenly in its logarithm."""
    flip_probability: float = 0.5
    """Only where every sign in the crop has a mirror image."""
    mosaic_probability: float = 0.3
    """Crops of four images put together."""
    brightness_probability: float = 0.6
    hue_probability: float = 0.3
    blur_probability: float = 0.1
    min_side_pixels: float = 3.0
    """A sign of which less is left, in input pixels, is not taught: its place becomes an ignored region."""
    min_visibility: float = 0.4
    """The same for a sign of which less than this share of its area lies in the crop."""
    repeat_threshold: float = 0.0
    """Images of a class that is in a smaller share of the images than this are seen more often; 0: all alike."""
