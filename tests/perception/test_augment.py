"""Augmentation: lanes follow the pixels, nothing is lost, draws depend on (seed, epoch, index) alone."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest

from perception.augment_config import LaneAugmentConfig
from perception.data.augment import LaneAugmenter, draw_seed, rising
from perception.data.sample import Lane

HEIGHT, WIDTH = 160, 384
NOTHING = LaneAugmentConfig(
    flip_probability=0,
    affine_probability=0,
    brightness_probability=0,
    hue_probability=0,
    blur_probability=0,
    channel_shuffle_probability=0,
)


def lanes() -> list[Lane]:
    y = np.arange(159.0, 60, -5)
    return [np.stack([x + lean * (159 - y), y], axis=1) for x, lean in ((10, 1.5), (120, 0.6), (260, -0.5))]


def picture() -> np.ndarray:
    """White lanes on grey."""
    image = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
    for lane in lanes():
        cv2.polylines(image, [lane.round().astype(np.int32)], False, (255, 255, 255), 5)
    return image


@pytest.mark.parametrize("index", range(12))
def test_lanes_stay_on_their_pixels(index: int) -> None:
    augment = LaneAugmenter(LaneAugmentConfig(), seed=3)
    image, moved = augment(picture(), lanes(), epoch=0, index=index)
    assert image.shape == (HEIGHT, WIDTH, 3) and image.dtype == np.uint8
    assert len(moved) == 3
    seen = 0
    for lane in moved:
        inside = lane[(lane > 6).all(1) & (lane[:, 0] < WIDTH - 7) & (lane[:, 1] < HEIGHT - 7)]
        x, y = inside.round().astype(int).T
        around = np.stack([image[y, np.clip(x + d, 0, WIDTH - 1)].max(1) for d in (-1, 0, 1)]).max(0)
        # Bright, for the paint stays brighter than the grey ground whatever the colours do.
        assert (around > 125).mean() > 0.9 if len(inside) > 3 else True
        seen += len(inside)
    assert seen > 10


def test_flip_mirrors_exactly_and_keeps_the_order_left_to_right() -> None:
    augment = LaneAugmenter(replace(NOTHING, flip_probability=1.0), seed=0)
    image, moved = augment(picture(), lanes(), 0, 0)
    np.testing.assert_array_equal(image, picture()[:, ::-1])
    for lane, original in zip(moved, reversed(lanes()), strict=True):
        np.testing.assert_allclose(lane, np.stack([WIDTH - 1 - original[:, 0], original[:, 1]], axis=1), atol=1e-4)


def test_points_outside_the_image_are_kept() -> None:
    far = [np.array([[-500.0, 300.0], [-400.0, 10.0]]), np.array([[10.0, 150.0], [900.0, -40.0]])]
    _, moved = LaneAugmenter(NOTHING, seed=0)(picture(), far, 0, 0)
    for lane, original in zip(moved, far, strict=True):
        np.testing.assert_allclose(lane, original, atol=1e-3)


def test_draws_depend_on_seed_epoch_and_index_alone() -> None:
    config = LaneAugmentConfig()
    first, second = LaneAugmenter(config, seed=1), LaneAugmenter(config, seed=1)
    for index in range(5):
        second(picture(), lanes(), 7, index)  # Another history, as another rank has.
    image_a, lanes_a = first(picture(), lanes(), 2, 11)
    image_b, lanes_b = second(picture(), lanes(), 2, 11)
    np.testing.assert_array_equal(image_a, image_b)
    for a, b in zip(lanes_a, lanes_b, strict=True):
        np.testing.assert_array_equal(a, b)
    for seed, epoch, index in ((9, 2, 11), (1, 3, 11), (1, 2, 12)):
        other, _ = LaneAugmenter(config, seed)(picture(), lanes(), epoch, index)
        assert (other != image_a).any()


def test_seeds_of_many_samples_differ() -> None:
    seeds = {draw_seed(0, epoch, index) for epoch in range(20) for index in range(200)}
    assert len(seeds) >= 3999


def test_image_without_lanes() -> None:
    image, moved = LaneAugmenter(LaneAugmentConfig(), seed=0)(picture(), [], 0, 0)
    assert moved == () and image.shape == (HEIGHT, WIDTH, 3)


def test_turned_lane_keeps_the_points_that_rise() -> None:
    lane = np.array([[0.0, 50.0], [5.0, 45.0], [9.0, 46.0], [12.0, 44.99], [20.0, 40.0]])
    np.testing.assert_array_equal(rising(lane)[:, 1], [50, 45, 40])
    assert len(rising(np.array([[0.0, 5.0], [9.0, 6.0]]))) == 1


def test_caller_keeps_its_arrays() -> None:
    image, before = picture(), lanes()
    LaneAugmenter(LaneAugmentConfig(), seed=5)(image, before, 0, 0)
    np.testing.assert_array_equal(image, picture())
    for lane, original in zip(before, lanes(), strict=True):
        np.testing.assert_array_equal(lane, original)
