"""Crops hold what their labels say: signs stay where they are drawn, whatever is done to the picture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.augment_config import SignAugmentConfig
from perception.data.lane_targets import SampleKey
from perception.data.signs.augment import SignAugmenter
from perception.data.signs.batch import SignExample, collate_crops
from perception.data.signs.classes import GTSDB_CLASSES, GTSDB_MIRRORED
from perception.data.signs.sample import SignSample, SignTruth
from perception.tiling import PADDING

SETTINGS = settings(deadline=None, max_examples=60)
CLASSES = ("keep-right", "keep-left", "priority-road", "stop")
PLAIN = SignAugmentConfig(brightness_probability=0, hue_probability=0, blur_probability=0)
GROUND = 40


def colour(label: int) -> np.ndarray:
    """The same for keep-right and keep-left: they are each other's mirror image."""
    shade = 60 * max(label, 1)
    return np.array([200, shade, 255 - shade])


def street(
    boxes: list[list[int]], labels: list[int], height: int = 120, width: int = 200, name: str = "a"
) -> SignSample:
    """Signs are rectangles of their class's colour on dark ground."""
    image = np.full((height, width, 3), GROUND, np.uint8)
    for (x1, y1, x2, y2), label in zip(boxes, labels, strict=True):
        image[y1:y2, x1:x2] = colour(label)
    truth = SignTruth(
        name, height, width, np.array(boxes, float).reshape(-1, 4), np.array(labels, np.int64), np.zeros((0, 4))
    )
    return SignSample(image, truth)


def augmenter(config: SignAugmentConfig = PLAIN, height: int = 96, width: int = 128, seed: int = 0) -> SignAugmenter:
    return SignAugmenter(config, height, width, CLASSES, GTSDB_MIRRORED, seed)


STREET = street([[20, 30, 50, 60], [120, 40, 144, 70], [160, 80, 180, 100]], [0, 2, 3])


def assert_signs_are_where_they_are_said_to_be(example: SignExample) -> None:
    height, width = example.image.shape[:2]
    assert len(example.boxes) == len(example.labels) and example.boxes.dtype == np.float64
    assert example.labels.dtype == np.int64
    assert (example.boxes >= 0).all() and (example.boxes <= [width, height] * 2).all()
    for box, label in zip(example.boxes, example.labels, strict=True):
        # Inside of the box its colour, up to the half pixel that resampling blends.
        x1, y1 = np.ceil(box[:2] + 1).astype(int)
        x2, y2 = np.floor(box[2:] - 1).astype(int)
        if x2 > x1 and y2 > y1:
            np.testing.assert_allclose(
                example.image[y1:y2, x1:x2], np.broadcast_to(colour(label), (y2 - y1, x2 - x1, 3)), atol=2
            )
    # Every bright pixel outside of all boxes is in an ignored region.
    outside = (example.image.astype(int) - GROUND).max(axis=2) > 100
    outside &= ~(example.image == PADDING).all(axis=2)
    for x1, y1, x2, y2 in [*example.boxes, *example.ignored]:
        outside[max(0, int(y1) - 1) : int(np.ceil(y2)) + 1, max(0, int(x1) - 1) : int(np.ceil(x2)) + 1] = False
    assert not outside.any()


@SETTINGS
@given(seed=st.integers(0, 10**6), mosaic=st.sampled_from([0.0, 1.0]))
def test_boxes_follow_the_picture(seed: int, mosaic: float) -> None:
    augment = augmenter(replace(PLAIN, mosaic_probability=mosaic, scale_range=(0.4, 2.5)), seed=seed)
    others = [STREET, street([], []), street([[0, 0, 40, 30]], [3]), street([[60, 10, 90, 50]], [1])]
    example = augment(STREET, SampleKey(0, 0), len(others), others.__getitem__)
    assert example.image.shape == (96, 128, 3) and example.image.dtype == np.uint8
    assert_signs_are_where_they_are_said_to_be(example)


