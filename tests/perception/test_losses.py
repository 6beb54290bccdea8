"""Losses and assignment: IoU properties, known bugs of other projects, additivity over ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from perception.data.lane_targets import LaneBatch, LaneExample, collate, encode_lanes
from perception.data.sample import Lane, LaneTruth
from perception.geometry import Geometry
from perception.losses import assign_lanes, focal_terms, half_widths, lane_iou, lane_losses
from perception.model_config import LaneModelConfig
from perception.models.lane import LaneOutput

HEIGHT, WIDTH, ROWS = 64, 160, 72
CONFIG = LaneModelConfig(input_height=HEIGHT, input_width=WIDTH)
SPACING = torch.full((1, 1, 1), HEIGHT / (ROWS - 1))


def straight(x: float, lean: float = 0.0) -> Lane:
    y = np.arange(HEIGHT, 4.0, -4)
    return np.stack([x + lean * (HEIGHT - y), y], axis=1)


def make_batch(images: list[list[Lane]]) -> LaneBatch:
    examples = []
    for lanes in images:
        targets = encode_lanes(lanes, HEIGHT, WIDTH, ROWS, (8, 16, 32))
        truth = LaneTruth("", HEIGHT, WIDTH, tuple(lanes))
        pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        examples.append(LaneExample(pixels, targets, truth, Geometry(HEIGHT, WIDTH, 0, HEIGHT, WIDTH)))
    return collate(examples)


def make_output(batch: int, seed: int = 0, proposals: int = 12, requires_grad: bool = False) -> LaneOutput:
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.rand(batch, proposals, 1, generator=generator) * WIDTH
    lean = torch.randn(batch, proposals, 1, generator=generator)
    leaves = (
        torch.randn(batch, proposals, generator=generator),
        x0 + lean * torch.arange(ROWS),
        torch.rand(batch, proposals, generator=generator) * 20,
        torch.rand(batch, proposals, generator=generator) * 50,
        tuple(torch.rand(batch, HEIGHT // s, WIDTH // s, generator=generator) for s in (8, 16, 32)),
    )
    if requires_grad:
        for leaf in (*leaves[:4], *leaves[4]):
            leaf.requires_grad_()
    return LaneOutput(*leaves)  # type: ignore[arg-type]


def iou(a: Tensor, b: Tensor, half_width: float = 5.0, rows: Tensor | None = None) -> Tensor:
    every = torch.ones(ROWS, dtype=torch.bool) if rows is None else rows
    spacing = HEIGHT / (ROWS - 1)
    return lane_iou(a, b, half_widths(a, spacing, half_width), half_widths(b, spacing, half_width), every)


# --- IoU ---


def test_iou_of_a_lane_with_itself_is_1_and_it_is_symmetric() -> None:
    a = 40 + torch.arange(ROWS) * 0.7
    b = 42 + torch.arange(ROWS) * 0.6
    torch.testing.assert_close(iou(a, a), torch.tensor(1.0))
    torch.testing.assert_close(iou(a, b), iou(b, a))
    assert 0 < iou(a, b) < 1


def test_iou_of_upright_lanes_is_known() -> None:
    a = torch.full((ROWS,), 40.0)
    torch.testing.assert_close(iou(a, a + 5), torch.tensor(5 / 15))
    torch.testing.assert_close(iou(a, a + 10), torch.tensor(0.0))
    torch.testing.assert_close(iou(a, a + 30), torch.tensor(-20 / 40))


def test_disjoint_lanes_attract_each_other() -> None:
    a = torch.full((ROWS,), 40.0, requires_grad=True)
    value = iou(a, torch.full((ROWS,), 100.0))
    value.backward()
    assert value < 0 and a.grad is not None and (a.grad > 0).all()


def test_leaning_lane_is_wider_along_the_row() -> None:
    spacing = HEIGHT / (ROWS - 1)
    lane = torch.arange(ROWS) * spacing * 3 / 4
    torch.testing.assert_close(half_widths(lane, spacing, 4.0), torch.full((ROWS,), 5.0))
    # The same slope of an original image twice as wide as the input shows it.
    wide = half_widths(lane, spacing / 2, 4.0)
    torch.testing.assert_close(wide, torch.full((ROWS,), 4 * (1 + 1.5**2) ** 0.5))


def test_iou_looks_at_the_given_rows_only_and_is_finite_without_any() -> None:
    a, b = torch.full((ROWS,), 40.0), torch.full((ROWS,), 40.0)
    b[50:] = 1e4
    rows = torch.arange(ROWS) < 48
    torch.testing.assert_close(iou(a, b, rows=rows), torch.tensor(1.0))
    assert iou(a, b, rows=torch.zeros(ROWS, dtype=torch.bool)) == 0


# --- Assignment ---


def assign(output: LaneOutput, batch: LaneBatch) -> Tensor:
    return assign_lanes(output, batch, SPACING, CONFIG)


def on_lanes(xs: list[float], logits: list[float] | None = None) -> LaneOutput:
    output = make_output(1, proposals=len(xs))
    rows = torch.tensor(xs)[None, :, None].expand(1, len(xs), ROWS)
    scores = torch.zeros(1, len(xs)) if logits is None else torch.tensor([logits])
    return output._replace(xs=rows, logits=scores)


def test_every_lane_gets_its_nearest_proposal() -> None:
    batch = make_batch([[straight(30), straight(100)]])
    assert assign(on_lanes([100.5, 31.0, 70.0]), batch).tolist() == [[1, 0, -1]]


def test_nearest_wins_even_when_every_iou_is_negative() -> None:
    """Dividing by the largest IoU would turn the order round here."""
    batch = make_batch([[straight(20)]])
    chosen = assign(on_lanes([60.0, 90.0, 150.0]), batch)
    assert chosen.tolist() == [[0, -1, -1]]


def test_proposal_wanted_twice_goes_to_the_cheaper_lane_only() -> None:
    """Whichever column the lanes are in."""
    lanes = [straight(50), straight(52), straight(54)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        batch = make_batch([[lanes[i] for i in order]])
        chosen = assign(on_lanes([54.2]), batch)
        assert chosen.tolist() == [[order.index(2)]]


def test_number_of_proposals_follows_how_many_fit() -> None:
    batch = make_batch([[straight(50)]])
    assert (assign(on_lanes([50.0, 50.1, 49.9, 50.05, 50.02, 150.0]), batch) >= 0).sum() == 3
    assert (assign(on_lanes([60.0, 90.0, 150.0]), batch) >= 0).sum() == 1


def test_score_decides_between_equally_near_proposals() -> None:
    batch = make_batch([[straight(50)]])
    assert assign(on_lanes([53.0, 47.0], [-2.0, 2.0]), batch).tolist() == [[-1, 0]]


def test_padding_and_empty_images_get_nothing() -> None:
    batch = make_batch([[], [straight(50), straight(90)], [straight(20)]])
    chosen = assign(make_output(3), batch)
    assert (chosen[0] == -1).all()
    assert set(chosen[1].tolist()) <= {-1, 0, 1} and (chosen[1] >= 0).any()
    assert set(chosen[2].tolist()) == {-1, 0}


def test_assignment_does_not_depend_on_the_other_images() -> None:
    images = [[straight(30), straight(100)], [straight(60, 0.5)], []]
    output = make_output(3)
    together = assign(output, make_batch(images))
    for index, lanes in enumerate(images):
        alone = LaneOutput(*(part[index : index + 1] for part in output[:4]), angles=output.angles)
        torch.testing.assert_close(assign(alone, make_batch([lanes]))[0], together[index])


# --- Loss ---


def test_focal_terms_are_those_of_the_paper() -> None:
    logit = torch.tensor(0.3)
    p = torch.sigmoid(logit)
    positive, negative = focal_terms(logit, alpha=0.25, gamma=2.0)
    torch.testing.assert_close(positive, -0.25 * (1 - p) ** 2 * p.log())
    torch.testing.assert_close(negative, -0.75 * p**2 * (1 - p).log())
    assert all(torch.isfinite(term).all() for term in focal_terms(torch.tensor([-200.0, 200.0])))


def test_perfect_output_has_no_regression_loss() -> None:
    batch = make_batch([[straight(40), straight(90, 0.4)]])
    output = LaneOutput(
        torch.full((1, 2), 20.0),
        batch.xs.clone(),
        batch.start.clone(),
        batch.length.clone(),
        batch.angles,  # type: ignore[arg-type]
    )
    terms = lane_losses(output, batch, CONFIG).terms
    assert all(abs(float(value)) < 1e-5 for value in terms.values()), terms


def test_total_is_the_sum_of_the_terms() -> None:
    losses = lane_losses(make_output(2), make_batch([[straight(40)], []]), CONFIG)
    assert set(losses.terms) == {"class", "iou", "extent", "angle"}
    torch.testing.assert_close(losses.total, torch.stack(list(losses.terms.values())).sum())


def test_image_without_lanes_contributes_the_class_loss_only() -> None:
    terms = lane_losses(make_output(2), make_batch([[], []]), CONFIG).terms
    assert terms["class"] > 0
    assert terms["iou"] == terms["extent"] == terms["angle"] == 0


@pytest.mark.parametrize("images", [[[]], [[], [straight(40)]]])
def test_gradients_are_finite_and_reach_every_output(images: list[list[Lane]]) -> None:
    output = make_output(len(images), requires_grad=True)
    lane_losses(output, make_batch(images), CONFIG).total.backward()
    for leaf in (*output[:4], *output.angles):
        assert leaf.grad is not None and leaf.grad.isfinite().all()


def test_late_start_shortens_the_length_target() -> None:
    batch = make_batch([[straight(40)]])
    late = LaneOutput(torch.full((1, 1), 9.0), batch.xs, batch.start + 5, batch.length - 5, batch.angles)  # type: ignore[arg-type]
    long = late._replace(length=batch.length)
    assert lane_losses(late, batch, CONFIG).terms["extent"] < lane_losses(long, batch, CONFIG).terms["extent"]


def test_batch_split_over_ranks_has_the_same_gradient() -> None:
    images = [[straight(40), straight(100, 0.3)], [], [straight(20)], [straight(70, -0.5)], []]
    whole = make_output(5, requires_grad=True)
    lane_losses(whole, make_batch(images), CONFIG).total.backward()
    for first, last in ((0, 2), (2, 5)):
        part = LaneOutput(
            *(leaf.detach()[first:last].clone().requires_grad_() for leaf in whole[:4]),
            angles=tuple(level.detach()[first:last].clone().requires_grad_() for level in whole.angles),  # type: ignore[arg-type]
        )
        loss = lane_losses(part, make_batch(images[first:last]), CONFIG).total * (last - first) / 5
        loss.backward()
        for mine, theirs in zip((*part[:4], *part.angles), (*whole[:4], *whole.angles), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad[first:last], atol=1e-7, rtol=1e-5)


def test_weights_scale_their_term() -> None:
    output, batch = make_output(1), make_batch([[straight(40)]])
    base = lane_losses(output, batch, CONFIG).terms
    heavier = lane_losses(output, batch, dataclasses.replace(CONFIG, extent_weight=0.4)).terms
    torch.testing.assert_close(heavier["extent"], 2 * base["extent"])
    torch.testing.assert_close(heavier["iou"], base["iou"])
