"""`predict` as a person runs it: from an exported file and from a run folder, with its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from perception.augment_config import SignAugmentConfig
from perception.config import RunConfig
from perception.data.generated import render_scene
from perception.data.lane_targets import SampleKey
from perception.data.sample import ReadReport
from perception.data.tusimple import read_tusimple_file
from perception.draw import write_image
from perception.errors import UserError
from perception.metrics.culane import CulaneMetric
from perception.model_config import SignModelConfig
from perception.run_model import load_trained
from perception.video import VideoWriter
from pipelines.__main__ import main
from pipelines.predict import predict
from tests.exported_models import NEEDS_EXPORT, make_run, stub_file
from tests.pipelines.test_main import watched

pytestmark = NEEDS_EXPORT


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(3):
        write_image(folder / f"{index}.png", render_scene(0, index, 118, 328).image)
    return folder


@pytest.mark.parametrize("command", ["predict", "export", "trace"])
def test_help_answers_at_once_without_torch(command: str) -> None:
    code, out, errors, _ = watched(command, "--help")
    assert (code, errors) == (0, "imported:\n") and "usage: python -m pipelines" in out


def test_an_exported_file_predicts_without_torch(images: Path, tmp_path: Path) -> None:
    model = stub_file(tmp_path / "m.onnx")
    code, out, errors, _ = watched("predict", str(model), str(images), "--out", str(tmp_path / "out"))
    assert code == 0 and "torch" not in errors, errors
    assert "3 images, 6 lanes, 0 images without" in out and "images/s: waiting for reading and resizing " in out
    assert len(list((tmp_path / "out").glob("*.lines.txt"))) == 3
    assert len(list((tmp_path / "out/drawings").glob("*.jpg"))) == 3


@pytest.mark.slow
def test_files_of_a_run_folder_score_as_its_task_does(images: Path, tmp_path: Path) -> None:
    """What `evaluate` says of the files is what the training loop says of the model."""
    run, out, labels = make_run(tmp_path / "run"), tmp_path / "out", tmp_path / "labels"
    predict(run, images, out, drawings=False, batch=2)
    trained = load_trained(run)
    metric = CulaneMetric()
    labels.mkdir()
    for index in range(3):
        sample = render_scene(0, index, 118, 328)
        batch = trained.task.collate([trained.task.prepare(sample, SampleKey(0, 0), train=False)])
        metric.update(trained.task.predict(trained.model, batch), [sample.truth])
        lines = [" ".join(f"{x} {y}" for x, y in lane) for lane in sample.truth.lanes]
        (labels / f"{index}.lines.txt").write_text("".join(line + "\n" for line in lines))
    expected = metric.compute()
    figures = tmp_path / "figures.json"
    words = ["--predictions", str(out), "--labels", str(labels), "--metric", "culane", "--json", str(figures)]
    assert main(["evaluate", "lane", *words, "--image-size", "328x118"]) == 0
    found = json.loads(figures.read_text())
    assert expected["fp"] + expected["tp"] > 0
    assert {name: found[name] for name in ("tp", "fp", "fn")} == {name: expected[name] for name in ("tp", "fp", "fn")}


def test_signs_of_a_run_folder_are_coco_results_and_drawings(images: Path, tmp_path: Path) -> None:
    model = SignModelConfig(
        num_classes=2,
        class_names=("stop", "give-way"),
        backbone_widths=(8, 8, 16, 16),
        backbone_blocks=(1, 1, 1, 1),
        neck_channels=8,
        input_height=64,
        input_width=64,
        # Nothing is below it: an untrained network is sure of nothing.
        score_threshold=0.0,
    )
    config = RunConfig(task="sign", name="tiny-sign", model=model, augment=SignAugmentConfig())
    out = tmp_path / "out"
    report = predict(make_run(tmp_path / "run", config), images, out, batch=2)
    results = json.loads((out / "results.json").read_text())
    told = json.loads((out / "images.json").read_text())
    assert [image["file_name"] for image in told["images"]] == ["0.png", "1.png", "2.png"]
    assert [category["name"] for category in told["categories"]] == ["stop", "give-way"]
    assert len(results) > 0 and report.num_objects == sum(result["score"] >= 0.3 for result in results)
    assert report.seconds["network"] > 0
    for result in results:
        x, y, width, height = result["bbox"]
        assert result["image_id"] in (1, 2, 3) and result["category_id"] in (1, 2) and 0 <= result["score"] <= 1
        assert 0 <= x < x + width <= 328.001 and 0 <= y < y + height <= 118.001
    assert len(list((out / "drawings").iterdir())) == 3


def test_lanes_beyond_max_lanes_are_counted_and_told_once(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = predict(stub_file(tmp_path / "m.onnx", max_lanes=1), images, tmp_path / "out", drawings=False)
    assert (report.num_objects, report.num_left_out) == (3, 3)
    told = "note: 3 lanes left out, beyond the surest that model.max_lanes allows an image: train with a greater one"
    assert capsys.readouterr().out.splitlines().count(told) == 1
    predict(stub_file(tmp_path / "m.onnx"), images, tmp_path / "all", drawings=False)
    assert "left out" not in capsys.readouterr().out


def test_a_tusimple_list_makes_a_tusimple_file(images: Path, tmp_path: Path) -> None:
    line = {"raw_file": "1.png", "lanes": [], "h_samples": [60, 80, 100]}
    (images / "tasks.json").write_text(json.dumps(line) + "\n")
    report = predict(stub_file(tmp_path / "m.onnx"), images / "tasks.json", tmp_path / "out", drawings=False)
    (record,) = read_tusimple_file(tmp_path / "out/predictions.json", ReadReport())
    assert (record.raw_file, record.h_samples, report.num_objects) == ("1.png", (60, 80, 100), 2)


def test_one_unreadable_image_of_several_is_exit_code_2(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (images / "1.png").write_bytes((images / "1.png").read_bytes()[:100])
    model, out = str(stub_file(tmp_path / "m.onnx")), tmp_path / "out"
    assert main(["predict", model, str(images), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert "1.png: image cannot be decoded" in printed.out and "2 of 3 images" in printed.out
    assert printed.err == "error: 1 images could not be read, see above\n"
    with pytest.raises(UserError, match=r"1\.png: image cannot be decoded"):
        main(["predict", model, str(images / "1.png"), "--out", str(tmp_path / "one")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone.onnx", "images"], "gone.onnx: no such exported file"),
        (["gone", "images"], "gone: no such run folder, checkpoint or exported file"),
        (["m.onnx", "gone"], "gone: no such image, folder, list or video"),
        (["m.onnx", "images", "--out", "images"], "--out images: is there already and not an empty folder"),
        (["m.onnx", "images", "--format", "coco"], '--format "coco" is not for a lane model'),
        (["m.onnx", "images", "--format", "culan"], 'did you mean "culane"?'),
        (["m.onnx", "images", "--batch", "3"], "--batch 3: m.onnx was exported for 2"),
        (["m.onnx", "images", "--batch", "0"], "--batch 0: must be 1 or more"),
        (["m.onnx", "images", "--follow"], "--follow: goes with a lane model and a video"),
        (["m.onnx", "images", "--threads", "-1"], "--threads -1: must be 0 or more"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    words: list[str], message: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stub_file(tmp_path / "m.onnx", batch=2)
    with pytest.raises(UserError) as error:
        main(["predict", *words])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "m.onnx"]


def test_without_out_the_folder_is_named_after_the_input(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    predict(stub_file(tmp_path / "m.onnx"), images / "0.png", drawings=False)
    (folder,) = (tmp_path / "predictions").iterdir()
    assert folder.name.startswith("0-") and (folder / "0.lines.txt").is_file()


def test_lanes_of_a_video_are_followed_when_asked_for(tmp_path: Path) -> None:
    model, source = stub_file(tmp_path / "m.onnx"), tmp_path / "v.mp4"
    writer = VideoWriter(source, 72, 128, 20.0)
    for _ in range(5):
        writer.write(np.full((72, 128, 3), 90, np.uint8))
    writer.finish()
    predict(model, source, tmp_path / "plain")
    predict(model, source, tmp_path / "followed", follow=True)
    lines = [json.loads(line) for line in (tmp_path / "followed/identities.json").read_text().splitlines()]
    assert lines == [{"frame": f"v.mp4/{number:05d}.jpg", "lanes": [1, 2]} for number in range(5)]
    names = {folder: sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("plain", "followed")}
    assert names["followed"] == sorted([*names["plain"], "identities.json"])
    # What stands still is where it was.
    for path in (tmp_path / "plain/v.mp4").iterdir():
        assert path.read_bytes() == (tmp_path / "followed/v.mp4" / path.name).read_bytes()


@pytest.mark.parametrize("kind", ["tusimple_mini/label_data_0601.json", "culane_mini/list/train.txt"])
def test_real_frames_of_both_data_sets(kind: str, tmp_path: Path) -> None:
    """Any input size: 1280x720 and 1640x590 go through a model for 160x64."""
    from tests.ranks import ROOT

    data = ROOT.parent / "shared/data" / kind
    if not data.exists():
        pytest.skip(f"{data} is not there")
    report = predict(stub_file(tmp_path / "m.onnx"), data, tmp_path / "out")
    assert report.num_images in (6, 10) and not report.problems
    assert np.isclose(sum(report.seconds.values()), report.num_images / report.images_per_second)
