"""Images, folders, lists and videos: official files, nothing dropped silently, Ctrl-C keeps what is done."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest

from perception.config import RunConfig
from perception.data.culane import read_label_file
from perception.data.images import read_image
from perception.data.sample import LanePrediction, ReadReport
from perception.data.signs.sample import SignPrediction
from perception.data.tusimple import read_tusimple_file
from perception.draw import write_image
from perception.errors import UserError
from perception.onnx_model import OnnxModel, Prediction
from perception.predict import PARTS, predict_frames
from perception.predict_inputs import Frame, Input, open_input
from perception.predict_outputs import (
    CocoWriter,
    CulaneWriter,
    DrawingWriter,
    TusimpleWriter,
    VideoDrawingWriter,
    Writer,
    check_format,
)
from perception.video import VideoReader, VideoWriter
from tests.exported_models import CONFIG, NEEDS_EXPORT, STUB_XS, stub_file

pytestmark = NEEDS_EXPORT


def picture(path: Path, height: int = 59, width: int = 164, value: int = 90) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_image(path, np.full((height, width, 3), value, np.uint8))
    return path


def clip(path: Path, frames: int = 12, height: int = 72, width: int = 128) -> Path:
    writer = VideoWriter(path, height, width, 20.0)
    for number in range(frames):
        writer.write(np.full((height, width, 3), 20 * number % 240, np.uint8))
    writer.finish()
    return path


def names(frames: Input) -> list[str]:
    return [frame.name for frame in frames]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def model(tmp_path: Path) -> OnnxModel:
    return OnnxModel(stub_file(tmp_path / "model.onnx"), num_threads=1)


# What is taken.


def test_a_folder_is_read_in_order_and_its_other_files_are_told(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.PNG", "sub/ä ö.jpg"):
        picture(tmp_path / "in" / name.lower()).rename(tmp_path / "in" / name)
    (tmp_path / "in" / "notes.txt").write_text("")
    found = open_input(tmp_path / "in")
    assert names(found) == ["a.PNG", "b.jpg", "sub/ä ö.jpg"] and found.num_frames == 3
    assert found.notes == [f"{tmp_path / 'in'}: 1 files that are no images passed over (first: notes.txt)"]


@pytest.mark.parametrize("place", ["list/train.txt", "list/test_split/test0_normal.txt", "train.txt"])
def test_a_culane_list_finds_its_images_from_where_it_lies(place: str, tmp_path: Path) -> None:
    picture(tmp_path / "driver_1/05.MP4/00000.jpg")
    picture(tmp_path / "driver_1/05.MP4/00030.png")
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    lines = ["/driver_1/05.MP4/00000.jpg /mask.png 1 1 0 0", "/driver_1/05.MP4/00030.jpg ", ""]
    (tmp_path / place).write_text("\n".join([*lines, lines[0]]) + "\n")
    found = open_input(tmp_path / place)
    # Named as the list names it, though the file is a .png.
    assert names(found) == ["driver_1/05.MP4/00000.jpg", "driver_1/05.MP4/00030.jpg"]
    assert any("image listed twice: predicted once" in note for note in found.notes)
    assert names(open_input(tmp_path / place, root=tmp_path)) == names(found)


def test_a_tusimple_list_brings_its_rows(tmp_path: Path) -> None:
    picture(tmp_path / "clips/1/20.jpg")
    line = {"raw_file": "clips/1/20.jpg", "lanes": [], "h_samples": [30, 40, 50]}
    (tmp_path / "tasks.json").write_text(json.dumps(line) + "\n")
    (frame,) = open_input(tmp_path / "tasks.json")
    assert (frame.name, frame.h_samples) == ("clips/1/20.jpg", (30, 40, 50))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing", "missing: no such image, folder, list or video"),
        ("empty", "no image (.jpg, "),
        ("only_video", r"; give a video by itself, e.g. "),
        ("a.docx", "neither an image or video"),
        ("gone.txt", "2 of 2 listed images are missing, first: x/1.jpg, x/2.jpg; give the folder"),
        ("above.txt", "above.txt:1: ../secret.jpg: an image path must not leave the data folder"),
        ("empty.txt", "list file names no image"),
        ("bare.json", "bare.json:1: clips/1/20: an image path with its suffix is wanted"),
        ("broken.json", "broken.json:1: not JSON"),
        ("twins", "a.jpg and a.png would be written to files of the same name"),
        ("cut.mp4", "cut.mp4: cannot be read as a video"),
    ],
)
def test_bad_input_is_one_line(given: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "only_video").mkdir()
    clip(tmp_path / "only_video" / "v.mp4")
    for name, content in [
        ("a.docx", "x"),
        ("gone.txt", "/x/1.jpg\n/x/2.jpg\n"),
        ("above.txt", "../secret.jpg\n"),
        ("empty.txt", ""),
        ("broken.json", "{\n"),
        ("bare.json", json.dumps({"raw_file": "clips/1/20", "lanes": []}) + "\n"),
    ]:
        (tmp_path / name).write_text(content)
    picture(tmp_path / "twins/a.jpg")
    picture(tmp_path / "twins/a.png")
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "only_video/v.mp4").read_bytes()[:900])
    with pytest.raises(UserError) as error:
        open_input(tmp_path / given)
    assert message in str(error.value) and "\n" not in str(error.value)
    # Nor does a library write lines of its own around it.
    assert capfd.readouterr().err == ""


def test_root_is_for_lists_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="goes with a list of images"):
        open_input(picture(tmp_path / "a.jpg"), root=tmp_path)
    (tmp_path / "l.txt").write_text("/a.jpg\n")
    with pytest.raises(UserError, match=r"--root .*none: folder does not exist"):
        open_input(tmp_path / "l.txt", root=tmp_path / "none")


def test_a_video_is_all_its_frames_named_as_culane_names_them(tmp_path: Path) -> None:
    found = open_input(clip(tmp_path / "v.mp4"))
    frames = list(found)
    assert [frame.name for frame in frames] == [f"v.mp4/{number:05d}.jpg" for number in range(12)]
    assert found.num_frames == 12 and found.video is not None and found.video.frames_per_second == 20
    # RGB, and in order.
    brightness = [float(frame.image.mean()) for frame in frames if frame.image is not None]
    np.testing.assert_allclose(brightness, 20.0 * np.arange(12), atol=6)


# What is written.


def test_culane_files_hold_the_lanes_in_pixels_of_each_image(model: OnnxModel, tmp_path: Path) -> None:
    picture(tmp_path / "in/x/1.jpg", 590, 1640)
    # An odd width is halved without its last column.
    picture(tmp_path / "in/2.jpg", 71, 333)
    report = predict_frames(model, open_input(tmp_path / "in"), [CulaneWriter(tmp_path / "out")])
    assert (report.num_images, report.num_objects, report.num_empty, report.problems) == (2, 4, 0, [])
    for name, width in (("x/1.lines.txt", 1640), ("2.lines.txt", 332)):
        read = ReadReport()
        lanes = read_label_file(tmp_path / "out" / name, read)
        assert not read.anomalies
        for lane, x in zip(lanes, STUB_XS, strict=True):
            np.testing.assert_allclose(lane[:, 0], (x + 0.5) * width / 160 - 0.5, atol=1e-3)
    assert sorted(path.name for path in (tmp_path / "out").rglob("*.txt")) == ["1.lines.txt", "2.lines.txt"]


def test_an_image_without_lanes_is_an_empty_file(tmp_path: Path) -> None:
    model = OnnxModel(stub_file(tmp_path / "m.onnx", bright_only=True))
    picture(tmp_path / "in/dark.png", value=0)
    picture(tmp_path / "in/bright.png", value=255)
    report = predict_frames(model, open_input(tmp_path / "in"), [CulaneWriter(tmp_path / "out")], batch_size=2)
    assert (report.num_images, report.num_empty) == (2, 1)
    assert (tmp_path / "out/dark.lines.txt").read_bytes() == b"" and (tmp_path / "out/bright.lines.txt").read_bytes()


def test_tusimple_lines_have_the_lists_rows_or_the_official_ones_scaled(model: OnnxModel, tmp_path: Path) -> None:
    path = tmp_path / "predictions.json"
    writer = TusimpleWriter(path)
    lanes = (np.array([[200.0, 719.0], [400.0, 320.0]]), np.array([[-50.0, 719.0], [50.0, 400.0]]))
    prediction = LanePrediction(lanes, (0.9, 0.5))
    blank = np.zeros((720, 1280, 3), np.uint8)
    writer.write(Frame("clips/1/20.jpg", blank, (710, 320, 300)), prediction, 12.5)
    writer.write(Frame("clips/2/20.jpg", blank), prediction, 250.0)
    writer.write(Frame("half.jpg", blank[:360, :640]), LanePrediction((), ()), 1.0)
    assert not path.exists()
    assert any("above 200 ms for 1 images" in line for line in writer.finish())
    first, second, half = read_tusimple_file(path, ReadReport())
    assert (first.h_samples, first.run_time_milliseconds) == ((710, 320, 300), 12.5)
    np.testing.assert_allclose(first.rows[0], [200 + 9 * 200 / 399, 400, -2], atol=0.01)
    assert second.h_samples == tuple(range(160, 720, 10))
    # Left of the image there is no point.
    assert second.rows[1][-1] == -2 and second.rows[1][second.h_samples.index(410)] > 0
    assert half.h_samples == tuple(range(80, 360, 5)) and len(half.rows) == 0


def test_coco_results_have_ids_from_1_that_images_json_tells(tmp_path: Path) -> None:
    writer = CocoWriter(tmp_path / "out", ("stop", "give-way"))
    none = SignPrediction(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
    one = SignPrediction(np.array([[1.5, 2, 11.5, 22.25]]), np.array([0.5]), np.array([1]))
    blank = np.zeros((40, 50, 3), np.uint8)
    writer.write(Frame("a.jpg", blank), none, 1.0)
    writer.write(Frame("b/ö.jpg", blank), one, 1.0)
    writer.finish()
    images = json.loads((tmp_path / "out/images.json").read_text())
    assert [(image["id"], image["file_name"]) for image in images["images"]] == [(1, "a.jpg"), (2, "b/ö.jpg")]
    assert images["categories"] == [{"id": 1, "name": "stop"}, {"id": 2, "name": "give-way"}]
    (result,) = json.loads((tmp_path / "out/results.json").read_text())
    assert result == {"image_id": 2, "category_id": 2, "bbox": [1.5, 2.0, 10.0, 20.25], "score": 0.5}


def test_drawings_show_the_lanes_where_they_are(model: OnnxModel, tmp_path: Path) -> None:
    picture(tmp_path / "in/x/ü.png", 64, 160)
    predict_frames(model, open_input(tmp_path / "in"), [DrawingWriter(tmp_path / "out", ())])
    drawn = read_image(tmp_path / "out/x/ü.jpg").astype(int)
    changed = np.abs(drawn - 90).max(axis=(0, 2)) > 60
    assert set(np.flatnonzero(changed)) <= {x + d for x in (40, 100) for d in range(-3, 4)}
    assert changed[40] and changed[100]


@pytest.mark.parametrize(("height", "width"), [(72, 128), (71, 127)])
def test_an_annotated_video_has_every_frame(model: OnnxModel, height: int, width: int, tmp_path: Path) -> None:
    source = open_input(clip(tmp_path / "v.mp4", height=height, width=width))
    assert source.video is not None
    path = tmp_path / "out/annotated.mp4"
    report = predict_frames(model, source, [VideoDrawingWriter(path, source.video.frames_per_second, ())])
    video = VideoReader(path)
    assert report.num_images == len(list(video)) == 12 and video.frames_per_second == 20
    assert abs(video.width - width) <= 1 and files(path.parent) == ["annotated.mp4"]


def test_formats_belong_to_tasks() -> None:
    assert check_format("lane", "auto", is_tusimple_list=True) == "tusimple"
    assert check_format("lane", "auto", is_tusimple_list=False) == "culane"
    assert check_format("sign", "auto", is_tusimple_list=False) == "coco"
    for task, format in (("lane", "coco"), ("sign", "culane"), ("lane", "tusimpel")):
        with pytest.raises(UserError, match=f'--format "{format}" is not for a {task} model'):
            check_format(task, format, is_tusimple_list=False)


# In what order.


class _Counting:
    """A predictor that notes how far reading is ahead of it, and waits in its first call for the next batch."""

    fixed_batch = None
    classes = ()
    description = ""

    def __init__(self, config: RunConfig, batch_size: int) -> None:
        self.config, self.batch_size = config, batch_size
        self.prepared, self.predicted, self.most_ahead = 0, 0, 0
        self.names: list[str] = []
        self.next_is_ready = threading.Event()

    def prepare(self, image: np.ndarray, name: str) -> str:
        self.prepared += 1
        self.most_ahead = max(self.most_ahead, self.prepared - self.predicted)
        if self.prepared == 2 * self.batch_size:
            self.next_is_ready.set()
        return name

    def predict(self, prepared: Sequence[str]) -> tuple[list[Prediction], float]:
        assert self.next_is_ready.wait(30), "nothing was read while the network computed"
        self.names += prepared
        self.predicted += len(prepared)
        return [LanePrediction((), ()) for _ in prepared], 0.0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_one_batch_and_no_more_is_read_while_the_network_computes(batch_size: int, tmp_path: Path) -> None:
    for number in range(10):
        picture(tmp_path / "in" / f"{number}.png")
    predictor = _Counting(CONFIG, batch_size)
    report = predict_frames(predictor, open_input(tmp_path / "in"), [], batch_size)
    assert report.num_images == 10 and predictor.names == [f"{number}.png" for number in range(10)]
    assert batch_size < predictor.most_ahead <= 2 * batch_size


def test_what_fails_while_reading_ahead_is_raised_after_what_is_done(model: OnnxModel, tmp_path: Path) -> None:
    class Broken(Input):
        def __iter__(self) -> Iterator[Frame]:
            yield Frame("a.jpg", np.full((72, 128, 3), 90, np.uint8))
            raise UserError("b.mp4: not one frame can be read")

    with pytest.raises(UserError, match=r"b\.mp4: not one frame"):
        predict_frames(model, Broken("video", 2), [CulaneWriter(tmp_path / "out")])
    assert files(tmp_path / "out") == ["a.lines.txt"]


# What goes wrong on the way.


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_an_unreadable_image_is_told_and_the_others_are_done(batch_size: int, model: OnnxModel, tmp_path: Path) -> None:
    for name in ("1.jpg", "2.jpg", "3.jpg", "4.jpg"):
        picture(tmp_path / "in" / name)
    data = (tmp_path / "in/2.jpg").read_bytes()
    (tmp_path / "in/2.jpg").write_bytes(data[: len(data) // 2])
    (tmp_path / "in/4.jpg").write_bytes(b"")
    told: list[str] = []
    report = predict_frames(
        model, open_input(tmp_path / "in"), [CulaneWriter(tmp_path / "out")], batch_size, told.append
    )
    assert report.num_images == 2 and len(report.problems) == 2
    assert [f"cannot be predicted: {problem}" for problem in report.problems] == told
    assert "2.jpg: image is cut short" in told[0] and "4.jpg: image file is empty" in told[1]
    assert files(tmp_path / "out") == ["1.lines.txt", "3.lines.txt"]


class _Interrupted(Input):
    """Ctrl-C comes while the third frame is read."""

    def __iter__(self) -> Iterator[Frame]:
        for number in range(2):
            yield Frame(f"v.mp4/{number:05d}.jpg", np.full((72, 128, 3), 90, np.uint8))
        raise KeyboardInterrupt


def test_ctrl_c_keeps_what_is_done_whole(model: OnnxModel, tmp_path: Path) -> None:
    out = tmp_path / "out"
    writers: list[Writer] = [
        CulaneWriter(out),
        TusimpleWriter(out / "predictions.json"),
        VideoDrawingWriter(out / "annotated.mp4", 20.0, ()),
    ]
    report = predict_frames(model, _Interrupted("video", 10), writers)
    assert report.interrupted and report.num_images == 2
    assert len(read_tusimple_file(out / "predictions.json", ReadReport())) == 2
    assert len(list(VideoReader(out / "annotated.mp4"))) == 2
    assert files(out / "v.mp4") == ["00000.lines.txt", "00001.lines.txt"]
    assert not list(out.rglob(".*"))


def test_a_full_disk_is_one_line(model: OnnxModel, small_disk: Path, tmp_path: Path) -> None:
    for number in range(40):
        path = tmp_path / "in" / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (300, 300, 3), np.uint8)
        cv2.imwrite(str(path), noise)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); make room"):
        predict_frames(model, open_input(tmp_path / "in"), [DrawingWriter(small_disk / "out", ())])
    # What has a name is whole.
    drawn = sorted((small_disk / "out").glob("*.jpg"))
    assert drawn and all(read_image(path).shape == (300, 300, 3) for path in drawn)
    shutil.rmtree(small_disk / "out")


def test_a_video_that_ends_early_is_told(tmp_path: Path) -> None:
    path = clip(tmp_path / "v.avi", frames=60)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    reader = VideoReader(path)
    count = len(list(reader))
    assert 0 < count < 60
    assert reader.notes == [f"{path}: {count} frames could be read, the file claims 60"]


def test_a_video_that_does_not_fit_on_the_disk_is_not_taken_for_whole(small_disk: Path) -> None:
    writer = VideoWriter(small_disk / "v.mp4", 480, 640, 20.0)
    random = np.random.default_rng(0)
    with pytest.raises(UserError, match=r"v\.mp4: .* frames were written, but .* can be read"):
        for _ in range(30):
            writer.write(random.integers(0, 255, (480, 640, 3), np.uint8))
        writer.finish()
    assert files(small_disk) == []


def test_the_time_is_told_by_parts_that_make_up_the_whole(model: OnnxModel, tmp_path: Path) -> None:
    for number in range(5):
        picture(tmp_path / "in" / f"{number}.jpg")
    report = predict_frames(model, open_input(tmp_path / "in"), [CulaneWriter(tmp_path / "out")])
    assert tuple(report.seconds) == PARTS and all(seconds > 0 for seconds in report.seconds.values())
    assert report.images_per_second == pytest.approx(5 / sum(report.seconds.values()))
    shares = [int(text.split()[-2]) for text in report.timing().partition(": ")[2].split(", ")]
    assert sum(shares) == pytest.approx(100, abs=2)
