"""Generated scenes: same bytes everywhere, labels on the paint, the promised mixture."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.data.generated import SCENE_STYLES, GeneratedScenes, render_scene, scene_truth
from perception.data.generated.contact_sheet import main
from perception.data.generated.light import draw_light
from perception.data.generated.render import render
from perception.data.generated.road import View
from perception.data.generated.scene import (
    CATEGORIES,
    LINE_STYLES,
    MARK_KINDS,
    GroundMark,
    LineMarking,
    Scene,
    Strip,
    Variety,
    Vehicle,
    draw_scene,
)
from perception.data.generated.truth import h_samples, label_scene
from perception.data.generated.variety import draw_varied_scene
from perception.data.sample import LaneDataset, LaneTruth
from perception.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = [(320, 800), (590, 1640), (720, 1280)]
KINDS = ("car", "suv", "van", "truck", "bus", "motorcycle")


def digest(indices: range) -> str:
    """Of pictures and labels of some scenes of seed 3."""
    whole = hashlib.sha256()
    for index in indices:
        sample = render_scene(3, index)
        whole.update(sample.image.tobytes())
        for lane in sample.truth.lanes:
            whole.update(lane.tobytes())
    return whole.hexdigest()


def clean(scene: Scene) -> Scene:
    """The scene on a clear day with fresh solid paint and nothing in the way."""
    lines = tuple(
        dataclasses.replace(line, wear=0.0, missing_metres=(), style="double_solid" if i % 3 == 1 else "solid")
        for i, line in enumerate(scene.lines)
    )
    return dataclasses.replace(
        scene, category="normal", lines=lines, vehicles=(), marks=(), bridge_metres=None, night=False, wet=False,
        rain=0.0, bonnet_fraction=0.0, haze_metres=3000.0, variety=None,
    )  # fmt: skip


def at_size(scene: Scene, height: int = 320, width: int = 800) -> View:
    return View(scene.camera, scene.road, height, width)


# --- the same bytes everywhere ---------------------------------------------------------------------------------------


def test_scene_does_not_depend_on_order_or_global_random_state() -> None:
    forward = [render_scene(1, index).image for index in range(4)]
    np.random.seed(99)
    backward = [render_scene(1, index).image for index in reversed(range(4))][::-1]
    for a, b in zip(forward, backward, strict=True):
        assert a.dtype == np.uint8 and a.shape == (320, 800, 3) and a.flags.c_contiguous
        assert np.array_equal(a, b)
    assert not np.array_equal(forward[0], render_scene(2, 0).image)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 4])
def test_another_process_and_thread_count_give_the_same_bytes(num_threads: int) -> None:
    program = (
        f"import cv2; cv2.setNumThreads({num_threads})\n"
        "from tests.perception.test_generated import digest\nprint(digest(range(6)))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    assert other.stdout.strip() == digest(range(6))


def test_rendering_leaves_opencv_threads_alone() -> None:
    before = cv2.getNumThreads()
    render_scene(0, 0)
    assert cv2.getNumThreads() == before


# --- labels ----------------------------------------------------------------------------------------------------------


def check_truth(truth: LaneTruth, height: int, width: int) -> None:
    assert (truth.height, truth.width) == (height, width)
    assert truth.h_samples == h_samples(height)
    assert truth.category in CATEGORIES
    assert (truth.category == "empty") == (not truth.lanes)
    rows = set(truth.h_samples or ())
    for lane in truth.lanes:
        assert lane.dtype == np.float64 and lane.ndim == 2 and lane.shape[1] == 2 and len(lane) >= 2
        assert np.isfinite(lane).all()
        assert (np.diff(lane[:, 1]) == -4).all(), "every row from bottom to top, none left out"
        assert set(lane[:, 1]) <= rows
        assert lane[0, 1] - lane[-1, 1] >= 20
        assert lane[:, 0].min() >= 0 and lane[:, 0].max() <= width - 1
    # Left to right: lanes of a road never cross.
    for left, right in zip(truth.lanes, truth.lanes[1:], strict=False):
        common, i, j = np.intersect1d(left[:, 1], right[:, 1], return_indices=True)
        assert (left[i, 0] < right[j, 0]).all(), f"rows {common}"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), index=st.integers(0, 2**20), size=st.sampled_from(SIZES))
def test_labels_are_sorted_finite_and_inside(seed: int, index: int, size: tuple[int, int]) -> None:
    for style in SCENE_STYLES:
        check_truth(scene_truth(seed, index, *size, style), *size)
    truth = scene_truth(seed, index, *size)
    assert truth.name == f"generated-{index:06d}"


@pytest.mark.parametrize("size", [(64, 64), (96, 256), (590, 1640)])
def test_other_sizes_render(size: tuple[int, int]) -> None:
    for index, style in itertools.product(range(3), SCENE_STYLES):
        sample = render_scene(0, index, *size, style)
        assert sample.image.shape == (*size, 3)
        check_truth(sample.truth, *size)


def test_cheap_truth_is_the_rendered_truth() -> None:
    for index in range(6):
        cheap, full = scene_truth(4, index), render_scene(4, index).truth
        assert cheap.category == full.category and len(cheap.lanes) == len(full.lanes)
        for a, b in zip(cheap.lanes, full.lanes, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("draw", [draw_scene, draw_varied_scene])
def test_label_lies_on_the_paint_within_a_pixel(draw: Callable[[int, int], Scene]) -> None:
    """The paint is what a picture with lines has over the same one without; its middle is the label."""
    errors: list[float] = []
    for index in range(24):
        scene = clean(draw(7, index))
        view = at_size(scene)
        painted = render(scene, view).astype(np.float64).sum(axis=2)
        bare = render(dataclasses.replace(scene, lines=()), view).astype(np.float64).sum(axis=2)
        paint = np.clip(painted - bare - 12, 0, None)
        labels = label_scene(scene, view).lanes
        xs = {y: [lane[lane[:, 1] == y, 0][0] for lane in labels if y in lane[:, 1]] for y in h_samples(320)}
        for lane in labels:
            for x, y in lane:
                row = int(y)
                spread = [abs(other - x) for other in xs[row] if other != x]
                reach = min(0.43 * min(spread, default=140.0), 60)
                left, right = round(x - reach), round(x + reach)
                if reach < 4 or left < 0 or right > 799:
                    continue
                profile = paint[row, left : right + 1]
                if profile.max() > 120:
                    # Middle between the outer edges, which a double line's two stripes have too.
                    seen = np.flatnonzero(profile > profile.max() / 3)
                    errors.append((seen[0] + seen[-1]) / 2 + left - x)
    assert len(errors) > 1200
    assert abs(float(np.mean(errors))) < 0.1
    assert float(np.percentile(np.abs(errors), 97.5)) < 1.0


def test_paint_peaks_at_the_label_on_clean_days() -> None:
    """On inner solid lines on an overcast day, the label's pixel is clearly brighter than the asphalt beside it."""
    brighter, points = 0, 0
    for index in range(120):
        scene = draw_scene(8, index)
        if scene.category != "normal" or draw_light(scene).casts_shadows:
            continue
        scene = dataclasses.replace(clean(scene), lines=tuple(
            dataclasses.replace(line, style="solid", wear=0.0, missing_metres=()) for line in scene.lines
        ))  # fmt: skip
        view = at_size(scene)
        grey = render(scene, view).astype(np.float64).sum(axis=2)
        for lane in label_scene(scene, view).lanes[1:-1]:
            near = lane[(lane[:, 1] > 200) & (lane[:, 0] > 150) & (lane[:, 0] < 650)]
            for x, y in near:
                metre = view.focal / float(view.distance_at(np.array([y + view.pad_y]))[0])
                row, column = grey[int(y)], round(x)
                if 0.35 * metre < 2:
                    continue
                close, far = round(0.35 * metre), round(0.6 * metre) + 1
                beside = max(row[column - far : column - close].mean(), row[column + close : column + far].mean())
                points += 1
                brighter += bool(row[column] > beside + 15)
    assert points > 300
    assert brighter / points > 0.97


