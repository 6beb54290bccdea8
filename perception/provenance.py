"""From an exported file's sha256 back to what made it: the record beside it, its check, and its printed form.

`FILE.trace.json` beside FILE holds the file's hash, the checkpoint and its hash, code revisions with their uncommitted
changes, the data's manifests, the complete configuration and the container image, of the training and of the export.
No torch: a record is verified where the file is used.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perception import __version__
from perception.config import to_json
from perception.errors import UserError
from perception.run_folder import describe_environment

if TYPE_CHECKING:
    from perception.export import Checks, ExportOptions
    from perception.run_model import TrainedModel

RECORD_FORMAT = 1
_EXPORT_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")


def record_path(exported: Path) -> Path:
    return exported.with_name(exported.name + ".trace.json")


def card_path(exported: Path) -> Path:
    return exported.with_name(exported.name + ".md")


def export_record(
    trained: TrainedModel, file: Path, name: str, options: ExportOptions, checks: Checks
) -> dict[str, Any]:
    """The record of `file`, which will be called `name`."""
    environment = _read_json(trained.run.environment)
    result = _read_json(trained.run.result)
    here = describe_environment({}, {})
    config = to_json(trained.config)
    return {
        "format": RECORD_FORMAT,
        "file": {"name": name, "sha256": file_sha256(file), "bytes": file.stat().st_size},
        "model": trained.config.name,
        "task": trained.config.task,
        "classes": list(trained.classes),
        "export": {
            "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "precision": options.precision,
            "batch": options.batch,
            "num_calibration_scenes": options.num_calibration_scenes if options.int8 else 0,
            "checks": vars(checks),
            "roadfuse": __version__,
            "versions": {package: _version(package) for package in _EXPORT_PACKAGES},
            "git": here["git"],
            "image_digest": here["image_digest"],
        },
        "checkpoint": {
            "path": str(trained.checkpoint.resolve()),
            "sha256": trained.checkpoint_sha256,
            "step": trained.step,
            "samples": trained.samples,
        },
        "training": {
            "git": environment.get("git"),
            "versions": environment.get("versions"),
            "hardware": environment.get("hardware"),
            "image_digest": environment.get("image_digest"),
            "data": environment.get("data"),
            "metrics": _metrics_of(trained, result),
        },
        "config": json.loads(config),
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
    }


def read_record(exported: Path) -> dict[str, Any]:
    """The record beside an exported file. Raises UserError where either is missing or the record is no record."""
    if not exported.is_file():
        raise UserError(f"{exported}: no such exported file")
    path = record_path(exported)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: the record of {exported.name} is missing; it is written beside each export") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: record cannot be read ({error}); export the model again") from None
    if not isinstance(record, dict) or record.get("format") != RECORD_FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise UserError(f"{path}: record format {found}, this version reads {RECORD_FORMAT}")
    return record


def verify(exported: Path, record: dict[str, Any]) -> str:
    """The file's sha256. Raises UserError where it is not the one recorded, or the record contradicts itself."""
    found, recorded = file_sha256(exported), _at(record, "file", "sha256")
    if found != recorded:
        raise UserError(
            f"{exported}: its sha256 is {found}, its record says {recorded}: not the file that was exported"
        )
    config = json.dumps(record.get("config"), indent=2) + "\n"
    if hashlib.sha256(config.encode()).hexdigest() != record.get("config_sha256"):
        raise UserError(f"{record_path(exported)}: field config was changed after the export: its sha256 differs")
    return found


def record_lines(record: dict[str, Any]) -> list[str]:
    """The chain from the file back to its origin, for people; what is not known is said to be."""
    rows: list[tuple[str, Any]] = [
        ("model", f"{record.get('model')}, {_at(record, 'export', 'precision')}"),
        ("exported", f"{_at(record, 'export', 'utc')} by roadfuse {_at(record, 'export', 'roadfuse')}"),
        ("export code", _git_line(_at(record, "export", "git"))),
        ("export image", _at(record, "export", "image_digest")),
        ("checkpoint", f"{_at(record, 'checkpoint', 'path')}, step {_at(record, 'checkpoint', 'step')}"),
        ("checkpoint sha256", _at(record, "checkpoint", "sha256")),
        ("training code", _git_line(_at(record, "training", "git"))),
        ("training image", _at(record, "training", "image_digest")),
        ("configuration", f"sha256 {record.get('config_sha256')}"),
        ("data", _at(record, "training", "data", "source")),
    ]
    for split in ("train", "validation"):
        manifest = _at(record, "training", "data", split)
        if isinstance(manifest, dict):
            text = f"{manifest.get('images')} images, manifest {manifest.get('manifest_sha256_sum')}"
            rows.append((f"{split} data", text))
    return [f"{name:17}  {'not recorded' if value is None else value}" for name, value in rows]


def checkpoint_state(record: dict[str, Any]) -> str:
    """Is the checkpoint still where the record says, and is it the same?"""
    path = Path(str(_at(record, "checkpoint", "path")))
    if not path.is_file():
        return f"{path}: no longer there; the record tells its sha256"
    same = file_sha256(path) == _at(record, "checkpoint", "sha256")
    return f"{path}: {'there, with the recorded sha256' if same else 'ANOTHER FILE than the one exported'}"


def file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _metrics_of(trained: TrainedModel, result: dict[str, Any]) -> dict[str, Any]:
    """All figures of the run's end where it ended with this checkpoint, else what was recorded with it."""
    if _at(result, "checkpoint", "sha256") == trained.checkpoint_sha256:
        metrics = result.get("metrics")
        return metrics if isinstance(metrics, dict) else {}
    return {} if trained.metric is None else {trained.task.primary_metric: trained.metric}


def _git_line(git: Any) -> str | None:
    if not isinstance(git, dict) or not git.get("revision"):
        return None
    diff = git.get("diff")
    if not diff:
        return str(git["revision"])
    digest = hashlib.sha256(diff.encode()).hexdigest()
    return f"{git['revision']} with uncommitted changes ({len(diff.splitlines())} lines, sha256 {digest[:16]})"


def _at(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _read_json(path: Path) -> dict[str, Any]:
    """{} where a run left none: the record then says that it is not known."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
