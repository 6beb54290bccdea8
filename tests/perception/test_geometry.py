"""Geometry maps both ways exactly, and as the pixels of cv2.resize move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.errors import UserError
from perception.geometry import Geometry


@st.composite
def geometries(draw: st.DrawFn, largest: int = 2000) -> Geometry:
    height = draw(st.integers(1, largest))
    return Geometry(
        source_height=height,
        source_width=draw(st.integers(1, largest)),
        crop_top=draw(st.integers(0, height - 1)),
        input_height=32 * draw(st.integers(1, 30)),
        input_width=32 * draw(st.integers(1, 50)),
    )


points = st.lists(st.tuples(*[st.floats(-5000, 5000)] * 2), min_size=0, max_size=20).map(
    lambda rows: np.array(rows, dtype=np.float64).reshape(-1, 2)
)


@given(geometries(), points)
def test_there_and_back(geometry: Geometry, original: np.ndarray) -> None:
    back = geometry.points_to_source(geometry.points_to_input(original))
    # Relative to the largest number met on the way.
    scale = 1 + np.abs(original).max(initial=0) + geometry.source_height
    np.testing.assert_allclose(back, original, atol=1e-9 * max(1.0, scale / 1000), rtol=0)
    assert back.shape == original.shape


@given(geometries(), points)
def test_back_and_there(geometry: Geometry, found: np.ndarray) -> None:
    there = geometry.points_to_input(geometry.points_to_source(found))
    np.testing.assert_allclose(there, found, atol=1e-9 * (1 + 10 * geometry.scale_y * geometry.source_height / 32))


@given(geometries())
def test_corners_of_the_kept_image_are_the_inputs_corners(geometry: Geometry) -> None:
    source = np.array([[-0.5, geometry.kept_top - 0.5], [geometry.kept_width - 0.5, geometry.source_height - 0.5]])
    expected = [[-0.5, -0.5], [geometry.input_width - 0.5, geometry.input_height - 0.5]]
    np.testing.assert_allclose(geometry.points_to_input(source), expected, atol=1e-9)


@given(geometries())
def test_what_is_kept_halves_evenly_and_next_to_nothing_is_cut(geometry: Geometry) -> None:
    kept_height = geometry.source_height - geometry.kept_top
    cut = geometry.kept_top - geometry.crop_top, geometry.source_width - geometry.kept_width
    sides = (kept_height, geometry.kept_width), (geometry.input_height, geometry.input_width)
    for halvings, pixels_cut, kept, wanted in zip(geometry.halvings, cut, *sides, strict=True):
        assert kept % 2**halvings == 0 and 0 <= pixels_cut < 2**halvings
        assert kept < 1.8 * wanted * 2**halvings
        assert halvings == 0 or kept + pixels_cut >= 1.8 * wanted * 2 ** (halvings - 1)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(100, 400), st.integers(100, 600), st.integers(0, 50), st.integers(2, 8), st.integers(2, 8), st.data()
)
def test_a_painted_spot_lands_where_its_point_goes(
    height: int, width: int, crop: int, rows: int, columns: int, data: st.DataObject
) -> None:
    """To a twentieth of a pixel, whichever sides are odd, halved, shrunk or enlarged."""
    geometry = Geometry(height, width, crop, 32 * rows, 32 * columns)
    # Wide enough to be smooth in source and input, and so far from the border that nearly all of it is inside.
    spread_x, spread_y = (1.5 * max(1.0, 1 / scale) for scale in (geometry.scale_x, geometry.scale_y))
    margin_x, margin_y = int(4 * spread_x) + 3, int(4 * spread_y) + 3
    x = data.draw(st.integers(margin_x, width - 1 - margin_x))
    y = data.draw(st.integers(crop + margin_y, height - 1 - margin_y))
    profiles = (
        np.exp(-0.5 * ((np.arange(length) - middle) / spread) ** 2)
        for length, middle, spread in ((height, y, spread_y), (width, x, spread_x))
    )
    image = np.repeat(np.rint(250 * np.outer(*profiles))[:, :, None], 3, axis=2).astype(np.uint8)
    resized = geometry.image_to_input(image)
    assert resized.shape == (32 * rows, 32 * columns, 3) and resized.dtype == np.uint8
    weights = resized[:, :, 0].astype(np.float64)
    centroid = [(weights.sum(axis) * np.arange(weights.shape[1 - axis])).sum() / weights.sum() for axis in (0, 1)]
    expected = geometry.points_to_input(np.array([[x, y]], dtype=np.float64))[0]
    np.testing.assert_allclose(centroid, expected, atol=0.05)


@pytest.mark.parametrize("factor", [1.3, 1.6, 1.79, 1.8, 1.99, 2.05, 3.2, 3.59, 3.99, 5.0, 10.0])
@pytest.mark.parametrize("upright", [True, False])
def test_no_pixel_is_skipped_where_one_side_shrinks(factor: float, upright: bool) -> None:
    """Thin lines must not vanish: each source pixel has at least a third of its share of the brightness."""
    along = int(64 * factor)
    geometry = Geometry(64, along, 0, 64, 64) if upright else Geometry(along, 64, 0, 64, 64)
    sums = []
    for place in range(along // 3, along // 3 + 24):
        image = np.zeros((geometry.source_height, geometry.source_width, 3), np.uint8)
        image[(slice(None), place) if upright else (place,)] = 240
        sums.append(geometry.image_to_input(image)[:, :, 0].sum(dtype=int))
    assert min(sums) > 64 * 240 / factor / 3


@pytest.mark.parametrize(("height", "width"), [(128, 128), (256, 128), (64, 256), (257, 129)])
def test_whole_halvings_are_means(height: int, width: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = Geometry(height, width, 0, 64, 64).image_to_input(image)
    kept = image[height % 64 :, : width // 64 * 64].astype(np.float64)
    means = kept.reshape(64, len(kept) // 64, 64, -1, 3).mean(axis=(1, 3))
    # Each of at most two halvings rounds, at most two numbers a time.
    assert np.abs(found - means).max() <= 2.0


def test_an_image_of_input_size_is_kept_as_it_is() -> None:
    image = np.random.default_rng(0).integers(0, 256, (100, 64, 3), dtype=np.uint8)
    np.testing.assert_array_equal(Geometry(100, 64, 36, 64, 64).image_to_input(image), image[36:])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((720, 1280, 160, 100, 800), "input size 100x800"),
        ((720, 1280, 160, 320, 801), "multiples of 32"),
        ((720, 1280, 160, 0, 800), "multiples of 32"),
        ((720, 1280, 160, -32, 800), "multiples of 32"),
        ((720, 1280, 720, 320, 800), "crop_top = 720 leaves nothing"),
        ((720, 1280, -1, 320, 800), "crop_top = -1"),
        ((720, 0, 0, 320, 800), "image size 720x0"),
        ((0, 1280, 0, 320, 800), "image size 0x1280"),
    ],
)
def test_impossible_sizes(values: tuple[int, int, int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Geometry(*values)


def test_an_image_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="geometry is for"):
        Geometry(100, 200, 0, 32, 64).image_to_input(np.zeros((200, 100, 3), np.uint8))
