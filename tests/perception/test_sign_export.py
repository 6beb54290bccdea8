"""Export of signs: the file gives torch's signs, of any size, and predicts, draws and follows a video without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from perception import export
from perception.data.generated import render_sign_scene
from perception.data.signs.sample import SignPrediction
from perception.draw import write_image
from perception.errors import UserError
from perception.export import ExportOptions, check_files, export_graph, export_model
from perception.export_checks import SignChecks, sign_differences
from perception.onnx_model import OnnxModel
from perception.provenance import card_path, read_record, record_path, verify
from perception.run_model import RunModel, load_trained
from perception.video import VideoReader, VideoWriter
from pipelines.__main__ import main
from pipelines.predict import predict
from tests.exported_models import NEEDS_EXPORT, make_run, onnx
from tests.exported_signs import CONFIG, MODEL, make_sign_run, sign_stub_file
from tests.pipelines.test_main import watched

pytestmark = NEEDS_EXPORT

FEW = ExportOptions(batch=None, num_check_scenes=4, num_calibration_scenes=3, num_threads=1)


def scene(*squares: tuple[int, int], height: int = 64, width: int = 96) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Black, with a bright red square of 16 pixels at each (x, y): what `sign_stub_file` finds."""
    image = np.zeros((height, width, 3), np.uint8)
    for x, y in squares:
        image[y : y + 16, x : x + 16] = (255, 0, 0)
    return image


def boxes_of(prediction: Any) -> list[list[float]]:
    assert isinstance(prediction, SignPrediction)
    return sorted(prediction.boxes[prediction.scores >= 0.5].tolist())


# --- What runs around a file ---


def test_signs_of_images_of_any_size_are_in_their_pixels(tmp_path: Path) -> None:
    model = OnnxModel(sign_stub_file(tmp_path / "m.onnx"))
    assert model.classes == ("stop", "give-way") and model.fixed_batch is None and model.fixed_size is None
    images = [
        scene((16, 32), (64, 0)),
        scene((0, 0), height=50, width=200),
        scene(),
        scene((192, 32), height=48, width=208),
    ]
    predictions, seconds = model.predict([model.prepare(image, "a.jpg") for image in images])
    assert [boxes_of(prediction) for prediction in predictions] == [
        [[16, 32, 32, 48], [64, 0, 80, 16]],
        [[0, 0, 16, 16]],
        [],
        [[192, 32, 208, 48]],
    ]
    assert seconds > 0 and predictions[0].labels.tolist()[:2] == [0, 0]
    assert predictions[0].scores[0] == pytest.approx(1 / (1 + np.exp(-2.546)), abs=1e-3)


@pytest.mark.parametrize("batch", [None, 1, 2, 3])
def test_any_number_of_images_goes_through_any_batch(batch: int | None, tmp_path: Path) -> None:
    model = OnnxModel(sign_stub_file(tmp_path / "m.onnx", batch))
    places = [(0, 0), (16, 16), (32, 0), (0, 16), (80, 48)]
    prepared = [model.prepare(scene(place), "a") for place in places]
    for count in range(1, 6):
        predictions, _ = model.predict(prepared[:count])
        assert [boxes_of(p) for p in predictions] == [[[x, y, x + 16, y + 16]] for x, y in places[:count]]
    assert model.predict([])[0] == []


@pytest.mark.parametrize("batch", [None, 1, 4])
def test_a_file_of_one_size_searches_larger_images_in_tiles(batch: int | None, tmp_path: Path) -> None:
    model = OnnxModel(sign_stub_file(tmp_path / "m.onnx", batch, size=(64, 96)))
    assert model.fixed_size == (64, 96)
    # Tiles begin at 0, 48, 96 and 144 across, at 0 and 32 down: where their cells meet the squares.
    squares = [(0, 0), (48, 32), (96, 16), (160, 80), (224, 0)]
    image = scene(*squares, height=96, width=240)
    prepared = model.prepare(image, "a")
    assert len(prepared.inputs) == 8 and {pixels.shape for pixels in prepared.inputs} == {(64, 96, 3)}
    (prediction, small), _ = model.predict([prepared, model.prepare(scene((16, 0), height=20, width=40), "b")])
    assert boxes_of(prediction) == [[x, y, x + 16, y + 16] for x, y in squares]
    assert boxes_of(small) == [[16, 0, 32, 16]]


def test_a_configured_tile_size_holds_for_a_file_of_any_size(tmp_path: Path) -> None:
    model = OnnxModel(sign_stub_file(tmp_path / "m.onnx", model=replace(MODEL, tile_size=64)))
    prepared = model.prepare(scene((32, 32), (80, 0), height=64, width=96), "a")
    assert [pixels.shape for pixels in prepared.inputs] == [(64, 64, 3)] * 2
    assert boxes_of(model.predict([prepared])[0][0]) == [[32, 32, 48, 48], [80, 0, 96, 16]]


