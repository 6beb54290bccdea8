"""The sign detector learns what it is shown, and how fast the small one trains on a processor core."""

from __future__ import annotations

import time
from collections.abc import Iterator

import cv2
import numpy as np
import pytest
import torch

from perception.model_config import SignModelConfig
from perception.models.sign import SignModel, SignOutput
from perception.models.sign_boxes import pairwise_iou
from perception.models.sign_decode import decode_signs
from perception.optimizer import use_bf16
from perception.sign_losses import sign_losses
from perception.sign_targets import SignTargets, pad_targets

SMALL = SignModelConfig(
    backbone_widths=(16, 32, 64, 128),
    backbone_blocks=(1, 1, 1, 1),
    stem="patch",
    neck_channels=32,
    bottom_up=False,
    head_convolutions=1,
    depthwise=True,
)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw_scene(number: int, random: np.random.Generator) -> tuple[np.ndarray, list[list[float]], list[int]]:
    """`number` triangles (0), discs (1) and squares (2) of 8 to 36 pixels apart from each other, on grey noise."""
    height, width = 96, 128
    image = random.integers(90, 130, (height, width, 3), dtype=np.uint8)
    boxes: list[list[float]] = []
    labels: list[int] = []
    while len(boxes) < number:
        side = random.uniform(8, 36)
        x, y = random.uniform(0, width - side), random.uniform(0, height - side)
        if any(x < b[2] + 3 and b[0] < x + side + 3 and y < b[3] + 3 and b[1] < y + side + 3 for b in boxes):
            continue
        label = int(random.integers(3))
        turn = np.linspace(0, 2 * np.pi, 40)
        outline = [
            np.array([[0.5, 0], [1, 1], [0, 1]]),
            0.5 + 0.5 * np.stack([np.cos(turn), np.sin(turn)], axis=1),
            np.array([[0, 0], [1, 0], [1, 1], [0, 1]]),
        ][label]
        corners = np.round((outline * side + [x - 0.5, y - 0.5]) * 16).astype(np.int32)
        colour = [(220, 30, 30), (30, 60, 220), (240, 220, 40)][label]
        cv2.fillPoly(image, [corners], colour, cv2.LINE_AA, 4)
        boxes.append([x, y, x + side, y + side])
        labels.append(label)
    return image, boxes, labels


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_four_images_are_learnt_by_heart() -> None:
    """Every sign is found with an IoU above 0.8 and its class, nothing else is, and the loss is nearly gone."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    scenes = [draw_scene(number, random) for number in (0, 2, 4, 6)]
    images = torch.from_numpy(np.stack([image for image, _, _ in scenes]))
    boxes = [torch.tensor(rows).reshape(-1, 4) for _, rows, _ in scenes]
    labels = [torch.tensor(rows, dtype=torch.int64) for _, _, rows in scenes]
    targets = pad_targets(boxes, labels, [torch.zeros(0, 4)] * 4, 96, 128)
    model = SignModel(SMALL).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=250)
    totals = []
    for _ in range(250):
        optimizer.zero_grad()
        total = sign_losses(model(images), targets, SMALL).total
        total.backward()
        optimizer.step()
        schedule.step()
        totals.append(total.item())
    print(f"loss {totals[0]:.2f} -> {totals[-1]:.3f}")
    assert totals[-1] < 0.03 * totals[0]

    model.eval()
    with torch.no_grad():
        detections = decode_signs(model(images), 96, 128, SMALL)
    for wanted, classes, found in zip(boxes, labels, detections, strict=True):
        # As for average precision 1: the surest detections are the signs, all of them.
        best = found.boxes[: len(wanted)]
        assert len(best) == len(wanted)
        if len(wanted):
            iou, match = pairwise_iou(wanted, best).max(dim=1)
            assert sorted(match.tolist()) == list(range(len(wanted)))
            assert iou.min() > 0.8 and torch.equal(found.labels[match], classes)
            assert found.scores[len(wanted) - 1] > 0.5
        assert (found.scores[len(wanted) :] < 0.5).all()


def random_targets(number: int, batch: int, height: int, width: int) -> SignTargets:
    generator = torch.Generator().manual_seed(0)
    boxes, labels = [], []
    for _ in range(batch):
        corner = torch.rand(number, 2, generator=generator) * torch.tensor([width - 60.0, height - 60.0])
        boxes.append(torch.cat([corner, corner + 10 + 50 * torch.rand(number, 2, generator=generator)], dim=1))
        labels.append(torch.randint(0, SMALL.num_classes, (number,), generator=generator))
    return pad_targets(boxes, labels, [torch.zeros(0, 4)] * batch, height, width)


def seconds_of_steps(number: int, batch: int, height: int, width: int) -> tuple[float, float]:
    """Processor time of a training step, forward and backward, and the loss's part of it: least of several."""
    torch.manual_seed(0)
    model = SignModel(SMALL).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    images = torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8)
    targets = random_targets(number, batch, height, width)
    step, loss = float("inf"), float("inf")
    for _ in range(10):
        start = time.thread_time()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(images)
            sign_losses(output, targets, SMALL).total.backward()
        step = min(step, time.thread_time() - start)
        leaves = SignOutput(*(part.detach().requires_grad_() for part in output))
        start = time.thread_time()
        sign_losses(leaves, targets, SMALL).total.backward()
        loss = min(loss, time.thread_time() - start)
    return step, loss


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not use_bf16("auto", torch.device("cpu")), reason="needs a processor with bfloat16")
def test_the_small_detector_trains_at_25_images_a_second_on_one_core() -> None:
    """At 320x800, batch 4. Processor time, not the clock's: other work on the machine counts less."""
    step, _ = seconds_of_steps(6, 4, 320, 800)
    print(f"{4 / step:.1f} images/s forward and backward at 320x800, batch 4, bf16, one thread")
    assert 4 / step >= 25


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not use_bf16("auto", torch.device("cpu")), reason="needs a processor with bfloat16")
def test_assignment_and_loss_take_less_than_a_tenth_of_a_step() -> None:
    """2 x 33,600 points and 40 signs an image, of the small network, whose steps are short."""
    step, loss = seconds_of_steps(40, 2, 640, 640)
    print(f"loss {1e3 * loss:.1f} ms of a step of {1e3 * step:.1f} ms: {loss / step:.3f}")
    assert loss < 0.1 * step
