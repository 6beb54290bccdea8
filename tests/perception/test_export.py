"""Export: the file gives torch's lanes, int8 keeps F1, and what fails its check is not written."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perception import export
from perception.config import to_json
from perception.data.generated import render_scene
from perception.errors import UserError
from perception.export import ExportOptions, check_files, export_graph, export_model
from perception.export_checks import LaneChecks, lane_difference_pixels
from perception.onnx_model import OnnxModel
from perception.provenance import card_path, file_sha256, read_record, record_path, verify
from perception.quantise import pools_to_convolutions, quantised_nodes
from perception.run_model import RunModel, TrainedModel, load_trained
from pipelines.__main__ import main
from tests.exported_models import CONFIG, NEEDS_EXPORT, make_run, onnx, stub_file

pytestmark = NEEDS_EXPORT

FEW = ExportOptions(num_check_scenes=6, num_calibration_scenes=4, num_threads=1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Run folder, int8 file of a batch of any size, and what was said."""
    folder = tmp_path_factory.mktemp("export")
    run, told = make_run(folder / "run"), []
    trained = load_trained(run)
    export_graph(trained, folder / "fp32.onnx", None)
    with pytest.MonkeyPatch.context() as patch:
        # The same graph a second time would only take its seconds again.
        patch.setattr(export, "export_graph", copy_of(folder / "fp32.onnx"))
        export_model(trained, folder / "model.onnx", replace(FEW, batch=None, int8=True), told.append)
    return run, folder, told


def copy_of(graph: Path) -> Callable[[TrainedModel, Path, int | None, tuple[int, int] | None], object]:
    return lambda trained, path, batch, size: shutil.copyfile(graph, path)


@pytest.mark.slow
def test_lanes_of_both_files_are_torchs_on_any_batch(exported: tuple[Path, Path, list[str]]) -> None:
    run, folder, _ = exported
    trained = load_trained(run)
    reference = RunModel(trained, device="cpu")
    files = {name: OnnxModel(folder / name, 1) for name in ("fp32.onnx", "model.onnx")}
    assert [file.precision for file in files.values()] == ["fp32", "int8"]
    images = [render_scene(5, index, 118, 328).image for index in range(5)]
    for count in (1, 2, 5):
        prepared = [reference.prepare(image, "a") for image in images[:count]]
        expected = reference.predict(prepared)[0]
        assert sum(len(prediction.lanes) for prediction in expected) >= count
        for name, file in files.items():
            found = file.predict([file.prepare(image, "a") for image in images[:count]])[0]
            if name == "fp32.onnx":
                for mine, theirs in zip(found, expected, strict=True):
                    assert lane_difference_pixels(mine.lanes, theirs.lanes) < 0.05
                    np.testing.assert_allclose(mine.scores, theirs.scores, atol=1e-4)
            else:
                assert len(found) == count


@pytest.mark.slow
def test_the_graph_is_tensors_alone_and_carries_the_configuration(exported: tuple[Path, Path, list[str]]) -> None:
    _, folder, _ = exported
    graph = onnx.load(str(folder / "fp32.onnx"))
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx"}
    assert not {node.op_type for node in graph.graph.node} & {"Loop", "If", "Scan", "NonMaxSuppression", "NonZero"}
    assert graph.opset_import[0].version >= 17
    # Nothing of the machine it was exported on.
    assert str(Path(export.__file__).parent).encode() not in (folder / "fp32.onnx").read_bytes()
    assert to_json(OnnxModel(folder / "fp32.onnx").config) == to_json(CONFIG)


@pytest.mark.slow
def test_int8_holds_the_convolutions_that_give_features(exported: tuple[Path, Path, list[str]]) -> None:
    _, folder, told = exported
    graph = onnx.load(str(folder / "model.onnx")).graph
    weights = {name: node.op_type for node in graph.node for name in node.output}
    int8 = [node for node in graph.node if node.op_type == "Conv" and weights.get(node.input[1]) == "DequantizeLinear"]
    every = [node for node in graph.node if node.op_type == "Conv"]
    # fp32: that of the sketch head, which gives a direction.
    assert len(every) - len(int8) == 1
    # An average over a grid is written as one, but is none.
    num_told = sum(".mean" not in node.input[1] for node in int8)
    assert num_told < len(int8)
    assert any(f"{num_told} convolutions in int8" in line for line in told)


@pytest.mark.slow
def test_record_and_card_lie_beside_the_file(exported: tuple[Path, Path, list[str]]) -> None:
    run, folder, told = exported
    path = folder / "model.onnx"
    record = read_record(path)
    assert verify(path, record) == file_sha256(path) == record["file"]["sha256"]
    assert record["training"]["git"]["revision"] == "c0ffee" and record["export"]["precision"] == "int8"
    assert record["export"]["checks"]["num_scenes"] == 6 and record["export"]["versions"]["onnx"]
    assert json.loads((run / "config.json").read_text()) == record["config"]
    assert any("largest distance of lane points" in line for line in told)
    assert "calibrat" in card_path(path).read_text() and "6 generated scenes" in card_path(path).read_text()


