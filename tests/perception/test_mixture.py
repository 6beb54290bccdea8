"""Mixed lane data sets: weights, names, validation, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sign_files import write_image, write_text

from perception.config import DataConfig
from perception.data.mixture import read_mixture
from perception.data.sources import Sources, open_sources
from perception.data.stream import SampleStream
from perception.errors import UserError

LINE = "10 59 20 50 31 41\n"


def culane(folder: Path, num_images: int, validation: bool = False) -> None:
    names = [f"driver_1/v.MP4/{number:05d}.jpg" for number in range(num_images)]
    for name in names:
        write_image(folder / name)
        write_text(folder / name.replace(".jpg", ".lines.txt"), LINE)
    write_text(folder / "list/train.txt", "".join(f"/{name}\n" for name in names))
    if validation:
        write_text(folder / "list/val.txt", f"/{names[0]}\n")


def tusimple(folder: Path, num_images: int) -> None:
    rows = []
    for number in range(num_images):
        write_image(folder / f"clips/{number}/20.jpg")
        rows.append({"raw_file": f"clips/{number}/20.jpg", "lanes": [[10, 20, 30]], "h_samples": [40, 50, 59]})
    write_text(folder / "label_data_0313.json", "".join(json.dumps(row) + "\n" for row in rows))


def opened(folder: Path, text: str) -> Sources:
    write_text(folder / "mixture.toml", text)
    return open_sources(DataConfig(source=str(folder / "mixture.toml")), "lane")


def test_parts_lie_one_behind_the_other_with_their_weights(tmp_path: Path) -> None:
    culane(tmp_path / "cu", 3, validation=True)
    tusimple(tmp_path / "tu", 2)
    sources = opened(tmp_path, '[[part]]\nsource = "cu"\n[[part]]\nsource = "tu"\nweight = 2.5\n')
    names = [sources.train.truth(index).name for index in range(5)]
    assert names[0] == "cu/driver_1/v.MP4/00000.jpg" and names[3:] == ["tu/clips/0/20.jpg", "tu/clips/1/20.jpg"]
    assert sources.train.sample(3).truth.h_samples == (40, 50, 59) and sources.train.sample(3).image.shape == (
        60,
        80,
        3,
    )
    assert (sources.train.report.images, sources.train.report.lanes) == (5, 5)
    assert sources.train.report.lane_counts == {1: 5}
    assert [sources.train.truth(index).category for index in (0, 4)] == ["cu", "tu"]
    # Only what is held out is evaluated, and that is said.
    assert [sources.validation.truth(i).name for i in range(len(sources.validation))] == [names[0]]
    assert any("tu: no validation list, so it is not evaluated" in note for note in sources.notes)
    stream = SampleStream(0, len(sources.train), sources.train.frequencies)
    assert stream.epoch_length == 8
    times = Counter(key.index for key in stream.keys(0, 8 * 50))
    assert [times[index] for index in range(3)] == [50] * 3 and times[3] + times[4] == 5 * 50
    assert np.allclose([times[3], times[4]], 125, atol=1)


def test_without_any_validation_the_fit_is_checked(tmp_path: Path) -> None:
    culane(tmp_path / "cu", 2)
    sources = opened(tmp_path, '[[part]]\nsource = "cu"\n')
    assert len(sources.validation) == 2 and sources.train.frequencies is None
    assert "check of fit" in sources.notes[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no \[\[part\]\]"),
        ("[[part]]\n", "part 1: field source is missing"),
        ('[[parts]]\nsource = "a"\n', '"parts" is unknown'),
        ('[[part]]\nsource = "a"\nwieght = 2\n', r'part 1: field "wieght" is unknown; did you mean "weight"'),
        ('[[part]]\nsource = "a"\nweight = "2"\n', "field weight must be a number"),
        ('[[part]]\nsource = "a"\nweight = 0\n', "weight = 0: must be above 0"),
        ('[[part]]\nsource = "a"\nweight = nan\n', "weight = nan"),
        ("[[part]]\nsource = 3\n", "field source must be a text"),
        ('[[part]]\nsource = "a"\n[[part]]\nsource = "b/a"\n', 'two parts are called "a"'),
        ("[[part]\n", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    write_text(tmp_path / "m.toml", text)
    with pytest.raises(UserError, match=message) as error:
        read_mixture(tmp_path / "m.toml")
    assert "\n" not in str(error.value)


def test_lists_belong_to_the_parts_and_signs_are_not_mixed(tmp_path: Path) -> None:
    culane(tmp_path / "cu", 2)
    write_text(tmp_path / "m.toml", '[[part]]\nsource = "cu"\n')
    config = DataConfig(source=str(tmp_path / "m.toml"), train_list="list/train.txt")
    with pytest.raises(UserError, match=r"data\.train_list .* has its own there"):
        open_sources(config, "lane")
    with pytest.raises(UserError, match="only lane data can be mixed"):
        open_sources(DataConfig(source=str(tmp_path / "m.toml")), "sign")
    with pytest.raises(UserError, match=r"no\.toml: mixture of data sets cannot be read"):
        open_sources(DataConfig(source=str(tmp_path / "no.toml")), "lane")
