"""Frames like the one before: dropped by a stated rule, counted, decided once, and of training only."""

from __future__ import annotations

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.config import DataConfig, override
from perception.data import near_duplicates
from perception.data.culane import CulaneDataset
from perception.data.near_duplicates import measure_differences, without_near_duplicates
from perception.data.sources import Sources, open_sources, prepare_sources
from perception.errors import UserError
from pipelines.lane import lane
from pipelines.sign import CONFIGS as SIGN_CONFIGS

LINE = "10 59 20 50 31 41\n"


def culane(folder: Path, greys: list[int], validation: list[int] | None = None) -> Path:
    """Frames of one grey each, the n-th with n % 3 lanes; PNG, so that greys are kept as they are."""
    names = [f"driver_1/v.MP4/{number:05d}.png" for number in range(len(greys))]
    for number, (name, grey) in enumerate(zip(names, greys, strict=True)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(folder / name), np.full((60, 80, 3), grey, np.uint8))
        (folder / name).with_suffix(".lines.txt").write_text(LINE * (number % 3))
    (folder / "list").mkdir(exist_ok=True)
    (folder / "list" / "train.txt").write_text("".join(f"/{name}\n" for name in names))
    if validation is not None:
        (folder / "list" / "val.txt").write_text("".join(f"/{names[number]}\n" for number in validation))
    return folder


def opened(folder: Path, threshold: float, **options: object) -> Sources:
    config = DataConfig(
        source=str(folder), drop_near_duplicates=threshold, cache_folder=str(folder.parent / "cache"), **options
    )
    prepare_sources(config, "lane", (0, 1), lambda done, total: None)
    return open_sources(config, "lane")


def kept(sources: Sources) -> list[int]:
    return [int(Path(sources.train.truth(index).name).stem) for index in range(len(sources.train))]


def test_a_frame_less_different_than_the_threshold_from_the_one_before_goes(tmp_path: Path) -> None:
    # Differences: 13 (kept: not below), 12 (dropped), 12 from the dropped one (dropped too), 13, 200.
    culane(tmp_path / "data", [0, 13, 25, 37, 50, 250], validation=[2, 3])
    sources = opened(tmp_path / "data", 13.0)
    assert kept(sources) == [0, 1, 4, 5]
    assert sources.train.sample(2).image[0, 0].tolist() == [50, 50, 50]
    report = sources.train.report
    assert (report.images, report.lanes) == (4, 0 + 1 + 1 + 2)
    assert report.lane_counts == {0: 1, 1: 2, 2: 1}
    assert (
        "2 x frame that differs from the one before by less than 13 grey levels: dropped "
        "(first: driver_1/v.MP4/00002.png)"
    ) in report.lines()
    # Nothing is dropped of what is evaluated, and nothing at all by default.
    assert len(sources.validation) == 2
    assert len(opened(tmp_path / "data", 0.0).train) == 6


def test_what_is_measured_is_a_mean_over_the_frame(tmp_path: Path) -> None:
    folder = culane(tmp_path / "data", [100, 100, 100])
    for number, rows in ((1, 30), (2, 31)):
        image = np.full((60, 80, 3), 100, np.uint8)
        image[:rows] = 140  # 20 grey levels in the mean, then a sixtieth of 40 more
        cv2.imwrite(str(folder / f"driver_1/v.MP4/{number:05d}.png"), image)
    assert kept(opened(folder, 20.0)) == [0, 1]
    assert kept(opened(folder, 20.01)) == [0]
    assert kept(opened(folder, 0.6)) == [0, 1, 2]