def test_the_draws_depend_on_seed_epoch_index_and_repeat_alone() -> None:
    augment = augmenter(SignAugmentConfig(brightness_probability=1, hue_probability=1, blur_probability=1))
    first = augment(STREET, SampleKey(1, 2)).image
    for key in (SampleKey(1, 3), SampleKey(2, 2), SampleKey(1, 2, repeat=1)):
        assert (augment(STREET, key).image != first).any()
    again = augmenter(SignAugmentConfig(brightness_probability=1, hue_probability=1, blur_probability=1))
    np.testing.assert_array_equal(again(STREET, SampleKey(1, 2)).image, first)
    assert (augmenter(seed=1)(STREET, SampleKey(1, 2)).image != first).any()


def test_a_mirror_image_has_the_mirrored_classes() -> None:
    """Keep-right becomes keep-left; a crop that shows a stop sign, whose letters have a direction, is left alone."""
    config = replace(PLAIN, flip_probability=1, mosaic_probability=0, scale_range=(1, 1), around_sign_probability=0)
    arrows = street([[10, 10, 40, 40], [60, 50, 90, 80], [100, 10, 120, 40]], [0, 1, 2], 96, 128)
    flipped = augmenter(config)(arrows, SampleKey(0, 0))
    assert flipped.labels.tolist() == [1, 0, 2]
    np.testing.assert_array_equal(flipped.boxes, [[88, 10, 118, 40], [38, 50, 68, 80], [8, 10, 28, 40]])
    np.testing.assert_array_equal(flipped.image, arrows.image[:, ::-1])
    with_stop = street([[10, 10, 40, 40], [60, 50, 90, 80]], [0, 3], 96, 128)
    left_alone = augmenter(config)(with_stop, SampleKey(0, 0))
    assert left_alone.labels.tolist() == [0, 3]
    np.testing.assert_array_equal(left_alone.image, with_stop.image)


def test_every_class_of_gtsdb_is_mirrored_or_refused() -> None:
    """Twice mirrored is the same; what shows a numeral or an asymmetric picture has no mirror image."""
    mirror = SignAugmenter(PLAIN, 32, 32, GTSDB_CLASSES, GTSDB_MIRRORED, 0).mirror
    pairs = {(19, 20), (33, 34), (36, 37), (38, 39)}
    expected = {**dict(pairs), **{b: a for a, b in pairs}, **{n: n for n in (11, 12, 13, 15, 17, 18, 22, 26, 35)}}
    assert {label: int(other) for label, other in enumerate(mirror) if other >= 0} == expected


def test_what_is_hidden_or_small_becomes_an_ignored_region() -> None:
    augment = augmenter(replace(PLAIN, min_side_pixels=4, min_visibility=0.5))
    image = np.zeros((100, 100, 3), np.uint8)
    boxes = np.array(
        [
            [-60.0, 10, 40, 50],  # 40 % visible
            [-40.0, 10, 60, 50],  # 60 %
            [10.0, 10, 13, 40],  # 3 pixels wide
            [200.0, 10, 240, 40],  # outside
            [50.0, 100, 60, 120],  # touches from outside
            [0.0, 0, 100, 100],
        ]
    )
    crop = augment.settle(image, boxes, np.arange(6), np.array([[90.0, 90, 120, 130], [-20.0, 0, 0, 9]]))
    assert crop.labels.tolist() == [1, 5] and crop.num_left_out == 2
    np.testing.assert_array_equal(crop.boxes, [[0, 10, 60, 50], [0, 0, 100, 100]])
    np.testing.assert_array_equal(crop.ignored, [[90, 90, 100, 100], [0, 10, 40, 50], [10, 10, 13, 40]])


@pytest.mark.parametrize("edge", [128.00000002, np.nextafter(128, 129), 128 + 1e-5])
def test_an_edge_past_the_picture_by_a_rounding_error_is_clipped(edge: float) -> None:
    crop = augmenter().settle(
        np.zeros((96, 128, 3), np.uint8), np.array([[100.0, -1e-9, edge, 20]]), np.array([2]), np.zeros((0, 4))
    )
    assert crop.boxes.tolist() == [[100, 0, 128, 20]] and crop.num_left_out == 0


