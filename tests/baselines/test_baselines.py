"""The peers encode and decode lanes without loss, learn in the project's loop, and are compared by one command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from perception.augment_config import LaneAugmentConfig
from perception.config import RunConfig
from perception.data.lane_targets import LaneBatch, SampleKey
from perception.data.sample import LaneSample, LaneTruth
from perception.tasks import Task
from pipelines.lane import lane_small
from tests.baselines import row_anchor, segmentation
from tests.baselines.__main__ import NAMES, main
from tests.baselines.comparison import Figures, configuration, first_reached, table
from tests.baselines.peers import OURS, PEERS, task_named

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = replace(lane_small(), augment=LaneAugmentConfig(enabled=False))


def drawn_sample(index: int, bottoms: tuple[float, ...]) -> LaneSample:
    """Lanes that run from the bottom of an 800 x 320 image towards a vanishing point, on grey."""
    image = np.full((320, 800, 3), 80, np.uint8)
    y = np.arange(319.0, 125, -4)
    share = (319 - y) / (319 - 110)
    lanes = tuple(np.stack([bottom + (400 - bottom) * share, y], axis=1) for bottom in bottoms)
    lanes = tuple(lane[(lane[:, 0] >= 0) & (lane[:, 0] <= 799)] for lane in lanes)
    for lane in lanes:
        cv2.polylines(image, [lane.round().astype(np.int32)], False, (255, 255, 255), 5)
    return LaneSample(image, LaneTruth(f"drawn-{index}", 320, 800, lanes, h_samples=tuple(range(124, 320, 4))))


SAMPLES = [
    drawn_sample(0, (-150.0, 120.0, 520.0, 900.0)),
    drawn_sample(1, ()),
    drawn_sample(2, (300.0, 640.0)),
    drawn_sample(3, (60.0, 330.0, 470.0)),
]


def batch_of(task: Task, samples: list[LaneSample] = SAMPLES) -> LaneBatch:
    batch = task.collate([task.prepare(sample, SampleKey(0, i), train=False) for i, sample in enumerate(samples)])
    assert isinstance(batch, LaneBatch)
    return batch


def perfect_row_anchor(batch: LaneBatch) -> torch.Tensor:
    """Logits whose mean place is the lane's to a small part of a cell."""
    places, there = row_anchor.targets(batch)
    centres = torch.arange(row_anchor.NUM_CELLS) + 0.5
    cells = -8 * (centres - places[..., None]).square()
    cells = torch.where(there[..., None], cells, -50.0)
    return torch.cat([cells, torch.where(there, -50.0, 0.0)[..., None]], dim=-1)