@settings(max_examples=12, deadline=None)
@given(
    greys=st.lists(st.integers(0, 255), min_size=1, max_size=12), threshold=st.integers(1, 255), size=st.integers(1, 4)
)
def test_any_number_of_ranks_keeps_the_same(
    greys: list[int], threshold: int, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = culane(tmp_path_factory.mktemp("frames"), greys)
    frames = CulaneDataset(folder, [folder / "list" / "train.txt"])
    expected = [0] + [i for i in range(1, len(greys)) if abs(greys[i] - greys[i - 1]) >= threshold]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_duplicates, "BLOCK_FRAMES", 3)
        cache = folder / "differences"
        for rank in reversed(range(size)):
            measure_differences(frames, cache, (rank, size), lambda done, total: None)
        files = sorted(cache.iterdir())
        assert len(files) == -(-len(greys) // 3)
        some = without_near_duplicates(frames, cache, threshold)
        assert [int(Path(some.truth(i).name).stem) for i in range(len(some))] == expected
        assert sum(some.report.anomalies.values()) - frames.report.anomalies.total() == len(greys) - len(expected)
        assert sorted(cache.iterdir()) == files
        # Without a cache the same is found.
        assert len(without_near_duplicates(frames, folder / "none", threshold)) == len(expected)


def test_frames_are_read_once_and_again_where_they_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = culane(tmp_path / "data", [0, 100, 100, 200])
    assert kept(opened(folder, 13.0)) == [0, 1, 3]
    with monkeypatch.context() as patch:
        patch.setattr(near_duplicates, "_thumbnail", None)  # not callable: frames cannot be read
        assert kept(opened(folder, 13.0)) == [0, 1, 3]
        assert kept(opened(folder, 101.0)) == [0]
    (stored,) = (tmp_path / "cache").rglob("*.npy")
    stored.write_bytes(stored.read_bytes()[:50])  # damaged: measured anew
    assert kept(opened(folder, 13.0)) == [0, 1, 3]
    changed = folder / "driver_1/v.MP4/00002.png"
    cv2.imwrite(str(changed), np.full((60, 80, 3), 150, np.uint8))
    os.utime(changed, (1, 1))
    assert kept(opened(folder, 13.0)) == [0, 1, 2, 3]


def test_progress_tells_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "BLOCK_FRAMES", 2)
    config = DataConfig(
        source=str(culane(tmp_path / "data", [0] * 5)), drop_near_duplicates=1.0, cache_folder=str(tmp_path / "cache")
    )
    seen: list[tuple[int, int]] = []
    prepare_sources(config, "lane", (1, 2), lambda done, total: seen.append((done, total)))
    prepare_sources(config, "lane", (0, 2), lambda done, total: seen.append((done, total)))
    prepare_sources(config, "lane", (0, 1), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 1), (1, 2), (2, 2)]


def test_where_training_images_are_evaluated_all_of_them_are(tmp_path: Path) -> None:
    sources = opened(culane(tmp_path / "data", [0, 1, 100]), 13.0)
    assert len(sources.train) == 2 and len(sources.validation) == 3
    assert any("a check of fit, not of skill" in note for note in sources.notes)


def test_parts_of_a_mixture_are_thinned_each_by_itself(tmp_path: Path) -> None:
    culane(tmp_path / "a", [0, 1, 100], validation=[1])
    culane(tmp_path / "b", [99, 99, 0])
    mixture = tmp_path / "mixture.toml"
    mixture.write_text('[[part]]\nsource = "a"\n[[part]]\nsource = "b"\nweight = 2\n')
    sources = opened(mixture, 13.0)
    assert [sources.train.truth(i).name.replace("/driver_1/v.MP4/", " ") for i in range(len(sources.train))] == [
        "a 00000.png",
        "a 00002.png",
        "b 00000.png",
        "b 00002.png",
    ]
    assert sources.train.frequencies is not None and sources.train.frequencies.tolist() == [1, 1, 2, 2]
    assert sources.train.report.anomalies.total() == 2 + 2  # two dropped, two images without lanes
    # A part without a validation list is still not evaluated on what it trains on.
    assert len(sources.validation) == 1 and any("b: no validation list" in note for note in sources.notes)


def test_a_broken_frame_and_a_cache_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    folder = culane(tmp_path / "data", [0, 100])
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(
        UserError, match=r"differences of frames cannot be written .*: free some space or set data\.cache"
    ):
        opened(folder, 13.0)
    (tmp_path / "cache").unlink()
    (folder / "driver_1/v.MP4/00001.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"00001\.png: image cannot be decoded"):
        opened(folder, 13.0)


def test_the_setting_is_checked() -> None:
    assert override(lane(), ["data.drop_near_duplicates=13"]).data.drop_near_duplicates == 13.0
    with pytest.raises(UserError, match=r"data\.drop_near_duplicates = -1\.0: must not be negative"):
        override(lane(), ["data.drop_near_duplicates=-1"])
    with pytest.raises(UserError, match=r"data\.drop_near_duplicates = 5\.0: only frames of lanes are dropped"):
        override(next(iter(SIGN_CONFIGS.values()))(), ["data.drop_near_duplicates=5"])
