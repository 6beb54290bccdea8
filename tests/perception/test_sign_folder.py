"""The folder that every sign reader fills: repairs by stated rules, packed arrays, class maps."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from sign_files import class_counts, ignored, names, signs, write_image, write_text

from perception.data.sample import ReadReport
from perception.data.signs.class_map import apply_class_map, load_class_map
from perception.data.signs.corners import Box
from perception.data.signs.dataset import SignFolder, SignFolderBuilder, box_from_corners, repair_box
from perception.errors import UserError

CLASSES = ("stop", "limit-30", "limit-50", "yield")


def folder_of(*images: list[tuple[str, Box]]) -> SignFolder:
    builder = SignFolderBuilder(Path("data"), CLASSES)
    for index, boxes in enumerate(images):
        builder.add_image(f"{index}.png", f"list:{index + 1}", (60, 80))
        for name, box in boxes:
            builder.add_box(name, box, f"list:{index + 1}", ignored=not name)
    return builder.finish()


@pytest.mark.parametrize(
    ("box", "repaired", "anomaly"),
    [
        ((1, 2, 3, 4), (1, 2, 3, 4), ""),
        ((0, 0, 80, 60), (0, 0, 80, 60), ""),
        ((30, 40, 10, 20), (10, 20, 30, 40), "box with corners swapped: put in order"),
        ((5, 5, 5, 9), None, "box without area: dropped"),
        ((80, 5, 90, 9), None, "box outside the image: dropped"),
        ((-9, 5, 0, 9), None, "box outside the image: dropped"),
        ((-0.5, 5, 80.00000001, 1e300), (0, 5, 80, 60), "box leaves the image: clipped"),
    ],
)
def test_a_box_is_repaired_by_a_stated_rule_and_counted(box: Box, repaired: Box | None, anomaly: str) -> None:
    report = ReadReport()
    assert repair_box(box, 60, 80, "labels:7", report) == repaired
    assert report.lines() == ([f"1 x {anomaly} (first: labels:7)"] if anomaly else [])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_coordinate_that_is_not_finite_is_refused(wrong: float) -> None:
    with pytest.raises(UserError, match=r"labels:7: box .* has a coordinate that is not finite"):
        repair_box((1, 2, wrong, 4), 60, 80, "labels:7", ReadReport())


def test_swapped_corners_are_put_in_order_before_the_last_pixel_is_added() -> None:
    report = ReadReport()
    assert box_from_corners((20, 30, 10, 5), "one-based-inclusive", "f:1", report) == (9, 4, 20, 30)
    assert box_from_corners((0, 3, 4, 5), "one-based-inclusive", "f:2", report) == (-1, 2, 4, 5)
    assert list(report.anomalies) == [
        "box with corners swapped: put in order",
        "corner at 0 where one-based-inclusive counts from 1: are these corners 0-based?",
    ]


def test_images_keep_their_own_boxes_ignored_regions_and_names() -> None:
    dataset = folder_of([("stop", (1, 1, 5, 5)), ("", (7, 7, 9, 9))], [], [("yield", (2, 2, 4, 4))])
    assert names(dataset) == ["0.png", "1.png", "2.png"]
    assert [signs(dataset, index) for index in range(3)] == [[("stop", [1, 1, 5, 5])], [], [("yield", [2, 2, 4, 4])]]
    assert ignored(dataset) == [[7, 7, 9, 9]]
    assert (dataset.report.images, dataset.report.signs) == (3, 2)
    assert dataset.truth(1).boxes.shape == (0, 4) and dataset.truth(1).labels.dtype == np.int64
    for index in (-1, 3):
        with pytest.raises(IndexError):
            dataset.truth(index)


def test_a_box_that_stands_twice_is_noted_within_its_image_only() -> None:
    twice = ("stop", (1.0, 1.0, 5.0, 5.0))
    dataset = folder_of([twice], [twice, twice])
    assert dataset.report.anomalies == {"box stands twice in an image: kept twice": 1}
    assert dataset.report.examples["box stands twice in an image: kept twice"] == "list:2"


def test_mistakes_are_named_with_their_place() -> None:
    builder = SignFolderBuilder(Path("data"), CLASSES)
    builder.add_image("a.png", "list:1", (60, 80))
    with pytest.raises(UserError, match=r"list:2: image a\.png is listed a second time"):
        builder.add_image("a.png", "list:2", (60, 80))
    for size in ((0, 80), (60, -1), (60, 1 << 40)):
        with pytest.raises(UserError, match=r"list:3: image b\.png is said to be"):
            builder.add_image("b.png", "list:3", size)
    with pytest.raises(UserError, match=r'list:4: class "limit-3" is unknown; did you mean "limit-30"\?'):
        builder.add_box("limit-3", (1, 1, 1, 1), "list:4")


def test_labels_of_another_image_size_are_refused_when_the_image_is_read(tmp_path: Path) -> None:
    write_image(tmp_path / "größe.png", 60, 80)
    builder = SignFolderBuilder(tmp_path, CLASSES)
    builder.add_image("größe.png", "list:1", (61, 80))
    with pytest.raises(UserError, match=r"größe\.png: image is 80x60, its labels are for 80x61"):
        builder.finish().sample(0)


def test_many_boxes_are_a_few_flat_arrays() -> None:
    num_images, num_boxes = 500, 40
    tracemalloc.start()
    builder = SignFolderBuilder(Path("data"), CLASSES)
    for image in range(num_images):
        builder.add_image(f"images/{image:06d}.jpg", "list:1", (600, 800))
        for box in range(num_boxes):
            builder.add_box("stop", (box, image % 500, box + 9.5, image % 500 + 9), "list:1")
    dataset = builder.finish()
    del builder
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 32 bytes of box and 8 of label; names, sizes and the arrays' heads are the rest.
    assert kept_bytes < 45 * num_images * num_boxes
    assert len(pickle.dumps(dataset)) < 42 * num_images * num_boxes
    again = pickle.loads(pickle.dumps(dataset))
    assert again.truth(499).name == "images/000499.jpg" and len(again.truth(499).boxes) == num_boxes


def private_kib() -> int:
    """Memory of this process that it shares with no other."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