def test_labels_go_on_behind_vehicles_and_missing_paint() -> None:
    scene = draw_scene(0, 9)
    bare = dataclasses.replace(
        scene, vehicles=(), lines=tuple(dataclasses.replace(line, missing_metres=()) for line in scene.lines)
    )
    assert scene.vehicles
    hidden = dataclasses.replace(
        scene, lines=tuple(dataclasses.replace(line, missing_metres=((5.0, 60.0),)) for line in scene.lines)
    )
    for a, b in zip(label_scene(bare, at_size(bare)).lanes, label_scene(hidden, at_size(hidden)).lanes, strict=True):
        assert np.array_equal(a, b)


def test_labels_end_at_a_crest() -> None:
    found = 0
    for index in range(200):
        scene = draw_scene(2, index)
        view = at_size(scene)
        if view.end_metres > 60 or not scene.lines:
            continue
        found += 1
        for lane in label_scene(scene, view).lanes:
            tops = view.to_image(view.project(np.array([-40.0, 40.0]), view.end_metres))[:, 1]
            assert lane[-1, 1] >= tops.min() - 1
    assert found >= 2


# --- the mixture -----------------------------------------------------------------------------------------------------


def test_mixture_of_lane_counts_and_categories() -> None:
    truths = [scene_truth(0, index) for index in range(300)]
    lanes = Counter(len(truth.lanes) for truth in truths)
    assert set(lanes) == set(range(7))
    assert 0.01 <= lanes[0] / 300 <= 0.08
    assert sum(lanes[n] for n in (2, 3, 4, 5)) / 300 >= 0.75
    categories = Counter(truth.category for truth in truths)
    assert set(categories) == set(CATEGORIES)
    assert 0.35 <= categories["normal"] / 300 <= 0.52


