"""Encoding and decoding of lanes: round trips, slack, clipping, the bottom extension, collation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.data.lane_targets import (
    LaneExample,
    angle_maps,
    collate,
    encode_lanes,
)
from perception.data.sample import Lane, LaneTruth
from perception.geometry import Geometry
from perception.lane_decode import decode_lane, row_heights

STRIDES = (8, 16, 32)
TUSIMPLE = Geometry(source_height=720, source_width=1280, crop_top=160, input_height=320, input_width=800)
REAL_LABELS = Path(__file__).parents[2] / ".." / "shared" / "data" / "tusimple_labels"


def encode(lanes: list[Lane], geometry: Geometry, num_rows: int = 72):  # type: ignore[no-untyped-def]
    moved = [geometry.points_to_input(lane) for lane in lanes]
    return encode_lanes(moved, geometry.input_height, geometry.input_width, num_rows, STRIDES)


def decode(targets, lane: int, geometry: Geometry, extend: bool = False) -> Lane | None:  # type: ignore[no-untyped-def]
    return decode_lane(targets.xs[lane], int(targets.start[lane]), int(targets.length[lane]), geometry, extend)


def tusimple_points_right(truth: Lane, decoded: Lane, h_samples: np.ndarray) -> np.ndarray:
    """Per row, whether TuSimple's accuracy takes it as right: -2 where a lane has no point there."""
    on_truth = np.isin(h_samples, truth[:, 1])
    on_decoded = (h_samples >= decoded[-1, 1] - 1e-6) & (h_samples <= decoded[0, 1] + 1e-6)
    x_truth = np.interp(h_samples, truth[::-1, 1], truth[::-1, 0])
    x_decoded = np.interp(h_samples, decoded[::-1, 1], decoded[::-1, 0])
    slope = np.polyfit(truth[:, 1], truth[:, 0], 1)[0]
    threshold = 20 / math.cos(math.atan(slope))
    return np.where(on_truth & on_decoded, np.abs(x_truth - x_decoded) < threshold, on_truth == on_decoded)


@settings(max_examples=200, deadline=None)
@given(
    bottom=st.integers(40, 71),
    num_points=st.integers(4, 30),
    x0=st.floats(300, 900),
    lean=st.floats(-2, 2),
    bend=st.floats(-0.004, 0.004),
)
def test_round_trip_covers_every_labelled_row_and_little_more(
    bottom: int, num_points: int, x0: float, lean: float, bend: float
) -> None:
    y = 10.0 * (bottom - np.arange(num_points))
    y = y[y >= 170]
    rise = y[0] - y
    lane = np.stack([x0 + lean * rise + bend * rise**2, y], axis=1)
    lane = lane[(lane[:, 0] >= 5) & (lane[:, 0] <= 1274)]
    if len(lane) < 2 or lane[0, 1] - lane[-1, 1] < 20:
        return
    decoded = decode(encode([lane], TUSIMPLE), 0, TUSIMPLE)
    assert decoded is not None
    row = 560 / 71
    on_border = not 20 < decoded[0, 0] < 1259 or not 20 < decoded[-1, 0] < 1259
    if not on_border:
        assert 0 <= decoded[0, 1] - lane[0, 1] < row and 0 <= lane[-1, 1] - decoded[-1, 1] < row
    inner = (lane[:, 1] <= decoded[0, 1]) & (lane[:, 1] >= decoded[-1, 1])
    x = np.interp(lane[inner, 1], decoded[::-1, 1], decoded[::-1, 0])
    np.testing.assert_allclose(x, lane[inner, 0], atol=0.5 + 4 * abs(bend) * row**2 + abs(lean))


@pytest.mark.skipif(not REAL_LABELS.is_dir(), reason="official TuSimple labels are not at ../shared/data")
def test_accuracy_ceiling_on_official_labels() -> None:
    right, total, left_out = 0, 0, 0
    for path in sorted(REAL_LABELS.glob("*.json")):
        for line in path.read_text().splitlines()[::10]:
            label = json.loads(line)
            h_samples = np.asarray(label["h_samples"], dtype=float)
            lanes = []
            for xs in label["lanes"]:
                x = np.asarray(xs, dtype=float)
                points = np.stack([x, h_samples], axis=1)[x >= 0][::-1]
                if len(points) >= 2:
                    lanes.append(points)
            targets = encode(lanes, TUSIMPLE)
            left_out += targets.num_left_out
            assert len(targets.xs) == len(lanes) - targets.num_left_out
            if targets.num_left_out:
                continue
            for index, lane in enumerate(lanes):
                decoded = decode(targets, index, TUSIMPLE)
                assert decoded is not None
                right += tusimple_points_right(lane, decoded, h_samples).sum()
                total += len(h_samples)
    assert total > 50_000 and left_out <= 2
    assert right / total >= 0.999


