"""LaneTask from sample to metric, and that it learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from perception.augment_config import LaneAugmentConfig
from perception.config import OptimConfig, RunConfig
from perception.data.lane_targets import SampleKey
from perception.data.sample import Lane, LanePrediction, LaneSample, LaneTruth, ReadReport
from perception.errors import UserError
from perception.model_config import LaneModelConfig
from perception.models.lane import LaneOutput
from perception.tasks import LaneMetric, LaneTask, task_for
from pipelines.lane import CONFIGS

TINY = RunConfig(
    task="lane",
    name="tiny",
    model=LaneModelConfig(
        backbone_widths=(8, 16, 24, 32),
        backbone_blocks=(1, 1, 1, 1),
        stem="patch",
        input_height=64,
        input_width=160,
        neck_channels=16,
    ),
)


def drawn_sample(index: int, num_lanes: int = 3) -> LaneSample:
    """Straight white lanes on grey, 128 x 320."""
    rng = np.random.default_rng(index)
    image = np.full((128, 320, 3), 80, np.uint8)
    lanes: list[Lane] = []
    y = np.arange(127.0, 40, -8)
    for lane in range(num_lanes):
        x = 40 + 90 * lane + rng.uniform(-15, 15) + (127 - y) * rng.uniform(-0.6, 0.6)
        lanes.append(np.stack([x, y], axis=1))
        cv2.polylines(image, [lanes[-1].round().astype(np.int32)], False, (255, 255, 255), 4)
    return LaneSample(image, LaneTruth(f"drawn-{index}", 128, 320, tuple(lanes), h_samples=tuple(range(40, 128, 8))))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_configuration_builds_its_model(name: str) -> None:
    config = CONFIGS[name]()
    assert config.name == name and config.task == "lane"
    task = task_for(config)
    assert sum(parameter.numel() for parameter in task.build_model().parameters()) > 1e5
    assert task.primary_metric == "culane_f1_50"


def test_unknown_task_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match=r'task = "lan" is unknown.*"lane"'):
        task_for(replace(TINY, task="lan"))


def test_prepare_fits_the_input_and_keeps_the_truth() -> None:
    task, sample = LaneTask(TINY), drawn_sample(0)
    plain = task.prepare(sample, SampleKey(0, 0), train=False)
    assert plain.image.shape == (64, 160, 3) and len(plain.targets.xs) == 3
    assert plain.truth is sample.truth
    augmented = [task.prepare(sample, SampleKey(0, index), train=True).image for index in range(4)]
    assert any((image != plain.image).any() for image in augmented)
    np.testing.assert_array_equal(task.prepare(sample, SampleKey(0, 2), train=True).image, augmented[2])
    off = LaneTask(replace(TINY, augment=LaneAugmentConfig(enabled=False)))
    np.testing.assert_array_equal(off.prepare(sample, SampleKey(0, 2), train=True).image, plain.image)


def test_lanes_beyond_max_lanes_are_told_of_labels_and_counted_in_predictions() -> None:
    task = LaneTask(replace(TINY, model=replace(TINY.model, max_lanes=3)))
    report = ReadReport()
    report.count_lanes([0, 3, 3, 5, 4])
    assert task.objects(report) == (
        "15 lanes, 3 of them beyond model.max_lanes = 3 in 2 images: raise it, or predictions will leave as many out"
    )
    report.count_lanes([3, 2])
    assert task.objects(report) == "5 lanes"
    metric, other = task.metric(), task.metric()
    truth = LaneTruth("x", 128, 320, ())
    metric.update([LanePrediction((), (), num_left_out=2)], [truth])
    other.update([LanePrediction((), (), num_left_out=1), LanePrediction((), ())], [truth, truth])
    metric.merge(other.counts())
    assert metric.compute()["lanes_beyond_max_lanes"] == 3
    clean = task.metric()
    clean.update([LanePrediction((), ())], [truth])
    assert "lanes_beyond_max_lanes" not in clean.compute()


def test_crop_cuts_the_top() -> None:
    task = LaneTask(replace(TINY, model=replace(TINY.model, crop_top_fraction=0.5)))
    sample = drawn_sample(0)
    example = task.prepare(sample, SampleKey(0, 0), train=False)
    expected = cv2.resize(sample.image[64:], (160, 64), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_array_equal(example.image, expected)


def output_for(task: LaneTask, samples: list[LaneSample], copies: int = 1) -> tuple[LaneOutput, object]:
    """What a perfect network would say, each lane said `copies` times."""
    batch = task.collate([task.prepare(sample, SampleKey(0, 0), train=False) for sample in samples])

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(copies, dim=1)

    logits = torch.where(batch.present, 4.0, -4.0)
    output = LaneOutput(repeat(logits), repeat(batch.xs), repeat(batch.start), repeat(batch.length), batch.angles)  # type: ignore[arg-type]
    return output, batch


@pytest.mark.parametrize("copies", [1, 3])
def test_perfect_output_gets_a_perfect_score(copies: int) -> None:
    """In original pixels, through the metrics, duplicates suppressed."""
    task = LaneTask(TINY)
    samples = [drawn_sample(0), drawn_sample(1, 0), drawn_sample(2, 2)]
    output, batch = output_for(task, samples, copies)
    predictions = task.decode(output, batch.geometries)
    assert [len(prediction.lanes) for prediction in predictions] == [3, 0, 2]
    metric = task.metric()
    metric.update(predictions, batch.truths)
    results = metric.compute()
    # TuSimple's accuracy of an image without lanes is 0, whatever is predicted.
    assert results["culane_f1_50"] == 1.0 and results["tusimple_accuracy"] > 0.99 * 2 / 3


def test_decoding_keeps_the_best_lanes_in_order() -> None:
    task = LaneTask(replace(TINY, model=replace(TINY.model, max_lanes=2)))
    truth = drawn_sample(0).truth
    output, batch = output_for(task, [drawn_sample(0)])
    output = output._replace(logits=torch.tensor([[0.1, 3.0, 1.0]]))
    (prediction,) = task.decode(output, batch.geometries)
    assert len(prediction.lanes) == 2 and prediction.scores[0] > prediction.scores[1] > 0.7
    best, middle = (np.interp(100, lane[::-1, 1], lane[::-1, 0]) for lane in (prediction.lanes[0], truth.lanes[1]))
    assert abs(best - middle) < 2


def test_untrained_network_predicts_without_failing() -> None:
    task = LaneTask(TINY)
    model = task.build_model().eval()
    batch = task.collate([task.prepare(drawn_sample(i), SampleKey(0, i), train=False) for i in range(2)])
    predictions = task.predict(model, batch)
    assert len(predictions) == 2
    assert all(len(lane) >= 2 and np.isfinite(lane).all() for p in predictions for lane in p.lanes)


def test_metric_merges_to_what_one_metric_gives() -> None:
    truth = drawn_sample(0).truth
    found = LanePrediction(truth.lanes[:2], (0.9, 0.8))
    nothing = LanePrediction((), ())
    whole = LaneMetric()
    whole.update([found, nothing], [truth, truth])
    first, second = LaneMetric(), LaneMetric()
    first.update([found], [truth])
    second.update([nothing], [truth])
    first.merge(second.counts())
    assert first.compute() == whole.compute()
    assert 0 < whole.compute()["culane_f1_50"] < 1


def test_images_of_a_benchmark_are_scored_by_its_metric_too() -> None:
    truths = [replace(drawn_sample(number).truth, benchmark=name) for number, name in ((0, "openlane"), (1, None))]
    whole, merged = LaneMetric(), LaneMetric()
    whole.update([LanePrediction(truths[0].lanes, (0.9,) * len(truths[0].lanes)), LanePrediction((), ())], truths)
    merged.merge(whole.counts())
    figures = merged.compute()
    assert figures == whole.compute() and figures["openlane_f1_30"] == 1.0
    assert figures["culane_f1_50"] < 1 and "llamas_f1_50" not in figures


@pytest.mark.slow
def test_a_tiny_network_learns_drawn_lanes() -> None:
    torch.manual_seed(0)
    config = replace(TINY, optim=OptimConfig(lr=2e-3), augment=LaneAugmentConfig(enabled=False))
    task = LaneTask(config)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    examples = [task.prepare(drawn_sample(i), SampleKey(0, i), train=True) for i in range(16)]
    batch = task.collate(examples)
    totals = []
    for _ in range(300):
        optimizer.zero_grad()
        losses = task.loss(model, batch)
        losses.total.backward()
        optimizer.step()
        totals.append(float(losses.total.detach()))
    assert totals[-1] < 0.3 * totals[0]
    metric = task.metric()
    metric.update(task.predict(model.eval(), batch), batch.truths)
    assert metric.compute()["culane_f1_50"] > 0.9


REAL = Path(__file__).parents[2] / ".." / "shared" / "data" / "tusimple_mini"


@pytest.mark.skipif(not REAL.is_dir(), reason="real TuSimple frames are not at ../shared/data")
def test_real_frames_go_through_and_perfect_output_scores_fully() -> None:
    model = replace(CONFIGS["lane"]().model, crop_top_fraction=160 / 720, extend_to_bottom=False)
    task = LaneTask(replace(CONFIGS["lane"](), model=model))
    samples = []
    for path in sorted(REAL.glob("*.json")):
        for line in path.read_text().splitlines():
            label = json.loads(line)
            file = REAL / label["raw_file"]
            file = file if file.exists() else file.with_suffix(".png")
            image = np.ascontiguousarray(cv2.imread(str(file))[:, :, ::-1])
            rows = np.asarray(label["h_samples"], dtype=float)
            xs = np.asarray(label["lanes"], dtype=float)
            lanes = tuple(np.stack([x, rows], axis=1)[x >= 0][::-1] for x in xs if (x >= 0).sum() > 1)
            truth = LaneTruth(label["raw_file"], *image.shape[:2], lanes, tuple(label["h_samples"]))
            samples.append(LaneSample(image, truth))
    assert samples
    output, batch = output_for(task, samples)
    metric = task.metric()
    metric.update(task.decode(output, batch.geometries), batch.truths)
    assert metric.compute()["tusimple_accuracy"] > 0.995
