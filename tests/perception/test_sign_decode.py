"""Network → detections: non-maximum suppression against a plain loop, limits, planted signs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perception.model_config import SignModelConfig
from perception.models.sign import SignOutput
from perception.models.sign_boxes import encode_boxes, grid_points
from perception.models.sign_decode import decode_signs, suppress

HEIGHT, WIDTH, CLASSES = 64, 96, 3
CONFIG = SignModelConfig(num_classes=CLASSES)
GRID = grid_points(HEIGHT, WIDTH)


def plain_suppression(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> list[int]:
    """One box after the other, each against all that stay, in Python."""

    def iou(a: list[float], b: list[float]) -> float:
        width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
        height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
        union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
        return width * height / union if union > 0 else 0.0

    rows, kinds = boxes.tolist(), groups.tolist()
    kept: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: (-float(scores[i]), i)):
        if all(kinds[index] != kinds[k] or iou(rows[index], rows[k]) <= threshold for k in kept):
            kept.append(index)
    return kept


# Whole numbers: their IoUs are ratios, which float32 and float64 compare alike with these thresholds.
box = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 12), st.integers(0, 12))
detection = st.tuples(box, st.integers(0, 5), st.integers(0, 2))


@settings(max_examples=150, deadline=None)
@given(st.lists(detection, max_size=30), st.sampled_from([0.0, 0.31, 0.47, 0.653]))
def test_suppression_is_that_of_a_plain_loop(
    rows: list[tuple[tuple[int, int, int, int], int, int]], threshold: float
) -> None:
    boxes = torch.tensor([[x, y, x + w, y + h] for (x, y, w, h), _, _ in rows], dtype=torch.float32).reshape(-1, 4)
    scores = torch.tensor([score / 5 for _, score, _ in rows])
    groups = torch.tensor([group for _, _, group in rows], dtype=torch.int64)
    found = suppress(boxes, scores, groups, threshold).tolist()
    assert found == plain_suppression(boxes, scores, groups, threshold)


def test_a_suppressed_box_suppresses_nothing() -> None:
    """A long chain, each overlapping the next only: every second one stays."""
    x = torch.arange(600.0) * 4
    boxes = torch.stack([x, torch.zeros(600), x + 10, torch.full((600,), 10.0)], dim=1)
    kept = suppress(boxes, torch.linspace(1, 0.1, 600), torch.zeros(600), 0.3)
    assert kept.tolist() == list(range(0, 600, 2))


def test_an_iou_at_the_threshold_does_not_suppress() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 2]])
    assert suppress(boxes, torch.tensor([0.9, 0.8]), torch.zeros(2), 0.5).tolist() == [0, 1]
    assert suppress(boxes, torch.tensor([0.9, 0.8]), torch.zeros(2), 0.49).tolist() == [0]


@pytest.mark.slow
def test_three_thousand_boxes_take_less_than_a_second() -> None:
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(3000, 2, generator=generator) * 600
    boxes = torch.cat([corner, corner + 10 + 60 * torch.rand(3000, 2, generator=generator)], dim=1)
    scores, groups = torch.rand(3000, generator=generator), torch.randint(0, 43, (3000,), generator=generator)
    start = time.process_time()
    kept = suppress(boxes, scores, groups, 0.5)
    assert time.process_time() - start < 1
    assert kept.tolist() == plain_suppression(boxes, scores, groups, 0.5)


# --- Decoding ---


def silent(batch: int = 1) -> SignOutput:
    n = len(GRID)
    return SignOutput(torch.full((batch, n), -20.0), torch.full((batch, n, CLASSES), -20.0), torch.zeros(batch, n, 4))


def plant(output: SignOutput, image: int, point: int, box: list[float], label: int, logit: float) -> None:
    output.objectness[image, point] = logit
    output.classes[image, point, label] = 20.0
    output.offsets[image, point] = encode_boxes(torch.tensor(box), GRID[point])


def test_planted_signs_come_back_surest_first() -> None:
    output = silent(2)
    plant(output, 0, 200, [30, 20, 50, 40], 2, 0.0)
    plant(output, 0, 390, [60, 8, 70, 20], 1, 2.0)
    first, second = decode_signs(output, HEIGHT, WIDTH, CONFIG)
    torch.testing.assert_close(first.boxes, torch.tensor([[60.0, 8, 70, 20], [30, 20, 50, 40]]), atol=1e-3, rtol=0)
    assert first.labels.tolist() == [1, 2]
    torch.testing.assert_close(first.scores, torch.tensor([2.0, 0.0]).sigmoid())
    assert [part.shape for part in second] == [(0, 4), (0,), (0,)]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_score_is_objectness_times_a_power_of_class(power: float) -> None:
    output = silent()
    plant(output, 0, 200, [30, 20, 50, 40], 2, 1.0)
    output.classes[0, 200, 2] = -1.0
    [found] = decode_signs(output, HEIGHT, WIDTH, replace(CONFIG, class_score_power=power))
    torch.testing.assert_close(found.scores[0], torch.tensor(1.0).sigmoid() * torch.tensor(-1.0).sigmoid() ** power)


def test_scores_below_the_threshold_are_dropped() -> None:
    output = silent()
    plant(output, 0, 200, [30, 20, 50, 40], 2, 0.0)
    assert len(decode_signs(output, HEIGHT, WIDTH, replace(CONFIG, score_threshold=0.49))[0].scores) == 1
    assert len(decode_signs(output, HEIGHT, WIDTH, replace(CONFIG, score_threshold=0.51))[0].scores) == 0


def test_signs_of_another_class_stay_unless_suppression_is_class_agnostic() -> None:
    output = silent()
    plant(output, 0, 200, [30, 20, 50, 40], 2, 2.0)
    plant(output, 0, 201, [30, 20, 50, 41], 1, 1.0)
    plant(output, 0, 202, [30, 20, 50, 39], 2, 0.0)
    aware = replace(CONFIG, nms_class_agnostic=False)
    assert decode_signs(output, HEIGHT, WIDTH, aware)[0].labels.tolist() == [2, 1]
    assert decode_signs(output, HEIGHT, WIDTH, CONFIG)[0].labels.tolist() == [2]


def test_boxes_are_clipped_to_the_image_and_dropped_outside_it() -> None:
    output = silent()
    plant(output, 0, 0, [-20, -5, 10, 8], 0, 2.0)
    plant(output, 0, len(GRID) - 1, [90, 40, 130, 80], 1, 1.0)
    plant(output, 0, 5, [200, 200, 220, 220], 1, 3.0)
    [found] = decode_signs(output, HEIGHT, WIDTH, CONFIG)
    torch.testing.assert_close(found.boxes, torch.tensor([[0.0, 0, 10, 8], [90, 40, 96, 64]]), atol=1e-3, rtol=0)


def test_the_limits_hold() -> None:
    output = silent()
    output.objectness[0] = torch.linspace(-3, 3, len(GRID))
    output.classes[0, :, 1] = 20.0
    output.offsets[0, :, 2:] = -3.0
    [found] = decode_signs(output, HEIGHT, WIDTH, replace(CONFIG, max_detections=7))
    assert len(found.scores) == 7 and (found.scores.diff() <= 0).all()
    [few] = decode_signs(output, HEIGHT, WIDTH, replace(CONFIG, max_candidates_per_stride=5, max_detections=1000))
    assert len(few.scores) == 15
    # The surest of each stride, which here are the last of each.
    expected = torch.cat([GRID[379:384], GRID[475:480], GRID[499:504]])[:, :2]
    centres = (few.boxes[:, :2] + few.boxes[:, 2:]) / 2
    torch.testing.assert_close(centres.sort(dim=0).values, expected.sort(dim=0).values, atol=1e-3, rtol=0)


def test_an_image_is_decoded_the_same_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, len(GRID)), (3, len(GRID), CLASSES), (3, len(GRID), 4)]
    output = SignOutput(*(torch.randn(shape, generator=generator) for shape in shapes))
    together = decode_signs(output, HEIGHT, WIDTH, CONFIG)
    for index in range(3):
        [alone] = decode_signs(SignOutput(*(part[index : index + 1] for part in output)), HEIGHT, WIDTH, CONFIG)
        assert all(map(torch.equal, alone, together[index]))


def test_a_diverged_network_detects_nothing() -> None:
    output = SignOutput(*(torch.full_like(part, torch.nan) for part in silent()))
    assert len(decode_signs(output, HEIGHT, WIDTH, CONFIG)[0].scores) == 0