def test_boxes_without_area_and_inside_out_teach_nothing_and_raise_nothing() -> None:
    boxes = np.array([[10.0, 10, 10, 30], [30.0, 30, 20, 40], [5.0, 5, 25, 25]])
    with np.errstate(all="raise"):
        crop = augmenter().settle(np.zeros((96, 128, 3), np.uint8), boxes, np.arange(3), np.zeros((0, 4)))
    assert crop.labels.tolist() == [2] and crop.num_left_out == 0


def test_more_than_300_signs_are_all_kept() -> None:
    boxes = [[x, y, x + 6, y + 6] for x in range(0, 480, 10) for y in range(0, 80, 10)]
    config = replace(PLAIN, scale_range=(1, 1), mosaic_probability=0, flip_probability=0)
    crowd = street(boxes, [2] * len(boxes), 96, 480)
    example = augmenter(config, 96, 480)(crowd, SampleKey(0, 0))
    assert len(example.boxes) == len(boxes) == 384
    assert collate_crops([example]).targets.boxes.shape == (1, 384, 4)


def test_images_without_signs_alone_make_batches_and_mosaics() -> None:
    augment = augmenter(replace(PLAIN, mosaic_probability=1))
    empty = street([], [])
    examples = [augment(empty, SampleKey(0, index), 4, lambda _: empty) for index in range(3)]
    # No lists that came back empty or as floats.
    for boxes, labels in ((example.boxes, example.labels) for example in examples):
        assert (boxes.shape, boxes.dtype, labels.shape, labels.dtype) == ((0, 4), np.float64, (0,), np.int64)
    batch = collate_crops(examples)
    assert len(batch) == 3 and (batch.targets.labels == -1).all() and batch.num_left_out == 0


def test_around_a_sign_or_anywhere() -> None:
    """The share of crops with a sign in them is what was asked for where signs are rare."""
    scene = street([[500, 300, 540, 340]], [2], 600, 1000)
    shares = []
    for probability in (0.0, 0.7, 1.0):
        augment = augmenter(replace(PLAIN, around_sign_probability=probability, mosaic_probability=0), 96, 96)
        found = [len(augment(scene, SampleKey(0, index)).boxes) for index in range(300)]
        shares.append(np.mean(found))
    assert shares[0] < 0.1 and abs(shares[1] - 0.7) < 0.1 and shares[2] == 1.0


def test_a_sign_larger_than_the_crop_and_a_picture_smaller_than_it() -> None:
    config = replace(PLAIN, scale_range=(1, 1), mosaic_probability=0, flip_probability=0, around_sign_probability=1)
    huge = street([[10, 10, 190, 110]], [1])
    example = augmenter(config, 32, 64)(huge, SampleKey(0, 0))
    # So little of it is visible that it cannot be taught.
    assert len(example.boxes) == 0 and example.num_left_out == 1
    small = augmenter(config, 160, 256)(STREET, SampleKey(0, 0))
    assert len(small.boxes) == 3 and (small.image == PADDING).all(axis=2).sum() == 160 * 256 - 120 * 200
    assert_signs_are_where_they_are_said_to_be(small)


def test_without_augmentation_pictures_are_cut_only() -> None:
    augment = augmenter(SignAugmentConfig(enabled=False), 120, 200)
    example = augment(STREET, SampleKey(3, 3), 9, lambda _: STREET)
    np.testing.assert_array_equal(example.image, STREET.image)
    np.testing.assert_array_equal(example.boxes, STREET.truth.boxes)


def test_the_sample_is_left_as_it_was() -> None:
    before = STREET.image.copy(), STREET.truth.boxes.copy()
    STREET.image.flags.writeable = False
    augmenter(SignAugmentConfig())(STREET, SampleKey(0, 0), 1, lambda _: STREET)
    np.testing.assert_array_equal(STREET.image, before[0])
    np.testing.assert_array_equal(STREET.truth.boxes, before[1])
