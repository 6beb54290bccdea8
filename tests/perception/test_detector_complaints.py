"""What users of other lane and sign detectors complain of, and no other test is about: it does not happen here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import albumentations
import numpy as np
import pytest
import torch

from perception.augment_config import LaneAugmentConfig, SignAugmentConfig
from perception.config import override
from perception.data.augment import LaneAugmenter
from perception.data.lane_targets import SampleKey
from perception.data.sample import Lane, LaneSample, LaneTruth
from perception.data.signs.augment import SignAugmenter
from perception.data.tusimple import TusimpleDataset
from perception.models.lane import LaneOutput
from perception.models.sign_decode import suppress
from perception.optimizer import build_optimizer
from perception.run_model import RunModel, load_trained
from perception.tasks import LaneTask
from pipelines.configs import named_config
from tests.exported_models import CONFIG, MODEL, make_run

HEIGHT, WIDTH = 128, 320


def fan(num_lanes: int) -> list[Lane]:
    """Lanes far enough apart that none is a duplicate of its neighbour, from the bottom up."""
    y = np.arange(HEIGHT - 1.0, 30, -8)
    places = np.linspace(15, WIDTH - 16, num_lanes) if num_lanes else []
    return [np.stack([x + (WIDTH / 2 - x) * 0.2 * (HEIGHT - y) / HEIGHT, y], axis=1) for x in places]


@pytest.mark.parametrize("num_lanes", [0, 1, 2, 4, 5, 8])
def test_any_number_of_lanes_goes_from_the_label_to_the_prediction(num_lanes: int, tmp_path: Path) -> None:
    """Fixed slots drop a lane, or fail at another count: here labels, targets, losses and decoding know none."""
    rows = list(range(40, HEIGHT, 8))
    xs = [np.interp(rows, lane[::-1, 1], lane[::-1, 0]).tolist() for lane in fan(num_lanes)]
    label = {"raw_file": "a.png", "lanes": [[round(x, 2) for x in lane] for lane in xs], "h_samples": rows}
    (tmp_path / "label_data_1.json").write_text(json.dumps(label) + "\n")
    dataset = TusimpleDataset(tmp_path, [tmp_path / "label_data_1.json"], images_required=False)
    lanes = dataset.truth(0).lanes
    assert len(lanes) == num_lanes

    config = replace(CONFIG, model=replace(MODEL, max_lanes=max(num_lanes, 3), nms_distance_pixels=4))
    task = LaneTask(config)
    sample = LaneSample(np.zeros((HEIGHT, WIDTH, 3), np.uint8), LaneTruth("a", HEIGHT, WIDTH, lanes))
    other = LaneSample(sample.image, LaneTruth("b", HEIGHT, WIDTH, tuple(fan(3))))
    batch = task.collate([task.prepare(each, SampleKey(0, 0), train=False) for each in (sample, other)])
    assert batch.present.sum(dim=1).tolist() == [num_lanes, 3]
    model = task.build_model()
    assert torch.isfinite(task.loss(model, batch).total)

    logits = torch.where(batch.present, 9.0, -9.0)
    angles = torch.zeros(2, 1, 1)
    perfect = LaneOutput(logits, batch.xs, batch.start, batch.length, (angles, angles, angles))
    found = task.decode(perfect, batch.geometries)
    assert [len(prediction.lanes) for prediction in found] == [num_lanes, 3]
    metric = task.metric()
    metric.update(found, [sample.truth, other.truth])
    assert metric.compute()["culane_f1_50"] == 1.0


def test_crop_and_size_are_the_checkpoints_whatever_lies_beside_it(tmp_path: Path) -> None:
    """A model used with another data set's settings shifts its lanes: what it was trained with is in the checkpoint."""
    run = make_run(tmp_path / "run", replace(CONFIG, model=replace(MODEL, crop_top_fraction=0.25)))
    image = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)

    def lanes() -> list[Lane]:
        predictor = RunModel(load_trained(run), device="cpu")
        predictions, _ = predictor.predict([predictor.prepare(image, "a")])
        return list(predictions[0].lanes)

    expected = lanes()
    edited = json.loads((run / "config.json").read_text())
    edited["model"].update(crop_top_fraction=0.0, input_height=96, input_width=256)
    (run / "config.json").write_text(json.dumps(edited))
    assert expected, "a model without lanes shows nothing"
    for mine, theirs in zip(lanes(), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_points_that_an_augmentation_drops_are_noticed_at_once() -> None:
    """Some versions drop points under holes or outside, although all are to stay: lanes would be cut without a word."""
    augment = LaneAugmenter(LaneAugmentConfig(), seed=0)
    crop = albumentations.CenterCrop(HEIGHT // 2, WIDTH // 2)
    parameters = albumentations.KeypointParams(format="xy", label_fields=["lane_ids"], remove_invisible=True)
    augment.compose = albumentations.Compose([crop], keypoint_params=parameters)
    with pytest.raises(RuntimeError, match="albumentations dropped or reordered points of lanes"):
        augment(np.zeros((HEIGHT, WIDTH, 3), np.uint8), fan(4), 0, 0)


def test_no_transform_of_ours_can_drop_points() -> None:
    names = {type(transform).__name__ for transform in LaneAugmenter(LaneAugmentConfig(), seed=0).compose.transforms}
    assert names and not {name for name in names if "Dropout" in name or "Crop" in name or "Erasing" in name}


def test_the_highest_visibility_keeps_whole_signs() -> None:
    """With min_visibility = 1.0 others drop boxes that lie in the picture as a whole, for a rounding error."""
    config = SignAugmentConfig(min_visibility=1.0, min_side_pixels=0)
    augment = SignAugmenter(config, 96, 128, ("stop",), {}, 0)
    random = np.random.default_rng(0)
    corners = random.uniform(0, [100, 70], (200, 2))
    boxes = np.concatenate([corners, corners + random.uniform(3, 26, (200, 2))], axis=1)
    # Edges as scaling leaves them, some past the picture by a rounding error.
    boxes = np.concatenate([boxes * 1.1 / 1.1, [[0 - 1e-13, 0, 128 + 1e-13, 96]]])
    settled = augment.settle(np.zeros((96, 128, 3), np.uint8), boxes, np.zeros(201, int), np.zeros((0, 4)))
    assert len(settled.boxes) == 201 and settled.num_left_out == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_duplicates_are_suppressed_whatever_the_precision_of_the_boxes(dtype: torch.dtype) -> None:
    """In half precision the area of a box of a few hundred pixels is infinite, and no IoU above any threshold."""
    boxes = torch.tensor([[1000.0, 400, 1400, 800], [1001, 401, 1400, 800], [10, 10, 500, 500]], dtype=dtype)
    scores = torch.tensor([0.9, 0.8, 0.7], dtype=dtype)
    assert suppress(boxes, scores, torch.zeros(3, dtype=torch.long), 0.65).tolist() == [0, 2]


@pytest.mark.parametrize("name", ["adamw", "lamb", "lars"])
def test_every_optimizer_takes_the_learning_rate_that_is_set(name: str) -> None:
    """An automatic choice of optimizer that ignores the tuned rate loses a search its point."""
    config = override(named_config("lane-small"), [f"optim.name={name}", "optim.lr=0.0123"])
    optimizer = build_optimizer(config, torch.nn.Linear(3, 3), torch.device("cpu"))
    assert {group["lr"] for group in optimizer.param_groups} == {0.0123}
