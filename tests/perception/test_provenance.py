"""The record beside an exported file leads back to its origin, and tells when the file is another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perception.errors import UserError
from perception.export import ExportOptions
from perception.export_checks import LaneChecks
from perception.model_card import model_card
from perception.onnx_model import OnnxModel
from perception.provenance import (
    card_path,
    checkpoint_state,
    export_record,
    read_record,
    record_lines,
    record_path,
    verify,
)
from perception.run_model import load_trained
from pipelines.__main__ import main
from tests.exported_models import NEEDS_EXPORT, make_run, stub_file

pytestmark = NEEDS_EXPORT

CHECKS = LaneChecks(10, "culane_f1_50", 20, 0.001, 0.25, 0.25)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = stub_file(tmp_path / "m.onnx")
    trained = load_trained(make_run(tmp_path / "run"))
    record_path(path).write_text(json.dumps(export_record(trained, path, path.name, ExportOptions(), CHECKS), indent=2))
    return path


def test_trace_prints_the_whole_chain(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(exported)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(record_path(exported).read_text())
    for expected in (
        record["file"]["sha256"],
        record["checkpoint"]["sha256"],
        "c0ffee with uncommitted changes (1 lines",
        "sha256:1234",
        "3 images, manifest " + "ab" * 32,
        record["config_sha256"],
        "step-00000007.pt: there, with the recorded sha256",
    ):
        assert expected in printed
    assert main(["trace", str(exported), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["training"]["git"]["diff"] == "+changed\n"


def test_another_file_is_told(exported: Path) -> None:
    data = bytearray(exported.read_bytes())
    data[len(data) // 2] ^= 1
    exported.write_bytes(data)
    with pytest.raises(UserError, match=r"its record says .*: not the file that was exported"):
        verify(exported, read_record(exported))


def test_a_changed_configuration_is_told(exported: Path) -> None:
    text = record_path(exported).read_text().replace('"crop_top_fraction": 0.0', '"crop_top_fraction": 0.1')
    record_path(exported).write_text(text)
    with pytest.raises(UserError, match="field config was changed after the export"):
        verify(exported, read_record(exported))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "the record of m.onnx is missing"), ("[]", "record format None"), ("{", "record cannot be read")],
)
def test_a_missing_or_broken_record_is_told(content: str | None, message: str, exported: Path) -> None:
    record_path(exported).unlink()
    if content is not None:
        record_path(exported).write_text(content)
    with pytest.raises(UserError, match=message):
        read_record(exported)
    with pytest.raises(UserError, match=r"none\.onnx: no such exported file"):
        read_record(exported.with_name("none.onnx"))


def test_a_checkpoint_that_moved_or_changed_is_told(exported: Path) -> None:
    record = read_record(exported)
    checkpoint = Path(record["checkpoint"]["path"])
    checkpoint.write_bytes(b"another")
    assert "ANOTHER FILE" in checkpoint_state(record)
    checkpoint.unlink()
    assert "no longer there" in checkpoint_state(record)


def test_what_a_run_did_not_record_is_said_to_be_unknown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("environment.json", "result.json"):
        (run / name).unlink()
    path = stub_file(tmp_path / "m.onnx")
    trained = load_trained(run)
    record = export_record(trained, path, path.name, ExportOptions(), CHECKS)
    assert sum(line.endswith("not recorded") for line in record_lines(record)) >= 3
    # The figure that was stored with the checkpoint is all there is.
    assert record["training"]["metrics"] == {"culane_f1_50": 0.25}
    assert "Not recorded: the run folder has no environment.json" in model_card(
        trained, OnnxModel(path), record, CHECKS
    )


def test_the_card_tells_data_code_metrics_and_limits(exported: Path, tmp_path: Path) -> None:
    trained = load_trained(tmp_path / "run")
    card = model_card(trained, OnnxModel(exported), read_record(exported), CHECKS)
    for expected in ("| culane_f1_50 | 0.2500 |", "3 images, manifest", "c0ffee", "drawn scenes only", "(any number,"):
        assert expected in card
    assert card_path(exported).name == "m.onnx.md"
