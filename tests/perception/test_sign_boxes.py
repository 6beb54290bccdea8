"""Boxes: offsets there and back, IoU, the grid of points."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perception.models.sign_boxes import (
    LOG_SIZE_LIMIT,
    STRIDES,
    box_areas,
    box_iou,
    decode_boxes,
    encode_boxes,
    grid_points,
    pairwise_iou,
)

coordinate = st.floats(-50, 1400, width=32)
side = st.floats(0, 300, width=32)


@st.composite
def box(draw: st.DrawFn) -> list[float]:
    x, y = draw(coordinate), draw(coordinate)
    return [x, y, x + draw(side), y + draw(side)]


boxes = st.lists(box(), min_size=1, max_size=8).map(lambda rows: torch.tensor(rows, dtype=torch.float32))


def test_points_are_the_centres_of_cells_row_by_row_and_finest_first() -> None:
    points = grid_points(32, 48)
    assert points.shape == (8 * 12 + 4 * 6 + 2 * 3, 3)
    assert points[:2].tolist() == [[2, 2, 4], [6, 2, 4]] and points[12].tolist() == [2, 6, 4]
    assert points[96].tolist() == [4, 4, 8] and points[-1].tolist() == [40, 24, 16]


def test_the_grid_of_a_large_frame_has_the_expected_size() -> None:
    assert len(grid_points(640, 640)) == 33_600 and len(grid_points(800, 1376)) == 90_300


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(STRIDES),
    st.floats(0, 1400, width=32),
    st.floats(0, 1400, width=32),
    st.floats(0.25, 900, width=32),
    st.floats(0.25, 900, width=32),
    st.floats(-3, 3, width=32),
)
def test_decoding_undoes_encoding(stride: int, x: float, y: float, width: float, height: float, shift: float) -> None:
    """Also where the point lies outside the box, which distances to its sides could not say."""
    wanted = torch.tensor([x, y, x + width, y + height])
    point = torch.tensor([x + width / 2 + shift * stride, y + height / 2 - shift * stride, stride])
    torch.testing.assert_close(decode_boxes(encode_boxes(wanted, point), point), wanted, atol=2e-3, rtol=1e-5)


def test_offsets_mean_strides_and_logarithms() -> None:
    point = torch.tensor([10.0, 20.0, 8.0])
    found = decode_boxes(torch.tensor([0.5, -1.0, torch.tensor(2.0).log(), 0.0]), point)
    torch.testing.assert_close(found, torch.tensor([14 - 8.0, 12 - 4.0, 14 + 8.0, 12 + 4.0]))


def test_extreme_offsets_and_boxes_without_area_stay_finite() -> None:
    points = grid_points(16, 16)[-1:]
    huge = decode_boxes(torch.tensor([[0.0, 0.0, 1e4, -1e4]]), points)
    assert huge.isfinite().all()
    encoded = encode_boxes(torch.tensor([[3.0, 3.0, 3.0, 9.0], [9.0, 9.0, 3.0, 3.0]]), points.expand(2, 3))
    assert encoded[:, 2].tolist() == [-LOG_SIZE_LIMIT] * 2 and encoded.isfinite().all()


def test_bfloat16_offsets_are_decoded_in_float32() -> None:
    point = torch.tensor([1301.5, 700.5, 4.0])
    found = decode_boxes(torch.zeros(4, dtype=torch.bfloat16), point)
    assert found.tolist() == [1299.5, 698.5, 1303.5, 702.5]
    # In bfloat16 e^3 times 4 is 80.5 pixels, not 80.34.
    offsets = torch.tensor([0.25, 0.25, 3.0, 3.0])
    assert torch.equal(decode_boxes(offsets.bfloat16(), point), decode_boxes(offsets, point))


# --- IoU ---


def test_iou_of_known_boxes() -> None:
    a = torch.tensor([0.0, 0.0, 10.0, 10.0])
    b = torch.tensor([[0.0, 0.0, 10.0, 10.0], [5.0, 0.0, 15.0, 10.0], [10.0, 0.0, 20.0, 10.0], [20.0, 0.0, 30.0, 10.0]])
    iou, generalised = box_iou(a, b)
    torch.testing.assert_close(iou, torch.tensor([1, 50 / 150, 0, 0]))
    # Boxes that share an edge overlap in nothing: they are half-open. Apart, the gap counts.
    torch.testing.assert_close(generalised, torch.tensor([1, 50 / 150, 0, -100 / 300]))


@settings(max_examples=60, deadline=None)
@given(boxes, boxes)
def test_iou_is_symmetric_bounded_and_the_same_pair_by_pair(a: Tensor, b: Tensor) -> None:
    iou, generalised = box_iou(a[:, None], b)
    swapped, swapped_generalised = box_iou(b[:, None], a)
    torch.testing.assert_close(iou, swapped.T)
    torch.testing.assert_close(generalised, swapped_generalised.T)
    assert (iou >= 0).all() and (iou <= 1 + 1e-5).all()
    assert (generalised > -1 - 1e-5).all() and (generalised <= iou + 1e-5).all()
    torch.testing.assert_close(pairwise_iou(a, b), iou)


@settings(max_examples=60, deadline=None)
@given(boxes)
def test_iou_with_itself_is_1_where_there_is_area(a: Tensor) -> None:
    iou, generalised = box_iou(a, a)
    # Sides below a thousandth of a pixel drown in the rounding of coordinates.
    solid = box_areas(a) > 1e-6
    torch.testing.assert_close(iou[solid], torch.ones(int(solid.sum())))
    torch.testing.assert_close(generalised[solid], torch.ones(int(solid.sum())))
    assert iou.isfinite().all() and generalised.isfinite().all()


@settings(max_examples=60, deadline=None)
@given(boxes, st.floats(0.25, 4, width=32))
def test_iou_does_not_depend_on_the_unit(a: Tensor, scale: float) -> None:
    a = a.round()
    before, _ = box_iou(a[:, None], a)
    after, _ = box_iou(a[:, None] * scale, a * scale)
    torch.testing.assert_close(before, after, atol=1e-3, rtol=1e-3)


def test_disjoint_boxes_attract_each_other_and_empty_ones_have_finite_gradients() -> None:
    a = torch.tensor([[0.0, 0.0, 4.0, 4.0], [7.0, 7.0, 7.0, 7.0]], requires_grad=True)
    _, generalised = box_iou(a, torch.tensor([[20.0, 0.0, 24.0, 4.0], [7.0, 7.0, 7.0, 7.0]]))
    (1 - generalised).sum().backward()
    assert a.grad is not None and a.grad.isfinite().all()
    assert a.grad[0, 2] < 0, "its right edge must be drawn to the right"