def test_every_option_is_drawn() -> None:
    scenes = [draw_scene(0, index) for index in range(700)]
    assert {line.style for scene in scenes for line in scene.lines} == set(LINE_STYLES)
    assert {line.yellow for scene in scenes for line in scene.lines} == {True, False}
    assert any(line.missing_metres for scene in scenes for line in scene.lines)
    assert {vehicle.kind for scene in scenes for vehicle in scene.vehicles} == set(KINDS)
    assert {vehicle.oncoming for scene in scenes for vehicle in scene.vehicles} == {True, False}
    assert {mark.kind for scene in scenes for mark in scene.marks} == set(MARK_KINDS)
    assert {scene.setting for scene in scenes} == {"urban", "rural", "highway"}
    for name in ("night", "wet", "drives_on_right"):
        assert {getattr(scene, name) for scene in scenes} == {True, False}
    assert any(scene.bridge_metres for scene in scenes) and any(scene.bonnet_fraction for scene in scenes)
    assert max(len(scene.vehicles) for scene in scenes) >= 8


def flat_scene() -> Scene:
    """A level, straight scene by day, with lanes, to put single things on."""
    scene = clean(next(s for s in (draw_scene(0, i) for i in range(99)) if len(s.lines) >= 4 and not s.night))
    road = dataclasses.replace(scene.road, heading=0.0, curvature=0.0, curvature_rate=0.0, vertical_curves=())
    return dataclasses.replace(scene, road=road)