def test_an_exported_file_predicts_and_draws_without_torch(tmp_path: Path) -> None:
    folder, out, model = tmp_path / "images", tmp_path / "out", sign_stub_file(tmp_path / "m.onnx")
    folder.mkdir()
    for number, squares in enumerate([[(16, 32)], [], [(0, 0), (64, 48)]]):
        write_image(folder / f"{number}.png", scene(*squares))
    code, printed, errors, _ = watched("predict", str(model), str(folder), "--out", str(out))
    assert code == 0 and "torch" not in errors, errors
    assert "3 images, 3 signs of a score of 0.3 or more, 1 images without" in printed
    results = json.loads((out / "results.json").read_text())
    told = json.loads((out / "images.json").read_text())
    assert [category["name"] for category in told["categories"]] == ["stop", "give-way"]
    sure = [(result["image_id"], result["category_id"], result["bbox"]) for result in results if result["score"] > 0.5]
    assert sorted(sure) == [
        (1, 1, [16.0, 32.0, 16.0, 16.0]),
        (3, 1, [0.0, 0.0, 16.0, 16.0]),
        (3, 1, [64.0, 48.0, 16.0, 16.0]),
    ]
    drawn = [cv2.imread(str(out / "drawings" / f"{number}.jpg")) for number in range(3)]
    # A box and a name in colour are drawn where a sign was found, and only there.
    changed = [
        int((np.abs(a.astype(int) - scene(*s)[..., ::-1]).max(axis=2) > 60).sum())
        for a, s in zip(drawn, [[(16, 32)], [], [(0, 0), (64, 48)]], strict=True)
    ]
    assert changed[1] == 0 and changed[0] > 60 and changed[2] > changed[0]


def test_a_video_is_annotated(tmp_path: Path) -> None:
    source, out = tmp_path / "v.mp4", tmp_path / "out"
    writer = VideoWriter(source, 64, 96, 20.0)
    for number in range(4):
        writer.write(scene((16 * number, 32)))
    writer.finish()
    report = predict(sign_stub_file(tmp_path / "m.onnx", 2, (64, 96)), source, out)
    assert report.num_images == 4 and report.num_objects == 4
    results = [r for r in json.loads((out / "results.json").read_text()) if r["score"] > 0.3]
    assert [(r["image_id"], r["bbox"][0]) for r in results] == [(1, 0.0), (2, 16.0), (3, 32.0), (4, 48.0)]
    assert sum(1 for _ in VideoReader(out / "annotated.mp4")) == 4
    with pytest.raises(UserError, match="--follow: goes with a lane model"):
        predict(tmp_path / "m.onnx", source, tmp_path / "none", follow=True)


# --- The checks ---


def signs(*rows: tuple[list[float], float, int]) -> SignPrediction:
    boxes = np.array([box for box, _, _ in rows], np.float64).reshape(-1, 4)
    return SignPrediction(
        boxes, np.array([score for _, score, _ in rows]), np.array([label for *_, label in rows], np.int64)
    )


def test_distances_of_signs_in_any_order() -> None:
    a = signs(([0, 0, 10, 10], 0.9, 0), ([50, 0, 60, 10], 0.5, 1), ([80, 0, 90, 9], 0.01, 1))
    b = signs(([50, 0.25, 60, 10], 0.5005, 1), ([0, 0, 10, 10], 0.9, 0))
    box, score, ties = sign_differences(a, b, 0.5)
    # The third is too unsure to be compared.
    assert (box, ties) == (0.25, 0) and score == pytest.approx(0.0005)
    assert sign_differences(a, a, 0.5) == sign_differences(signs(), signs(), 0.5) == (0.0, 0.0, 0)


def test_a_missing_or_additional_or_renamed_sign_is_no_small_difference() -> None:
    one, two = signs(([0, 0, 10, 10], 0.9, 0)), signs(([0, 0, 10, 10], 0.9, 0), ([50, 0, 60, 10], 0.5, 0))
    for a, b in ((one, two), (two, one)):
        assert sign_differences(a, b, 0.5)[0] == 50.0
    assert sign_differences(one, signs(), 0.5)[0] == sign_differences(signs(), one, 0.5)[0] == float("inf")
    assert sign_differences(one, signs(([0, 0, 10, 10], 0.9, 1)), 0.5)[0] == float("inf")


