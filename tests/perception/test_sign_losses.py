"""Losses of the sign detector: known values, ignored regions, additivity over ranks, odd batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from perception.losses import Losses
from perception.models.sign import SignModel, SignOutput
from perception.models.sign_boxes import encode_boxes, grid_points
from perception.sign_losses import inside_any, quality_focal_loss, sign_losses
from perception.sign_targets import SignTargets, pad_targets
from tests.perception.sign_cases import TINY

HEIGHT, WIDTH, CLASSES = 64, 96, 4
CONFIG = replace(TINY, num_classes=CLASSES)
GRID = grid_points(HEIGHT, WIDTH)
SIGN, OTHER = [30.0, 20.0, 50.0, 40.0], [70.0, 8.0, 80.0, 20.0]

Image = tuple[list[list[float]], list[int]]


def make_targets(images: list[Image], ignored: list[list[list[float]]] | None = None) -> SignTargets:
    return pad_targets(
        [torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4) for boxes, _ in images],
        [torch.tensor(labels, dtype=torch.int64) for _, labels in images],
        [torch.tensor(regions, dtype=torch.float32).reshape(-1, 4) for regions in ignored or [[]] * len(images)],
        HEIGHT,
        WIDTH,
    )


def random_output(batch: int, seed: int = 0) -> SignOutput:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, len(GRID)), (batch, len(GRID), CLASSES), (batch, len(GRID), 4)]
    return SignOutput(*(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes))


def perfect_output(box: list[float], label: int) -> SignOutput:
    """Sure of background everywhere but at five points near the sign, which predict it exactly."""
    n = len(GRID)
    output = SignOutput(torch.full((1, n), -30.0), torch.full((1, n, CLASSES), -30.0), torch.full((1, n, 4), -6.0))
    centre = torch.tensor([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2])
    nearest = (GRID[:, :2] - centre).square().sum(dim=1).argsort(stable=True)[:5]
    output.objectness[0, nearest] = 30.0
    output.classes[0, nearest, label] = 30.0
    output.offsets[0, nearest] = encode_boxes(torch.tensor(box).expand(5, 4), GRID[nearest])
    return output


def gradients(losses: Losses, output: SignOutput) -> list[Tensor]:
    return list(torch.autograd.grad(losses.total, output))


# --- Values ---


def test_quality_focal_loss_is_that_of_the_paper() -> None:
    logit, quality = torch.tensor(0.3), torch.tensor(0.7)
    p = logit.sigmoid()
    expected = (quality - p) ** 2 * -(quality * p.log() + (1 - quality) * (1 - p).log())
    torch.testing.assert_close(quality_focal_loss(logit, quality), expected)
    torch.testing.assert_close(quality_focal_loss(quality.logit(), quality), torch.tensor(0.0))
    assert quality_focal_loss(torch.tensor([-200.0, 200.0]), torch.tensor([1.0, 0.0])).isfinite().all()


def test_perfect_output_has_no_loss() -> None:
    losses = sign_losses(perfect_output(SIGN, 2), make_targets([([SIGN], [2])]), CONFIG)
    assert set(losses.terms) == {"box", "offset", "objectness", "class"}
    assert all(abs(float(value)) < 1e-4 for value in losses.terms.values()), losses.terms


def test_each_mistake_raises_its_own_term() -> None:
    targets = make_targets([([SIGN], [2])])
    right = perfect_output(SIGN, 2)
    sure = right.objectness[0] > 0
    background = int((~sure).nonzero()[0])

    shifted = right._replace(offsets=right.offsets.clone())
    shifted.offsets[0, sure, 0] += 0.3
    confused = right._replace(classes=right.classes.clone())
    confused.classes[0, sure] = -30.0
    alarmed = right._replace(objectness=right.objectness.clone())
    alarmed.objectness[0, background] = 5.0
    terms = {name: sign_losses(o, targets, CONFIG).terms for name, o in
             [("box", shifted), ("class", confused), ("objectness", alarmed)]}  # fmt: skip
    assert terms["box"]["box"] > 0.05 and terms["box"]["offset"] > 0.05 and terms["box"]["class"] < 1e-4
    assert terms["class"]["class"] > 10 and terms["class"]["box"] < 1e-4
    # One false alarm, shared by at least ten: q = 0, sigma near 1, cross-entropy near 5.
    assert float(terms["objectness"]["objectness"]) == pytest.approx(5 / 10, rel=0.05)
    assert terms["objectness"]["box"] < 1e-4


def test_offset_loss_is_the_sum_of_the_four_errors_in_strides() -> None:
    right = perfect_output(SIGN, 2)
    sure = right.objectness[0] > 0
    right.offsets[0, sure] += torch.tensor([0.01, -0.02, 0.005, 0.0])
    terms = sign_losses(right, make_targets([([SIGN], [2])]), CONFIG).terms
    torch.testing.assert_close(terms["offset"], torch.tensor(0.035), atol=1e-4, rtol=0)


def test_total_is_the_sum_and_weights_scale_their_terms() -> None:
    output, targets = random_output(1), make_targets([([SIGN], [1])])
    base = sign_losses(output, targets, CONFIG)
    torch.testing.assert_close(base.total, torch.stack(list(base.terms.values())).sum())
    for name in base.terms:
        weight = f"{name}_weight"
        heavier = replace(CONFIG, **{weight: 2 * getattr(CONFIG, weight)})
        terms = sign_losses(output, targets, heavier).terms
        for other, value in terms.items():
            torch.testing.assert_close(value, base.terms[other] * (2 if other == name else 1))


# --- Ignored regions ---


def test_points_are_in_half_open_regions() -> None:
    points = torch.tensor([[2.0, 2, 4], [6, 2, 4], [10, 2, 4]])
    found = inside_any(points, torch.tensor([[[2.0, 0, 6, 9], [0, 0, 0, 0]], [[6, 0, 11, 2], [9.5, 0, 11, 3]]]))
    assert found.tolist() == [[True, False, False], [False, False, True]]


def test_background_in_an_ignored_region_teaches_nothing_and_outside_it_does() -> None:
    region = [60.0, 30.0, 96.0, 64.0]
    output = random_output(1)
    grad = gradients(sign_losses(output, make_targets([([SIGN], [1])], [[region]]), CONFIG), output)[0][0]
    inside = inside_any(GRID, torch.tensor([[region]]))[0]
    assert inside.sum() > 100
    assert (grad[inside] == 0).all() and (grad[~inside] != 0).all()


def test_a_sign_in_an_ignored_region_is_learnt() -> None:
    everywhere = [0.0, 0.0, float(WIDTH), float(HEIGHT)]
    output = random_output(1)
    with_region = sign_losses(output, make_targets([([SIGN], [1])], [[everywhere]]), CONFIG)
    without = sign_losses(output, make_targets([([SIGN], [1])]), CONFIG)
    for name in ("box", "offset", "class"):
        torch.testing.assert_close(with_region.terms[name], without.terms[name])
    grad = gradients(with_region, output)[0]
    assert 0 < int((grad != 0).sum()) <= 10


# --- Odd batches ---


@pytest.mark.parametrize("images", [[([], [])], [([], []), ([SIGN], [1])], [([[8, 8, 8, 30]], [1])]])
def test_gradients_are_finite_and_every_output_takes_part(images: list[Image]) -> None:
    """Ranks whose images have no sign must run through the same graph as the others."""
    output = random_output(len(images))
    losses = sign_losses(output, make_targets(images), CONFIG)
    assert all(value.isfinite() for value in losses.terms.values())
    for grad in gradients(losses, output):
        assert grad.isfinite().all()


def test_an_image_without_signs_has_objectness_only_and_weighs_no_more_than_one_with() -> None:
    output = SignOutput(*(part.detach() for part in random_output(1)))
    empty = sign_losses(output, make_targets([([], [])]), CONFIG).terms
    assert empty["box"] == empty["offset"] == empty["class"] == 0 and empty["objectness"] > 0
    full = sign_losses(output, make_targets([([SIGN], [1])]), CONFIG).terms
    assert float(full["objectness"]) == pytest.approx(float(empty["objectness"]), rel=0.05)
    # The same false alarms, beside a sign that five points answer for and in an image without.
    beside = perfect_output(SIGN, 1)
    alone = beside._replace(objectness=torch.full_like(beside.objectness, -30.0))
    for part in (beside, alone):
        part.objectness[0, :20] = 3.0
    with_sign = sign_losses(beside, make_targets([([SIGN], [1])]), CONFIG).terms["objectness"]
    without = sign_losses(alone, make_targets([([], [])]), CONFIG).terms["objectness"]
    assert float(without) == pytest.approx(float(with_sign), rel=1e-4) and without > 1


@pytest.mark.parametrize("number", [1, 300])
def test_many_and_extreme_boxes_have_finite_gradients(number: int) -> None:
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(number, 2, generator=generator) * 60
    boxes = torch.cat([corner, corner + 10 ** (4 * torch.rand(number, 2, generator=generator) - 2)], dim=1)
    output = random_output(1)
    with torch.no_grad():
        output.offsets.mul_(50)
        output.objectness.mul_(50)
    losses = sign_losses(output, make_targets([(boxes.tolist(), [0] * number)]), CONFIG)
    assert all(grad.isfinite().all() for grad in gradients(losses, output))


def test_a_diverged_network_shows_in_the_loss() -> None:
    output = random_output(1)
    broken = output._replace(offsets=output.offsets * torch.nan)
    assert not sign_losses(broken, make_targets([([SIGN], [1])]), CONFIG).total.isfinite()


def test_bfloat16_classes_and_autocast_change_little() -> None:
    output, targets = random_output(2), make_targets([([SIGN, OTHER], [1, 2]), ([], [])])
    exact = sign_losses(output, targets, CONFIG)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = sign_losses(output._replace(classes=output.classes.bfloat16()), targets, CONFIG)
    assert all(value.dtype == torch.float32 for value in rounded.terms.values())
    for name, value in exact.terms.items():
        torch.testing.assert_close(rounded.terms[name], value, rtol=2e-2, atol=0)


# --- Ranks ---

IMAGES: list[Image] = [([SIGN, OTHER], [1, 2]), ([], []), ([OTHER], [3]), ([SIGN, OTHER, SIGN], [0, 0, 1]), ([], [])]


def test_batch_split_over_ranks_has_the_same_gradient() -> None:
    """Images without signs, and padding to another number of signs, among them."""
    output = random_output(5)
    whole = gradients(sign_losses(output, make_targets(IMAGES), CONFIG), output)
    for first, last in ((0, 1), (1, 2), (2, 5)):
        part = SignOutput(*(x.detach()[first:last].requires_grad_() for x in output))
        losses = sign_losses(part, make_targets(IMAGES[first:last]), CONFIG)
        for mine, theirs in zip(gradients(losses, part), whole, strict=True):
            torch.testing.assert_close(mine * (last - first) / 5, theirs[first:last], atol=1e-7, rtol=1e-5)


def test_the_networks_gradient_is_the_weighted_mean_of_its_parts() -> None:
    torch.manual_seed(0)
    # Batch norm as in evaluation: its statistics are the distributed layer's business.
    model = SignModel(CONFIG).eval()
    images = torch.randint(0, 256, (5, HEIGHT, WIDTH, 3), dtype=torch.uint8)

    def flat_gradient(first: int, last: int) -> Tensor:
        losses = sign_losses(model(images[first:last]), make_targets(IMAGES[first:last]), CONFIG)
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(losses.total, list(model.parameters()))])

    mean = 2 / 5 * flat_gradient(0, 2) + 3 / 5 * flat_gradient(2, 5)
    whole = flat_gradient(0, 5)
    assert (mean - whole).norm() < 1e-5 * whole.norm()


def test_the_same_batch_gives_the_same_bits() -> None:
    output, targets = random_output(5), make_targets(IMAGES)
    first, second = (sign_losses(output, targets, CONFIG) for _ in range(2))
    assert torch.equal(first.total, second.total)
    assert all(map(torch.equal, gradients(first, output), gradients(second, output)))


# --- Classes of background points ---

TAUGHT = replace(CONFIG, num_background_points=6)


def test_the_surest_background_points_are_taught_to_be_of_no_class() -> None:
    output = random_output(1)
    grid = GRID.tolist()
    # Twice as sure as any other: two on the background, one in the ignored region.
    background = [index for index, (x, y, _) in enumerate(grid) if x > 60 and y > 40][:2]
    ignored = next(index for index, (x, y, _) in enumerate(grid) if x < 10 and y < 10)
    with torch.no_grad():
        output.objectness[0, [*background, ignored]] = 10.0
    targets = make_targets([([SIGN], [1])], [[[0.0, 0, 16, 16]]])
    without = gradients(sign_losses(output, targets, CONFIG), output)[1]
    with_them = gradients(sign_losses(output, targets, TAUGHT), output)[1]
    added = with_them - without
    touched = added[0].abs().sum(dim=1).nonzero().squeeze(1).tolist()
    assert len(touched) == 6 and set(background) <= set(touched) and ignored not in touched
    assert (added >= 0).all(), "every class is to fall"
    assert not (without[0].abs().sum(dim=1) > 0)[touched].any(), "a point that answers for a sign is none of them"


def test_background_classes_add_up_over_images_too() -> None:
    output = random_output(3)
    images: list[Image] = [([SIGN], [1]), ([], []), ([SIGN, OTHER], [0, 3])]
    whole = gradients(sign_losses(output, make_targets(images), TAUGHT), output)
    parts = [SignOutput(*(part[i : i + 1].detach().requires_grad_() for part in output)) for i in range(3)]
    alone = [
        gradients(sign_losses(part, make_targets([image]), TAUGHT), part)
        for part, image in zip(parts, images, strict=True)
    ]
    for number, gradient in enumerate(whole):
        torch.testing.assert_close(gradient, torch.cat([rows[number] for rows in alone]) / 3)


def test_an_image_that_is_ignored_as_a_whole_teaches_no_class() -> None:
    output = random_output(1)
    losses = sign_losses(output, make_targets([([], [])], [[[0.0, 0, WIDTH, HEIGHT]]]), TAUGHT)
    assert losses.total.item() == 0 and all((g == 0).all() for g in gradients(losses, output))