@pytest.mark.parametrize("kind", MARK_KINDS)
def test_each_mark_shows(kind: str) -> None:
    scene = flat_scene()
    centre = scene.lane_centres_metres[scene.own_lane]
    marks = tuple(GroundMark(kind, centre, 9.0, variant) for variant in range(6))
    with_marks = dataclasses.replace(scene, marks=marks)
    changed = np.abs(render(scene, at_size(scene)).astype(int) - render(with_marks, at_size(scene)).astype(int))
    assert (changed.max(axis=2) > 12).sum() > 60


@pytest.mark.parametrize("oncoming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("night", [False, True])
def test_each_vehicle_hides_what_is_behind_it(kind: str, oncoming: bool, night: bool) -> None:
    scene = dataclasses.replace(flat_scene(), night=night, wet=night)
    view = at_size(scene)
    offset = scene.lane_centres_metres[scene.own_lane]
    vehicle = Vehicle(offset, 15.0, kind, (200, 30, 30), oncoming, True)
    changed = np.abs(
        render(scene, view).astype(int) - render(dataclasses.replace(scene, vehicles=(vehicle,)), view).astype(int)
    ).max(axis=2)
    x, y = view.to_image(view.project(offset, 15.0, 0.7))
    half = view.focal / 15.0 * 0.25
    window = changed[int(y - half) : int(y + half), int(x - half) : int(x + half)]
    assert (window > 8).mean() > 0.5


@pytest.mark.parametrize("style", LINE_STYLES)
def test_each_line_style_paints_its_stripes(style: str) -> None:
    scene = flat_scene()
    line: LineMarking = dataclasses.replace(
        scene.lines[1], style=style, width_metres=0.15, gap_metres=0.2, dash_metres=3.0, period_metres=9.0
    )
    view = at_size(scene)
    only = dataclasses.replace(scene, lines=(line,))
    bare = dataclasses.replace(scene, lines=())
    paint = (render(only, view).astype(int) - render(bare, view).astype(int)).sum(axis=2) > 60
    middles = label_scene(only, view).lanes[0]
    left = right = centre = 0
    for x, y in middles[(middles[:, 1] > 200) & (middles[:, 0] > 20) & (middles[:, 0] < 780)]:
        metre = view.focal / float(view.distance_at(np.array([y + view.pad_y]))[0])
        left += int(paint[int(y), round(x - 0.175 * metre)])
        right += int(paint[int(y), round(x + 0.175 * metre)])
        centre += int(paint[int(y), round(x)])
    if style in ("solid", "dashed"):
        assert centre > 0 and left == right == 0
    else:
        assert left > 0 and right > 0
    if style == "solid_dashed":
        assert left > right
    if style == "dashed_solid":
        assert right > left


# --- style v2 --------------------------------------------------------------------------------------------------------


PLAIN = Variety(
    lane_brightness=(), strips=(), ambient=(1, 1, 1), beam_width=1.0, exposure=1.0, saturation=1.0, cast=(1, 1, 1),
    zoom_blur=0.0, vignette=0.0,
)  # fmt: skip


def varied(scene: Scene, **changes: object) -> Scene:
    even = (1.0,) * len(scene.lane_centres_metres)
    return dataclasses.replace(scene, variety=dataclasses.replace(PLAIN, **{"lane_brightness": even, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("night", [False, True])
def test_no_variety_is_the_first_style(night: bool) -> None:
    scene = dataclasses.replace(flat_scene(), night=night)
    np.testing.assert_array_equal(render(varied(scene), at_size(scene)), render(scene, at_size(scene)))


def test_strips_and_surfaces_lie_where_they_are_put() -> None:
    """Between the lines, by day: the strip alone is darker, the left lane alone is brighter."""
    scene = dataclasses.replace(flat_scene(), lines=())
    view = at_size(scene)
    plain = render(varied(scene), view).astype(int).sum(axis=2)
    own, other = (scene.lane_centres_metres[i] for i in (scene.own_lane, (scene.own_lane + 1) % 2))
    strip = render(varied(scene, strips=(Strip(own, 0.3, 0.5),)), view).astype(int).sum(axis=2) - plain
    bright = tuple(1.4 if centre == own else 1.0 for centre in scene.lane_centres_metres)
    lane = render(varied(scene, lane_brightness=bright), view).astype(int).sum(axis=2) - plain

    def at(picture: np.ndarray, offset: float) -> int:
        x, y = view.to_image(view.project(offset, 9.0))
        return int(picture[round(y), round(x)])

    assert at(strip, own) < -60 and abs(at(strip, own + 0.5)) < 12
    assert at(lane, own) > 60 and at(lane, own + 1.2) > 60 and abs(at(lane, other)) < 12


def test_the_other_camera_does_what_it_is_told() -> None:
    scene = flat_scene()
    view = at_size(scene)
    plain = render(scene, view).astype(float)
    dark = render(varied(scene, exposure=0.5), view).astype(float)
    assert 0.42 < dark.mean() / plain.mean() < 0.58
    grey = render(varied(scene, saturation=0.0), view).astype(float)
    # A tint of the whole picture is the camera's own; what differs from place to place is the scene's colour.
    assert np.ptp(grey, axis=2).std() < 0.3 * np.ptp(plain, axis=2).std()
    red = render(varied(scene, cast=(1.0, 0.4, 0.4)), view).astype(float).mean(axis=(0, 1))
    assert red[0] > 1.8 * red[1]
    corner, middle = (
        render(varied(scene, vignette=0.6), view)[part].mean() / plain[part].mean()
        for part in (np.s_[300:, :20], np.s_[150:170, 390:410])
    )
    assert corner < 0.6 and middle > 0.9
    blurred = render(varied(scene, zoom_blur=0.06), view).astype(float)
    sharpness = [np.abs(np.diff(picture, axis=1)).mean() for picture in (blurred, plain)]
    assert sharpness[0] < 0.9 * sharpness[1]


def test_a_dark_night_with_a_narrow_beam() -> None:
    scene = dataclasses.replace(flat_scene(), night=True)
    view = at_size(scene)
    usual = render(scene, view).astype(float)
    other = render(varied(scene, ambient=(0.2, 0.2, 0.2), beam_width=0.4), view).astype(float)
    x, y = (round(value) for value in view.to_image(view.project(-scene.road.lateral_metres, 9.0)))
    ahead, beside = np.s_[y - 5 : y + 5, x - 10 : x + 10], np.s_[y - 5 : y + 5, :20]
    assert other[ahead].mean() > 0.7 * usual[ahead].mean()
    assert other[beside].mean() < 0.5 * usual[beside].mean()


def test_the_second_style_is_more_varied() -> None:
    first, second = ([draw(0, index) for index in range(400)] for draw in (draw_scene, draw_varied_scene))
    assert all(a.lines == b.lines and a.road == b.road for a, b in zip(first, second, strict=True))
    assert sum(scene.night for scene in second) > 1.5 * sum(scene.night for scene in first)
    assert {scene.category for scene in second} == {scene.category for scene in first}
    stretches = [scene.camera.vertical_stretch for scene in second]
    assert min(stretches) < 0.66 and max(stretches) > 1.15
    assert all(scene.camera.vertical_stretch == 1 and scene.variety is None for scene in first)
    varieties = [scene.variety for scene in second if scene.variety is not None]
    assert len(varieties) == 400
    assert 0.2 < np.mean([bool(one.strips) for one in varieties]) < 0.7
    assert 0.2 < np.mean([len(set(one.lane_brightness)) > 1 for one in varieties]) < 0.5
    assert any(scene.bonnet_fraction > 0.3 for scene in second)
    for values in ([one.zoom_blur for one in varieties], [one.vignette for one in varieties]):
        assert 0.1 < np.mean(np.array(values) > 0) < 0.5


def test_an_unknown_style_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r'style "v3" is unknown.*v'):
        render_scene(0, 0, style="v3")


# --- data set, command, mistakes -------------------------------------------------------------------------------------


def test_data_set_counts_and_indexes() -> None:
    scenes: LaneDataset = GeneratedScenes(seed=0, first_index=100, count=120, height=160, width=400)
    truths = [scenes.truth(i) for i in range(len(scenes))]
    assert len(scenes) == scenes.report.images == 120
    assert scenes.report.lanes == sum(len(truth.lanes) for truth in truths)
    empty = sum(not truth.lanes for truth in truths)
    assert empty > 0 and scenes.report.anomalies.total() == empty
    assert truths[7].name == "generated-000107"
    assert np.array_equal(scenes.sample(7).image, render_scene(0, 107, 160, 400).image)
    others = GeneratedScenes(0, 100, 8, 160, 400, "v2")
    assert np.array_equal(others.sample(7).image, render_scene(0, 107, 160, 400, "v2").image)
    assert np.array_equal(others.truth(7).lanes[0], scene_truth(0, 107, 160, 400, "v2").lanes[0])
    with pytest.raises(IndexError):
        scenes.truth(120)


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
    for function in (render_scene, scene_truth):
        with pytest.raises(UserError, match=named):
            function(*arguments)


def test_empty_data_set_is_a_mistake() -> None:
    with pytest.raises(UserError, match="count"):
        GeneratedScenes(0, 0, 0)


def test_contact_sheet_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sheet.png"
    assert main(["--out", str(out), "--count", "5", "--tile-width", "200"]) == 0
    picture = cv2.imread(str(out))
    assert picture is not None and picture.shape == (160, 800, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]
    first = out.read_bytes()
    assert main(["--out", str(out), "--count", "5", "--tile-width", "200", "--style", "v2"]) == 0
    assert out.read_bytes() != first
    assert main(["--out", str(tmp_path / "no" / "sheet.png")]) == 2
    assert main(["--out", str(tmp_path / "sheet.gif")]) == 2
    assert main(["--out", str(out), "--seed", "-1"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_speed_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints processor time a scene; asserts nothing of it, as the machine may be busy."""
    seconds = []
    for index in range(20):
        start = time.process_time()
        render_scene(11, index)
        seconds.append(time.process_time() - start)
    with capsys.disabled():
        print(f"\ngenerated scenes: median {1000 * float(np.median(seconds)):.1f} ms of processor time at 320x800")


PARTS = {
    "v1": [
        [117, 129, 67, 93, 94, 100], [208, 214, 199, 88, 90, 96], [96, 112, 106, 96, 71, 71],
        [27, 33, 28, 49, 93, 58], [182, 204, 196, 115, 112, 105], [148, 142, 147, 99, 107, 111],
    ],
    "v2": [
        [120, 123, 83, 86, 92, 138], [156, 161, 151, 74, 75, 78], [62, 96, 86, 63, 54, 50],
        [12, 16, 13, 12, 24, 14], [181, 201, 195, 110, 107, 103], [79, 76, 93, 55, 57, 60],
    ],
}  # fmt: skip
"""Mean grey of six parts of each picture: coarse, so that it holds on another processor too."""
POINTS = {"v1": 4951, "v2": 4720}


@pytest.mark.parametrize("style", SCENE_STYLES)
def test_a_style_never_changes(style: str) -> None:
    """Who changes pictures or labels adds a style: caches are keyed by its name."""
    small = [render_scene(0, index, 160, 400, style).image for index in range(6)]
    parts = [cv2.resize(image, (3, 2), interpolation=cv2.INTER_AREA).mean(axis=2).ravel() for image in small]
    np.testing.assert_allclose(parts, PARTS[style], atol=1.1)
    lanes = [scene_truth(0, index, style=style).lanes for index in range(40)]
    assert "".join(str(len(each)) for each in lanes) == "3435242446224223452426232354634364344203"
    assert sum(len(lane) for each in lanes for lane in each) == POINTS[style]