def test_a_sign_at_the_threshold_of_suppression_is_a_tie_and_no_other() -> None:
    surer, other = ([0.0, 0, 10, 10], 0.9, 0), ([0.0, 0, 10, 5], 0.6, 0)
    assert sign_differences(signs(surer, other), signs(surer), 0.5) == (0.0, 0.0, 1)
    assert sign_differences(signs(surer, other), signs(surer), 0.45)[0] == 5.0
    # What is less sure suppresses nothing.
    assert sign_differences(signs(other), signs((surer[0], 0.3, 0)), 0.5)[0] == 5.0


def checks(**values: Any) -> SignChecks:
    return replace(SignChecks(10, "ap50_class_agnostic", 20, 0.001, 1e-6, 0, 0.8, 0.8, 0.8, 9), **values)


def test_limits_of_the_checks() -> None:
    assert checks().failure() is None and checks().notes() == []
    assert "0.510 px" in (checks(box_difference_pixels=0.51).failure() or "")
    assert "1.10e-03" in (checks(score_difference=1.1e-3).failure() or "")
    # A loss of int8 is no failure: the card says it.
    lost = checks(metric_int8=0.77)
    assert lost.failure() is None
    assert lost.notes() == [
        "int8 loses 0.0300 of ap50_class_agnostic, more than the 0.01 that was aimed at: more --calibration-scenes may "
        "help, or no --int8"
    ]
    assert "int8 gains 0.0200 of ap50_class_agnostic" in checks(metric_int8=0.82).notes()[0]
    assert checks(metric_int8=0.8099).notes() == []
    assert "the comparison of boxes says nothing" in checks(num_objects=0).notes()[0]
    assert "only 0.10 on generated scenes" in checks(metric_fp32=0.1, metric_int8=0.1).notes()[0]


