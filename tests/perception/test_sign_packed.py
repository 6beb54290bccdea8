"""Packed sign scenes: what was rendered, complete or rendered again; chunks themselves are tested in test_packed.py."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from perception.data import packed
from perception.data.generated import render_sign_scene
from perception.data.packed import scenes_folder
from perception.data.signs import packed as sign_packed
from perception.data.signs.classes import GTSDB_CLASSES
from perception.data.signs.packed import PackedSignScenes, prepare_sign_chunks, sign_scenes_folder
from perception.data.signs.sample import SignDataset, SignTruth
from perception.errors import UserError

SIZE = (160, 400)
SEED = 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "CHUNK_SCENES", 4)


def prepare(folder: Path, first: int = 0, count: int = 8, share: tuple[int, int] = (0, 1)) -> list[tuple[int, int]]:
    """What was reported: a (done, total) for each chunk rendered."""
    reports: list[tuple[int, int]] = []
    prepare_sign_chunks(folder, SEED, *SIZE, first, count, share, lambda done, total: reports.append((done, total)))
    return reports


def assert_same(truth: SignTruth, expected: SignTruth) -> None:
    assert (truth.name, truth.height, truth.width) == (expected.name, *SIZE)
    assert truth.category == expected.category
    for name in ("boxes", "labels", "ignored"):
        array, original = getattr(truth, name), getattr(expected, name)
        np.testing.assert_array_equal(array, original)
        assert array.dtype == original.dtype and array.shape == original.shape


def test_samples_are_what_was_rendered(tmp_path: Path) -> None:
    """First and last scene lie within chunks, not at their borders; some have no sign."""
    assert prepare(tmp_path, first=2, count=13) == [(1, 4), (2, 4), (3, 4), (4, 4)]
    scenes: SignDataset = PackedSignScenes(tmp_path, 2, 13)
    assert len(scenes) == scenes.report.images == 13 and scenes.classes == GTSDB_CLASSES
    expected = [render_sign_scene(SEED, 2 + index, *SIZE) for index in range(13)]
    assert {0} < {len(sample.truth.boxes) for sample in expected} and any(len(s.truth.ignored) for s in expected)
    for index, rendered in enumerate(expected):
        sample = scenes.sample(index)
        assert sample.image.shape == (*SIZE, 3) and sample.image.dtype == np.uint8
        difference = np.abs(sample.image.astype(int) - rendered.image)
        assert difference.mean() < 4, "JPEG at high quality"
        assert difference.mean() <= np.abs(sample.image[:, :, ::-1].astype(int) - rendered.image).mean()
        assert_same(sample.truth, rendered.truth)
        assert_same(scenes.truth(index), rendered.truth)
    assert scenes.report.signs == sum(len(sample.truth.boxes) for sample in expected)
    for index in (-1, 13):
        with pytest.raises(IndexError):
            scenes.truth(index)


def test_scenes_without_any_sign(tmp_path: Path) -> None:
    """A chunk whose scenes hold no box at all: its arrays are empty and keep their shape."""
    size = (64, 64)
    prepare_sign_chunks(tmp_path, SEED, *size, 0, 4, (0, 1), lambda done, total: None)
    scenes = PackedSignScenes(tmp_path, 0, 4)
    assert scenes.report.signs == 0
    assert scenes.truth(1).boxes.shape == (0, 4) and scenes.truth(1).labels.dtype == np.int64


def test_truth_cannot_reach_the_next_reader(tmp_path: Path) -> None:
    prepare(tmp_path)
    scenes = PackedSignScenes(tmp_path, 0, 8)
    index = next(index for index in range(8) if len(scenes.truth(index).boxes))
    before = scenes.truth(index).boxes.copy()
    scenes.truth(index).boxes[:] = 0
    np.testing.assert_array_equal(scenes.truth(index).boxes, before)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], None])
@pytest.mark.parametrize("kind", ["images.npy", "labels.npz"])
def test_a_damaged_or_missing_chunk_is_rendered_again(
    kind: str, damage: Callable[[bytes], bytes] | None, tmp_path: Path
) -> None:
    prepare(tmp_path)
    path = tmp_path / f"chunk-000001.{kind}"
    images = (tmp_path / "chunk-000001.images.npy").read_bytes()
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"part 1 cannot be read .*run again to render them"):
        PackedSignScenes(tmp_path, 0, 8)
    assert prepare(tmp_path) == [(1, 1)] and prepare(tmp_path) == []
    assert (tmp_path / "chunk-000001.images.npy").read_bytes() == images
    assert_same(PackedSignScenes(tmp_path, 0, 8).truth(7), render_sign_scene(SEED, 7, *SIZE).truth)


def test_ranks_share_the_chunks(tmp_path: Path) -> None:
    assert prepare(tmp_path, count=12, share=(0, 2)) == [(1, 2), (2, 2)]
    assert prepare(tmp_path, count=12, share=(1, 2)) == [(1, 1)]
    assert len(PackedSignScenes(tmp_path, 0, 12)) == 12


def test_chunks_of_lanes_are_not_taken_for_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {sign_scenes_folder(tmp_path, *values) for values in [(0, 64, 160), (1, 64, 160), (0, 160, 64)]}
    folders.add(scenes_folder(tmp_path, 0, 64, 160))
    monkeypatch.setattr(sign_packed, "SIGN_RENDERER_VERSION", sign_packed.SIGN_RENDERER_VERSION + 1)
    folders.add(sign_scenes_folder(tmp_path, 0, 64, 160))
    assert len(folders) == 5 and {folder.parent for folder in folders} == {tmp_path}


def test_a_loader_process_maps_the_files_itself(tmp_path: Path) -> None:
    prepare(tmp_path)
    scenes = PackedSignScenes(tmp_path, 1, 6)
    data = pickle.dumps(scenes)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert len(again) == 6 and again.report.signs == scenes.report.signs
    np.testing.assert_array_equal(again.sample(5).image, scenes.sample(5).image)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"generated scenes cannot be written .*data\.cache_folder"):
        prepare(tmp_path / "file")
