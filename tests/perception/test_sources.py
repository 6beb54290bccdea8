"""Which data a configuration means; a missing validation list is told, a broken one is an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from perception.config import DataConfig
from perception.config_checks import BENCHMARKS, CHOICES, FORMATS, TARGETS
from perception.data import packed
from perception.data.generated import SCENE_STYLES, render_scene
from perception.data.open import FORMATS as LANE_FORMATS
from perception.data.packed import PackedScenes
from perception.data.sample import LanePrediction, LaneTruth, ReadReport
from perception.data.signs.cache import CachedImages
from perception.data.signs.open import FORMATS as SIGN_FORMATS
from perception.data.sources import (
    FIRST_TRAINING_SCENE,
    check_target,
    open_sources,
    prepare_sources,
    user_cache,
)
from perception.errors import MissingListError, UserError
from perception.metrics import lane_benchmarks
from perception.tasks import LaneMetric

REAL = Path(__file__).parents[2] / ".." / "shared" / "data" / "tusimple_mini"


def tusimple(folder: Path, list_name: str, names: list[str], with_images: bool = True) -> None:
    rows = list(range(40, 100, 10))
    lines = []
    for name in names:
        raw_file = f"clips/{name}/20.png"
        lines.append(json.dumps({"raw_file": raw_file, "lanes": [[50 + y for y in rows]], "h_samples": rows}))
        if with_images:
            (folder / raw_file).parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(folder / raw_file), np.zeros((128, 192, 3), np.uint8))
    (folder / list_name).write_text("\n".join(lines) + "\n")


def config(folder: Path, validation_list: str = "", format: str = "auto") -> DataConfig:
    return DataConfig(source=str(folder), validation_list=validation_list, format=format)


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    tusimple(tmp_path, "label_data_0313.json", ["a", "b", "c"])
    return tmp_path


def test_official_lists_are_taken_without_a_note(labelled: Path) -> None:
    tusimple(labelled, "label_data_0531.json", ["d"])
    sources = open_sources(config(labelled), "lane")
    assert [len(sources.train), len(sources.validation)] == [3, 1] and sources.notes == ()
    assert sources.validation.truth(0).name == "clips/d/20.png"


def test_a_target_that_the_validation_images_give_no_figure_of_is_refused_at_once(labelled: Path) -> None:
    validation = open_sources(config(labelled), "lane").validation
    for metric in ("", "culane_f1_50", "tusimple_accuracy"):
        check_target(metric, validation)
    with pytest.raises(UserError, match="= llamas_f1_50: no validation image is of the format llamas"):
        check_target("llamas_f1_50", validation)


class _Labels:
    """Labelled images of which nobody asks for pixels."""

    def __init__(self, truths: Sequence[LaneTruth]) -> None:
        self.report, self.truths = ReadReport(), truths

    def __len__(self) -> int:
        return len(self.truths)

    def truth(self, index: int) -> LaneTruth:
        return self.truths[index]

    def sample(self, index: int) -> None: ...


def test_every_figure_of_a_benchmark_may_be_aimed_at() -> None:
    assert set(BENCHMARKS) == set(lane_benchmarks.BENCHMARKS)
    other = LaneTruth("other", 720, 1280, ())
    for name in BENCHMARKS:
        metric, truth = LaneMetric(), LaneTruth("x", 720, 1280, (), benchmark=name)
        metric.update([LanePrediction((), ())], [truth])
        figures = {figure for figure in metric.compute() if figure.startswith(f"{name}_")}
        assert len(figures) == 3
        assert figures == {target for target in TARGETS["lane"] if target.startswith(f"{name}_")}
        for figure in figures:
            check_target(figure, _Labels([other, truth]))


def test_without_a_validation_list_the_training_images_are_evaluated_and_it_is_said(labelled: Path) -> None:
    sources = open_sources(config(labelled), "lane")
    assert sources.validation is sources.train
    (note,) = sources.notes
    assert str(labelled) in note and "no validation list" in note and "a check of fit, not of skill" in note


def test_training_images_asked_for_as_validation_are_told_too(labelled: Path) -> None:
    sources = open_sources(config(labelled, validation_list="train"), "lane")
    assert len(sources.validation) == 3
    assert sources.notes == ('data.validation_list = "train": the training images are evaluated: '
                             "a check of fit, not of skill",)  # fmt: skip


@pytest.mark.parametrize("text", ["{", "", '{"raw_file": "clips/a/20.png"}\n', "[1, 2]\n"])
def test_a_broken_official_validation_list_is_an_error(text: str, labelled: Path) -> None:
    (labelled / "label_data_0531.json").write_text(text)
    with pytest.raises(UserError, match=r"label_data_0531\.json") as caught:
        open_sources(config(labelled), "lane")
    assert not isinstance(caught.value, MissingListError)


def test_validation_images_that_are_missing_are_an_error(labelled: Path) -> None:
    tusimple(labelled, "label_data_0531.json", ["x", "y"], with_images=False)
    with pytest.raises(UserError, match=r"2 of 2 listed images are missing, first: clips/x/20\.png"):
        open_sources(config(labelled), "lane")


@pytest.mark.parametrize("name", ["mine.json", "validation", "test"])
def test_a_named_validation_list_that_is_not_there_is_an_error(name: str, labelled: Path) -> None:
    with pytest.raises(UserError, match=r"list file does not exist|no label_data_0531\.json|no test_label\.json"):
        open_sources(config(labelled, validation_list=name), "lane")


def test_a_missing_training_list_is_an_error(labelled: Path) -> None:
    (labelled / "label_data_0313.json").rename(labelled / "label_data_0531.json")
    with pytest.raises(MissingListError, match=r"no label_data_0313\.json or label_data_0601\.json for train"):
        open_sources(config(labelled), "lane")


def test_culane_without_a_validation_list(tmp_path: Path) -> None:
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "train_gt.txt").write_text("/d/1.png\n")
    (tmp_path / "d").mkdir()
    cv2.imwrite(str(tmp_path / "d" / "1.png"), np.zeros((100, 200, 3), np.uint8))
    (tmp_path / "d" / "1.lines.txt").write_text("50 90 60 50\n")
    assert len(open_sources(config(tmp_path), "lane").notes) == 1
    (tmp_path / "list" / "val_gt.txt").write_text("/d/2.png\n")
    with pytest.raises(UserError, match="missing"):
        open_sources(config(tmp_path), "lane")


def test_folders_and_formats_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data folder does not exist"):
        open_sources(config(tmp_path / "none"), "lane")
    with pytest.raises(UserError, match=r"set data\.format to tusimple or culane"):
        open_sources(config(tmp_path), "lane")
    with pytest.raises(UserError, match=r"data\.format = generated, but data\.source"):
        open_sources(config(tmp_path, format="generated"), "lane")


def generated(cache: Path) -> DataConfig:
    return DataConfig(
        num_train_scenes=5, num_validation_scenes=3, scene_height=64, scene_width=160, cache_folder=str(cache)
    )


def test_generated_scenes_are_prepared_once_and_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "CHUNK_SCENES", 4)
    reports: list[tuple[int, int]] = []
    for _ in range(2):
        prepare_sources(generated(tmp_path), "lane", (0, 1), lambda done, total: reports.append((done, total)))
    assert reports == [(1, 2), (2, 2), (1, 1)]
    sources = open_sources(generated(tmp_path), "lane")
    assert isinstance(sources.train, PackedScenes) and sources.notes == ()
    names = [[part.truth(index).name for index in range(len(part))] for part in (sources.train, sources.validation)]
    assert [len(part) for part in names] == [5, 3] and len(set(names[0] + names[1])) == 8


def test_scenes_of_each_style_lie_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "CHUNK_SCENES", 2)
    assert CHOICES["data.scene_style"] == SCENE_STYLES and DataConfig().scene_style == "v1"
    small = DataConfig(num_train_scenes=2, num_validation_scenes=2, scene_height=64, scene_width=160)
    for style in SCENE_STYLES:
        data = replace(small, scene_style=style, cache_folder=str(tmp_path))
        prepare_sources(data, "lane", (0, 1), lambda done, total: None)
        seen = open_sources(data, "lane").validation.sample(1)
        expected = render_scene(0, 1, 64, 160, style)
        assert np.abs(seen.image.astype(int) - expected.image).mean() < 4
        np.testing.assert_array_equal(seen.truth.lanes[0], expected.truth.lanes[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"scenes-{s}-seed0-64x160" for s in SCENE_STYLES]
    with pytest.raises(UserError, match=r"data\.scene_style = v2: scenes of signs are of style v1 only"):
        prepare_sources(replace(small, scene_style="v2", cache_folder=str(tmp_path)), "sign", (0, 1), lambda *_: None)


def test_validation_scenes_may_not_reach_the_training_ones(tmp_path: Path) -> None:
    wrong = replace(generated(tmp_path), num_validation_scenes=FIRST_TRAINING_SCENE + 1)
    with pytest.raises(UserError, match=r"data\.num_validation_scenes = 1000001: must be at most 1000000"):
        prepare_sources(wrong, "lane", (0, 1), lambda done, total: None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_needs_no_preparation(tmp_path: Path) -> None:
    prepare_sources(config(tmp_path / "none"), "lane", (0, 1), lambda done, total: None)


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "roadfuse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "roadfuse"


# --- Signs ---


def gtsdb(folder: Path, lines: str, numbers: tuple[int, ...] = (1, 2, 3, 8)) -> DataConfig:
    (folder / "images").mkdir()
    for number in numbers:
        cv2.imwrite(str(folder / "images" / f"{number:05}.png"), np.zeros((40, 60, 3), np.uint8))
    (folder / "gt.txt").write_text(lines)
    return DataConfig(source=str(folder))


def test_sign_formats_of_the_configuration_are_those_that_can_be_read() -> None:
    assert {*FORMATS["sign"]} == {*SIGN_FORMATS, "generated"} and {*FORMATS["lane"]} == {*LANE_FORMATS, "generated"}


def test_a_sign_folder_gives_both_parts_and_says_what_cannot_be_learnt(tmp_path: Path) -> None:
    config = gtsdb(tmp_path, "00001.ppm;1;1;20;20;14\n00003.ppm;1;1;20;20;0\n00008.ppm;1;1;20;20;13\n")
    sources = open_sources(config, "sign")
    assert [len(sources.train), len(sources.validation)] == [3, 1]
    assert sources.train.report.signs == 2 and sources.train.classes == sources.validation.classes
    (note,) = sources.notes
    assert note.startswith("41 of 43 classes have no sign to train on: speed-limit-30, ") and note.endswith(", ...")
    assert not isinstance(sources.train, CachedImages)
    assert isinstance(open_sources(replace(config, image_cache_mib=1), "sign").train, CachedImages)


def test_corners_and_class_map_are_the_configurations(tmp_path: Path) -> None:
    config = gtsdb(tmp_path, "00001.ppm;2;3;20;20;14\n00008.ppm;1;1;20;20;13\n")
    given = replace(config, corners="half-open", class_map="gtsdb-superclasses")
    assert open_sources(config, "sign").train.truth(0).boxes.tolist() == [[1, 2, 20, 20]]
    assert open_sources(given, "sign").train.truth(0).boxes.tolist() == [[2, 3, 20, 20]]
    assert set(open_sources(given, "sign").train.classes) == {"prohibitory", "danger", "mandatory", "other"}


def test_generated_signs_lie_beside_generated_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "CHUNK_SCENES", 2)
    config = replace(generated(tmp_path), num_train_scenes=2, num_validation_scenes=1)
    for task in ("lane", "sign"):
        prepare_sources(config, task, (0, 1), lambda done, total: None)
    signs, lanes = open_sources(config, "sign"), open_sources(config, "lane")
    assert len(signs.train.classes) == 43 and len(signs.train) == len(lanes.train) == 2
    assert signs.train.sample(0).image.shape == lanes.train.sample(0).image.shape
    assert len(list(tmp_path.iterdir())) == 2


def test_importing_the_readers_loads_no_torch() -> None:
    code = (
        "import sys, perception.data.sources; sys.exit(', '.join({'torch', 'albumentations'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not REAL.is_dir(), reason="real TuSimple frames are not at ../shared/data")
def test_real_frames_without_a_validation_list() -> None:
    sources = open_sources(config(REAL), "lane")
    assert len(sources.train) > 0 and len(sources.notes) == 1
    assert sources.train.sample(0).image.shape[:2] == (720, 1280)