# --- Real exports ---


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Run folder, folder with fp32.onnx and the int8 model.onnx of any batch and size, and what was said."""
    folder = tmp_path_factory.mktemp("sign-export")
    config = replace(CONFIG, data=replace(CONFIG.data, scene_height=100, scene_width=180))
    run, told = make_sign_run(folder / "run", config), []
    trained = load_trained(run)
    export_graph(trained, folder / "fp32.onnx", None)
    with pytest.MonkeyPatch.context() as patch:
        # The same graph a second time would only take its seconds again.
        patch.setattr(export, "export_graph", copy_of(folder / "fp32.onnx"))
        export_model(trained, folder / "model.onnx", replace(FEW, int8=True), told.append)
    return run, folder, told


def copy_of(graph: Path) -> Callable[..., object]:
    return lambda trained, path, batch, size: path.write_bytes(graph.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("size", [(64, 64), (100, 130), (33, 250), (256, 96)])
def test_signs_of_the_file_are_torchs_at_any_size_and_batch(
    size: tuple[int, int], exported: tuple[Path, Path, list[str]]
) -> None:
    run, folder, _ = exported
    reference = RunModel(load_trained(run), device="cpu")
    file, int8 = (OnnxModel(folder / name, 1) for name in ("fp32.onnx", "model.onnx"))
    assert (file.precision, int8.precision, file.fixed_size, file.fixed_batch) == ("fp32", "int8", None, None)
    images = [cv2.resize(render_sign_scene(5, index, 128, 256).image, size[::-1]) for index in range(3)]
    expected, _ = reference.predict([reference.prepare(image, "a") for image in images])
    assert sum((prediction.scores >= 0.05).sum() for prediction in expected) >= 3
    for count in (1, 3):
        found, _ = file.predict([file.prepare(image, "a") for image in images[:count]])
        for mine, theirs in zip(found, expected[:count], strict=True):
            box, score, ties = sign_differences(mine, theirs, MODEL.nms_iou_threshold)
            assert box < 0.05 and score < 1e-4 and ties <= 1
            assert np.abs(np.sort(mine.scores)[-5:] - np.sort(theirs.scores)[-5:]).max() < 1e-4
        assert len(int8.predict([int8.prepare(image, "a") for image in images[:count]])[0]) == count


@pytest.mark.slow
def test_the_graph_is_tensors_alone(exported: tuple[Path, Path, list[str]]) -> None:
    _, folder, told = exported
    graph = onnx.load(str(folder / "fp32.onnx"))
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx"}
    assert not {node.op_type for node in graph.graph.node} & {
        "Loop",
        "If",
        "Scan",
        "NonMaxSuppression",
        "NonZero",
        "TopK",
    }
    assert [output.name for output in graph.graph.output] == ["objectness", "classes", "offsets"]
    assert str(Path(export.__file__).parent).encode() not in (folder / "fp32.onnx").read_bytes()
    int8 = onnx.load(str(folder / "model.onnx")).graph
    producers = {name: node.op_type for node in int8.node for name in node.output}
    every = [node for node in int8.node if node.op_type == "Conv"]
    quantised = [node for node in every if producers.get(node.input[1]) == "DequantizeLinear"]
    # fp32: the last ones, of classes and of boxes, on three strides each.
    assert len(every) - len(quantised) == 6
    # An average over a grid is written as one, but is none.
    num_told = sum(".mean" not in node.input[1] for node in quantised)
    assert num_told < len(quantised)
    assert any(f"{num_told} convolutions in int8" in line for line in told)


@pytest.mark.slow
def test_the_pretrained_backbone_is_exported_and_its_relu6_is_in_the_range_of_int8(tmp_path: Path) -> None:
    model = replace(MODEL, backbone="efficientnet-lite0")
    data = replace(CONFIG.data, scene_height=96, scene_width=160)
    trained = load_trained(make_sign_run(tmp_path / "run", replace(CONFIG, model=model, data=data)))
    out = tmp_path / "m.onnx"
    found = export_model(trained, out, replace(FEW, int8=True, num_check_scenes=2), lambda line: None)
    assert isinstance(found, SignChecks) and found.num_objects > 10 and found.failure() is None
    assert "Clip" not in {node.op_type for node in onnx.load(str(out)).graph.node}
    # All but the last ones, of classes and of boxes, on three strides each.
    convolutions = sum(node.op_type == "Conv" for node in onnx.load(str(out)).graph.node)
    assert found.num_int8_convolutions == convolutions - 6


@pytest.mark.slow
def test_record_and_card_lie_beside_the_file(exported: tuple[Path, Path, list[str]]) -> None:
    _, folder, told = exported
    path = folder / "model.onnx"
    record = read_record(path)
    verify(path, record)
    assert record["task"] == "sign" and record["classes"] == ["stop", "give-way"]
    assert record["export"]["checks"]["num_objects"] > 0 and record["export"]["input_size"] is None
    assert record["export"]["checks"]["metric"] == "ap50_class_agnostic"
    assert any("largest distance of boxes" in line for line in told)
    card = card_path(path).read_text()
    for expected in (
        "uint8 (any number, height, width, 3) RGB",
        "`perception.sign_decode_numpy.decode_signs` is the decoding",
        "objectness · class ^ 0.25",
        "an IoU above 0.35",
        "| ap50_class_agnostic | 0.7500 |",
        "4 generated scenes",
        "At most 100 signs an image",
        "Ranges of int8 were taken from 3 drawn scenes",
    ):
        assert expected in card
    assert "is stretched to" not in card


@pytest.mark.slow
def test_a_file_of_other_weights_fails_its_check_and_nothing_is_written(
    exported: tuple[Path, Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder, _ = exported
    other = load_trained(make_sign_run(tmp_path / "other", seed=1))
    found = check_files(other, folder / "fp32.onnx", None, FEW)
    assert isinstance(found, SignChecks) and found.failure() is not None
    monkeypatch.setattr(export, "export_graph", copy_of(folder / "fp32.onnx"))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UserError, match=r"model\.onnx: not written: (boxes|scores) of the fp32 file are up to"):
        export_model(other, out / "model.onnx", FEW, lambda line: None)
    assert list(out.iterdir()) == []


@pytest.mark.slow
def test_the_command_exports_a_fixed_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Tiles of the run's own do not count where the file has one size.
    run = make_sign_run(tmp_path / "run", replace(CONFIG, model=replace(MODEL, tile_size=64)))
    assert main(["export", "sign", str(run), "--size", "192x96", "--batch", "2", "--check-scenes", "3"]) == 0
    printed = capsys.readouterr()
    path = run / "tiny-sign.onnx"
    model = OnnxModel(path)
    assert (model.fixed_batch, model.fixed_size) == (2, (96, 192))
    for written in (path, card_path(path), record_path(path)):
        assert f"wrote {written}" in printed.out and written.is_file()
    assert read_record(path)["export"]["input_size"] == [96, 192]
    assert "uint8 (2, 96, 192, 3) RGB" in card_path(path).read_text() and printed.err == ""
    assert main(["trace", str(path)]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "800"], "--size 800: WIDTHxHEIGHT in pixels"),
        (
            ["--size", "1360x800"],
            "--size 1360x800: width and height are multiples of 32 from 64 to 4096, e.g. 1376x800",
        ),
        (["--size", "32x96"], "e.g. 64x96"),
        (["--size", "99999x96"], "e.g. 4096x96"),
        (["--size", "dynamic"], "no such run folder"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as error:
        main(["export", "sign", "gone", *words])
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_model_of_the_other_task_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a lane model: export lane .*lane-run"):
        main(["export", "sign", str(make_run(tmp_path / "lane-run"))])
    with pytest.raises(UserError, match=r"a sign model: export sign .*sign-run"):
        main(["export", "lane", str(make_sign_run(tmp_path / "sign-run"))])
