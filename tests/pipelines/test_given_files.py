"""Every file of settings, labels or figures that a person gives: whatever is in it, one line names it and the fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.data.mixture import read_mixture
from perception.data.signs.class_map import load_class_map
from perception.errors import UserError
from perception.predict_inputs import open_input
from perception.provenance import read_record, record_path
from perception.scaling.profile import read_profile
from pipelines.configs import named_config
from pipelines.doctor_compare import compare_nodes
from pipelines.evaluate import evaluate_lane_files, evaluate_sign_files
from pipelines.tuned_settings import read_tuned
from sweeps.planning.plan import load_plan

LABELS = """{"images": [{"id": 1, "file_name": "a.jpg", "width": 90, "height": 90}],
"categories": [{"id": 1, "name": "x"}],
"annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 30, 40]}]}"""


def trace(path: Path) -> object:
    exported = path.with_name("model.onnx")
    exported.write_text("")
    path.rename(record_path(exported))
    return read_record(exported)


def sign_predictions(path: Path) -> object:
    (path.parent / "labels.json").write_text(LABELS)
    return evaluate_sign_files(path, path.parent / "labels.json", "coco")


def sign_labels(path: Path) -> object:
    (path.parent / "none.json").write_text("[]")
    return evaluate_sign_files(path.parent / "none.json", path, "coco")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a run's configuration": ("config.json", lambda path: named_config(str(path))),
    "a mixture": ("mixture.toml", read_mixture),
    "a class map": ("map.toml", lambda path: load_class_map(str(path))),
    "a node's report": ("node.json", lambda path: compare_nodes([path, path])),
    "a record of an export": ("record.json", trace),
    "a recorded step": ("profile.json", read_profile),
    "tuned settings": ("tuned.json", read_tuned),
    "a plan": ("plan.toml", load_plan),
    "predictions of signs": ("predictions.json", sign_predictions),
    "labels of signs": ("labels-of-signs.json", sign_labels),
    "predictions of lanes": ("lanes.json", lambda path: evaluate_lane_files(path, path, "tusimple")),
    "a list of images": ("list.json", open_input),
    "a list of images as text": ("list.txt", open_input),
}
every_reader = pytest.mark.parametrize("what", READERS)
CONTENTS = {
    "nothing": b"",
    "white space": b" \n\n",
    "bytes": bytes(range(256)),
    "half a character": b'{"a": "\xc3',
    "nested without end, as TOML": b"a = " + b"[" * 5_000,
    "nested without end": b"[" * 5_000,
    "objects without end": b'{"a":' * 5_000,
    "a number of thousands of digits": b"9" * 10_000,
    "the same, as TOML": b"a = " + b"9" * 10_000,
    "a list": b"[]",
    "an object": b"{}",
    "a text": b'"x"',
    "nothing at all in JSON": b"null",
    "not a number": b"[NaN, Infinity]",
    "cut short": b'{"images": [{"id": 1, ',
    "another file's": b"<annotation></annotation>",
}
# No detections at all are an answer of a model too.
SOUND = {("predictions of signs", "a list")}


def refusal(what: str, folder: Path, content: bytes) -> str | None:
    """The one line; None where the content was taken."""
    name, read = READERS[what]
    path = folder / name
    path.write_bytes(content)
    try:
        read(path)
    except UserError as error:
        return str(error)
    return None


@every_reader
@pytest.mark.parametrize("content", CONTENTS)
def test_what_is_no_such_file_is_refused_by_name(tmp_path: Path, what: str, content: str) -> None:
    line = refusal(what, tmp_path, CONTENTS[content])
    if (what, content) in SOUND:
        assert line is None
        return
    assert line is not None and str(tmp_path) in line and "\n" not in line


# The place of a record is beside the exported file.
@pytest.mark.parametrize("what", [what for what in READERS if what != "a record of an export"])
def test_a_folder_and_nothing_in_its_place(tmp_path: Path, what: str) -> None:
    name, read = READERS[what]
    for make in (lambda path: None, Path.mkdir):
        make(tmp_path / name)
        with pytest.raises(UserError) as caught:
            read(tmp_path / name)
        assert name in str(caught.value) and "\n" not in str(caught.value)


@every_reader
@settings(max_examples=10, deadline=None)
@given(content=st.binary(max_size=60))
def test_any_bytes_are_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, what: str, content: bytes) -> None:
    line = refusal(what, tmp_path_factory.mktemp("given"), content)
    assert line is None or line