def read_all(dataset: SignFolder, grown_kib: multiprocessing.SimpleQueue[int]) -> None:
    before = private_kib()
    for index in range(len(dataset)):
        dataset.truth(index)
    grown_kib.put(private_kib() - before)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="private memory is told by Linux only")
def test_four_loader_processes_share_a_million_boxes() -> None:
    num_images, num_boxes = 5_000, 1_000_000
    boxes = np.tile(np.array([1.0, 2.0, 3.0, 4.0]), (num_boxes, 1))
    starts = np.linspace(0, num_boxes, num_images + 1).astype(np.int64)
    sizes = np.tile(np.array([600, 800], dtype=np.int32), (num_images, 1))
    names = [f"images/{index}.jpg" for index in range(num_images)]
    labels = np.zeros(num_boxes, dtype=np.int64)
    dataset = SignFolder(Path("data"), CLASSES, names, sizes, starts, boxes, labels, ReadReport())
    forked = multiprocessing.get_context("fork")
    grown_kib = forked.SimpleQueue()
    processes = [forked.Process(target=read_all, args=(dataset, grown_kib)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    # The arrays are 40 MB; what grows is the interpreter's own.
    assert all(grown_kib.get() < 4_000 for _ in processes)


MAPPED = """
drop = ["yield"]
[rename]
"stop" = "halt"
[merge]
"limit" = ["limit-30", "limit-50"]
"""
ALL_FOUR = [("stop", (1, 1, 5, 5)), ("limit-50", (2, 2, 5, 5)), ("yield", (3, 3, 5, 5)), ("limit-30", (4, 4, 6, 6))]


def mapped(tmp_path: Path, text: str) -> SignFolder:
    write_text(tmp_path / "map.toml", text)
    return apply_class_map(folder_of([], ALL_FOUR, ALL_FOUR[:1]), load_class_map(str(tmp_path / "map.toml")))


def test_a_class_map_merges_renames_and_drops_by_name(tmp_path: Path) -> None:
    dataset = mapped(tmp_path, MAPPED)
    assert dataset.classes == ("halt", "limit")
    assert signs(dataset, 1) == [("halt", [1, 1, 5, 5]), ("limit", [2, 2, 5, 5]), ("limit", [4, 4, 6, 6])]
    assert signs(dataset, 2) == [("halt", [1, 1, 5, 5])] and signs(dataset, 0) == []
    assert dataset.report.lines() == ["1 x sign of a class that the class map says is dropped (first: 1.png)"]
    assert dataset.report.signs == 4


def test_a_class_map_ignores_what_it_says_and_the_others_where_it_says_so(tmp_path: Path) -> None:
    dataset = mapped(tmp_path, 'others = "ignore"\n[merge]\n"limit" = ["limit-30", "limit-50"]\n')
    assert dataset.classes == ("limit",) and class_counts(dataset) == {"limit": 2}
    assert ignored(dataset, 1) == [[1, 1, 5, 5], [3, 3, 5, 5]]
    assert dataset.report.anomalies == {"sign of a class that the class map says is ignored": 3}


def test_a_new_name_takes_in_a_class_that_has_it_already(tmp_path: Path) -> None:
    dataset = mapped(tmp_path, '[rename]\n"limit-30" = "stop"\n')
    assert dataset.classes == ("stop", "limit-50", "yield")
    assert class_counts(dataset) == {"stop": 3, "limit-50": 1, "yield": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('drop = ["stopp"]', r'map\.toml: class "stopp" is none of the data set\'s; did you mean "stop"\?'),
        ('drip = ["stop"]', r'map\.toml: field drip is unknown; did you mean "drop"\?'),
        ('drop = "stop"', r"map\.toml: field drop must be a list of classes, got 'stop'"),
        ("drop = 2001-01-01", r"map\.toml: field drop must be a list of classes, got datetime\.date"),
        ("ignore = [3]", r"map\.toml: field ignore must hold names of classes, got 3"),
        ('rename = ["stop"]', r"map\.toml: field rename must be a table, \[rename\], got \['stop'\]"),
        ('[merge]\na = ["stop"]\nb = ["stop"]', r'map\.toml: class "stop" is mapped twice'),
        ('others = "kept"', r"map\.toml: field others = 'kept' is unknown; allowed: keep, drop, ignore"),
        ('drop = ["stop"', r"map\.toml: class map is not TOML \(Unclosed array"),
        ("", r"map\.toml: class map names no class"),
        ('drop = ["stop"]\nothers = "ignore"', r"map\.toml: no class is left"),
    ],
)
def test_a_wrong_class_map_is_named_with_its_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mapped(tmp_path, text)


def test_an_unknown_map_is_neither_a_file_nor_built_in() -> None:
    with pytest.raises(UserError, match=r'class map gtsdb-super: no such file, .*did you mean "gtsdb-superclasses"'):
        load_class_map("gtsdb-super")