@pytest.mark.slow
def test_a_file_of_other_weights_fails_its_check_and_nothing_is_written(
    exported: tuple[Path, Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder, _ = exported
    other = load_trained(make_run(tmp_path / "other", seed=1))
    checks = check_files(other, folder / "fp32.onnx", None, replace(FEW, batch=None))
    assert isinstance(checks, LaneChecks) and checks.point_difference_pixels > 0.5
    monkeypatch.setattr(export, "export_graph", copy_of(folder / "fp32.onnx"))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UserError, match=r"model\.onnx: not written: lane points of the fp32 file are up to"):
        export_model(other, out / "model.onnx", replace(FEW, batch=None), lambda line: None)
    assert list(out.iterdir()) == []


@pytest.mark.slow
def test_the_command_exports_a_fixed_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    level = logging.getLogger().level
    assert main(["export", "lane", str(run), "--batch", "2", "--check-scenes", "3"]) == 0
    printed = capsys.readouterr()
    path = run / "tiny.onnx"
    assert OnnxModel(path).fixed_batch == 2
    for written in (path, card_path(path), record_path(path)):
        assert f"wrote {written}" in printed.out and written.is_file()
    assert printed.err == "" and logging.getLogger().level == level


def checks(**values: Any) -> LaneChecks:
    return replace(LaneChecks(10, "culane_f1_50", 20, 0.001, 0.8, 0.8, 0.8, 9), **values)


def test_limits_of_the_checks() -> None:
    assert checks().failure() is None and checks().notes() == []
    assert checks(point_difference_pixels=0.49, metric_int8=0.7901).failure() is None
    assert "0.510 px" in (checks(point_difference_pixels=0.51).failure() or "")
    assert "inf px" in (checks(point_difference_pixels=float("inf")).failure() or "")
    assert "more --calibration-scenes" in (checks(metric_int8=0.78).failure() or "")
    # A check that says little says so.
    assert "the comparison of points says nothing" in checks(num_objects=0).notes()[0]
    assert "only 0.10 on generated scenes" in checks(metric_fp32=0.1, metric_int8=0.1).notes()[0]


def test_distance_of_lanes_in_any_order_and_with_a_row_more() -> None:
    rows = np.arange(300.0, 100.0, -10.0)
    a, b = (np.stack([np.full(20, x), rows], axis=1) for x in (100.0, 400.0))
    moved = b + np.array([0.25, 0.0])
    assert lane_difference_pixels([a, b], [moved, a]) == 0.25
    assert lane_difference_pixels([a, b], [a, b[1:]]) == 0.0
    assert lane_difference_pixels([a], [a[:10]]) == float("inf")
    assert lane_difference_pixels([a, b], [a]) == float("inf")
    assert lane_difference_pixels([], []) == 0.0


def test_which_nodes_compute_in_int8() -> None:
    helper = onnx.helper
    edges = [
        ("Mul", "normalise", ["images", "scale"]),
        ("Conv", "first", ["normalise", "w"]),
        ("Relu", "relu", ["first"]),
        ("Conv", "left", ["relu", "w"]),
        ("Add", "sum", ["left", "relu"]),
        ("Conv", "head", ["sum", "w"]),
        ("Conv", "features", ["sum", "w"]),
        ("Conv", "direction", ["sum", "narrow"]),
        ("Mul", "sampled", ["features", "direction"]),
        ("MatMul", "learnt", ["sampled", "w"]),
        ("MatMul", "attention", ["learnt", "sampled"]),
        ("Add", "after", ["head", "attention"]),
    ]
    nodes = [helper.make_node(kind, inputs, [name], name=name) for kind, name, inputs in edges]
    shapes = {"w": (64, 64, 3, 3), "narrow": (1, 64, 1, 1)}
    weights = [onnx.numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", [], [], weights)
    # Neither what lies before the first convolution, nor a convolution that no learnt layer follows or that gives
    # fewer values than features are, nor what lies behind the last ones.
    assert quantised_nodes(helper.make_model(graph)) == ["first", "relu", "left", "sum", "features"]


@pytest.mark.parametrize(("attributes", "is_rewritten"), [
    ({"kernel_shape": [2, 2], "strides": [2, 2]}, True),
    ({"kernel_shape": [3, 2], "strides": [1, 2], "auto_pad": "VALID"}, True),
    ({"kernel_shape": [2, 2]}, True),
    ({"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, False),
    ({"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, False),
    ({"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}, False),
])  # fmt: skip
def test_an_average_is_the_same_as_a_convolution(attributes: dict[str, Any], is_rewritten: bool) -> None:
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    pool = helper.make_node("AveragePool", ["images"], ["means"], name="pool", **attributes)
    images = helper.make_tensor_value_info("images", kind, ["batch", 3, 9, 10])
    graph = helper.make_graph([pool], "g", [images], [helper.make_tensor_value_info("means", kind, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    pixels = np.random.default_rng(0).random((2, 3, 9, 10), np.float32)

    from onnxruntime import InferenceSession

    def run() -> Any:
        session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, {"images": pixels})[0]

    before = run()
    assert pools_to_convolutions(model) == ({"pool"} if is_rewritten else set())
    assert model.graph.node[0].op_type == ("Conv" if is_rewritten else "AveragePool")
    np.testing.assert_allclose(run(), before, rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "m.pt"], "--out m.pt: name a file that ends in .onnx"),
        (["--out", "none/m.onnx"], "folder none does not exist"),
        (["--batch", "0"], "--batch 0: a whole number from 1 to 1024, or dynamic"),
        (["--batch", "two"], "--batch two: a whole number"),
        (["--size", "800x320"], "--size 800x320: goes with signs"),
        (["--calibration-scenes", "0"], "--calibration-scenes 0: must be 1 or more"),
        ([], "no such run folder"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        main(["export", "lane", "gone", *words])
    assert message in str(error.value) and list(tmp_path.iterdir()) == []


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = load_trained(make_run(tmp_path / "run"))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r'onnxscript cannot be imported .*install the extra "export"'):
        export_model(trained, tmp_path / "m.onnx", FEW, print)


def test_an_exported_file_is_no_run_to_export(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a readable checkpoint"):
        main(["export", "lane", str(stub_file(tmp_path / "m.onnx"))])
