"""Generated sign scenes: same bytes everywhere, boxes tight on what shows, every class, the promised mixture."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.data.generated import SIGN_RENDERER_VERSION, render_sign_scene
from perception.data.generated.render import render
from perception.data.generated.road import Camera, RoadShape, View
from perception.data.generated.scene import Scene, Vehicle, draw_scene
from perception.data.generated.sign_faces import LOOK_ALIKES, NUM_VARIANTS, PLATE, face, shape_of
from perception.data.generated.sign_render import (
    LEAST_CONTRAST,
    SMALLEST_SIDE_PIXELS,
    VISIBLE_SHARE,
    SeenFace,
    render_signs,
)
from perception.data.generated.sign_scene import SUPPORTS, Board, Support, draw_supports
from perception.data.generated.sign_sheet import main
from perception.data.signs.classes import GTSDB_CLASSES, GTSDB_MIRRORED
from perception.data.signs.sample import SignTruth
from perception.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = [(320, 800), (200, 640), (400, 680)]


def digest(indices: range) -> str:
    """Of pictures and labels of some scenes of seed 3."""
    whole = hashlib.sha256()
    for index in indices:
        sample = render_sign_scene(3, index)
        for array in (sample.image, sample.truth.boxes, sample.truth.labels, sample.truth.ignored):
            whole.update(array.tobytes())
    return whole.hexdigest()


def open_road() -> Scene:
    """A straight, level, empty road on an overcast or clear day, seen without roll."""
    scene = next(s for s in (draw_scene(0, index) for index in itertools.count()) if s.category == "normal")
    return dataclasses.replace(
        scene, vehicles=(), marks=(), bridge_metres=None, night=False, wet=False, rain=0.0, bonnet_fraction=0.0,
        haze_metres=3000.0, setting="rural", camera=Camera(1.4, 0.8, 0.42, 0.0), road=RoadShape(0.0, 0.0, 0.0, 0.0),
        asphalt_left_metres=-4.0, asphalt_right_metres=4.0,
    )  # fmt: skip


def board(name: str = "stop", width: float = 0.9, above: float = 2.0, right: float = 0.0) -> Board:
    return Board(name, shape_of(name), 0, right, above, width, 0.0, 0.0, 0.0, 0.0, 0.0, None)


def post(offset: float, distance: float, *boards: Board) -> Support:
    return Support("post", offset, distance, boards or (board(),), 0.8, None, None, 7)


def at_size(scene: Scene, height: int = 320, width: int = 800) -> View:
    return View(scene.camera, scene.road, height, width)


# --- the same bytes everywhere ---------------------------------------------------------------------------------------


def test_scene_does_not_depend_on_order_or_global_random_state() -> None:
    forward = [render_sign_scene(1, index) for index in range(4)]
    np.random.seed(99)
    backward = [render_sign_scene(1, index) for index in reversed(range(4))][::-1]
    for a, b in zip(forward, backward, strict=True):
        assert a.image.dtype == np.uint8 and a.image.shape == (320, 800, 3) and a.image.flags.c_contiguous
        assert np.array_equal(a.image, b.image)
        assert np.array_equal(a.truth.boxes, b.truth.boxes) and np.array_equal(a.truth.labels, b.truth.labels)
        assert np.array_equal(a.truth.ignored, b.truth.ignored)
    assert not np.array_equal(forward[0].image, render_sign_scene(2, 0).image)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 4])
def test_another_process_and_thread_count_give_the_same_bytes(num_threads: int) -> None:
    program = (
        f"import cv2; cv2.setNumThreads({num_threads})\n"
        "from tests.perception.test_generated_signs import digest\nprint(digest(range(6)))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    assert other.stdout.strip() == digest(range(6))


def test_without_signs_the_scene_is_the_lane_scene() -> None:
    """What is drawn for signs takes no draw of what is drawn for lanes."""
    for index in range(12):
        scene = draw_scene(6, index)
        view = at_size(scene, 160, 400)
        image, faces = render_signs(scene, view, ())
        assert not faces
        assert np.array_equal(image, render(scene, view))


# --- boxes -----------------------------------------------------------------------------------------------------------


def check_truth(truth: SignTruth, height: int, width: int) -> None:
    assert (truth.height, truth.width) == (height, width)
    assert truth.boxes.dtype == truth.ignored.dtype == np.float64 and truth.labels.dtype == np.int64
    assert truth.boxes.shape == (len(truth.labels), 4) and truth.ignored.shape[1:] == (4,)
    for boxes in (truth.boxes, truth.ignored):
        assert np.isfinite(boxes).all() and (boxes >= 0).all()
        assert (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
        assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert (truth.boxes[:, 2:] - truth.boxes[:, :2] >= SMALLEST_SIDE_PIXELS).all()
    assert ((truth.labels >= 0) & (truth.labels < len(GTSDB_CLASSES))).all()
    assert truth.category not in (None, "empty")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), index=st.integers(0, 2**20), size=st.sampled_from(SIZES))
def test_boxes_are_finite_inside_and_large_enough(seed: int, index: int, size: tuple[int, int]) -> None:
    sample = render_sign_scene(seed, index, *size)
    assert sample.image.shape == (*size, 3)
    assert sample.truth.name == f"generated-{index:06d}"
    check_truth(sample.truth, *size)


@pytest.mark.parametrize("size", [(64, 64), (96, 256), (800, 1360)])
def test_other_sizes_render(size: tuple[int, int]) -> None:
    for index in range(3):
        sample = render_sign_scene(0, index, *size)
        assert sample.image.shape == (*size, 3)
        check_truth(sample.truth, *size)


def test_boxes_grow_with_the_image() -> None:
    """The scene is the same at another size of the same shape: boxes of faces that nothing hides keep their place."""
    compared = 0
    for index in range(8):
        scene = draw_scene(4, index)
        small, large = (
            [found for found in render_signs(scene, at_size(scene, *size), draw_supports(scene))[1]
             if found.visible_share > 0.95]
            for size in ((320, 800), (640, 1600))
        )  # fmt: skip
        for found in small:
            boxes = np.array([other.box for other in large if other.label == found.label]) / 2
            if len(boxes):
                compared += 1
                assert np.abs(boxes - found.box).max(axis=1).min() < 0.6
    assert compared > 8


@pytest.mark.parametrize("roll", [0.0, 0.03])
@pytest.mark.parametrize("name", ["speed-limit-50", "danger", "stop", "priority-road", "keep-left"])
@pytest.mark.parametrize(("distance", "yaw", "tilt"), [(9.0, 0.0, 0.0), (14.0, 0.6, 0.15), (24.0, -0.3, -0.1)])
def test_the_box_is_tight_on_what_changes(name: str, distance: float, yaw: float, tilt: float, roll: float) -> None:
    """A shadow over the face alone changes pixels out to the box and no farther, but for blur."""
    scene = dataclasses.replace(open_road(), camera=Camera(1.4, 0.8, 0.42, roll))
    view = at_size(scene)
    bright = dataclasses.replace(board(name, 0.9, 2.3), yaw_radians=yaw, tilt_radians=tilt)
    dark = dataclasses.replace(bright, shade_edge=(0.0, -5.0))
    pictures = []
    for plate in (bright, dark):
        picture, faces = render_signs(scene, view, (post(3.5, distance, plate),))
        pictures.append(picture.astype(int))
        assert [found.label for found in faces] == [GTSDB_CLASSES.index(name)] and faces[0].labelled
        assert faces[0].visible_share > 0.95
    changed = np.abs(pictures[0] - pictures[1]).max(axis=2) > 24
    rows, columns = np.nonzero(changed)
    bounds = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    assert np.abs(bounds - faces[0].box).max() < 2.0


def test_a_face_that_leaves_the_image_has_a_box_up_to_its_edge() -> None:
    scene = open_road()
    view = at_size(scene)
    edge = 400 / view.focal * 10.0
    for beyond, labelled in ((-0.2, True), (0.25, False), (2.0, None)):
        faces = render_signs(scene, view, (post(edge + beyond, 10.0),))[1]
        if labelled is None:
            assert not faces
            continue
        assert faces[0].labelled is labelled
        assert faces[0].box[2] == 800.0
        # A disc's or octagon's share beyond a chord, near enough that of its square.
        assert faces[0].visible_share == pytest.approx((0.45 - beyond) / 0.9, abs=0.06)


# --- what hides a sign -----------------------------------------------------------------------------------------------


def lorry(offset: float, distance: float) -> Vehicle:
    return Vehicle(offset, distance, "truck", (200, 200, 60), False, False)


def test_a_vehicle_before_a_sign_hides_it() -> None:
    scene = open_road()
    view = at_size(scene)
    sign = post(3.0, 24.0)
    whole = render_signs(scene, view, (sign,))[1][0]
    assert whole.labelled and whole.visible_share > 0.97
    for offset, expected in ((0.225, "partly"), (1.5, "hidden")):
        faces = render_signs(dataclasses.replace(scene, vehicles=(lorry(offset, 12.0),)), view, (sign,))[1]
        if expected == "hidden":
            assert not any(found.labelled for found in faces)
        else:
            assert faces and faces[0].visible_share < 0.8
            assert faces[0].box[0] > whole.box[0] + 2 and faces[0].box[2] == pytest.approx(whole.box[2], abs=0.1)


def test_a_vehicle_beyond_a_sign_does_not() -> None:
    scene = open_road()
    view = at_size(scene)
    sign = post(3.0, 12.0)
    image, faces = render_signs(dataclasses.replace(scene, vehicles=(lorry(6.0, 24.0),)), view, (sign,))
    assert faces[0].visible_share > 0.97
    alone = render_signs(scene, view, (sign,))[0]
    x1, y1, x2, y2 = (round(value) for value in faces[0].box)
    inner = (slice(y1 + 4, y2 - 4), slice(x1 + 4, x2 - 4))
    assert np.abs(image[inner].astype(int) - alone[inner].astype(int)).mean() < 6


def test_branches_poles_and_nearer_signs_hide_parts() -> None:
    scene = open_road()
    view = at_size(scene)
    sign = post(3.0, 14.0)
    hidden = {
        "branch": (dataclasses.replace(sign, branch=(0.3, 2.0, 0.8)),),
        "pole": (dataclasses.replace(sign, pole_metres=0.1),),
        "sign": (sign, dataclasses.replace(sign, offset_metres=2.6, distance_metres=12.0)),
    }
    for kind, supports in hidden.items():
        found = render_signs(scene, view, supports)[1][0]
        assert 0.2 < found.visible_share < 0.96, kind


def test_age_light_and_motion_change_a_sign_but_not_its_box() -> None:
    scene = open_road()
    view = at_size(scene)
    plate = board("speed-limit-50", 0.9, 2.3)

    def inside(support: Support) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        image, (found,) = render_signs(scene, view, (support,))
        assert found.box == pytest.approx((x1, y1, x2, y2))
        return image[round(y1) + 2 : round(y2) - 2, round(x1) + 2 : round(x2) - 2].astype(float)

    support = post(6.0, 10.0, plate)
    x1, y1, x2, y2 = render_signs(scene, view, (support,))[1][0].box
    plain = inside(support)
    faded = inside(post(6.0, 10.0, dataclasses.replace(plate, fading=1.0)))
    dirty = inside(post(6.0, 10.0, dataclasses.replace(plate, dirt=1.0)))
    against_the_light = inside(dataclasses.replace(support, light=0.0))
    assert np.ptp(faded, axis=2).mean() < 0.7 * np.ptp(plain, axis=2).mean()
    assert dirty.mean() < 0.8 * plain.mean() and against_the_light.mean() < 0.8 * plain.mean()
    # The variant draws how far the sign moves while the shutter is open.
    variants = [inside(dataclasses.replace(support, variant=variant)) for variant in range(24)]
    sharpness = [np.abs(np.diff(pixels, axis=1)).mean() for pixels in variants]
    # Were it nothing, only the light on the plate would differ: .88.
    assert min(sharpness) < 0.75 * max(sharpness)


def test_the_rule_of_what_is_labelled() -> None:
    seen = SeenFace(3, (10.0, 10.0, 30.0, 30.0), 1.0, 200.0)
    assert seen.labelled
    for change in (
        {"box": (10.0, 10.0, 10.0 + SMALLEST_SIDE_PIXELS - 0.1, 30.0)},
        {"box": (10.0, 10.0, 30.0, 10.0 + SMALLEST_SIDE_PIXELS - 0.1)},
        {"visible_share": VISIBLE_SHARE - 0.01},
        {"contrast": LEAST_CONTRAST - 1},
    ):
        assert not dataclasses.replace(seen, **change).labelled  # type: ignore[arg-type]
    assert dataclasses.replace(seen, visible_share=VISIBLE_SHARE, contrast=LEAST_CONTRAST).labelled


def test_what_falls_short_is_ignored_not_forgotten() -> None:
    scene = open_road()
    far = render_signs(scene, at_size(scene), (post(4.0, 120.0),))[1]
    assert len(far) == 1 and not far[0].labelled
    misty = dataclasses.replace(scene, haze_metres=8.0)
    lost = render_signs(misty, at_size(scene), (post(3.5, 30.0),))[1]
    assert len(lost) == 1 and lost[0].contrast < LEAST_CONTRAST and not lost[0].labelled
    # As small images make all signs small, theirs are ignored regions.
    truths = [render_sign_scene(0, index, 64, 160).truth for index in range(12)]
    assert sum(len(truth.ignored) for truth in truths) > 10


def test_no_look_alike_has_a_box() -> None:
    scene = open_road()
    view = at_size(scene)
    for name in (*LOOK_ALIKES, PLATE):
        image, faces = render_signs(scene, view, (post(3.5, 12.0, board(name)),))
        assert not faces, name
        assert np.abs(image.astype(int) - render(scene, view).astype(int)).max(axis=2).max() > 40, name


@pytest.mark.parametrize("kind", SUPPORTS)
@pytest.mark.parametrize("night", [False, True])
def test_each_support_shows_its_boards(kind: str, night: bool) -> None:
    scene = dataclasses.replace(open_road(), night=night)
    above = 5.8 if kind == "gantry" else 2.2
    support = dataclasses.replace(post(3.0, 26.0, board("no-entry", 1.0, above)), kind=kind)
    faces = render_signs(scene, at_size(scene), (support,))[1]
    assert [found.labelled for found in faces] == [True]


# --- faces -----------------------------------------------------------------------------------------------------------


def shown(name: str, variant: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """A face on grey at 32 pixels, where a detector has to tell it from others."""
    picture, alpha = face(name, variant).levels[3]
    weight = alpha[..., None] / 255
    return np.asarray(picture * weight + 104 * (1 - weight), np.float64)


def test_each_class_has_a_face_of_its_own() -> None:
    faces = {name: shown(name) for name in (*GTSDB_CLASSES, *LOOK_ALIKES)}
    for (a, first), (b, second) in itertools.combinations(faces.items(), 2):
        worst = np.abs(cv2.blur(first, (3, 3)) - cv2.blur(second, (3, 3))).max(axis=2)
        assert np.sort(worst.ravel())[-12:].mean() > 30, (a, b)


def test_variants_differ_and_all_levels_agree() -> None:
    for name in GTSDB_CLASSES:
        assert not np.array_equal(shown(name, 0), shown(name, NUM_VARIANTS - 1))
        drawn = face(name, 1)
        for picture, alpha in drawn.levels:
            assert picture.shape == (*alpha.shape, 3) and 0.25 < (alpha > 127).mean() < 0.85
        assert np.abs(drawn.outline).max() == pytest.approx(1.0, abs=0.02)


def test_mirror_images_are_those_of_the_class_map() -> None:
    """The faces as drawn agree with what a flip is said to do to each class."""
    for name, mirrored in GTSDB_MIRRORED.items():
        difference = np.abs(shown(name)[:, ::-1] - shown(mirrored))
        assert difference.mean() < 3, (name, mirrored)
    for name in ("keep-right", "ahead-or-left", "bend-left"):
        assert np.abs(shown(name)[:, ::-1] - shown(name)).mean() > 8, name


# --- the mixture -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sizes_and_counts_are_those_promised() -> None:
    truths = [render_sign_scene(0, index).truth for index in range(240)]
    counts = [len(truth.boxes) for truth in truths]
    assert 2.0 <= np.mean(counts) <= 3.0
    assert 0.09 <= np.mean([count == 0 for count in counts]) <= 0.21
    boxes = np.concatenate([truth.boxes for truth in truths])
    sides = np.sqrt((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])) * 1360 / 800
    low, median, high = np.percentile(sides, [5, 50, 95])
    # GTSDB: 21, 39 and 92.
    assert 15 < low < 25 and 33 < median < 44 and 65 < high < 110
    ratio = np.median((boxes[:, 2] - boxes[:, 0]) / (boxes[:, 3] - boxes[:, 1]))
    assert 0.93 < ratio < 1.08
    assert 0 < sum(len(truth.ignored) for truth in truths) < 0.2 * len(boxes)


def test_every_class_support_and_look_alike_stands_often_enough() -> None:
    supports = [support for index in range(900) for support in draw_supports(draw_scene(5, index))]
    names = Counter(board.name for support in supports for board in support.boards)
    classes = np.array([names[name] for name in GTSDB_CLASSES])
    assert classes.min() > 0.4 * classes.mean() and classes.max() < 2.0 * classes.mean()
    for name in (*LOOK_ALIKES, PLATE):
        assert names[name] >= 15, name
    assert set(Counter(support.kind for support in supports)) == set(SUPPORTS)
    assert sum(len(support.boards) > 1 for support in supports) / len(supports) > 0.3
    for share in (sum(s.branch is not None for s in supports), sum(s.pole_metres is not None for s in supports)):
        assert share / len(supports) > 0.02


# --- data set, command, mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((-1, 0, 320, 800), "seed"),
        ((0, -1, 320, 800), "index"),
        ((0, 0, 10, 800), "height"),
        ((0, 0, 320, 9999), "width"),
    ],
)
def test_mistakes_name_the_field(arguments: tuple[int, int, int, int], named: str) -> None:
    with pytest.raises(UserError, match=named):
        render_sign_scene(*arguments)


def test_sheet_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sheet.png"
    assert main(["--out", str(out), "--count", "5", "--tile-width", "200"]) == 0
    assert cv2.imread(str(out)).shape == (160, 800, 3)
    assert main(["--out", str(out), "--faces"]) == 0
    assert cv2.imread(str(out)).shape[1] > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]
    assert main(["--out", str(tmp_path / "no" / "sheet.png")]) == 2
    assert main(["--out", str(tmp_path / "sheet.gif")]) == 2
    assert main(["--out", str(out), "--seed", "-1"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_speed_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints processor time a scene; asserts nothing of it, as the machine may be busy."""
    seconds = []
    for index in range(20):
        start = time.process_time()
        render_sign_scene(11, index)
        seconds.append(time.process_time() - start)
    with capsys.disabled():
        print(f"\ngenerated signs: median {1000 * float(np.median(seconds)):.1f} ms of processor time at 320x800")


def test_signs_change_only_with_the_version() -> None:
    boards = [board.name for i in range(40) for support in draw_supports(draw_scene(0, i)) for board in support.boards]
    digest_of_names = hashlib.sha256(" ".join(boards).encode()).hexdigest()[:16]
    assert (SIGN_RENDERER_VERSION, digest_of_names) == (1, "6f4d46a9b2fec7b9")