def perfect_segmentation(batch: LaneBatch) -> segmentation.SegmentationOutput:
    lanes = segmentation.lane_map(batch)
    vectors = torch.zeros(len(lanes), 4, *lanes.shape[1:])
    for lane in range(int(lanes.max()) + 1):
        vectors[:, lane % 4] += 6.0 * (1 + lane // 4) * (lanes == lane)
    return segmentation.SegmentationOutput(torch.where(lanes >= 0, 5.0, -5.0), vectors)


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_perfect_output_scores_fully(name: str) -> None:
    """Through targets, decoding and the official metrics, in original pixels."""
    task = task_named(name, replace(SMALL, name=name))
    batch = batch_of(task)
    output = perfect_row_anchor(batch) if name == "row-anchor" else perfect_segmentation(batch)
    predictions = PEERS[name].decode(output, batch.geometries, lane_small().model)
    assert [len(prediction.lanes) for prediction in predictions] == [4, 0, 2, 3]
    metric = task.metric()
    metric.update(predictions, batch.truths)
    figures = metric.compute()
    assert figures["culane_f1_50"] == 1.0 and figures["culane_f1_75"] == 1.0


@pytest.mark.parametrize("name", sorted(PEERS))
def test_the_loss_is_least_where_the_output_is_right(name: str) -> None:
    task = task_named(name, replace(SMALL, name=name))
    batch = batch_of(task)
    perfect = perfect_row_anchor(batch) if name == "row-anchor" else perfect_segmentation(batch)
    right = PEERS[name].loss(perfect, batch, lane_small().model)
    others = (batch.xs + 80, batch.xs.flip(0))
    for xs in others:
        wrong = PEERS[name].loss(perfect, replace(batch, xs=xs), lane_small().model)
        first = next(iter(right.terms))
        assert float(right.terms[first]) < 0.5 * float(wrong.terms[first])


def test_lanes_beyond_the_slots_are_counted() -> None:
    task = task_named("row-anchor", replace(SMALL, name="row-anchor"))
    crowded = batch_of(task, [drawn_sample(0, (20.0, 80.0, 140.0, 200.0, 260.0, 320.0, 600.0)), SAMPLES[1]])
    slots, num_lost = row_anchor.lane_slots(crowded)
    assert num_lost == crowded.num_left_out == 2
    # From the middle outwards: the two leftmost lanes are those without a slot.
    assert slots[0].tolist() == [2, 3, 4, 5, 6, -1, -1, -1] and (slots[1] == -1).all()
    assert batch_of(task).num_left_out == 0


def test_clusters_part_what_lies_apart_and_pass_over_specks() -> None:
    rng = np.random.default_rng(0)
    sizes = (40, 25, 3)
    vectors = np.concatenate([rng.normal(6 * i, 0.2, (size, 4)) for i, size in enumerate(sizes)]).astype(np.float32)
    groups = segmentation.clusters(np.linspace(0.9, 0.6, len(vectors)).astype(np.float32), vectors, 8)
    assert [sorted(group.tolist()) for group in groups] == [list(range(40)), list(range(40, 65))]
    assert len(segmentation.clusters(np.ones(65, np.float32), vectors[:65], 1)) == 1


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small work more threads are slower, by far where others are at work too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_peer_learns_drawn_lanes(name: str, one_thread: None) -> None:
    torch.manual_seed(0)
    model_config = replace(SMALL.model, input_height=96, input_width=256, backbone_blocks=(1, 1, 1, 1))
    config = replace(SMALL, name=name, model=replace(model_config, backbone_widths=(16, 32, 48, 64)))
    task = task_named(name, config)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batch = batch_of(task)
    for _ in range(120):
        optimizer.zero_grad()
        task.loss(model, batch).total.backward()
        optimizer.step()
    metric = task.metric()
    metric.update(task.predict(model.eval(), batch), batch.truths)
    assert metric.compute()["culane_f1_50"] > 0.8


def test_all_train_alike() -> None:
    """The same settings but for the name; samples, evaluations and batch are those that were asked for."""
    configs = [configuration(name, 1200, ["train.seed=3"]) for name in NAMES]
    assert all(replace(config, name=OURS) == configs[0] for config in configs)
    train = configs[0].train
    assert (train.num_samples, train.batch_size_per_rank, train.evaluate_every_steps, train.seed) == (1200, 8, 10, 3)


def test_the_first_evaluation_that_reaches_the_target_counts(tmp_path: Path) -> None:
    rows = [(10, 0.69), (20, 0.7), (30, 0.9)]
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 2.0}]
    lines += [{"step": s, "seconds": s / 2, "samples": 8 * s, "validation/culane_f1_50": f1} for s, f1 in rows]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert first_reached(file) == (10.0, 160)
    file.write_text(json.dumps(lines[1]) + "\n")
    assert first_reached(file) == (None, None)


def test_the_table_says_what_was_not_reached() -> None:
    metrics = {"culane_f1_50": 0.5, "culane_f1_75": 0.2, "tusimple_accuracy": 0.8}
    one = Figures("row-anchor", 5_400_000, 12_000, 200.0, metrics, None, None, 60.0, 90.0)
    two = replace(one, name="x", target_seconds=101.4, target_samples=7200)
    lines = table([one, two])
    assert lines[2] == "| row-anchor | 0.500 | 0.200 | 0.800 | not reached | 60 | 90 | 5.40 M |"
    assert "| 101 (7200) |" in lines[3]


@pytest.mark.slow
def test_one_command_trains_and_compares_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [
        "data.num_train_scenes=8", "data.num_validation_scenes=4", f"data.cache_folder={tmp_path / 'cache'}",
        "data.scene_height=64", "data.scene_width=160", "model.input_height=64", "model.input_width=160",
        "train.num_threads_per_rank=1",
    ]  # fmt: skip
    arguments = ["train", "--out", str(tmp_path / "out"), "--samples", "64"]
    command = [sys.executable, "-m", "tests.baselines", *arguments, *(f"--set={text}" for text in sets)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["name"] for row in found] == list(NAMES)
    assert [line.split(" | ")[0] for line in lines[-3:]] == [f"| {name}" for name in NAMES]
    for row in found:
        assert row["samples"] == 64 and row["num_parameters"] > 1e5 and row["seconds"] > 0
        assert row["training_images_per_second"] > 0 and row["predicted_images_per_second"] > 0
        assert 0 <= row["metrics"]["culane_f1_50"] <= 1
        evaluations = (tmp_path / "out" / row["name"] / "metrics.jsonl").read_text().count('"validation/culane_f1_50":')
        assert evaluations == 8
    # A folder that holds runs is refused, in a line that says so.
    assert main([*arguments, OURS]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_mistakes_are_one_line_and_help_needs_no_torch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "row-ancor", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == 'network "row-ancor" is unknown; did you mean "row-anchor"?\n'
    program = (
        "import sys; from tests.baselines.__main__ import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, timeout=60, check=True)
    assert set(NAMES) == {OURS, *PEERS}


def test_peers_are_of_the_size_that_is_told() -> None:
    config: RunConfig = lane_small()
    sizes = {name: sum(p.numel() for p in task_named(name, config).build_model().parameters()) for name in NAMES}
    assert 1.2e6 < sizes[OURS] < 1.4e6
    assert sizes["segmentation"] < sizes[OURS] < sizes["row-anchor"]
