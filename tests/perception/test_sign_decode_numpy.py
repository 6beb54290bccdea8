"""Decoding without torch is that of training, to the last decision: points, suppression, tiles."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perception import sign_inference
from perception.model_config import SignModelConfig
from perception.models import sign_boxes, sign_decode
from perception.models.sign import SignOutput
from perception.sign_decode_numpy import STRIDES, decode_image, decode_signs, lay_out
from perception.tiling import PADDING, SIZE_MULTIPLE, tile_starts
from tests.exported_signs import CONFIG, MODEL, sign_model

HEIGHT, WIDTH, CLASSES = 64, 96, 3
NUM_POINTS = len(sign_boxes.grid_points(HEIGHT, WIDTH))
SIGNS = SignModelConfig(num_classes=CLASSES, nms_iou_threshold=0.4)


def random_output(seed: int, spread: float = 2.0) -> SignOutput:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(NUM_POINTS,), (NUM_POINTS, CLASSES), (NUM_POINTS, 4)]
    objectness, classes, offsets = (spread * torch.randn(shape, generator=generator) for shape in shapes)
    return SignOutput(objectness - 2, classes, offsets)


def both(output: SignOutput, model: SignModelConfig) -> tuple[Any, Any]:
    (expected,) = sign_decode.decode_signs(SignOutput(*(part[None] for part in output)), HEIGHT, WIDTH, model)
    objectness, classes, offsets = (part.numpy() for part in output)
    return decode_signs(objectness, classes, offsets, HEIGHT, WIDTH, model), expected


def assert_equal(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(found.labels, np.asarray(expected.labels))
    np.testing.assert_allclose(found.boxes, np.asarray(expected.boxes), rtol=0, atol=1e-3)
    np.testing.assert_allclose(found.scores, np.asarray(expected.scores), rtol=0, atol=1e-6)


def test_the_strides_are_those_of_training() -> None:
    assert STRIDES == sign_boxes.STRIDES and max(STRIDES) <= SIZE_MULTIPLE


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    agnostic=st.booleans(),
    power=st.sampled_from([0.0, 0.25, 1.0]),
    most=st.sampled_from([3, 30, 1000]),
    candidates=st.sampled_from([1, 20, 1000]),
    threshold=st.sampled_from([0.0, 0.001, 0.3, 0.9]),
)
def test_decoding_is_that_of_torch(
    seed: int, agnostic: bool, power: float, most: int, candidates: int, threshold: float
) -> None:
    model = replace(
        SIGNS,
        nms_class_agnostic=agnostic,
        class_score_power=power,
        max_detections=most,
        max_candidates_per_stride=candidates,
        score_threshold=threshold,
    )
    found, expected = both(random_output(seed), model)
    assert_equal(found, expected)
    assert len(found.scores) <= min(most, 3 * candidates)


def test_equal_scores_keep_the_order_of_points() -> None:
    output = random_output(0)
    output = output._replace(objectness=output.objectness.round(), classes=torch.zeros_like(output.classes))
    found, expected = both(output, replace(SIGNS, max_candidates_per_stride=17))
    assert len(found.scores) > 5
    assert_equal(found, expected)


def test_extreme_and_diverged_outputs() -> None:
    for spread in (50.0, 1e4):
        found, expected = both(random_output(1, spread), SIGNS)
        assert_equal(found, expected)
        assert np.isfinite(found.boxes).all()
    nothing = SignOutput(*(torch.full_like(part, torch.nan) for part in random_output(0)))
    for output in (nothing, random_output(0)._replace(offsets=nothing.offsets)):
        assert all(len(detections.scores) == 0 for detections in both(output, SIGNS))


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 40), st.integers(0, 200))
def test_tiles_cover_a_side_and_share_what_was_asked_for(length: int, tile: int, overlap: int) -> None:
    tile, overlap = 32 * tile, min(overlap, 32 * tile - 1)
    starts = tile_starts(length, tile, overlap)
    assert starts[0] == 0 and starts == sorted(set(starts))
    assert starts[-1] == max(0, length - tile)
    assert all(before + tile - after >= overlap for before, after in itertools.pairwise(starts))


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([(64, 64), (64, 96), (96, 160)]), st.integers(0, 90))
def test_tiles_of_a_fixed_size_cover_every_pixel(height: int, width: int, size: tuple[int, int], overlap: int) -> None:
    image = np.arange(height * width * 3, dtype=np.uint32).reshape(height, width, 3).astype(np.uint8)
    tiles = lay_out(height, width, replace(MODEL, tile_overlap=overlap), size)
    seen = np.zeros((height, width), bool)
    for (top, left), pixels in zip(tiles.corners, tiles.inputs(image), strict=True):
        assert pixels.shape == (*size, 3)
        part = image[top : top + size[0], left : left + size[1]]
        np.testing.assert_array_equal(pixels[: part.shape[0], : part.shape[1]], part)
        assert (pixels[part.shape[0] :] == PADDING).all() and (pixels[:, part.shape[1] :] == PADDING).all()
        seen[top : top + size[0], left : left + size[1]] = True
    assert seen.all()


@pytest.fixture(scope="module")
def network() -> Any:
    return sign_model(CONFIG)


@pytest.mark.parametrize("size", [(64, 96), (100, 130), (33, 250), (200, 90)])
@pytest.mark.parametrize("tile", [0, 64, 96])
def test_whole_images_and_tiles_are_those_of_torch(network: Any, size: tuple[int, int], tile: int) -> None:
    model = replace(MODEL, tile_size=tile)
    image = np.random.default_rng(3).integers(0, 256, (*size, 3), dtype=np.uint8)
    image[20:50, 30:80] = (250, 30, 30)
    expected = sign_inference.find_signs(network, torch.from_numpy(image), model)
    fixed_sizes = [None, (tile, tile)] if tile else [None]
    for fixed_size in fixed_sizes:
        if fixed_size is not None and (min(size) < tile):
            # Torch pads a side shorter than a tile no further than to a multiple of 32.
            continue
        tiles = lay_out(*size, model, fixed_size)
        outputs = []
        for pixels in tiles.inputs(image):
            with torch.no_grad():
                outputs.append([part[0].numpy() for part in network(torch.from_numpy(pixels)[None])])
        found = decode_image(outputs, tiles, model)
        assert len(found.scores) > 3
        assert_equal(found, expected)