def test_lane_outside_the_image_is_cut_and_one_without_rows_is_counted() -> None:
    geometry = Geometry(320, 800, 0, 320, 800)
    leaving = np.array([[-200.0, 319.0], [400.0, 100.0]])
    away = np.array([[900.0, 319.0], [850.0, 100.0]])
    single = np.array([[100.0, 200.0]])
    targets = encode([away, leaving], geometry)
    assert targets.num_left_out == 1 and len(targets.xs) == 1
    start = int(targets.start[0])
    assert start > 0 and targets.xs[0][start] < 0 <= targets.xs[0][start + 1] and targets.valid[0, start + 1 :].any()
    assert encode_lanes([single], 320, 800, 72, STRIDES).num_left_out == 1


def test_nearly_level_ends_stay_finite() -> None:
    lane = np.array([[100.0, 200.0], [700.0, 199.9999999], [710.0, 150.0]])
    targets = encode_lanes([lane], 320, 800, 72, STRIDES)
    assert np.isfinite(targets.xs).all() and np.abs(targets.xs).max() <= 4000


def test_extension_runs_down_to_the_border_of_the_image() -> None:
    geometry = Geometry(320, 800, 0, 320, 800)
    xs = np.linspace(300, 442, 72).astype(np.float32)
    whole = decode_lane(xs, 20, 30, geometry, extend_to_bottom=True)
    assert whole is not None and len(whole) == 50 and whole[0, 1] == 320
    xs[:10] = -5
    cut = decode_lane(xs, 20, 30, geometry, extend_to_bottom=True)
    assert cut is not None and len(cut) == 41
    plain = decode_lane(xs, 20, 30, geometry, extend_to_bottom=False)
    assert plain is not None and len(plain) == 30
    assert (np.diff(plain[:, 1]) < 0).all()


@pytest.mark.parametrize(("start", "length"), [(0, 1), (71, 5), (-3, 4), (90, 3), (10, -4), (0, 0)])
def test_extents_of_an_untrained_network_do_not_crash(start: int, length: int) -> None:
    lane = decode_lane(np.zeros(72, np.float32), start, length, TUSIMPLE, extend_to_bottom=False)
    assert lane is None or len(lane) >= 2


def test_angles_follow_the_direction_up_the_lane() -> None:
    right = np.array([[16.0, 100.0], [76.0, 40.0]])
    left = right * [-1, 1] + [200, 0]
    for level in angle_maps([right], 128, 256, STRIDES):
        assert set(np.unique(level.round(5))) == {np.float32(0), np.float32(0.25)}
    for level in angle_maps([left], 128, 256, STRIDES):
        assert set(np.unique(level.round(5))) == {np.float32(0), np.float32(0.75)}
    finest, _, coarsest = angle_maps([right], 128, 256, STRIDES)
    assert finest[int(70.5 / 8), int(46.5 / 8)] > 0 and coarsest[3, 0] > 0 and coarsest[0, 5] == 0


def test_a_level_lane_marks_every_cell_it_crosses() -> None:
    finest = angle_maps([np.array([[5.0, 60.0], [250.0, 50.0]])], 128, 256, STRIDES)[0]
    assert (finest.max(axis=0)[1:31] > 0).all()


def example(lanes: list[Lane]) -> LaneExample:
    targets = encode_lanes(lanes, 64, 128, 72, STRIDES)
    truth = LaneTruth("x", 128, 512, tuple(lanes))
    return LaneExample(np.zeros((64, 128, 3), np.uint8), targets, truth, Geometry(128, 512, 0, 64, 128))


def test_collate_pads_and_an_empty_image_has_no_lane() -> None:
    lane = np.array([[20.0, 60.0], [40.0, 10.0]])
    batch = collate([example([]), example([lane, lane + np.array([30, 0])]), example([lane])])
    assert len(batch) == 3 and batch.names == ("x", "x", "x")
    assert batch.xs.shape == (3, 2, 72) and batch.present.sum(1).tolist() == [0, 2, 1]
    assert not batch.valid[~batch.present].any()
    assert batch.images.dtype == torch.uint8 and batch.images.shape == (3, 64, 128, 3)
    torch.testing.assert_close(batch.aspect, torch.full((3,), 2.0))
    moved = batch.to(torch.device("cpu"))
    assert len(moved) == 3 and moved.truths is batch.truths


def test_collate_keeps_one_slot_when_no_image_has_a_lane() -> None:
    batch = collate([example([])])
    assert batch.xs.shape == (1, 1, 72) and not batch.present.any()
    with pytest.raises(ValueError, match="at least one"):
        collate([])


def test_rows_agree_with_the_model() -> None:
    from perception.models import lane as model

    np.testing.assert_allclose(row_heights(72, 320), model.row_heights(72, 320).numpy(), atol=1e-4)
