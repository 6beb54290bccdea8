"""The lock file: complete, sorted, replaced as a whole; damage is named by field, two writers both get in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from containers.errors import ContainerError
from containers.lock import LOCK_FILE, Lock, LockedImage, lock_text, read_lock, update_lock, write_lock

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parents[1] / "golden" / "containers" / "lock.json"

LANE = LockedImage(
    name="lane",
    reference="nvcr.io/org/lane:26.11-cpu-py3",
    digest="sha256:" + "1" * 64,
    image_id="sha256:" + "2" * 64,
    platform="linux/amd64",
    size_bytes=1_200_000_000,
    created="2026-11-30T15:41:59Z",
)
SIGN = replace(LANE, name="sign", reference="nvcr.io/org/sign:26.11-cpu-py3", digest="sha256:" + "3" * 64)


def test_golden_text() -> None:
    assert lock_text(Lock({"sign": SIGN, "lane": LANE})) == GOLDEN.read_text()
    assert read_lock(GOLDEN) == Lock({"lane": LANE, "sign": SIGN})


def test_the_committed_file_is_sound() -> None:
    assert lock_text(read_lock(LOCK_FILE)) == LOCK_FILE.read_text()


def test_an_absent_file_pins_nothing(tmp_path: Path) -> None:
    assert read_lock(tmp_path / "lock.json") == Lock()
    with pytest.raises(ContainerError, match=r'lock\.json: pins no image "lane"; it pins none yet .*make images'):
        Lock().image("lane", tmp_path / "lock.json")


def test_an_unknown_name_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match='did you mean "lane"'):
        Lock({"lane": LANE}).image("lanes")


def test_an_update_keeps_what_else_is_pinned(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    write_lock(path, Lock({"lane": LANE}))
    newer = replace(LANE, digest="sha256:" + "4" * 64)
    assert update_lock(path, [newer, SIGN]) == read_lock(path) == Lock({"lane": newer, "sign": SIGN})
    assert [file.name for file in tmp_path.iterdir()] == ["lock.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"digest": "sha256:12"}, 'images.lane.digest is "sha256:12", not sha256:'),
        ({"image_id": 7}, "images.lane.image_id is 7, which is no str"),
        ({"size_bytes": "1 GB"}, "images.lane.size_bytes is '1 GB', which is no int"),
        ({"size_bytes": True}, "images.lane.size_bytes is True, which is no int"),
        ({"size_bytes": -1}, "must be 0 or more"),
        ({"platform": "amd64"}, 'images.lane.platform is "amd64", not e.g. linux/amd64'),
        ({"reference": "nvcr.io/org/lane"}, "images.lane.reference: image"),
        ({"reference": f"nvcr.io/org/lane:1@{LANE.digest}"}, "must have a tag, and its digest in field digest"),
        ({"created": None}, "images.lane.created is None"),
        ({"digset": "x"}, 'images.lane.digset is unknown; did you mean "digest"'),
    ],
)
def test_damage_is_named_by_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "lock.json"
    raw = json.loads(lock_text(Lock({"lane": LANE})))
    raw["images"]["lane"].update(change)
    path.write_text(json.dumps(raw))
    with pytest.raises(ContainerError, match=re.escape(said)) as caught:
        read_lock(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1 is not JSON"),
        ('{\n"format": 1,\n', "line 3 is not JSON"),
        ("[]", 'has no field "images"'),
        ('{"format": 2, "images": {}}', "field format is 2, this version reads 1"),
        ('{"format": 1, "images": {"lane": []}}', "images.lane is not an object"),
        ('{"format": 1, "images": {"lane": {}}}', "images.lane.reference is missing"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "lock.json"
    path.write_text(text)
    with pytest.raises(ContainerError, match=re.escape(said)):
        read_lock(path)


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ContainerError, match=r"/proc/lock\.json: cannot be written"):
        write_lock(Path("/proc/lock.json"), Lock())


def test_updates_at_once_all_get_in(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    program = (
        "import sys\nfrom dataclasses import replace\nfrom pathlib import Path\n"
        "from containers.lock import read_lock, update_lock\n"
        "path, name = Path(sys.argv[1]), sys.argv[2]\n"
        "lane = read_lock(path).images['lane']\n"
        "for _ in range(20): update_lock(path, [replace(lane, name=name)])\n"
    )
    write_lock(path, Lock({"lane": LANE}))
    names = [f"image{number}" for number in range(4)]
    writers = [subprocess.Popen([sys.executable, "-c", program, path, name], cwd=ROOT) for name in names]
    assert [writer.wait(30) for writer in writers] == [0] * 4
    assert set(read_lock(path).images) == {"lane", *names}
