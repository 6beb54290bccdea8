"""Packed scenes: what was rendered, complete or rendered again, whoever else writes."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from perception.data import packed
from perception.data.generated import render_scene, scene_truth
from perception.data.packed import PackedScenes, prepare_chunks, scenes_folder
from perception.errors import UserError

SIZE = (64, 160)
SEED = 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "CHUNK_SCENES", 4)


def prepare(folder: Path, first: int = 0, count: int = 8, share: tuple[int, int] = (0, 1)) -> list[tuple[int, int]]:
    """What was reported: a (done, total) for each chunk rendered."""
    reports: list[tuple[int, int]] = []
    prepare_chunks(folder, SEED, *SIZE, first, count, share, lambda done, total: reports.append((done, total)))
    return reports


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_samples_are_what_was_rendered(tmp_path: Path) -> None:
    """First and last scene lie within chunks, not at their borders."""
    assert prepare(tmp_path, first=2, count=7) == [(1, 3), (2, 3), (3, 3)]
    scenes = PackedScenes(tmp_path, 2, 7)
    assert len(scenes) == 7 and scenes.report.images == 7
    for index in range(7):
        expected = render_scene(SEED, 2 + index, *SIZE)
        sample = scenes.sample(index)
        assert sample.image.shape == (*SIZE, 3) and sample.image.dtype == np.uint8
        difference = np.abs(sample.image.astype(int) - expected.image)
        assert difference.mean() < 4, "JPEG at high quality"
        # Red and blue are not exchanged: the error is far below that of another order.
        assert difference.mean() <= np.abs(sample.image[:, :, ::-1].astype(int) - expected.image).mean()
        for truth in (sample.truth, scenes.truth(index)):
            assert (truth.name, truth.height, truth.width) == (expected.truth.name, *SIZE)
            assert (truth.h_samples, truth.category) == (expected.truth.h_samples, expected.truth.category)
            assert len(truth.lanes) == len(expected.truth.lanes)
            for lane, original in zip(truth.lanes, expected.truth.lanes, strict=True):
                np.testing.assert_array_equal(lane, original)
                assert lane.dtype == np.float64
    assert scenes.report.lanes == sum(len(scene_truth(SEED, 2 + index, *SIZE).lanes) for index in range(7))


def test_a_second_preparation_renders_nothing(tmp_path: Path) -> None:
    prepare(tmp_path)
    before = files(tmp_path)
    assert sorted(before) == [f"chunk-00000{n}.{kind}" for n in (0, 1) for kind in ("images.npy", "labels.npz")]
    assert prepare(tmp_path) == [] and files(tmp_path) == before
    assert prepare(tmp_path, count=9) == [(1, 1)], "a longer set renders what is new"


def test_index_out_of_range(tmp_path: Path) -> None:
    prepare(tmp_path, count=3)
    scenes = PackedScenes(tmp_path, 0, 3)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            scenes.sample(index)


def flipped(data: bytes, place: float) -> bytes:
    changed = bytearray(data)
    changed[int(len(data) * place)] ^= 0x10
    return bytes(changed)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: flipped(data, 0.0),
        lambda data: flipped(data, 0.5),
        lambda data: flipped(data, 0.9),
        lambda data: b"not a file of numpy at all",
        lambda data: pickle.dumps([1, 2, 3]),
        None,
    ],
)
@pytest.mark.parametrize("kind", ["images.npy", "labels.npz"])
def test_a_damaged_or_missing_chunk_is_rendered_again(
    kind: str, damage: Callable[[bytes], bytes] | None, tmp_path: Path
) -> None:
    prepare(tmp_path)
    path = tmp_path / f"chunk-000001.{kind}"
    images = files(tmp_path)["chunk-000001.images.npy"]
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    assert prepare(tmp_path) == [(1, 1)]
    assert files(tmp_path)["chunk-000001.images.npy"] == images
    assert len(PackedScenes(tmp_path, 0, 8).sample(7).truth.lanes) == len(scene_truth(SEED, 7, *SIZE).lanes)


def test_chunks_without_a_checksum_are_rendered_again(tmp_path: Path) -> None:
    prepare(tmp_path, count=4)
    path = tmp_path / "chunk-000000.labels.npz"
    with np.load(path) as file:
        older = {name: file[name] for name in file.files if name != "images_crc32"}
    np.savez(path, **older)
    assert prepare(tmp_path, count=4) == [(1, 1)]


def test_ranks_that_come_late_leave_no_gap(tmp_path: Path) -> None:
    """A rank takes its chunks by number: what others have done by then must not shift its share."""
    for rank in range(3):
        prepare(tmp_path, count=28, share=(rank, 3))
    assert len(files(tmp_path)) == 14
    assert len(PackedScenes(tmp_path, 0, 28)) == 28


def test_shares_are_disjoint_and_even(tmp_path: Path) -> None:
    rendered = []
    for rank in range(3):
        folder = tmp_path / str(rank)
        prepare(folder, count=28, share=(rank, 3))
        rendered.append(sorted(files(folder)))
    assert [len(names) // 2 for names in rendered] == [3, 2, 2]
    assert len({name for names in rendered for name in names}) == 14


def test_opening_what_was_not_prepared_or_was_damaged_since(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"part 0 cannot be read .*run again to render them"):
        PackedScenes(tmp_path, 0, 4)
    prepare(tmp_path)
    (tmp_path / "chunk-000001.images.npy").write_bytes(b"")
    with pytest.raises(UserError, match="part 1 cannot be read"):
        PackedScenes(tmp_path, 0, 8)


def test_a_failed_write_leaves_no_temporary_file_and_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, count=4)
    before = files(tmp_path)

    def fail(path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\): free some space or set data"):
        prepare(tmp_path)
    after = files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) <= {"chunk-000001.images.npy"}
    monkeypatch.undo()
    monkeypatch.setattr(packed, "CHUNK_SCENES", 4)
    assert prepare(tmp_path) == [(1, 1)]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "scenes"):
        with pytest.raises(UserError, match=r"generated scenes cannot be written .*data\.cache_folder"):
            prepare(folder)


def test_a_cache_on_a_full_disk(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (1 << 19))
    with pytest.raises(UserError, match="No space left on device"):
        prepare(small_disk / "scenes", count=400)
    assert not [path for path in (small_disk / "scenes").iterdir() if path.name.startswith(".")]


def test_the_folder_is_of_style_seed_and_size(tmp_path: Path) -> None:
    folders = {scenes_folder(tmp_path, *values) for values in [(0, 64, 160), (1, 64, 160), (0, 160, 64)]}
    folders.add(scenes_folder(tmp_path, 0, 64, 160, "v2"))
    assert len(folders) == 4 and {folder.parent for folder in folders} == {tmp_path}


def test_a_loader_process_maps_the_files_itself(tmp_path: Path) -> None:
    """Pickled, the set is its place on disk, not its images."""
    prepare(tmp_path)
    scenes = PackedScenes(tmp_path, 1, 6)
    buffer = io.BytesIO()
    pickle.dump(scenes, buffer)
    assert buffer.tell() < 1000
    buffer.seek(0)
    again = pickle.load(buffer)
    assert len(again) == 6 and again.report.lanes == scenes.report.lanes
    np.testing.assert_array_equal(again.sample(5).image, scenes.sample(5).image)


_PREPARE = """
import sys
from pathlib import Path
from perception.data import packed
packed.CHUNK_SCENES = 4
packed.prepare_chunks(Path(sys.argv[1]), 3, 64, 160, 0, 24, (0, 1), lambda done, total: print(done, total))
"""


@pytest.mark.slow
def test_two_processes_at_once_end_with_one_good_pack(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _PREPARE, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(2)
    ]
    reported = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all(b"6" in lines or not lines for lines in reported)
    assert len(files(tmp_path)) == 12 and prepare(tmp_path, count=24) == []
    alone = tmp_path / "alone"
    prepare(alone, count=24)
    written = {name: data for name, data in files(alone).items() if "images" in name}
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.images.npy")} == written
